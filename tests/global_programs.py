"""Programs on global tensors, written by chance: what a user's chain of torch calls may be, and its run."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fspmd import P, Sharded, with_spec

Draw = random.Random
Shape = tuple[int, ...]


class Kind(NamedTuple):
    """A step: how many values it takes; its parameters for their shapes, None if it cannot be; its call."""

    arity: int
    parameters: Callable[..., Any]
    call: Callable[..., Any]


class Step(NamedTuple):
    kind: str
    operands: tuple[int, ...]
    parameters: Any


class Program(NamedTuple):
    """Values are numbered: the leaves first, then what each step makes."""

    axes: tuple[int, ...]
    leaves: tuple[tuple[Shape, P], ...]
    steps: tuple[Step, ...]


def dim_of(draw: Draw, shape: Shape) -> int | None:
    return draw.randrange(-len(shape), len(shape)) if shape else None


def full_dim(draw: Draw, shape: Shape) -> int | None:
    """A dim with elements, which reductions without a neutral element need."""
    dims = [d for d, size in enumerate(shape) if size]
    return draw.choice(dims) if dims else None


def two_dims(draw: Draw, shape: Shape) -> tuple[int, int] | None:
    return (dim_of(draw, shape), dim_of(draw, shape)) if shape else None  # type: ignore[return-value]


def some_dims(draw: Draw, shape: Shape) -> Any:
    if not shape:
        return None
    return tuple(draw.sample(range(len(shape)), draw.randint(1, len(shape)))), draw.random() < 0.5


def window(draw: Draw, shape: Shape) -> Any:
    dim = dim_of(draw, shape)
    if dim is None:
        return None
    start = draw.randint(0, shape[dim])
    return dim, start, draw.randint(0, shape[dim] - start)


def other_shape(draw: Draw, shape: Shape) -> Any:
    """A shape of as many elements."""
    rest, sizes = math.prod(shape), []
    while rest > 1 and len(sizes) < 3:
        sizes.append(draw.choice([n for n in range(1, rest + 1) if rest % n == 0]))
        rest //= sizes[-1]
    return (*sizes, rest)


def index(draw: Draw, shape: Shape) -> Any:
    """A basic index, with what numpy and torch allow: ints, slices, None, Ellipsis."""
    if not shape or 0 in shape:
        return None
    found: list[Any] = []
    for size in shape[: draw.randint(1, len(shape))]:
        if draw.random() < 0.2:
            found.append(None)
        part = slice(*(draw.choice([None, draw.randint(-size, size)]) for _ in range(2)))
        found.append(draw.choice([draw.randrange(-size, size), part, part, slice(None, None, draw.randint(1, 3))]))
    if len(found) < len(shape) and draw.random() < 0.5:
        found.insert(0, ...)
        return tuple(found) if sum(i is not None and i is not ... for i in found) == len(shape) else tuple(found[1:])
    return tuple(found)


def rows(draw: Draw, shape: Shape) -> Any:
    dim = full_dim(draw, shape)
    if dim is None:
        return None
    return dim, tuple(draw.choices(range(shape[dim]), k=draw.randint(0, 6)))


def layout(draw: Draw, shape: Shape, axes: int = 0) -> P:
    """Each axis on a dim, nowhere, or pending."""
    names = draw.sample(["x", "y", "z"][:axes], axes)
    on: list[list[str]] = [[] for _ in shape]
    words: dict[str, set[str]] = {"unreduced": set(), "reduced": set()}
    for name in names:
        place = draw.choice([*range(len(shape)), *range(len(shape)), None, "unreduced", "reduced"])
        if isinstance(place, int):
            on[place].append(name)
        elif place:
            words[place].add(name)
    return P(*map(tuple, on), **words)


def nothing(draw: Draw, *shapes: Shape) -> tuple[()]:
    return ()


def alike(draw: Draw, *shapes: Shape) -> tuple[()] | None:
    """Operands that broadcast together to no more than 200 elements."""
    try:
        return () if math.prod(torch.broadcast_shapes(*shapes)) <= 200 else None
    except RuntimeError:
        return None


def matrices(draw: Draw, a: Shape, b: Shape) -> tuple[()] | None:
    return () if len(a) >= 1 and len(b) == 2 and a[-1] == b[-1] else None


def joined(draw: Draw, a: Shape, b: Shape) -> Any:
    dims = [d for d in range(len(a)) if len(a) == len(b) and a[:d] + a[d + 1 :] == b[:d] + b[d + 1 :]]
    return draw.choice(dims) if dims and math.prod(a) + math.prod(b) <= 200 else None


def written(draw: Draw, shape: Shape) -> Any:
    """A window, and what is done to it."""
    at = window(draw, shape)
    return at and (at, draw.choice(["mul_", "zero_", "add_", "relu_", "setitem", "transposed"]))


def write(p: Any, x: Any) -> Any:
    """A copy of which a part is written into, by way of a view."""
    (dim, start, length), how = p
    y = x.clone()
    part = y.narrow(dim, start, length)
    if how == "setitem":
        y[(slice(None),) * (dim % y.ndim) + (slice(start, start + length),)] = 0.25
    elif how == "transposed":
        part.transpose(0, -1).mul_(0.5)
    elif how == "zero_":
        part.zero_()
    elif how == "relu_":
        part.relu_()
    else:
        getattr(part, how)(0.5)
    return y


def write_from(p: Any, x: Any, y: Any) -> Any:
    out = x.clone()
    out += y
    out[:1] = 0.5 * out[:1]
    return out


def relaid(p: P, x: Any) -> Any:
    return with_spec(x, p) if isinstance(x, Sharded) else x * 1.0


def smaller(draw: Draw, a: Shape, b: Shape) -> tuple[()] | None:
    """The second broadcasts to the first."""
    try:
        return () if a and torch.broadcast_shapes(a, b) == torch.Size(a) else None
    except RuntimeError:
        return None


def _attention(q: Any, k: Any, v: Any) -> Any:
    """Of the kernel whose gradient has one in every version of torch."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


KINDS: dict[str, Kind] = {
    "scaled": Kind(1, lambda draw, s: draw.choice([0.5, -2.0]), lambda p, x: x * p),
    "shifted": Kind(1, nothing, lambda p, x: 1.5 - x),
    "pointwise": Kind(
        1,
        lambda draw, s: draw.choice(["sin", "tanh", "abs", "neg", "sigmoid", "relu", "square", "exp"]),
        lambda p, x: getattr(torch.sin(x), p)(),
    ),
    "softmax": Kind(1, full_dim, lambda p, x: x.softmax(p)),
    "logsumexp": Kind(1, full_dim, lambda p, x: x.logsumexp(p, keepdim=True)),
    "cumsum": Kind(1, dim_of, lambda p, x: x.cumsum(p)),
    "flip": Kind(1, dim_of, lambda p, x: x.flip(p)),
    "roll": Kind(1, dim_of, lambda p, x: x.roll(2, p)),
    "sum": Kind(1, some_dims, lambda p, x: x.sum(p[0], keepdim=p[1])),
    "total": Kind(1, nothing, lambda p, x: x.sum() if x.numel() != 1 else x.mean()),
    "mean": Kind(1, full_dim, lambda p, x: x.mean(p)),
    "amax": Kind(1, full_dim, lambda p, x: x.amax(p, keepdim=True)),
    "max": Kind(1, full_dim, lambda p, x: x.max(p).values),
    "var": Kind(1, full_dim, lambda p, x: x.var(p, correction=0)),
    "norm": Kind(1, dim_of, lambda p, x: (x + 4).norm(dim=p)),
    "transpose": Kind(1, two_dims, lambda p, x: x.transpose(*p)),
    "unsqueeze": Kind(
        1, lambda draw, s: draw.randint(0, len(s)) if len(s) < 4 else None, lambda p, x: x[None].movedim(0, p)
    ),
    "squeeze": Kind(1, nothing, lambda p, x: x.squeeze()),
    "reshape": Kind(1, other_shape, lambda p, x: x.reshape(p)),
    "flatten": Kind(1, nothing, lambda p, x: x.flatten()),
    "narrow": Kind(1, window, lambda p, x: x.narrow(*p)),
    "index": Kind(1, index, lambda p, x: x[p]),
    "rows": Kind(1, rows, lambda p, x: x.index_select(p[0], torch.tensor(p[1], dtype=torch.int64))),
    "chunk": Kind(1, full_dim, lambda p, x: x.chunk(3, p)[-1]),
    "unbind": Kind(1, full_dim, lambda p, x: x.unbind(p)[-1]),
    "expand": Kind(
        1, lambda draw, s: () if math.prod(s) <= 40 and len(s) < 4 else None, lambda p, x: x.expand(3, *x.shape)
    ),
    "repeat": Kind(1, lambda draw, s: () if s and math.prod(s) <= 60 else None, lambda p, x: x.repeat_interleave(2, 0)),
    "layer_norm": Kind(1, lambda draw, s: () if s and s[-1] > 1 else None, lambda p, x: F.layer_norm(x, x.shape[-1:])),
    "tril": Kind(1, lambda draw, s: () if len(s) >= 2 else None, lambda p, x: x.tril()),
    "pad": Kind(1, lambda draw, s: () if s and math.prod(s) < 100 else None, lambda p, x: F.pad(x, (1, 2), value=0.5)),
    "sort": Kind(1, full_dim, lambda p, x: x.sort(p).values),
    "masked": Kind(1, nothing, lambda p, x: x.masked_fill(x > 0.2, -1.0)),
    "diagonal": Kind(1, lambda draw, s: () if len(s) >= 2 else None, lambda p, x: x.diagonal(dim1=0, dim2=-1)),
    "write": Kind(1, written, write),
    "relaid": Kind(1, layout, relaid),
    "std": Kind(
        1,
        lambda draw, s: None if 0 in s else some_dims(draw, s),
        lambda p, x: x.var(p[0], correction=0, keepdim=p[1]).add(0.1).sqrt(),
    ),
    "prod": Kind(1, dim_of, lambda p, x: x.prod(p)),
    "cumprod": Kind(1, dim_of, lambda p, x: x.cumprod(p)),
    "topk": Kind(1, full_dim, lambda p, x: x.topk(1, p).values),
    "movedim": Kind(1, two_dims, lambda p, x: x.movedim(*p)),
    "square": Kind(1, lambda draw, s: () if len(s) == 2 else None, lambda p, x: x.T @ x),
    "outer": Kind(1, lambda draw, s: () if len(s) == 1 else None, lambda p, x: torch.outer(x, 2 * x)),
    "cross_entropy": Kind(
        1,
        lambda draw, s: () if len(s) == 2 and 0 not in s else None,
        lambda p, x: F.cross_entropy(x, torch.arange(x.shape[0]) % x.shape[1], reduction="none"),
    ),
    "own_rows": Kind(
        1, lambda draw, s: () if s and 0 not in s else None, lambda p, x: x[(torch.arange(4) * 3) % x.shape[0]]
    ),
    "sorted_by": Kind(1, full_dim, lambda p, x: x.take_along_dim((x + 1).argsort(p), p)),
    "scattered": Kind(1, full_dim, lambda p, x: torch.zeros_like(x).scatter_add(p, x.argsort(p) // 2, x)),
    "put": Kind(
        1,
        lambda draw, s: () if s and 0 not in s else None,
        lambda p, x: x.index_add(0, torch.tensor([0, 0]), torch.ones(2, *x.shape[1:], dtype=x.dtype)),
    ),
    "conv": Kind(
        1,
        lambda draw, s: () if len(s) == 3 and s[-1] >= 2 and 0 not in s else None,
        lambda p, x: F.conv1d(
            x, torch.linspace(-1, 1, 4 * x.shape[1], dtype=x.dtype).reshape(2, x.shape[1], 2), padding=1
        ),
    ),
    "pool": Kind(
        1, lambda draw, s: () if len(s) == 3 and s[-1] >= 2 and 0 not in s else None, lambda p, x: F.avg_pool1d(x, 2, 1)
    ),
    "attention": Kind(
        1,
        lambda draw, s: () if len(s) == 3 and 0 not in s else None,
        lambda p, x: _attention(x, 2 * x, x + 1),
    ),
    "rms_norm": Kind(1, lambda draw, s: () if s and s[-1] > 1 else None, lambda p, x: F.rms_norm(x, x.shape[-1:])),
    "detached": Kind(1, nothing, lambda p, x: x.detach() * x),
    "add": Kind(2, alike, lambda p, x, y: x + y),
    "subtract": Kind(2, alike, lambda p, x, y: x - 2 * y),
    "multiply": Kind(2, alike, lambda p, x, y: x * y),
    "maximum": Kind(2, alike, lambda p, x, y: torch.maximum(x, y)),
    "where": Kind(2, alike, lambda p, x, y: torch.where(x > y, x, 2 * y)),
    "matmul": Kind(2, matrices, lambda p, x, y: x @ y.T),
    "linear": Kind(2, matrices, lambda p, x, y: F.linear(x, y)),
    "einsum": Kind(
        2,
        lambda draw, a, b: () if a and b and a[0] == b[0] and math.prod(a) * math.prod(b) <= 400 else None,
        lambda p, x, y: torch.einsum("i...,ij->j...", x, y.reshape(y.shape[0], -1)) if y.numel() else x.sum(0),
    ),
    "addcmul": Kind(2, alike, lambda p, x, y: torch.addcmul(x, x, y, value=0.5)),
    "mse": Kind(2, lambda draw, a, b: () if a == b and 0 not in a else None, lambda p, x, y: F.mse_loss(x, y)),
    "distance": Kind(2, alike, lambda p, x, y: (x - y).abs().clamp(0.1, 2.0)),
    "cat": Kind(2, joined, lambda p, x, y: torch.cat([x, y, x], p)),
    "stack": Kind(2, lambda draw, a, b: () if a == b and len(a) < 4 else None, lambda p, x, y: torch.stack([x, y], -1)),
    "write_from": Kind(2, smaller, write_from),
}


def program(seed: int, most: int = 8) -> Program:
    """A mesh, some leaves and their layouts, and steps that can be done on the shapes they meet."""
    draw = random.Random(seed)
    axes = draw.choice([(4,), (2, 2), (2, 3), (1, 4), (6,)])
    first = some_shape(draw)
    shapes = [first, first, some_shape(draw)]  # so that some fit together
    leaves = tuple((shape, layout(draw, shape, len(axes))) for shape in shapes)
    values = [torch.ones(shape, device="meta") for shape in shapes]
    steps: list[Step] = []
    while len(steps) < most:
        name = draw.choice(sorted(KINDS))
        kind = KINDS[name]
        latest = [len(values) - 1] if steps and draw.random() < 0.7 else []
        operands = [*latest, *(draw.randrange(len(values)) for _ in range(kind.arity - len(latest)))]
        draw.shuffle(operands)
        sizes = [tuple(values[i].shape) for i in operands]
        found = layout(draw, sizes[0], len(axes)) if name == "relaid" else kind.parameters(draw, *sizes)
        if found is None or (sizes[0] == () and draw.random() < 0.8):
            continue
        out = kind.call(found, *(torch.ones(values[i].shape) for i in operands))
        values.append(out.to("meta"))
        steps.append(Step(name, tuple(operands), found))
    return Program(axes, leaves, tuple(steps))


def some_shape(draw: Draw) -> Shape:
    """Up to three dims and 150 elements; empty seldom."""
    while True:
        shape = tuple(
            draw.choice([1, 2, 3, 4, 5, 6, 7, 8, draw.choice([0, 12])]) for _ in range(draw.choice([0, 1, 2, 2, 3, 3]))
        )
        if math.prod(shape) <= 150:
            return shape


def run(program: Program, leaves: list[Any]) -> list[Any]:
    """All values of the program: the leaves, and what each step makes."""
    values = list(leaves)
    for step in program.steps:
        values.append(KINDS[step.kind].call(step.parameters, *(values[i] for i in step.operands)))
    return values


def leaf(i: int, shape: Shape) -> Tensor:
    """Values without ties."""
    return (torch.arange(math.prod(shape), dtype=torch.float64) * (1.7 + i) + i + 0.3).sin().mul(1.3).reshape(shape)
