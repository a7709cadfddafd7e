"""The torch.distributed backend named "unisono" (docs/torch.md): a Communicator as a torch process
group.

process_group.py     the class: a process group over a Communicator
creation.py          what torch calls to make a group, and the cases that raise
backend.py           a group as a c10d Backend, for one device of many (torch 2.15)
groups.py            groups that only their members make, in any order, or outside torch's world
futures.py           works for torch, and the Futures that DDP waits for
given_calls.py       how torch calls the methods: its signatures, and the fast path into the engine
shared_buffers.py    memory that FSDP2 requests from a backend: shared tensors
autoload.py          what torch calls at `import torch`
replacement.py       UNISONO_REPLACE: our groups for programs that name gloo
"""
