"""The exercises of the course "Collectives from zero": `unisono learn`.

exercises/ has a file for each chapter, with a function to write; checks.py runs what the reader
wrote; command.py lists, copies and checks."""
