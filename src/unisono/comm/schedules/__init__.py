"""Schedules on any Communicator, over messages.

execute.py              a schedule, run, and a collective by an algorithm of the caller's choice
workspace.py            where its chunks lie
compiled_schedules.py   what one rank has to do in a schedule
flat.py                 rows of elements of torch and NumPy, and what is computed with them
"""
