"""Random well-typed programs over a mesh, and what they mean: an interpreter on one plain tensor per mesh coordinate.

The interpreter knows nothing of the code under test. A collective is arithmetic on the list of a group's tensors, an
input's block is a slice of the global tensor, so torch's own autograd through all ranks at once gives the gradients: a
block that several ranks share gets the sum of theirs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fspmd
from fspmd import axis_index

F64 = torch.float64
Where = tuple[int, ...]
Values = dict[Where, Tensor]
Shape = tuple[int, ...]
Axes = tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """One call: a row of `LOCAL` or of `COLLECTIVES`, on earlier values, with parameters."""

    name: str
    args: tuple[int, ...]
    params: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Program:
    """A straight line of steps. Values are numbered: inputs first, then the result of each step."""

    axes: tuple[tuple[str, int], ...]  # of the mesh: names and sizes
    shapes: tuple[Shape, ...]  # global, of the inputs
    specs: tuple[tuple[Axes, ...], ...]  # per input and dim the axes that cut it
    steps: tuple[Step, ...]
    outputs: tuple[tuple[int, Axes], ...]  # value, and the axes of its first dim in the out spec
    check_vma: bool = True
    recompute: bool = False


# --- local calls: the same in the body and on one rank ----------------------------------------------------------------


def _in_place(x: Tensor) -> Tensor:
    z = x.clone(memory_format=torch.contiguous_format)
    z.mul_(2)
    z[:1] += 1
    return z.view(-1)[:3].clamp_(max=1.5).sum() + z


def _add_in_place(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z += y
    return z


def _set_rows(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[:1] = y[:1]
    return z


def _swap_halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([second, first], -1)


LOCAL: dict[str, Callable[..., Tensor]] = {
    "tanh": torch.tanh,
    "sin": lambda x: x.sin(),
    "gelu": F.gelu,
    "scale": lambda x: x * 0.7 - 0.2,
    "reflected": lambda x: 1.0 / (2 + x * x),
    "softmax": lambda x: x.softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, (x.shape[-1],)),
    "sum": lambda x, dim: x.sum(dim),
    "sum_keepdim": lambda x, dim: x.sum(dim, keepdim=True),
    "mean": lambda x, dim: x.mean(dim),
    "transpose": lambda x: x.T,
    "contiguous": lambda x: x.T.contiguous(),
    "flatten": lambda x: x.reshape(-1),
    "by_sizes": lambda x: x.reshape(x.shape[0] * x.shape[1]),
    "over_rows": lambda x: x / (x.shape[0] + 1),
    "head": lambda x: x[:1],
    "tail": lambda x: x[1:],
    "columns": lambda x: x[..., :2],
    "last": lambda x: x[..., -1],
    "unsqueeze": lambda x: x[None],
    "flip": lambda x: x.flip(0),
    "cumsum": lambda x: x.cumsum(0),
    "positive": lambda x: torch.where(x > 0, x, x * 0.5),
    "swap_halves": _swap_halves,
    "in_place": _in_place,
    "index": lambda x: x.index_select(0, torch.tensor([0, 0])),
    "take_rows": lambda x: x[torch.tensor([-1, 0])],
    "row_norms": lambda x: torch.einsum("ij,ij->i", x, x),
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "sub": lambda x, y: 2 - x - y,
    "where": lambda x, y: torch.where(x > y, x, y * y),
    "matmul": lambda x, y: x @ y.T,
    "linear": lambda x, y: F.linear(x, y.tanh()),
    "cat": lambda x, y: torch.cat([x, y, x]),
    "stack": lambda x, y: torch.stack([x, y]),
    "add_in_place": _add_in_place,
    "set_rows": _set_rows,
}


def _same_but_first(a: Shape, b: Shape) -> bool:
    return len(a) == len(b) >= 1 and a[1:] == b[1:]


#: whether a call fits the shapes at one coordinate
FITS: dict[str, Callable[..., bool]] = {
    "softmax": lambda a: len(a) >= 1,
    "layer_norm": lambda a: len(a) >= 1 and a[-1] >= 2,
    "sum": lambda a, dim: len(a) > dim,
    "sum_keepdim": lambda a, dim: len(a) > dim,
    "mean": lambda a, dim: len(a) > dim and a[dim] >= 1,
    "transpose": lambda a: len(a) == 2,
    "contiguous": lambda a: len(a) == 2,
    "by_sizes": lambda a: len(a) == 2,
    "over_rows": lambda a: len(a) >= 1,
    "head": lambda a: len(a) >= 1,
    "tail": lambda a: len(a) >= 1 and a[0] >= 2,
    "columns": lambda a: len(a) >= 1,
    "last": lambda a: len(a) >= 1 and a[-1] >= 1,
    "unsqueeze": lambda a: len(a) < 3,
    "flip": lambda a: len(a) >= 1,
    "cumsum": lambda a: len(a) >= 1,
    "swap_halves": lambda a: len(a) >= 1 and a[-1] >= 2,
    "in_place": lambda a: len(a) >= 1,
    "index": lambda a: len(a) >= 1 and a[0] >= 1,
    "take_rows": lambda a: len(a) >= 1 and a[0] >= 1,
    "row_norms": lambda a: len(a) == 2,
    **dict.fromkeys(
        ("add", "mul", "sub", "where"), lambda a, b: a == b or not a or not b or (len(a) == 2 and b == a[1:])
    ),
    "matmul": lambda a, b: len(a) == len(b) == 2 and a[1] == b[1],
    "linear": lambda a, b: 1 <= len(a) <= 2 and len(b) == 2 and a[-1] == b[1],
    "cat": _same_but_first,
    "stack": lambda a, b: a == b and len(a) < 3,
    "add_in_place": lambda a, b: a == b or not b,
    "set_rows": lambda a, b: a == b and len(a) >= 1,
}
#: the second operand may not vary over more axes than the first
WRITES = ("add_in_place", "set_rows")
BINARY = ("add", "mul", "sub", "where", "matmul", "linear", "cat", "stack", *WRITES)


# --- collectives ------------------------------------------------------------------------------------------------------


class Grid:
    """The coordinates of a mesh, and groups of them."""

    def __init__(self, axes: Sequence[tuple[str, int]]) -> None:
        self.names = tuple(name for name, _ in axes)
        self.sizes = dict(axes)
        self.places: list[Where] = list(itertools.product(*(range(n) for _, n in axes)))

    def size(self, axes: Axes) -> int:
        return math.prod(self.sizes[a] for a in axes)

    def groups(self, axes: Axes) -> Iterator[list[Where]]:
        """Places that differ along ``axes`` only, in the order of the tuple: major first."""
        rest = [a for a in self.names if a not in axes]
        for fixed in itertools.product(*(range(self.sizes[a]) for a in rest)):
            base = dict(zip(rest, fixed, strict=True))
            group = []
            for moving in itertools.product(*(range(self.sizes[a]) for a in axes)):
                at = base | dict(zip(axes, moving, strict=True))
                group.append(tuple(at[a] for a in self.names))
            yield group

    def lengths(self, size: int, axes: Axes) -> list[int]:
        """Of the blocks of a dim cut over the axes, in the order of the tuple."""
        return [length for _, length in block_bounds(size, [self.sizes[a] for a in axes])]

    def index(self, axes: Axes, at: Where) -> int:
        return next(group.index(at) for group in self.groups(axes) if at in group)


def chunk_sizes(size: int, n: int) -> list[int]:
    """The lengths that torch.chunk gives, with zeros for the ranks it leaves out."""
    each = -(-size // n) if size else 0
    return [max(0, min(each, size - i * each)) for i in range(n)]


def block_bounds(size: int, cuts: list[int]) -> list[tuple[int, int]]:
    """(start, length) of every block of a dim cut again and again: the first cut major."""
    found = [(0, size)]
    for n in cuts:
        found = [
            (start + sum(lengths[:i]), lengths[i])
            for start, length in found
            for lengths in [chunk_sizes(length, n)]
            for i in range(n)
        ]
    return found


ListCollective = Callable[..., list[Tensor]]


def _sum(blocks: list[Tensor]) -> Tensor:
    return torch.stack(blocks).sum(0)


def _scatter(blocks: list[Tensor], dim: int, lengths: list[int]) -> list[Tensor]:
    return list(_sum(blocks).split(lengths, dim))


def _exchange(blocks: list[Tensor], split: int, concat: int) -> list[Tensor]:
    n = len(blocks)
    pieces = [b.split(b.shape[split] // n, split) if b.shape[split] else (b,) * n for b in blocks]
    return [torch.cat([each[i] for each in pieces], concat) for i in range(n)]


def _permute(blocks: list[Tensor], perm: tuple[tuple[int, int], ...]) -> list[Tensor]:
    source = {destination: source for source, destination in perm}
    return [blocks[source[i]] if i in source else torch.zeros_like(b) for i, b in enumerate(blocks)]


#: on the blocks of one group, in rank order: (blocks, *params) -> blocks
ON_LISTS: dict[str, ListCollective] = {
    "psum": lambda b: [_sum(b)] * len(b),
    "pmean": lambda b: [_sum(b) / len(b)] * len(b),
    "pmax": lambda b: [torch.stack(b).amax(0)] * len(b),
    "pmin": lambda b: [torch.stack(b).amin(0)] * len(b),
    "all_gather": lambda b, to, dim: [torch.cat(b, dim)] * len(b),
    "all_gather_stacked": lambda b, to, dim: [torch.stack(b, dim)] * len(b),
    "all_gather_uneven": lambda b, to, dim, size: [torch.cat(b, dim)] * len(b),
    "psum_scatter": _scatter,
    "psum_scatter_uneven": _scatter,
    "all_to_all": _exchange,
    "ppermute": _permute,
    "pbroadcast": lambda b, source: [b[source]] * len(b),
    "pcast": lambda b: b,
    "times_index": lambda b: [x * (i + 1) for i, x in enumerate(b)],
    "where_index": lambda b, k: [x if i == k else x.cos() for i, x in enumerate(b)],
    "row_of_index": lambda b: [x[i % x.shape[0]] for i, x in enumerate(b)],
    "rows_from_index": lambda b: [x[i % x.shape[0] : i % x.shape[0] + 1] for i, x in enumerate(b)],
}
#: the same in a body: (block, axes, wait, *params) -> block
IN_BODY: dict[str, Callable[..., Any]] = {
    "psum": lambda x, axes, wait: fspmd.psum(x, axes, wait=wait),
    "pmean": lambda x, axes, wait: fspmd.pmean(x, axes, wait=wait),
    "pmax": lambda x, axes, wait: fspmd.pmax(x, axes, wait=wait),
    "pmin": lambda x, axes, wait: fspmd.pmin(x, axes, wait=wait),
    "all_gather": lambda x, axes, wait, to, dim: fspmd.all_gather(x, axes, axis=dim, tiled=True, to=to, wait=wait),
    "all_gather_stacked": lambda x, axes, wait, to, dim: fspmd.all_gather(x, axes, axis=dim, to=to, wait=wait),
    "all_gather_uneven": lambda x, axes, wait, to, dim, size: fspmd.all_gather(
        x, axes, axis=dim, tiled=True, to=to, size=size, wait=wait
    ),
    "psum_scatter": lambda x, axes, wait, dim, size: fspmd.psum_scatter(
        x, axes, scatter_dimension=dim, tiled=True, wait=wait
    ),
    "psum_scatter_uneven": lambda x, axes, wait, dim, size: fspmd.psum_scatter(
        x, axes, scatter_dimension=dim, tiled=True, size=size, wait=wait
    ),
    "all_to_all": lambda x, axes, wait, split, concat: fspmd.all_to_all(x, axes, split, concat, tiled=True, wait=wait),
    "ppermute": lambda x, axes, wait, perm: fspmd.ppermute(x, axes, perm, wait=wait),
    "pbroadcast": lambda x, axes, wait, source: fspmd.pbroadcast(x, axes, source, wait=wait),
    "pcast": lambda x, axes, wait: fspmd.pcast(x, axes, to="varying"),
    "times_index": lambda x, axes, wait: x * (axis_index(axes) + 1),
    "where_index": lambda x, axes, wait, k: torch.where(axis_index(axes) == k, x, x.cos()),
    "row_of_index": lambda x, axes, wait: x[axis_index(axes) % x.shape[0]],
    "rows_from_index": lambda x, axes, wait: (lambda i: x[i : i + 1])(axis_index(axes) % x.shape[0]),  # noqa: PLC3002
}
NOT_WAITED = ("pcast", "times_index", "where_index", "row_of_index", "rows_from_index")


# --- the interpreter --------------------------------------------------------------------------------------------------


def block_of(x: Tensor, spec: tuple[Axes, ...], grid: Grid, at: Where) -> Tensor:
    """One rank's block of a global tensor."""
    for dim, axes in enumerate(spec):
        if axes:
            bounds = block_bounds(x.shape[dim], [grid.sizes[a] for a in axes])
            place = grid.index(axes, at)
            x = x.narrow(dim, *bounds[place])
    return x


def step_on_lists(step: Step, values: list[Values], grid: Grid) -> Values:
    """The result of one step at every coordinate."""
    operands = [values[i] for i in step.args]
    if step.name in LOCAL:
        return {at: LOCAL[step.name](*(v[at] for v in operands), *step.params) for at in grid.places}
    axes, _, *params = step.params
    (x,) = operands
    if step.name in ("psum_scatter", "psum_scatter_uneven"):
        params[1] = grid.lengths(params[1], axes)
    out: Values = {}
    for group in grid.groups(axes):
        out.update(zip(group, ON_LISTS[step.name]([x[at] for at in group], *params), strict=True))
    return out


def interpret(program: Program, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The global outputs: of values equal along an axis the first rank's."""
    grid = Grid(program.axes)
    values: list[Values] = [
        {at: block_of(x, spec, grid, at) for at in grid.places} for x, spec in zip(inputs, program.specs, strict=True)
    ]
    for step in program.steps:
        values.append(step_on_lists(step, values, grid))
    results = []
    for index, axes in program.outputs:
        ranks = next(grid.groups(axes))
        results.append(torch.cat([_leading(values[index][at]) for at in ranks]))
    return results


def _leading(x: Tensor) -> Tensor:
    return x if x.ndim else x[None]


# --- in a body --------------------------------------------------------------------------------------------------------


def body_of(program: Program, seen: list[Any]) -> Callable[..., tuple[Tensor, ...]]:
    """The same as a function of one rank's blocks; ``seen`` gets the type of every value."""

    def body(*blocks: Tensor) -> tuple[Tensor, ...]:
        values = list(blocks)
        for step in program.steps:
            operands = [values[i] for i in step.args]
            if step.name in LOCAL:
                values.append(LOCAL[step.name](*operands, *step.params))
                continue
            axes, wait, *params = step.params
            named: Any = axes[0] if len(axes) == 1 else axes
            out = IN_BODY[step.name](operands[0], named, wait, *params)
            values.append(out if wait or step.name in NOT_WAITED else out.wait())
        seen[:] = [fspmd.typeof(value) for value in values]
        return tuple(_leading(values[index]) for index, _ in program.outputs)

    return fspmd.checkpoint(body) if program.recompute else body
