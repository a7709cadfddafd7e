"""What Sphinx is told: `python tools/docs_site` builds the pages, and calls it."""

import unisono

project = "unisono"
author = "The unisono developers"
release = version = unisono.__version__
extensions = ["myst_parser"]
root_doc = "index"
highlight_language = "text"
smartquotes = False
pygments_style = "default"
pygments_dark_style = "github-dark"

# Anchors as code hosts make them, so that links work in both.
myst_heading_anchors = 4
myst_links_external_new_tab = True
myst_enable_extensions = ["colon_fence"]

html_theme = "furo"
html_title = f"unisono {release}"
html_css_files = ["site.css", "picture.css", "incident.css"]
html_js_files = ["site.js"]
html_show_sourcelink = False
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
# Summaries are fetched, which a browser refuses for files: titles alone work everywhere.
html_show_search_summary = False
html_theme_options = {"navigation_with_keys": True}
