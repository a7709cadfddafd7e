"""How processes meet and get a shared segment.

membership.py      how a process becomes a member of a new group: it leads, or follows rank 0
makings.py         whether the groups that ranks make at the same time fit together
survivors.py       which ranks survive a death, and form a new group
growing.py         how new processes join an existing group
leading.py         rank 0's part: receive the others, make the segment, pass it on
announcements.py   where ranks that do not know each other yet announce themselves
meeting_points.py  which file that is, for the children of one process, or by a name
unix_socket.py     connections between processes of this user, and the socket that accepts them
bounded_store.py   torch Stores that answer in time, and texts exchanged through one
roll_call.py       which processes of several hosts are present, through a torch Store
identity.py        which ranks share a host, and the proof
sealed.py          what ranks exchange through the store, sealed with a secret
network.py         the interface by which hosts reach each other
deadline.py        how long ranks wait for each other, and what they log meanwhile
"""
