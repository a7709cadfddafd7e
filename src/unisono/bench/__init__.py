"""Measure collectives on any backend, and say what is normal (docs/bench.md)."""
