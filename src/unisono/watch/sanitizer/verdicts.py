"""What the facts of all ranks about a step, a sampler or a batch prove."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from unisono.errors import name_ranks
from unisono.watch.report import Report
from unisono.watch.sanitizer.exchange import Facts

_WORDS = {"lr": "learning rate", "weight_decay": "weight decay"}
_MOST_NAMED = 5
_ABOUT_ONE = 0.01


def finding(
    kind: str, verdict: str, details: tuple[str, ...], culprits: tuple[int, ...], site: str
) -> Report:
    """A report; `kind` is "race", "settings", "drift", "reduced", "sampler" or "hint", which proves
    nothing."""
    return Report(kind, verdict, "world", "", culprits=culprits, site=site, details=details)


class Judgement:
    """Compares facts; every cause is told once."""

    def __init__(self, found: Callable[[Report], object]) -> None:
        self._found = found
        self._done: set[str] = set()
        self._names: dict[str, dict[str, str]] = {}
        self._last_after: dict[str, dict[str, bool]] = {}
        self._no_replicas: dict[str, set[str]] = {}

    def compare(self, topic: str, facts: Facts) -> None:
        """Facts about one topic, of all ranks that have any."""
        kind = topic.partition("/")[0]
        subject, _, moment = topic.rpartition("/")
        if subject in self._done:
            return
        found = {"step": self._step, "sampler": self._sampler, "batch": self._batch}[kind](
            subject, int(moment), facts
        )
        if found is not None:
            self._done.add(subject)
            self._found(found)

    # -- steps -----------------------------------------------------------------------------------

    def _step(self, subject: str, step: int, facts: Facts) -> Report | None:
        if len(facts) < 2:
            return None
        for fact in facts.values():
            self._names.setdefault(subject, {}).update(fact.get("names", {}))
        return (
            self._settings(step, facts)
            or self._sizes(facts)
            or self._twice(subject, step, facts)
            or self._drift(subject, step, facts)
            or self._left(subject, step, facts)
        )

    def _settings(self, step: int, facts: Facts) -> Report | None:
        counts = {len(fact["settings"]) for fact in facts.values()}
        if len(counts) > 1:
            return None
        for group in range(counts.pop()):
            names = [entry[0] for entry in next(iter(facts.values()))["settings"][group]]
            for position, name in enumerate(names):
                rows = {rank: fact["settings"][group][position] for rank, fact in facts.items()}
                culprits = _odd({rank: repr(row[1]) for rank, row in rows.items()})
                if culprits is None:
                    continue
                sites = {rank: row[2] or facts[rank]["site"] for rank, row in rows.items()}
                word = _WORDS.get(name, name)
                values = "; ".join(
                    f"rank {rank}: {row[1]}, set at {sites[rank]}" for rank, row in rows.items()
                )
                loaded = _loaded(facts, culprits)
                site = sites[culprits[0]]
                return finding(
                    "settings",
                    f"{_differ(culprits, facts, word)} since step {step} of the optimizer ({site})",
                    (values, *loaded, _made(facts), "set it from numbers that all ranks share"),
                    culprits,
                    site,
                )
        return None

    def _sizes(self, facts: Facts) -> Report | None:
        names = {rank: {*fact["before"]} for rank, fact in facts.items()}
        culprits = _odd({rank: repr(sorted(known)) for rank, known in names.items()})
        everything = set().union(*names.values())
        is_whole = all(fact["whole"] for fact in facts.values())
        is_part = everything in names.values() and all(names.values())
        if culprits is None or not (is_whole and is_part):
            return None
        sizes = ", ".join(f"rank {rank}: {len(known)}" for rank, known in names.items())
        site = facts[culprits[0]]["made"]
        return finding(
            "settings",
            f"{_differ(culprits, facts, 'number of parameters in its optimizer')} ({site})",
            (f"parameters: {sizes}",),
            culprits,
            site,
        )

    def _twice(self, subject: str, step: int, facts: Facts) -> Report | None:
        rows = {rank: fact["twice"] for rank, fact in facts.items() if fact["twice"]}
        if len(rows) < len(facts):
            return None
        first, second, ratio = next(iter(next(iter(rows.values())).values()))
        is_harmless = abs(ratio - 1) < _ABOUT_ONE
        by = "by DDP" if first == "DDP" else f"at {first}"
        known = self._names[subject]
        names = sorted({known.get(name, name) for row in rows.values() for name in row})
        ranks = tuple(rows)
        effect = "which changes nothing here" if is_harmless else "so they are too large"
        verdict = (
            f"{name_ranks(ranks)} reduced gradients twice in step {step}, {by} and at {second}, "
            f"{effect}"
        )
        details = (f"gradients: {_listed(names)}", "leave out one of the two")
        return finding("hint" if is_harmless else "reduced", verdict, details, ranks, second)

    def _drift(self, subject: str, step: int, facts: Facts) -> Report | None:
        left = {name for fact in facts.values() for name in fact.get("left", ())}
        common = set.intersection(*({*fact["after"]} for fact in facts.values())) - left
        skipped = self._no_replicas.setdefault(subject, set())
        was_equal = self._last_after.setdefault(subject, {})
        drifted: dict[str, str] = {}
        for name in sorted(common - skipped):
            before, gradient, after = (
                {rank: fact[kind][name] for rank, fact in facts.items()}
                for kind in ("before", "gradients", "after")
            )
            is_ddp = not name.startswith("parameter ")
            origins = {rank: fact["origins"].get(name, 0) for rank, fact in facts.items()}
            if _odd(origins) is not None:  # each rank has another part of what was reduced
                skipped.add(name)
            elif _odd(after) is None:
                was_equal[name] = True
            elif _odd(before) is not None:
                if was_equal.get(name) or is_ddp:
                    drifted[name] = "outside"
                elif _odd(gradient) is None and any(gradient.values()):
                    drifted[name] = "start"
                else:
                    skipped.add(name)
            else:
                drifted[name] = "gradient" if _odd(gradient) is not None else "state"
        if not drifted:
            return None
        name = next(iter(drifted))
        cause = drifted[name]
        kind = {"gradient": "gradients", "state": "after"}.get(cause, "before")
        culprits = _odd({rank: fact[kind][name] for rank, fact in facts.items()})
        assert culprits is not None
        shown = self._names[subject].get(name, name)
        more = f" ({len(drifted)} of {len(common)} parameters do)" if len(drifted) > 1 else ""
        site = facts[culprits[0]]["site"]
        why = {
            "outside": "something other than the optimizer wrote it",
            "start": "the ranks did not start with the same numbers, though gradients are reduced",
            "state": "gradients and hyperparameters are the same, so the optimizer's state is not",
            "gradient": "the gradients differ first",
        }[cause]
        since = f"since {'before ' if cause in ('outside', 'start') else ''}step {step}"
        loaded = _loaded(facts, culprits)
        why = loaded[0] if loaded else why
        details = [f"step {step} was made at {site}", *loaded[1:]]
        unreduced = {r: f["unreduced"] for r, f in facts.items() if name in f["unreduced"]}
        if cause == "gradient" and unreduced:
            lines = sorted({line for row in unreduced.values() if (line := row[name])})
            how = "backward ran under no_sync, or its forward pass was not called"
            if lines:
                how = f"the program called the module inside of it ({_listed(lines)})"
            why = f"DDP averaged nothing on {name_ranks(unreduced)}: {how}"
            site = lines[0] if lines else site
        passes = {rank: fact.get("passes", 0) for rank, fact in facts.items()}
        if (lost := _odd(passes)) is not None:
            culprits = lost
            details.append(f"{name_ranks(lost)} made another number of forward passes per step")
        if reduced := next(iter(facts.values())).get("reduced"):
            details.append(f"the gradients were reduced at {reduced}")
        if len(drifted) > 1:
            known = self._names[subject]
            details.append(f"they differ: {_listed(known.get(each, each) for each in drifted)}")
        return finding(
            "drift",
            f"{_differ(culprits, facts, shown)} {since} of the optimizer{more}: {why}",
            (*details, "these are replicas, whose gradients are reduced: they must stay equal"),
            culprits,
            site,
        )

    def _left(self, subject: str, step: int, facts: Facts) -> Report | None:
        left = [{*fact.get("left", ())} for fact in facts.values()]
        odd = []
        for name in sorted(set.intersection(*left)):
            before, gradient, after = (
                {rank: fact[kind][name] for rank, fact in facts.items()}
                for kind in ("before", "gradients", "after")
            )
            if _odd(before) is None and _odd(gradient) is not None and _odd(after) is not None:
                odd.append(self._names[subject].get(name, name))
        if not odd:
            return None
        fact = next(iter(facts.values()))
        by = f"at {fact['reduced']}" if "reduced" in fact else "by DDP"
        ranks = tuple(facts)
        return finding(
            "reduced",
            f"{name_ranks(ranks)} never reduced the gradients of {_listed(odd)}, though those of "
            f"the optimizer's other parameters are reduced {by}: they differ since step {step}",
            (f"stepped at {fact['site']}", _made(facts)),
            ranks,
            fact.get("reduced", fact["site"]),
        )

    # -- data ------------------------------------------------------------------------------------

    def _sampler(self, subject: str, moment: int, facts: Facts) -> Report | None:
        for position, word in ((0, "seed"), (1, "epoch")):
            shuffled = {rank: fact[position] for rank, fact in facts.items() if fact[2]}
            culprits = _odd(shuffled)
            if culprits is None:
                continue
            site = facts[culprits[0]][3]
            what = _differ(culprits, facts, f"DistributedSampler.{word}")
            values = ", ".join(f"rank {rank}: {value}" for rank, value in shuffled.items())
            return finding(
                "sampler",
                f"{what} ({site}), so some samples are used twice and others never",
                (f"{word}s: {values}", f"give all ranks the same {word}"),
                culprits,
                site,
            )
        return None

    def _batch(self, subject: str, moment: int, facts: Facts) -> Report | None:
        counts = Counter(fact[0] for fact in facts.values() if fact[0] is not None)
        for value, times in counts.items():
            if times > 1:
                same = tuple(rank for rank, fact in facts.items() if fact[0] == value)
                return finding(
                    "hint",
                    f"{name_ranks(same)} have the same batch in forward pass {moment} "
                    f"({facts[same[0]][1]})",
                    ("data-parallel ranks should have different data: use a DistributedSampler",),
                    same,
                    facts[same[0]][1],
                )
        return None


def _odd(values: Facts) -> tuple[int, ...] | None:
    """The ranks whose value is not that of the majority, all without one; None if all agree."""
    counts = Counter(values.values())
    if len(counts) < 2:
        return None
    usual, times = counts.most_common(1)[0]
    if 2 * times <= len(values):
        return tuple(values)
    return tuple(rank for rank, value in values.items() if value != usual)


def _differ(culprits: tuple[int, ...], facts: Facts, what: str) -> str:
    if len(culprits) == len(facts):
        return f"{what} of {name_ranks(culprits)} differs"
    return f"{what} of {name_ranks(culprits)} differs from the others'"


def _loaded(facts: Facts, culprits: Iterable[int]) -> list[str]:
    """What only these ranks have loaded since the last step."""
    found = []
    for rank in culprits:
        for text in facts[rank]["loaded"]:
            elsewhere = any(
                text in fact["loaded"] for other, fact in facts.items() if other not in [*culprits]
            )
            if text and not elsewhere:
                found.append(f"on rank {rank}, {text} before this step")
    return found


def _made(facts: Facts) -> str:
    return f"the optimizer was made at {next(iter(facts.values()))['made']}"


def _listed(names: Iterable[str]) -> str:
    known = [*names]
    more = f" and {len(known) - _MOST_NAMED} more" if len(known) > _MOST_NAMED else ""
    return ", ".join(known[:_MOST_NAMED]) + more
