"""`unisono demo`: the primitives as pictures, faults explained, a race with gloo.

command.py   the command: all of it, a race with gloo, and the report that keeps it
scenes.py    the primitives on real ranks, each result checked; a deadlock and a mismatch
drawing.py   from what the ranks saw to pictures
"""
