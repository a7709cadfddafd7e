"""The Communicator and its implementations: what moves data.

From the bottom up, as the imports go (pyproject.toml):

    work                  works: under way, over already, several in one
    reductions, tensors   what is combined, and how
    collective_calls      the interface: the collectives, with their types
    base                  the rest of it: messages, groups
    engine                the C library, the only module that touches it
    engine_types          what its objects can do, for type checkers
    rendezvous/           how processes meet and come to share a segment
    overlaps, arguments   what no implementation accepts, refused with the same texts by all
    mismatches            which ranks called something else than the others
    flat, arithmetic      tensors and arrays as rows of elements, and what is computed with them
    compiled_schedules    what one rank has to do in a schedule
    workspace, execute    where a schedule's chunks lie; a schedule run on any Communicator
    solo                  one rank, alone
    rows, row_group, row_collectives   collectives in terms of rows in one piece
    announced_calls       what ranks are about to do, told and compared before a byte moves
    executors             threads that carry out calls, and their works
    shared_memory/        ranks of one machine
    over_torch/           process groups of torch
    hosts/                ranks of several hosts: shared memory inside, gloo between
    join                  groups of processes that were started separately
"""
