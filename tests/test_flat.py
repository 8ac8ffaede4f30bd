"""Dims that dims were flattened to: their blocks by brute force over coordinates, and calls beside unsharded torch."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dispatch_cases import Case, check_case, check_lies_as_told
from simulated import layouts
from torch import Tensor
from torch.nn import functional as F

import fspmd
from fspmd import (
    ArgumentError,
    Flat,
    Mesh,
    P,
    ShapeError,
    Sharded,
    SpecError,
    TensorSpec,
    VarianceError,
    communication_log,
    device_get,
    device_put,
    explain,
    make_mesh,
    reshard,
    shard_map,
)
from fspmd.transport.frame import frame_over
from fspmd.transport.local_tensor import shards_of

F64 = torch.float64
ONE = make_mesh((1,), ("x",), transport="simulation")
LINE = make_mesh((4,), ("x",), transport="simulation")
GRID = make_mesh((2, 2), ("x", "y"), transport="simulation")
WIDE = make_mesh((2, 3), ("x", "y"), transport="simulation")
MESHES = [ONE, LINE, GRID, WIDE]


def part(index: Tensor, dim: int, axes: tuple[str, ...], mesh: Mesh, at: dict[str, int]) -> Tensor:
    """The block of a rank along one dim, by torch.chunk, axis by axis."""
    for axis in axes:
        n = mesh.shape[axis]
        pieces = [*index.chunk(n, dim)] if index.shape[dim] else []
        empty = index.narrow(dim, 0, 0)
        index = [*pieces, *[empty] * n][at[axis]]
    return index


def places(mesh: Mesh, factors: tuple[tuple[int, Any], ...]) -> list[list[int]]:
    """Of each rank the indices of its block of a flattened dim."""
    found = []
    for coordinate in itertools.product(*map(range, mesh.shape.values())):
        at = dict(zip(mesh.axis_names, coordinate, strict=True))
        sizes = [n for n, _ in factors]
        index = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
        for dim, (_, entry) in enumerate(factors):
            axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
            index = part(index, dim, axes, mesh, at)
        found.append(index.flatten().tolist())
    return found


def products(mesh: Mesh) -> list[tuple[tuple[int, Any], ...]]:
    """Ways to make dims: sizes that ranks divide, others, and fewer than ranks; each axis on each factor."""
    found = []
    for sizes in ((4, 4), (3, 5), (5, 2, 3), (2, 4), (1, 6), (2, 3, 2)):
        for own in layouts(mesh, len(sizes)):
            if not own.unreduced | own.reduced:
                found.append(tuple(zip(sizes, own, strict=True)))
    return found


@pytest.mark.one_of(2)
@pytest.mark.parametrize("mesh", MESHES, ids=repr)
def test_a_block_is_that_of_all_factors_flattened(mesh: Mesh) -> None:
    known: dict[Any, TensorSpec] = {}
    again = 0
    for factors in products(mesh):
        size = torch.Size([n for n, _ in factors]).numel()
        whole = torch.arange(size * 2).reshape(size, 2)
        x = device_put(whole, P(Flat(*factors)), mesh=mesh)
        wanted = places(mesh, factors)
        check_lies_as_told(x)
        for block, rows in zip(shards_of(x.local, frame_over(mesh, mesh.axis_names)), wanted, strict=True):
            assert block.tolist() == whole[rows].tolist(), factors
        assert (device_get(x) == whole).all()
        key = size, str(wanted)
        again += x.spec.flat and known.setdefault(key, x.spec) is not x.spec
        ordinary = {str(places(mesh, ((size, entry),))) for (entry,) in map(tuple, layouts(mesh, 1))}
        assert isinstance(x.spec.partition[0], Flat) is (key[1] not in ordinary), factors
        assert pickle.loads(pickle.dumps(x.spec)) is x.spec
    assert again * 20 <= len(products(mesh))  # equal layouts are one, but for few


def test_it_prints_and_is_interned() -> None:
    x = device_put(torch.zeros(8, 8, 8), P(None, "x"), mesh=LINE)
    assert repr(x.flatten(0, 1)) == "Sharded f32[(8·8@x), 8] on mesh(x=4)"
    assert repr(P(Flat((8, None), (8, ["x"])))) == "P(Flat((8, None), (8, 'x')))"
    assert Flat((8, None), (8, "x")) is Flat((8, ()), (8, ("x",)))
    assert x.view(8, 4, 2, 8).flatten(0, 2).spec is x.flatten(0, 1).spec
    assert device_put(torch.zeros(64), P(Flat((8, "x"), (8, None))), mesh=LINE).spec.partition == P("x")


def test_what_is_no_layout() -> None:
    with pytest.raises(SpecError, match=r"a dim of 60 cannot lie as Flat\(\(8, None\), \(8, 'x'\)\).* multiply to 64"):
        device_put(torch.zeros(60), P(Flat((8, None), (8, "x"))), mesh=LINE)
    with pytest.raises(SpecError, match=r"Flat got .*; give it the size and the entry of each dim"):
        Flat(8, "x")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="names the axis 'x' more than once"):
        P(Flat((8, "x"), (8, "x")))
    x = device_put(torch.zeros(8, 8), P(None, "x"), mesh=LINE).flatten()
    with pytest.raises(SpecError, match=r"consecutive blocks are needed.*lies as Flat\(.*x = reshard\(x"):
        x.spec.offset((0,))


@pytest.mark.one_of(2)
@pytest.mark.parametrize("mesh", MESHES, ids=repr)
def test_to_any_layout_and_back(mesh: Mesh) -> None:
    """Values, and gradients, which come back in the layout of the leaf."""
    whole = torch.arange(60.0, dtype=F64).reshape(30, 2).sin()
    weight = torch.arange(60.0, dtype=F64).reshape(30, 2).cos()
    flats = [factors for factors in products(mesh) if torch.Size([n for n, _ in factors]).numel() == 30]
    others = [*layouts(mesh, 2), *(P(Flat((3, axis), (10, None))) for axis in mesh.axis_names)]
    for i, factors in enumerate(flats):
        x = device_put(whole, P(Flat(*factors)), mesh=mesh).requires_grad_()
        for spec in others[i % 7 :: 7]:
            y = reshard(x, spec)
            check_lies_as_told(y)
            torch.testing.assert_close(device_get(y), whole)
            torch.testing.assert_close(device_get(reshard(y, x.spec.partition)), whole)
            x.grad = None
            (device_get(y) * weight).sum().backward()
            assert x.grad.spec is x.spec.dual
            torch.testing.assert_close(device_get(x.grad), weight)


def flat(x: Any) -> Any:
    return x.flatten(0, 1)


CASES: dict[str, Case] = {
    "flatten": (flat, ((4, 5, 3),)),
    "there and back": (lambda x: flat(x).view(4, 6, 3), ((4, 6, 3),)),
    "all of it": (lambda x: x.ravel() * 2, ((4, 5, 3),)),
    "split elsewhere": (lambda x: x.reshape(2, 12, 4), ((4, 6, 4),)),
    "split again": (lambda x: flat(x).view(8, 4, 3).transpose(0, 1).reshape(2, 16, 3), ((4, 8, 3),)),
    "functions of elements": (lambda x, y: flat(x).tanh() * flat(y) + flat(x), ((4, 5, 3), (4, 5, 3))),
    "beside an ordinary operand": (lambda x, y: flat(x) * y - y, ((4, 5, 3), (20, 3))),
    "with other factors": (lambda x, y: flat(x) * flat(y), ((4, 6, 2), (8, 3, 2))),
    "with other factors that cut": (lambda x, y: flat(x) * flat(y), ((4, 6, 2), (3, 8, 2))),
    "a row": (lambda x, b: flat(x) + b, ((4, 5, 3), (3,))),
    "linear": (lambda x, w, b: F.linear(flat(x), w, b), ((2, 6, 4), (3, 4), (3,))),
    "matmul of both": (lambda x, y: flat(x).T @ flat(y), ((2, 6, 2), (2, 6, 2))),
    "sum of the dim": (lambda x: flat(x).sum(0), ((4, 5, 3),)),
    "mean": (lambda x: flat(x).square().mean(), ((4, 5, 3),)),
    "softmax beside it": (lambda x: flat(x).softmax(-1), ((2, 6, 4),)),
    "softmax along it": (lambda x: flat(x).softmax(0), ((2, 6, 4),)),
    "layer norm": (lambda x: F.layer_norm(flat(x), (4,)), ((2, 6, 4),)),
    "cumsum along it": (lambda x: flat(x).cumsum(0), ((2, 6, 2),)),
    "sort along it": (lambda x: flat(x).sort(0).values, ((2, 6, 2),)),
    "cross entropy": (lambda x: F.cross_entropy(flat(x), torch.arange(12) % 4), ((2, 6, 4),)),
    "embedding": (lambda w, x: F.embedding((flat(x) > 0).long(), w) * flat(x)[:, None], ((5, 3), (2, 6))),
    "cat along another": (lambda x, y: torch.cat([flat(x), flat(y)], -1), ((2, 6, 2), (2, 6, 3))),
    "cat along it": (lambda x, y: torch.cat([flat(x), y]), ((2, 6, 2), (5, 2))),
    "slice of another": (lambda x: flat(x)[:, 1:], ((2, 6, 4),)),
    "slice of it": (lambda x: flat(x)[3:9], ((2, 6, 4),)),
    "select": (lambda x: flat(x)[:, 0] + flat(x)[5, 0], ((2, 6, 4),)),
    "transpose and expand": (lambda x: flat(x).T.unsqueeze(1).expand(-1, 2, -1), ((2, 6, 3),)),
    "amax": (lambda x: flat(x).amax(0) + flat(x).amax(1).sum(), ((2, 6, 3),)),
    "where": (lambda x, y: torch.where(flat(x) > 0, flat(y), flat(x)), ((2, 6, 2), (2, 6, 2))),
    "a write": (lambda x, y: (flat(x) * 1).add_(y), ((2, 6, 2), (12, 2))),
    "a write of one": (lambda x, y: (x * 1).mul_(flat(y)), ((12, 2), (2, 6, 2))),
    "einsum": (lambda x, y: torch.einsum("ij,ik->jk", flat(x), y), ((2, 6, 2), (12, 3))),
    "attention": (
        lambda x: F.scaled_dot_product_attention(flat(x), flat(x) * 2, flat(x) + 1, is_causal=True),
        ((2, 3, 4, 2),),
    ),
    "like it": (lambda x: torch.zeros_like(flat(x)) + flat(x) * torch.ones_like(flat(x)), ((4, 5, 3),)),
    "to a dtype": (lambda x: flat(x).float().contiguous().clone().double(), ((4, 5, 3),)),
    "pieces": (lambda x: (*flat(x).split(5), *flat(x).chunk(2), *flat(x).split([10, 10], dim=-2)), ((4, 5, 3),)),
    "pieces of a part": (
        lambda x: torch.split(x.reshape(12, 4), 4)[1] * x.reshape(3, 16).chunk(3)[2].view(4, 4),
        ((6, 2, 4),),
    ),
    "chunk and stack": (lambda x: torch.stack(flat(x).chunk(3, 1), 0), ((4, 5, 3),)),
    "roll": (lambda x: flat(x).roll(1, 0) + flat(x).roll(2), ((2, 6, 2),)),
    "two flat dims": (lambda x: x.reshape(6, 8) @ x.reshape(6, 8).T, ((2, 3, 2, 4),)),
    "flip and var": (lambda x: flat(x).flip(1).var(0, correction=0), ((2, 6, 2),)),
    "kron": (torch.kron, ((2, 3), (3, 2))),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), ((3, 4),)),
    "conv": (lambda x, w: F.conv1d(flat(x), w, padding=1), ((2, 2, 3, 5), (2, 3, 3))),
    "gather": (lambda x: flat(x).gather(1, torch.tensor([[1], [0]] * 6)), ((2, 6, 2),)),
    "index_add": (lambda x: flat(x).index_add(0, torch.tensor([0, 11]), torch.ones(2, 2, dtype=F64)), ((2, 6, 2),)),
    "pad": (lambda x: F.pad(flat(x), (1, 0)) @ torch.ones(3, 2, dtype=F64), ((2, 6, 2),)),
    "diagonal": (lambda x: flat(x).diagonal(), ((2, 6, 2),)),
    "unfold": (lambda x: flat(x).unfold(1, 2, 1), ((2, 6, 3),)),
}


@pytest.mark.one_of(8)
@pytest.mark.parametrize("mesh", [LINE, GRID, WIDE], ids=repr)
@pytest.mark.parametrize("name", CASES)
def test_calls_on_flattened_dims(name: str, mesh: Mesh) -> None:
    check_case(name, CASES[name], mesh, 6)


FREE: dict[str, Callable[..., Any]] = {
    "there and back": lambda x, w: flat(x).view(4, 6, 8),
    "linear": lambda x, w: F.linear(flat(x), w),
    "a loss": lambda x, w: (flat(x).tanh() * flat(x) @ w.T).view(4, 6, 3),
    "flattened further": lambda x, w: (x.ravel() * 2).view(24, 8),
    "split in another place": lambda x, w: flat(x).view(12, 2, 8).transpose(0, 1),
    "norms": lambda x, w: F.layer_norm(flat(x), (8,)).softmax(-1),
    "joined": lambda x, w: torch.cat([flat(x), flat(x)], 1).T,
    "dropout": lambda x, w: F.dropout(flat(x), 0.5),
}


@pytest.mark.parametrize("name", FREE)
def test_nothing_moves(name: str) -> None:
    """Forward, backward and in gradients of gradients; gradients lie as the leaf."""
    for mesh, spec in ((make_mesh((3,), ("x",)), P(None, "x")), (LINE, P(None, "x")), (WIDE, P("x", "y"))):
        torch.manual_seed(0)
        x = device_put(torch.randn(4, 6, 8, dtype=F64), spec, mesh=mesh).requires_grad_()
        w = device_put(torch.randn(3, 8, dtype=F64), P(), mesh=mesh)
        with communication_log() as log:
            out = FREE[name](x, w)
            cotangent = Sharded(out.local.detach() * 0.5, out.spec)
            (first,) = torch.autograd.grad(out, x, cotangent, create_graph=True)
            if first.requires_grad:
                (second,) = torch.autograd.grad(first, x, first.detach())
                assert second.spec is x.spec
        assert (log.events if hasattr(log, "events") else list(log)) == [], log
        assert first.spec is x.spec


def test_pieces_between_which_no_block_lies_are_views() -> None:
    """Queries, keys and values of one product, each cut."""
    w = device_put(torch.randn(3, 8, 4, dtype=F64), P(None, "x"), mesh=LINE).flatten(0, 1)
    x = torch.randn(5, 4, dtype=F64)
    with communication_log() as log:
        pieces = F.linear(x, w).chunk(3, dim=-1)
        assert [one.spec.partition for one in pieces] == [P(None, "x")] * 3
        pieces[1].mul_(2)
        for parts in (w.split(8), w.split([8, 8, 8]), torch.split(w, 8), w.chunk(3)):
            assert [one.spec.partition for one in parts] == [P("x", None)] * 3
    assert not list(log)
    for one, want in zip(pieces, (x @ device_get(w).T).chunk(3, dim=-1), strict=True):
        torch.testing.assert_close(device_get(one), want * (2 if one is pieces[1] else 1))
    assert [len(w.split(torch.tensor(size))) for size in (8, 12)] == [3, 2]
    for sizes in ([8, 8], [8] * 4, -8):
        with pytest.raises(ArgumentError, match="fails on the global tensors: split"):
            w.split(sizes)


def test_a_mean_loss_only_waits_for_its_sum() -> None:
    x = device_put(torch.ones(4, 8, 8, dtype=F64), P(None, "x"), mesh=LINE).requires_grad_()
    with communication_log() as log:
        loss = flat(x).square().mean()
        loss.backward()
    assert str(log) == "nothing is communicated"
    assert (loss.spec.partition, x.grad.spec) == (P(unreduced={"x"}), x.spec)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("mesh", MESHES, ids=repr)
def test_random_numbers_are_those_of_any_layout(mesh: Mesh) -> None:
    for factors in products(mesh)[::3]:
        size = torch.Size([n for n, _ in factors]).numel()
        x = device_put(torch.ones(size, 3), P(Flat(*factors)), mesh=mesh)
        whole = device_put(torch.ones(size, 3), P(), mesh=mesh)
        for draw in (torch.rand_like, F.dropout, torch.poisson, lambda x: (x * 1).normal_(), torch.bernoulli):
            torch.manual_seed(3)
            want = device_get(draw(whole))
            torch.manual_seed(3)
            assert (device_get(draw(x)) == want).all()
        made = fspmd.arange(size, spec=P(Flat(*factors)), mesh=mesh)
        assert device_get(made).tolist() == [*range(size)]


def test_a_write_into_a_flat_view_is_a_write() -> None:
    x = device_put(torch.zeros(4, 6), P(None, "x"), mesh=LINE)
    flat(x).add_(1)
    x.view(-1).mul_(2)
    assert (device_get(x) == 2).all()


def test_a_write_into_what_no_block_can_be_viewed_as_is_refused() -> None:
    x = reshard(device_put(torch.zeros(4, 6), P(), mesh=LINE), P(None, "x"))  # blocks are columns of it
    y = flat(x)
    with pytest.raises(VarianceError, match="writes into a copy"):
        y.add_(1)
    with pytest.raises(VarianceError, match="would not see the write"):
        x.add_(1)
    del y
    assert (device_get(flat(x.add_(1))) == 1).all()


@pytest.mark.parametrize("columns", [4, 5, 6])
def test_blocks_of_one_element_or_none_are_written_as_others_are(columns: int) -> None:
    """Their strides would do for a view on some ranks alone."""
    whole = torch.arange(4.0 * columns).view(4, columns)
    x = device_put(whole, P(None, "x"), mesh=LINE)
    flat(x).add_(1)
    assert torch.equal(device_get(x), whole + 1)
    y = reshard(device_put(whole, P(), mesh=LINE), P(None, "x"))
    if columns == 4:  # one of each rank, which is a view on all
        flat(y).add_(1)
        whole += 1
    else:
        with pytest.raises(VarianceError, match="writes into a copy"):
            flat(y).add_(1)
    assert torch.equal(device_get(y), whole)


def test_a_reshape_that_copies_copies_blocks_of_one_row_too() -> None:
    x = device_put(torch.zeros(4, 6), P("x"), mesh=LINE)
    assert (device_get(x[:, :3].flatten().add_(1)) == 1).all()
    assert (device_get(x) == 0).all()
    x.view(-1).add_(1)
    assert (device_get(x[:, :3].flatten() + 0) == 1).all()
    assert (device_get(x) == 1).all()


@pytest.mark.parametrize("columns", [6, 8])
@pytest.mark.parametrize("checked", [True, False])
def test_blocks_go_into_a_body_and_out_of_it(columns: int, checked: bool) -> None:
    whole = torch.arange(4.0 * columns, dtype=F64)
    for mesh, spec in ((LINE, P(None, "x")), (WIDE, P("x", "y"))):
        x = device_put(whole.view(4, columns), spec, mesh=mesh).flatten().detach().requires_grad_()
        lies = x.spec.partition
        double = shard_map(lambda x: x * 2, mesh=mesh, in_specs=lies, out_specs=lies, check_vma=checked)
        y = double(x)
        check_lies_as_told(y)
        assert (y.spec, device_get(y).tolist()) == (x.spec, (whole * 2).tolist())
        assert device_get(double(whole)).tolist() == (whole * 2).tolist()
        (y * y).sum().backward()
        assert device_get(x.grad).tolist() == (whole * 8).tolist()
        with pytest.raises(ShapeError, match=r"a block of shape .* but torch.chunk of the whole"):
            shard_map(lambda x: torch.cat([x, x]), mesh=mesh, in_specs=lies, out_specs=lies)(x)


def test_vmap_over_it_is_refused() -> None:
    x = device_put(torch.zeros(4, 6), P(None, "x"), mesh=LINE).flatten()
    with pytest.raises(ShapeError, match=r"sharded over Flat\(\(4, None\), \(6, 'x'\)\); gather it first"):
        fspmd.vmap(torch.sin)(x)


@pytest.mark.parametrize("rows", [8, 5])
def test_a_recorded_program_has_flat_dims(rows: int) -> None:
    x = device_put(torch.randn(4, rows, 3), P(None, "x"), mesh=LINE)

    def loss(x: Any) -> Any:
        return (flat(x).tanh().cumsum(0) * flat(x)).view(4, rows, 3).square().mean()

    recorded = fspmd.jit(fspmd.grad(loss))
    for _ in range(2):
        found = recorded(x)
        assert found.spec is x.spec
        torch.testing.assert_close(device_get(found), device_get(fspmd.grad(loss)(x)))


def test_a_gather_of_a_flat_dim_explains_itself() -> None:
    x = device_put(torch.zeros(8, 8), P(None, "x"), mesh=LINE).flatten()
    assert str(explain(x, P())).splitlines()[:3] == [
        "f32[(8·8@x)] -> f32[64] on mesh(x=4)",
        "  1. view -> f32[8, 8@x]: nothing moves",
        "  2. all_gather_invariant over 'x' -> f32[8, 8]: 192 B, 13 µs, holds 320 B",
    ]
