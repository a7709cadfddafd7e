"""Ranks on several hosts: the engine inside each, UCX between them.

anywhere.py           which transport ranks get that meet on a board
making.py             how a group over several hosts is made
hosts_transport.py    one member of it
going_on.py           how the survivors form a new group after a death
growing.py            how new processes join a group, on one host or several
placement.py          where the members of one group are
contacts.py           how each rank is reached: its UCX worker and its control line
ucx.py                which UCX carries data, and its settings
links.py              the control lines of a process, and what it sends and receives on them
control_line.py       connections for urgent messages, and for detecting silence
frames.py             their messages, authenticated
questions.py          what hosts ask each other over the lines; their clocks
"""
