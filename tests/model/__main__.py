"""Check the engine's protocols with spin, and with GenMC if it is installed (make model).

    *.c     harnesses: the engine's own functions in two or three threads, for GenMC (genmc.py)
    *.pml   models of what happens between processes, for spin (spin.py)

weaken.py has the list of memory orders that GenMC must find missing.
"""

from __future__ import annotations

import sys

import genmc
import spin
import weaken


def main() -> int:
    """Run what is installed, and say what was not explored; without spin the run has failed."""
    if not spin.is_installed():
        print(f"the models were not explored: {spin.MISSING}")
        return 1
    print("models, by spin:", flush=True)
    is_right = spin.check_models()
    if genmc.tool() is not None:
        print("the engine's own functions, by GenMC:", flush=True)
        is_right &= weaken.check_engine()
    else:
        print(f"the engine's own functions were not explored: {genmc.MISSING}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
