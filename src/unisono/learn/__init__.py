"""The exercises of the course "Collectives from zero": `unisono learn`.

exercises/   a file for each chapter, with functions for the reader to write
checks.py    what those functions must do, on real ranks
command.py   lists, copies and checks them
"""
