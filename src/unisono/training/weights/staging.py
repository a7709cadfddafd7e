"""Where an engine receives new weights, and how they replace the old ones."""

import operator
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from unisono.comm.communicator import Communicator
from unisono.comm.shared_memory.allocation import is_in_a_block
from unisono.torch_autograd import outlasting_inference_mode
from unisono.training.memory import shares_storage
from unisono.training.weights.plan import Unit, WeightPlan
from unisono.training.weights.shards import Held, HeldTensor, held_tensors, name_of
from unisono.training.weights.transfers import writing_to

Step = Callable[[], object]


class WeightStaging:
    """A second copy of an engine's weights. After a switch the old memory is reused for the next
    update: getting 2 GB from the system again costs as much as filling it."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """By name; tied names share a tensor."""
        self._firsts: Mapping[str, str] = {}  # name -> the first of those that it is tied to
        self.is_reused = False
        """Whether all tensors are those of the last update, with its result."""
        self._prepared_for: tuple[Any, ...] = ()
        """The plan, ties and packed names of the last update, if nobody else has had the
        tensors."""
        self._served: dict[str, int] = {}  # where the engine's tensors are a trainer's memory

    @outlasting_inference_mode()
    def prepare(
        self,
        plan: WeightPlan,
        ties: Mapping[str, str] | None,
        mine: Held | None,
        device: torch.device,
        packed: Container[str] = (),
    ) -> None:
        """Prepare a tensor for every name to be received, unless it stays `packed` until the swap.
        `ties` are the engine's `tied_names`, and `mine` its weights; None: it has none of its own,
        and takes the trainer's."""
        asked = (plan, ties, packed)  # other weights have other ties, perhaps equal ones
        if (
            self._prepared_for
            and all(map(operator.is_, self._prepared_for, asked))
            and all(_is_reusable(self.tensors[name]) for name in set(self._firsts.values()))
        ):
            self.is_reused = True
            return
        self._prepared_for = ()
        spare, self.tensors = self.tensors, {}
        self.is_reused = mine is not None
        firsts = _firsts_of(plan, ties)
        self._firsts = {
            name: first for name, first in firsts.items() if name_of(first) not in packed
        }
        for name in set(self._firsts.values()):
            if mine is None:
                self.tensors[name] = _empty(plan, name, device)
                continue
            own, old = mine.tensors[name], spare.pop(name, None)
            like = own.shape, own.dtype, device.type
            is_like = old is not None and (old.shape, old.dtype, old.device.type) == like
            if old is None or not is_like or not _is_reusable(old):
                old, self.is_reused = torch.empty_like(own.detach(), device=device), False
            self.tensors[name] = old
        self._share_tied()
        self._prepared_for = asked

    @outlasting_inference_mode()
    def alias(
        self,
        plan: WeightPlan,
        ties: Mapping[str, str] | None,
        views: Mapping[str, torch.Tensor],
    ) -> None:
        """Use `views` of the trainer's memory for every name, instead of memory of our own."""
        firsts = _firsts_of(plan, ties)
        self._firsts = {
            name: first for name, first in firsts.items() if ties is None or first in views
        }
        device = next((view.device for view in views.values()), None)
        self.tensors = {
            first: views[first] if first in views else _empty(plan, first, device)
            for first in set(self._firsts.values())
        }
        self._share_tied()

    def _share_tied(self) -> None:
        self.tensors = {name: self.tensors[first] for name, first in self._firsts.items()}

    def received(self, mine: Held) -> Held:
        """The tensors with their boxes of the whole."""
        return Held(self.tensors, mine.boxes) if mine else held_tensors(self.tensors)

    def lend(self) -> dict[str, torch.Tensor]:
        """Show the tensors to a function of the user, which may keep some."""
        self._prepared_for = ()
        return dict(self.tensors)

    def hand_over(self) -> dict[str, torch.Tensor]:
        """Give the tensors to a commit, which may keep them."""
        tensors, self.tensors = self.lend(), {}
        return tensors

    def swap(self, mine: Held, then: Step, unpacking: Sequence[Step] = ()) -> None:
        """Put the new weights into the engine's tensors, keep the old memory, and call `then`: all
        or nothing, even if something raises. `unpacking` writes those that are packed."""
        kept = dict(self.tensors)
        swaps: list[Step] = []
        returns: list[Step] = []
        copies: list[Step] = []
        with outlasting_inference_mode():
            for name in set(self._firsts.values()):
                own, new = mine.tensors[name], self.tensors[name]
                if own.device == new.device and is_alone(own) and not own.is_inference():
                    kept[name] = own.data
                    swaps.append(partial(setattr, own, "data", new))
                    returns.append(partial(setattr, own, "data", kept[name]))
                else:  # another tensor views this memory: it must change there, too
                    copies.append(partial(torch.Tensor.copy_, own.detach(), new))
        twins = {name: kept[first] for name, first in self._firsts.items()}
        keeping = partial(setattr, self, "tensors", twins)
        with writing_to([mine.tensors[name] for name in self._firsts]):
            do_all_or_none([*swaps, *unpacking, *copies, keeping, then], returns)

    def check_can_serve(self, mine: Held) -> None:
        """Raise ValueError for tensors whose memory cannot be replaced by the trainer's."""
        for name, own in self._to_be_moved(mine):
            if own.is_inference() or shares_storage(own):
                why = (
                    "made in inference mode" if own.is_inference() else "shared with other tensors"
                )
                raise ValueError(
                    f"alias=True: the memory of {name!r} cannot be replaced by the trainer's "
                    f"because it is {why}"
                )

    def is_served(self, mine: Held) -> bool:
        """Whether the engine's tensors are still where `serve` put them."""
        return self._served == {
            name: mine.tensors[name].data_ptr() for name in self._served if name in mine
        }

    def serve(self, mine: Held, then: Step) -> None:
        """Point the engine's tensors at the trainer's memory, and call `then`: all or nothing."""
        moved = self._to_be_moved(mine)
        with outlasting_inference_mode():
            steps = [partial(setattr, own, "data", self.tensors[name]) for name, own in moved]
            returns = [partial(setattr, own, "data", own.data) for _, own in moved]
        do_all_or_none([*steps, then], returns)
        self._served = {name: view.data_ptr() for name, view in self.tensors.items()}

    def _to_be_moved(self, mine: Held) -> list[tuple[str, torch.Tensor]]:
        """The engine's tensors that are not there yet, each once."""
        moved = {}
        for name, view in self.tensors.items():
            own = mine.tensors[name]
            if own.data_ptr() != view.data_ptr() or own.stride() != view.stride():
                moved[id(own)] = name, own
        return list(moved.values())


def view_of(comm: Communicator, unit: Unit) -> torch.Tensor:
    """A part of a trainer's tensor in shared memory. Raises RuntimeError if the trainer has dropped
    it."""
    assert unit.place is not None
    memory = comm.transport.memory(unit.place.number)
    if memory is None:
        raise RuntimeError(f"rank {unit.sender}'s weights are no longer in shared memory")
    first: Any = memory.tensor(unit.sender, 0, (1,), torch.uint8)  # in all of its memory there
    view = torch.empty(0, dtype=unit.dtype)
    offset = unit.place.offset // unit.dtype.itemsize
    view.set_(first.untyped_storage(), offset, unit.held.shape, unit.place.strides)
    return HeldTensor(view, (), unit.held).part(unit.box)


def _firsts_of(plan: WeightPlan, ties: Mapping[str, str] | None) -> Mapping[str, str]:
    """Each name -> the first of those that it is tied to: on the engine, or on the trainer if the
    engine has no weights of its own."""
    if ties is None:
        return {name: tensor.first for name, tensor in plan.tensors.items()}
    return ties


def _empty(plan: WeightPlan, name: str, device: torch.device | None) -> torch.Tensor:
    ours = plan.tensors[name]
    return torch.empty(ours.whole, dtype=ours.travels_as, device=device)


def do_all_or_none(steps: Sequence[Step], returns: Sequence[Step]) -> None:
    """Run all these steps. If one raises, run `returns`, which restore the old state, and raise.

    A signal handler, which may raise (Ctrl-C does), runs between two Python instructions. So there
    are none: the steps are C functions, one C call runs them all, and an exception before or after
    it finds none or all of them done.
    """
    completed: list[bool] = []
    try:
        _run([*steps, partial(completed.append, True)])
    except BaseException:
        if not completed:
            _run(returns)
        raise


def _run(steps: Sequence[Step]) -> None:
    deque(map(operator.call, steps), maxlen=0)


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether no other tensor and no other process uses this one's memory."""
    if tensor.is_cpu and (tensor.untyped_storage().is_shared() or is_in_a_block(tensor.data_ptr())):
        return False
    return not shares_storage(tensor)


def _is_reusable(tensor: torch.Tensor) -> bool:
    """Whether its memory is there, which the engine may have freed, and nobody has kept a view."""
    there = tensor.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()
    return there and is_alone(tensor)
