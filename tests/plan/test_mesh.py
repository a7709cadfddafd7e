"""Mesh: named axes over ranks, compared with enumeration by hand."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono import Mesh
from user_programs import run_python

NAMES = ("dp", "pp", "cp", "ep", "tp")


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    names = draw(st.permutations(NAMES))[: draw(st.integers(1, 5))]
    return Mesh({name: draw(st.integers(1, 4)) for name in names})


def by_hand(mesh: Mesh) -> list[dict[str, int]]:
    """Coordinates in the order of ranks: counting up with the last axis fastest."""
    coordinates = product(*(range(mesh[axis]) for axis in mesh.axes))
    return [dict(zip(mesh.axes, position, strict=True)) for position in coordinates]


@given(meshes())
@settings(max_examples=60, deadline=None)
def test_coordinates_count_up_with_the_last_axis_fastest(mesh: Mesh) -> None:
    everybody = by_hand(mesh)
    assert mesh.size == len(everybody) == prod(mesh.shape)
    for rank, position in enumerate(everybody):
        assert mesh.coordinates(rank) == position
        assert mesh.rank_at(**position) == rank
        assert mesh.rank_at(**{axis: at for axis, at in position.items() if at}) == rank


@given(meshes(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_group_has_those_who_differ_along_its_axes_alone(mesh: Mesh, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(mesh.axes), min_size=1, unique=True))
    coordinates = by_hand(mesh)
    expected = []
    for rank, position in enumerate(coordinates):
        group = [
            other
            for other, there in enumerate(coordinates)
            if all(position[axis] == there[axis] for axis in mesh.axes if axis not in axes)
        ]
        assert mesh.members(rank, *axes) == group
        if group not in expected:
            expected.append(group)
    assert mesh.groups(*axes) == expected
    assert mesh.groups(*reversed(axes)) == expected


@given(meshes(), st.data())
@settings(max_examples=60, deadline=None)
def test_neighbours(mesh: Mesh, data: st.DataObject) -> None:
    axis = data.draw(st.sampled_from(mesh.axes))
    for line in mesh.groups(axis):
        for position, rank in enumerate(line):
            assert mesh.next(rank, axis) == (
                line[position + 1] if position + 1 < len(line) else None
            )
            assert mesh.prev(rank, axis) == (line[position - 1] if position else None)
            assert mesh.next(rank, axis, cyclic=True) == line[(position + 1) % len(line)]
            assert mesh.prev(rank, axis, cyclic=True) == line[position - 1]


def test_a_mesh_is_a_value() -> None:
    mesh = Mesh({"dp": 2, "tp": 4})
    assert mesh == Mesh({"dp": 2, "tp": 4})
    assert hash(mesh) == hash(Mesh({"dp": 2, "tp": 4}))
    assert mesh != Mesh({"tp": 4, "dp": 2})  # a different order, different neighbours
    assert repr(mesh) == "Mesh({'dp': 2, 'tp': 4})"
    assert (mesh.axes, mesh.shape, mesh["tp"]) == (("dp", "tp"), (2, 4), 4)
    with pytest.raises(AttributeError):
        mesh.axes = ("a",)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({}, "at least one axis"),
        ({"dp": 0}, "axis dp has 0 ranks"),
        ({"dp": 2.0}, "axis dp has 2.0 ranks"),
        ({"dp": True}, "axis dp has True ranks"),
        ({"d p": 2}, "'d p' cannot name an axis"),
    ],
)
def test_invalid_sizes(sizes: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Mesh(sizes)


def test_arguments_that_make_no_sense() -> None:
    mesh = Mesh({"dp": 2, "tp": 4})
    with pytest.raises(ValueError, match="no axis 'cp': the axes are dp, tp"):
        mesh.groups("cp")
    with pytest.raises(ValueError, match="no axis 'cp'"):
        mesh.rank_at(cp=0)
    with pytest.raises(ValueError, match="no axis 'cp'"):
        mesh.next(0, "cp")
    with pytest.raises(ValueError, match="at least one axis"):
        mesh.groups()
    with pytest.raises(ValueError, match="named twice"):
        mesh.members(0, "tp", "tp")
    with pytest.raises(ValueError, match="tp=4 is outside"):
        mesh.rank_at(tp=4)
    for rank in (-1, 8):
        with pytest.raises(ValueError, match=f"no rank {rank} among 8"):
            mesh.coordinates(rank)


@given(meshes(), st.integers(1, 400))
@settings(max_examples=100, deadline=None)
def test_what_is_suggested_fits(mesh: Mesh, world: int) -> None:
    if mesh.size == world:
        mesh.check_world(world)
        return
    with pytest.raises(ValueError, match=f"the world has {world}") as caught:
        mesh.check_world(world)
    suggestions = str(caught.value).partition("What fits: ")[2].split("; ")
    assert 1 <= len(suggestions) <= 3
    for suggestion in suggestions:
        axes, sizes = zip(*(part.split() for part in suggestion.split(" x ")), strict=True)
        assert axes == mesh.axes
        assert prod(map(int, sizes)) == world


def test_one_axis_is_changed_the_first_if_it_can_be() -> None:
    with pytest.raises(ValueError, match="What fits: dp 3 x pp 1 x cp 2 x tp 4;"):
        Mesh({"dp": 2, "pp": 1, "cp": 2, "tp": 4}).check_world(24)
    with pytest.raises(ValueError, match=r"What fits: dp 7 x cp 1 x tp 1$"):
        Mesh({"dp": 2, "cp": 2, "tp": 4}).check_world(7)
    with pytest.raises(ValueError, match="at least one rank"):
        Mesh({"dp": 2}).check_world(0)


def test_a_small_mesh_is_listed_group_by_group() -> None:
    text = """\
6 ranks: dp 2 x pp 1 x tp 3, tp fastest; 2 nodes of 4 ranks
axis   size  groups  stride  reach          with rank 0
tp        3       2       1  1 to 2 nodes   0 1 2
pp        1       6       -  within a node  0
dp        2       3       3  1 to 2 nodes   0 3
pp+dp     2       3       3  1 to 2 nodes   0 3

tp: 0 1 2 | 3 4 5
pp: 0 | 1 | 2 | 3 | 4 | 5
dp: 0 3 | 1 4 | 2 5
pp+dp: 0 3 | 1 4 | 2 5"""
    mesh = Mesh({"dp": 2, "pp": 1, "tp": 3})
    assert mesh.describe(ranks_per_node=4, joint=[("pp", "dp")]) == text
    with pytest.raises(ValueError, match="at least one rank"):
        Mesh({"dp": 2}).describe(ranks_per_node=0)


@given(meshes(), st.integers(1, 9), st.data())
@settings(max_examples=60, deadline=None)
def test_how_far_a_group_reaches(mesh: Mesh, per_node: int, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(mesh.axes), min_size=1, unique=True))
    reach = {len({rank // per_node for rank in group}) for group in mesh.groups(*axes)}
    least, most = min(reach), max(reach)
    row = mesh.describe(per_node, [axes]).splitlines()[2 + len(mesh.axes)]
    if most == 1:
        assert "within a node" in row
    elif least == most:
        assert f"  {most} nodes" in row
    else:
        assert f"  {least} to {most} nodes" in row


def test_a_large_mesh_is_summarised() -> None:
    mesh = Mesh({"dp": 96, "pp": 16, "cp": 2, "tp": 8})
    text = """\
24,576 ranks: dp 96 x pp 16 x cp 2 x tp 8, tp fastest; 3,072 nodes of 8 ranks
axis   size  groups  stride  reach          with rank 0
tp        8   3,072       1  within a node  0 1 2 3 4 5 6 7
cp        2  12,288       8  2 nodes        0 8
pp       16   1,536      16  16 nodes       0 16 32 48 64 80 96 ... 240
dp       96     256     256  96 nodes       0 256 512 768 1024 1280 1536 ... 24320
cp+dp   192     128   mixed  192 nodes      0 8 256 264 512 520 768 ... 24328"""
    assert mesh.describe(joint=[("cp", "dp")]) == text


def test_no_torch_is_needed() -> None:
    program = (
        "import sys, unisono; unisono.Mesh({'dp': 2}).describe(); assert 'torch' not in sys.modules"
    )
    assert run_python("-c", program).returncode == 0
