"""The course "Collectives from zero": `unisono learn`.

chapters.py   the chapters as text for a terminal and as pages; their exercises and solutions
pictures.py   what every rank has before and after a collective, and the moves between
checks/       what the reader's functions must do
progress.py   the reader's folder: exercises, and which are solved
command.py    shows, checks, and says what is next
"""
