"""Pictures of the site that are not the course's (unisono.learn.pictures): what real ranks did
while it was built, and players.

runs.py          all of them by name, as the HTML that stands in a page
levels.py        what each level of a call adds to its time
hang.py          the calls of ranks of which one never comes, from the watch's report
players.py       a page that plays for every algorithm

Colours are variables of static/site.css, so that they follow the light or dark setting.
"""
