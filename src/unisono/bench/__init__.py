"""Measure collectives on any backend, and compare them with a model (docs/bench.md).

api.py             `unisono.bench.measure`: rows in a program
command.py         `unisono bench`, and the output of a run; show.py: its progress
settings.py        the settings of a run, checked before it starts
session.py         a run: its ranks start, meet, connect the backends, measure row by row, and
                   say what each row should take
collectives.py     what can be measured: sizes and bandwidths as in nccl-tests
backends/          unisono, torch's backends and MPI as calls on buffers
measurer.py        one row: checked, warmed up, timed in interleaved blocks
exact.py           inputs whose exact result is known
floor.py           the limit of memory
machine.py         the machine of a run
results.py         statistics; rows and runs, as JSON; compare.py: two runs
text.py            a run as text: tables, sentences
html.py            a run as a page; plot.py: its curves
"""

from unisono.bench.api import measure, measure_run

__all__ = ["measure", "measure_run"]
