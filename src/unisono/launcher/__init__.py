"""Start ranks on this machine, or on the nodes of a Ray cluster.

functions.py          `unisono.launch`: a function on several ranks
command.py            `unisono run`: a program on several ranks
on_ray.py             the same on a Ray cluster
crew.py, process.py   the processes, from their start to the end of the last one; one of them
child.py              what a rank does around the program's own code
protocol.py           what those two say to each other
output.py             from what ranks write to lines with their names
outcomes.py           from the way they ended to the exception that tells it
interrupts.py         signals to the launching process
guardian.py           ends what ranks have started if the launching process is killed
record_keeper.py      keeps the records of watched ranks beyond their end
store.py              torch's store for the programs of `unisono run`
debugger.py           `breakpoint()` in a rank
share.py              each rank's share of cores, threads and memory
"""
