"""Schedules on any Communicator, over messages.

execute.py              run a schedule, and a collective by a chosen algorithm
workspace.py            where its chunks lie
compiled_schedules.py   what one rank has to do in a schedule
arithmetic.py           new rows, and arithmetic on rows
"""
