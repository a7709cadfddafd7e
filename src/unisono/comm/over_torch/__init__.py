"""Any process group of torch (gloo, nccl, mpi) behind our interface, by the same rules.

communicator.py     the collectives; messages.py: point to point
group.py            what every call goes through: its meeting, its executor, its end
executors.py        calls that a device carries out, on a stream beside the caller's
faults.py           how such a group ends: one cause for all members
reductions.py       which reductions a backend has
transport.py        the few things that are asked of a process group
process_groups.py   groups of torch that their members alone make, in any order
stateless.py        groups outside torch's world, of processes that have a store in common
store.py            a torch Store for one machine, without a port
master_store.py     the one at MASTER_ADDR, without its silence
"""
