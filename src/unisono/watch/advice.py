"""What to do about a report, by its kind: the first sentence is the one to start with."""

from __future__ import annotations

from collections.abc import Mapping

ADVICE: Mapping[str, tuple[str, ...]] = {
    "hang": (
        "The rank that is missing must get past its line and make the call that the others are "
        "in, or no rank may make it.",
        "A branch on the rank, or on data that differs between ranks, must not contain a "
        "collective call.",
        "If the rank is only slow (a checkpoint, a first batch), raise the timeout of the group, "
        "or let all ranks wait for it.",
    ),
    "lost": (
        "Find out why that rank ended: read its traceback or, after SIGKILL, look in the "
        "kernel's log (dmesg) for an out-of-memory kill.",
        "The other ranks only report that it is gone; their tracebacks are consequences.",
    ),
    "cycle": (
        "Make all ranks enter the calls in the same order, also calls of different groups.",
        "If two ranks exchange messages, one must receive first; or use isend and irecv, or "
        "sendrecv.",
    ),
    "mismatch": (
        "Compare the calls named above: the rank that differs took another branch, or has a "
        "tensor of another shape or type.",
        "The last batch of an epoch is often smaller: drop it, or pad it.",
    ),
    "apart": (
        "From that call on this rank is one call ahead of the others, or behind: look for a call "
        "in a branch that only this rank takes, or skips.",
        "Call unisono.watch.step() at the start of each iteration to learn in which one it "
        "happens.",
    ),
    "threads": ("Give each thread that makes calls a group of its own.",),
    "stalled": (
        "The rank reached the call and did not go on: check whether it is stopped (a debugger, "
        "Ctrl-Z), swapping, or without a core.",
    ),
    "elsewhere": (
        "Read the reports of the other machines, too: the machine of the missing rank says where "
        "it is.",
    ),
    "slow": (
        "Look at what that rank does meanwhile: more data or work than the others, a slower disk, "
        "or another program on its cores.",
    ),
    "failed": ("Read the exception of the rank that failed first; the others follow from it.",),
}
