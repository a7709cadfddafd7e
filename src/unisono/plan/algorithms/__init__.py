"""Collective algorithms, one page each: pure functions from a number of ranks to a Schedule.

Importing this package registers them all; `unisono.plan.catalog` lists them.
"""

from unisono.plan.algorithms import (  # noqa: F401 - importing registers them
    binary_trees,
    binomial,
    bruck,
    chain,
    direct,
    dissemination,
    hierarchical,
    lanes,
    mates,
    nccl_tree,
    pairwise,
    pat,
    recursive,
    ring,
    ring_2d,
    scatter_gather,
)
