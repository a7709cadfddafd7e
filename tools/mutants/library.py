"""Mutants of the library in Python."""

from __future__ import annotations

from mutant import Mutant

_WATCH = "tests/watch/test_watch.py::test_"
_FAULTS = "tests/training/test_weight_faults.py::test_"

LIBRARY = (
    # -- comm ------------------------------------------------------------------------------------
    Mutant(
        "strict-majority",
        "src/unisono/comm/on_rows/mismatches.py",
        "2 * times > len(values)",
        "2 * times >= len(values)",
        "with two against two, two innocent ranks are blamed",
        ("tests/comm/test_mismatch.py::test_without_a_majority_both_sides_are_shown",),
    ),
    Mutant(
        "wrong-pair",
        "src/unisono/comm/on_rows/mismatches.py",
        "if 2 * len(odd) < len(votes):",
        "if odd:",
        "most ranks are blamed for one wrong size",
        ("tests/comm/test_error_details.py::test_who_is_wrong_among_many",),
    ),
    Mutant(
        "root-in-range",
        "src/unisono/comm/arguments.py",
        "not 0 <= root < size",
        "not 0 <= root <= size",
        "a root that is not a rank is taken",
        (
            "tests/comm/conformance/test_refused_arguments.py::"
            "test_roots_ops_and_parts_that_make_no_sense_are_refused",
        ),
    ),
    Mutant(
        "names-of-splits",
        "src/unisono/comm/communicator.py",
        "{','.join(map(str, members))}]{more}",
        "{','.join(map(str, members))}]",
        "two groups of the same members that are made at once mix",
        ("tests/comm/test_groups.py::test_two_groups_with_the_same_members_do_not_mix",),
    ),
    Mutant(
        "who-stalls",
        "src/unisono/comm/shared_memory/error_texts.py",
        "if turns == min(progress)]",
        "if turns == max(progress)]",
        "the ranks that wait are blamed instead of the one that stopped",
        ("tests/watch/test_stalls.py",),
    ),
    Mutant(
        "size-at-the-door",
        "src/unisono/comm/meeting/leading.py",
        'hello.get("size") != size',
        'hello.get("size") == 0',
        "ranks that think of groups of different sizes meet",
        ("tests/comm/test_join_by_name.py::test_different_sizes_are_refused_on_both_sides",),
    ),
    Mutant(
        "versions-of-ucx",
        "src/unisono/comm/hosts/contacts.py",
        "contact.version[:2]",
        "contact.version[:1]",
        "hosts with different versions of UCX meet",
        ("tests/hosts/test_contacts.py",),
    ),
    # -- weights ---------------------------------------------------------------------------------
    Mutant(
        "vote-for-all",
        "src/unisono/comm/shared_memory/memory_transport.py",
        "decided = self.group.decide(OF_PROGRAM, serial, value)",
        "decided = value",
        "each engine decides by itself: after a death some serve the new version, some the old",
        (f"{_FAULTS}ranks_that_want_different_things_decide_alike",),
    ),
    Mutant(
        "vote-of-failures",
        "src/unisono/training/weights/protocol.py",
        "self._settle(_KEEP if any(failed) else _COMMIT, commit)",
        "self._settle(_COMMIT, commit)",
        "an engine whose prepare failed keeps nobody from changing over",
        (f"{_FAULTS}all_learn_of_an_exception_in_prepare_and_the_next_update_works",),
    ),
    Mutant(
        "swap-rolls-back",
        "src/unisono/training/weights/staging.py",
        "        if not completed:\n            _run(returns)\n",
        "",
        "an interrupted change-over leaves an engine with parts of two versions",
        (
            "tests/training/test_weight_interrupts.py::test_a_step_that_fails_is_undone_with_those_before_it",
        ),
    ),
    Mutant(
        "views-of-weights",
        "src/unisono/training/weights/staging.py",
        "if own.device == new.device and is_alone(own) and",
        "if own.device == new.device and",
        "views that an engine has of its weights keep the old version",
        ("tests/training/test_weights.py::test_views_of_an_engines_weights_change_with_them",),
    ),
    Mutant(
        "checksum-compared",
        "src/unisono/training/weights/transfers.py",
        "if sent != arrived:",
        "if sent is None:",
        "weights that arrive damaged are served",
        (f"{_FAULTS}a_damaged_bucket_is_noticed",),
    ),
    Mutant(
        "shards-are-whole",
        "src/unisono/training/weights/plan.py",
        'return f"{missing} elements are on no rank" if missing else ""',
        'return ""',
        "an engine serves memory that nobody has filled",
        ("tests/training/test_weights.py::test_other_ways_not_to_fit",),
    ),
    # -- watch -----------------------------------------------------------------------------------
    Mutant(
        "who-is-missing",
        "src/unisono/watch/calls.py",
        "last_call_number(other) >= record.call",
        "last_call_number(other) > record.call",
        "ranks that have come to a call are reported as missing",
        (f"{_WATCH}the_sentence",),
    ),
    Mutant(
        "waits-still",
        "src/unisono/watch/waiting.py",
        "if report is not None and self._holds_still(report, key):",
        "if report is not None:",
        "a call that went on while everybody was asked is reported as a hang",
        (f"{_WATCH}a_call_that_goes_on_while_all_are_asked_is_not_reported",),
    ),
    Mutant(
        "failed-had-waited",
        "src/unisono/watch/hangs.py",
        "own = waits(groups, other.process) or _just_failed(groups, other.process)",
        "own = waits(groups, other.process)",
        "a rank that is busy with the exception of a failed call is blamed for it",
        (f"{_WATCH}whose_call_has_just_failed_had_waited_too",),
    ),
    Mutant(
        "blame-over-hosts",
        "src/unisono/comm/hosts/hosts_transport.py",
        "stopped = self.links.find_stopped(away, _ANSWER_S)",
        "stopped = self.links.find_stopped(away[:0], _ANSWER_S)",
        "a rank that is stopped on another host is not found",
        ("tests/hosts/test_faults_in_transfers.py",),
    ),
    Mutant(
        "not-in-a-call",
        "src/unisono/watch/hangs.py",
        "if other.reason or where.state or not where.in_call:",
        "if other.reason or where.state:",
        "a rank that is busy elsewhere is taken for one that waits, and another is blamed",
        (f"{_WATCH}a_rank_that_is_busy_is_to_blame_whatever_it_has_begun",),
    ),
    Mutant(
        "shift-by-lines",
        "src/unisono/watch/alignment.py",
        "if usual is not None and len(odd) == 1 and (usual",
        "if usual is not None and odd and (usual",
        "two branches of a program are reported as a call that somebody left out",
        (f"{_WATCH}two_ranks_that_take_another_branch_have_not_made_a_call_too_many",),
    ),
)
