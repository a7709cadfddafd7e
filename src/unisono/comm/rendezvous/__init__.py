"""How processes meet and come to share a segment.

meeting.py         how a group is made: the first member leads, the others follow
leading.py         rank 0's part: receive the others, make the segment, hand it over
lobby.py           where a process receives those who come to make a group with it
membership.py      what a rank brings to the meeting, and what it has afterwards
announcements.py   where ranks that do not know each other announce themselves, and exchange texts
bounded_store.py   torch Stores that answer in time, or not at all
discovery.py       finding rank 0 by its announcement, and judging the others'
by_parent.py       where the children of one process meet
by_name.py         where processes that were started separately meet
unix_socket.py     one connection between two processes of this user
waiting.py         how long ranks wait for each other, and what they say meanwhile
"""
