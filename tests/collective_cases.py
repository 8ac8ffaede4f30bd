"""Generated calls of every collective, a judge for them, and one program that runs on any transport.

A case is one collective on one mesh. `expected` is the judge: a plain loop over mesh coordinates on a list of tensors,
one per rank, differentiated by torch itself. `run_case` is the same call in a ``shard_map`` body. Values are random
bytes where data is only moved, and small integers where it is added, so that every order of summation gives the same
bits.
"""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import fspmd
from fspmd import Mesh, P, make_mesh, shard_map
from fspmd.transport.frame import frame_over
from fspmd.transport.local_tensor import shards_of

NAMES = ("a", "b", "c")
FLOATS = ("float32", "float64", "float16", "bfloat16")
COMPLEX = ("complex64", "complex128", "complex32")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
BITS = ("float4_e2m1fn_x2", "bits8", "bits16")
MOVED = (*FLOATS, *COMPLEX, *INTEGERS, "bool", *FLOAT8, *BITS)
ADDED = (*FLOATS, *COMPLEX, *INTEGERS, "bool")
ORDERED = (*FLOATS, *INTEGERS, "bool")
AVERAGED = (*FLOATS, "complex64", "complex128", "int8", "int16", "int32", "int64", "uint8", "bool")
DIFFERENTIABLE = ("float32", "float64", "bfloat16", "float16", "complex64", "complex128")

#: name -> dtypes
CALLS = {
    "psum": ADDED,
    "pmean": AVERAGED,
    "pmax": ORDERED,
    "pmin": ORDERED,
    "all_gather": MOVED,
    "psum_scatter": ADDED,
    "all_to_all": MOVED,
    "pswapaxes": MOVED,
    "ppermute": MOVED,
    "pshuffle": MOVED,
    "pbroadcast": MOVED,
}
ADDING = ("psum", "pmean", "pmax", "pmin", "psum_scatter")


@dataclass(frozen=True)
class Case:
    """One collective: where, over which axes, of what."""

    world: int
    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...] | None
    axes: tuple[str, ...]
    call: str
    dtype: str
    block: tuple[int, ...]  # shape of x; `uneven` names the dim whose size is the global one
    options: tuple[tuple[str, Any], ...] = ()
    uneven: int | None = None
    state: str = "V"  # of x over the axes: V, I (the call casts it) or U
    memory: str = "contiguous"
    wait: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES[: len(self.mesh_shape)]

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.names, self.mesh_shape, strict=True))

    @property
    def n(self) -> int:
        return math.prod(self.sizes[axis] for axis in self.axes)

    @property
    def option(self) -> dict[str, Any]:
        return dict(self.options)

    def seed(self, salt: str) -> int:
        return zlib.crc32(f"{self!r}{salt}".encode())

    def mesh(self, transport: str) -> Mesh:
        return make_mesh(self.mesh_shape, self.names, ranks=self.ranks, transport=transport, device="cpu")


#: dtypes torch only moves: a judge that looks at their bits
RAW = {torch.float4_e2m1fn_x2: torch.uint8, torch.bits8: torch.uint8, torch.bits16: torch.int16}


def raw(x: Tensor) -> Tensor:
    return x.view(RAW.get(x.dtype, x.dtype))


def dtype_of(case: Case) -> torch.dtype:
    found: torch.dtype = getattr(torch, case.dtype)
    return found


# --- lists of blocks, one per coordinate in row-major order ---------------------------------------------------------


def coordinates(case: Case) -> list[dict[str, int]]:
    """The coordinates of all ranks of the mesh."""
    return [
        dict(zip(case.names, at, strict=True)) for at in itertools.product(*(range(size) for size in case.mesh_shape))
    ]


def groups(case: Case, axes: tuple[str, ...]) -> list[list[int]]:
    """Positions of ranks that talk to one another, in the order of ``axes``, major first."""
    places: dict[Any, dict[int, int]] = {}
    for position, at in enumerate(coordinates(case)):
        rank = 0
        for axis in axes:
            rank = rank * case.sizes[axis] + at[axis]
        rest = tuple(at[axis] for axis in case.names if axis not in axes)
        places.setdefault(rest, {})[rank] = position
    found = [[members[i] for i in range(len(members))] for members in places.values()]
    chosen = case.option.get("axis_index_groups")
    return [[g[i] for i in some] for g in found for some in chosen] if chosen else found


def chunks(x: Tensor, parts: tuple[int, ...], dim: int) -> list[Tensor]:
    """torch.chunk by each size in turn, with the empty blocks that torch.chunk leaves out."""
    pieces = [x]
    for n in parts:
        finer = []
        for piece in pieces:
            cut = list(piece.chunk(n, dim)) if piece.shape[dim] else []
            finer += cut + [piece.narrow(dim, 0, 0)] * (n - len(cut))
        pieces = finer
    return pieces


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int, added: bool) -> Tensor:
    """Random bytes, or small integers."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    if added and dtype not in RAW:
        low = -3 if dtype.is_signed else 0
        whole = torch.randint(low, 4, shape, generator=generator)
        if dtype.is_complex:
            return torch.complex(whole.double(), torch.randint(-3, 4, shape, generator=generator).double()).to(dtype)
        return whole.to(dtype)
    size = torch.empty((), dtype=dtype).element_size()
    raw = torch.randint(256, (*shape, size), generator=generator, dtype=torch.uint8)
    return raw.view(-1).view(dtype).view(shape)


def operand(case: Case) -> list[Tensor]:
    """x on every rank; equal along the axes where the state is I."""
    dtype, added = dtype_of(case), case.call in ADDING
    if case.uneven is None:
        blocks = [draw(case.block, dtype, case.seed(f"x{i}"), added) for i in range(math.prod(case.mesh_shape))]
        if case.state == "I":
            for group in groups(replace(case, options=()), case.axes):
                for i in group:
                    blocks[i] = blocks[group[0]]
        return blocks
    found: list[Tensor] = [torch.empty(0)] * math.prod(case.mesh_shape)
    for number, group in enumerate(groups(case, case.axes)):
        whole = draw(case.block, dtype, case.seed(f"x{number}"), added)
        if case.call == "psum_scatter":  # blocks are whole, the result is uneven
            for i in group:
                found[i] = draw(case.block, dtype, case.seed(f"x{i}"), added)
            continue
        parts = tuple(case.sizes[axis] for axis in case.axes)
        for i, piece in zip(group, chunks(whole, parts, case.uneven), strict=True):
            found[i] = piece.contiguous()
    return found


def like(blocks: list[Tensor], case: Case, salt: str, equal_over: tuple[str, ...] = ()) -> list[Tensor]:
    """Small integers of the shapes of ``blocks``, equal along some axes."""
    found = [draw(tuple(b.shape), b.dtype, case.seed(f"{salt}{i}"), True) for i, b in enumerate(blocks)]
    if equal_over:
        for group in groups(replace(case, options=()), equal_over):
            for i in group:
                found[i] = found[group[0]]
    return found


def in_memory(x: Tensor, memory: str) -> Tensor:
    """The same values, laid out otherwise."""
    if memory == "transposed" and x.ndim > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if memory == "strided" and x.dtype not in RAW:
        return torch.stack([x, x], -1).select(-1, 1)
    if memory == "expanded" and x.ndim and x.shape[0]:
        return x.narrow(0, 0, 1).expand(x.shape)
    if memory == "conj" and x.is_complex():
        return x.conj()
    if memory == "negative" and x.dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        return torch._neg_view(x.where(~x.isnan(), 1))  # the bits of a negated nan are torch's affair
    return x


def same(a: Tensor, b: Tensor, bits: bool = False, close: bool = False) -> bool:
    """Equal dtypes, shapes and values; bit by bit where data was only moved (a sum may lose the sign of a zero)."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    if not a.numel():
        return True
    a, b = (t.detach().resolve_conj().resolve_neg().contiguous().view(-1) for t in (a, b))
    if bits:
        return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    a, b = (torch.view_as_real(t) if t.is_complex() else t for t in (a, b))
    if not close:
        return torch.equal(a, b)
    tolerance = 8 * torch.finfo(a.dtype).eps
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def moved(case: Case) -> bool:
    """Whether the result has the very bits of the operand."""
    return case.call not in ADDING


def rounded(case: Case) -> bool:
    """Whether a division rounds, so that the judge's order of operations shows."""
    return case.call in ("pmean", "pmax", "pmin") and dtype_of(case).is_floating_point | dtype_of(case).is_complex


# --- the judge: a loop over coordinates -----------------------------------------------------------------------------


def _add(blocks: list[Tensor]) -> Tensor:
    if blocks[0].dtype is torch.bool:
        return torch.stack(blocks).any(0)
    if not blocks[0].is_floating_point() and not blocks[0].is_complex():
        return torch.stack([b.to(torch.int64) for b in blocks]).sum(0).to(blocks[0].dtype)
    total = blocks[0]
    for block in blocks[1:]:
        total = total + block
    return total


def _best(blocks: list[Tensor], largest: bool) -> Tensor:
    dtype = blocks[0].dtype
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        values = [[int(v) for v in b.flatten().tolist()] for b in blocks]
        chosen = [(max if largest else min)(column) for column in zip(*values, strict=True)]
        return torch.tensor(chosen, dtype=dtype).view(blocks[0].shape)
    stacked = torch.stack(blocks)
    return stacked.amax(0) if largest else stacked.amin(0)


def _group_result(case: Case, x: list[Tensor]) -> list[Tensor]:
    """What each rank of one group gets, ``x`` in group order."""
    dtype = x[0].dtype
    if dtype in RAW:
        return [y.view(dtype) for y in _group_result(case, [raw(b) for b in x])]
    n, o = len(x), case.option
    dim = o.get("axis", o.get("scatter_dimension", 0))
    parts = tuple(case.sizes[axis] for axis in case.axes) if "size" in o else (n,)
    tiled = o.get("tiled", False)
    if case.call == "psum":
        return [_add([b.to(torch.int64) if b.dtype is torch.bool else b for b in x])] * n
    if case.call == "pmean":
        return [_add([b.to(torch.int64) if b.dtype is torch.bool else b for b in x]) / n] * n
    if case.call in ("pmax", "pmin"):
        return [_best(x, case.call == "pmax")] * n
    if case.call == "all_gather":
        return [torch.cat(x, dim) if tiled else torch.stack(x, dim)] * n
    if case.call == "psum_scatter":
        total = _add(x)
        return chunks(total, parts, dim) if tiled else [total.select(dim, i) for i in range(n)]
    if case.call in ("all_to_all", "pswapaxes"):
        split, concat = o.get("split_axis", dim), o.get("concat_axis", dim)
        if tiled:
            return [torch.cat([chunks(b, parts, split)[i] for b in x], concat) for i in range(n)]
        return [torch.stack([b.select(split, i) for b in x], concat) for i in range(n)]
    if case.call == "pbroadcast":
        return [x[o["source"]]] * n
    pairs = o["perm"] if case.call == "ppermute" else [(source, i) for i, source in enumerate(o["perm"])]
    found = [torch.zeros_like(b) for b in x]
    for source, destination in pairs:
        found[destination] = x[source]
    return found


def forward(case: Case, x: list[Tensor]) -> list[Tensor]:
    """What each rank gets."""
    found: list[Tensor] = [x[0]] * len(x)
    for group in groups(case, case.axes):
        for i, y in zip(group, _group_result(case, [x[i] for i in group]), strict=True):
            found[i] = y
    return found


def result_state(case: Case) -> str:
    """The type of the result over the axes."""
    if case.call in ("psum", "pmean", "pmax", "pmin"):
        return "V" if case.option.get("axis_index_groups") else "I"
    return {"invarying": "I", "reduced": "R"}.get(case.option.get("to", ""), "V")


@dataclass
class Outcome:
    """On each rank: the result, the gradient of x for a cotangent, and the gradient of the cotangent for that."""

    y: list[Tensor]
    gx: list[Tensor] = field(default_factory=list)
    gct: list[Tensor] = field(default_factory=list)


def differentiable(case: Case) -> bool:
    """Whether gradients are asked for: where torch differentiates the dtype."""
    return case.dtype in DIFFERENTIABLE


@dataclass
class Inputs:
    """x, the cotangent of the result and the cotangent of the gradient, on every rank."""

    x: list[Tensor]
    ct: list[Tensor]
    v: list[Tensor]


def inputs(case: Case) -> Inputs:
    """The inputs of a case, drawn from its seed."""
    x = operand(case)
    with torch.no_grad():
        y = forward(case, [in_memory(b, case.memory) for b in x])
    state = result_state(case)
    ct = like(y, case, "ct", case.axes if state == "I" else ())
    v = like(x, case, "v", case.axes if case.state == "I" else ())
    return Inputs(x, ct, v)


def _once(case: Case, blocks: list[Tensor], axes: tuple[str, ...]) -> tuple[list[int], list[Tensor]]:
    """A fresh leaf per group of ranks that hold one value together, and which leaf each rank holds."""
    owner = list(range(len(blocks)))
    if axes:
        for group in groups(replace(case, options=()), axes):
            for i in group:
                owner[i] = group[0]
    return owner, [block.clone().requires_grad_() for block in blocks]


def expected(case: Case, given: Inputs) -> Outcome:
    """The judge's results."""
    if not differentiable(case):
        return Outcome([y.contiguous() for y in forward(case, [in_memory(b, case.memory) for b in given.x])])
    owner, leaves = _once(case, given.x, case.axes if case.state == "I" else ())
    y = forward(case, [in_memory(leaves[i], case.memory) for i in owner])
    once = case.axes if result_state(case) == "I" else ()
    ct_owner, ct_leaves = _once(case, given.ct, once)
    mine = [i for i in sorted(set(ct_owner)) if y[i].requires_grad]  # zeros of a ppermute need none
    gx: Any = [None] * len(leaves)
    if mine:
        gx = torch.autograd.grad(
            [y[i] for i in mine], leaves, [ct_leaves[i] for i in mine], create_graph=True, allow_unused=True
        )
    whole = [g if g is not None else torch.zeros_like(x) for g, x in zip(gx, leaves, strict=True)]
    followed = [i for i in sorted(set(owner)) if whole[i].requires_grad]
    gct: list[Any] = [None] * len(ct_leaves)
    if followed:
        gct = list(
            torch.autograd.grad(
                [whole[i] for i in followed], ct_leaves, [given.v[i] for i in followed], allow_unused=True
            )
        )
    second = [g if g is not None else torch.zeros_like(c) for g, c in zip(gct, ct_leaves, strict=True)]
    return Outcome([b.detach() for b in y], [whole[i].detach() for i in owner], [second[i].detach() for i in ct_owner])


# --- the same call in a body ----------------------------------------------------------------------------------------


def feed(case: Case, blocks: list[Tensor], equal_over: tuple[str, ...]) -> tuple[Tensor, P]:
    """A global tensor and its spec, from which each rank gets its block with two leading dims of one in front."""
    others = tuple(axis for axis in case.names if axis not in case.axes)
    rows = []
    shapes = {tuple(block.shape) for block in blocks}
    uneven = [d for d in range(blocks[0].ndim) if len({shape[d] for shape in shapes}) > 1]
    for group in groups(replace(case, options=()), case.axes):
        members = [raw(blocks[i]) for i in (group[:1] if equal_over else group)]
        rows.append(torch.cat(members, uneven[0]).unsqueeze(0) if uneven else torch.stack(members))
    whole = torch.stack(rows).view(blocks[0].dtype)
    if equal_over:
        return whole, P(others or None)
    if uneven:
        return whole, P(others or None, None, *(None,) * uneven[0], case.axes)
    return whole, P(others or None, case.axes)


def _call(case: Case, x: Tensor) -> Any:
    o = case.option
    function: Callable[..., Any] = getattr(fspmd, case.call)
    name: Any = case.axes[0] if len(case.axes) == 1 else case.axes
    positional = [o.pop(key) for key in ("perm", "source") if key in o]
    if case.call == "pswapaxes":
        positional = [o.pop("axis")]
    if not case.wait:
        return function(x, name, *positional, **o, wait=False).wait()
    return function(x, name, *positional, **o)


def run_case(case: Case, transport: str) -> list[list[Tensor]] | None:
    """y, gx and gct on the ranks this process plays; None on a process outside the mesh."""
    mesh = case.mesh(transport)
    if mesh.coordinate() is None:
        return None
    given = inputs(case)
    results: list[Tensor] = []
    x, x_spec = feed(case, given.x, case.axes if case.state == "I" else ())
    state = result_state(case)
    ct, ct_spec = feed(case, given.ct, case.axes if state == "I" else ())
    v, v_spec = feed(case, given.v, case.axes if case.state == "I" else ())

    def body(x: Tensor, ct: Tensor, v: Tensor) -> Tensor:
        x, ct, v = (t.squeeze(0).squeeze(0) for t in (x, ct, v))
        follow = differentiable(case)
        x = x.clone()
        if follow:
            x.requires_grad_()
        z = fspmd.pcast(x, case.axes, to="unreduced") if case.state == "U" else x
        y = _call(case, in_memory(z, case.memory))
        results.append(y)
        if follow:
            ct = ct.clone().requires_grad_()
            cotangent = fspmd.pcast(ct, case.axes, to="unreduced") if state == "R" else ct
            (gx,) = torch.autograd.grad(y, x, cotangent, create_graph=True)
            results.append(gx)
            (gct,) = torch.autograd.grad(gx, ct, v, allow_unused=True)
            results.append(torch.zeros_like(ct) if gct is None else gct)
        return torch.zeros(())

    shard_map(body, mesh=mesh, in_specs=(x_spec, ct_spec, v_spec), out_specs=P())(x, ct, v)
    if transport == "simulation":
        return [[b.detach() for b in shards_of(r.detach(), frame_over(mesh, mesh.axis_names))] for r in results]
    return [[r.detach()] for r in results]


# --- generation -----------------------------------------------------------------------------------------------------

#: (mesh shape, ranks or None for 0, 1, 2 ...) by number of processes
MESHES: dict[int, tuple[tuple[tuple[int, ...], tuple[int, ...] | None], ...]] = {
    4: (
        ((4,), None),
        ((4,), (2, 0, 3, 1)),
        ((3,), (3, 0, 2)),
        ((2, 2), None),
        ((2, 2), (3, 1, 0, 2)),
        ((1, 4), None),
        ((2, 1, 2), (1, 3, 2, 0)),
        ((2,), (3, 1)),
    ),
    6: (
        ((6,), None),
        ((3, 2), None),
        ((2, 3), None),
        ((2, 3), (5, 0, 3, 1, 4, 2)),
        ((3, 2), (0, 2, 4, 1, 3, 5)),
        ((2, 2), (5, 1, 0, 3)),
        ((5,), (4, 2, 0, 1, 3)),
        ((1, 2, 3), None),
        ((2, 3, 1), (3, 4, 5, 0, 1, 2)),
    ),
}
SHAPES = ((), (3,), (2, 3), (0, 3), (3, 1, 2))
MEMORY = ("contiguous", "contiguous", "transposed", "strided", "expanded", "conj", "negative")


def index_groups(n: int, equal: bool) -> list[Any]:
    """Some partitions of the positions, None for no groups."""
    found: list[Any] = [None]
    if n % 2 == 0:
        found.append(tuple(tuple(range(i, n, 2)) for i in range(2)) if n > 2 else ((1, 0),))
        found.append(tuple((n - 1 - i, i) for i in range(n // 2)))
    if n > 2 and not equal:
        found.append(((2, 0), (1, *range(3, n))))
    return found


def variants(call: str, parts: tuple[int, ...]) -> list[dict[str, Any]]:
    """Blocks, options, uneven dims and types to call ``call`` with over axes of these sizes."""
    n = math.prod(parts)
    found: list[dict[str, Any]] = []

    def add(block: tuple[int, ...], uneven: int | None = None, states: str = "V", **options: Any) -> None:
        kept = tuple((key, value) for key, value in options.items() if value is not None)
        if dict(kept).get("axis_index_groups"):
            states = states.replace("U", "")
        found.extend({"block": block, "options": kept, "uneven": uneven, "state": state} for state in states)

    for shape in SHAPES:
        if call in ("psum", "pmean", "pmax", "pmin"):
            for chosen in index_groups(n, call == "pmean"):
                add(shape, states="VIU" if call == "psum" else "VI", axis_index_groups=chosen)
        elif call == "all_gather":
            for to, chosen in itertools.product(("varying", "invarying", "reduced"), index_groups(n, True)):
                if chosen and to != "varying":
                    continue
                states = "V" if to == "reduced" else "VI"
                for axis in range(-len(shape) - 1, len(shape) + 1):
                    add(shape, states=states, axis=axis, to=to, axis_index_groups=chosen)
                for axis in range(-len(shape), len(shape)):
                    add(shape, states=states, axis=axis, to=to, tiled=True, axis_index_groups=chosen)
        elif call in ("ppermute", "pshuffle", "pbroadcast"):
            ring, back = [(i + 1) % n for i in range(n)], [n - 1 - i for i in range(n)]
            if call == "pbroadcast":
                for source in {0, n - 1, n // 2}:
                    add(shape, source=source)
            elif call == "pshuffle":
                for order in (ring, back):
                    add(shape, perm=tuple(order))
            else:
                for pairs in (enumerate(ring), enumerate(back), [(0, n - 1)], []):
                    add(shape, states="VI", perm=tuple(pairs))
        elif call == "psum_scatter":
            for chosen, axis in itertools.product(index_groups(n, True), range(-len(shape), len(shape))):
                count = len(chosen[0]) if chosen else n
                whole = list(shape)
                whole[axis] *= count
                states = "VIU" if not chosen else "VI"
                add(tuple(whole), states=states, scatter_dimension=axis, tiled=True, axis_index_groups=chosen)
                whole[axis] = count
                add(tuple(whole), states=states, scatter_dimension=axis, axis_index_groups=chosen)
        elif call == "pswapaxes":
            for chosen, axis in itertools.product(index_groups(n, True), range(-len(shape), len(shape))):
                whole = list(shape)
                whole[axis] = len(chosen[0]) if chosen else n
                add(tuple(whole), axis=axis, axis_index_groups=chosen)
        elif call == "all_to_all":
            dims = range(-len(shape), len(shape))
            for chosen, split, concat in itertools.product(index_groups(n, True), dims, dims):
                count = len(chosen[0]) if chosen else n
                whole = list(shape)
                whole[split] *= count
                names = {"split_axis": split, "concat_axis": concat, "axis_index_groups": chosen}
                add(tuple(whole), states="VI", tiled=True, **names)
                whole[split] = count
                add(tuple(whole), states="VI", **names)
    _add_uneven(call, n, add)
    return found


def _add_uneven(call: str, n: int, add: Callable[..., None]) -> None:
    for size, axis in itertools.product((n + 1, 2 * n - 1, 1, 0, n - 1, 2 * n), (0, 1, -1)):
        shape = [2, 3]
        shape[axis] = size
        dim = axis % 2
        if call == "all_gather":
            for to in ("varying", "invarying", "reduced"):
                add(tuple(shape), dim, axis=axis, tiled=True, size=size, to=to)
        elif call == "psum_scatter":
            add(tuple(shape), dim, states="VU", scatter_dimension=axis, tiled=True, size=size)
        elif call == "all_to_all":
            for other in (2 * n, n + 2, 1, 0, n - 1):
                shape[1 - dim] = other
                add(tuple(shape), dim, split_axis=1 - dim, concat_axis=axis, tiled=True, size=size)


def _orders(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [order for k in range(1, len(names) + 1) for order in itertools.permutations(names, k)]


def _complete(rng: random.Random, world: int, mesh: Any, axes: tuple[str, ...], call: str, variant: Any) -> Case:
    dtype = rng.choice(CALLS[call])
    if rng.random() < 0.5:
        dtype = rng.choice(DIFFERENTIABLE[: 4 if call in ("pmax", "pmin") else 6])
    memory, wait = rng.choice(MEMORY), rng.random() < 0.6
    if memory == "expanded" and variant["uneven"] is not None:  # a rank's block may be empty
        memory = "strided"
    if memory == "negative" and variant["state"] == "U":  # torch._neg_view is not among the linear ops
        memory = "transposed"
    return Case(world, *mesh, axes, call, dtype, memory=memory, wait=wait, **variant)


def every_case(world: int, seed: int = 0) -> list[Case]:
    """Every variant of every call on every mesh over every tuple of axes, and every dtype of every call."""
    rng = random.Random(seed)
    found: dict[Case, None] = {}
    for mesh, call in itertools.product(MESHES[world], CALLS):
        names = NAMES[: len(mesh[0])]
        sizes = dict(zip(names, mesh[0], strict=True))
        for axes in _orders(names):
            for variant in variants(call, tuple(sizes[axis] for axis in axes)):
                found[_complete(rng, world, mesh, axes, call, variant)] = None
    return list(found)


def some_cases(world: int, count: int = 0, seed: int = 0) -> list[Case]:
    """A sample that has every dtype of every call, and at least so many cases."""
    rng = random.Random(seed)
    found: dict[Case, None] = {}

    def one(call: str) -> Case:
        mesh = rng.choice(MESHES[world])
        names = NAMES[: len(mesh[0])]
        sizes = dict(zip(names, mesh[0], strict=True))
        axes = rng.choice(_orders(names))
        return _complete(rng, world, mesh, axes, call, rng.choice(variants(call, tuple(sizes[a] for a in axes))))

    for call, dtypes in CALLS.items():
        for dtype in dtypes:
            found[replace(one(call), dtype=dtype)] = None
    while len(found) < count:
        found[one(rng.choice(list(CALLS)))] = None
    return list(found)
