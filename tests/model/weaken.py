"""Weaken each memory order of the engine in turn, and see whether GenMC finds a counterexample.

    python tests/model/weaken.py               every harness, then every order (make model)
    python tests/model/weaken.py --only abort  rows and harnesses whose name contains the word

Rows are those of the table in docs/architecture.md. An order that could be weaker says why, and why
it stays as it is.
"""

from __future__ import annotations

import argparse
import os
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
    """`around` has {} where the order stands; `orders` is "from -> to"."""
    before, after = (f"memory_order_{order}" for order in orders.split(" -> "))
    old, new = around.replace("{}", before), around.replace("{}", after)
    return _weaken(row, f"{what}: {orders}", harness, file, old, new, would_do)


def _publishing(row: str, harness: str, file: str, word: str, value: str, order: str) -> Weakening:
    """A call of publish_to_peer, which stores with seq_cst."""
    new = f"atomic_store_explicit({word}, {value}, memory_order_{order})"
    old = f"publish_to_peer({word}, {value})"
    return _weaken(row, f"store: seq_cst -> {order}", harness, file, old, new)


def _reading(row: str, harness: str, file: str, before: str, word: str, order: str) -> Weakening:
    """A call of read_from_peer, which loads with seq_cst."""
    new = f"{before}atomic_load_explicit({word}, memory_order_{order})"
    old = f"{before}read_from_peer({word})"
    return _weaken(row, f"load: seq_cst -> {order}", harness, file, old, new)


_PUBLISH = "atomic_store_explicit(flag, value, {});\n    if"
_AWAIT = "if (atomic_load_explicit(flag, {}) >= target) return UN_OK;"
_ABORT = "atomic_compare_exchange_strong(&g->segment.header->abort, &none, word)"
_ABORT_AS = (
    "atomic_compare_exchange_strong_explicit(&g->segment.header->abort, &none, word, "
    "memory_order_{}, memory_order_relaxed)"
)
_ABORT_LOAD = "atomic_load_explicit(&g->segment.header->abort, memory_order_{})"
_RECORD_FENCE = (
    "atomic_thread_fence(memory_order_release); /* nothing below before the line above */"
)
_NOTE_FENCE = "atomic_thread_fence(memory_order_release); /* as above */"
_READ_FENCE = "atomic_thread_fence(memory_order_acquire);"
_KERNEL = "FUTEX_WAIT has a full barrier before it looks at the word"
_SAME = "the same instruction on Arm"
_COURTESY = "who misses this wake-up looks around after 50 ms"
_ONE_WORD = "there is no other word to order"

WEAKENINGS = (
    _order("post.call", "store", "sleep.c", "wait.h", _PUBLISH, "seq_cst -> release"),
    _order("post.call", "store", "meet.c", "wait.h", _PUBLISH, "seq_cst -> relaxed"),
    _order("post.call", "load", "meet.c", "wait.h", _AWAIT, "acquire -> relaxed"),
    _order(
        "post.call",
        "load, after sleeping",
        "sleep.c",
        "wait.c",
        "static bool reached(const flag_t *flag, uint64_t target) {\n"
        "    return atomic_load_explicit(flag, {})",
        "acquire -> relaxed",
    ),
    _order("progress", "store", "slots.c", "wait.h", _PUBLISH, "seq_cst -> relaxed"),
    _order("progress", "load", "slots.c", "wait.h", _AWAIT, "acquire -> relaxed"),
    _order("tube.written, read", "store", "tubes.c", "wait.h", _PUBLISH, "seq_cst -> relaxed"),
    _order("tube.written, read", "load", "tubes.c", "wait.h", _AWAIT, "acquire -> relaxed"),
    _publishing("entry.number", "message.c", "send.c", "&e->number", "++t->announced", "release"),
    _publishing("entry.number", "entries.c", "send.c", "&e->number", "++t->announced", "relaxed"),
    _reading("entry.number", "message.c", "messages.h", "seen = ", "number", "acquire"),
    _reading("entry.number", "entries.c", "messages.h", "seen = ", "number", "relaxed"),
    _order(
        "taken",
        "store",
        "entries.c",
        "channels.c",
        "atomic_store_explicit(word, now, {});",
        "release -> relaxed",
    ),
    _publishing("taken", "room.c", "channels.c", "word", "now", "release"),
    _publishing("taken", "entries.c", "channels.c", "word", "now", "relaxed"),
    _reading("taken", "room.c", "channels.c", "now = ", "word", "acquire"),
    _reading("taken", "entries.c", "channels.c", "now = ", "word", "relaxed"),
    _publishing("reply.number", "message.c", "receive.c", "&r->number", "++t->replied", "release"),
    _publishing("reply.number", "message.c", "receive.c", "&r->number", "++t->replied", "relaxed"),
    _publishing(
        "channel.written",
        "ring_sleep.c",
        "send.c",
        "&c->written",
        "t->written + m->moved",
        "release",
    ),
    _publishing(
        "channel.written", "ring.c", "send.c", "&c->written", "t->written + m->moved", "relaxed"
    ),
    _reading("channel.written", "ring_sleep.c", "receive.c", "there = ", "&c->written", "acquire"),
    _reading("channel.written", "ring.c", "receive.c", "there = ", "&c->written", "relaxed"),
    _publishing(
        "channel.read", "ring_full.c", "receive.c", "&c->read", "t->read + m->moved", "release"
    ),
    _publishing("channel.read", "ring.c", "receive.c", "&c->read", "t->read + m->moved", "relaxed"),
    _reading(
        "channel.read", "ring_full.c", "send.c", "t->written + m->moved - ", "&c->read", "acquire"
    ),
    _reading("channel.read", "ring.c", "send.c", "t->written + m->moved - ", "&c->read", "relaxed"),
    _publishing("opened_by", "message.c", "send.c", "&opened_by(g, g->rank)[peer]", "1", "release"),
    _reading(
        "opened_by",
        "message.c",
        "channels.c",
        "t->open = ",
        "&opened_by(g, source)[g->rank]",
        "acquire",
    ),
    _publishing("opened_by", "message.c", "send.c", "&opened_by(g, g->rank)[peer]", "1", "relaxed"),
    _reading(
        "opened_by",
        "message.c",
        "channels.c",
        "t->open = ",
        "&opened_by(g, source)[g->rank]",
        "relaxed",
    ),
    _order(
        "listeners",
        "load",
        "message.c",
        "channels.c",
        "atomic_load_explicit(&c->listeners, {})",
        "seq_cst -> acquire",
    ),
    _order(
        "listeners",
        "add",
        "message.c",
        "courier.c",
        "atomic_fetch_add_explicit(&mine->listeners, 1, {})",
        "seq_cst -> acq_rel",
    ),
    _order(
        "doorbell",
        "add",
        "message.c",
        "channels.c",
        "atomic_fetch_add_explicit(&c->doorbell, 1, {})",
        "seq_cst -> relaxed",
    ),
    _order(
        "doorbell",
        "load",
        "message.c",
        "courier.c",
        "atomic_load_explicit(&mine->doorbell, {})",
        "seq_cst -> relaxed",
    ),
    _order(
        "sleepers",
        "load after publishing",
        "sleep.c",
        "wait.h",
        "->sleepers, {}))\n        wake(flag",
        "seq_cst -> acquire",
    ),
    _order(
        "sleepers",
        "add",
        "sleep.c",
        "wait.c",
        "atomic_fetch_add_explicit(sleepers, 1, {});",
        "seq_cst -> relaxed",
        _KERNEL,
    ),
    _order(
        "sleepers",
        "load of the flag",
        "sleep.c",
        "wait.c",
        "uint64_t seen = atomic_load_explicit(flag, {});",
        "seq_cst -> relaxed",
        _KERNEL,
    ),
    _weaken(
        "writing",
        "store: seq_cst -> release",
        "writers.c",
        "direct.c",
        "atomic_store(writing, x->number);",
        "atomic_store_explicit(writing, x->number, memory_order_release);",
    ),
    _weaken(
        "writing",
        "store of 0: seq_cst -> relaxed",
        "writers.c",
        "direct.c",
        "atomic_store(writing, 0);",
        "atomic_store_explicit(writing, 0, memory_order_relaxed);",
    ),
    _weaken(
        "writing",
        "load: seq_cst -> acquire",
        "writers.c",
        "direct.c",
        "atomic_load(&control_of(g, rank)->writing)",
        "atomic_load_explicit(&control_of(g, rank)->writing, memory_order_acquire)",
    ),
    _order(
        "writing",
        "load of abort",
        "writers.c",
        "direct.c",
        "atomic_load_explicit(&g->segment.header->abort, {})",
        "seq_cst -> acquire",
    ),
    _weaken(
        "released",
        "add: seq_cst -> acq_rel",
        "blocks_released.c",
        "blocks.c",
        "atomic_fetch_add(&header_of(b)->released, 1)",
        "atomic_fetch_add_explicit(&header_of(b)->released, 1, memory_order_acq_rel)",
        _SAME,
    ),
    _weaken(
        "released",
        "add: seq_cst -> release",
        "blocks_released.c",
        "blocks.c",
        "atomic_fetch_add(&header_of(b)->released, 1)",
        "atomic_fetch_add_explicit(&header_of(b)->released, 1, memory_order_release)",
    ),
    _weaken(
        "released",
        "add: seq_cst -> acquire",
        "blocks_released.c",
        "blocks.c",
        "atomic_fetch_add(&header_of(b)->released, 1)",
        "atomic_fetch_add_explicit(&header_of(b)->released, 1, memory_order_acquire)",
    ),
    _order(
        "closed",
        "store",
        "closed_early.c",
        "group.c",
        "atomic_store_explicit(&mine->closed, 1, {});",
        "seq_cst -> release",
        _COURTESY,
    ),
    _order(
        "closed",
        "load of sleepers",
        "closed_early.c",
        "group.c",
        "atomic_load_explicit(&mine->sleepers, {})",
        "seq_cst -> acquire",
        _COURTESY,
    ),
    _order(
        "closed",
        "store",
        "closed.c",
        "group.c",
        "atomic_store_explicit(&mine->closed, 1, {});",
        "seq_cst -> relaxed",
    ),
    _order(
        "closed",
        "load",
        "closed.c",
        "wait.c",
        "atomic_load_explicit(&control_of(g, peer)->closed, {})",
        "acquire -> relaxed",
    ),
    _weaken(
        "abort",
        "compare-and-swap: seq_cst -> acq_rel",
        "writers.c",
        "group.c",
        _ABORT,
        _ABORT_AS.format("acq_rel"),
    ),
    _weaken(
        "abort",
        "compare-and-swap: seq_cst -> relaxed",
        "abort.c",
        "group.c",
        _ABORT,
        _ABORT_AS.format("relaxed"),
    ),
    Weakening(
        "abort",
        "both loads: acquire -> relaxed",
        "abort.c",
        (
            Change(
                "group.c",
                f"{_ABORT_LOAD.format('acquire')};\n    if (!word)",
                f"{_ABORT_LOAD.format('relaxed')};\n    if (!word)",
            ),
            Change(
                "group.c",
                f"status_of(g, {_ABORT_LOAD.format('acquire')})",
                f"status_of(g, {_ABORT_LOAD.format('relaxed')})",
            ),
        ),
    ),
    _weaken(
        "decisions",
        "compare-and-swap: seq_cst -> relaxed",
        "decide.c",
        "group.c",
        "atomic_compare_exchange_weak(word, &seen, proposed)",
        "atomic_compare_exchange_weak_explicit(word, &seen, proposed, memory_order_relaxed, "
        "memory_order_relaxed)",
        _ONE_WORD,
    ),
    _weaken("record.number", "fence: release -> none", "record.c", "records.c", _RECORD_FENCE, ""),
    _order(
        "record.number",
        "store",
        "record.c",
        "records.c",
        "atomic_store_explicit(&r->number, number, {});",
        "release -> relaxed",
    ),
    _weaken("note.about", "fence: release -> none", "note.c", "records.c", _NOTE_FENCE, ""),
    _weaken("note.about", "fence: acquire -> none", "note.c", "records.c", _READ_FENCE, ""),
    _weaken(
        "note.about",
        "store: seq_cst -> relaxed",
        "note.c",
        "records.c",
        "atomic_store(&n->about, about);",
        "atomic_store_explicit(&n->about, about, memory_order_relaxed);",
    ),
)


HARNESSES = sorted(path.name for path in HERE.glob("*.c"))


def check_harnesses(word: str, pool: ThreadPoolExecutor) -> bool:
    """Check those that have the word in their names, and print what was found; whether all hold."""
    chosen = [name for name in HARNESSES if word in name]
    holds = True
    for name, verdict in zip(chosen, pool.map(check, chosen), strict=True):
        found = verdict.counterexample or f"holds in {verdict.executions:,} executions"
        print(f"  {name:18} {found}", flush=True)
        holds &= not verdict.counterexample
    return holds


def weaken_orders(word: str, pool: ThreadPoolExecutor) -> bool:
    """Weaken the orders of those rows and harnesses; whether each was noticed, or need not be."""
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
