"""Every algorithm is correct, costs what its page says, and any damage to it is detected."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from unisono.errors import ScheduleError
from unisono.plan import (
    COLLECTIVES,
    Algorithm,
    Phase,
    Schedule,
    Step,
    Transfer,
    algorithm,
    catalog,
    find,
    verify,
)
from unisono.plan.algorithms import binary_trees
from unisono.plan.algorithms.binary_trees import depths
from unisono.plan.proof import holds_after, holds_before, owner

ALGORITHMS = [pytest.param(entry, id=f"{entry.collective}-{entry.name}") for entry in catalog()]


def variants(entry: Algorithm, ranks: int) -> Iterator[Schedule]:
    """The schedule with every root and node size, and with some of the pieces, channels and chunks
    per message that it takes."""
    roots = range(ranks) if "root" in entry.options else [0]
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    if ranks > 16:
        sizes = sorted({1, sizes[len(sizes) // 2], ranks})
    for root in roots if ranks < 8 else sorted({0, 1, ranks // 2, ranks - 1} & {*roots}):
        for node_size in sizes if "node_size" in entry.options else [1]:
            for pieces in (1, 3)[ranks > 16 :] if "pieces" in entry.options else [1]:
                for channels in {1, min(node_size, 3)} if "channels" in entry.options else [1]:
                    for aggregate in (0, 1, 4) if "aggregate" in entry.options else [0]:
                        yield entry.schedule(
                            ranks,
                            root=root,
                            node_size=node_size,
                            pieces=pieces,
                            channels=channels,
                            aggregate=aggregate,
                        )


# --- promises ------------------------------------------------------------------------------


@pytest.mark.parametrize("entry", ALGORITHMS)
def test_every_algorithm_verifies_on_few_ranks(entry: Algorithm) -> None:
    check_numbers_of_ranks(entry, [*range(1, 19), 24, 27, 31, 32, 33])


@pytest.mark.slow
@pytest.mark.parametrize("entry", ALGORITHMS)
def test_and_on_every_number_up_to_40(entry: Algorithm) -> None:
    check_numbers_of_ranks(entry, range(19, 41))


def check_numbers_of_ranks(entry: Algorithm, numbers: Iterable[int]) -> None:
    for ranks in numbers:
        for schedule in variants(entry, ranks):
            assert (schedule.collective, schedule.ranks) == (entry.collective, ranks)
            verify(schedule)


@pytest.mark.slow
@pytest.mark.parametrize("entry", ALGORITHMS)
def test_and_on_more(entry: Algorithm) -> None:
    squares = entry.collective == "all_to_all" or entry.name == "mates"
    for ranks in (64, 100, 127) if not squares else (48, 64):
        verify(entry.schedule(ranks, node_size=4 if ranks % 4 == 0 else 1))


@pytest.mark.parametrize("name", ["double_tree", "binomial", "binary_tree", "recursive_doubling"])
def test_short_schedules_verify_on_a_thousand_ranks(name: str) -> None:
    for ranks in (1000, 1024):
        verify(find("all_reduce", name).schedule(ranks))


@pytest.mark.slow
def test_the_double_tree_verifies_on_24576_ranks() -> None:
    verify(find("all_reduce", "double_tree").schedule(24_576))


@pytest.mark.parametrize("entry", ALGORITHMS)
def test_with_numbers_the_result_is_right(entry: Algorithm) -> None:
    """The same in another way: with numbers instead of contributions, and without the table of
    guarantees."""
    for ranks in (1, 2, 3, 5, 8, 12):
        for schedule in variants(entry, ranks):
            run_with_numbers(schedule)


def run_with_numbers(schedule: Schedule) -> None:
    ranks, chunks, root = schedule.ranks, schedule.chunks, schedule.root
    values = np.random.default_rng(ranks).integers(0, 1 << 40, size=(ranks, chunks))
    chunk = np.arange(chunks)
    share = chunk // max(chunks // ranks, 1)
    rank = np.arange(ranks)[:, None]
    everywhere = np.ones((ranks, chunks), bool)
    pair = chunk // max(chunks // ranks**2, 1)
    total = np.broadcast_to(values.sum(axis=0), values.shape)
    owned = np.broadcast_to(values[share % ranks, chunk], values.shape)
    rooted = np.broadcast_to(values[root], values.shape)
    sent = np.broadcast_to(values[pair // ranks % ranks, chunk], values.shape)
    has, wanted, needed = {
        "all_reduce": (everywhere, total, everywhere),
        "reduce_scatter": (everywhere, total, share == rank),
        "reduce": (everywhere, total, (rank == root) & everywhere),
        "all_gather": (share == rank, owned, everywhere),
        "gather": (share == rank, owned, (rank == root) & everywhere),
        "broadcast": ((rank == root) & everywhere, rooted, everywhere),
        "scatter": ((rank == root) & everywhere, rooted, share == rank),
        "all_to_all": (pair // ranks == rank, sent, pair % ranks == rank),
        "barrier": (everywhere, total, everywhere & False),
    }[schedule.collective]
    garbage = -(1 << 50)
    buffers = np.where(has, values, garbage)
    for step in schedule.steps:
        before = buffers.copy()
        for transfer in step:
            part = slice(transfer.chunk, transfer.chunk + transfer.count)
            if transfer.action == "copy":
                buffers[transfer.destination, part] = before[transfer.source, part]
            else:
                buffers[transfer.destination, part] += before[transfer.source, part]
    assert np.array_equal(buffers[needed], wanted[needed])


def test_the_tables_of_who_holds_what() -> None:
    gather = find("gather", "linear").schedule(3, root=1)
    assert [list(holds_before(gather, rank)) for rank in range(3)] == [[0], [1], [2]]
    assert [list(holds_after(gather, rank)) for rank in range(3)] == [[], [0, 1, 2], []]
    assert [owner(gather, chunk) for chunk in range(3)] == [0, 1, 2]
    exchange = find("all_to_all", "pairwise").schedule(3)
    assert list(holds_before(exchange, 1)) == [3, 4, 5]
    assert list(holds_after(exchange, 1)) == [1, 4, 7]
    assert [owner(exchange, chunk) for chunk in (2, 3, 5, 6)] == [0, 1, 1, 2]


# --- costs ---------------------------------------------------------------------------------


def lg(ranks: int) -> int:
    return (ranks - 1).bit_length()


def folded(ranks: int) -> int:
    """The extra steps if the number of ranks is not a power of two."""
    return 0 if ranks & (ranks - 1) == 0 else 2


def low(ranks: int) -> int:
    return ranks.bit_length() - 1


def ring(factor: int) -> Callable[[int], float]:
    return lambda n: factor * (n - 1) / n


def sides(ranks: int) -> int:
    height = max(side for side in range(1, math.isqrt(ranks) + 1) if ranks % side == 0)
    return 2 * (height - 1) + 2 * (ranks // height - 1)


def bits(ranks: int) -> float:
    return sum(number.bit_count() for number in range(ranks)) / ranks


# (steps, what the busiest rank sends in tensors)
COSTS: dict[tuple[str, str], tuple[Callable[[int], int], Callable[[int], float]]] = {
    ("all_reduce", "ring"): (lambda n: 2 * (n - 1), ring(2)),
    ("all_reduce", "binomial"): (lambda n: 2 * lg(n), lg),
    ("all_reduce", "binary_tree"): (
        lambda n: 2 * low(n),
        lambda n: min(3, (n + 1) // 2),
    ),
    ("all_reduce", "double_tree"): (lambda n: 2 * lg(n), lambda n: 2 if n > 2 else 1),
    ("all_reduce", "nccl_tree"): (lambda n: 2 * lg(n), lambda n: 2 if n > 2 else 1),
    ("all_reduce", "recursive_doubling"): (lambda n: low(n) + folded(n), low),
    ("all_reduce", "halving_doubling"): (lambda n: 2 * low(n) + folded(n), ring(2)),
    ("all_reduce", "ring_2d"): (sides, ring(2)),
    ("all_reduce", "hierarchical"): (lambda n: 2 * low(n) + folded(n), ring(2)),
    ("all_reduce", "lanes"): (lambda n: 5 if n > 1 else 0, ring(2)),
    ("all_reduce", "mates"): (lambda n: min(1, n - 1), lambda n: n - 1),
    ("reduce_scatter", "lanes"): (lambda n: 4 if n > 1 else 0, ring(1)),
    ("reduce_scatter", "mates"): (lambda n: min(1, n - 1), lambda n: n - 1),
    ("all_gather", "lanes"): (lambda n: 4 if n > 1 else 0, ring(1)),
    ("all_gather", "mates"): (lambda n: min(1, n - 1), ring(1)),
    ("broadcast", "lanes"): (lambda n: n + 2 if n > 1 else 0, lambda n: min(1, n - 1)),
    ("broadcast", "mates"): (lambda n: min(1, n - 1), lambda n: n - 1),
    ("reduce", "lanes"): (lambda n: 4 if n > 1 else 0, lambda n: 1),
    ("all_to_all", "lanes"): (lambda n: 4 if n > 1 else 0, ring(1)),
    ("all_to_all", "mates"): (lambda n: min(1, n - 1), lambda n: n - 1),
    ("barrier", "mates"): (lambda n: min(1, n - 1), lambda n: 0),
    ("reduce_scatter", "ring"): (lambda n: n - 1, ring(1)),
    ("reduce_scatter", "recursive_halving"): (lambda n: low(n) + folded(n), ring(1)),
    ("reduce_scatter", "bruck"): (lg, ring(1)),
    ("reduce_scatter", "direct"): (lambda n: min(1, n - 1), ring(1)),
    ("all_gather", "ring"): (lambda n: n - 1, ring(1)),
    ("all_gather", "recursive_doubling"): (lambda n: low(n) + folded(n), ring(1)),
    ("all_gather", "bruck"): (lg, ring(1)),
    ("all_gather", "direct"): (lambda n: min(1, n - 1), ring(1)),
    ("broadcast", "binomial"): (lg, lg),
    ("broadcast", "binary_tree"): (low, lambda n: min(2, n - 1)),
    ("broadcast", "chain"): (lambda n: n + 6 if n > 1 else 0, lambda n: min(1, n - 1)),
    ("broadcast", "double_tree"): (lg, lambda n: 1),
    ("broadcast", "scatter_all_gather"): (lambda n: lg(n) + n - 1, ring(2)),
    ("reduce", "binomial"): (lg, lambda n: 1),
    ("reduce", "binary_tree"): (low, lambda n: 1),
    ("reduce", "chain"): (lambda n: n + 6 if n > 1 else 0, lambda n: min(1, n - 1)),
    ("reduce", "double_tree"): (lg, lambda n: 1),
    ("reduce", "reduce_scatter_gather"): (lambda n: lg(n) + n - 1, lambda n: 1.5),
    ("scatter", "binomial"): (lg, ring(1)),
    ("scatter", "linear"): (lambda n: min(1, n - 1), ring(1)),
    ("gather", "binomial"): (lg, lambda n: 0.5),
    ("gather", "linear"): (lambda n: min(1, n - 1), lambda n: 1 / n),
    ("all_to_all", "pairwise"): (lambda n: n - 1, ring(1)),
    ("all_to_all", "bruck"): (lg, bits),
    ("barrier", "dissemination"): (lg, lambda n: 0),
}
# For pages that say "at most", or name powers of two.
AT_MOST = {"double_tree", "nccl_tree", "reduce_scatter_gather"}
POWERS_OF_TWO = {"recursive_doubling", "halving_doubling", "recursive_halving", "hierarchical"}


@pytest.mark.parametrize("entry", ALGORITHMS)
def test_steps_and_bytes_are_what_the_page_says(entry: Algorithm) -> None:
    steps, sends = COSTS[entry.collective, entry.name]
    for ranks in range(1, 34):
        schedule = entry.schedule(ranks)
        assert schedule.rounds == steps(ranks)
        most = float(schedule.chunks_sent().max()) * schedule.chunk_bytes(1.0)
        if entry.name in AT_MOST or (entry.collective, entry.name) == ("gather", "binomial"):
            assert most <= sends(ranks) + 1e-9
        elif ranks > 1 and (entry.name not in POWERS_OF_TWO or folded(ranks) == 0):
            assert most == pytest.approx(sends(ranks))


@pytest.mark.parametrize("entry", ALGORITHMS)
def test_what_is_sent_is_counted(entry: Algorithm) -> None:
    for ranks in (1, 2, 5, 8, 13):
        for schedule in variants(entry, ranks):
            listed = [transfer for step in schedule.steps for transfer in step]
            for rank in range(ranks):
                sent = sum(t.count for t in listed if t.source == rank)
                assert schedule.chunks_sent()[rank] == sent


def test_pieces_add_steps_and_no_bytes() -> None:
    for name, collective in (("double_tree", "all_reduce"), ("chain", "broadcast")):
        entry = find(collective, name)
        whole, cut = entry.schedule(8, pieces=1), entry.schedule(8, pieces=9)
        assert cut.rounds == whole.rounds + 8
        sent = [each.chunks_sent()[3] * each.chunk_bytes(90.0) for each in (cut, whole)]
        assert sent[0] == pytest.approx(sent[1])


def test_hierarchical_sends_little_between_nodes() -> None:
    schedule = find("all_reduce", "hierarchical").schedule(32, node_size=8)
    assert schedule.rounds == 2 + 2 * 2
    sent = [transfer for step in schedule.steps for transfer in step if transfer.source == 5]
    inside = sum(transfer.count for transfer in sent if transfer.destination // 8 == 0)
    assert inside / schedule.chunks == 2 * 7 / 8
    between = sum(transfer.count for transfer in sent) - inside
    assert between / schedule.chunks == 2 * 3 / 4 / 8
    with pytest.raises(ValueError, match="nodes of equal size: 10 ranks do not fill nodes of 4"):
        find("all_reduce", "hierarchical").schedule(10, node_size=4)


def sent_between(schedule: Schedule, node_size: int, cards: int) -> np.ndarray:
    """Tensors sent from each card of each node to each card of any other node."""
    sent = np.zeros((schedule.ranks // node_size, cards, cards))
    for step in schedule.steps:
        for transfer in step:
            (here, source), (there, to) = (
                divmod(rank, node_size) for rank in (transfer.source, transfer.destination)
            )
            if here != there:
                out, into = (local * cards // node_size for local in (source, to))
                sent[here, out, into] += transfer.count / schedule.chunks
    return sent


@pytest.mark.parametrize(("collective", "rounds"), [("all_reduce", 2), ("all_gather", 1)])
def test_channels_of_a_ring_share_the_cards_evenly_and_stay_on_their_rails(
    collective: str, rounds: int
) -> None:
    entry = find(collective, "ring")
    for ranks, node_size, cards in ((64, 8, 8), (32, 8, 4), (24, 6, 2), (40, 8, 8), (12, 4, 2)):
        schedule = entry.schedule(ranks, node_size=node_size, channels=cards)
        verify(schedule)
        assert schedule.rounds == rounds * (ranks - 1)
        most = schedule.chunks_sent().max() * schedule.chunk_bytes(1.0)
        assert most == pytest.approx(rounds * (ranks - 1) / ranks)
        sent = sent_between(schedule, node_size, cards)
        by_card = rounds * (ranks - 1) / ranks / cards
        assert sent.sum(axis=2) == pytest.approx(np.full(sent.shape[:2], by_card))
        crossing = sent * (1 - np.eye(cards))
        assert crossing[: -1 if ranks // node_size % 2 else None].sum() == 0  # all but one hop
    one = entry.schedule(16, node_size=8)
    assert one == entry.schedule(16)
    assert (sent_between(one, 8, 8).sum(axis=2) > 0).sum() == 2


def test_channels_need_equal_nodes() -> None:
    ring = find("all_reduce", "ring")
    with pytest.raises(ValueError, match="nodes of equal size: 10 ranks do not fill nodes of 4"):
        ring.schedule(10, node_size=4, channels=2)
    for name in ("ring", "nccl_tree"):
        with pytest.raises(ValueError, match="channels must be at least 1, not 0"):
            find("all_reduce", name).schedule(8, channels=0)
    for collective, name in (("all_gather", "ring"), ("all_reduce", "nccl_tree")):
        with pytest.raises(ValueError, match=f"{name} with channels .* too large .* 1,024 ranks"):
            find(collective, name).schedule(2048, node_size=8, channels=8)
    assert ring.schedule(4096, node_size=8, channels=8).rounds == 2 * 4095


def test_the_tree_of_nccl_has_a_chain_in_each_node() -> None:
    """Only heads talk to other nodes, each channel has its own, and a card sends two shares."""
    entry = find("all_reduce", "nccl_tree")
    for nodes, node_size, channels in ((4, 4, 4), (8, 8, 8), (2, 6, 2), (5, 4, 2), (16, 1, 1)):
        ranks = nodes * node_size
        schedule = entry.schedule(ranks, node_size=node_size, channels=channels, pieces=3)
        verify(schedule)
        most = 2 * (node_size - 1 + lg(nodes)) + 2
        assert schedule.rounds in ((most, most - 2) if nodes % 2 else (most,))
        assert schedule.chunks_sent().sum() / schedule.chunks == pytest.approx(2 * (ranks - 1))
        sent = sent_between(schedule, node_size, channels)
        assert sent.sum(axis=2).max() <= 2 / channels + 1e-9
        assert (sent * (1 - np.eye(channels))).sum() == 0
        inside = {
            (t.source % node_size - t.destination % node_size) % node_size
            for step in schedule.steps
            for t in step
            if t.source // node_size == t.destination // node_size
        }
        assert inside <= {1, node_size - 1}
    with pytest.raises(ValueError, match="nodes of equal size: 10 ranks do not fill nodes of 4"):
        entry.schedule(10, node_size=4)


def test_the_plain_binary_tree() -> None:
    """0 to 1 and 2, 1 to 3 and 4: counted from the root, both children in one step."""
    tree = find("broadcast", "binary_tree")
    assert [str(step) for step in tree.schedule(7).steps] == [
        "0 -> 1 c0, 0 -> 2 c0",
        "1 -> 3 c0, 1 -> 4 c0, 2 -> 5 c0, 2 -> 6 c0",
    ]
    first = tree.schedule(5, root=2).steps[0]
    assert [(t.source, t.destination) for t in first] == [(2, 3), (2, 4)]
    up = find("all_reduce", "binary_tree").schedule(6).steps[0]
    assert [(t.source, t.destination, t.action) for t in up] == [
        (3, 1, "reduce"), (4, 1, "reduce"), (5, 2, "reduce"),
    ]  # fmt: skip


def test_names_in_any_case_and_names_that_do_not_exist() -> None:
    assert find("all_reduce", "Binomial") is find("all_reduce", "BINOMIAL")
    with pytest.raises(ValueError, match="broadcast has no algorithm 'tree', only binary_tree"):
        find("broadcast", "tree")


def test_rows_of_a_ring_2d_stay_inside_nodes() -> None:
    """A node is a row; of the two tensors that a rank of a ring sends, 1/w leaves its node."""
    ring_2d = find("all_reduce", "ring_2d")
    for ranks, node_size, width in ((24, 8, 8), (24, 6, 6), (20, 8, 4), (9, 8, 3), (16, 16, 4)):
        schedule = ring_2d.schedule(ranks, node_size=node_size)
        height = ranks // width
        assert schedule.rounds == 2 * (width - 1) + 2 * (height - 1)
        crossing = [
            transfer.count
            for step in schedule.steps
            for transfer in step
            if transfer.source // node_size != transfer.destination // node_size
        ]
        if node_size % width == 0 and node_size < ranks:
            most = 2 * (height - 1) / height / width * ranks
            assert sum(crossing) / schedule.chunks <= most + 1e-9
    with pytest.raises(ValueError, match="at least one rank, not -1"):
        ring_2d.schedule(8, node_size=-1)


def test_the_two_trees() -> None:
    for ranks in range(2, 200):
        for trees in (binary_trees.both_trees(ranks), binary_trees.trees_below_root(ranks)):
            inner = [set(tree[tree >= 0].tolist()) - {int(np.argmin(tree))} for tree in trees]
            roots = [int(np.argmin(tree)) for tree in trees]
            for tree, root in zip(trees, roots, strict=True):
                children = np.bincount(tree[tree >= 0], minlength=ranks)
                assert children.max() <= 2
                assert children[root] == 1
                assert depths(tree).max() <= lg(ranks)
            assert inner[0].isdisjoint(inner[1] - {0} if ranks % 2 else inner[1])
    assert binary_trees.binary_tree(8).tolist() == [-1, 2, 4, 2, 0, 6, 4, 6]


# --- damage --------------------------------------------------------------------------------


def damaged(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Every schedule that differs in one transfer, or has two steps swapped."""
    steps = [list(step) for step in schedule.steps]

    def with_steps(changed: list[list[Transfer]]) -> Schedule:
        ranks, chunks, root = schedule.ranks, schedule.chunks, schedule.root
        return Schedule.from_steps(schedule.collective, "damaged", ranks, chunks, changed, root)

    for number, step in enumerate(steps):
        before, after = steps[:number], steps[number + 1 :]
        for index, transfer in enumerate(step):
            rest = step[:index] + step[index + 1 :]
            source, destination = transfer.source, transfer.destination
            others = {*range(schedule.ranks)} - {source, destination}
            chunks = {*range(schedule.chunks - transfer.count + 1)} - {transfer.chunk}
            action = "copy" if transfer.action == "reduce" else "reduce"
            yield "drop", with_steps([*before, rest, *after])
            yield "duplicate", with_steps([*before, [*step, transfer], *after])
            for how, changed in [
                ("turn", replace(transfer, source=destination, destination=source)),
                *(("misroute", replace(transfer, source=other)) for other in others),
                *(("misroute", replace(transfer, destination=other)) for other in others),
                *(("mistake", replace(transfer, chunk=chunk)) for chunk in chunks),
                ("other action", replace(transfer, action=action)),
            ]:
                yield how, with_steps([*before, [*rest, changed], *after])
        if after:
            yield "swap", with_steps([*before, after[0], step, *after[1:]])


@pytest.mark.slow
@pytest.mark.parametrize("entry", ALGORITHMS)
def test_damage_is_noticed_or_harmless(entry: Algorithm) -> None:
    """verify raises exactly if the numbers are wrong, or are read before they exist. If it accepts
    a damaged schedule, running it with numbers must give the right result.
    """
    noticed = 0
    for ranks in (2, 3, 4, 5):
        options = {"node_size": 2 if ranks % 2 == 0 else 1, "pieces": 2, "root": ranks - 1}
        options["channels"] = 1 if entry.name == "nccl_tree" else 2  # each has two trees
        for how, schedule in damaged(entry.schedule(ranks, **options)):
            error = objection(schedule)
            if error is None:
                run_with_numbers(schedule)
            else:
                noticed += 1
                assert 0 <= error.rank < ranks, how
                assert 0 <= error.chunk < schedule.chunks, how
                assert f"rank {error.rank}" in str(error)
                assert f"chunk {error.chunk}" in str(error)
                assert -1 <= error.step < schedule.rounds
    assert noticed > 3


def objection(schedule: Schedule) -> ScheduleError | None:
    try:
        verify(schedule)
    except ScheduleError as error:
        return error
    return None


def test_dropping_any_transfer_of_a_ring_is_noticed() -> None:
    for how, schedule in damaged(find("all_reduce", "ring").schedule(6)):
        if how in ("drop", "duplicate"):
            with pytest.raises(ScheduleError):
                verify(schedule)


def all_reduce(*steps: list[tuple[int, int, int, str]]) -> Schedule:
    return Schedule.from_steps("all_reduce", "test", 3, 1, steps)  # type: ignore[arg-type]


def test_errors_name_rank_chunk_and_step() -> None:
    ring_of_3 = find("all_gather", "ring").schedule(3)
    steps = [list(step) for step in ring_of_3.steps]
    early = Schedule.from_steps("all_gather", "early", 3, 3, [steps[1], steps[0]])
    with pytest.raises(ScheduleError) as caught:
        verify(early)
    assert str(caught.value) == "rank 0 sends chunk 2 to rank 1 before it has it (step 0)"
    assert (caught.value.rank, caught.value.chunk, caught.value.step) == (0, 2, 0)
    cases = [
        (
            all_reduce([(1, 0, 0, "reduce")], [(1, 0, 0, "reduce")]),
            "chunk 0 of rank 0 counts what rank 1 contributed more than once (step 1)",
        ),
        (
            all_reduce([(1, 0, 0, "reduce")]),
            "chunk 0 of rank 0 lacks what rank 2 contributed (step 0)",
        ),
        (
            all_reduce([(1, 0, 0, "reduce"), (2, 0, 0, "reduce")]),
            "chunk 0 of rank 1 lacks what ranks 0 and 2 contributed (no step writes it)",
        ),
        (
            all_reduce([(1, 0, 0, "copy"), (2, 0, 0, "reduce")]),
            "rank 0 gets chunk 0 twice, and one copy overwrites it (step 0)",
        ),
        (
            Schedule.from_steps("broadcast", "test", 2, 1, [[(0, 1, 0, "reduce")]]),
            "rank 1 adds to chunk 0 before it has it (step 0)",
        ),
        (
            Schedule.from_steps("broadcast", "test", 2, 1, []),
            "rank 1 never gets chunk 0 (no step writes it)",
        ),
    ]
    for schedule, message in cases:
        with pytest.raises(ScheduleError) as caught:
            verify(schedule)
        assert str(caught.value) == message


def test_several_reductions_into_one_buffer_in_a_step() -> None:
    together = [(1, 0, 0, "reduce"), (2, 0, 0, "reduce")]
    verify(all_reduce(together, [(0, 1, 0, "copy"), (0, 2, 0, "copy")]))


# --- the data structure --------------------------------------------------------------------


def test_schedules_are_compared_hashed_printed_and_written_down() -> None:
    for entry in catalog():
        for ranks in (1, 2, 5, 8):
            schedule = entry.schedule(ranks)
            again = entry.schedule(ranks)
            assert schedule == again
            assert hash(schedule) == hash(again)
            assert schedule != entry.schedule(ranks + 1)
            assert Schedule.from_json(schedule.to_json()) == schedule
            assert schedule.title() in str(schedule)
    lines = str(find("all_reduce", "ring").schedule(4)).splitlines()
    assert lines[0] == "all_reduce by ring: 4 ranks, 4 chunks, 6 steps"
    assert lines[1] == "step 0: 0 +> 1 c3, 1 +> 2 c0, 2 +> 3 c1, 3 +> 0 c2"
    with pytest.raises(ValueError, match="not a schedule in JSON"):
        Schedule.from_json("{}")
    with pytest.raises(AttributeError):
        schedule.ranks = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        schedule.steps[0].source[0] = 1


def test_steps_are_a_sequence() -> None:
    schedule = find("all_reduce", "ring").schedule(5)
    listed = list(schedule.steps)
    assert len(schedule.steps) == len(listed) == schedule.rounds == 8
    assert [schedule.steps[number] for number in range(8)] == listed
    assert schedule.steps[-1] == listed[-1]
    assert schedule.steps[2:4] == listed[2:4]
    with pytest.raises(IndexError):
        schedule.steps[8]


def test_regular_schedules_are_small() -> None:
    schedule = find("all_reduce", "ring").schedule(24_576)
    assert schedule.rounds == 2 * 24_575
    stored = sum(
        column.nbytes
        for phase in schedule.phases
        for column in (phase.step.source, phase.step.destination, phase.step.chunk)
    )
    assert stored < 4_000_000
    assert schedule.steps[24_574].chunk[7] == 7 - 24_575 + 24_576


def test_invalid_schedules_are_rejected() -> None:
    step = Step.listing([(0, 1, 0, "copy")])
    good = {"collective": "broadcast", "algorithm": "x", "ranks": 2, "chunks": 1}
    cases: list[tuple[dict[str, object], list[object], str]] = [
        ({"ranks": 0}, [], "at least one rank, not 0"),
        ({"collective": "shout"}, [], "no collective 'shout', only all_reduce"),
        ({"root": 2}, [], "root 2 is not among 2 ranks"),
        ({"collective": "all_reduce", "root": 1}, [], "all_reduce has no root"),
        ({"collective": "all_gather", "chunks": 3}, [], "a multiple of 2 chunks, not 3"),
        ({"chunks": 0}, [], "a multiple of 1 chunks, not 0"),
        ({}, [[(0, 2, 0, "copy")]], "0 -> 2 c0: its destination is not among 2 ranks"),
        ({}, [[(-1, 0, 0, "copy")]], "its source is not among 2 ranks"),
        ({}, [[(0, 1, 1, "copy")]], "not all .* among 1 chunks"),
        ({}, [[Transfer(0, 1, 0, "copy", 2)]], "0 -> 1 c0-1: not all .* among 1 chunks"),
        ({}, [[(1, 1, 0, "copy")]], "rank 1 would send chunk 0 to itself"),
        ({}, [Phase(step, times=2, turn=1)], "to itself"),
        ({}, [Phase(step, times=-1)], "at least once"),
        ({"chunks": 4}, [Phase(step, times=2, shift=1, within=3)], "blocks of 3"),
    ]
    for changes, steps, message in cases:
        with pytest.raises(ValueError, match=message):
            Schedule.from_steps(**{**good, **changes}, steps=steps)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="copy or reduce, not 'move'"):
        Step.listing([(0, 1, 0, "move")])  # type: ignore[list-item]
    for entry in catalog():
        with pytest.raises(ValueError, match=r"\d"):
            entry.schedule(0)


# --- the catalog ---------------------------------------------------------------------------


def test_the_catalog_lists_what_has_costs() -> None:
    assert {(entry.collective, entry.name) for entry in catalog()} == COSTS.keys()
    for collective in COLLECTIVES:
        assert {(collective, entry.name) for entry in catalog(collective)} == {
            known for known in COSTS if known[0] == collective
        }
    with pytest.raises(ValueError, match="broadcast has no algorithm 'ring', only binary_tree"):
        find("broadcast", "ring")
    with pytest.raises(ValueError, match="no collective 'shout'"):
        catalog("shout")


def test_an_algorithm_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # `unisono.plan.catalog` is the function; its module is in sys.modules.
    monkeypatch.setattr(sys.modules["unisono.plan.catalog"], "_registered", _registry())

    @algorithm("broadcast", "all_at_once")
    def all_at_once(ranks: int, root: int = 0) -> Schedule:
        others = [rank for rank in range(ranks) if rank != root]
        step = [Transfer(root, rank, 0, "copy") for rank in others]
        return Schedule.from_steps("broadcast", "all_at_once", ranks, 1, [step], root)

    verify(find("broadcast", "all_at_once").schedule(5, root=2))
    assert "all_at_once" in {entry.name for entry in catalog("broadcast")}
    with pytest.raises(ValueError, match="broadcast already has an algorithm binomial"):
        algorithm("broadcast", "binomial")(all_at_once)
    algorithm("broadcast", "misnamed")(all_at_once)
    with pytest.raises(ValueError, match=r"broadcast by misnamed .* by all_at_once"):
        find("broadcast", "misnamed").schedule(2)


def _registry() -> dict[tuple[str, str], Algorithm]:
    return {(entry.collective, entry.name): entry for entry in catalog()}
