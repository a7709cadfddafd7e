"""The last module that the fork server of `ranks.py` loads: everything loaded before it is frozen.

The garbage collector of a rank ignores it; otherwise a collection would take 0.1 s and copy memory
that all ranks share.
"""

import gc
import os

_, _, path = os.environ.pop("PYTHONPATH", "").partition(os.pathsep)  # ours is the first
if path:
    os.environ["PYTHONPATH"] = path
gc.collect()
gc.freeze()
