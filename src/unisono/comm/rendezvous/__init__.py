"""How processes meet and come to share a segment: lobby.py."""
