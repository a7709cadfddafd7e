"""The world: the Communicator of all ranks of this program.

world.py         init, shutdown, and which rank of how many this process is
start.py         how a world starts: the meeting of the ranks, and the choice of a backend
environment.py   which rank of how many this process is, according to the launcher
"""
