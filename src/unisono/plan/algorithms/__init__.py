"""Collective algorithms, one page each: pure functions from a number of ranks to a Schedule."""
