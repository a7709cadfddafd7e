"""Steps: how many calls each rank made between two marks: the program's own, else the forward
passes of DDP in training, else the steps of optimizers. torch's own hooks detect all of them.

If one rank leaves out a call, and the next call looks the same on the same line, that rank is
shifted by one from then on, and no comparison of calls can see it. But the records contain the step
of each call: the last call of a step has the same number on all ranks until one is shifted.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unisono.comm.engine import native
from unisono.comm.shared_memory.records import GroupRecords, RankRecords, Record
from unisono.errors import name_number, name_ranks
from unisono.watch.calls import line_of

_ENOUGH = 2
"""A differing step counts after this many equal steps: ranks whose optimizers step at different
times never have so many."""
_MIXED = 1 << 30

_hooks: dict[str, Any] = {}
are_counted = False
"""Whether this process has counted a step."""
are_marked = False
"""Whether the program marks its steps itself."""
are_forward = False
"""Whether the forward passes of DDP are the steps."""
_size = 0
"""Of the groups of these DDPs; _MIXED if models in small groups came before one in a larger."""
phase = ""
"""The part of an iteration that the program is in: data, forward, backward or optimizer."""
on_step: Callable[[], object] | None = None
"""Called when a thread begins its next step."""


def mark() -> None:
    """The calling thread begins its next step."""
    global are_marked
    are_marked = True
    if "optimizer" in _hooks:
        _hooks.pop("optimizer").remove()
    _count()


def count_training_steps() -> None:
    """Count the forward passes of every DDP model that is made from now on, or, while there is
    none, the steps of torch's optimizers, as steps of their thread."""
    from torch.optim import optimizer

    if not _hooks:
        _hooks["begin"] = optimizer.register_optimizer_step_pre_hook(_enter("optimizer"))
        _hooks["end"] = optimizer.register_optimizer_step_post_hook(_enter("data"))
        _hooks["module"] = each_ddp(_follow_ddp)
        if not are_marked:
            _hooks["optimizer"] = optimizer.register_optimizer_step_post_hook(_count)


def stop_counting() -> None:
    """Stop counting steps that the program does not mark."""
    global are_forward, _size
    are_forward, _size = False, 0
    while _hooks:
        _hooks.popitem()[1].remove()


def each_ddp(notice: Callable[[Any, Any], object]) -> Any:
    """Call `notice` with every DDP model that is made from now on, and the module in it; returns
    the hook, to remove it."""
    from torch.nn.modules.module import register_module_module_registration_hook

    def registered(module: Any, name: str, child: Any) -> None:
        if name == "module" and type(module).__name__ == "DistributedDataParallel":
            notice(module, child)

    return register_module_module_registration_hook(registered)


def _follow_ddp(ddp: Any, _: Any) -> None:
    ddp.register_forward_pre_hook(_begin_iteration)
    ddp.register_forward_hook(_enter("backward"))


def _enter(name: str) -> Callable[..., None]:
    """A hook that records the phase that the program is in."""
    from torch import compiler

    def enter(*_: Any) -> None:
        global phase
        if not compiler.is_compiling():
            phase = name

    return enter


def _begin_iteration(module: Any, _: Any) -> None:
    """A new iteration has begun."""
    global are_forward, phase, _size
    from torch import compiler, is_grad_enabled

    if compiler.is_compiling() or not (_hooks and module.training and is_grad_enabled()):
        return
    phase = "forward"
    if are_marked:
        return
    are_forward = True
    if "optimizer" in _hooks:
        _hooks.pop("optimizer").remove()
    # In no_sync, in Join, and in smaller groups, ranks may make different numbers of passes.
    size = module.process_group.size()
    if module.require_backward_grad_sync and not module._join_config.enable and size >= _size:
        _size = size if _size in (0, size) else _MIXED
        _count()


def _count(*_: Any) -> None:
    global are_counted
    are_counted = True
    native.count_step()
    if on_step is not None:
        on_step()


@dataclass(frozen=True)
class Shift:
    """Steps in which not all ranks made the same number of calls: one, if the records show it, or
    all from `since` to `step`. `counts` are the calls of each rank in them, `first` is the number
    of the first one; `odd` are the ranks that differ, if known, and `examples` are calls that they
    added or left out, at least one."""

    since: int
    step: int
    first: int
    counts: tuple[int, ...]
    odd: tuple[int, ...]
    examples: tuple[Record, ...]


class Steps:
    """What is known about the steps of one group."""

    def __init__(self) -> None:
        self._even = 0
        self._last_even = -1
        self._last_call = 0
        self._bases: list[int] = []

    def look(self, group: GroupRecords) -> Shift | None:
        """The first step that is finished on all ranks and in which they made different numbers of
        calls, after several with equal numbers."""
        calls = [_calls(member) for member in group.ranks]
        if len(calls) < group.size or not all(map(_is_in_order, calls)):
            return None
        if are_forward and group.size != _size:  # its ranks may train different models
            return None
        calls = self._since_the_group_was_made(calls)
        first = max(records[0].step for records in calls)
        last = min(records[-1].step for records in calls) - 1
        for step in range(max(first, self._last_even + 1), last + 1):
            ends = [_last_call(records, step) for records in calls]
            if len(set(ends)) == 1:
                self._even, self._last_even, self._last_call = self._even + 1, step, ends[0]
            elif self._even < _ENOUGH:
                return None
            elif step > first:  # the step before is known, too
                return self._shift(calls, step, ends)
        return None

    def _since_the_group_was_made(self, calls: list[list[Record]]) -> list[list[Record]]:
        """The calls, with steps counted from the first one whose records are complete: ranks may
        have made different numbers of steps before."""
        if not self._bases:
            number = max(records[0].call or 0 for records in calls)
            steps = [
                next((record.step for record in records if record.call == number), 0)
                for records in calls
            ]
            self._bases = [step - min(steps) for step in steps]
        return [
            [replace(record, step=record.step - base) for record in records] if base else records
            for base, records in zip(self._bases, calls, strict=True)
        ]

    def _shift(
        self, calls: Sequence[Sequence[Record]], step: int, ends: Sequence[int]
    ) -> Shift | None:
        counts = [end - self._last_call for end in ends]
        a_step = [
            end - _last_call(records, step - 1) for end, records in zip(ends, calls, strict=True)
        ]
        usual, times = Counter(counts).most_common(1)[0]
        if 2 * times <= len(counts) and step == self._last_even + 1:  # then as in the step before
            usual = sum(record.step == step - 1 for record in calls[0])
        odd = tuple(rank for rank, count in enumerate(counts) if count != usual)
        if 2 * len(odd) > len(counts):
            odd = ()
        more = max(abs(count - usual) for count in counts) if odd else max(counts) - min(counts)
        whole = max(1, min(made for rank, made in enumerate(a_step) if rank not in odd))
        if not (are_marked or are_forward) and more % whole == 0:
            self._even = 0  # an optimizer that one rank alone did or did not step
            return None
        examples = _examples(calls, step, odd[0] if odd else 0)
        since = self._last_even + 1
        return Shift(since, step, self._last_call + 1, tuple(counts), odd, examples)


def _calls(member: RankRecords) -> list[Record]:
    return sorted(
        (record for record in member.records if record.call is not None),
        key=lambda record: record.call or 0,
    )


def _is_in_order(records: Sequence[Record]) -> bool:
    """Whether all calls of a rank come from a thread that counts its steps."""
    steps = [record.step for record in records]
    return bool(steps) and steps[-1] > 0 and steps == sorted(steps)


def _last_call(records: Sequence[Record], step: int) -> int:
    """Of records in order."""
    return records[bisect_right(records, step, key=lambda record: record.step) - 1].call or 0


def _examples(calls: Sequence[Sequence[Record]], step: int, rank: int) -> tuple[Record, ...]:
    """The calls that `rank` made more or less often than another rank."""
    own, other = (
        [record for record in calls[one] if record.step == step] for one in (rank, 0 if rank else 1)
    )
    more, less = (own, other) if len(own) > len(other) else (other, own)
    left = Counter((record.site, record.operation) for record in less)
    found = []
    for record in more:
        left[record.site, record.operation] -= 1
        if left[record.site, record.operation] < 0:
            found.append(record)
    return (*found,) or ((more or less or calls[rank])[-1],)


def sentence(group: GroupRecords, shift: Shift) -> str:
    """The verdict."""
    at = f" ({line_of(shift.examples[0].site)})" if shift.examples[0].site else ""
    if not shift.odd:
        made = ", ".join(f"rank {rank} made {count}" for rank, count in enumerate(shift.counts))
        return f"the ranks made different numbers of calls in {step_name(shift)}{at}: {made}"
    odd, rest = shift.counts[shift.odd[0]], {*range(len(shift.counts))} - {*shift.odd}
    usual = shift.counts[min(rest)]
    kinds = Counter(record.operation for record in shift.examples)
    much = " and ".join(f"{count} {operation}" for operation, count in kinds.items())
    if kinds.total() != abs(odd - usual):  # older calls have left the records
        much = name_number(abs(odd - usual), "call")
    did = f"left out {much}" if odd < usual else f"made {much} more"
    return (
        f"{name_ranks(shift.odd)} made {odd} calls in {step_name(shift)} where the others made "
        f"{usual}: {'it' if len(shift.odd) == 1 else 'they'} {did}{at}, and the calls of group "
        f"{group.name} have been shifted since"
    )


def step_name(shift: Shift) -> str:
    """ "step 5", "steps 5 to 7" """
    if shift.since == shift.step:
        return f"step {shift.step}"
    return f"steps {shift.since} to {shift.step}"


# -- steps that nobody marks -----------------------------------------------------------------------

_CODE = codecs.lookup("utf-16-le")  # now, for a failure may find no files to import it from
_EQUAL = re.compile("\0+")
_LONGEST = 500
_NEWEST = 4000
_TIMES = 3
"""A step is one that came so often in a row."""
_NEARLY = 0.9
"""A shorter period counts if it covers nearly as much: every multiple of a period is one."""


def find_steps(calls: Sequence[Hashable]) -> range:
    """Where each step begins: the indices of its first calls, and last the index after the last
    whole step. Empty if the calls do not repeat. A call is whatever is equal if it is the same
    call, such as its line, operation and bytes."""
    base = max(0, len(calls) - _NEWEST)
    numbers: dict[Hashable, int] = {}
    text = "".join(chr(numbers.setdefault(call, len(numbers))) for call in calls[base:])
    whole, count = int.from_bytes(_CODE.encode(text)[0], "little"), len(text)
    runs = {}
    for period in range(1, min(_LONGEST, count // _TIMES) + 1):
        # "\0" where a call is the one `period` later
        differs = (whole ^ whole >> 16 * period).to_bytes(2 * count, "little")
        differences = _CODE.decode(differs[: 2 * (count - period)])[0]
        if "\0" * (_TIMES - 1) * period not in differences:
            continue
        longest = max(_EQUAL.finditer(differences), key=lambda found: len(found[0]))
        runs[period] = longest.end() + period, len(longest[0]) + period
        if runs[period][1] >= _NEARLY * count:
            break
    most = max((length for _, length in runs.values()), default=0)
    for period, (stop, length) in runs.items():
        if length >= _NEARLY * most:
            first = base + stop - length
            return range(first, first + length // period * period + 1, period)
    return range(0)
