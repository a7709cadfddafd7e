"""`unisono tune`: what was asked for, and what becomes of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from unisono.errors import Misuse, UnisonoError

if TYPE_CHECKING:
    from rich.console import Console

BUDGET_S = 40.0
_MOST_RANKS = 128
_QUIET_S = 5.0
"""How often somebody who is not at a terminal hears of progress."""
_DISTURBED = 0.05

EXAMPLES = """\b
  unisono tune                    groups of 2, 4, 8, ... ranks, up to the cores
  unisono tune --ranks 4          groups of 4 ranks alone; what was measured for others stays
  unisono tune --show             which way each size goes, how fast, and why
  UNISONO_TUNING=off python ...   a run without the table
"""


@click.command(epilog=f"Examples:\n\n{EXAMPLES}")
@click.option(
    "-n",
    "--ranks",
    metavar="LIST",
    help="Groups of how many ranks: 2,4,8.  [default: 2, 4, 8, ... up to the cores]",
)
@click.option(
    "--budget",
    "budget_s",
    type=click.FloatRange(min=1),
    default=BUDGET_S,
    show_default=True,
    metavar="SECONDS",
    help="Time for all of it, about.",
)
@click.option("--show", "shows", is_flag=True, help="Measure nothing; show the table.")
@click.option("--json", "as_json", is_flag=True, help="The table for programs, as JSON.")
def tune(ranks: str | None, budget_s: float, shows: bool, as_json: bool) -> None:
    """Measure this machine, and keep what is faster here than the defaults.

    unisono moves large tensors in pieces, and small and large ones in different ways. In what
    pieces, and from which size on, is measured here, for this processor, in under a minute. The
    table is kept in the user's cache folder ($XDG_CACHE_HOME/unisono/tuning), and every group whose
    ranks have the same one uses it. It changes no bits of any result. A default is replaced only by
    what takes at most 95% of its time in two passes, so on a busy machine little is found: measure
    on a quiet one.

    The same table has the fastest algorithm for `algorithm="auto"`, by collective and size.
    """
    from rich.console import Console

    from unisono.comm import tuning

    console = Console(highlight=False, soft_wrap=True)
    try:
        path = tuning.table_path()
        counts = _rank_counts(ranks, shows)
    except (UnisonoError, ValueError) as error:
        raise Misuse(str(error)) from error
    if path is None:
        raise Misuse("UNISONO_TUNING is off: leave it out, or name the table there")
    if shows:
        _show(console, path, counts, as_json)
        return
    document = _measure(path, counts, budget_s)
    if as_json:
        click.echo(json.dumps(document, indent=1))
        return
    for group in document["groups"]:
        if group["ranks"] in counts:
            _summarise(console, group)
    click.echo(f"wrote {path}; unisono tune --show shows all of it")


def _rank_counts(ranks: str | None, shows: bool) -> list[int]:
    """What was asked for; nothing was: every number, where the table is only shown."""
    from unisono.launcher.share import core_count

    if ranks is None:
        cores = core_count()
        usual = {2, cores, *(1 << power for power in range(1, 7))}
        return [] if shows else sorted(n for n in usual if 2 <= n <= max(2, cores))
    try:
        counts = sorted({int(text) for text in ranks.split(",")})
    except ValueError:
        raise ValueError(f"--ranks {ranks}: write numbers like 2 or 2,4,8") from None
    if counts[0] < 2 or counts[-1] > _MOST_RANKS:
        raise ValueError(f"--ranks {ranks}: groups of 2 to {_MOST_RANKS} ranks can be tuned")
    return counts


# -- measuring ---------------------------------------------------------------------------------


def _measure(path: str, counts: list[int], budget_s: float) -> dict[str, Any]:
    from unisono.cache import check_writable
    from unisono.launcher.functions import launch
    from unisono.launcher.share import check_memory
    from unisono.tune import document, rank

    groups = []
    try:
        check_memory(counts[-1])
        check_writable(path)  # before a minute is spent
        with _progress() as say:
            for number, ranks in enumerate(counts, 1):
                of_all = f"{ranks} ranks" + (f" ({number} of {len(counts)})" * (len(counts) > 1))
                say(f"{of_all}: starting")

                def hear(who: int, stream: str, line: str, of_all: str = of_all) -> None:
                    _, mark, text = line.partition(rank.MARK)
                    if mark:
                        say(f"{of_all}: {json.loads(text)}")
                    elif line.strip():
                        click.echo(f"rank {who}: {line}", err=True)

                share_s = budget_s / len(counts)
                results = launch(rank.measure, ranks, (share_s,), threads=1, on_line=hear)
                groups += [group for group in results if group is not None]
        merged = document.merge(path, groups)
        document.write(path, merged)
    except KeyboardInterrupt:
        click.echo("interrupted: the table is as it was", err=True)
        raise SystemExit(130) from None
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from error
    except UnisonoError as error:
        raise click.ClickException(str(error)) from error
    return merged


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Say on stderr what is being measured: one line on a terminal, else a line now and then."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("measuring") as status:
            yield lambda text: status.update(text)
        return
    said = [-_QUIET_S]

    def say(text: str) -> None:
        if time.monotonic() - said[0] > _QUIET_S:
            said[0] = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    yield say


# -- showing -----------------------------------------------------------------------------------


def _summarise(console: Console, group: dict[str, Any]) -> None:
    from unisono.tune import show

    console.print(show.heading(group))
    lines = list(show.numbers(group)) or [
        "the defaults stay: nothing else was faster in both passes"
    ]
    for line in lines:
        console.print(f"  {line}")
    for key, title in (("algorithms", "auto"), ("algorithms_reordered", "auto, allow_reorder")):
        for collective, steps in group[key].items():
            listed = ", ".join(f"{s['algorithm']} from {s['from_bytes']:,} bytes" for s in steps)
            console.print(f"  {title}: {collective} by {listed}")
    if group["disturbed"] > _DISTURBED and not group["crowded"]:
        console.print(
            f"  other programs had the cores for {group['disturbed']:.0%} of the time: "
            "measure again when it is quiet"
        )


def _show(console: Console, path: str, counts: list[int], as_json: bool) -> None:
    from unisono.launcher.share import core_count
    from unisono.plan.tables import print_table
    from unisono.tune import document, show

    groups: list[dict[str, Any]] = []
    try:
        groups = document.read(path)["groups"]
        click.echo(f"{path}", err=as_json)
    except FileNotFoundError:
        click.echo(f"there is no table yet ({path}): unisono tune writes it", err=True)
    except (OSError, ValueError) as error:
        raise Misuse(f"{path} cannot be used: {error}") from error
    known = {group["ranks"]: group for group in groups}
    shown = []
    for ranks in counts or sorted(known) or [max(2, core_count())]:
        crowded = ranks > core_count()
        nothing = {"ranks": ranks, "crowded": crowded, "sizes": show.default_sizes(ranks, crowded)}
        shown.append(known.get(ranks, nothing))
    try:
        listed = [group | {"ways": show.rows(group)} for group in shown]
        if as_json:
            click.echo(json.dumps(listed, indent=1))
            return
        for group in shown:
            console.print(show.heading(group))
            for line in show.numbers(group):
                console.print(f"  {line}")
            print_table(console, show.ways(group))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise Misuse(f"{path} is damaged ({error!r}): unisono tune writes a new one") from error
