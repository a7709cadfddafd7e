"""Measure collectives on any backend, and say what is normal (docs/bench.md).

api.py             `unisono.bench.measure`: rows in a program
command.py         `unisono bench`, and what becomes of a run
request.py         what was asked for, by either, checked before anything runs
settings.py        what a run is asked to do; start.py starts its ranks, session.py runs on each
meeting.py         how the ranks find each other; connect.py connects the backends on them
control.py         how they keep together beside what they measure
collectives.py     what can be measured: sizes and bandwidths, as nccl-tests defines them
backends/          unisono, torch's backends and MPI as calls on buffers
measurer.py        one row: checked, warmed up, timed in blocks by turns; floor.py: the local floor
exact.py           inputs whose exact result is known
forecast.py        what each row should take; kept_models.py: what earlier runs measured
statistics.py      what samples say
machine.py         on what a run was made
results.py         rows and runs, and their JSON; compare.py: two runs
text.py, table.py, show.py, plot.py   a run as text, CSV, on a terminal, plots
html.py            a run as a page; headline.py: who is faster; charts.py: its curves
"""

from unisono.bench.api import measure, measure_run

__all__ = ["measure", "measure_run"]
