"""Operators that write to their first argument: csrc/torch_ops has their bodies for CPU tensors."""

import functools
from pathlib import Path
from typing import Any

import torch

from unisono.comm.by_name import communicator_named
from unisono.comm.engine import hide_files, native
from unisono.comm.engine.numbers import Operation
from unisono.errors import EngineUnavailable
from unisono.operators import general_path

OPERATORS = {
    "all_reduce_": (Operation.ALL_REDUCE, '(Tensor(a!) x, str group, str op="sum") -> ()'),
    "broadcast_": (Operation.BROADCAST, "(Tensor(a!) x, str group, int root=0) -> ()"),
    "sum_to_root_": (Operation.REDUCE, "(Tensor(a!) x, str group, int root=0) -> ()"),
    "all_gather_": (Operation.ALL_GATHER, "(Tensor(a!) output, Tensor input, str group) -> ()"),
    "reduce_scatter_": (
        Operation.REDUCE_SCATTER,
        '(Tensor(a!) output, Tensor input, str group, str op="sum") -> ()',
    ),
    "all_to_all_": (Operation.ALL_TO_ALL, "(Tensor(a!) output, Tensor input, str group) -> ()"),
}
_GO_ON = (
    "go_on(Tensor(a!) output, Tensor input, str group, int operation, str op, int root, int status)"
    " -> str"
)


def register() -> Any:
    """Define the operators, and register their bodies. Raises EngineUnavailable if this torch
    lacks what they need."""
    library: Any = torch.library.Library("unisono", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(_GO_ON)
    library.impl("go_on", general_path.go_on, "CompositeExplicitAutograd")
    for name, (operation, schema) in OPERATORS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CompositeExplicitAutograd", "Conjugate", "Negative"):
            library.impl(name, functools.partial(_run, operation), key)
        check = functools.partial(_check, operation)
        torch.library.register_fake(f"unisono::{name}", check, lib=library)
    hide_files(str(Path(torch.__file__).parent))  # errors show the user's line, not torch's
    missing = native.load_operators(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    if missing is not None:
        raise EngineUnavailable(
            f"torch {torch.__version__} lacks {missing}, which unisono's operators need"
        )
    for name in OPERATORS:
        packet = getattr(torch.ops.unisono, name)
        for operator in (packet, packet.default):
            if hasattr(operator, "_op"):  # without it, failures are RuntimeErrors
                operator._op = general_path.raising_ours(operator._op)
    return library


def _parse(operation: Operation, output: Any, *more: Any) -> tuple[Any, Any, str, str, int]:
    """Output, input, group, reduction and root of an operator's arguments."""
    input, (group, *last) = (output, more) if isinstance(more[0], str) else (more[0], more[1:])
    given: Any = last[0] if last else "sum"
    op, root = (given, 0) if isinstance(given, str) else ("sum", given)
    return output, input, group, op, root


def _run(operation: Operation, *arguments: Any) -> None:
    """The body for tensors that are not in the CPU's memory, or are lazily conjugated."""
    output, input, group, op, root = _parse(operation, *arguments)
    general_path.call(operation, output, input, group, op, root)


def _check(operation: Operation, *arguments: Any) -> None:
    """What a compiler may know of a call: that it writes to its output, and whether it fits."""
    output, input, group, _, _ = _parse(operation, *arguments)
    if torch.is_grad_enabled() and output.requires_grad:
        raise ValueError(f"{operation.name.lower()} on group {group}: {general_path.NO_GRADIENT}")
    if output is input:
        return
    size = communicator_named(group).size
    outputs = size if operation == Operation.REDUCE_SCATTER else 1
    inputs = size if operation == Operation.ALL_GATHER else 1
    torch._check(  # type: ignore[no-untyped-call]
        output.numel() * outputs == input.numel() * inputs,
        lambda: (
            f"{operation.name.lower()} on group {group} of {size}: an output of "
            f"{output.numel()} elements does not fit an input of {input.numel()}"
        ),
    )
