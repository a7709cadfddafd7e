"""Build the documentation as a site that needs no network: `make docs`.

    python tools/docs_site [--output build/site]

sources.py       the markdown files of the repository as pages of the site, and their links
reference.py     the API from its docstrings; command_line.py: the commands from their help
pictures/        pictures, of real runs and of the course
conf.py          what Sphinx is told

Anything wrong ends it: a warning of Sphinx, a link that leads nowhere, a public name without a
docstring.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import command_line
import notebooks
import reference
import sources
from pictures import players, runs
from sphinx.cmd.build import main as run_sphinx

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def build(output: Path, work: Path) -> int:
    """Write the site to `output`; returns Sphinx's exit status. `work` holds what it is made of."""
    source = work / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    pictures = runs.draw_all(source)
    pictures |= players.write_all(source)
    sources.write_pages(ROOT, source, pictures)
    notebooks.write_all(ROOT / "docs", source / "_static/notebooks")
    names = [*reference.write_pages(source), command_line.write_pages(source)]
    sources.write_start_page(ROOT, source, names, pictures)
    shutil.rmtree(output, ignore_errors=True)
    # -n is left out: types of torch and NumPy in signatures have no page here.
    options = ["-W", "--keep-going", "-q", "-E", "-b", "html", "-c", str(HERE)]
    options += ["-d", str(work / "doctrees"), "-D", f"html_static_path={source / '_static'}"]
    return run_sphinx([*options, str(source), str(output)])


def main() -> None:
    """Exit with 1 if the site could not be built."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build/site")
    options = parser.parse_args()
    try:
        status = build(options.output, ROOT / "build/docs")
    except sources.BadSource as error:
        sys.exit(f"docs: {error}")
    if status == 0:
        print(f"{options.output}/index.html")
    sys.exit(status)


if __name__ == "__main__":
    main()
