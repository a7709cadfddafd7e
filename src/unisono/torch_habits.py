"""What users of torch.distributed may write here, and the call that they mean."""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

_NON_GROUP_MEMBER = -100  # torch.distributed.GroupMember.NON_GROUP_MEMBER

INSTEAD = {
    "P2POp": 'unisono.Message("send", tensor, peer), where peer is a rank of the group',
    "ReduceOp": 'a name, op="sum"; torch\'s own ReduceOp.SUM works as well',
    "all_gather_into_tensor": "unisono.all_gather(tensor, out=wide)",
    "all_reduce_coalesced": "unisono.all_reduce([a, b])",
    "all_to_all_single": "unisono.all_to_all(tensor)",
    "broadcast_object_list": "obj = unisono.broadcast_object(obj, src)",
    "destroy_process_group": "unisono.shutdown()",
    "get_global_rank": "comm.global_ranks[rank]",
    "get_group_rank": "comm.global_ranks.index(global_rank)",
    "get_process_group_ranks": "comm.global_ranks",
    "init_process_group": "unisono.init()",
    "new_group": "unisono.get_world().split(ranks)",
    "reduce_scatter_tensor": "unisono.reduce_scatter(tensor)",
    "scatter_object_list": "unisono.broadcast_object(objects, src)[rank]",
    "spawn": "unisono.launch(work, ranks, args)",
}
"""torch's names that unisono does not have, and what to use instead."""

ON_COMMUNICATOR = {
    "all_gather_into_tensor": "comm.all_gather(output, input)",
    "all_gather_object": "unisono.all_gather_object(obj, group=comm)",
    "all_reduce_coalesced": "comm.all_reduce([a, b])",
    "all_to_all_single": "comm.all_to_all(output, input)",
    "broadcast_object": "unisono.broadcast_object(obj, src, group=comm)",
    "broadcast_object_list": "unisono.broadcast_object(obj, src, group=comm)",
    "gather_object": "unisono.gather_object(obj, dst, group=comm)",
    "get_rank": "comm.rank",
    "get_world_size": "comm.size",
    "new_group": "comm.split(ranks)",
    "reduce_scatter_tensor": "comm.reduce_scatter(output, input)",
    "world_size": "comm.size",
}
"""The same for a Communicator."""

_RIGHT_CALLS = {
    "all_gather": "outputs = unisono.all_gather(tensor)",
    "all_gather_object": "objects = unisono.all_gather_object(obj)",
    "all_to_all": "outputs = unisono.all_to_all(inputs), or all_to_all(inputs, out=outputs)",
    "gather": "outputs = unisono.gather(tensor, dst)",
    "gather_object": "objects = unisono.gather_object(obj, dst)",
    "reduce_scatter": "part = unisono.reduce_scatter(tensors, op)",
    "scatter": "part = unisono.scatter(tensors, src), with None for tensors on the other ranks",
}


def describe_output_first(function: str) -> str:
    """The hint for a caller who passed torch's outputs to this function of ours, or ""."""
    right = _RIGHT_CALLS.get(function)
    if right is None:
        return ""
    return f"unisono takes inputs first and returns results (torch takes outputs first): {right}"


def name_type(thing: object) -> str:
    """ "a list", "an int"."""
    name = type(thing).__name__
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def may_be_output_first(argument: Any) -> bool:
    """Whether it may be an argument for torch's function: tensors, objects, a rank, a ReduceOp."""
    if type(argument) is int:
        return argument >= 0
    if isinstance(argument, (list, tuple)):
        return not argument or not all(type(part) is int for part in argument)
    return hasattr(argument, "dtype") or type(argument).__name__ in ("ReduceOp", "RedOpType")


def one_root(comm: Any, operation: str, root: Any, other: Any) -> Any:
    """The root of a collective, which may also be passed by torch's name, `src` or `dst`."""
    is_same = root is None or root is other
    with contextlib.suppress(Exception):  # objects that cannot be compared
        is_same = is_same or bool(root == other)
    if not is_same:
        why = "pass root, or torch's name for it (src, dst), not both"
        comm.reject_call(operation, f"{root!r} and {other!r} are two different roots: {why}")
    return other


def refuse_input(comm: Any, operation: str, given: Any = None) -> NoReturn:
    """Refuse a collective of a Communicator without an input, or with one in the output's place."""
    what = "None" if given is None else name_type(given)
    comm.reject_call(
        operation,
        f"{what} was passed instead of a tensor as the input of comm.{operation}(output, input); "
        f"unisono.{operation}(input, group=comm) takes only an input and returns the result",
    )
    raise AssertionError  # refusing always raises


def refuse_splits(comm: Any) -> NoReturn:
    """Refuse the sizes that torch's all_to_all_single takes after output and input."""
    lists = "list(output.split(output_splits)), list(input.split(input_splits))"
    comm.reject_call("all_to_all", f"parts of different sizes are lists: comm.all_to_all({lists})")
    raise AssertionError  # refusing always raises


class Absent:
    """A name of torch's that a Communicator does not have. A descriptor, because a `__getattr__`
    would slow down every method call."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, comm: object, kind: type) -> NoReturn:
        instead = ON_COMMUNICATOR[self._name]
        raise AttributeError(f"a Communicator has no {self._name}: use {instead}")


class WithoutTorchNames:
    """A Communicator has none of these names, and says what to use."""


for _name in ON_COMMUNICATOR:
    setattr(WithoutTorchNames, _name, Absent(_name))


def describe_no_group(group: Any) -> str:
    """The message for something that is not a group, or not one of this process."""
    if type(group) is int and group == _NON_GROUP_MEMBER:
        return (
            "this process is not a member of that group (it has GroupMember.NON_GROUP_MEMBER): "
            "only members may call; check `if dist.get_rank(group) >= 0` first"
        )
    kind = name_type(group)
    if isinstance(group, (list, tuple, range)) and all(type(rank) is int for rank in group):
        return (
            f"{group!r} is a list of ranks, not a group: make a group once, with "
            f"unisono.get_world().split({list(group)}) or torch.distributed.new_group, and pass it"
        )
    if hasattr(group, "along") and hasattr(group, "dp_group"):
        return f"{kind} is not a group but has many: pass one, such as manager.dp"
    if hasattr(group, "get_group") and hasattr(group, "mesh_dim_names"):
        return f'{kind} is not a group but has many: pass one, such as mesh.get_group("dp")'
    if hasattr(group, "comm") and hasattr(group, "ranks"):
        return f"{kind} is not a group: pass its .comm"
    if isinstance(group, str):
        return f"{group!r} is a name, not a group: pass the group itself, such as manager.tp"
    if hasattr(group, "shape") or isinstance(group, (list, tuple, dict, int, float)):
        return f"{kind} is not a group: group= is a Communicator, a torch process group or None"
    return f"{group!r} is not a group that this process is a member of"
