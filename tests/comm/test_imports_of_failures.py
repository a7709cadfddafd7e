"""The modules that a failure needs are loaded before it happens: by then, files may be
unreachable."""

from __future__ import annotations

from pathlib import Path

from user_programs import DEADLINE_S, write_program

PROGRAM = """
import os
import signal
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import unisono
import unisono.plan.algorithms  # names the algorithm of a mismatch; without it there is no name
from unisono.comm.shared_memory.exceptions import NEEDED_LATER

rank, folder = int(sys.argv[1]), sys.argv[2]
other = 1 - rank
ones = torch.ones
kinds = []


def fail(call, *args, **named):
    before = set(sys.modules)
    try:
        call(*args, **named)
    except Exception as error:
        str(error), repr(error)
        kinds.append(type(error).__name__)
        new = set(sys.modules) - before
        assert not new, f"{error!r} imported {new}"
    else:
        raise AssertionError(f"{call} raised nothing")


def fail_in_every_way(comm, has_deadlocks=True):
    groups = iter([comm.split([0, 1], str(number)) for number in range(9)])
    fail(next(groups).all_reduce, ones(1 + rank))
    fail(next(groups).all_to_all, [ones(1), ones(1)], [ones(1), ones(1 + rank)])
    group = next(groups)
    group.timeout_s = 0.2
    if rank == 0:
        fail(group.barrier)
    if has_deadlocks:
        fail(next(groups).recv, ones(1), other)
        group = next(groups)
        fail(group.send if rank else group.recv, ones(1 + rank), other)
    group = next(groups)
    group.abort("enough")
    fail(group.barrier)
    group = next(groups)
    fail(group.all_reduce, torch.ones(1, dtype=torch.int64), "avg")
    fail(group.broadcast, ones(1), 7)
    fail(group.all_reduce, [ones(1), None])
    fail(group.send, ones(1), 7)
    work = group.irecv(ones(1), other)
    fail(work.wait, 0.01)
    work = group.all_reduce(ones(1 + rank), async_op=True)
    fail(work.wait)
    group = next(groups)
    group.close()
    fail(group.barrier)
    fail(group.split, [0, 1])


comm = unisono.init(rank=rank, size=2, rendezvous=f"{folder}/meeting", timeout_s=60)
needed = {*NEEDED_LATER, "unisono.torch_backend.futures"}
end = time.monotonic() + 60
while not needed <= sys.modules.keys() and time.monotonic() < end:
    time.sleep(0.01)

fail_in_every_way(comm)
fail(comm.empty, 2**50)
fail(comm.empty, 2**70)
group = comm.split([0, 1])
if rank == 0:
    fail(group.all_reduce, ones(4))
else:
    try:
        group.all_reduce(ones(4), algorithm="ring")
    except unisono.CollectiveMismatch:
        pass

group = dist.new_group()
fail(dist.send if rank else dist.recv, ones(1 + rank), other, group=group)
late = dist.new_group()
late.set_timeout(timedelta(seconds=0.3))
if rank == 0:
    fail(dist.barrier, late)
work = dist.all_reduce(ones(2 + rank), group=dist.new_group(), async_op=True)
fail(work.wait)
fail(work.get_future().wait)

from unisono.training import weight_update

model = torch.nn.Linear(2, 2)
group = comm.split([0, 1])
weight_update(model, group, src=0)
fail(weight_update, torch.nn.Linear(2 + rank, 2), group, src=0)
aborted = comm.split([0, 1])
aborted.abort("enough")
fail(weight_update, model, aborted, src=0)

from unisono.comm.factory import wrap

gloo = wrap(dist.new_group(backend="gloo", timeout=timedelta(seconds=60)))
gloo.barrier()
fail_in_every_way(gloo, has_deadlocks=False)

from unisono.comm.factory import connect
from unisono.comm.meeting.board import Board

os.environ["UNISONO_HOSTID"] = str(rank)
store = dist.FileStore(f"{folder}/store", 2)
hosts = connect(Board(store), rank, 2, timeout_s=60)
fail_in_every_way(hosts)

unisono.watch.start()
fail_in_every_way(comm)

hosts.barrier()
gloo.barrier()
weights = comm.split([0, 1])
weight_update(model, weights, src=0)
comm.barrier()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
fail(comm.barrier)
fail(comm.split, [0, 1])
fail(weight_update, model, weights, src=0)
fail(dist.barrier)
fail(dist.new_group)
fail(hosts.barrier)
fail(hosts.split, [0, 1])
fail(gloo.barrier)
print(len(kinds), sorted(set(kinds)), flush=True)
os._exit(0)
"""


def test_a_failure_imports_nothing(tmp_path: Path) -> None:
    program = write_program(tmp_path, PROGRAM)
    ranks = [program.start(str(rank), str(tmp_path)) for rank in range(2)]
    (told, errors), (_, others) = (rank.communicate(timeout=DEADLINE_S) for rank in ranks)
    assert ranks[0].returncode == 0, f"{errors}\n{others}"
    assert ranks[1].returncode == -9, others
    for kind in ("CollectiveTimeout", "DeadlockError", "MessageMismatch", "PeerLost"):
        assert kind in told
