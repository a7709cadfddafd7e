"""Pictures of the site, drawn from what real ranks did while it was built.

runs.py          all of them by name, as the HTML that stands in a page
collectives.py   what every rank has before and after a collective, and the moves between
levels.py        what each level of a call adds to its time
hang.py          the calls of ranks of which one never comes, from the watch's report
players.py       a page that plays for every algorithm
shapes.py        rectangles, lines and text in SVG

Colours are variables of static/site.css, so that they follow the light or dark setting.
"""
