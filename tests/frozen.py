"""The last module that the fork server of `ranks.py` loads: what is there by then stays.

No collection of garbage in a rank looks at it, which would take 0.1 s and copy the memory that all
ranks share.
"""

import gc
import os

_, _, path = os.environ.pop("PYTHONPATH", "").partition(os.pathsep)  # ours is the first
if path:
    os.environ["PYTHONPATH"] = path
gc.collect()
gc.freeze()
