"""What `print`, `format` and notebooks show of a `Sharded`, and pictures of who holds which part."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from processes import Processes

from fspmd import (
    ArgumentError,
    Flat,
    P,
    Sharded,
    TensorSpec,
    communication_log,
    device_get,
    device_put,
    grad,
    jit,
    make_mesh,
    shard_map,
    visualize_sharding,
)

LINE = make_mesh((4,), ("x",), transport="simulation")
GRID = make_mesh((2, 3), ("x", "y"), transport="simulation")
LAYOUTS = [
    *[(LINE, spec) for spec in (P(), P("x"), P(None, "x"), P(unreduced={"x"}), P(reduced={"x"}))],
    *[(GRID, spec) for spec in (P(("y", "x")), P("y", "x"), P("x", unreduced={"y"}), P("y", reduced={"x"}))],
]


@pytest.mark.parametrize(("mesh", "spec"), LAYOUTS)
@pytest.mark.parametrize("shape", [(5, 3), (0, 3), (40, 30)])
def test_a_simulation_prints_the_whole_below_the_layout(mesh: Any, spec: P, shape: tuple[int, ...]) -> None:
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    x = device_put(whole, spec, mesh=mesh).requires_grad_()
    with communication_log() as log:
        assert str(x) == f"{x}" == f"{x!r}\n{whole}"
    assert not len(log)
    assert str({"w": x}) == f"{{'w': {x!r}}}"
    assert "\n" not in repr(x)


def test_flattened_dims_too() -> None:
    whole = torch.arange(24).view(4, 6)
    flat = device_put(whole, P(None, "x"), mesh=LINE).flatten()
    assert flat.spec.flat
    assert str(flat) == f"{flat!r}\n{whole.flatten()}"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(2.5, "2.5000"), (3.0, "3.0"), (1e-7, "1.0000e-07"), (-4, "-4"), (True, "True"), (1 + 2j, "1.+2.j")],
)
@pytest.mark.parametrize("spec", [P(), P(reduced={"x"})])
def test_a_scalar_that_all_ranks_have_is_its_number(value: complex, shown: str, spec: P) -> None:
    x = device_put(torch.tensor(value), spec, mesh=LINE)
    assert str(x) == shown
    assert f"{x}" == f"{torch.tensor(value)}"
    assert repr(x).startswith("Sharded ")


def test_a_pending_scalar_is_told_and_formatted_when_asked() -> None:
    x = device_put(torch.ones(8), P("x"), mesh=LINE).sum()
    assert str(x) == f"{x}" == "Sharded f32[]{U:x} on mesh(x=4)\ntensor(8.)"
    assert f"{x:.3f}" == "8.000"
    with pytest.raises(ArgumentError, match=r"takes a scalar"):
        format(device_put(torch.ones(8), P("x"), mesh=LINE), ".3f")


def test_where_values_are_not_there_the_layout_is_shown() -> None:
    shown: list[str] = []
    x = device_put(torch.ones(8), P("x"), mesh=LINE)

    def told(x: Sharded) -> Sharded:
        shown.extend([str(x), f"{x.sum()}", x._repr_html_()])
        return (x * x).sum()

    jit(told)(x)
    shard_map(lambda _: (shown.append(str(x)), _)[1], mesh=LINE, in_specs=P(), out_specs=P())(torch.ones(1))
    assert [line.split("<")[0] for line in shown] == [repr(x), repr(x.sum()), "", repr(x)]
    grad(told)(x)  # on plain autograd values are there
    assert shown[4] == f"{x!r}\n{device_get(x)}"


def test_notebooks_get_a_picture_and_the_values() -> None:
    text = device_put(torch.arange(8), P("x"), mesh=LINE)._repr_html_()
    assert re.findall(r"<td[^>]*>(\d)</td>", text) == ["0", "1", "2", "3"]
    assert len(set(re.findall(r"background:(#\w+)", text))) == 4
    assert "<pre>tensor([0, 1, 2, 3, 4, 5, 6, 7])</pre>" in text
    assert text.count("<div>") == text.count("</div>")


# --- pictures -------------------------------------------------------------------------------------------------------

PICTURES = {
    "rows": (
        TensorSpec(GRID, P("x"), (4, 3), torch.float32),
        """
        f32[4@x, 3] on mesh(x=2, y=3)
                 ┌─────┐
        [0:2, :] │ 0-2 │
                 ├─────┤
        [2:4, :] │ 3-5 │
                 └─────┘
        """,
    ),
    "uneven and pending": (
        TensorSpec(make_mesh((4, 2), ("x", "y"), transport="abstract"), P("x", unreduced={"y"}), (5,), torch.int64),
        """
        i64[5@x]{U:y} on mesh(x=4, y=2)
           [0:2]   [2:4]   [4:5]
         ┌───────┬───────┬───────┐
         │ 0 + 1 │ 2 + 3 │ 4 + 5 │
         └───────┴───────┴───────┘
        no part of it: 6, 7
        """,
    ),
    "a scalar": (
        TensorSpec(GRID, P(), (), torch.bool),
        """
        bool[] on mesh(x=2, y=3)
         ┌─────┐
         │ 0-5 │
         └─────┘
        """,
    ),
    "a dim of dims": (
        TensorSpec(LINE, P(Flat((2, None), (4, "x"))), (8,), torch.float32),
        """
        f32[(2·4@x)] on mesh(x=4)
           [:, 0:1]   [:, 1:2]   [:, 2:3]   [:, 3:4]
         ┌──────────┬──────────┬──────────┬──────────┐
         │    0     │    1     │    2     │    3     │
         └──────────┴──────────┴──────────┴──────────┘
        """,
    ),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name: str) -> None:
    spec, expected = PICTURES[name]
    lines = [line.removeprefix(" " * 8) for line in expected.strip("\n").rstrip().splitlines()]
    assert repr(visualize_sharding(spec)).splitlines() == lines


def test_large_meshes_are_abbreviated() -> None:
    mesh = make_mesh((64, 32), ("a", "b"), transport="abstract")
    picture = visualize_sharding(TensorSpec(mesh, P("a", "b"), (64, 64), torch.float32))
    assert len(repr(picture).splitlines()) == 2 * 17 + 3
    assert picture.html.count("<td") == 17 * 17
    with pytest.raises(ArgumentError, match="visualize_sharding got a tensor of shape"):
        visualize_sharding(torch.ones(2))  # type: ignore[arg-type]


# --- processes ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    with Processes(4) as pool:
        yield pool


def _printed() -> list[str]:
    mesh = make_mesh((2, 2), ("x", "y"), device="cpu")
    whole = torch.arange(6.0)
    specs = [P(), P("x"), P("x", unreduced={"y"})]
    return [*(str(device_put(whole, spec, mesh=mesh)) for spec in specs), str(device_put(whole[1], P(), mesh=mesh))]


def test_a_process_prints_its_block(four: Processes) -> None:
    for rank, (whole, block, term, number) in enumerate(four.run(_printed)):
        mine = torch.arange(6.0).split(3)[rank // 2]
        assert whole == f"Sharded f32[6] on mesh(x=2, y=2)\n{torch.arange(6.0)}"
        assert block == f"Sharded f32[6@x] on mesh(x=2, y=2), rank {rank}'s block:\n{mine}"
        first, values = term.split("\n")
        assert first == "Sharded f32[6@x]{U:y} on mesh(x=2, y=2), its term of the sum over 'y':"
        assert values in (str(mine), str(mine * 0), str(mine * -0.0))
        assert number == "1.0"
