"""Mutants of the engine in C and its binding."""

from __future__ import annotations

import platform

from mutant import Mutant

_IF_X86 = platform.machine() == "x86_64"
_LOADS_WAIT = "x86 makes no load before an earlier exchange, whatever order it is given"
_BLOCKS = ("threads blocks",)
_CALL_FAILURES = ("threads calls that end badly",)

ENGINE = (
    # -- memory orders ---------------------------------------------------------------------------
    Mutant(
        "wake-order",
        "csrc/base/wait.h",
        "->sleepers, memory_order_seq_cst))\n        wake(flag",
        "->sleepers, memory_order_relaxed))\n        wake(flag",
        "a rank that falls asleep while its peer publishes is not woken: some calls take 50 ms",
        ("threads sleepers",),
        equivalent=_LOADS_WAIT if _IF_X86 else "",
    ),
    Mutant(
        "bell-order",
        "csrc/local/channels.c",
        "&c->listeners, memory_order_seq_cst)",
        "&c->listeners, memory_order_relaxed)",
        "the same for messages: a sender misses that its receiver is about to sleep",
        ("threads sleepers",),
        equivalent=_LOADS_WAIT if _IF_X86 else "",
    ),
    Mutant(
        "publish-order",
        "csrc/base/wait.h",
        "atomic_store_explicit(flag, value, memory_order_seq_cst);\n    if",
        "atomic_store_explicit(flag, value, memory_order_relaxed);\n    if",
        "a peer that sees the flag may not see the data: a wrong number",
        ("race many groups",),
    ),
    Mutant(
        "sleep-order",
        "csrc/base/wait.c",
        "atomic_fetch_add_explicit(sleepers, 1, memory_order_seq_cst);",
        "atomic_fetch_add_explicit(sleepers, 1, memory_order_relaxed);",
        "the sleeper's side of wake-order",
        ("threads sleepers",),
        equivalent="FUTEX_WAIT has a full barrier before it reads the word once more: a sleeper "
        "whom the publisher has not counted finds the new value there and does not sleep",
    ),
    # -- meeting ---------------------------------------------------------------------------------
    Mutant(
        "compare-bytes",
        "csrc/local/call.c",
        "read_word(&a->bytes) == read_word(&b->bytes) &&",
        "",
        "ranks that pass different sizes are not told so: garbage, or memory overrun",
        _CALL_FAILURES,
    ),
    Mutant(
        "compare-root",
        "csrc/base/records.c",
        " | (uint64_t)(uint16_t)root << 24",
        "",
        "ranks that name different roots are not told so",
        (
            "tests/comm/test_mismatch.py::test_a_mismatch_raises_on_every_rank_and_names_the_odd_one",
        ),
    ),
    Mutant(
        "compare-pairs",
        "csrc/local/call.c",
        "return x->pairs_agree && !x->pairs_agree(x) ? mismatch(x) : UN_OK;",
        "return UN_OK;",
        "an all_to_all whose ranks expect other sizes than they get reads beyond them",
        _CALL_FAILURES,
    ),
    Mutant(
        "compare-factor",
        "csrc/local/collectives.c",
        "            x->hash = mix(x->hash, factor);\n",
        "",
        "ranks that scale by different factors have different results, and nobody knows",
        (
            "tests/comm/test_mismatch.py::test_a_mismatch_raises_on_every_rank_and_names_the_odd_one",
        ),
    ),
    Mutant(
        "descriptor-refusal",
        "csrc/local/call.c",
        "if (refusal) signature = refusal_of(x->call, refusal);",
        "",
        "a rank that refuses its arguments looks to its peers as if it had come",
        _CALL_FAILURES,
    ),
    # -- arithmetic ------------------------------------------------------------------------------
    Mutant(
        "average-rounds-twice",
        "csrc/base/reduce.c",
        "if (sources & (sources - 1))",
        "if (sources < 0)",
        "an average over three ranks is multiplied by a rounded third instead of divided",
        ("tests/comm/test_bitwise.py",),
    ),
    Mutant(
        "order-of-sums",
        "csrc/base/reduce.c",
        "for (int s = 2; s < sources - 1; s++)",
        "for (int s = sources - 2; s > 1; s--)",
        "sums are not added in rank order: other bits than documented, and than in other cuts",
        ("tests/comm/test_bitwise.py",),
    ),
    Mutant(
        "premul-factor",
        "csrc/local/schedules.c",
        "call->factor);\n    else if",
        "1);\n    else if",
        "a scaled sum by an algorithm forgets its factor",
        ("tests/comm/conformance/test_algorithms.py::test_strided_arrays_in_place_and_premul",),
    ),
    # -- moving ----------------------------------------------------------------------------------
    Mutant(
        "slots-of-two-calls",
        "csrc/base/group.h",
        "2 * SLOTS + (call & 1) * SLOTS + step % SLOTS",
        "2 * SLOTS + step % SLOTS",
        "a rank that is one call ahead writes over what slower peers still read",
        ("race collectives",),
    ),
    Mutant(
        "steps-wait",
        "csrc/local/call.c",
        "g->calls.steps + step - 1, &x->patience);",
        "g->calls.steps + (step > 2 ? step - 2 : 1), &x->patience);",
        "a rank combines pieces that its peers have not brought yet",
        ("threads collectives",),
    ),
    Mutant(
        "blocking-overtakes",
        "csrc/local/call.c",
        "        run_queue(g, NULL, call, false);\n",
        "",
        "a blocking call runs before works that were begun earlier: ranks meet in different calls",
        ("tests/comm/test_async.py::test_a_blocking_call_does_not_overtake",),
    ),
    # -- messages --------------------------------------------------------------------------------
    Mutant(
        "reply-to-nobody",
        "csrc/local/send.c",
        "if (!m) return refuse_damage(g, peer);",
        "if (!m) return true;",
        "a damaged reply is passed over, and its sender waits for ever",
        ("threads damaged",),
    ),
    Mutant(
        "receives-in-order",
        "csrc/local/receive.c",
        "any->number < own->number",
        "any->number > own->number",
        "a receive from anybody that was posted first goes without its message",
        ("threads messages",),
    ),
    Mutant(
        "deadlock-of-one-thread",
        "csrc/local/deadlock.c",
        "g->messages.waiters == 1 && ",
        "",
        "two threads of each rank wait, a third has yet to send: that is no deadlock",
        (
            "tests/comm/test_after_faults.py"
            "::test_ranks_that_another_thread_will_help_are_no_deadlock",
        ),
    ),
    Mutant(
        "deadlock-unread",
        "csrc/local/deadlock.c",
        "w->sends ? !has_unread(g, rank, w->peer, true) : !has_unread(g, w->peer, rank, false)",
        "true",
        "a rank that has its message in front of it and no core counts as blocked",
        ("tests/comm/test_after_faults.py::test_a_receiver_that_is_held_up_is_no_deadlock",),
    ),
    # -- ends ------------------------------------------------------------------------------------
    Mutant(
        "first-fault-wins",
        "csrc/base/group.c",
        "if (!atomic_compare_exchange_strong(&g->segment.header->abort, &none, word))",
        "if ((none = atomic_exchange(&g->segment.header->abort, word)) == word)",
        "ranks name different causes of one failure",
        (
            "tests/training/test_weight_faults.py::test_ranks_that_want_different_things_decide_alike",
        ),
    ),
    Mutant(
        "first-proposal-wins",
        "csrc/base/group.c",
        "seen >> 32 < serial)",
        "seen >> 32 <= serial)",
        "after a death some engines serve the new version, some the old",
        (
            "tests/training/test_weight_faults.py::test_ranks_that_want_different_things_decide_alike",
        ),
    ),
    Mutant(
        "closed-in-order",
        "csrc/base/watcher.c",
        "->watching.peers[rank] == lost && !atomic_load(&control_of(g, rank)->closed)",
        "->watching.peers[rank] == lost",
        "a rank that has left a group in good order and ends counts as lost",
        ("tests/comm/test_death.py::test_a_rank_that_left_in_order_is_no_death",),
    ),
    Mutant(
        "closed-is-noticed",
        "csrc/base/wait.c",
        "->closed, memory_order_acquire) &&\n        !reached(flag, target))",
        "->closed, memory_order_acquire) &&\n        false)",
        "who needs a peer that has closed the group waits for it until the deadline",
        ("tests/comm/test_groups.py::test_those_who_wait_for_a_peer_that_closed_learn_who_it_was",),
    ),
    Mutant(
        "closed-behind-its-call",
        "csrc/base/wait.c",
        "->closed, memory_order_acquire) &&\n        !reached(flag, target))",
        "->closed, memory_order_acquire))",
        "a peer that closes right after its last call takes the others down",
        _CALL_FAILURES,
    ),
    Mutant(
        "dead-before-watched",
        "csrc/base/watcher.c",
        "        if (p->dead) abort_group(g, UN_PEER_LOST, rank, 0);\n",
        "",
        "a group made with a rank that has just died waits until its deadline",
        ("threads processes",),
    ),
    Mutant(
        "limit-of-a-work",
        "csrc/local/worker.c",
        "        waiting.timeout_ns = work->call.timeout_ns;\n",
        "",
        "a work waits by the limit of whoever happens to run the queue",
        ("tests/comm/test_async.py", "tests/comm/test_mismatch.py"),
    ),
    # -- records ---------------------------------------------------------------------------------
    Mutant(
        "late-record",
        "csrc/base/records.c",
        "return number && atomic_load_explicit(&r->number, memory_order_relaxed) == number;",
        "return number != 0;",
        "a work that ends a thousand calls later writes its end into another call's record",
        (
            "tests/comm/test_records.py::"
            "test_what_ends_after_a_thousand_others_leaves_their_records_alone",
        ),
    ),
    # -- shared tensors --------------------------------------------------------------------------
    Mutant(
        "writers-stop",
        "csrc/local/direct.c",
        "    if (status && writes) wait_for_writers(x);\n",
        "    (void)writes, (void)wait_for_writers;\n",
        "after a failed all_reduce peers still write into this rank's tensors",
        _BLOCKS,
    ),
    Mutant(
        "readers-keep-memory",
        "csrc/local/blocks.c",
        "    if (g->blocks.readers) return;\n",
        "",
        "memory is unmapped while a call reads it: the process crashes",
        _BLOCKS,
    ),
    Mutant(
        "last-release",
        "csrc/local/blocks.c",
        "        madvise(b->base + PAGE_BYTES, b->bytes - PAGE_BYTES, MADV_REMOVE);",
        "        errno = 0;",
        "what all ranks have dropped stays in memory until each makes another shared tensor",
        _BLOCKS,
    ),
    Mutant(
        "place-in-bounds",
        "csrc/local/blocks.c",
        "where.offset <= room && bytes <= room - where.offset",
        "where.offset + bytes <= room",
        "a damaged place leads into another rank's memory",
        _BLOCKS,
    ),
    # -- the binding -----------------------------------------------------------------------------
    Mutant(
        "overlap-itself",
        "csrc/python/layouts.c",
        "(size_t)l.dim[d].stride_bytes < reach",
        "(size_t)l.dim[d].stride_bytes < l.item_bytes",
        "a result is written into a tensor whose elements share memory",
        ("tests/comm/test_overlaps.py::test_overlaps_are_found_exactly",),
    ),
    Mutant(
        "overlap-of-lists",
        "csrc/python/overlaps.c",
        "    if (a->coalesced && input != output) return false;\n",
        "",
        "lists whose tensors lie in each other's place are not refused: a wrong result",
        ("tests/comm/test_overlaps.py",),
    ),
)
