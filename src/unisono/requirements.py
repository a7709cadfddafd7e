"""What parts of the package need and may not be installed: said in one sentence."""

from __future__ import annotations

import importlib.util


def require_torch(what: str) -> None:
    """Raise TorchMissing unless torch is installed; `what` is the thing that needs it. Imports
    nothing."""
    if importlib.util.find_spec("torch") is None:
        from unisono.errors import TorchMissing  # every `import torch` would pay for it above

        raise TorchMissing(what)
