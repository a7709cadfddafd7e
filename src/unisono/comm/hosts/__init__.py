"""Ranks on several hosts: the engine inside each, UCX between them.

making.py             how a group over several hosts is made
hosts_transport.py    one member of it
going_on.py           how those who are left of it make another after a death
growing.py            how new processes of any host come into a group
identity.py           which ranks share a host, and the proof; placement.py: of one group
contacts.py           how each rank is reached: its UCX worker and its control line
sealed.py             what ranks tell each other through the store, under a secret
network.py            the interface by which hosts talk
ucx.py                which UCX carries data, and its settings
links.py              the control lines of a process, and what it hears and asks on them
control_line.py       lines for what must not wait behind data, and for silence
frames.py             what travels on them: authenticated messages
questions.py          what hosts ask each other over the lines; their clocks
gpus.py               CUDA tensors: NCCL's, or refused
link_speed.py         how fast the links are
"""
