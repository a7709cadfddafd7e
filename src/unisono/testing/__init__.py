"""Tests on several ranks: what stands behind `@pytest.mark.ranks` (docs/testing.md).

mark.py               what the mark asks for
controller.py         one test on many ranks: what the user's pytest session does
pool.py, process.py   warm ranks, and their processes as the controller sees them
nursery.py            where ranks are born: imports what takes long, and forks
rank.py               the pytest session of a rank
protocol.py           what controller and rank say to each other
assignment.py         a rank's assignment in a test, and the worlds made of it
results.py            one result from the results of many ranks
"""
