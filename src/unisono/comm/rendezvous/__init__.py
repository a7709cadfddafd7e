"""How processes meet and come to share a segment.

unix_socket     one connection: framed messages, and descriptors beside them
waiting         how long ranks wait for each other, and what they say meanwhile
announcements   where ranks announce themselves: a file or a torch Store
membership      what a rank brings to a meeting, and what it has afterwards
by_parent       where ranks meet that one process has started
by_name         where processes meet that know a name
discovery       finding rank 0, and judging what others have announced
lobby           the meeting itself
"""
