"""Schedules on any Communicator, over messages.

execute.py              a schedule, run; workspace.py: where its chunks lie
by_algorithm.py         a collective by an algorithm of the caller's choice
compiled_schedules.py   what one rank has to do in a schedule
flat.py, arithmetic.py  rows of elements of torch and NumPy, and what is computed with them
"""
