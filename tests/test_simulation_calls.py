"""A torch call in a simulated body gives each rank what torch gives on that rank's block alone: values and derivatives.

The reference is the same function on the plain block of one rank. Blocks of unequal numbers of rows are held together,
their sizes as numbers that differ from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch_calls import CALLS, ROWS, UNEVEN_CALLS, operands

from fspmd import P, make_mesh, shard_map
from fspmd.transport.frame import frame_over
from fspmd.transport.local_int import LocalInt
from fspmd.transport.local_tensor import shards_of

SIZE = 4
MESH = make_mesh((SIZE,), ("x",), transport="simulation")
HELD = frame_over(MESH, ("x",))
Blocks = list[list[Tensor]]  # per rank, per operand


def even_blocks(kinds: str) -> Blocks:
    return [operands(kinds, rank) for rank in range(SIZE)]


def uneven_blocks(kinds: str) -> Blocks:
    return [operands(kinds, rank, rows) for rank, rows in enumerate(ROWS)]


def in_body(f: Callable[..., Any], blocks: Blocks, check_vma: bool = True) -> list[Any]:
    """What ``f`` gives on each rank, run once in a simulated body: a list of leaves per rank."""
    kept: list[Any] = []

    def body(*xs: Tensor) -> Tensor:
        kept.append(f(*xs))
        return torch.zeros(())

    whole = [torch.cat(column) for column in zip(*blocks, strict=True)]
    shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P(), check_vma=check_vma)(*whole)
    leaves = optree.tree_leaves(kept[0], none_is_leaf=True)
    return [[on_rank(leaf, rank) for leaf in leaves] for rank in range(SIZE)]


def on_rank(leaf: Any, rank: int) -> Any:
    """One rank's part of a simulated value."""
    if isinstance(leaf, Tensor):
        return shards_of(leaf.detach(), HELD)[rank]
    if isinstance(leaf, torch.Size):
        return tuple(on_rank(size, rank) for size in leaf)
    node = getattr(leaf, "node", None)
    return node.at(HELD)[rank] if isinstance(node, LocalInt) else leaf


def alone(f: Callable[..., Any], blocks: Blocks) -> list[Any]:
    """What torch gives for each rank's blocks alone."""
    return [optree.tree_leaves(f(*xs), none_is_leaf=True) for xs in blocks]


def agree(found: list[Any], expected: list[Any]) -> None:
    for rank, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert len(mine) == len(theirs)
        for x, y in zip(mine, theirs, strict=True):
            where = f"rank {rank}: {{}}".format
            if isinstance(y, Tensor):
                torch.testing.assert_close(x, y.detach(), rtol=1e-10, atol=1e-10, equal_nan=True, msg=where)
            else:
                assert x == y, where(f"{x} is not {y}")


def scalar(out: Any) -> Tensor:
    """A number that depends on every floating element of a result, each with a weight of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for leaf in optree.tree_leaves(out):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            x = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
            total = total + (x * (x.detach().sin() + 0.3)).sum()
    return total


def differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def derivatives(f: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    """Gradients of `scalar` of ``f``, and gradients of a function of them; zeros where there are none."""

    def run(*xs: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() if differentiable(x) else x for x in xs]
        chosen = [x for x in leaves if x.requires_grad]
        grads = gradients(scalar(f(*leaves)), chosen, create_graph=True)
        return [*grads, *gradients(scalar(grads), chosen, create_graph=False)]

    return run


def gradients(y: Tensor, chosen: list[Tensor], create_graph: bool) -> list[Tensor]:
    if not y.requires_grad:
        return [torch.zeros_like(x) for x in chosen]
    return list(torch.autograd.grad(y, chosen, create_graph=create_graph, materialize_grads=True))


def by_transform(f: Callable[..., Any]) -> Callable[..., Any]:
    """The same first gradients through torch.func."""

    def run(*xs: Tensor) -> Any:
        argnums = tuple(i for i, x in enumerate(xs) if differentiable(x))
        return torch.func.grad(lambda *ys: scalar(f(*ys)), argnums)(*xs)

    return run


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_applied_to_each_block(name: str) -> None:
    f, kinds = CALLS[name]
    blocks = even_blocks(kinds)
    expected = alone(f, blocks)
    agree(in_body(f, blocks), expected)
    agree(in_body(f, blocks, check_vma=False), expected)


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", UNEVEN_CALLS)
def test_a_call_is_applied_to_each_uneven_block(name: str) -> None:
    f, kinds = UNEVEN_CALLS[name]
    blocks = uneven_blocks(kinds)
    expected = alone(f, blocks)
    agree(in_body(f, blocks), expected)
    agree(in_body(f, blocks, check_vma=False), expected)


#: torch itself has no derivative, or none of second order, of these
NOT_SMOOTH = ("floor division",)
NOT_TWICE = ("cdist", "attention", "causal attention", "masked attention")
SMOOTH = [name for name, (_, kinds) in CALLS.items() if set(kinds) & set("mspvic") and name not in NOT_SMOOTH]
SMOOTH_UNEVEN = [name for name, (_, kinds) in UNEVEN_CALLS.items() if set(kinds) & set("mi")]


def twice(names: list[str]) -> list[str]:
    return [name for name in names if name not in NOT_TWICE]


def agree_where_derived(run: Callable[..., Any], blocks: Any) -> None:
    """Nothing is compared where this version of torch knows no derivative: 2.11 of aminmax, twice of grid_sample."""
    try:
        expected = alone(run, blocks)
    except RuntimeError as error:
        if "is not implemented" not in str(error):
            raise
        return
    agree(in_body(run, blocks), expected)


@pytest.mark.one_of(8)
@pytest.mark.parametrize("name", twice(SMOOTH))
def test_gradients_twice(name: str) -> None:
    f, kinds = CALLS[name]
    blocks = even_blocks(kinds)
    run = derivatives(f)
    agree_where_derived(run, blocks)


@pytest.mark.one_of(8)
@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_by_transform(name: str) -> None:
    f, kinds = CALLS[name]
    blocks = even_blocks(kinds)
    run = by_transform(f)
    agree_where_derived(run, blocks)


@pytest.mark.one_of(6)
@pytest.mark.parametrize("name", twice(SMOOTH_UNEVEN))
def test_gradients_of_uneven_blocks(name: str) -> None:
    f, kinds = UNEVEN_CALLS[name]
    blocks = uneven_blocks(kinds)
    run = derivatives(f)
    agree_where_derived(run, blocks)


@pytest.mark.one_of(6)
@pytest.mark.parametrize("name", SMOOTH_UNEVEN)
def test_gradients_of_uneven_blocks_by_transform(name: str) -> None:
    f, kinds = UNEVEN_CALLS[name]
    blocks = uneven_blocks(kinds)
    run = by_transform(f)
    agree_where_derived(run, blocks)


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "split": lambda x: x.split([2, 1, 5], 1)[2],
    "chunk": lambda x: x.chunk(3, dim=-1)[1],
    "unbind": lambda x: x.unbind(1)[4],
}


@pytest.mark.parametrize("name", PARTS)
def test_gradients_of_one_of_several_parts_per_element(name: str) -> None:
    def run(x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda one: scalar(PARTS[name](one))), in_dims=1)(x)

    blocks = uneven_blocks("i")
    agree(in_body(run, blocks), alone(run, blocks))
