"""The content of a checkpoint: the leaves of a tree by name, their global key paths, and the boxes of tensors.

Boxes are those of a layout and their holders, exact covers, and the elements of a box in a block.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import optree
import torch
from torch import Tensor

from fspmd.entries import factors_of
from fspmd.errors import ArgumentError, TreeError
from fspmd.foreign import misfit
from fspmd.messages import Failure, described, holds_all_ranks, refuse
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec
from fspmd.transport.local_tensor import is_simulated
from fspmd.trees import adopt


class Cuboid(NamedTuple):
    """A box of a global tensor: where it begins, and its size in each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.sizes)

    def overlap(self, other: Cuboid) -> Cuboid | None:
        """Return the box that two boxes share, or None."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = [min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True)]
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Cuboid(starts, sizes) if all(n > 0 for n in sizes) else None

    def within(self, outer: Cuboid) -> tuple[slice, ...]:
        """Return the slices of this box in a tensor that holds ``outer``."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.offsets, outer.offsets, self.sizes, strict=True))


def whole(shape: Sequence[int]) -> Cuboid:
    """Return the box of a whole tensor."""
    return Cuboid((0,) * len(shape), tuple(shape))


def boxed(spec: TensorSpec) -> TensorSpec:
    """Return the nearest layout whose blocks are boxes: settled, and with each flat dim cut from one end to the other.

    >>> from fspmd import Flat, make_mesh
    >>> boxed(TensorSpec(make_mesh((2,), ("x",)), P(Flat((4, None), (6, "x"))), (24,), torch.float32))
    f32[24@x] on mesh(x=2)
    """
    partition = spec.partition
    if not partition.unreduced and not partition.flat:
        return spec
    sizes = zip(partition, spec.shape, strict=True)
    dims = [[axis for _, axes in factors_of(entry, n) for axis in axes] for entry, n in sizes]
    return spec.with_partition(P(*(tuple(axes) or None for axes in dims), reduced=partition.reduced))


def boxes_of(spec: TensorSpec) -> dict[Cuboid, list[int]]:
    """Return the different boxes of a layout, each with the global ranks that hold it. Only an empty tensor has an
    empty box."""
    ranks_of: dict[Cuboid, list[int]] = {}
    coordinates = itertools.product(*map(range, spec.mesh.shape.values()))
    for rank, coordinate in zip(spec.mesh.ranks, coordinates, strict=True):
        box = Cuboid(spec.offset(coordinate), spec.local_shape(coordinate))
        if box.numel:
            ranks_of.setdefault(box, []).append(rank)
    return ranks_of or {whole(spec.shape): list(spec.mesh.ranks)}


def wrong_cover(shape: Sequence[int], boxes: Iterable[Cuboid]) -> str:
    """Return why boxes do not cover a tensor exactly once, or "".

    >>> wrong_cover((4, 2), [Cuboid((0, 0), (2, 2)), Cuboid((2, 0), (2, 2))])
    ''
    >>> wrong_cover((4, 2), [Cuboid((0, 0), (2, 2))])
    'its blocks have 4 of 8 elements'
    """
    every = [box for box in boxes if box.numel]
    for box in every:
        if len(box.offsets) != len(shape) or whole(shape).overlap(box) != box:
            return f"its block of {box.sizes} at {box.offsets} lies outside"
    covered = sum(box.numel for box in every)
    if covered != prod(shape):
        return f"its blocks have {covered} of {prod(shape)} elements"
    if not covered:
        return ""
    starts = [sorted({box.offsets[dim] for box in every}) for dim in range(len(shape))]
    stops = [dict(zip(cuts, [*cuts[1:], n], strict=True)) for cuts, n in zip(starts, shape, strict=True)]
    grid = {box.offsets: box.sizes for box in every}
    if len(grid) == len(every) and all(
        stops[dim][start] == start + n for box in every for dim, (start, n) in enumerate(zip(*box, strict=True))
    ):
        return ""
    for first, second in itertools.combinations(every, 2):
        if first.overlap(second):
            return f"its blocks at {first.offsets} and {second.offsets} overlap"
    return ""


def parts(box: Cuboid, limit: int) -> Iterator[Cuboid]:
    """Cut a box along its first dims until no part has more elements than ``limit``."""
    dim = next((d for d, n in enumerate(box.sizes) if n > 1), None)
    if box.numel <= limit or dim is None:
        yield box
        return
    half = box.sizes[dim] // 2
    for start, n in ((0, half), (half, box.sizes[dim] - half)):
        offsets = list(box.offsets)
        offsets[dim] += start
        yield from parts(Cuboid(tuple(offsets), (*box.sizes[:dim], n, *box.sizes[dim + 1 :])), limit)


def pieces_of(part: Cuboid, block: Cuboid, itemsize: int, begins: int, piece: int) -> list[tuple[int, int]]:
    """Return the runs of pieces, (first, number), that hold a part of a block in C order.

    ``begins`` is the byte at which the block's elements begin.
    """
    run, dims = itemsize, len(block.sizes)
    while dims and part.sizes[dims - 1] == block.sizes[dims - 1]:
        dims -= 1
        run *= block.sizes[dims]
    if dims:
        dims -= 1
        run *= part.sizes[dims]
    starts = torch.full((1,), begins, dtype=torch.int64, device="cpu")
    stride = itemsize
    strides = [0] * len(block.sizes)
    for dim in reversed(range(len(block.sizes))):
        strides[dim], stride = stride, stride * block.sizes[dim]
    for dim, span in enumerate(part.within(block)):
        index = torch.arange(span.start, span.stop if dim < dims else span.start + 1, device="cpu")
        starts = (starts[:, None] + index * strides[dim]).flatten()
    first, last = starts // piece, (starts + run - 1) // piece
    low, high = int(first.min()), int(last.max())
    if len(starts) == 1:
        return [(low, high - low + 1)]
    edges = torch.zeros(high - low + 2, dtype=torch.int64, device="cpu")
    edges.index_add_(0, first - low, torch.ones_like(first))
    edges.index_add_(0, last - low + 1, -torch.ones_like(last))
    needed = (edges.cumsum(0) > 0).tolist()
    runs, at = [], low
    for wanted, group in itertools.groupby(needed):
        n = len(list(group))
        if wanted:
            runs.append((at, n))
        at += n
    return runs


Path = tuple[str | int, ...]
_PLAIN: Final = frozenset((bool, int, float, complex, str, bytes))  # every load brings them back
_BITS: Final = 2039  # torch's safe load takes no integers of more
_INSTEAD: Final = "save tensors, numbers, strings, None, and lists of them; of NumPy x.item(), or torch.from_numpy(x)"


class NamedLeaf(NamedTuple):
    """A leaf of a tree, or a list or tuple of plain values, which is saved as a whole."""

    name: str  # as torch.distributed.checkpoint names it: the keys of the path, with dots
    path: Path
    label: str  # the Python expression
    value: Any
    place: int  # in the order of the treedef


def named_leaves(tree: Any, what: str, root: str, kinds: tuple[type, ...]) -> tuple[list[NamedLeaf], Any]:
    """Return the leaves, sorted by name, and the treedef.

    Raises:
        TreeError: two leaves have one name.
        ArgumentError: a leaf cannot be saved. The error names all of them.
    """
    adopt()
    accessors, values, treedef = optree.tree_flatten_with_accessor(tree, _is_plain_list, none_is_leaf=True)
    leaves: list[NamedLeaf] = []
    for place, (accessor, value) in enumerate(zip(accessors, values, strict=True)):
        path = tuple(
            key if isinstance(key, int) and isinstance(entry, optree.SequenceEntry) else str(key)
            for key, entry in _keys(accessor)
        )
        leaves.append(NamedLeaf(".".join(map(str, path)) or "value", path, accessor.codify(root), value, place))
    failures = [failure for leaf in leaves if (failure := _failure(leaf, kinds))]
    names: dict[str, NamedLeaf] = {}
    for leaf in leaves:
        if names.setdefault(leaf.name, leaf) is not leaf:
            both = f"{names[leaf.name].label} and {leaf.label} have one name, {leaf.name!r}"
            failures.append(Failure(both, TreeError, "give them keys that differ with dots between"))
    if failures:
        refuse(f"{what} got leaves that it cannot take:", failures)
    return sorted(leaves), treedef


def _keys(accessor: Any) -> list[tuple[Any, Any]]:
    return [(entry.entry, entry) for entry in accessor]


def _is_plain_list(x: Any) -> bool:
    """Whether a value is a list or tuple without dicts and tensors, which torch's checkpoints keep whole, too."""
    return type(x) in (list, tuple) and all(_is_plain_list(y) or _is_plain_value(y) for y in x)


def _is_plain_value(x: Any) -> bool:
    return x is None or (type(x) in _PLAIN and (type(x) is not int or x.bit_length() < _BITS))


def _failure(leaf: NamedLeaf, kinds: tuple[type, ...]) -> Failure | None:
    value = leaf.value
    if is_simulated(value):
        return holds_all_ranks(leaf.label)
    if isinstance(value, Sharded):
        return None
    if isinstance(value, Tensor):
        if wrong := misfit(value):
            return Failure(f"{leaf.label} is {wrong[0]}", ArgumentError, wrong[1])
        if value.is_meta and TensorSpec not in kinds:
            return Failure(f"{leaf.label} is a meta tensor, which has no values", ArgumentError)
        return None
    if isinstance(value, TensorSpec) and TensorSpec not in kinds:
        return Failure(f"{leaf.label} is a TensorSpec, which has no values", ArgumentError)
    if isinstance(value, torch.nn.Module):
        return Failure(f"{leaf.label} is {described(value)}", ArgumentError, "pass its module.state_dict()")
    if isinstance(value, torch.optim.Optimizer):
        return Failure(f"{leaf.label} is {described(value)}", ArgumentError, "pass its optimizer.state_dict()")
    if isinstance(value, (TensorSpec, torch.Generator)) or _is_plain_value(value) or _is_plain_list(value):
        return None
    try:
        decoded(encoded(value))
    except (pickle.PickleError, RuntimeError, TypeError, AttributeError):
        text = f"{leaf.label} is {described(value)}, which no safe load brings back"
        return Failure(text, ArgumentError, _INSTEAD)
    return None


def encoded(value: Any) -> bytes:
    """Return the bytes of a plain value, as torch.distributed.checkpoint writes them."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def canonical(value: Any) -> bytes:
    """Return bytes that equal plain values share. Those of `encoded` tell also which parts are one object."""
    is_plain = _is_plain_value(value) or _is_plain_list(value)
    return repr(value).encode() if is_plain else encoded(value)


def decoded(data: bytes) -> Any:
    """Return the value of bytes. No code runs that they could name."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def is_tensor(value: Any) -> bool:
    """Whether a leaf is saved as a tensor: a tensor, a layout or a generator's state."""
    return isinstance(value, (Tensor, TensorSpec, torch.Generator))


def kind_of(value: Any) -> str:
    """Return the kind of a plain value. Numbers of all types are of one kind.

    >>> kind_of(1.5), kind_of("adam"), kind_of(None), kind_of((0.9, 0.999))
    ('number', 'str', 'None', 'list of 2')
    """
    if value is None:
        return "None"
    if isinstance(value, (bool, int, float, complex)):
        return "number"
    if type(value) in (list, tuple):
        return f"list of {len(value)}"
    return type(value).__name__
