"""The binding over csrc/unisono.h, as `unisono.comm.engine` sees it."""

from typing import Any

def __getattr__(name: str) -> Any: ...
