"""Random scenarios with one fault each: how they are drawn, run on ranks that may die, and
described."""
