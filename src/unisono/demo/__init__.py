"""`unisono demo`: the primitives as pictures, faults explained, a race with gloo.

command.py   the command: the pictures, a race with gloo, and a report
scenes.py    the primitives on real ranks, each result checked; a deadlock and a mismatch
drawing.py   draws what the ranks saw
"""
