"""Ranks on several hosts: shared memory inside each, gloo between them.

identity.py        which ranks share a host, and the proof
network.py         the interface by which hosts talk, and gloo on it
control_line.py    a line from each host to each other one, for what must not wait
frames.py          what travels on it: authenticated messages
"""
