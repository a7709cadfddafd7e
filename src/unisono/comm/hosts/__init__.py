"""Ranks on several hosts: shared memory inside each, gloo between them.

identity.py        which ranks share a host, and the proof
network.py         the interface by which hosts talk, and gloo on it
control_line.py    a line between two processes, for what must not wait, and for silence
frames.py          what travels on it: authenticated messages
"""
