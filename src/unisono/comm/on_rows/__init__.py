"""Collectives of transports that move rows of bytes.

row_transport.py     six primitives, and every collective in terms of them
rows.py              tensors of any layout as rows
announced_calls.py   the ranks' calls, exchanged and compared before data moves
mismatches.py        which ranks made a different call than the others; the text of the exception
thread_executor.py   threads that run calls, and their works
"""
