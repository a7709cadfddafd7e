"""Tells whoever asked that torch has been imported; torch_backend/autoload.py does, at its end.

It is part of every `import torch`, and so imports nothing.
"""

from __future__ import annotations

from collections.abc import Callable

listener: Callable[[], None] | None = None
"""Called at the end of `import torch`: the watch's, while it is on."""
