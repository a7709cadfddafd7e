"""New weights from trainers to inference engines: endpoints.py has both ends."""
