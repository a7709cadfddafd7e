"""The list of algorithms: ours, and those that a program adds with `@algorithm`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from unisono.errors import name_choices
from unisono.plan.schedule import COLLECTIVES, Schedule

Builder = TypeVar("Builder", bound=Callable[..., Schedule])


@dataclass(frozen=True)
class Algorithm:
    """One way to do a collective.

    `options` are what it takes besides the number of ranks: `root`, `node_size`, `pieces`,
    `channels`. Where the schedule grows with the square of the ranks or faster, `schedule` refuses
    more than `most_ranks`. One that should not be run by its schedule says in `only_planned` why.
    `collective` and `name` are what `find` knows it by; `make` is the function that was registered.

    >>> from unisono import plan
    >>> ring = plan.find("all_reduce", "ring")
    >>> ring.schedule(4).rounds
    6
    >>> ring.options
    ('node_size', 'channels')
    """

    collective: str
    name: str
    make: Callable[..., Schedule] = field(repr=False)
    most_ranks: int | None = None
    only_planned: str = ""

    @property
    def options(self) -> tuple[str, ...]:
        """The names of what `make` takes besides the number of ranks."""
        return tuple(inspect.signature(self.make).parameters)[1:]

    def schedule(self, ranks: int, **options: int) -> Schedule:
        """The schedule for `ranks` ranks, or ValueError; unknown options are ignored."""
        if ranks < 1:
            raise ValueError(f"{self.name} needs at least 1 rank, not {ranks}")
        if ranks > (self.most_ranks or ranks):
            raise ValueError(
                f"{self.name} is too large to write down beyond {self.most_ranks:,} ranks"
            )
        known = {name: value for name, value in options.items() if name in self.options}
        schedule = self.make(ranks, **known)
        if (schedule.collective, schedule.algorithm) != (self.collective, self.name):
            raise ValueError(
                f"what is registered as {self.name} for {self.collective} makes "
                f"{schedule.algorithm} for {schedule.collective}"
            )
        return schedule


_registered: dict[tuple[str, str], Algorithm] = {}

RENAMED = {("all_reduce", "tree"): "binomial"}
"""Names that algorithms had before; `find` still knows them."""


def algorithm(
    collective: str,
    name: str,
    *,
    most_ranks: int | None = None,
    only_planned: str = "",
) -> Callable[[Builder], Builder]:
    """Register a function from a number of ranks to a Schedule as an algorithm.

        @algorithm("all_reduce", "mine")
        def mine(ranks: int) -> Schedule: ...

    From then on `find`, `catalog`, `unisono plan` and `algorithm="mine"` know it, as `name` of
    `collective`. `most_ranks` and `only_planned` are what `Algorithm` says of them. Raises
    ValueError if there is no such collective, or the name is not free.

    >>> from unisono import plan
    >>> @plan.algorithm("broadcast", "one_by_one")
    ... def one_by_one(ranks, root=0):
    ...     others = [rank for rank in range(ranks) if rank != root]
    ...     steps = [plan.Step.of(root, rank, 0, "copy") for rank in others]
    ...     return plan.Schedule.from_steps("broadcast", "one_by_one", ranks, 1, steps, root=root)
    >>> plan.verify(plan.find("broadcast", "one_by_one").schedule(4))
    """
    if collective not in COLLECTIVES:
        raise ValueError(f"there is no collective {collective!r}, only {', '.join(COLLECTIVES)}")

    def register(make: Builder) -> Builder:
        _load_ours()
        earlier = _registered.get((collective, name))
        if earlier is not None and _home(earlier.make) != _home(make):
            raise ValueError(f"{collective} has an algorithm {name} already")
        _registered[collective, name] = Algorithm(collective, name, make, most_ranks, only_planned)
        return make

    return register


def catalog(collective: str | None = None) -> tuple[Algorithm, ...]:
    """Every algorithm, or those of one `collective`, in the order of COLLECTIVES.

    Raises ValueError where there is no such collective.

    >>> from unisono import plan
    >>> "ring" in [entry.name for entry in plan.catalog("all_gather")]
    True
    """
    _load_ours()
    if collective is not None and collective not in COLLECTIVES:
        choices = name_choices(COLLECTIVES, collective)
        raise ValueError(f"there is no collective {collective!r}, only {choices}")
    return tuple(
        entry
        for wanted in COLLECTIVES
        for entry in _registered.values()
        if entry.collective == wanted and collective in (None, wanted)
    )


def find(collective: str, name: str) -> Algorithm:
    """The algorithm `name` of `collective`, case-insensitive; former names work, too.

    Raises ValueError with the names that there are.

    >>> from unisono import plan
    >>> plan.find("all_reduce", "double_tree").schedule(8, pieces=4).rounds > 0
    True
    """
    known = _registered.get((collective, name))
    if known is not None:
        return known
    entries = {entry.name: entry for entry in catalog(collective)}
    in_any_case = {spelled.casefold(): entry for spelled, entry in entries.items()}
    now = RENAMED.get((collective, name.casefold()), name.casefold())
    found = entries.get(name) or in_any_case.get(name.casefold()) or in_any_case.get(now)
    if found is None:
        raise ValueError(
            f"{collective} has no algorithm {name!r}, only {name_choices(entries, name)}"
        )
    return found


def find_to_run(collective: str, name: str) -> Algorithm:
    """As `find`; raises ValueError also for an algorithm that is only planned with."""
    found = find(collective, name)
    if found.only_planned:
        raise ValueError(
            f"{found.name} for {collective} is there to plan with: {found.only_planned}"
        )
    return found


def _load_ours() -> None:
    """Our own register themselves when they are imported, and need this module for it."""
    import unisono.plan.algorithms  # noqa: F401


def _home(make: Callable[..., Schedule]) -> tuple[str, str]:
    return make.__module__, make.__qualname__
