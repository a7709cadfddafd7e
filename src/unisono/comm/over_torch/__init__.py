"""Any process group of torch (gloo, nccl, mpi) behind our interface, by the same rules.

torch_transport.py  the transport: what every call goes through, collectives and messages
held_group.py       the process group itself, and which reductions its backends have
stream_executor.py  calls that a device carries out, on a stream beside the caller's
faults.py           how such a group ends: one cause for all members
process_groups.py   groups of torch that their members alone make, in any order
stateless.py        groups outside torch's world, of processes that have a store in common
stores.py           torch's stores: for one machine, without a port; and the one at MASTER_ADDR
"""
