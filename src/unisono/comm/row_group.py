"""The arguments of collectives that are carried out on rows: what each may be, by the rules of all
implementations."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn, TypeVar

import torch

from unisono.comm.arguments import (
    LISTS,
    NotARank,
    check_coalesced,
    check_own_part,
    check_parts,
    check_reduction,
    check_tensor,
    check_wide_side,
)
from unisono.comm.base import AnyOp, Communicator, Op, PremulSum, count, dtype_name
from unisono.comm.overlaps import overlap_complaint
from unisono.comm.rows import cut, row_of, write_back

LAST_TAG = 2**31 - 2
Rows = list[torch.Tensor]
_T = TypeVar("_T")


class RowGroup(Communicator):
    """A member of a group that checks its arguments before it tells the peers of a call."""

    _also: str | None = None
    """A reduction that this implementation has beside the usual ones."""

    @property
    @abstractmethod
    def _devices(self) -> Collection[str]:
        """The kinds of devices whose tensors this group takes."""

    @abstractmethod
    def _raise_if_ended(self) -> None:
        """Raise the cause, if the group has ended."""

    @abstractmethod
    def _refuse(self, what: str, why: str, kind: type[Exception] = ValueError) -> NoReturn:
        """Raise about our own arguments; the peers learn of it in their meeting."""

    def refuse(self, operation: str, why: str) -> NoReturn:
        self._raise_if_ended()
        self._refuse(operation, why)

    def _checked(self, what: str, check: Callable[..., _T], *arguments: Any) -> _T:
        """What a check of `arguments` returns, or its refusal as this group's."""
        self._raise_if_ended()
        try:
            return check(*arguments)
        except NotARank as error:
            self._refuse(what, error.among(self.global_ranks))
        except (ValueError, TypeError) as error:
            self._refuse(what, str(error), type(error))

    def _tensors(self, what: str, tensors: Any, writable: bool) -> list[Any]:
        self._raise_if_ended()
        many = list(tensors) if isinstance(tensors, LISTS) else [tensors]
        for tensor in many:
            self._checked(what, check_tensor, tensor, writable, self._devices)
        return many

    def _check_overlaps(
        self,
        what: str,
        outputs: Sequence[Any],
        inputs: Sequence[Any] = (),
        coalesced: bool = False,
    ) -> None:
        why = overlap_complaint(what, outputs, inputs, self.rank, self.size, coalesced)
        if why:
            self._refuse(what, why)

    def _check_op(self, what: str, op: AnyOp, tensors: list[Any]) -> Op:
        dtypes = map(dtype_name, tensors)
        name, factor = self._checked(what, check_reduction, op, dtypes, self._also)
        return PremulSum(factor) if name == "premul_sum" else name

    def _check_wide_side(self, what: str, root: int, wide: Any, side: str) -> None:
        self._checked(what, check_wide_side, root, self.rank, self.size, wide, side)

    def _pairs(self, what: str, output: Any, input: Any, coalesced: bool) -> tuple[Any, Any]:
        """Both sides as lists of one length: of one tensor each, unless the call is coalesced."""
        if not coalesced:
            return [output], [input]
        self._checked(what, check_coalesced, output, input)
        return output, input

    def _check_own_parts(self, what: str, wide: Sequence[WideSide], narrow: list[Any]) -> None:
        for side, tensor in zip(wide, narrow, strict=True):
            sizes = side.counts[self.rank], count(tensor)
            given, taken = sizes if what in ("reduce_scatter", "scatter") else sizes[::-1]
            dtypes = side.dtype, dtype_name(tensor)
            self._checked(what, check_own_part, given, taken, dtypes)


class WideSide:
    """The wide side of a collective: one tensor, cut evenly, or one tensor per rank."""

    def __init__(self, comm: RowGroup, what: str, given: Any, writable: bool) -> None:
        self._size = comm.size
        self.tensors = comm._tensors(what, given, writable)
        self._is_list = isinstance(given, LISTS)
        self.counts = comm._checked(what, check_parts, self.tensors, comm.size, self._is_list)
        self.dtype = dtype_name(self.tensors[0])
        self._rows: Rows = []

    def parts(self) -> Rows:
        """A row for each rank."""
        self._rows = [row_of(tensor) for tensor in self.tensors]
        return self._rows if self._is_list else cut(self._rows[0], self._size)

    def write_back(self) -> None:
        """Write what the rows have become into the tensors."""
        for tensor, row in zip(self.tensors, self._rows, strict=True):
            write_back(tensor, row)
