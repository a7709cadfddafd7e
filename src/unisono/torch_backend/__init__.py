"""The torch.distributed backend named "unisono" (docs/torch.md): a Communicator as torch sees it.

process_group.py     the class: a process group over a Communicator
creation.py          what torch calls to make a group, and when we refuse
backend.py           a group as a c10d Backend, for one device of many (torch 2.15)
going_on.py          torch's shrink_group and reconfigure (torch 2.15)
groups.py            groups that their members alone make, in any order, or outside torch's world
futures.py           works as torch knows them, and the Futures that DDP waits for
given_calls.py       how torch calls the methods: its signatures, and the short way into the engine
shared_buffers.py    memory that FSDP2 asks a backend for: shared tensors
flight_recorder.py   torch's Flight Recorder, where it is asked for
autoload.py          what torch calls at `import torch`
replacement.py       UNISONO_REPLACE: our groups for programs that name gloo
"""
