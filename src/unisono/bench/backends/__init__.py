"""What is measured: our own engine and its peers, each as calls without arguments on buffers."""

from unisono.bench.backends.base import BACKENDS, Backend, Buffers, Case, Unsupported

__all__ = ["BACKENDS", "Backend", "Buffers", "Case", "Unsupported"]
