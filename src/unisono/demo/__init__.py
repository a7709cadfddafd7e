"""`unisono demo`: the primitives as pictures, faults explained, a race with gloo.

tour.py      all of it, and the file that keeps it; command.py: the command
scenes.py    the primitives on real ranks, each result checked
faults.py    a barrier, a deadlock, a mismatch
drawing.py   from what the ranks saw to pictures
race.py      all_reduce on unisono and on gloo, measured by unisono.bench
"""
