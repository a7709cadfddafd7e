"""Which UCX is chosen, and how it is configured. Libraries are fake where only their folder
matters."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from unisono.comm.hosts import ucx
from unisono.doctor import software
from unisono.errors import RendezvousError, UnisonoError


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing set, no system UCX, no adapter."""
    for name in [name for name in os.environ if name.startswith(("UCX_", "UNISONO_UCX"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(ucx, "_system_folders", lambda: [tmp_path / "system"])
    monkeypatch.setattr(ucx, "_ADAPTERS", tmp_path / "adapters")


def wheel() -> Path:
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None:
        pytest.skip("needs pip's UCX: pip install libucx-cu12")
    return Path(spec.origin).parent


def make_system(tmp_path: Path, *, rdma: bool = False) -> Path:
    """The wheel's library as a system library, without the version in its name."""
    folder = tmp_path / "system"
    (folder / "ucx").mkdir(parents=True)
    for path in (wheel() / "lib").glob("libuc[pstm].so.0"):
        shutil.copy(path, folder)
    if rdma:
        (folder / "ucx/libuct_ib.so.0").touch()
    return folder / "libucp.so.0"


def make_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapters/mlx5_0").mkdir(parents=True)


def without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def test_pips() -> None:
    libraries = wheel() / "lib"
    found = ucx.find()
    assert found.path.parent == libraries.resolve()
    assert found.origin == "pip's UCX"
    assert found.version >= (1, 15, 0)
    assert found.adapters == ()


def test_the_systems_where_pip_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, noted = make_system(tmp_path), ucx.find().version
    without_pip(monkeypatch)
    found = ucx.find()
    assert (found.path, found.origin) == (path, "the system's UCX")
    assert found.version == noted  # which the library itself reports


def test_of_two_pips_without_a_look_at_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start needs no other process: asking the system's for its version would."""
    make_system(tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *command, **options: pytest.fail(str(command)))
    assert ucx.find().origin == "pip's UCX"


def test_the_systems_where_it_has_rdma_and_the_host_too(tmp_path: Path) -> None:
    make_system(tmp_path, rdma=True)
    assert ucx.find().origin == "pip's UCX"
    make_adapter(tmp_path)
    assert ucx.find().origin == "the system's UCX"
    assert ucx.find().adapters == ("mlx5_0",)
    assert ("TLS", "tcp,self,ib") in ucx.settings(ucx.find(), "127.0.0.1")
    assert "NET_DEVICES" not in dict(ucx.settings(ucx.find(), "127.0.0.1"))


def test_a_systems_that_cannot_be_loaded_is_left_alone(tmp_path: Path) -> None:
    path = make_system(tmp_path)
    path.write_text("no library")
    assert ucx.find().origin == "pip's UCX"


@pytest.mark.parametrize("place", ["libucp.so.0", ""])
def test_the_one_that_is_named(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_system(tmp_path)
    monkeypatch.setenv("UNISONO_UCX", str(path.parent / place))
    assert ucx.find() == ucx.Ucx(path, "the UCX that UNISONO_UCX names")


def test_a_name_of_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_UCX", str(tmp_path))
    with pytest.raises(RendezvousError, match=r"which has no libucp\.so"):
        ucx.find()
    monkeypatch.setenv("UNISONO_UCX", "/nowhere")
    with pytest.raises(UnisonoError, match="UNISONO_UCX must be the path of a libucp"):
        ucx.find()


def test_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pip(monkeypatch)
    with pytest.raises(RendezvousError, match=r"run `pip install 'unisono\[hosts\]'`"):
        ucx.find()


def test_settings_follow_the_interface_and_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    wheel()
    assert dict(ucx.settings(ucx.find(), "127.0.0.1")) == {
        "TLS": "tcp,self",
        "NET_DEVICES": "lo",
        "TCP_TX_SEG_SIZE": "256k",
        "TCP_RX_SEG_SIZE": "256k",
        "TCP_CONN_NB": "y",
        "KEEPALIVE_INTERVAL": "inf",
        "TCP_KEEPIDLE": "inf",
    }
    assert dict(ucx.settings(ucx.find(), "::1"))["TCP_AF_PRIO"] == "inet6,inet"
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")
    assert not {"TLS", "NET_DEVICES"} & dict(ucx.settings(ucx.find(), "127.0.0.1")).keys()


def test_the_doctor_says_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = ucx.format_version(ucx.Ucx(wheel() / "lib/libucp.so", "").version)
    found = software._ucx()
    assert found.level == "ok"
    assert found.text.startswith(f"UCX {version} between hosts, by TCP: pip's UCX, ")
    make_system(tmp_path, rdma=True)
    make_adapter(tmp_path)
    text = software._ucx().text
    assert text.startswith(f"UCX {version} between hosts, by TCP and RDMA (mlx5_0): the system's")
    monkeypatch.setenv("UNISONO_UCX", str(tmp_path))
    assert software._ucx().level == "warn"
    monkeypatch.delenv("UNISONO_UCX")
    without_pip(monkeypatch)
    shutil.rmtree(tmp_path / "system")
    assert software._ucx().text.endswith("`pip install 'unisono[hosts]'` on each of them")
