"""Start ranks on this machine: `launch` for a function, script.py for a program."""

from unisono.launcher.functions import launch

__all__ = ["launch"]
