"""The self-test: every primitive once on the group at hand, its results checked.

run.py        unisono.debug_communication
calls.py      what is called of each primitive, and what must come out
verdicts.py   how the ranks share what they found; results.py: what was found
"""
