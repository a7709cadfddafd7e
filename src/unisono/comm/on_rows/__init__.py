"""Collectives of transports that move rows of bytes.

row_transport.py     six primitives, and every collective in terms of them
rows.py              tensors of any layout as rows
announced_calls.py   what ranks are about to do, told and compared before a byte moves
mismatches.py        which ranks called something else than the others
thread_executor.py   threads that carry out calls, and their works
"""
