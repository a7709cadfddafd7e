"""Tests on several ranks: the implementation of `@pytest.mark.ranks` (docs/testing.md).

mark.py               the mark's arguments
controller.py         one test on many ranks, from the user's pytest session
pool.py, process.py   warm ranks, and the controller's handles of their processes
nursery.py            the process that ranks are forked from, with slow imports done
rank.py               the pytest session of a rank
protocol.py           the messages between controller and rank
assignment.py         a rank's part in a test, and the worlds that fixtures make
results.py            one result out of many ranks' results
"""
