"""Calls on CUDA tensors: ranks of one host that share a GPU; where each has its own, NCCL
(docs/cuda.md).

cuda_transport.py   the collectives of such a group; all_reduce.py: the one that counts
staged_messages.py  point to point
calls.py            what every call goes through: its meeting, its way, its end
backward.py         works that begin in a backward pass
first_call.py       the first call: the ranks tell each other of their GPUs
routing.py          which way the calls of a group take: the GPUs of its ranks decide
staging.py          through pinned memory: small tensors, and what nobody can open
conducting.py       large ones: one rank, the conductor, works in everybody's memory
regions.py          what a rank tells the conductor of its memory, and what that has opened
kernels.py          the arithmetic, in CUDA C, bit for bit the engine's
passing.py          how memory comes from one process to another
driver.py           the CUDA driver: nobody else imports cuda-bindings

Nothing here is imported before the first CUDA tensor comes.
"""
