"""Random programs on random meshes give the values, gradients and second gradients of the all-ranks interpreter.

Meshes of one to three axes, uneven blocks, torch calls mixed with collectives, with and without types, waited for or
not, recomputed or not. `programs` holds the programs' meaning. A sample runs always, two thousand with FSPMD_FULL=1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from full import FULL
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import (
    BINARY,
    F64,
    FITS,
    LOCAL,
    WRITES,
    Axes,
    Grid,
    Program,
    Shape,
    Step,
    Values,
    block_of,
    body_of,
    interpret,
    step_on_lists,
)
from torch import Tensor

from fspmd import P, device_get, make_mesh, shard_map

NAMES = ("x", "y", "z")
UNARY = tuple(name for name in LOCAL if name not in BINARY)
COLLECTIVES = (
    "psum",
    "pmean",
    "pmax",
    "pmin",
    "all_gather",
    "all_gather_stacked",
    "all_gather_uneven",
    "psum_scatter",
    "psum_scatter_uneven",
    "all_to_all",
    "ppermute",
    "pbroadcast",
    "pcast",
    "times_index",
    "where_index",
    "row_of_index",
    "rows_from_index",
)
Draw = Any


def tensor(shape: Shape, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F64) * 0.8


class Builder:
    """A program under construction: every value's blocks, and the axes it varies over."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda s: torch.tensor(s).prod() <= 12))
        self.axes = tuple(zip(NAMES, sizes, strict=False))
        self.grid = Grid(self.axes)
        self.shapes: list[Shape] = []
        self.specs: list[tuple[Axes, ...]] = []
        self.values: list[Values] = []
        self.varying: list[frozenset[str]] = []
        self.steps: list[Step] = []

    def shapes_of(self, index: int) -> list[Shape]:
        return [tuple(self.values[index][at].shape) for at in self.grid.places]

    def even(self, index: int) -> bool:
        return len(set(self.shapes_of(index))) == 1

    def add_input(self) -> None:
        shape = tuple(self.draw(st.lists(st.integers(1, 7), min_size=1, max_size=2)))
        free = list(self.grid.names)
        spec = []
        for _ in shape:
            chosen = self.draw(st.lists(st.sampled_from(free), unique=True, max_size=2)) if free else []
            free = [a for a in free if a not in chosen]
            spec.append(tuple(chosen))
        x = tensor(shape, len(self.shapes))
        self.shapes.append(shape)
        self.specs.append(tuple(spec))
        self.values.append({at: block_of(x, tuple(spec), self.grid, at) for at in self.grid.places})
        self.varying.append(frozenset(a for axes in spec for a in axes))

    def add(self, step: Step, varying: frozenset[str]) -> None:
        self.values.append(step_on_lists(step, self.values, self.grid))
        self.varying.append(varying)
        self.steps.append(step)

    # --- one step ---------------------------------------------------------------------------------------------------

    def add_local(self) -> None:
        count = len(self.values)
        candidates = [Step(name, (i,), params) for name in UNARY for i in range(count) for params in _params(name)]
        candidates += [Step(name, (i, j)) for name in BINARY for i in range(count) for j in range(count)]
        names = sorted({step.name for step in candidates if self.fits(step)})
        name = self.draw(st.sampled_from(names))
        step = self.draw(st.sampled_from([step for step in candidates if step.name == name and self.fits(step)]))
        self.add(step, frozenset().union(*(self.varying[i] for i in step.args)))

    def fits(self, step: Step) -> bool:
        if step.name in WRITES and self.varying[step.args[1]] - self.varying[step.args[0]]:
            return False
        if step.name == "layer_norm" and len({shape[-1:] for shape in self.shapes_of(step.args[0])}) > 1:
            return False
        if sum(v.numel() for v in self.values[step.args[0]].values()) > 4000:
            return step.name in ("sum", "mean", "head", "last")
        fits = FITS.get(step.name)
        columns = [self.shapes_of(i) for i in step.args]
        return fits is None or all(fits(*row, *step.params) for row in zip(*columns, strict=True))

    def add_collective(self) -> None:
        index = self.draw(st.integers(0, len(self.values) - 1))
        axes = tuple(self.draw(st.lists(st.sampled_from(self.grid.names), unique=True, min_size=1)))
        wait = self.draw(st.booleans())
        groups = [[tuple(self.values[index][at].shape) for at in group] for group in self.grid.groups(axes)]
        options = [(name, params) for name in COLLECTIVES for params in self.fitting(name, index, axes, groups)]
        names = sorted({name for name, _ in options})
        if not names:
            return
        name = self.draw(st.sampled_from(names))
        params = self.draw(st.sampled_from([params for other, params in options if other == name]))
        after = self.varying[index] | set(axes)
        if name in ("psum", "pmean", "pmax", "pmin") or "invarying" in params:
            after = self.varying[index] - set(axes)
        self.add(Step(name, (index,), (axes, wait, *params)), after)

    def fitting(self, name: str, index: int, axes: Axes, groups: list[list[Shape]]) -> list[tuple[Any, ...]]:
        """The parameters with which a collective fits the blocks and their types."""
        n = self.grid.size(axes)
        states = {a in self.varying[index] for a in axes}
        alike = all(len(set(shapes)) == 1 for shapes in groups)
        ndims = {len(shape) for shapes in groups for shape in shapes}
        if len(ndims) > 1 or max(t.numel() for t in self.values[index].values()) * n > 2000:
            return []
        dims = range(ndims.pop())
        if (
            name in ("psum", "pmean", "psum_scatter", "psum_scatter_uneven", "pcast", "pmax", "pmin")
            and len(states) > 1
        ):
            return []
        if name == "pcast":
            return [()] if states == {False} else []
        if name in ("pmax", "pmin"):
            return [()] if states == {True} and alike else []
        if name in ("psum", "pmean"):
            return [()] if alike else []
        if name == "all_gather":
            return [(to, d) for to in ("varying", "invarying") for d in dims] if alike else []
        if name == "all_gather_stacked":
            return (
                [(to, d) for to in ("varying", "invarying") for d in (*dims, len(dims))]
                if alike and len(dims) < 3
                else []
            )
        if name == "all_gather_uneven":
            joined = [(d, _joined(groups, d, self.grid, axes)) for d in dims]
            return [(to, d, size) for to in ("varying", "invarying") for d, size in joined if size >= 0]
        if name in ("psum_scatter", "psum_scatter_uneven"):
            sizes = {d: {shape[d] for shapes in groups for shape in shapes} for d in dims}
            found = [(d, next(iter(s))) for d, s in sizes.items() if len(s) == 1]
            even = name == "psum_scatter"
            return [(d, size) for d, size in found if alike and (size % n == 0) == even]
        if name == "all_to_all":
            split = [d for d in dims if all(shape[d] % n == 0 for shapes in groups for shape in shapes)]
            return [(d, e) for d in split for e in dims] if alike else []
        if name == "ppermute":
            order = self.draw(st.permutations(range(n)))
            pairs = tuple(zip(range(n), order, strict=True))[: self.draw(st.integers(0, n))]
            return [(pairs,)] if alike else []
        if name == "pbroadcast":
            return [(source,) for source in range(n)] if alike else []
        if name == "where_index":
            return [(k,) for k in range(n)]
        rows = {shape[:1] for shape in self.shapes_of(index)}
        if name in ("row_of_index", "rows_from_index"):
            return [()] if len(rows) == 1 and rows not in [{()}, {(0,)}] else []
        return [()]

    # --- outputs ----------------------------------------------------------------------------------------------------

    def finished(self) -> Program:
        outputs = []
        for _ in range(self.draw(st.integers(1, 2))):
            index = self.draw(st.sampled_from(range(max(0, len(self.values) - 4), len(self.values))))
            if not self.even(index):
                self.add_total(index)
                index = len(self.values) - 1
            axes = tuple(self.draw(st.permutations(sorted(self.varying[index]))))
            outputs.append((index, axes))
        return Program(
            self.axes,
            tuple(self.shapes),
            tuple(self.specs),
            tuple(self.steps),
            tuple(outputs),
            check_vma=self.draw(st.sampled_from([True, True, True, False])),
            recompute=self.draw(st.sampled_from([False, False, False, True])),
        )

    def add_total(self, index: int) -> None:
        self.add(Step("flatten", (index,)), self.varying[index])
        self.add(Step("sum", (len(self.values) - 1,), (0,)), self.varying[index])


def _params(name: str) -> list[tuple[int, ...]]:
    return [(0,), (1,)] if name in ("sum", "sum_keepdim", "mean") else [()]


def _joined(groups: list[list[Shape]], dim: int, grid: Grid, axes: Axes) -> int:
    """The size of a dim whose blocks are as torch.chunk cuts it, in every group alike; else -1."""
    sizes = set()
    for shapes in groups:
        lengths = [shape[dim] for shape in shapes]
        rest = {shape[:dim] + shape[dim + 1 :] for shape in shapes}
        if len(rest) > 1 or lengths != grid.lengths(sum(lengths), axes):
            return -1
        sizes.add(sum(lengths))
    return sizes.pop() if len(sizes) == 1 else -1


@st.composite
def programs(draw: Draw) -> tuple[Program, tuple[frozenset[str], ...]]:
    """A program, and the axes that each of its values varies over."""
    builder = Builder(draw)
    for _ in range(draw(st.integers(1, 3))):
        builder.add_input()
    for _ in range(draw(st.integers(1, 9))):
        if draw(st.booleans()):
            builder.add_collective()
        else:
            builder.add_local()
    program = builder.finished()
    return program, tuple(builder.varying)


# --- the test -------------------------------------------------------------------------------------------------------


def scalar(outputs: list[Tensor]) -> Tensor:
    """A number that depends on every element, each with a weight of its own."""
    total = torch.zeros((), dtype=F64)
    for i, out in enumerate(outputs):
        weight = torch.linspace(0.3, 1.7, out.numel(), dtype=F64).view(out.shape) * (-1) ** i
        total = total + (out * weight).sum() + 0.1 * out.square().sum()
    return total


def derivatives(y: Tensor, inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients, and gradients of a number made of them."""
    grads = _gradients(y, inputs, create_graph=True)
    return grads, _gradients(scalar(grads), inputs, create_graph=False)


def _gradients(y: Tensor, inputs: list[Tensor], create_graph: bool) -> list[Tensor]:
    if not y.requires_grad:
        return [torch.zeros_like(x) for x in inputs]
    return list(torch.autograd.grad(y, inputs, create_graph=create_graph, materialize_grads=True))


def agree(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for x, y in zip(found, expected, strict=True):
        scale = max(1.0, y.abs().max().item()) if y.numel() else 1.0
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10 * scale)


def check(
    program: Program, varying: tuple[frozenset[str], ...], through: Callable[..., Any] = lambda f, *args: f(*args)
) -> None:
    """``through`` is called with a function and its arguments, in its stead."""
    mesh = make_mesh(
        tuple(size for _, size in program.axes), tuple(name for name, _ in program.axes), transport="simulation"
    )
    seen: list[Any] = []
    f = shard_map(
        body_of(program, seen),
        mesh=mesh,
        in_specs=tuple(P(*(axes or None for axes in spec)) for spec in program.specs),
        out_specs=tuple(P(axes or None) for _, axes in program.outputs),
        check_vma=program.check_vma,
    )
    mine, theirs = ([tensor(s, i).requires_grad_() for i, s in enumerate(program.shapes)] for _ in range(2))
    found = [device_get(out) for out in through(f, *mine)]
    expected = interpret(program, theirs)
    if program.check_vma and len(seen) == len(varying):
        assert [value.variance.varying for value in seen] == list(varying)
    agree(found, expected)
    for a, b in zip(derivatives(scalar(found), mine), derivatives(scalar(expected), theirs), strict=True):
        agree(a, b)


@settings(
    max_examples=2000 if FULL else 30,
    deadline=None,
    derandomize=not FULL,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(programs())
def test_a_random_program_means_what_the_interpreter_says(drawn: tuple[Program, tuple[frozenset[str], ...]]) -> None:
    check(*drawn)
