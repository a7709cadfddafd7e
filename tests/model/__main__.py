"""Check the engine's protocols with the model checkers that are installed (make model).

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
    """Run what is installed, and say what is missing."""
    is_right = True
    if spin.is_installed():
        print("models, by spin:")
        is_right &= spin.check_models()
    else:
        print(spin.MISSING)
    if genmc.tool() is not None:
        print("the engine's own functions, by GenMC:")
        is_right &= weaken.check_engine()
    else:
        print(genmc.MISSING)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
