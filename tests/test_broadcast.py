"""`broadcast` and `scatter`: one rank's values, and refusals on all ranks alike; padding to even blocks and back."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from full import FULL
from processes import Processes

from fspmd import (
    ArgumentError,
    FspmdError,
    Mesh,
    MeshError,
    P,
    ShapeError,
    SpecError,
    broadcast,
    device_get,
    device_put,
    make_mesh,
    pad_to_blocks,
    scatter,
    unpad,
)

MESH = make_mesh((4,), ("x",), transport="simulation")


ORDER = (0, 2, 1, 3)
DTYPES = (torch.bool, torch.float16, torch.bfloat16, torch.complex64, torch.int16, torch.float64)


def _grid() -> tuple[Mesh, int]:
    """A mesh whose ranks are not in order, and this process's rank."""
    mesh = make_mesh((2, 2), ("x", "y"), ranks=ORDER)
    (rank,) = [r for r in range(4) if mesh.coordinate(r) == mesh.coordinate()]
    return mesh, rank


def _tree(rank: int) -> Any:
    return {"w": torch.full((2, 3), float(rank)), "b": [torch.tensor(rank), torch.tensor([rank > 2])]}


def _given(case: str, rank: int) -> tuple[Any, Any, int]:
    """What a rank passes as tree, specs and src, wrong on one of them."""
    tree, specs, src = _tree(rank), {"w": P("x"), "b": P()}, 2
    if case == "shape" and rank == 1:
        tree["w"] = torch.zeros(3, 2)
    if case == "dtype" and rank == 3:
        tree["b"][0] = torch.tensor(1.0)
    if case == "structure" and rank == 0:
        tree["b"] = tree["b"][0]
    if case == "source" and rank == 3:
        src = 1
    if case == "outside" and rank == 1:
        src = 7
    if case == "spec" and rank == 1:
        specs["w"] = P(None, "x")
    if case == "specs" and rank == 3:
        specs = {"w": P("x")}
    if case == "same" and rank != 2:  # other ways to say the same
        tree, specs = (None, {"w": P("x", None), "b": [P(), P(())]}) if rank else (tree, specs)
    if case == "nothing" and rank == 2:
        tree = None
    return tree, specs, src


def _told(case: str, name: str) -> Any:
    mesh, rank = _grid()
    tree, specs, src = _given(case, rank)
    try:
        if name == "broadcast":
            return broadcast(tree, src=src, mesh=mesh)
        return device_get((scatter if name == "scatter" else device_put)(tree, specs, src=src, mesh=mesh))
    except FspmdError as error:
        return f"{type(error).__name__}: {error}"


BOTH = {
    "shape": "ShapeError: {}: rank 1 passes tree['w'] as f32[3, 2], but rank 2 ",
    "dtype": "ShapeError: {}: rank 3 passes tree['b'][0] as f32[], but rank 2 ",
    "structure": "ShapeError: {}: rank 0 passes {{'b': *, 'w': *}}, but rank 2 {{'b': [*, *], 'w': *}}; pass the same",
    "source": "ShapeError: {}: rank 3 passes src=1, but rank 0 src=2; pass the same src on all ranks",
    "outside": "ShapeError: {}: rank 1 passes src=7, but rank 0 src=2",
}
SCATTERED = {
    "spec": "ShapeError: {}: rank 1 passes the spec P(None, 'x') for tree['w'], but rank 2 P('x')",
    "specs": "ShapeError: {}: rank 3 passes specs that do not match the tree",
    "nothing": "ArgumentError: {} got src=2 and the tree None on that rank",
}


def test_what_differs_is_told_on_all_ranks_alike() -> None:
    with Processes(4) as pool:
        for name, case in [*itertools.product(("broadcast", "scatter"), ("right",)), ("scatter", "same")]:
            for found in pool.run(_told, case, name):
                assert torch.equal(found["w"], torch.full((2, 3), 2.0))
                assert [one.item() for one in found["b"]] == [2, False]
        wanted = [("broadcast", BOTH), ("scatter", BOTH | SCATTERED), ("device_put", SCATTERED)]
        for name, told in wanted:
            for case, text in told.items():
                errors = set(pool.run(_told, case, name))
                assert len(errors) == 1, errors
                assert text.format(name) in errors.pop()
        pool.run(_every_dtype)
        pool.run(_gradients)


def _every_dtype() -> None:
    """Of even, uneven and empty shapes, bit by bit."""
    mesh, rank = _grid()
    for dtype, shape in list(itertools.product(DTYPES, ((4, 4), (5, 3), (0, 3), (1,), ())))[:: 1 if FULL else 4]:
        whole = (torch.arange(float(math.prod(shape))).reshape(shape) % 3).to(dtype)
        whole = whole.conj() if dtype.is_complex else whole
        assert torch.equal(broadcast(whole if rank == 3 else torch.zeros_like(whole), src=3, mesh=mesh), whole)
        for spec in (P(), *([P("x"), P(("y", "x"))] if shape else []), P(reduced={"x"})):
            found = scatter(whole if rank == 3 else None, spec, src=3, mesh=mesh)
            expected = device_put(whole, spec, mesh=mesh)
            assert found.spec is expected.spec
            assert torch.equal(found.local, expected.local)


def _gradients() -> None:
    """The source has the gradient of the global function, twice differentiable; no other rank has one."""
    mesh, rank = _grid()
    x, w = torch.arange(15.0).view(5, 3).sin(), torch.arange(15.0).view(5, 3).requires_grad_()
    for spec in (P("x"), P("x", "y"), P(None, ("y", "x")), P(unreduced={"y"}), P(reduced={"x"}), P()):
        leaf = x.clone().requires_grad_() if rank == 1 else None
        put = scatter(leaf, spec, src=1, mesh=mesh)
        (device_get(put) * w).sum().backward()
        if leaf is not None:
            torch.testing.assert_close(leaf.grad, w.detach())
    leaf = x.clone().requires_grad_(rank == 1)  # only the source's says whether gradients come back
    (first,) = torch.autograd.grad((broadcast(leaf, src=1, mesh=mesh) ** 2 * w).sum(), w, create_graph=True)
    torch.testing.assert_close(first, x**2)
    if rank == 1:
        (second,) = torch.autograd.grad((first * w).sum(), leaf)
        torch.testing.assert_close(second, 2 * x * w.detach())
    twin = x.clone().requires_grad_()
    (broadcast(twin, src=1, mesh=mesh) * w).sum().backward()
    torch.testing.assert_close(twin.grad, w.detach() if rank == 1 else torch.zeros_like(x))


def test_simulated() -> None:
    x = torch.arange(3.0, requires_grad=True)
    for found in (broadcast(x, src=1, mesh=MESH), device_get(scatter(x, P("x"), src=1, mesh=MESH))):
        assert torch.equal(found, x)
        (grad,) = torch.autograd.grad((found * torch.arange(3.0)).sum(), x)
        assert torch.equal(grad, torch.arange(3.0))
    for name, helper in (("broadcast", broadcast), ("scatter", lambda x, **k: scatter(x, P(), **k))):
        with pytest.raises(MeshError, match=f"{name} got src=4, which is no rank of"):
            helper(x, src=4, mesh=MESH)
    with pytest.raises(ArgumentError, match="move a Sharded with reshard"):
        broadcast(device_put(x, P("x"), mesh=MESH).local, src=0, mesh=MESH)
    with pytest.raises(ArgumentError, match=r"a Sharded, which all ranks hold already; write reshard"):
        scatter(device_put(x, P("x"), mesh=MESH), P(), src=0, mesh=MESH)
    with pytest.raises(SpecError, match="scatter: the tree does not fit its specs"):
        scatter(x, P("z"), src=0, mesh=MESH)


@pytest.mark.parametrize("shape", [(5, 7), (8, 4), (1, 3)])
@pytest.mark.parametrize("spec", [P("x"), P("x", "y"), P(None, ("x", "y"))])
def test_padding_makes_blocks_even_and_is_undone(shape: tuple[int, ...], spec: P) -> None:
    mesh = make_mesh((2, 2), ("x", "y"), transport="simulation")
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape).requires_grad_()
    padded = pad_to_blocks(x, spec, mesh)
    placed = device_put(padded, spec, mesh=mesh)
    assert placed.spec.even
    assert padded.sum() == x.sum()
    assert torch.equal(unpad(device_get(placed), shape), x)
    laid = device_put(x, spec, mesh=mesh)
    assert torch.equal(device_get(unpad(pad_to_blocks(laid, spec), shape)), x)
    (grad,) = torch.autograd.grad(device_get(unpad(pad_to_blocks(laid, spec), shape)).sum(), x)
    assert torch.equal(grad, torch.ones(shape))


def test_mistakes() -> None:
    with pytest.raises(SpecError, match="pad_to_blocks: a tensor of shape"):
        pad_to_blocks(torch.ones(3), P("z"), MESH)
    with pytest.raises(ShapeError, match=r"unpad got the shape \(9,\) for a tensor of shape \(8,\)"):
        unpad(torch.ones(8), (9,))
    for shape in ((-1,), (2.0,), (), 5, None):
        with pytest.raises(ShapeError, match=r"unpad got .* give it the shape before"):
            unpad(torch.ones(8), shape)  # type: ignore[arg-type]
    for wrong in (3, "x", [torch.ones(8)]):
        with pytest.raises(ArgumentError, match=r"unpad got .* expected a tensor"):
            unpad(wrong, (2,))  # type: ignore[type-var]
        with pytest.raises(ArgumentError, match=r"pad_to_blocks got .* expected a tensor"):
            pad_to_blocks(wrong, P("x"), MESH)  # type: ignore[type-var]
