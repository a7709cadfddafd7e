"""Functions and values as bytes for another process: cloudpickle, and modules of other kinds."""

from __future__ import annotations

import io
import pkgutil
import types
from typing import Any

import cloudpickle


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle takes modules by their name, but not those of a class of their own, such as
    `torch.ops`, nor what is in that one; all of them are found by their names."""

    def reducer_override(self, value: Any) -> Any:
        """How to make `value` anew, where cloudpickle does not know it."""
        name = ""
        if isinstance(value, types.ModuleType) and type(value) is not types.ModuleType:
            name = value.__name__
        elif type(value).__module__ == "torch._ops":
            name = f"torch.ops.{value}"  # "aten.add", "aten.add.Tensor"
        if name and _find(name) is value:
            return pkgutil.resolve_name, (name,)
        return super().reducer_override(value)


def _find(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return None


def dumps(value: Any) -> bytes:
    """As `cloudpickle.dumps`."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()
