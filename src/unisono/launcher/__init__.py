"""Start ranks on this machine, or on the nodes of a Ray cluster.

functions.py          `unisono.launch`: a function on several ranks
command.py            `unisono run`: a program on several ranks
on_ray.py             the same on a Ray cluster
crew.py, process.py   the processes of a launch, from start to end; one process
child.py              what runs in a rank's process around the program
protocol.py           messages between the launching process and its ranks
output.py             the ranks' output, line by line, with their names
outcomes.py           from the way ranks ended to an exception
final_report.py       the last words of `unisono run`: the answer first, the rest in a file
interrupts.py         signals to the launching process
guardian.py           ends what ranks have started if the launching process is killed
record_keeper.py      keeps the records of watched ranks after they end
store.py              torch's store for the programs of `unisono run`
share.py              each rank's share of cores, threads and memory
"""
