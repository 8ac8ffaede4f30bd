"""ragged_all_to_all in a simulation: against a loop over ranks, slices and rows; types, transforms and mistakes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from collective_cases import same
from ragged_cases import Ragged, expected_ragged, run_ragged, some_ragged
from torch import Tensor

import fspmd
from fspmd import (
    ArgumentError,
    Mesh,
    P,
    ShapeError,
    VarianceError,
    all_to_all,
    axis_index,
    device_get,
    make_mesh,
    pcast,
    psum,
    ragged_all_to_all,
    shard_map,
    typeof,
)


@pytest.fixture
def mesh() -> Mesh:
    return make_mesh((2,), ("x",), transport="simulation", device="cpu")


@pytest.mark.one_of(4)
@pytest.mark.parametrize("case", some_ragged(150), ids=str)
def test_values_and_gradients_are_those_of_the_loop(case: Ragged) -> None:
    found, judged = run_ragged(case, "simulation"), expected_ragged(case)
    assert found is not None
    for i, (ours, theirs) in enumerate(zip(found, judged, strict=True)):
        for a, b in zip(ours, theirs, strict=True):
            assert same(a, b, bits=i == 0), ("result", "operand", "output", "cotangent")[i]


#: on two ranks: rank 0 keeps one row and sends two, rank 1 sends one and keeps one
NUMBERS = ([0, 1, 0, 1], [1, 2, 1, 1], [0, 0, 1, 2], [1, 1, 2, 1])


def exchange(
    mesh: Mesh, operand: Tensor, numbers: Any = NUMBERS, rows: int = 4, **options: Any
) -> Callable[[Tensor], Tensor]:
    """The global result for the blocks of ``operand``, into zeros."""

    def body(x: Tensor, *numbers: Tensor) -> Tensor:
        return ragged_all_to_all(x, x.new_zeros(rows, *x.shape[1:]), *numbers, axis_name="x", **options)

    run = shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    return device_get(run(operand, *map(torch.tensor, numbers)))


def test_rows_go_where_the_sender_says(mesh: Mesh) -> None:
    assert exchange(mesh, torch.tensor([1, 2, 2, 3, 4, 0])).tolist() == [1, 3, 0, 0, 2, 2, 4, 0]


def test_the_result_varies_and_an_invariant_operand_gets_the_sum_of_gradients(mesh: Mesh) -> None:
    seen = []

    def body(out: Tensor, *numbers: Tensor) -> Tensor:
        x = torch.arange(3.0, requires_grad=True)
        y = ragged_all_to_all(x, out, *numbers, axis_name="x")
        (g,) = torch.autograd.grad(y.sum(), x)
        seen.extend([typeof(y), typeof(g)])
        return g

    run = shard_map(body, mesh=mesh, in_specs=(P(), *[P("x")] * 4), out_specs=P())
    gradient = device_get(run(torch.zeros(4), *map(torch.tensor, NUMBERS)))
    assert [repr(t) for t in seen] == ["f32[4]{V:x}", "f32[3]"]
    assert gradient.tolist() == [2.0, 2.0, 1.0]  # rows sent by either rank


def test_over_one_axis_of_two_other_axes_are_kept() -> None:
    mesh = make_mesh((2, 2), ("x", "y"), transport="simulation", device="cpu")

    def body(x: Tensor, numbers: Tensor) -> Tensor:
        y = ragged_all_to_all(x, torch.zeros(4), *numbers.unbind(1), axis_name="x")
        assert repr(typeof(y)) == "f32[4]{V:x,y}"
        return psum(y, "x")

    numbers = torch.tensor(NUMBERS).view(4, 2, 2).movedim(0, 2).reshape(4, 4)
    run = shard_map(body, mesh=mesh, in_specs=(P(("y", "x")), P("x")), out_specs=P("y"))
    x = torch.arange(1.0, 13.0)
    parts = [[x[0], x[3], 0, 0], [x[1], x[2], x[4], 0], [x[6], x[9], 0, 0], [x[7], x[8], x[10], 0]]
    one, two, three, four = (torch.tensor(part) for part in parts)
    assert device_get(run(x, numbers)).tolist() == torch.cat([one + two, three + four]).tolist()


def test_transforms_go_through(mesh: Mesh) -> None:
    tree = [torch.tensor(n) for n in NUMBERS]

    def body(x: Tensor, *numbers: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        def send(v: Tensor) -> Tensor:
            return ragged_all_to_all(v, v.new_zeros(4), *numbers, axis_name="x")

        batch = torch.stack([x, 2 * x, -x], 1)
        mapped = fspmd.vmap(send, in_dims=1, out_dims=1)(batch)
        twice = torch.func.vmap(torch.func.vmap(send))(batch.T[None])[0].T
        _, tangent = torch.func.jvp(send, (x,), (x * x,))
        gradient = torch.func.grad(lambda v: (send(v) ** 3).sum())(x)
        return mapped, twice, tangent, gradient

    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    run = shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    mapped, twice, tangent, gradient = device_get(run(x, *tree))
    for i, factor in enumerate((1, 2, -1)):
        assert torch.equal(mapped[:, i], exchange(mesh, factor * x))
    assert torch.equal(twice, mapped)
    assert torch.equal(tangent, exchange(mesh, x * x))
    assert torch.equal(gradient, 3 * x**2 * torch.tensor([1.0, 1, 1, 1, 1, 0]))  # the last row is not sent


def test_a_handle_gives_the_same(mesh: Mesh) -> None:
    def body(x: Tensor, *numbers: Tensor) -> Tensor:
        handle = ragged_all_to_all(x, torch.zeros(4), *numbers, axis_name="x", wait=False)
        y = x * 2
        return handle.wait() + 0 * y.sum()

    run = shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    x = torch.arange(1.0, 7.0)
    assert torch.equal(device_get(run(x, *map(torch.tensor, NUMBERS))), exchange(mesh, x))


def test_without_types_it_is_the_same(mesh: Mesh) -> None:
    def body(x: Tensor, *numbers: Tensor) -> Tensor:
        return ragged_all_to_all(x, torch.zeros(4), *numbers, axis_name="x")

    run = shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    x = torch.arange(1.0, 7.0)
    assert torch.equal(device_get(run(x, *map(torch.tensor, NUMBERS))), exchange(mesh, x))


def test_the_tokens_of_experts_come_back() -> None:
    """A round trip of uneven lots, as a mixture of experts makes."""
    mesh = make_mesh((4,), ("x",), transport="simulation", device="cpu")
    lots = torch.randint(0, 4, (16,), generator=torch.Generator().manual_seed(3))

    def body(x: Tensor, sizes: Tensor) -> Tensor:
        starts = sizes.cumsum(0) - sizes
        arriving = all_to_all(sizes, "x", 0, 0, tiled=True)
        places = all_to_all(arriving.cumsum(0) - arriving, "x", 0, 0, tiled=True)
        there = ragged_all_to_all(x, x.new_zeros(64, 2), starts, sizes, places, arriving, axis_name="x")
        home = all_to_all(starts, "x", 0, 0, tiled=True)
        back = arriving.cumsum(0) - arriving
        done = there * (axis_index("x") + 1)
        return ragged_all_to_all(done, torch.zeros_like(x), back, arriving, home, sizes, axis_name="x")

    x = torch.rand(64, 2)
    found = device_get(shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x, lots))
    for rank in range(4):
        block, row = x[16 * rank : 16 * rank + 16], 0
        expected = torch.zeros_like(block)
        for expert, size in enumerate(lots[4 * rank : 4 * rank + 4].tolist()):
            expected[row : row + size] = block[row : row + size] * (expert + 1)
            row += size
        assert torch.equal(found[16 * rank : 16 * rank + 16], expected)


# --- mistakes -------------------------------------------------------------------------------------------------------


def changed(which: int, place: int, value: int) -> list[list[int]]:
    """NUMBERS with one number changed."""
    numbers = [list(row) for row in NUMBERS]
    numbers[which][place] = value
    return numbers


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        (
            changed(0, 3, 3),
            "on rank 1 at x=1 slice 1, 1 rows from input_offsets[1]=3, is outside of operand's 3 rows",
        ),
        (
            changed(0, 0, -1),
            "on rank 0 at x=0 slice 0, 1 rows from input_offsets[0]=-1, is outside of operand's 3 rows",
        ),
        (changed(3, 2, 1), "on rank 1 at x=1 recv_sizes[0] is 1, but the slice that arrives there has 2 rows"),
        (
            changed(2, 1, 3),
            "on rank 1 at x=1 slice 0 to arrive, 2 rows to be put at 3, is outside of output's 4 rows",
        ),
    ],
)
def test_slices_must_fit(mesh: Mesh, numbers: Any, text: str) -> None:
    with pytest.raises(ShapeError, match=re.escape(text)):
        exchange(mesh, torch.arange(6.0), numbers)


def test_arguments_must_fit(mesh: Mesh) -> None:
    numbers = [torch.tensor(n) for n in NUMBERS]

    def refused(kind: type[Exception], text: str, change: Callable[[list[Tensor]], list[Any]], **options: Any) -> None:
        def body(x: Tensor, *numbers: Tensor) -> Tensor:
            return ragged_all_to_all(*change([x, torch.zeros(4), *numbers]), **{"axis_name": "x", **options})

        with pytest.raises(kind, match=re.escape(text)):
            shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(torch.arange(6.0), *numbers)

    refused(ArgumentError, "got the list [0, 0] for output", lambda a: [a[0], [0, 0], *a[2:]])
    refused(ArgumentError, "got send_sizes, f32[2]{V:x}; pass integers", lambda a: [*a[:3], a[3].float(), *a[4:]])
    refused(ArgumentError, "pass two of one dtype", lambda a: [a[0], a[1].double(), *a[2:]])
    refused(ShapeError, "only their leading dims", lambda a: [a[0][:, None], *a[1:]])
    refused(
        ShapeError, "pass four 1-d tensors of one length, a multiple of 2", lambda a: [*a[:2], *(n[:1] for n in a[2:])]
    )
    refused(ShapeError, "recv_sizes of shape (1,)", lambda a: [*a[:5], a[5][:1]])
    refused(fspmd.AxisError, "'z'", lambda a: a, axis_name="z")
    refused(ShapeError, "axis_index_groups", lambda a: a, axis_index_groups=[[0]])
    refused(VarianceError, "it is unreduced over 'x'", lambda a: [pcast(a[0], "x", to="unreduced"), *a[1:]])


def test_offsets_are_not_batched(mesh: Mesh) -> None:
    def body(x: Tensor, *numbers: Tensor) -> Tensor:
        return fspmd.vmap(lambda n: ragged_all_to_all(x, torch.zeros(4), n, *numbers[1:], axis_name="x"))(
            torch.stack([numbers[0]] * 2)
        )

    with pytest.raises(ArgumentError, match="a batch of input_offsets"):
        shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P(None, "x"))(
            torch.arange(6.0), *map(torch.tensor, NUMBERS)
        )
