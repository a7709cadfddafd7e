"""What NCCL would choose, compared with NCCL's own code.

nccl_2_30_7.json has what ncclTopoTuneModel and ncclTopoGetAlgoTime of NCCL 2.30.7 return for a DGX
H100 and a DGX A100, described to NCCL as XML, with the graphs that ncclTopoCompute finds for them:
for each collective the latency in microseconds and the bandwidth in GB/s of each algorithm and
protocol, and for some sizes the choice and the expected microseconds.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from unisono.plan import find_topology
from unisono.plan.nccl import FUNCTIONS, Tuning, tune

REFERENCE = json.loads((Path(__file__).parent / "nccl_2_30_7.json").read_text())


def tuned(machine: str, collective: str, **environment: str) -> Tuning:
    """ "h100 8x8" is eight nodes of eight."""
    name, size = machine.split()
    nodes, local = map(int, size.split("x"))
    topology = find_topology(name).with_nodes_of(local)
    return tune(collective, nodes * local, topology, environment)


@pytest.mark.parametrize("machine", REFERENCE)
@pytest.mark.parametrize("collective", FUNCTIONS)
def test_latency_and_bandwidth_are_those_of_nccl(machine: str, collective: str) -> None:
    tuning, wanted = tuned(machine, collective), REFERENCE[machine]
    assert tuning.channels == wanted["channels"]
    found = {
        f"{each.algorithm} {each.protocol}": (each.latency_us, each.gb_per_s)
        for each in tuning.estimates
    }
    estimates = wanted["estimates"][FUNCTIONS[collective]]
    assert found.keys() == estimates.keys()
    for name, pair in estimates.items():
        assert found[name] == pytest.approx(pair, rel=1e-5)


@pytest.mark.parametrize("machine", REFERENCE)
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather"])
def test_so_is_the_choice_for_every_size(machine: str, collective: str) -> None:
    tuning = tuned(machine, collective)
    choices = REFERENCE[machine]["choices"][FUNCTIONS[collective]]
    assert len(choices) == 15
    for size, (algorithm, protocol, expected_us) in choices.items():
        chosen = tuning.choose(int(size))
        assert (chosen.algorithm, chosen.protocol) == (algorithm, protocol)
        assert tuning.time_s(chosen, int(size)) * 1e6 == pytest.approx(expected_us, rel=1e-5)


@pytest.mark.parametrize(
    ("algorithms", "protocols", "left"),
    [
        ("tree", "", {"Tree LL", "Tree LL128", "Tree Simple"}),
        ("^ring,nvlstree", "simple", {"Tree Simple"}),
        ("ring;allreduce:tree", "LL128", {"Tree LL128"}),
        ("ring;Broadcast:tree", "^LL128", {"Ring LL", "Ring Simple"}),
        ("Tree,Ring", "^LL,LL128;AllReduce:ll", {"Tree LL", "Ring LL"}),
    ],
)
def test_lists_are_read_as_nccl_reads_them(algorithms: str, protocols: str, left: set[str]) -> None:
    tuning = tuned("h100 8x8", "all_reduce", NCCL_ALGO=algorithms, NCCL_PROTO=protocols)
    assert {f"{each.algorithm} {each.protocol}" for each in tuning.estimates} == left


def test_a_protocol_that_is_named_is_used_where_it_is_off_by_default() -> None:
    assert "LL128" not in {e.protocol for e in tuned("a100 8x8", "all_reduce").estimates}
    named = tuned("a100 8x8", "all_reduce", NCCL_PROTO="LL128")
    assert {e.protocol for e in named.estimates} == {"LL128"}


@pytest.mark.parametrize(
    ("variable", "text", "sentence"),
    [
        ("NCCL_ALGO", "rings", "NCCL_ALGO=rings: 'rings' is not one of Tree, Ring, .*Ring\\?"),
        ("NCCL_PROTO", "LL;Simple", "all entries but the first need a name"),
        ("NCCL_PROTO", "sum:LL", "no function 'sum': AllReduce, "),
        ("NCCL_ALGO", "NVLS", "NCCL_ALGO=NVLS leaves no algorithm for all_reduce"),
    ],
)
def test_lists_that_nccl_refuses(variable: str, text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        tuned("h100 8x8", "all_reduce", **{variable: text})


def test_machines_and_collectives_that_are_not_known() -> None:
    with pytest.raises(ValueError, match="for all_to_all, only for all_reduce, "):
        tuned("h100 1x8", "all_to_all")
    for machine in ("ethernet 2x8", "h100 2x4", "h100 1x1", "summit 2x6"):
        with pytest.raises(ValueError, match="are unknown: take h100 or a100"):
            tuned(machine, "all_reduce")
