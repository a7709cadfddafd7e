"""The Communicator and its transports: what moves data.

From the bottom up, as the imports go (pyproject.toml):

    work, tensors         works and messages; tensors and arrays alike
    engine/               the C library, the only package that touches it, and its numbers
    reductions            what is combined, and how
    transport             what a Communicator holds: the interface of all transports
    arguments             what makes sense as a call, and what is said where it does not
    shared_tensors        tensors in memory that all ranks have mapped
    rendezvous/           how processes meet and come to share a segment
    on_rows/              collectives in terms of rows in one piece
    schedules/            schedules run over messages
    solo                  transport: one rank, alone
    shared_memory/        transport: ranks of one machine
    over_torch/           transport: process groups of torch
    cuda/                 transport: tensors of a GPU that ranks share
    hosts/                transport: ranks of several hosts, shared memory inside, UCX between
    communicator          the Communicator
    factory               which transport a group has
"""
