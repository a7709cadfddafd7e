"""Ranks of one host over shared memory: communicator.py is its Communicator."""
