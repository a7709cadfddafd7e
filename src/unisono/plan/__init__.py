"""Thinking about communication before a process is started: pure Python and NumPy, no torch."""
