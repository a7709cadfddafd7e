"""Causal attention over a sequence that is sharded over the ranks, in four ways.

Rank r begins with its own positions and ends with their results, which are those of one process
that has the whole sequence; so are the gradients. In contiguous order the last rank's queries see
the most keys, and the others wait for it. In zigzag order each rank has an early part and a late
one. Ulysses gives each rank some heads of all positions while attention is computed. The last way
does both: heads between neighbours, a ring beyond them.

    unisono run -n 4 examples/long_sequence.py
"""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

import unisono
from unisono.training import ring_attention, shard_positions, ulysses_attention

HEADS, LENGTH, WIDTH = 4, 33, 8  # 33 positions do not divide evenly among 2 or 4 ranks


def seen_by(positions: torch.Tensor) -> int:
    """How many keys the queries at these positions attend to in total: a rank's share of the
    computation."""
    return int((positions + 1).sum())


def check(name: str, attention: Callable[..., torch.Tensor], positions: torch.Tensor) -> None:
    """Run it on this rank's positions, and compare it with one process."""
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(HEADS, LENGTH, WIDTH, generator=generator, requires_grad=True) for _ in range(3)
    ]
    expected = scaled_dot_product_attention(*whole, is_causal=True)
    expected.square().sum().backward()
    mine = [tensor.detach()[:, positions].requires_grad_() for tensor in whole]
    found = attention(*mine, causal=True)
    found.square().sum().backward()
    pairs = [("result", found, expected)]
    pairs += [
        (f"gradient of the {what}", part.grad, other.grad)
        for what, part, other in zip(("query", "key", "value"), mine, whole, strict=True)
    ]
    for what, part, other in pairs:
        near = torch.allclose(part, other[:, positions], rtol=1e-4, atol=1e-5)
        assert near, f"{name}: the {what} is not that of one process"


def main() -> None:
    comm = unisono.init()
    heads_size = 2 if comm.size % 2 == 0 else 1
    manager = unisono.ProcessGroupManager(tp_size=heads_size, cp_size=comm.size // heads_size)
    heads, context = manager.tp, manager.cp
    in_zigzag = partial(shard_positions, LENGTH, order="zigzag")
    ways = {
        "ring": (ring_attention, shard_positions(LENGTH, context=comm)),
        "ring, zigzag": (partial(ring_attention, order="zigzag"), in_zigzag(context=comm)),
        "Ulysses": (ulysses_attention, shard_positions(LENGTH, heads=comm)),
        f"{heads.size} by heads x {context.size} by a ring": (
            partial(ulysses_attention, group=heads, context=context, order="zigzag"),
            in_zigzag(context=context, heads=heads),
        ),
    }
    for name, (attention, positions) in ways.items():
        check(name, attention, positions)
        positions_of = unisono.all_gather_object(positions.tolist())
        everything = sorted(position for theirs in positions_of for position in theirs)
        assert everything == list(range(LENGTH)), f"{name}: some positions are nobody's, or twice"
        if comm.rank == 0:
            print(f"{name}: as in one process; rank 0 has positions {positions_of[0]}")
    keys_seen = [
        unisono.all_gather_object(seen_by(ways[way][1])) for way in ("ring", "ring, zigzag")
    ]
    if comm.rank == 0:
        print(f"keys seen by each rank's queries: {keys_seen[0]}, in zigzag order {keys_seen[1]}")
    if comm.size > 1:
        plain, zigzag = (max(counts) / min(counts) for counts in keys_seen)
        assert zigzag < plain, f"zigzag is no better balanced: {keys_seen}"
    manager.close()
    unisono.shutdown()


if __name__ == "__main__":
    main()
