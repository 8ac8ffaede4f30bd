"""Chains of views of a global tensor, written by chance, and writes through one of them or into the base.

Everything that was taken is held, or let go of by chance. A write is seen by all that is held, as torch has it, or it
is refused: it is never lost.
"""

from __future__ import annotations

import copy
import math
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fspmd import FspmdError, Mesh, P, Sharded, device_get, device_put, make_mesh, shard_map

F64 = torch.float64
Draw = random.Random
Made = Callable[[Any], Any]
MESHES = ((2,), (3,), (4,), (2, 3))
SHAPES = (
    *((1,), (2,), (3,), (7,), (8,), (12,)),
    *((4, 6), (1, 6), (6, 1), (5, 3), (3, 4), (2, 2), (8, 8), (1, 1), (4, 0)),
    *((1, 4, 6), (2, 3, 4), (4, 1, 3), (6, 2, 2), (1, 1, 5), (4, 4, 1), (3, 3, 3), (2, 1, 3, 4), (1, 4, 1, 2)),
)


class Link(NamedTuple):
    text: str
    f: Made


def dim_of(draw: Draw, x: Tensor) -> int:
    return draw.randrange(-x.ndim, x.ndim)


def other_shape(draw: Draw, n: int) -> tuple[int, ...]:
    rest, sizes = n, []
    while rest > 1 and len(sizes) < 3:
        sizes.append(draw.choice([k for k in range(1, rest + 1) if rest % k == 0]))
        rest //= sizes[-1]
    return (*sizes, rest)


def index(draw: Draw, x: Tensor) -> Any:
    found: list[Any] = []
    for size in x.shape[: draw.randint(1, max(1, x.ndim))]:
        if draw.random() < 0.15:
            found.append(None)
        part = slice(*(draw.choice([None, draw.randint(-size, size)]) for _ in range(2)))
        whole = slice(None, None, draw.choice([1, 1, 2, 3]))
        found.append(draw.choice([draw.randrange(-size, size) if size else slice(None), part, part, whole]))
    if draw.random() < 0.2:
        found.append(...)
    elif draw.random() < 0.2:
        found.insert(0, ...)
    while sum(one is not None and one is not ... for one in found) > x.ndim:
        found.pop()
    return tuple(found)


def factors(draw: Draw, x: Tensor) -> tuple[int, tuple[int, ...]]:
    dim = dim_of(draw, x)
    return dim, other_shape(draw, x.shape[dim])


def window(draw: Draw, x: Tensor) -> tuple[int, int, int]:
    dim = dim_of(draw, x)
    start = draw.randint(0, x.shape[dim])
    return dim, start, draw.randint(0, x.shape[dim] - start)


def windows(draw: Draw, x: Tensor) -> tuple[int, int, int]:
    dim = dim_of(draw, x)
    return dim, draw.randint(1, max(1, x.shape[dim])), draw.randint(1, 3)


def flattened(draw: Draw, x: Tensor) -> tuple[int, int]:
    start = draw.randrange(x.ndim)
    return start, draw.randrange(start, x.ndim)


def split_sizes(draw: Draw, x: Tensor) -> tuple[list[int], int]:
    dim = dim_of(draw, x)
    first = draw.randint(0, x.shape[dim])
    return [first, x.shape[dim] - first], dim


def grown(draw: Draw, x: Tensor) -> tuple[int, ...]:
    sizes = [draw.choice([n, 2]) if n == 1 else draw.choice([n, -1]) for n in x.shape]
    return (2, *sizes) if draw.random() < 0.3 else tuple(sizes)


def strided(draw: Draw, x: Tensor) -> tuple[Any, Any]:
    """Of a tensor that is dense: other places of its memory."""
    n = x.numel()
    size = draw.randint(1, max(1, n))
    return ((size,), (1,)) if draw.random() < 0.5 else ((max(1, n // 2),), (2 if n > 1 else 1,))


def none(draw: Draw, x: Tensor) -> tuple[()]:
    return ()


def dims(draw: Draw, x: Tensor) -> tuple[int, ...]:
    return (dim_of(draw, x),)


def two_dims(draw: Draw, x: Tensor) -> tuple[int, int]:
    return dim_of(draw, x), dim_of(draw, x)


def order(draw: Draw, x: Tensor) -> tuple[tuple[int, ...]]:
    return (tuple(draw.sample(range(x.ndim), x.ndim)),)


def place(draw: Draw, x: Tensor) -> tuple[int, int]:
    dim = dim_of(draw, x)
    return dim, draw.randrange(x.shape[dim])


def new_dim(draw: Draw, x: Tensor) -> tuple[int]:
    return (draw.randrange(-x.ndim - 1, x.ndim + 1),)


def pieces(draw: Draw, x: Tensor) -> tuple[int, int]:
    return draw.randint(1, 4), dim_of(draw, x)


def shape(draw: Draw, x: Tensor) -> tuple[tuple[int, ...]]:
    return (tuple(x.shape) if draw.random() < 0.2 else other_shape(draw, x.numel()),)


def diagonal(draw: Draw, x: Tensor) -> tuple[int, int, int]:
    return (draw.randint(-1, 1), *draw.sample(range(x.ndim), 2))


#: what a step draws, and what it does
STEPS: dict[str, tuple[Callable[[Draw, Tensor], Any], Callable[..., Any]]] = {
    "getitem": (lambda draw, x: (index(draw, x),), lambda x, i: x[i]),
    "getitem again": (lambda draw, x: (index(draw, x),), lambda x, i: x[i]),
    "select": (place, lambda x, d, i: x.select(d, i)),
    "narrow": (window, lambda x, *p: x.narrow(*p)),
    "transpose": (two_dims, lambda x, *p: x.transpose(*p)),
    "swapaxes": (two_dims, lambda x, *p: x.swapaxes(*p)),
    "permute": (order, lambda x, p: x.permute(p)),
    "movedim": (two_dims, lambda x, *p: x.movedim(*p)),
    "view": (shape, lambda x, s: x.view(s)),
    "view_as": (shape, lambda x, s: x.view_as(torch.empty(s, dtype=x.dtype))),
    "reshape": (shape, lambda x, s: x.reshape(s)),
    "flatten": (flattened, lambda x, *p: x.flatten(*p)),
    "ravel": (none, lambda x: x.ravel()),
    "unflatten": (factors, lambda x, *p: x.unflatten(*p)),
    "squeeze": (none, lambda x: x.squeeze()),
    "squeeze dim": (dims, lambda x, d: x.squeeze(d)),
    "unsqueeze": (new_dim, lambda x, d: x.unsqueeze(d)),
    "expand": (grown, lambda x, *s: x.expand(*s)),
    "expand_as": (none, lambda x: x.expand_as(torch.empty((2, *x.shape)))),
    "broadcast_to": (none, lambda x: torch.broadcast_to(x, (2, *x.shape))),
    "diagonal": (diagonal, lambda x, *p: x.diagonal(*p)),
    "unfold": (windows, lambda x, *p: x.unfold(*p)),
    "split": (pieces, lambda x, *p: x.split(*p)),
    "split sizes": (split_sizes, lambda x, *p: x.split(*p)),
    "tensor_split": (pieces, lambda x, *p: x.tensor_split(*p)),
    "hsplit": (none, lambda x: x.hsplit(2)),
    "chunk": (pieces, lambda x, *p: x.chunk(*p)),
    "unbind": (dims, lambda x, d: x.unbind(d)),
    "iter": (none, list),
    "bits": (none, lambda x: x.view({F64: torch.int64, torch.int64: F64}.get(x.dtype, F64))),
    "narrower bits": (none, lambda x: x.view(torch.int32)),
    "wider bits": (none, lambda x: x.view(torch.int64)),
    "detach": (none, lambda x: x.detach()),
    "torch.detach": (none, torch.detach),
    "data": (none, lambda x: x.data),
    "contiguous": (none, lambda x: x.contiguous()),
    "channels": (none, lambda x: x.contiguous(memory_format=torch.channels_last)),
    "as_strided": (strided, lambda x, *p: x.as_strided(*p)),
    "real": (none, lambda x: x.real),
    "conj": (none, lambda x: x.conj()),
    "positive": (none, lambda x: +x),
    "T": (none, lambda x: x.T if x.ndim == 2 else x.t()),
    "mT": (none, lambda x: x.mT),
    "adjoint": (none, lambda x: x.adjoint()),
    "as complex": (none, torch.view_as_complex),
    "imag": (none, lambda x: x.imag),
    "as real": (none, torch.view_as_real),
    "to": (none, lambda x: x.to(x.dtype)),
    "to copy": (none, lambda x: x.to(x.dtype, copy=True)),
    "type_as": (none, lambda x: x.type_as(x)),
    "double": (none, lambda x: x.double()),
    "cpu": (none, lambda x: x.cpu()),
    "alias": (none, torch.ops.aten.alias),
    "aten slice": (window, lambda x, d, a, n: torch.ops.aten.slice(x, d, a, a + n)),
    "atleast_2d": (none, torch.atleast_2d),
    "dropout": (none, lambda x: F.dropout(x, 0.5, training=False)),
    "resolve_conj": (none, lambda x: x.resolve_conj()),
    "clone": (none, lambda x: x.clone()),
    "copy.copy": (none, lambda x: x if x.requires_grad else copy.copy(x)),  # of a Sharded it is its graph, too
    "numpy T": (none, lambda x: x.H),
    "linalg.diagonal": (none, torch.linalg.diagonal),
    "broadcast_tensors": (none, lambda x: torch.broadcast_tensors(x)[0]),
    "values at": (none, lambda x: x[...]),
    "squeeze_": (none, lambda x: x[...].squeeze_()),
    "t_": (none, lambda x: x[...].t_()),
    "unsqueeze_": (new_dim, lambda x, d: x[...].unsqueeze_(d)),
}
#: of these more, as users take them most
OFTEN = ("getitem", "view", "reshape", "flatten", "transpose", "squeeze", "detach", "data", "bits", "contiguous")


def link(draw: Draw, x: Tensor) -> tuple[str, Made] | None:
    """A step that torch can take of x."""
    for _ in range(20):
        name = draw.choice([*STEPS, *OFTEN])
        drawn, call = STEPS[name]
        try:
            given = drawn(draw, x)
            out = call(x, *given)
        except (RuntimeError, ValueError, IndexError, TypeError, KeyError):
            continue
        many = isinstance(out, (list, tuple))
        if (not out or sum(one.numel() for one in out) > 300) if many else out.numel() > 300:
            continue

        def made(x: Any, call: Any = call, given: Any = given) -> Any:
            return call(x, *given)

        return f"{name}{given}", made
    return None


def _written(draw: Draw, x: Tensor) -> tuple[str, Callable[[Any], Any]]:
    value = float(draw.randint(2, 9))
    part = index(draw, x) if x.ndim else ()
    like = torch.arange(x.numel(), dtype=F64).reshape(x.shape).to(x.dtype)
    ways: dict[str, Callable[[Any], Any]] = {
        "add_": lambda x: x.add_(2),
        "add_ tensor": lambda x: x.add_(like),
        "mul_": lambda x: x.mul_(2),
        "fill_": lambda x: x.fill_(value),
        "zero_": lambda x: x.zero_(),
        "copy_": lambda x: x.copy_(like),
        "[...] =": lambda x: x.__setitem__(..., value),
        "[...] = tensor": lambda x: x.__setitem__(..., like),
        f"{part} =": lambda x: x.__setitem__(part, value),
        "+=": lambda x: x.__iadd__(2),
        "out=": lambda x: torch.add(like, 1, out=x),
        "foreach": lambda x: torch._foreach_add_([x], 2),
        "masked_fill_": lambda x: x.masked_fill_(like > 2, value),
        "mask =": lambda x: x.__setitem__(like > 2, value),
        "cumsum_": lambda x: x.cumsum_(0) if x.ndim else x.add_(1),
        "index_fill_": lambda x: x.index_fill_(0, torch.tensor([0]), 3) if x.ndim else x.add_(1),
    }
    if _overlaps(x):  # of other writes torch's result depends on how many elements its kernel takes at once
        ways = {name: ways[name] for name in ("fill_", "zero_", "[...] =", f"{part} =", "index_fill_")}
    name = draw.choice([*ways])
    return name, ways[name]


def _overlaps(x: Tensor) -> bool:
    """Whether elements share memory, as those of windows do."""
    places = sum(
        (torch.arange(n) * step).view(-1, *[1] * k)
        for k, (n, step) in enumerate(zip(x.shape[::-1], x.stride()[::-1], strict=True))
    )
    return isinstance(places, Tensor) and len(places.unique()) < x.numel()


def layout(draw: Draw, dims: int, axes: tuple[str, ...]) -> P:
    on: list[list[str]] = [[] for _ in range(dims)]
    words: dict[str, set[str]] = {"unreduced": set(), "reduced": set()}
    for name in draw.sample(axes, len(axes)):
        place = draw.choice([*range(dims), *range(dims), *range(dims), None, "unreduced"])
        if isinstance(place, int):
            on[place].append(name)
        elif place:
            words[place].add(name)
    return P(*map(tuple, on), **words)


class Lost(AssertionError):
    """A write that was lost, or seen where it should not."""


def base(draw: Draw, mesh: Mesh, followed: bool) -> tuple[str, Tensor, Any, Any, Any]:
    """A value, and what it is made of."""
    dims = draw.choice(SHAPES)
    whole = torch.linspace(-1, 1, math.prod(dims), dtype=F64).mul(3).sin().reshape(dims)
    spec = layout(draw, len(dims), mesh.axis_names)
    plain = whole.clone().requires_grad_(followed)
    leaf = device_put(whole.clone(), spec, mesh=mesh).requires_grad_(followed)
    text = f"{dims} {spec}"
    kind = draw.choice(["as it is", "as it is", "times 1", "body", "body that transposes", "strided"])
    even = all(n for n in dims) and leaf.spec.even
    if kind.startswith("body") and not (even and not spec.unreduced and len(dims) > 1):
        kind = "times 1"
    if kind == "as it is" and followed:
        kind = "times 1"
    y: Tensor
    if kind == "as it is":
        x, y = leaf, plain
    elif kind == "times 1":
        x, y = leaf * 1, plain * 1
    elif kind == "body":
        x = shard_map(lambda b: b * 1, mesh=mesh, in_specs=spec, out_specs=spec)(leaf)
        y = plain * 1
    elif kind == "strided":
        x, y = ((one.t() if one.ndim == 2 else one.transpose(0, -1)) * 1 for one in (leaf, plain))
    else:
        turned = P(*(spec[d] for d in reversed(range(len(dims)))))
        back = lambda b: (b * 1).permute(*reversed(range(b.ndim))).contiguous().permute(*reversed(range(b.ndim)))  # noqa: E731
        x = shard_map(back, mesh=mesh, in_specs=spec, out_specs=P(*(spec[d] for d in range(len(dims)))))(leaf)
        y = plain * 1
        if draw.random() < 0.5:
            turn = lambda b: (b * 1).permute(*reversed(range(b.ndim)))  # noqa: E731
            x = shard_map(turn, mesh=mesh, in_specs=spec, out_specs=turned)(leaf)
            y = (plain * 1).permute(*reversed(range(plain.ndim))).contiguous()
    return f"{text} {kind}", plain, leaf, y, x


@torch.no_grad()
def value(x: Any) -> Tensor:
    found: Tensor = (device_get(x) if isinstance(x, Sharded) else x).detach()
    return found.resolve_conj()


def same(mine: Any, plain: Tensor) -> bool:
    found = value(mine)
    if found.shape != plain.shape or found.dtype != plain.dtype:
        return False
    want = plain.detach()
    return torch.equal(found, want) or torch.allclose(found, want, rtol=1e-12, atol=1e-12, equal_nan=True)


def run(seed: int, transport: str | None = "simulation", ranks: int | None = None) -> str:
    """A program; what became of it, alike on all ranks.

    Raises:
        Lost: what is held is not what torch has.
    """
    draw = random.Random(seed)
    sizes = draw.choice([one for one in MESHES if ranks in (None, math.prod(one))])
    mesh = make_mesh(sizes, ("x", "y")[: len(sizes)], transport=transport)
    followed = draw.random() < 0.3
    text, plain_leaf, leaf, plain, mine = base(draw, mesh, followed)
    told = [f"{sizes} {text}{' followed' if followed else ''}"]
    held: list[tuple[str, Tensor, Any]] = [("base", plain, mine)]
    at = plain, mine
    for k in range(draw.randint(1, 4)):
        found = link(draw, at[0])
        if found is None:
            break
        name, f = found
        told.append(name)
        theirs = f(at[0])
        try:
            ours = f(at[1])
        except FspmdError as error:
            told.append(f"refused: {type(error).__name__}")
            break
        both = list(zip(theirs, ours, strict=True)) if isinstance(theirs, (list, tuple)) else [(theirs, ours)]
        for i, (a, b) in enumerate(both):
            if not same(b, a):
                raise Lost(f"wrong: {told}: {name}[{i}] {a} {value(b)}")
            held.append((f"{k}: {name}[{i}]", a, b))
        at = draw.choice(both)
        both = theirs = ours = a = b = None  # type: ignore[assignment]
    if draw.random() < 0.3:
        held = [one for one in held if one[0] == "base" or one[2] is at[1] or draw.random() < 0.5]
    elif draw.random() < 0.2:
        held = [one for one in held if one[0] == "base" or one[2] is not at[1]]
    at = None  # type: ignore[assignment]
    refused = True
    for _ in range(draw.randint(1, 2)):
        where = draw.choice([held[0], held[-1], held[-1], draw.choice(held)])
        name, write = _written(draw, where[1])
        told.append(f"{name} into {where[0]}")
        before = [one.detach().clone() for _, one, _ in held]
        try:
            write(where[1])
        except (RuntimeError, IndexError, TypeError):
            told.append("which torch refuses")
            return " | ".join(told)
        try:
            write(where[2])
        except FspmdError as error:
            text = re.sub(r"of which .*?, taken", "of which one, taken", str(error))  # of several copies any is named
            told.append(f"refused: {type(error).__name__} {text[:120]}")
            for (which, _, ours), old in zip(held, before, strict=True):
                if not same(ours, old):
                    raise Lost(f"{told}: refused, but {which} has {value(ours)} and not {old}") from error
            return " | ".join(told)
        refused = False
        for which, theirs, ours in held:
            if not same(ours, theirs):
                raise Lost(f"{told}: {which} has {value(ours)} and not {theirs.detach()}")
    if followed and not refused:
        told.append(_gradients(held, plain_leaf, leaf))
    return " | ".join(told)


def _gradients(held: list[tuple[str, Tensor, Any]], plain_leaf: Tensor, leaf: Any) -> str:
    def loss(values: list[Any]) -> Any:
        total: Any = 0.0
        for x in values:
            if x.requires_grad and x.dtype is F64:
                weight = torch.arange(1.0, x.numel() + 1, dtype=F64).reshape(tuple(x.shape)).cos()
                total = total + (x * weight).sum()
        return total

    try:
        theirs = loss([a for _, a, _ in held])
        (want,) = torch.autograd.grad(theirs, plain_leaf, allow_unused=True)
    except (RuntimeError, AttributeError, TypeError):
        return "without gradient"
    try:
        ours = loss([b for _, _, b in held])
        ours.backward()
    except FspmdError as error:
        return f"gradient refused: {type(error).__name__} {str(error)[:100]}"
    got = torch.zeros_like(plain_leaf) if leaf.grad is None else device_get(leaf.grad)
    want = torch.zeros_like(plain_leaf) if want is None else want
    if not torch.allclose(got, want, rtol=1e-10, atol=1e-10):
        raise Lost(f"gradient {got} and not {want}")
    return "gradient"


def check_seeds(start: int, stop: int, transport: str | None = "simulation", ranks: int | None = None) -> list[str]:
    """What became of each program."""
    found = []
    for seed in range(start, stop):
        try:
            found.append(run(seed, transport, ranks))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    return found
