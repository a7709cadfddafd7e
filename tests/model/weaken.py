"""Weaken each memory order of the engine in turn, and see whether GenMC finds a counterexample.

    python tests/model/weaken.py               every harness, then every order (make model)
    python tests/model/weaken.py --only abort  rows and harnesses whose name contains the word

Rows are those of the table in docs/architecture.md. An order that could be weaker has a reason, and
a reason why it stays.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from genmc import HERE, MISSING, Change, check, tool


@dataclass(frozen=True)
class Weakening:
    """One order of a row, weaker; `harness` should find a counterexample, unless `would_do` argues
    that there is none."""

    row: str
    what: str
    harness: str
    changes: tuple[Change, ...]
    would_do: str = ""


def _weaken(
    row: str, what: str, harness: str, file: str, old: str, new: str, would_do: str = ""
) -> Weakening:
    return Weakening(row, what, harness, (Change(file, old, new),), would_do)


def _order(
    row: str, what: str, harness: str, file: str, around: str, orders: str, would_do: str = ""
) -> Weakening:
    """`around` has {} in place of the order; `orders` is "from -> to"."""
    before, after = (f"memory_order_{order}" for order in orders.split(" -> "))
    old, new = around.replace("{}", before), around.replace("{}", after)
    return _weaken(row, f"{what}: {orders}", harness, file, old, new, would_do)


_PLAIN = re.compile(r"(atomic_\w+|publish_to_peer|read_from_peer)(\((?:[^()]|\([^()]*\))*)\)")


def _plain(
    row: str, what: str, harness: str, file: str, old: str, order: str, would_do: str = ""
) -> Weakening:
    """`old` has an operation without an explicit order, which is seq_cst; the rest identifies
    it."""

    def with_order(plain: re.Match[str]) -> str:
        name = {"publish_to_peer": "atomic_store", "read_from_peer": "atomic_load"}
        orders = f"memory_order_{order}" + ", memory_order_relaxed" * ("compare" in plain[1])
        return f"{name.get(plain[1], plain[1])}_explicit{plain[2]}, {orders})"

    new = _PLAIN.sub(with_order, old, count=1)
    return _weaken(row, f"{what}: seq_cst -> {order}", harness, file, old, new, would_do)


def _passed(
    row: str, file: str, old: str, what: str, asleep: str, awake: str
) -> tuple[Weakening, Weakening]:
    """A store or load of publish_to_peer or read_from_peer: `asleep` finds a missed wake-up if it
    is weaker, `awake` finds that the data it guards is missing if it is relaxed."""
    weaker = "release" if what == "store" else "acquire"
    return (
        _plain(row, what, asleep, file, old, weaker),
        _plain(row, what, awake, file, old, "relaxed"),
    )


_PUBLISH = "atomic_store_explicit(flag, value, {});\n    if"
_AWAIT = "if (atomic_load_explicit(flag, {}) >= target) return UN_OK;"
_REACHED = """static bool reached(const flag_t *flag, uint64_t target) {
    return atomic_load_explicit(flag, {})"""
_CLOSED = "atomic_store_explicit(&mine->closed, 1, {});"
_RELEASED = "atomic_fetch_add(&header_of(b)->released, 1)"
_ABORT = "atomic_compare_exchange_strong(&g->segment.header->abort, &none, word)"
_ABORT_LOAD = "atomic_load_explicit(&g->segment.header->abort, memory_order_{})"
_RECORD_FENCE = (
    "atomic_thread_fence(memory_order_release); /* nothing below before the line above */"
)
_NOTE_FENCE = "atomic_thread_fence(memory_order_release); /* as above */"
_NOTE_READ_FENCE = "atomic_thread_fence(memory_order_acquire);"
_READ_FENCE = "    atomic_thread_fence(memory_order_acquire);\n"
_GIVER_FENCE = "atomic_thread_fence(memory_order_release); /* see look_at_abort */"
_WRITING_LOAD = "atomic_load(&control_of(g, rank)->writing)"
_LOCKED = "atomic_exchange_explicit(&g->worker.call_lock, 2, {})"
_UNLOCKED = "atomic_exchange_explicit(&g->worker.call_lock, 0, {})"
_TRIED = "&none, 1,\n                                                   {}"

_MIRROR = "atomic_store_explicit(flag, value, {});"
_MIRROR_LOAD = "atomic_load_explicit(&control_of(g, rank)->sleepers, {})"

_KERNEL = "FUTEX_WAIT has a full barrier before it looks at the word"
_SAME = "the same instruction on Arm"
_COURTESY = "who misses this wake-up looks around after 50 ms"
_ONE_WORD = "there is no other word to order"
_RMW = "it only continues what the adds have begun"

WEAKENINGS = (
    _order("descriptor.call", "store", "sleep.c", "base/wait.h", _PUBLISH, "seq_cst -> release"),
    _order("descriptor.call", "store", "meet.c", "base/wait.h", _PUBLISH, "seq_cst -> relaxed"),
    _order("descriptor.call", "load", "meet.c", "base/wait.h", _AWAIT, "acquire -> relaxed"),
    _order(
        "descriptor.call", "load, asleep", "sleep.c", "base/wait.c", _REACHED, "acquire -> relaxed"
    ),
    _order("progress", "store", "slots.c", "base/wait.h", _PUBLISH, "seq_cst -> relaxed"),
    _order("progress", "load", "slots.c", "base/wait.h", _AWAIT, "acquire -> relaxed"),
    _order("progress", "store", "given.c", "base/wait.h", _PUBLISH, "seq_cst -> relaxed"),
    _order("progress", "load", "given.c", "base/wait.h", _AWAIT, "acquire -> relaxed"),
    _order("fifo.written, read", "store", "fifos.c", "base/wait.h", _PUBLISH, "seq_cst -> relaxed"),
    _order("fifo.written, read", "load", "fifos.c", "base/wait.h", _AWAIT, "acquire -> relaxed"),
    *_passed(
        "entry.number",
        "local/send.c",
        "publish_to_peer(&e->number, ++t->announced)",
        "store",
        "message.c",
        "entries.c",
    ),
    *_passed(
        "entry.number",
        "local/messages.h",
        "seen = read_from_peer(number)",
        "load",
        "message.c",
        "entries.c",
    ),
    _order(
        "taken",
        "store",
        "entries.c",
        "local/channels.c",
        "atomic_store_explicit(word, now, {});",
        "release -> relaxed",
    ),
    *_passed(
        "taken", "local/channels.c", "publish_to_peer(word, now)", "store", "room.c", "entries.c"
    ),
    *_passed(
        "taken", "local/channels.c", "now = read_from_peer(word)", "load", "room.c", "entries.c"
    ),
    *_passed(
        "reply.number",
        "local/receive.c",
        "publish_to_peer(&r->number, ++t->replied)",
        "store",
        "message.c",
        "message.c",
    ),
    *_passed(
        "channel.written",
        "local/send.c",
        "publish_to_peer(&c->written, t->written + m->moved)",
        "store",
        "ring_sleep.c",
        "ring.c",
    ),
    *_passed(
        "channel.written",
        "local/receive.c",
        "there = read_from_peer(&c->written)",
        "load",
        "ring_sleep.c",
        "ring.c",
    ),
    *_passed(
        "channel.read",
        "local/receive.c",
        "publish_to_peer(&c->read, t->read + m->moved)",
        "store",
        "ring_full.c",
        "ring.c",
    ),
    *_passed(
        "channel.read",
        "local/send.c",
        "t->written + m->moved - read_from_peer(&c->read)",
        "load",
        "ring_full.c",
        "ring.c",
    ),
    *_passed(
        "opened_by",
        "local/send.c",
        "publish_to_peer(&opened_by(g, g->rank)[peer], 1)",
        "store",
        "message.c",
        "message.c",
    ),
    *_passed(
        "opened_by",
        "local/channels.c",
        "t->open = read_from_peer(&opened_by(g, source)[g->rank])",
        "load",
        "message.c",
        "message.c",
    ),
    _order(
        "listeners",
        "load",
        "message.c",
        "local/channels.c",
        "atomic_load_explicit(&c->listeners, {})",
        "seq_cst -> acquire",
    ),
    _order(
        "listeners",
        "add",
        "message.c",
        "local/progress_thread.c",
        "atomic_fetch_add_explicit(&mine->listeners, 1, {})",
        "seq_cst -> acq_rel",
    ),
    _order(
        "doorbell",
        "add",
        "message.c",
        "local/channels.c",
        "atomic_fetch_add_explicit(&c->doorbell, 1, {})",
        "seq_cst -> relaxed",
    ),
    _order(
        "doorbell",
        "load",
        "message.c",
        "local/progress_thread.c",
        "atomic_load_explicit(&mine->doorbell, {})",
        "seq_cst -> relaxed",
    ),
    _order(
        "sleepers",
        "load after publishing",
        "sleep.c",
        "base/wait.h",
        "->sleepers, {}))\n        wake(flag",
        "seq_cst -> acquire",
    ),
    _order("mirrors", "store", "mirror.c", "hosts/posts.c", _MIRROR, "seq_cst -> release"),
    _order("mirrors", "store", "mirror.c", "hosts/posts.c", _MIRROR, "seq_cst -> relaxed"),
    _order(
        "mirrors",
        "load of sleepers",
        "mirror.c",
        "hosts/posts.c",
        _MIRROR_LOAD,
        "seq_cst -> acquire",
    ),
    _order(
        "sleepers",
        "add",
        "sleep.c",
        "base/wait.c",
        "atomic_fetch_add_explicit(sleepers, 1, {});",
        "seq_cst -> relaxed",
        _KERNEL,
    ),
    _order(
        "sleepers",
        "load of the flag",
        "sleep.c",
        "base/wait.c",
        "uint64_t seen = atomic_load_explicit(flag, {});",
        "seq_cst -> relaxed",
        _KERNEL,
    ),
    _plain(
        "writing",
        "store",
        "writers.c",
        "local/direct.c",
        "atomic_store(writing, x->number);",
        "release",
    ),
    _plain(
        "writing",
        "store of 0",
        "writers.c",
        "local/direct.c",
        "atomic_store(writing, 0);",
        "relaxed",
    ),
    _plain("writing", "load", "writers.c", "local/direct.c", _WRITING_LOAD, "acquire"),
    _order(
        "writing",
        "load of abort",
        "writers.c",
        "local/direct.c",
        "atomic_load_explicit(&g->segment.header->abort, {})",
        "seq_cst -> acquire",
    ),
    _plain("released", "add", "blocks_released.c", "local/blocks.c", _RELEASED, "acq_rel", _SAME),
    _plain("released", "add", "blocks_released.c", "local/blocks.c", _RELEASED, "release"),
    _plain("released", "add", "blocks_released.c", "local/blocks.c", _RELEASED, "acquire"),
    _plain(
        "released",
        "compare-and-swap",
        "blocks_reopened.c",
        "local/blocks.c",
        "atomic_compare_exchange_weak(&header_of(b)->released, &seen, seen - 1)",
        "relaxed",
        _RMW,
    ),
    _order(
        "closed",
        "store",
        "closed_early.c",
        "local/membership.c",
        _CLOSED,
        "seq_cst -> release",
        _COURTESY,
    ),
    _order(
        "closed",
        "load of sleepers",
        "closed_early.c",
        "local/membership.c",
        "atomic_load_explicit(&mine->sleepers, {})",
        "seq_cst -> acquire",
        _COURTESY,
    ),
    _order("closed", "store", "closed.c", "local/membership.c", _CLOSED, "seq_cst -> relaxed"),
    _order(
        "closed",
        "load",
        "closed.c",
        "base/wait.c",
        "atomic_load_explicit(&control_of(g, peer)->closed, {})",
        "acquire -> relaxed",
    ),
    _plain("abort", "compare-and-swap", "writers.c", "base/group.c", _ABORT, "acq_rel"),
    _plain("abort", "compare-and-swap", "abort.c", "base/group.c", _ABORT, "relaxed"),
    Weakening(
        "abort",
        "both loads: acquire -> relaxed",
        "abort.c",
        tuple(
            Change(
                "base/group.c",
                around.format(_ABORT_LOAD.format("acquire")),
                around.format(_ABORT_LOAD.format("relaxed")),
            )
            for around in ("{};\n    if (!word)", "status_of(g, {})")
        ),
    ),
    _weaken("abort", "reader's fence -> none", "given_failed.c", "local/direct.c", _READ_FENCE, ""),
    _weaken("abort", "reader's fence -> none", "given_block.c", "local/direct.c", _READ_FENCE, ""),
    _weaken("abort", "giver's fence -> none", "given_failed.c", "local/call.c", _GIVER_FENCE, ""),
    _plain(
        "decisions",
        "compare-and-swap",
        "decide.c",
        "base/group.c",
        "atomic_compare_exchange_weak(word, &seen, proposed)",
        "relaxed",
        _ONE_WORD,
    ),
    _weaken(
        "record.number", "fence: release -> none", "record.c", "base/records.c", _RECORD_FENCE, ""
    ),
    _order(
        "record.number",
        "store",
        "record.c",
        "base/records.c",
        "atomic_store_explicit(&r->number, number, {});",
        "release -> relaxed",
    ),
    _weaken("note.about", "fence: release -> none", "note.c", "base/records.c", _NOTE_FENCE, ""),
    _weaken(
        "note.about", "fence: acquire -> none", "note.c", "base/records.c", _NOTE_READ_FENCE, ""
    ),
    _plain(
        "note.about",
        "store",
        "note.c",
        "base/records.c",
        "atomic_store(&n->about, about);",
        "relaxed",
    ),
    _order("call_lock", "try", "lock.c", "local/worker.c", _TRIED, "acquire -> relaxed"),
    _order("call_lock", "lock", "lock.c", "local/worker.c", _LOCKED, "acquire -> relaxed"),
    _order("call_lock", "unlock", "lock.c", "local/worker.c", _UNLOCKED, "release -> relaxed"),
    _plain(
        "parked",
        "store",
        "parked.c",
        "local/progress_thread.c",
        "atomic_store(&g->progress_thread.parked, 1);",
        "release",
    ),
    _plain(
        "parked",
        "load of stops",
        "parked.c",
        "local/progress_thread.c",
        "!needed && !atomic_load(&g->progress_thread.stops)",
        "acquire",
    ),
    _plain(
        "parked",
        "store of stops",
        "parked.c",
        "local/progress_thread.c",
        "atomic_store(&g->progress_thread.stops, 1);",
        "release",
    ),
    _plain(
        "parked",
        "exchange",
        "parked.c",
        "local/progress_thread.c",
        "atomic_exchange(&g->progress_thread.parked, 0)",
        "acq_rel",
    ),
)


HARNESSES = sorted(path.name for path in HERE.glob("*.c"))


def check_harnesses(word: str, pool: ThreadPoolExecutor) -> bool:
    """Check those with the word in their names, and print what was found; returns whether all
    hold."""
    chosen = [name for name in HARNESSES if word in name]
    holds = True
    for name, verdict in zip(chosen, pool.map(check, chosen), strict=True):
        found = verdict.counterexample or f"holds in {verdict.executions:,} executions"
        print(f"  {name:18} {found}", flush=True)
        holds &= not verdict.counterexample
    return holds


def weaken_orders(word: str, pool: ThreadPoolExecutor) -> bool:
    """Weaken the orders of those rows and harnesses; returns whether each was detected, or need not
    be."""
    chosen = [w for w in WEAKENINGS if word in w.row or word in w.harness]
    verdicts = pool.map(lambda w: check(w.harness, *w.changes), chosen)
    is_right = True
    for w, verdict in zip(chosen, verdicts, strict=True):
        found = verdict.counterexample or (f"would do: {w.would_do}" if w.would_do else "SURVIVES")
        print(f"  {w.row:18} {w.what:44} {w.harness:17} {found}", flush=True)
        is_right &= bool(verdict.counterexample) != bool(w.would_do)
    return is_right


def check_engine(word: str = "") -> bool:
    """Every harness, then every order."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return check_harnesses(word, pool) & weaken_orders(word, pool)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", metavar="WORD")
    word = parser.parse_args().only
    if tool() is None:
        print(MISSING)
        return 2
    return 0 if check_engine(word) else 1


if __name__ == "__main__":
    sys.exit(main())
