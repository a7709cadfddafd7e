"""The Communicator and its transports: what moves data (docs/architecture.md has the layers)."""
