"""Rows, and the views of them that every command uses; only commands import it.

table.py    columns; rows as a table in a terminal, as Markdown, as JSON
pages.py    HTML elements, tables and one-file pages; assets/: their styles and scripts
shapes.py   rectangles, lines and text in SVG
charts.py   charts by matplotlib: whether it is there, what they look like, how they are saved
"""
