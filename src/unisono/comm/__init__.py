"""The Communicator and its implementations: what moves data.

Read from below: base (the interface), engine (the C library), rendezvous/ (how ranks meet), then
the implementations solo, shared_memory/ and over_torch/, and join, which makes groups by a name.
execute runs schedules on any of them; arguments holds the rules that all of them refuse by.
"""
