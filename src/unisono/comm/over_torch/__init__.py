"""Any process group of torch (gloo, nccl, mpi) behind our interface, by the same rules.

torch_transport.py  the transport: collectives and messages
held_group.py       the process group itself, and which reductions its backends have
stream_executor.py  calls that a device runs, on a stream next to the caller's
faults.py           how such a group ends: one cause for all members
process_groups.py   torch groups that only their members make, in any order
stateless.py        groups outside torch's world, of processes that share a store
stores.py           torch's stores: for one machine, without a port; and the one at MASTER_ADDR
"""
