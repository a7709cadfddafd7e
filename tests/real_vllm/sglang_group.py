"""A rank of a group that SGLang's own helper makes: `sglang_group.py RANK SIZE PORT`.

The function is extracted from SGLang's file, because its other imports need a GPU.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def helper() -> Any:
    """SGLang's init_custom_process_group, as it is."""
    (file,) = (
        path for folder in sys.path if (path := Path(folder, "sglang/srt/utils/common.py")).exists()
    )
    found = [
        node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "init_custom_process_group"
    ]
    names: dict[str, Any] = {"torch": torch, "torch_release": (2, 13)}
    exec(compile(ast.Module(found, []), str(file), "exec"), names)
    return names["init_custom_process_group"]


def main(rank: int, size: int, port: int) -> None:
    group = helper()(
        backend="unisono",
        init_method=f"tcp://127.0.0.1:{port}",
        world_size=size,
        rank=rank,
        group_name="weight_update_group",
    )
    weights = [torch.full((3, 4), float(rank), dtype=torch.bfloat16), torch.full((5,), rank)]
    works = [dist.broadcast(weight, src=0, group=group, async_op=True) for weight in weights]
    for work in works:
        work.wait()
    dist.barrier(group=group)
    assert all(weight.eq(0).all() for weight in weights)
    print(dist.get_backend(group))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
