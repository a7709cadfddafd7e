"""torch's store, on a socket that the launching process holds from the start."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys

from unisono.launcher.process import main_of
from unisono.processes import end_with_parent, start_python


class LazyStore:
    """An address of this machine for MASTER_ADDR and MASTER_PORT, with a store behind it on demand.

    The kernel chose the port, and we listen on it, so that no other program can take it. The store
    itself needs torch, which takes seconds to import: it starts in its own process when the first
    rank connects. Until it answers, connections wait in the socket's queue.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._socket.bind((address, 0))
            self._socket.listen(1024)
        except BaseException:
            self._socket.close()
            raise

    def variables(self) -> dict[str, str]:
        """What torchrun sets in addition to `rank_variables`."""
        host, port = self._socket.getsockname()[:2]
        return {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # only this process hosts it
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": secrets.token_hex(8),
        }

    def listen(self, selector: selectors.BaseSelector) -> None:
        """Start the store when the first rank connects: registers a function with the selector."""

        def start() -> None:
            selector.unregister(self._socket)
            descriptor = self._socket.fileno()
            self._process = start_python(
                *main_of("unisono.launcher.store"),
                os.getpid(),
                descriptor,
                environment=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
                inherit=[descriptor],
            )

        selector.register(self._socket, selectors.EVENT_READ, start)

    def close(self) -> None:
        """End the store."""
        self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def main() -> None:
    """Host the store until the launching process ends this one."""
    parent_pid, descriptor = map(int, sys.argv[1:3])
    end_with_parent(parent_pid)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with socket.socket(fileno=os.dup(descriptor)) as listener:
        host, port = listener.getsockname()[:2]
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
    )
    while store:
        signal.pause()
