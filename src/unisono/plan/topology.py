"""How ranks are connected: nodes, links with latency and bandwidth, cards that ranks share."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Topology:
    """Ranks in nodes of `node_size`, rank r in node r // node_size.

    Inside a node a hop has a latency of `inside_latency_s`, and each rank has a port with
    `inside_bytes_per_s` in each direction. `between_latency_s` is the latency of a hop to another
    node, which goes through one of the node's `cards`, each with `card_bytes_per_s` in each
    direction. A message occupies its sender's and its receiver's port for `overhead_s` in addition
    to its bytes; a rank adds `reduce_bytes_per_s`; a call takes `call_s` before anything moves.

    Switches only forward. `name` is its name, `source` where its numbers come from.

    A rank's device computes `flops_per_s` at most, and has `memory_bytes`, which it reads or writes
    at `memory_bytes_per_s`; infinite: not known. To start the operators of a transformer's layer,
    forward and backward, takes `layer_call_s`, those of a block of ring attention `ring_call_s`.
    The cluster has so many `devices`; 0: any number.
    Only layouts need these (docs/layouts.md).

    Raises ValueError for invalid values. See also `find_topology`.

    >>> from unisono import plan
    >>> inside = {"inside_latency_s": 1e-6, "inside_bytes_per_s": 10e9}
    >>> plan.Topology("mine", node_size=4, **inside).nodes(16)
    4
    """

    name: str
    node_size: int
    inside_latency_s: float
    inside_bytes_per_s: float
    between_latency_s: float = 0.0
    card_bytes_per_s: float = math.inf
    cards: int = 1
    overhead_s: float = 0.0
    reduce_bytes_per_s: float = math.inf
    call_s: float = 0.0
    flops_per_s: float = math.inf
    memory_bytes: float = math.inf
    memory_bytes_per_s: float = math.inf
    layer_call_s: float = 0.0
    ring_call_s: float = 0.0
    devices: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", "source"):
                fits, wanted = isinstance(value, str), "a string"
            elif field.name in ("node_size", "cards"):
                fits, wanted = type(value) is int and value >= 1, "an integer of at least 1"
            elif field.name == "devices":
                fits, wanted = type(value) is int and value >= 0, "an integer of at least 0"
            elif type(value) not in (int, float):
                fits, wanted = False, "a number"
            elif field.name.endswith("_per_s") or field.name == "memory_bytes":
                fits, wanted = value > 0, "more than 0"
            else:
                fits, wanted = 0 <= value < math.inf, "0 or more"
            if not fits:
                raise ValueError(
                    f"{field.name} of topology {self.name!r} must be {wanted}, not {value!r}"
                )

    @classmethod
    def flat(
        cls,
        latency_s: float,
        bytes_per_s: float,
        overhead_s: float = 0.0,
        reduce_bytes_per_s: float = math.inf,
    ) -> Topology:
        """All ranks on one switch: the alpha-beta-gamma model."""
        flat = cls("flat", 1 << 40, latency_s, bytes_per_s, overhead_s=overhead_s)
        return dataclasses.replace(flat, reduce_bytes_per_s=reduce_bytes_per_s)

    @classmethod
    def from_toml(cls, path: str | Path) -> Topology:
        """A topology from a TOML file whose keys are the names of the fields, or ValueError."""
        try:
            values = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise ValueError(f"cannot read topology file {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"topology file {path} is not TOML: {error}") from error
        values.setdefault("name", Path(path).stem)
        fields = dataclasses.fields(cls)
        unknown = set(values) - {field.name for field in fields}
        if unknown:
            raise ValueError(
                f"topology file {path} has unknown keys: {', '.join(sorted(unknown))}; "
                f"the known ones are {', '.join(field.name for field in fields)}"
            )
        missing = [
            field.name
            for field in fields
            if field.default is dataclasses.MISSING and field.name not in values
        ]
        if missing:
            raise ValueError(f"topology file {path} lacks {', '.join(missing)}")
        return cls(**values)

    def to_toml(self) -> str:
        """The text of a file that `from_toml` reads."""
        lines = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str):
                text = '"' + value.replace('"', "'") + '"'
            else:
                text = repr(value)
            lines.append(f"{field.name} = {text}")
        return "\n".join(lines) + "\n"

    def with_nodes_of(self, node_size: int) -> Topology:
        """This topology with `node_size` ranks per node."""
        return dataclasses.replace(self, node_size=node_size)

    def nodes(self, ranks: int) -> int:
        """How many nodes `ranks` ranks need."""
        return -(-ranks // self.node_size)

    def rails(self, ranks: int) -> int:
        """How many of a node's cards `ranks` ranks can keep busy, with a channel for each."""
        return min(self.cards, self.node_size) if self.nodes(ranks) > 1 else 1


_PRESETS = ("h100", "a100", "summit", "ethernet")
PRESETS = {
    name: Topology.from_toml(Path(__file__).parent / "topologies" / f"{name}.toml")
    for name in _PRESETS
}


def find_topology(name: str) -> Topology:
    """A preset by its `name`, or the topology in the TOML file of that name.

    Raises ValueError, with the known names, for an unknown one. See also `Topology`.

    >>> from unisono import plan
    >>> plan.find_topology("h100").node_size
    8
    """
    if name in PRESETS:
        return PRESETS[name]
    if name.endswith(".toml") or Path(name).is_file():
        return Topology.from_toml(name)
    raise ValueError(f"there is no topology {name!r}: {', '.join(PRESETS)}, or a .toml file")
