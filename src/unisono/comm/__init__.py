"""The Communicator and its makes: what moves data."""
