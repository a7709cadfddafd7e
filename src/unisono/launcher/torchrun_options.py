"""Options of torchrun that `unisono run` does not have, and what to use instead."""

from __future__ import annotations

_SEVERAL_MACHINES = "for several machines use torchrun; unisono works in the programs it starts"
_NO_ADDRESS = f"ranks of one machine meet without an address, so leave it out; {_SEVERAL_MACHINES}"
_NO_RESTARTS = "unisono run does not restart ranks: use torchrun for that"
_OUTPUT = (
    "every line comes with its rank's name: use --no-prefix, --capture, or the shell to send the "
    "output elsewhere"
)
_INSTEAD = {
    "--standalone": "unisono run always is: leave it out",
    "--nnodes": f"it starts ranks on this machine alone: leave it out; {_SEVERAL_MACHINES}",
    "--node-rank": _NO_ADDRESS,
    "--master-addr": _NO_ADDRESS,
    "--master-port": _NO_ADDRESS,
    "--local-addr": _NO_ADDRESS,
    "--max-restarts": _NO_RESTARTS,
    "--monitor-interval": _NO_RESTARTS,
    "--log-dir": _OUTPUT,
    "--redirects": _OUTPUT,
    "-r": _OUTPUT,
    "--tee": _OUTPUT,
    "-t": _OUTPUT,
    "--local-ranks-filter": _OUTPUT,
    "--duplicate-stdout-filters": _OUTPUT,
    "--duplicate-stderr-filters": _OUTPUT,
    "--logs-specs": _OUTPUT,
    "--numa-binding": "use --pin, which binds each rank to its share of the cores",
    "--no-python": "PROGRAM is a Python file, or a module with -m",
    "--run-path": "unisono run runs PROGRAM as python would: leave it out",
    "--role": "all ranks of unisono run have one role: leave it out",
    "--start-method": "every rank is a new process: leave it out",
    "--virtual-local-rank": "LOCAL_RANK is the rank: leave it out",
    "--event-log-handler": "use --watch or --trace to see what the ranks do",
}


def what_instead(option: str) -> str:
    """What to use instead of an option that `unisono run` does not have, in one sentence."""
    name = option.partition("=")[0].replace("_", "-")
    if name.startswith("--rdzv-"):
        reason = _NO_ADDRESS
    else:
        reason = _INSTEAD.get(name, "there is no such option, and options of PROGRAM follow it")
    return f"{option}: {reason}"
