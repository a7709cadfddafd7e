"""Which frames a program shows when it ends with an error, however it was started."""

from __future__ import annotations

import pytest

from user_programs import WriteProgram

PROGRAM = """
    import sys, numpy, unisono
    def own_hook(kind, error, frames):
        print("own hook:", kind.__name__, file=sys.stderr)
        sys.__excepthook__(kind, error, frames)
    if sys.argv[1] == "own hook":
        sys.excepthook = own_hook
    comm = unisono.init()
    if sys.argv[1] == "invalid argument":
        comm.all_reduce(numpy.ones(1), "circular mean")
    if sys.argv[1] == "bug":
        comm._splits = None
        comm.split([0])
    comm.abort("enough")
    comm.barrier()
"""


@pytest.mark.parametrize("what", ["error", "own hook", "invalid argument", "bug", "all wanted"])
def test_the_last_frame_is_the_users_unless_unisono_may_be_at_fault(
    program: WriteProgram, what: str
) -> None:
    environment = {"UNISONO_TRACEBACK": "full" if what == "all wanted" else ""}
    err = program(PROGRAM).run(what, environment=environment).stderr
    own, _, frames = err.partition("Traceback (most recent call last):\n")
    assert own == ("own hook: GroupAborted\n" if what == "own hook" else "")
    assert frames.splitlines()[1].lstrip().startswith("comm.")
    assert (frames.count("  File ") > 1) is (what in ("bug", "all wanted"))
