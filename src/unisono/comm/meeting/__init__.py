"""How processes meet and get a shared segment.

board.py           where they leave texts for each other: a torch Store, or a file
roster.py          who takes part in a meeting and what each says, as one table on a board
identity.py        which ranks share a host, and the proof
network.py         the interface by which hosts reach each other
membership.py      how a process becomes a member of a new group: it leads, or follows rank 0
makings.py         whether the groups that ranks make at the same time fit together
outcome.py         whether a new group is made, settled once
survivors.py       which ranks survive a death, and form a new group
leading.py         rank 0's part: receive the others, make the segment, pass it on
announcements.py   how rank 0 of one host announces itself on a board
meeting_points.py  which file that is, for the children of one process, or by a name
unix_socket.py     connections between processes of this user, and the socket that accepts them
deadline.py        how long ranks wait for each other, and what they log meanwhile
"""
