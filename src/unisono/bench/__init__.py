"""Measure collectives on any backend, and compare them with a model (docs/bench.md).

api.py             `unisono.bench.measure`: rows in a program
command.py         `unisono bench`, and what becomes of a run; show.py: while it goes on
settings.py        what a run is asked to do, checked before anything runs
session.py         a run: its ranks start, meet, connect the backends, measure row by row, and
                   say what each row should take
collectives.py     what can be measured: sizes and bandwidths, as nccl-tests defines them
backends/          unisono, torch's backends and MPI as calls on buffers
measurer.py        one row: checked, warmed up, timed in blocks by turns
exact.py           inputs whose exact result is known
floor.py           what memory, and links between hosts, allow at best
machine.py         on what a run was made
results.py         what samples say; rows and runs, as JSON; compare.py: two runs
text.py            a run in words: tables, sentences
html.py            a run as a page; plot.py: its curves
"""

from unisono.bench.api import measure, measure_run

__all__ = ["measure", "measure_run"]
