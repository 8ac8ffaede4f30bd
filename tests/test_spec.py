"""Partition specs and tensor specs: values of one object each, blocks as nested torch.chunk cuts them."""

from __future__ import annotations

import copy
import enum
import itertools
import math
import pickle
import re
from typing import Any

import pytest
import torch
from collective_cases import chunks
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import Processes

from fspmd import FspmdError, Mesh, P, Sharded, TensorSpec, make_mesh
from fspmd.entries import block_at, blocks, entry_axes

settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
F32 = torch.float32
NAMES = ("x", "y", "z")


# --- partitions -----------------------------------------------------------------------------------------------------


@st.composite
def partitions(draw: st.DrawFn, names: tuple[str, ...] = NAMES, dims: int = 4) -> tuple[list[Any], set[str], set[str]]:
    """Entries, unreduced and reduced axes, no axis twice."""
    slots: list[list[str]] = [[] for _ in range(dims + 3)]  # the last one's axes are not named
    for axis in draw(st.permutations(names)):
        draw(st.sampled_from(slots)).append(axis)
    entries = [tuple(slot) if len(slot) > 1 else slot[0] if slot else None for slot in slots[:dims]]
    return entries, set(slots[dims]), set(slots[dims + 1])


@given(partitions())
def test_equal_partitions_are_one_object_however_written(parts: tuple[list[Any], set[str], set[str]]) -> None:
    entries, unreduced, reduced = parts
    spec = P(*entries, unreduced=unreduced, reduced=reduced)
    lists = [None if e is None else [e] if isinstance(e, str) else list(e) for e in entries]
    same = [
        P(*lists, unreduced=sorted(unreduced, reverse=True), reduced=tuple(reduced)),
        P(*[() if e is None else e for e in entries], unreduced=frozenset(unreduced), reduced=iter(sorted(reduced))),
        P(*spec, unreduced=spec.unreduced, reduced=spec.reduced),
        eval(repr(spec), {"P": P}),
        pickle.loads(pickle.dumps(spec)),
        copy.copy(spec),
        copy.deepcopy(spec),
    ]
    for other in same:
        assert other is spec
        assert other == spec
        assert hash(other) == hash(spec)
    assert spec.entries == tuple(entries) == tuple(spec) == tuple(spec[i] for i in range(len(spec)))
    assert (spec.unreduced, spec.reduced) == (frozenset(unreduced), frozenset(reduced))
    assert spec.axes == {axis for entry in entries for axis in entry_axes(entry)}
    assert spec.mentioned == spec.axes | unreduced | reduced


@given(partitions(dims=2), partitions(dims=2))
def test_partitions_are_equal_exactly_when_their_parts_are(a: Any, b: Any) -> None:
    one, other = (P(*entries, unreduced=unreduced, reduced=reduced) for entries, unreduced, reduced in (a, b))
    assert (one == other) is (one is other) is (a == b)


def test_partitions_differ_in_length_order_and_kind() -> None:
    distinct = [
        P(),
        P(None),
        P(None, None),
        P("x"),
        P("x", None),
        P(None, "x"),
        P(("x", "y")),
        P(("y", "x")),
        P("x", "y"),
        P(unreduced={"x"}),
        P(reduced={"x"}),
    ]
    assert len(set(distinct)) == len(distinct)
    assert all(a != b for a, b in itertools.combinations(distinct, 2))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (P(), "P()"),
        (P("x", None, ("y", "z")), "P('x', None, ('y', 'z'))"),
        (P(("x",), []), "P('x', None)"),
        (P(None, unreduced={"y", "x"}, reduced=["z"]), "P(None, unreduced={'x', 'y'}, reduced={'z'})"),
        (P(unreduced={"w"}), "P(unreduced={'w'})"),
    ],
)
def test_a_partition_prints_as_it_is_written(spec: P, text: str) -> None:
    assert repr(spec) == str(spec) == text


def test_partitions_and_specs_are_immutable() -> None:
    spec = TensorSpec(make_mesh((2,), ("x",)), P("x"), (4,), F32)
    for value, names in ((P("x"), ("entries", "unreduced", "new")), (spec, ("shape", "partition", "new"))):
        for name in names:
            with pytest.raises(AttributeError, match=f"immutable; .* instead of setting '{name}'"):
                setattr(value, name, ())


# --- tensor specs ---------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Mesh, P, tuple[int, ...]]:
    """A mesh of one to three axes, a partition no longer than the shape, and sizes down to 0."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    names = tuple(draw(st.permutations(NAMES))[: len(sizes)])
    mesh = make_mesh(tuple(sizes), names, transport="simulation")
    shape = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
    entries, unreduced, reduced = draw(partitions(names, len(shape)))
    while entries and entries[-1] is None and draw(st.booleans()):
        entries.pop()
    return mesh, P(*entries, unreduced=unreduced, reduced=reduced), shape


@settings(max_examples=300)
@given(layouts())
def test_blocks_are_those_of_nested_chunks(layout: tuple[Mesh, P, tuple[int, ...]]) -> None:
    mesh, partition, shape = layout
    spec = TensorSpec(mesh, partition, shape, F32)
    indices = torch.stack(torch.meshgrid(*map(torch.arange, shape), indexing="ij")) if shape else torch.zeros(0)
    seen = set()
    for at in itertools.product(*map(range, mesh.shape.values())):
        block = indices
        for dim, entry in enumerate(partition):
            for axis in entry_axes(entry):  # major first: each axis cuts what the one before has left
                block = chunks(block, (mesh.shape[axis],), dim + 1)[at[mesh.axis_names.index(axis)]]
        assert spec.local_shape(at) == tuple(block.shape[1:])
        seen.add(tuple(block.shape[1:]))
        offset = spec.offset(at)
        assert len(offset) == len(shape)
        whole = tuple(slice(start, start + size) for start, size in zip(offset, spec.local_shape(at), strict=True))
        if shape:
            assert torch.equal(indices[(slice(None), *whole)], block)
            assert all(0 <= start <= size for start, size in zip(offset, shape, strict=True))
    assert spec.even is (len(seen) == 1)


@settings(max_examples=200)
@given(layouts())
def test_specs_are_interned_and_normalised_to_the_rank(layout: tuple[Mesh, P, tuple[int, ...]]) -> None:
    mesh, partition, shape = layout
    spec = TensorSpec(mesh, partition, shape, F32)
    full = [*partition, *[None] * (len(shape) - len(partition))]
    assert spec.partition is P(*full, unreduced=partition.unreduced, reduced=partition.reduced)
    assert (spec.mesh, spec.shape, spec.dtype, spec.ndim) == (mesh, shape, F32, len(shape))
    equal_mesh = make_mesh(tuple(mesh.shape.values()), mesh.axis_names, transport="simulation")
    same = [
        TensorSpec(mesh, spec.partition, list(shape), F32),
        TensorSpec(equal_mesh, partition, torch.Size(shape), torch.float32),
        pickle.loads(pickle.dumps(spec)),
        copy.copy(spec),
        copy.deepcopy(spec),
        spec.with_partition(P()).with_partition(partition),
        Sharded(torch.zeros(0), spec).spec,
    ]
    for other in same:
        assert other is spec
        assert hash(other) == hash(spec)
    others = [
        TensorSpec(mesh, partition, shape, torch.float64),
        TensorSpec(mesh, partition, (*shape, 1), F32),
        TensorSpec(mesh["x"] if mesh.axis_names != ("x",) and "x" in mesh.shape else mesh, P(), (*shape, 7), F32),
    ]
    assert all(other != spec for other in others)


def test_hashing_does_not_look_at_the_parts() -> None:
    for value in (P("x"), TensorSpec(make_mesh((2,), ("x",)), P("x"), (4,), F32)):
        assert type(value).__hash__ is object.__hash__
        assert type(value).__eq__ is object.__eq__


def test_specs_that_nobody_holds_are_forgotten() -> None:
    from fspmd import spec as module

    mesh = make_mesh((2,), ("x",), transport="simulation")
    before = len(module._SPECS)
    made = [TensorSpec(mesh, P("x"), (4, 10_000 + i), F32) for i in range(50)]
    assert len(module._SPECS) >= before + 50
    del made
    assert len(module._SPECS) <= before + 2


@pytest.mark.parametrize(
    ("partition", "shape", "dtype", "text"),
    [
        (P("x"), (8, 4), torch.float32, "f32[8@x, 4] on mesh(x=2, y=3)"),
        (P(None, ("y", "x")), (8, 7), torch.bfloat16, "bf16[8, 7@(y,x)] on mesh(x=2, y=3)"),
        (P("x", unreduced={"y"}), (5,), torch.int64, "i64[5@x]{U:y} on mesh(x=2, y=3)"),
        (P(reduced={"x"}, unreduced={"y"}), (), torch.complex64, "c64[]{U:y R:x} on mesh(x=2, y=3)"),
        (P(unreduced={"y", "x"}), (0,), torch.bool, "bool[0]{U:x,y} on mesh(x=2, y=3)"),
        (P(), (1,), torch.uint16, "u16[1] on mesh(x=2, y=3)"),
        (P(), (1,), torch.float8_e4m3fn, "float8_e4m3fn[1] on mesh(x=2, y=3)"),
    ],
)
def test_a_spec_prints_shape_axes_and_mesh(partition: P, shape: tuple[int, ...], dtype: torch.dtype, text: str) -> None:
    spec = TensorSpec(make_mesh((2, 3), ("x", "y")), partition, shape, dtype)
    assert repr(spec) == text
    assert repr(Sharded(torch.zeros(0), spec)) == f"Sharded {text}"


def test_five_on_four() -> None:
    spec = TensorSpec(make_mesh((4,), ("x",)), P("x"), (5,), F32)
    assert [(spec.offset((i,)), spec.local_shape((i,))) for i in range(4)] == [
        ((0,), (2,)),
        ((2,), (2,)),
        ((4,), (1,)),
        ((5,), (0,)),
    ]
    assert blocks(0, (2, 3)) == ((0, 0),) * 6


@settings(max_examples=200)
@given(st.integers(0, 200), st.lists(st.integers(1, 5), max_size=4).map(tuple))
def test_blocks_are_known_without_those_before_them(size: int, parts: tuple[int, ...]) -> None:
    every = blocks(size, parts)
    assert every == tuple(block_at(size, parts, place) for place in itertools.product(*map(range, parts)))
    assert max(length for _, length in every) == every[0][1]
    assert (len({length for _, length in every}) == 1) is (size % math.prod(parts) == 0)


def _loaded(data: bytes) -> Any:
    spec, partition = pickle.loads(data)
    mesh = make_mesh((2, 3), ("x", "y"), ranks=[5, 4, 3, 2, 1, 0], transport="simulation")
    same = partition is P(("y", "x"), reduced=()) and spec is TensorSpec(mesh, partition, (7, 2), torch.bfloat16)
    return same, str(spec), spec.local_shape((1, 1))


def test_pickles_load_in_another_process() -> None:
    mesh = make_mesh((2, 3), ("x", "y"), ranks=[5, 4, 3, 2, 1, 0])
    partition = P(("y", "x"))
    data = pickle.dumps((TensorSpec(mesh, partition, (7, 2), torch.bfloat16), partition))
    with Processes(1) as pool:
        assert pool.run(_loaded, data) == [(True, "bf16[7@(y,x), 2] on mesh(x=2, y=3)", (1, 2))]


@pytest.mark.parametrize("coordinate", [(), (0,), (0, 0, 0)])
def test_a_coordinate_has_one_index_per_axis(coordinate: tuple[int, ...]) -> None:
    spec = TensorSpec(make_mesh((2, 3), ("x", "y")), P("x"), (4,), F32)
    for ask in (spec.local_shape, spec.offset):
        with pytest.raises(FspmdError, match=re.escape(f"the coordinate {coordinate} has ")):
            ask(coordinate)


def test_an_axis_of_an_enum_is_told_by_its_name() -> None:
    axis = enum.Enum("axis", {"ROWS": "of an enum"}, type=str)
    for partition in (P(axis.ROWS), P(None, (axis.ROWS, "y")), P(unreduced={axis.ROWS}), P(reduced={axis.ROWS})):
        assert "ROWS" not in repr(partition)
    assert P(axis.ROWS) is P("of an enum")
