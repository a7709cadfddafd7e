"""The list of algorithms: the built-in ones, and those that a program adds with `@algorithm`."""

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
    """An algorithm for a collective.

    `find` looks it up by `collective` and `name`; `make` is the registered function. `options` are
    the names of its parameters besides the number of ranks: `root`, `node_size`, `pieces`,
    `channels`. `schedule` rejects more than `most_ranks` ranks, which is set where schedules grow
    with the square of the ranks or faster. `only_planned` is set for an algorithm that you can plan
    with but not run, and says why.

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
        """The names of the parameters of `make` besides the number of ranks."""
        return tuple(inspect.signature(self.make).parameters)[1:]

    def schedule(self, ranks: int, **options: int) -> Schedule:
        """The schedule for `ranks` ranks, or ValueError if there is none; ignores other options."""
        if ranks < 1:
            raise ValueError(f"{self.name} needs at least 1 rank, not {ranks}")
        if ranks > (self.most_ranks or ranks):
            most = f"{self.most_ranks:,} ranks"
            raise ValueError(f"the schedule of {self.name} is too large beyond {most}")
        known = {name: value for name, value in options.items() if name in self.options}
        schedule = self.make(ranks, **known)
        if (schedule.collective, schedule.algorithm) != (self.collective, self.name):
            raise ValueError(
                f"the function registered for {self.collective} by {self.name} made a schedule for "
                f"{schedule.collective} by {schedule.algorithm}"
            )
        return schedule


_registered: dict[tuple[str, str], Algorithm] = {}


def algorithm(
    collective: str, name: str, *, most_ranks: int | None = None, only_planned: str = ""
) -> Callable[[Builder], Builder]:
    """Register a function from a number of ranks to a Schedule as an algorithm.

        @algorithm("all_reduce", "mine")
        def mine(ranks: int) -> Schedule: ...

    From then on `find`, `catalog`, `unisono plan` and `algorithm="mine"` accept it as `name` of
    `collective`. `Algorithm` describes `most_ranks` and `only_planned`. Raises ValueError for an
    unknown collective or a name that is already taken.

    >>> from unisono import plan
    >>> @plan.algorithm("broadcast", "one_by_one")
    ... def one_by_one(ranks, root=0):
    ...     others = [rank for rank in range(ranks) if rank != root]
    ...     steps = [plan.Step.of(root, rank, 0, "copy") for rank in others]
    ...     return plan.Schedule.from_steps("broadcast", "one_by_one", ranks, 1, steps, root=root)
    >>> plan.find("broadcast", "one_by_one").schedule(4).rounds
    3
    """
    if collective not in COLLECTIVES:
        raise ValueError(f"there is no collective {collective!r}, only {', '.join(COLLECTIVES)}")

    def register(make: Builder) -> Builder:
        _load_built_in()
        earlier = _registered.get((collective, name))
        if earlier is not None and _qualified_name(earlier.make) != _qualified_name(make):
            raise ValueError(f"{collective} already has an algorithm {name}")
        _registered[collective, name] = Algorithm(collective, name, make, most_ranks, only_planned)
        return make

    return register


def catalog(collective: str | None = None) -> tuple[Algorithm, ...]:
    """Every algorithm, or those of one `collective`, in the order of COLLECTIVES.

    Raises ValueError for an unknown collective. See also `find`.

    >>> from unisono import plan
    >>> "ring" in [entry.name for entry in plan.catalog("all_gather")]
    True
    """
    _load_built_in()
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
    """The algorithm `name` of `collective`, case-insensitive.

    Raises ValueError, with the known names, for an unknown one. See also `catalog`, `verify`.

    >>> from unisono import plan
    >>> plan.find("all_reduce", "double_tree").schedule(8, pieces=4).rounds > 0
    True
    """
    known = _registered.get((collective, name))
    if known is not None:
        return known
    entries = {entry.name: entry for entry in catalog(collective)}
    by_folded_name = {spelled.casefold(): entry for spelled, entry in entries.items()}
    found = entries.get(name) or by_folded_name.get(name.casefold())
    if found is None:
        choices = name_choices(entries, name)
        raise ValueError(f"{collective} has no algorithm {name!r}, only {choices}")
    return found


def find_to_run(collective: str, name: str) -> Algorithm:
    """Like `find`, but also raises ValueError for an algorithm that you can only plan with."""
    found = find(collective, name)
    if found.only_planned:
        raise ValueError(
            f"{collective} by {found.name} can only be planned, not run: {found.only_planned}"
        )
    return found


def check_nodes(what: str, ranks: int, node_size: int) -> None:
    """Raise ValueError unless these ranks fill nodes of this size."""
    if node_size < 1 or ranks % node_size:
        why = f"{ranks} ranks do not fill nodes of {node_size}"
        raise ValueError(f"{what} nodes of equal size: {why}")


def _load_built_in() -> None:
    """Import the built-in algorithms, which registers them; late, for they import this module."""
    import unisono.plan.algorithms  # noqa: F401


def _qualified_name(make: Callable[..., Schedule]) -> tuple[str, str]:
    return make.__module__, make.__qualname__
