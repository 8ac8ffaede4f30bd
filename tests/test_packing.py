"""A pytree of many leaves is one call per dtype on four Gloo processes, with the values and gradients of one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from processes import Processes
from torch import Tensor

import fspmd
from fspmd import P, make_mesh, shard_map
from fspmd.transport.groups import gather_integers, group_of

F64 = torch.float64
SIZE = 7  # on four ranks 2, 2, 2, 1
GATHER, SCATTER, REDUCE, EXCHANGE = "_allgather_base", "allreduce", "allreduce", "alltoall_base"  # with Gloo

Tree = dict[str, Any]
#: by name: the tree of a rank, the collective, and the calls of c10d per dtype, forward and backward
CASES: dict[str, tuple[Callable[[int], Tree], Callable[[Any], Any], str, str]] = {
    "psum": (lambda r: tree(8, 3), lambda x: fspmd.psum(x, "x"), REDUCE, ""),
    "pmax": (lambda r: tree(8, 3), lambda x: fspmd.pmax(x, "x"), REDUCE, ""),
    "all_gather": (lambda r: tree(2, 3), lambda x: fspmd.all_gather(x, "x"), GATHER, SCATTER),
    "all_gather on dim 1": (
        lambda r: tree(2, 3),
        lambda x: fspmd.all_gather(x, "x", axis=1, tiled=True),
        GATHER,
        SCATTER,
    ),
    "all_gather, uneven": (
        lambda r: tree(1 if r == 3 else 2, 3),
        lambda x: fspmd.all_gather(x, "x", tiled=True, size=SIZE),
        GATHER,
        SCATTER,
    ),
    "psum_scatter": (lambda r: tree(8, 3), lambda x: fspmd.psum_scatter(x, "x", tiled=True), SCATTER, GATHER),
    "psum_scatter, uneven": (
        lambda r: tree(SIZE, 3),
        lambda x: fspmd.psum_scatter(x, "x", tiled=True, size=SIZE),
        SCATTER,
        GATHER,
    ),
    "all_to_all": (lambda r: tree(8, 3), lambda x: fspmd.all_to_all(x, "x", 0, 1, tiled=True), EXCHANGE, EXCHANGE),
    "all_to_all, uneven": (
        lambda r: tree(6, 1 if r == 3 else 2),
        lambda x: fspmd.all_to_all(x, "x", 0, 1, tiled=True, size=SIZE),
        EXCHANGE,
        EXCHANGE,
    ),
}


def tree(rows: int, columns: int) -> Tree:
    """Four leaves of two dtypes."""
    return {
        "a": torch.randn(rows, columns, dtype=F64),
        "b": [torch.randn(rows, columns, 2, dtype=F64), torch.randn(rows, columns)],
        "c": torch.randn(rows, columns, 1, 2),
    }


@pytest.fixture(scope="module")
def pool() -> Iterator[Processes]:
    with Processes(4) as processes:
        yield processes


class Spied:
    """A process group whose calls are counted."""

    def __init__(self, pg: Any, counts: Counter[str]) -> None:
        self.pg, self.counts = pg, counts

    def __getattr__(self, name: str) -> Any:
        self.counts[name] += 1
        return getattr(self.pg, name)


def run_case(name: str) -> list[Any]:
    """The c10d calls forward and backward, packed, and leaf by leaf; and whether the numbers agree."""
    make, collective, _, _ = CASES[name]
    mesh = make_mesh((4,), ("x",))
    gather_integers([0], mesh)
    torch.manual_seed(dist.get_rank())
    leaves, treedef = optree.tree_flatten(make(dist.get_rank()))
    group = group_of(mesh, ("x",), fspmd.transport.Options())
    counts: Counter[str] = Counter()
    seen: list[Any] = []

    def once(together: bool) -> list[Tensor]:
        xs = [leaf.clone().requires_grad_() for leaf in leaves]
        if together:
            collective(treedef.unflatten(xs))  # what the shapes are is asked once
        counts.clear()
        outs = optree.tree_leaves(collective(treedef.unflatten(xs)) if together else [collective(x) for x in xs])
        seen.append(dict(counts))
        total = torch.stack([(out.double() * (out.detach() + 1)).sum() for out in outs]).sum()
        counts.clear()
        grads = torch.autograd.grad(total, xs)
        seen.append(dict(counts))
        return [*outs, *grads]

    def body(x: Tensor) -> Tensor:
        packed, single = once(together=True), once(together=False)
        seen.append(all(torch.allclose(a, b) for a, b in zip(packed, single, strict=True)))
        return x

    spied, before = Spied(group.pg, counts), group._pg
    group._pg = lambda: spied
    try:
        shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)(torch.ones(4))
    finally:
        group._pg = before
    return seen


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", CASES)
def test_leaves_of_one_dtype_travel_together(pool: Processes, name: str) -> None:
    *_, forward, backward = CASES[name]
    for together, back, one_by_one, _, same in pool.run(run_case, name):
        asked = name == "all_gather, uneven"  # each call first compares shapes across ranks
        assert together[forward] == 2 + asked
        assert one_by_one[forward] == 4 + 4 * asked
        assert same
        if backward:
            assert back[backward] == 2


def second_gradients_where_blocks_are_empty() -> list[list[Tensor]]:
    """Those of leaves with one dim, of which two ranks have nothing; and the expected ones."""
    blocks: list[list[Tensor]] = []

    def body(x: Tensor) -> Tensor:
        ones = torch.ones(int(fspmd.axis_index("x") < 2), dtype=F64)
        leaves = [(k * ones).requires_grad_() for k in (2, 3)]
        for x_block, y in zip(leaves, fspmd.all_gather(leaves, "x", tiled=True, size=2), strict=True):
            (first,) = torch.autograd.grad(y.square().sum() / 2, x_block, create_graph=True)  # 4 x
            (second,) = torch.autograd.grad(first.square().sum(), x_block, retain_graph=True)  # 2 * 4 * 4 x
            blocks.append([second, 32 * x_block.detach()])
        return x

    mesh = make_mesh((4,), ("x",))
    shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)(torch.ones(4))
    return blocks


def test_all_ranks_take_part_in_second_gradients_if_some_have_nothing(pool: Processes) -> None:
    for blocks in pool.run(second_gradients_where_blocks_are_empty):
        assert all(torch.equal(second, expected) for second, expected in blocks)
