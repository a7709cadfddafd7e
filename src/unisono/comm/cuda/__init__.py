"""Calls on CUDA tensors: ranks of one host that share a GPU; where each has its own, NCCL
(docs/cuda.md).

cuda_transport.py   the collectives of such a group; all_reduce.py: the most frequent one
staged_messages.py  point to point
calls.py            the stages of every call: meeting, choice of path, end
backward.py         works that start in a backward pass
first_call.py       the first call: the ranks exchange which GPUs they have
routing.py          which path the calls of a group take, by the GPUs of its ranks
staging.py          through pinned memory: small tensors, and memory that no peer can open
conducting.py       large ones: one rank, the conductor, works in all ranks' memory
regions.py          what a rank tells the conductor about its memory, and what it has opened
kernels.py          the arithmetic, in CUDA C, bit for bit the engine's
passing.py          how memory is passed from one process to another
driver.py           the CUDA driver: the only module that imports cuda-bindings

Nothing here is imported before the first call on a CUDA tensor.
"""
