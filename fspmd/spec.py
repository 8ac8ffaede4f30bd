"""The layout of a tensor on a mesh: the partition spec ``P`` and the interned ``TensorSpec``.

Uneven sizes follow ``torch.chunk``: a dim of 5 over 4 ranks has blocks of 2, 2, 1 and 0. Where several axes cut a dim,
the first axis cuts the dim, and each later axis cuts the blocks of the axis before it ("major first").
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import inf, prod
from typing import Any, Final
from weakref import WeakValueDictionary

import torch

from fspmd.cache import Interned, cached
from fspmd.entries import (
    Axes,
    Entry,
    Factors,
    Flat,
    axes_within,
    block_at,
    blocks,
    checked_entry,
    entry_axes,
    entry_of,
    factors_of,
    joined,
    plain_name,
    sized,
    unflattened_axes,
)
from fspmd.errors import MeshError, ShapeError, SpecError
from fspmd.meshes.mesh import Mesh, load_mesh, mesh_advice
from fspmd.messages import counted, described, quoted

_NONE: Final[frozenset[str]] = frozenset()


class P:
    """A partition spec: for each dim the mesh axis (or axes, major first) that cut it, ``None``, or a `Flat`.

    ``unreduced`` names the axes over which the value is a pending sum. ``reduced`` names the axes over which the value
    is equal on all ranks and its gradient is a pending sum. Equal specs are one object.

    >>> P("x", None, ("y", "z"))
    P('x', None, ('y', 'z'))
    >>> P("x", None, unreduced={"y"}) is P("x", None, unreduced={"y"})
    True
    """

    __slots__ = ("__weakref__", "axes", "dim_axes", "entries", "flat", "mentioned", "reduced", "unreduced")
    entries: tuple[Entry, ...]
    unreduced: frozenset[str]
    reduced: frozenset[str]
    axes: frozenset[str]  # the axes that cut some dim
    dim_axes: tuple[Axes, ...]  # the axes of each dim, major first; not set if some dim is flat
    mentioned: frozenset[str]  # every axis that the spec names: cutting, unreduced or reduced
    flat: bool  # some entry is a `Flat`

    def __new__(
        cls, *entries: Entry | Iterable[str], unreduced: Iterable[str] = _NONE, reduced: Iterable[str] = _NONE
    ) -> P:
        try:
            spec = _PARTITIONS.get((entries, unreduced, reduced))  # the fast path: arguments in their normal form
        except TypeError:  # not hashable
            spec = None
        if spec is not None:
            return spec
        normal = tuple([checked_entry(entry, "P") for entry in entries])
        return _interned(normal, _names("unreduced", unreduced), _names("reduced", reduced))

    @property
    def shortened(self) -> P:
        """The spec without its last entries that are None.

        >>> P("x", None, None, unreduced={"y"}).shortened
        P('x', unreduced={'y'})
        """
        kept = max((i + 1 for i, entry in enumerate(self.entries) if entry is not None), default=0)
        return self.with_entries(self.entries[:kept])

    def with_entries(
        self, entries: Iterable[Entry], unreduced: frozenset[str] | None = None, reduced: frozenset[str] | None = None
    ) -> P:
        """Return a spec with other entries, in their normal form; None: with the axes of this one.

        Raises:
            SpecError: An axis is named more than once.
        """
        unreduced = self.unreduced if unreduced is None else unreduced
        return _interned(tuple(entries), unreduced, self.reduced if reduced is None else reduced)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"P is immutable; write a new spec instead of setting {name!r}")

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Entry:
        return self.entries[index]

    def __repr__(self) -> str:
        parts = [repr(entry) for entry in self.entries]
        for name in ("unreduced", "reduced"):
            if axes := getattr(self, name):
                parts.append(f"{name}={{{', '.join(repr(a) for a in sorted(axes))}}}")
        return f"P({', '.join(parts)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.entries, sorted(self.unreduced), sorted(self.reduced))


_PARTITIONS: Final[Interned[Any, P]] = Interned()


def _names(what: str, names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise SpecError(f"P got {what}={names!r}; write a set of axis names: {what}={{{names!r}}}")
    listed = list(names) if isinstance(names, Iterable) else [None]
    if not all(isinstance(name, str) for name in listed):
        raise SpecError(f"P got {described(names)} for {what}; write a set of axis names, such as {what}={{'x'}}")
    return frozenset(map(plain_name, listed))


def _interned(entries: tuple[Entry, ...], unreduced: frozenset[str], reduced: frozenset[str]) -> P:
    """Return the spec of parts in their normal form."""
    key = (entries, unreduced, reduced)
    spec = _PARTITIONS.get(key)
    if spec is None:
        spec = object.__new__(P)
        _fill(spec, *key)
        spec = _PARTITIONS.intern(key, spec)
    return spec


def _fill(spec: P, entries: tuple[Entry, ...], unreduced: frozenset[str], reduced: frozenset[str]) -> None:
    put = object.__setattr__
    dims = tuple(map(axes_within, entries))
    sharding = [name for axes in dims for name in axes]
    named = [*sharding, *unreduced, *reduced]
    mentioned = frozenset(named)
    put(spec, "entries", entries)
    put(spec, "unreduced", unreduced)
    put(spec, "reduced", reduced)
    put(spec, "axes", frozenset(sharding))
    put(spec, "mentioned", mentioned)
    put(spec, "flat", Flat in map(type, entries))
    if not spec.flat:
        put(spec, "dim_axes", dims)
    if len(mentioned) < len(named):
        repeated = sorted(name for name, count in Counter(named).items() if count > 1)
        raise SpecError(
            f"{spec!r} names the axis {quoted(repeated)} more than once; an axis shards one dim, or is unreduced, "
            "or is reduced"
        )


def _rebuild(entries: tuple[Entry, ...], unreduced: list[str], reduced: list[str]) -> P:
    return P(*entries, unreduced=unreduced, reduced=reduced)


class TensorSpec:
    """The layout of a tensor: mesh, partition (one entry per dim), global shape and dtype.

    Equal layouts are one object, so ``==`` is ``is`` and hashing takes constant time.

    >>> from fspmd import make_mesh
    >>> spec = TensorSpec(make_mesh((4,), ("x",)), P("x"), (5, 3), torch.float32)
    >>> spec
    f32[5@x, 3] on mesh(x=4)
    >>> [spec.local_shape((i,)) for i in range(4)]
    [(2, 3), (2, 3), (1, 3), (0, 3)]
    """

    __slots__ = ("__weakref__", "block_shape", "cuts", "dtype", "even", "flat", "mesh", "partition", "shape")
    mesh: Mesh
    partition: P
    shape: tuple[int, ...]
    dtype: torch.dtype
    cuts: tuple[tuple[int, tuple[str, ...], tuple[int, ...]], ...]  # (dim, axes, axis sizes) of each dim that is cut
    flat: bool  # some dim is flat
    even: bool  # all blocks have one shape
    block_shape: tuple[int, ...]  # the shape of the first rank's block, which is the largest in each dim

    def __new__(cls, mesh: Mesh, partition: P, shape: Iterable[int], dtype: torch.dtype) -> TensorSpec:
        shape = tuple(shape) if isinstance(shape, Iterable) else shape
        spec = _SPECS.get((mesh, partition, shape, dtype))
        if spec is None:
            _check_parts(mesh, shape, dtype)
            spec = _laid_out(mesh, partition, shape, dtype)
        return spec

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"TensorSpec is immutable; make a new one instead of setting {name!r}")

    def __repr__(self) -> str:
        return f"{self.text} on {self.mesh!r}"

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorSpec, (self.mesh, self.partition, self.shape, self.dtype)

    @property
    def text(self) -> str:
        """The layout without its mesh: ``f32[5@x, 3]``."""
        return describe(self.dtype, self.shape, self.partition)

    @property
    def block_bytes(self) -> int:
        """The bytes of the largest block."""
        return prod(self.block_shape) * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def local_shape(self, coordinate: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the block at a mesh coordinate."""
        if self.flat:
            sizes = iter(self.unflattened.local_shape(coordinate))
            return tuple(prod(itertools.islice(sizes, len(factors))) for factors in self.factors)
        shape = list(self.shape)
        for dim, (_, length) in self._blocks(coordinate):
            shape[dim] = length
        return tuple(shape)

    def offset(self, coordinate: tuple[int, ...]) -> tuple[int, ...]:
        """Return the place of the block at a mesh coordinate in the global tensor, per dim. No dim may be flat."""
        offset = [0] * len(self.shape)
        for dim, (start, _) in self._blocks(coordinate):
            offset[dim] = start
        return tuple(offset)

    @property
    def factors(self) -> tuple[Factors, ...]:
        """The factors of each dim: sizes, and the axes that cut each. A dim that is not flat has one factor: itself."""
        return tuple(factors_of(entry, size) for entry, size in zip(self.partition, self.shape, strict=True))

    @property
    def unflattened(self) -> TensorSpec:
        """The layout of the tensor viewed with a dim for each factor of its flat dims. Its blocks are views, too.

        >>> from fspmd import make_mesh
        >>> TensorSpec(make_mesh((2,), ("x",)), P(Flat((4, None), (6, "x"))), (24,), torch.float32).unflattened
        f32[4, 6@x] on mesh(x=2)
        """
        return _unflattened(self) if self.flat else self

    @property
    def thinnest(self) -> float:
        """The fewest elements that a rank has of a dim that is cut, or of a factor of a flat dim. Inf if no dim is cut.

        >>> from fspmd import make_mesh
        >>> TensorSpec(make_mesh((4,), ("x",)), P("x"), (5,), torch.float32).thinnest
        0
        """
        spec = self.unflattened
        return min((n for dim, _, parts in spec.cuts for _, n in blocks(spec.shape[dim], parts)), default=inf)

    def _blocks(self, coordinate: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, int]]]:
        for entry in self.partition if self.flat else ():
            entry_axes(entry)  # raises for a `Flat`
        _check_coordinate(coordinate, self.mesh)
        at = dict(zip(self.mesh.axis_names, coordinate, strict=True))
        for dim, axes, sizes in self.cuts:
            yield dim, block_at(self.shape[dim], sizes, [at[axis] for axis in axes])

    @property
    def dual(self) -> TensorSpec:
        """The layout of the gradient of a value: unreduced and reduced change places."""
        partition = self.partition
        if not partition.unreduced and not partition.reduced:
            return self
        return _dual(self)

    def unflattened_axes(self, dim: int, sizes: tuple[int, ...]) -> tuple[Axes, ...] | None:
        """Return the axes of dims of ``sizes`` as which the blocks of a dim can be viewed, or None if they cannot."""
        return unflattened_axes(self.partition[dim], sizes, tuple(self.mesh.shape.items()))

    def viewed(self, sizes: Sequence[Sequence[int]], axes: Sequence[Sequence[tuple[str, ...]]]) -> TensorSpec:
        """Return the layout with each dim viewed as dims of ``sizes``, cut by ``axes``. Pending sums stay."""
        entries = [entry_of(dim_axes) for dim in axes for dim_axes in dim]
        partition = self.partition.with_entries(entries)
        return TensorSpec(self.mesh, partition, [n for dim in sizes for n in dim], self.dtype)

    def with_partition(self, partition: P) -> TensorSpec:
        """Return the layout with another partition."""
        if partition is self.partition:
            return self
        return _laid_out(self.mesh, partition, self.shape, self.dtype)


@cached
def _dual(spec: TensorSpec) -> TensorSpec:
    partition = spec.partition
    return spec.with_partition(P(*partition, unreduced=partition.reduced, reduced=partition.unreduced))


_SPECS: Final[WeakValueDictionary[Any, TensorSpec]] = WeakValueDictionary()
#: the classes and functions in pickles of specs
SAVED: Final = (TensorSpec, Flat, _rebuild, load_mesh)


def _check_parts(mesh: Any, shape: Any, dtype: Any) -> None:
    call = "TensorSpec(mesh, P('x'), (8, 4), torch.float32)"
    if not isinstance(mesh, Mesh):
        raise MeshError(f"TensorSpec got {described(mesh)} for mesh; make one: {mesh_advice(mesh)}")
    if not isinstance(shape, tuple) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ShapeError(f"TensorSpec got {described(shape)} for shape; give it the global shape: {call}")
    if not isinstance(dtype, torch.dtype):
        raise SpecError(f"TensorSpec got {described(dtype)} for dtype; give it one of torch: {call}")


def _laid_out(mesh: Mesh, partition: P, shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
    """Return the interned layout of parts. All of them but the partition are checked."""
    key = (mesh, partition, shape, dtype)
    spec = _SPECS.get(key)
    if spec is None:
        normal = normalise(partition, mesh, shape)
        if normal is partition:
            spec = object.__new__(TensorSpec)
            _fill_spec(spec, mesh, partition, shape, dtype)
        else:
            spec = _laid_out(mesh, normal, shape, dtype)
        spec = _SPECS.setdefault(key, spec)
    return spec


def _fill_spec(spec: TensorSpec, mesh: Mesh, partition: P, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    put = object.__setattr__
    put(spec, "mesh", mesh)
    put(spec, "partition", partition)
    put(spec, "shape", shape)
    put(spec, "dtype", dtype)
    put(spec, "flat", partition.flat)
    if partition.flat:
        unflattened = spec.unflattened
        values: Any = unflattened.cuts, unflattened.even, spec.local_shape((0,) * len(mesh.shape))
    else:
        values = _cuts(mesh, partition, shape) if partition.axes else ((), True, shape)
    for slot, value in zip(("cuts", "even", "block_shape"), values, strict=True):
        put(spec, slot, value)


def _cuts(mesh: Mesh, partition: P, shape: tuple[int, ...]) -> tuple[Any, bool, tuple[int, ...]]:
    """Return `TensorSpec.cuts`, whether blocks are even, and the shape of the first block."""
    sizes_of = mesh.shape
    cuts = tuple([(d, axes, tuple([sizes_of[a] for a in axes])) for d, axes in enumerate(partition.dim_axes) if axes])
    even, first = True, list(shape)
    for dim, _, sizes in cuts:
        even = even and shape[dim] % prod(sizes) == 0
        for n in sizes:
            first[dim] = -(-first[dim] // n)
    return cuts, even, tuple(first)


@cached
def _unflattened(spec: TensorSpec) -> TensorSpec:
    sizes = [[n for n, _ in factors] for factors in spec.factors]
    return spec.viewed(sizes, [[axes for _, axes in factors] for factors in spec.factors])


def _check_coordinate(coordinate: Any, mesh: Mesh) -> None:
    sizes = mesh.shape.values()
    if not isinstance(coordinate, (tuple, list)):
        raise ShapeError(f"a spec got {described(coordinate)} for a coordinate; give it mesh.coordinate()")
    if len(coordinate) != len(sizes):
        raise ShapeError(
            f"the coordinate {coordinate} has {counted(len(coordinate), 'entry')}, but {mesh!r} has {len(sizes)}; "
            "give one index per axis, as mesh.coordinate() does"
        )
    if not all(0 <= i < n for i, n in zip(coordinate, sizes, strict=True)):
        raise ShapeError(
            f"the coordinate {coordinate} lies outside {mesh!r}; give each axis an index from 0 to its size less 1, "
            "as mesh.coordinate() does"
        )


def normalise(partition: P, mesh: Mesh, shape: tuple[int, ...]) -> P:
    """Return the partition with one entry per dim.

    Raises:
        SpecError: It does not fit the mesh, or has too many entries.
    """
    if complaint := complain(partition, mesh, len(shape)):
        raise SpecError(f"a spec for a tensor of shape {shape}: {complaint}")
    missing = len(shape) - len(partition)
    if not missing and not partition.flat:
        return partition
    entries = [*partition, *(None,) * missing]
    if partition.flat:
        entries = [_joined(entry, size, mesh) for entry, size in zip(entries, shape, strict=True)]
    return partition.with_entries(entries)


def _joined(entry: Entry, size: int, mesh: Mesh) -> Entry:
    """Return an entry with the fewest factors. A `Flat` of one factor becomes another entry."""
    if not isinstance(entry, Flat):
        return entry
    if entry.size != size:
        raise SpecError(f"a dim of {size} cannot lie as {entry!r}, whose sizes multiply to {entry.size}")
    return joined(entry.factors, dict(mesh.shape))


def complain(partition: object, mesh: Mesh, ndim: int | None) -> str:
    """Return the mistake in a partition for a tensor of ``ndim`` dims (None: unknown) on a mesh, or ""."""
    if not isinstance(partition, P):
        return f"expected a P such as P({mesh.axis_names[0]!r}), but got {described(partition)}"
    if unknown := sorted(partition.mentioned.difference(mesh.axis_names)):
        return f"{partition!r} names the axis {quoted(unknown)}, but {mesh!r} has only {quoted(mesh.axis_names)}"
    if ndim is None or len(partition) <= ndim:
        return ""
    has = f"{partition!r} has {counted(len(partition), 'entry')}, but the value "
    if ndim == 0:
        return f"{has}is a scalar (no dims); write P()"
    kept = (*(entry for entry in partition if entry is not None), *(None,) * ndim)[:ndim]
    shorter = partition.entries[:ndim] if not any(partition.entries[ndim:]) else kept
    return f"{has}has {counted(ndim, 'dim')}; give one entry per dim, for example {P(*shorter)!r}"


_SHORT = {"float": "f", "int": "i", "uint": "u", "complex": "c"}
_DTYPES: Final = [x for x in vars(torch).values() if isinstance(x, torch.dtype)]
#: whether values of a dtype may be differentiated: floating-point and complex dtypes
is_float: Final = frozenset(x for x in _DTYPES if x.is_floating_point or x.is_complex).__contains__


def short_dtype(dtype: torch.dtype) -> str:
    """Return the short name of a dtype.

    >>> short_dtype(torch.float32), short_dtype(torch.bfloat16), short_dtype(torch.bool)
    ('f32', 'bf16', 'bool')
    """
    name = str(dtype).removeprefix("torch.").replace("bfloat", "bf")
    letters = name.rstrip("0123456789")
    return _SHORT.get(letters, letters) + name[len(letters) :]


def describe(dtype: torch.dtype, shape: Iterable[int], partition: P | None = None) -> str:
    """Return the text of a layout: dtype, global shape with the axes that cut each dim, unreduced and reduced axes.

    >>> describe(torch.float32, (8, 4), P("x", None, unreduced={"y"}))
    'f32[8@x, 4]{U:y}'
    """
    sizes = tuple(shape)
    dims = [str(size) for size in sizes]
    tail = ""
    if partition is not None:
        for dim, entry in enumerate(partition):
            dims[dim] = str(entry) if isinstance(entry, Flat) else sized(sizes[dim], entry_axes(entry))
        types = [(k, sorted(v)) for k, v in (("U", partition.unreduced), ("R", partition.reduced)) if v]
        tail = "{" + " ".join(f"{k}:{','.join(v)}" for k, v in types) + "}" if types else ""
    return f"{short_dtype(dtype)}[{', '.join(dims)}]{tail}"
