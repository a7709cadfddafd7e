"""Every collective, once: what holds of it, its arguments, and its result by formula.

primitives.py   the table: where data goes, which sides are wide, what is reduced. No NumPy
results.py      inputs of ranks, and what each rank has afterwards, computed with NumPy
"""
