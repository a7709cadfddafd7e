"""`unisono tune`: measure this machine, and keep what is faster here than the defaults.

From the question to the answer:

    command     what was asked for, and what becomes of it
    rank        what one rank of a measurement does, from the first cell to the last
    compare     candidates by turns on the same group, and when one counts as faster
    calls       what is timed: a collective of some size, on memory of its own
    decide      from times to numbers: thresholds, and from which size on which algorithm
    document    the table as it is kept in the user's cache folder
    show        the table for people
"""
