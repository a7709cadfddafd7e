"""The world: the Communicator of all ranks of this program (world.py), and its start (start.py)."""
