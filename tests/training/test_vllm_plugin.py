"""vLLM's plug-in if vLLM is missing, old or unknown. `make real-vllm` tests the real one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from unisono import UnisonoError
from unisono.training.weights import vllm_plugin

MakeVllm = Callable[..., None]


@pytest.fixture
def make_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeVllm:
    """Makes a package of this name, with the given files, importable."""

    def make(**files: str) -> None:
        for name, text in ({"__init__": ""} | files).items():
            file = tmp_path / "vllm" / f"{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            monkeypatch.delitem(sys.modules, name)

    return make


def test_vllm_finds_it_by_its_entry_point() -> None:
    (found,) = (
        each for each in entry_points(group="vllm.general_plugins") if each.name == "unisono"
    )
    assert found.load() is vllm_plugin.register


def test_a_vllm_without_such_engines_is_left_alone(make_vllm: MakeVllm) -> None:
    make_vllm()
    vllm_plugin.register()
    assert "unisono.training.weights.vllm_engine" not in sys.modules


def test_an_unknown_version_is_refused_by_name(make_vllm: MakeVllm) -> None:
    make_vllm(version='__version__ = "0.99.1"')
    name: Any = "UnisonoWeightTransferEngine"
    with pytest.raises(
        UnisonoError, match=r"does not support vLLM 0\.99\.1: it was tested with 0\.32"
    ):
        getattr(vllm_plugin, name)
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = vllm_plugin.other
