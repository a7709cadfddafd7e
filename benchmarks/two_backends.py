"""Ranks with both gloo and unisono, for the benchmarks that compare them in turns."""

from __future__ import annotations

import os

from unisono.world.environment import read_rank_info


class TwoBackends:
    """One rank of `unisono.launch`, with a group of torch.distributed on each backend."""

    def __init__(self, folder: str) -> None:
        import torch
        import torch.distributed as dist

        from unisono.torch_backend import autoload

        autoload.register()  # for a source tree that is not installed
        torch.set_num_threads(1)
        info = read_rank_info()
        assert info is not None
        self.rank, self.size = info.rank, info.size
        store = dist.FileStore(os.path.join(folder, "store"), self.size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)
        self.groups = {"gloo": dist.group.WORLD, "unisono": dist.new_group(backend="unisono")}
        self.comm = self.groups["unisono"].comm

    def slowest(self, value: float) -> float:
        """The largest of the ranks' values, on every rank."""
        import torch

        tensor = torch.tensor([value], dtype=torch.float64)
        self.comm.all_reduce(tensor, "max")
        return float(tensor)

    def mean(self, value: float) -> float:
        """The mean of the ranks' values, on every rank."""
        import torch

        tensor = torch.tensor([value], dtype=torch.float64)
        self.comm.all_reduce(tensor, "avg")
        return float(tensor)
