"""Ranks on several hosts: shared memory inside each, gloo between them.

connect.py            how ranks that meet make a group, of one host or over several
making.py             how one over several is made; communicator.py: its collectives
group.py              one member: what every call goes through, and how the group ends
identity.py           which ranks share a host, and the proof; placement.py: of one group
meeting.py            how a call begins: all ranks compare; small calls are over with it
lanes.py              what large calls are made of
large_moves.py        all_gather, broadcast, all_to_all and their like
large_reductions.py   all_reduce, reduce, reduce_scatter; reductions.py: their arithmetic
messages.py           point to point; post_office.py: messages and receives that wait
gpus.py               CUDA tensors: NCCL's, or refused
any_source.py         receives from anybody, on this host or another
sealed.py             what ranks tell each other through the store, under a secret
network.py            the interface by which hosts talk, and gloo on it
ucx.py                which UCX carries data, and its settings
links.py              all connections of a process; link.py: one of them, by gloo
mailbox.py            what has arrived for a group
control_line.py       a line beside each connection, for what must not wait, and for silence
questions.py          what hosts ask each other over the lines; their clocks
call_records.py       what every call leaves behind, for whoever watches
link_speed.py         how fast the links are
frames.py             what travels on it: authenticated messages
causes.py             why a group has ended, told; local_failures.py: by the group of one host
"""
