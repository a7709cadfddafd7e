"""The implementation of the Communicator over any process group of torch: communicator.py."""
