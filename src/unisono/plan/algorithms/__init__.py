"""Collective algorithms, one page each: pure functions from a number of ranks to a Schedule.

Importing this package registers them all; `unisono.plan.catalog` lists them.
"""

import importlib
import pkgutil

for _page in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_page.name}")
