"""The Communicator and its transports, which move data (docs/architecture.md has the layers)."""
