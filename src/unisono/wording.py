"""Ranks, and numbers of things, as sentences name them."""

from __future__ import annotations

from collections.abc import Collection, Iterable

_MOST_SPANS = 6


def name_ranks(ranks: Iterable[int]) -> str:
    """ "rank 3", "ranks 0, 1 and 3", "ranks 1, 4-7 and 9"; without any, "no rank"."""
    different = set(ranks)
    if not different:
        return "no rank"
    return f"rank{'' if len(different) == 1 else 's'} {list_ranks(different)}"


def list_ranks(ranks: Iterable[int]) -> str:
    """ "0, 1 and 3": in order, three neighbours or more as a span, and of many spans the first."""
    spans: list[range] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1].stop:
            spans[-1] = range(spans[-1].start, rank + 1)
        else:
            spans.append(range(rank, rank + 1))
    texts: list[str] = []
    for span in spans[:_MOST_SPANS]:
        texts += [f"{span[0]}-{span[-1]}"] if len(span) > 2 else map(str, span)
    if len(spans) > _MOST_SPANS:
        texts.append(f"{sum(map(len, spans[_MOST_SPANS:]))} more")
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))


def name_number(number: int, thing: str) -> str:
    """ "1 step", "1,024 steps"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def name_choices(known: Collection[str], asked: str | None) -> str:
    """ "all_gather, all_reduce. Did you mean all_reduce?" for somebody who asked for allreduce."""
    from difflib import get_close_matches

    like = get_close_matches((asked or "").casefold(), known, 1)
    return ", ".join(known) + (f". Did you mean {like[0]}?" if like else "")


def plural(text: str) -> str:
    """ "were killed by SIGKILL" of "was killed by SIGKILL": what follows several ranks' names."""
    for singular, several in (("is ", "are "), ("has ", "have "), ("was ", "were ")):
        if text.startswith(singular):
            return several + text.removeprefix(singular)
    return text
