"""`broadcast`: one rank's values, and refusals on all ranks alike; padding to even blocks and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from processes import Processes

from fspmd import P, ShapeError, SpecError, broadcast, device_get, device_put, make_mesh, pad_to_blocks, unpad
from fspmd.errors import ArgumentError, MeshError

MESH = make_mesh((4,), ("x",), transport="simulation")


def _broadcast(case: str) -> Any:
    mesh = make_mesh((2, 2), ("x", "y"), ranks=(0, 2, 1, 3))
    (rank,) = [r for r in range(4) if mesh.coordinate(r) == mesh.coordinate()]
    tree: Any = {"w": torch.full((2, 3), float(rank)), "b": [torch.tensor(rank), torch.tensor([rank > 2])]}
    if case == "shape" and rank == 1:
        tree["w"] = torch.zeros(3, 2)
    if case == "dtype" and rank == 3:
        tree["b"][0] = torch.tensor(1.0)
    if case == "structure" and rank == 2:
        tree["b"] = tree["b"][0]
    try:
        return broadcast(tree, src=2, mesh=mesh)
    except ShapeError as error:
        return str(error)


def test_on_processes() -> None:
    with Processes(4) as pool:
        for found in pool.run(_broadcast, "right"):
            assert torch.equal(found["w"], torch.full((2, 3), 2.0))
            assert [one.item() for one in found["b"]] == [2, False]
        told = {
            "shape": "rank 1 passes tree['w'] as f32[3, 2], but rank 2 tree['w'] as f32[2, 3]",
            "dtype": "rank 3 passes tree['b'][0] as f32[], but rank 2 tree['b'][0] as i64[]",
            "structure": "rank 0 passes {'b': [*, *], 'w': *}, but rank 2 {'b': *, 'w': *}",
        }
        for case, text in told.items():
            errors = set(pool.run(_broadcast, case))
            assert len(errors) == 1
            assert text in errors.pop()


def test_simulated() -> None:
    x = torch.arange(3.0, requires_grad=True)
    found = broadcast(x, src=1, mesh=MESH)
    assert torch.equal(found, x)
    assert not found.requires_grad
    with pytest.raises(MeshError, match="broadcast got src=4, which is no rank of"):
        broadcast(x, src=4, mesh=MESH)
    with pytest.raises(ArgumentError, match="reshard moves a Sharded"):
        broadcast(device_put(x, P("x"), mesh=MESH).local, src=0, mesh=MESH)


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
