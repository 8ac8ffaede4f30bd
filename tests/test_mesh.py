"""Meshes in simulation, against a tensor of ranks that torch views, permutes, splits and concatenates."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import pickle
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import Processes
from saved_programs import pickled_mesh

from fspmd.errors import AxisError, FspmdError, MeshError
from fspmd.meshes import grid, world
from fspmd.meshes import mesh as mesh_module
from fspmd.meshes.mesh import Mesh, current_mesh, make_mesh, set_mesh

settings.register_profile("no deadline", deadline=None)  # machines under load are slow, not wrong
settings.load_profile("no deadline")

Reference = tuple[tuple[str, ...], torch.Tensor]  # names, and the rank at each coordinate


@pytest.fixture(autouse=True)
def _no_ambient_mesh() -> Iterator[None]:
    with set_mesh(None):
        yield


def reference_of(shape: tuple[int, ...], names: tuple[str, ...], ranks: list[int] | None = None) -> Reference:
    flat = torch.arange(math.prod(shape)) if ranks is None else torch.tensor(ranks)
    return names, flat.view(shape)


def reference_groups(reference: Reference, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    names, grid = reference
    rest = [name for name in names if name not in axes]
    order = [names.index(name) for name in (*rest, *axes)]
    size = math.prod(grid.shape[names.index(name)] for name in axes)
    return [tuple(row) for row in grid.permute(order).reshape(-1, size).tolist()]


def check(mesh: Mesh, reference: Reference) -> None:
    """Everything a mesh tells agrees with the tensor of ranks."""
    names, grid = reference
    assert mesh.axis_names == names
    assert tuple(mesh.shape.items()) == tuple(zip(names, grid.shape, strict=True))
    assert mesh.size == grid.numel() == len(mesh.ranks)
    assert list(mesh.ranks) == grid.flatten().tolist()
    for coordinate in itertools.product(*map(range, grid.shape)):
        rank = int(grid[coordinate])
        assert mesh.rank_at(coordinate) == rank
        assert mesh.coordinate(rank) == coordinate
        assert rank in mesh.ranks
    absent = set(range(40)) - set(grid.flatten().tolist())
    assert all(mesh.coordinate(rank) is None and rank not in mesh.ranks for rank in absent)
    assert mesh.coordinate() == (0,) * len(names)
    chosen = names[::-2]
    assert mesh.groups(chosen) == reference_groups(reference, chosen)
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    rebuilt = make_mesh(tuple(grid.shape), names, ranks=grid.flatten().tolist())
    assert rebuilt == mesh
    assert hash(rebuilt) == hash(mesh)


# -------------------------------------------------------------------------------------------------- random derivations


@st.composite
def meshes(draw: st.DrawFn) -> tuple[Mesh, Reference]:
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=4)))
    if math.prod(shape) > 36:
        shape = shape[:2]
    names = tuple("abcd"[: len(shape)])
    count = math.prod(shape)
    kind = draw(st.sampled_from(["plain", "plain", "permuted", "partial", "strided"]))
    ranks = {
        "plain": lambda: None,
        "permuted": lambda: draw(st.permutations(range(count))),
        "partial": lambda: draw(st.permutations(range(count + 3)))[:count],
        "strided": lambda: list(range(1, 1 + 2 * count, 2)),
    }[kind]()
    return make_mesh(shape, names, ranks=ranks), reference_of(shape, names, ranks)


def step(draw: Callable[..., Any], mesh: Mesh, reference: Reference, fresh: str) -> tuple[Mesh, Reference]:
    """One random derivation, on the mesh and on the tensor."""
    names, grid = reference
    axis = draw(st.sampled_from(names))
    at = names.index(axis)
    kind = draw(st.sampled_from(["slice", "reorder", "flatten", "unflatten", "split", "concatenate"]))
    if kind in ("slice", "reorder", "flatten"):
        some = tuple(draw(st.permutations(names)))
        some = some if kind == "reorder" else some[: draw(st.integers(1, len(names)))]
        rest = [name for name in names if name not in some]
        if kind != "flatten":
            grid = grid.permute([names.index(name) for name in (*rest, *some)])
            return mesh[some], (some, grid[(0,) * len(rest)])
        place = sum(names.index(name) < names.index(some[0]) for name in rest)
        order = [*rest[:place], *some, *rest[place:]]
        grid = grid.permute([names.index(name) for name in order]).flatten(place, place + len(some) - 1)
        return mesh.flatten(some, fresh), ((*rest[:place], fresh, *rest[place:]), grid)
    size = grid.shape[at]
    if kind == "unflatten":
        first = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        new = (*names[:at], fresh, axis, *names[at + 1 :])
        return mesh.unflatten(axis, {fresh: first, axis: -1}), (new, grid.unflatten(at, (first, size // first)))
    first = draw(st.integers(1, max(1, size - 1)))
    parts = (first, size - first) if size > 1 else (1,)
    pieces = list(zip(mesh.split(axis, parts), grid.split(parts, at), strict=True))
    if kind == "split":
        for piece, rows in pieces:
            check(piece, (names, rows))
        piece, rows = draw(st.sampled_from(pieces))
        return piece, (names, rows)
    pieces = draw(st.permutations(pieces))
    joined = Mesh.concatenate([piece for piece, _ in pieces], axis)
    return joined, (names, torch.cat([rows for _, rows in pieces], at))


@settings(max_examples=150)
@given(meshes(), st.data())
def test_every_derivation_agrees_with_a_tensor_of_ranks(start: tuple[Mesh, Reference], data: st.DataObject) -> None:
    mesh, reference = start
    check(mesh, reference)
    for fresh in ("p", "q", "r"):
        mesh, reference = step(data.draw, mesh, reference, fresh)
        check(mesh, reference)


@given(meshes(), st.data())
def test_slices_go_through_the_own_coordinate(start: tuple[Mesh, Reference], data: st.DataObject) -> None:
    mesh, (names, grid) = start
    some = tuple(data.draw(st.permutations(names)))[: data.draw(st.integers(1, len(names)))]
    rest = [name for name in names if name not in some]
    for coordinate in itertools.product(*map(range, grid.shape)):
        rank = int(grid[coordinate])
        with world.simulated_rank(rank):
            assert mesh.coordinate() == coordinate
            part = mesh[some]
            expected = grid.permute([names.index(n) for n in (*rest, *some)])
            expected = expected[tuple(coordinate[names.index(n)] for n in rest)]
            assert list(part.ranks) == expected.flatten().tolist()
            assert part.coordinate() == tuple(coordinate[names.index(n)] for n in some)
            assert mesh.group_ranks(some) == part.group_ranks(some) == tuple(part.ranks)
            assert mesh.group_ranks(some) in mesh.groups(some)
            assert mesh.contains(part)
            assert part.contains(mesh) == (set(some) == set(names))


@given(meshes(), meshes())
def test_equality_is_by_value(a: tuple[Mesh, Reference], b: tuple[Mesh, Reference]) -> None:
    same = a[1][0] == b[1][0] and a[1][1].shape == b[1][1].shape and bool((a[1][1] == b[1][1]).all())
    assert (a[0] == b[0]) == same
    if same:
        assert hash(a[0]) == hash(b[0])


# ------------------------------------------------------------------------------------------------------------ examples


def test_first_steps() -> None:
    mesh = make_mesh((2, 4), ("dp", "tp"))
    assert repr(mesh) == "mesh(dp=2, tp=4)"
    assert mesh.axis_names == ("dp", "tp")
    assert dict(mesh.shape) == {"dp": 2, "tp": 4}
    assert (mesh.size, mesh.device_type, mesh.transport) == (8, "cpu", "simulation")
    assert mesh.device == torch.device("cpu")
    assert mesh.groups("tp") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert mesh.groups(("tp", "dp")) == [(0, 4, 1, 5, 2, 6, 3, 7)]
    assert mesh.groups(()) == [(rank,) for rank in range(8)]
    assert mesh.group_ranks("dp") == (0, 4)
    assert (mesh.axis_size("dp"), mesh.axis_size(("tp", "dp")), mesh.axis_size(())) == (2, 8, 1)
    assert mesh["dp", "tp"] is mesh
    assert mesh["tp"] is mesh["tp"]


def test_axes_of_size_one_work_everywhere() -> None:
    mesh = make_mesh((1, 3, 1), ("a", "b", "c"))
    assert mesh.groups("a") == [(0,), (1,), (2,)]
    assert mesh["c", "a"].groups(("a", "c")) == [(0,)]
    assert mesh.flatten(("c", "b"), "cb").shape == {"a": 1, "cb": 3}
    assert mesh.unflatten("a", {"p": 1, "q": -1}).shape == {"p": 1, "q": 1, "b": 3, "c": 1}
    assert mesh.split("c", (1,)) == [mesh]
    assert Mesh.concatenate([mesh], "a") == mesh
    assert mesh.rank_at((0, 2, 0)) == 2
    assert make_mesh((), ()).groups(()) == [(0,)]


def test_flattening_adjacent_axes_and_unflattening_them_again_gives_the_same_mesh() -> None:
    mesh = make_mesh((2, 3, 4), ("a", "b", "c"))
    assert mesh.flatten(("a", "b"), "ab").unflatten("ab", {"a": 2, "b": 3}) == mesh
    flat = mesh.flatten(("c", "a"), "ca")  # not adjacent: an axis of two modes
    assert list(flat["ca"].ranks) == [0, 12, 1, 13, 2, 14, 3, 15]
    assert flat.unflatten("ca", {"c": 4, "a": 2})["a", "b", "c"] == mesh
    halves = flat.unflatten("ca", {"half": 2, "rest": 4})
    assert halves["rest"].groups("rest") == [(0, 12, 1, 13)]


def test_unflattening_across_the_borders_of_modes_makes_a_new_rank_map() -> None:
    flat = make_mesh((3, 5, 2), ("a", "b", "c")).flatten(("a", "c"), "ac")
    across = flat.unflatten("ac", {"p": 2, "q": 3})
    halves = [(0, 1, 10), (11, 20, 21)]
    assert across.groups("q") == [tuple(rank + 2 * b for rank in half) for half in halves for b in range(5)]
    assert list(across["p", "q"].ranks) == [0, 1, 10, 11, 20, 21]


def test_meshes_of_some_ranks() -> None:
    mesh = make_mesh((2, 2), ("x", "y"), ranks=(5, 3, 4, 7))
    assert mesh.groups("x") == [(5, 4), (3, 7)]
    assert mesh.coordinate(7) == (1, 1)
    assert mesh.coordinate(0) is None
    with world.simulated_rank(0):
        assert mesh.coordinate() is None
        assert mesh["x"].coordinate() is None
        with pytest.raises(MeshError, match="rank 0 is no member of mesh"):
            mesh.group_ranks("x")


def test_a_list_of_ranks_that_a_layout_tells_equals_the_mesh_without_one() -> None:
    plain = make_mesh((2, 3), ("x", "y"))
    for ranks in ([0, 1, 2, 3, 4, 5], range(6), torch.arange(6)):
        listed = make_mesh((2, 3), ("x", "y"), ranks=ranks)  # type: ignore[arg-type]
        assert listed == plain
        assert hash(listed) == hash(plain)
        assert len(pickle.dumps(listed)) == len(pickle.dumps(plain))
    turned = make_mesh((3, 2), ("y", "x"), ranks=[0, 3, 1, 4, 2, 5])
    assert turned == plain["y", "x"]
    assert plain.contains(turned)
    assert make_mesh((3,), ("x",), ranks=range(4, 10, 2)) == make_mesh((3,), ("x",), ranks=[4, 6, 8])
    assert list(make_mesh((3,), ("x",), ranks=range(2, -1, -1)).ranks) == [2, 1, 0]


def test_equality_over_different_rank_maps() -> None:
    whole = make_mesh((2, 3), ("x", "y"), ranks=[3, 1, 4, 5, 9, 2])
    row = make_mesh((3,), ("y",), ranks=[3, 1, 4])
    assert whole["y"] == row
    assert hash(whole["y"]) == hash(row)
    assert whole.contains(row)
    assert whole != make_mesh((2, 3), ("x", "y"), ranks=[3, 1, 5, 4, 9, 2])
    assert row != make_mesh((3,), ("y",), ranks=[3, 1, 4], device="meta")
    assert row != make_mesh((3,), ("z",), ranks=[3, 1, 4])
    assert row != "mesh(y=3)"


def test_contains_only_itself_and_its_slices() -> None:
    mesh = make_mesh((2, 4), ("dp", "tp"))
    with world.simulated_rank(6):
        row = mesh["tp"]
    assert list(row.ranks) == [4, 5, 6, 7]
    assert mesh.contains(row)
    assert mesh.contains(mesh)
    assert mesh.contains(mesh["tp", "dp"])
    assert not row.contains(mesh)
    assert not mesh["tp"].contains(row)
    assert not mesh.contains(make_mesh((4,), ("tp",), ranks=range(2, 6)))
    assert not mesh.contains(make_mesh((4,), ("dp",)))
    assert not mesh.contains(make_mesh((2,), ("tp",)))
    assert not mesh.contains(mesh.flatten(("dp", "tp"), "all"))
    assert not mesh.contains(make_mesh((4,), ("tp",), device="meta"))
    assert not mesh.contains(make_mesh((4,), ("tp",), ranks=range(8, 12)))


def test_a_mesh_is_immutable_and_copies_to_itself() -> None:
    mesh = make_mesh((2, 2), ("x", "y"))
    with pytest.raises(AttributeError, match="a mesh is immutable"):
        mesh.size = 3
    with pytest.raises(AttributeError, match="a mesh is immutable"):
        del mesh.transport
    with pytest.raises(TypeError):
        mesh.shape["x"] = 3  # type: ignore[index]
    assert copy.copy(mesh) is mesh
    assert copy.deepcopy({"m": mesh})["m"] is mesh
    mesh.groups("x").clear()
    assert mesh.groups("x") == [(0, 2), (1, 3)]


def test_ranks_are_a_lazy_sequence() -> None:
    ranks = make_mesh((3, 4), ("x", "y"))["y", "x"].ranks
    assert ranks[1] == 4
    assert ranks[-1] == 11
    assert ranks[2:5] == (8, 1, 5)
    assert ranks.index(5) == 4
    assert list(reversed(ranks)) == list(ranks)[::-1]
    assert repr(ranks) == "Ranks(0, 4, 8, 1, 5, 9, 2, 6, ...)"
    assert "0" not in ranks
    with pytest.raises(IndexError):
        ranks[12]


# ------------------------------------------------------------------------------------------------------------- pickles


def test_pickles_hold_a_version_and_plain_numbers() -> None:
    mesh = make_mesh((2, 2), ("x", "y"), ranks=[3, 0, 1, 2]).flatten(("y", "x"), "yx")
    mesh.groups("yx")
    function, state = mesh.__reduce__()
    assert function is mesh_module.load_mesh
    assert state == (1, {"yx": ((2, 2), (1, 2))}, 0, (3, 0, 1, 2), "cpu", "simulation")
    with pytest.raises(MeshError, match="pickled in version 2 of the format, this fspmd reads version 1"):
        function(2, *state[1:])


def test_pickles_load_in_another_process() -> None:
    mesh = make_mesh((2, 4), ("dp", "tp"), ranks=[7, 6, 5, 4, 3, 2, 1, 0])["tp", "dp"]
    with Processes(1) as pool:
        (found,) = pool.run(pickled_mesh, pickle.dumps(mesh))
    assert found == ("mesh(tp=4, dp=2)", [(7, 6, 5, 4), (3, 2, 1, 0)], (0, 1), True)


# ----------------------------------------------------------------------------------------------------------- big meshes


def test_a_million_ranks_are_never_listed() -> None:
    def peak(make: Callable[[], object]) -> tuple[Any, int]:
        tracemalloc.start()
        made = make()
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return made, used

    mesh, used = peak(lambda: make_mesh((64, 125, 125), ("a", "b", "c")))
    assert used < 1 << 20
    flat = mesh.flatten(("c", "a"), "ca")
    for make in (
        lambda: mesh["a", "c"],
        lambda: mesh["c", "b", "a"],
        lambda: mesh.flatten(("a", "b", "c"), "all"),
        lambda: mesh.flatten(("c", "a"), "ca"),
        lambda: mesh.unflatten("b", {"p": 5, "q": -1}),
        lambda: flat.unflatten("ca", {"c": 125, "p": 2, "q": 32}),
        lambda: mesh.split("a", (3, 61)),
        lambda: Mesh.concatenate(mesh.split("a", (3, 61)), "a") == mesh,
        lambda: pickle.loads(pickle.dumps(mesh)) == mesh,
        lambda: mesh.coordinate(999_999),
        lambda: 10**6 in mesh.ranks,
        lambda: mesh.contains(mesh["b"]),
        lambda: mesh.group_ranks("b"),
        lambda: make_mesh((1000, 1000), ("x", "y"), ranks=range(5, 2_000_005, 2)),
    ):
        _, used = peak(make)
        assert used < 1 << 20
    assert len(pickle.dumps(mesh)) < 1000


def test_derived_meshes_share_one_rank_map() -> None:
    mesh = make_mesh((4, 4), ("x", "y"), ranks=[*range(15, -1, -1)])
    for other in (mesh["y"], mesh.flatten(("y", "x"), "yx"), mesh.unflatten("x", {"p": 2, "q": 2})):
        assert other._map is mesh._map
    assert Mesh.concatenate(mesh.split("x", (1, 3)), "x")._map is mesh._map
    assert Mesh.concatenate(mesh.split("x", (1, 3))[::-1], "x") != mesh


# --------------------------------------------------------------------------------------------------------- ambient mesh


def test_set_mesh_as_a_statement_and_as_a_context_manager() -> None:
    a, b = make_mesh((2,), ("x",)), make_mesh((3,), ("x",))
    assert current_mesh() is None
    set_mesh(a)
    assert current_mesh() is a
    with set_mesh(b) as inside:
        assert inside is b
        assert current_mesh() is b
        with set_mesh(None):
            assert current_mesh() is None
        assert current_mesh() is b
    assert current_mesh() is a
    later = set_mesh(b)
    with pytest.raises(RuntimeError), later:
        raise RuntimeError
    assert current_mesh() is a


def test_the_ambient_mesh_is_per_thread() -> None:
    seen: list[Mesh | None] = []
    with set_mesh(make_mesh((2,), ("x",))):
        thread = threading.Thread(target=lambda: seen.append(current_mesh()))
        thread.start()
        thread.join()
    assert seen == [None]


# --------------------------------------------------------------------------------------------------------------- errors

PLAIN = make_mesh((2, 4), ("dp", "tp"))


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            lambda: make_mesh(4, ("x",)),  # type: ignore[arg-type]
            MeshError,
            "make_mesh(4, ('x',)): the shape must be a tuple of integers, such as (4,), not 4",
        ),
        (
            lambda: make_mesh((2.0,), ("x",)),  # type: ignore[arg-type]
            MeshError,
            "make_mesh((2.0,), ('x',)): the shape must be integers, but 2.0 is of type float",
        ),
        (
            lambda: make_mesh((2, 0), ("x", "y")),
            MeshError,
            "make_mesh((2, 0), ('x', 'y')): every size in the shape must be at least 1, but one is 0",
        ),
        (
            lambda: make_mesh((2,), "x"),
            MeshError,
            "make_mesh((2,), 'x'): axis names must be a tuple of strings, such as ('x',), not 'x'",
        ),
        (
            lambda: make_mesh((2,), (0,)),  # type: ignore[arg-type]
            MeshError,
            "make_mesh((2,), (0,)): axis names must be non-empty strings, but one is 0",
        ),
        (
            lambda: make_mesh((2, 2), ("x", "x")),
            MeshError,
            "make_mesh((2, 2), ('x', 'x')): the axis names must differ, but 'x' would name two axes of ('x', 'x')",
        ),
        (
            lambda: make_mesh((2, 2), ("x",)),
            MeshError,
            "make_mesh((2, 2), ('x',)): 2 sizes but 1 names, give one name for each size",
        ),
        (
            lambda: make_mesh((2, 2), ("x", "y"), ranks=[0, 1, 2]),
            MeshError,
            "make_mesh((2, 2), ('x', 'y')): the shape (2, 2) has 4 places, but ranks lists 3: give one for each",
        ),
        (
            lambda: make_mesh((2,), ("x",), ranks=[0, -1]),
            MeshError,
            "make_mesh((2,), ('x',)): ranks must be at least 0, but one is -1",
        ),
        (
            lambda: make_mesh((3,), ("x",), ranks=[4, 1, 4]),
            MeshError,
            "make_mesh((3,), ('x',)): rank 4 would stand in two places, give each rank one",
        ),
        (
            lambda: make_mesh((2,), ("x",), ranks=[[0], [1]]),  # type: ignore[list-item]
            MeshError,
            "make_mesh((2,), ('x',)): ranks must be integers, but [0] is of type list",
        ),
        (
            lambda: make_mesh((2,), ("x",), transport="nccl"),
            MeshError,
            "make_mesh((2,), ('x',)): transport='nccl' is unknown, give one of ('simulation', 'process_group', "
            "'abstract'), or none to choose",
        ),
        (
            lambda: make_mesh((2,), ("x",), transport="process_group"),
            MeshError,
            "a mesh over process groups needs a launcher, but RANK and WORLD_SIZE are not set and torch.distributed is "
            'not initialised: start the program with torchrun, or pass transport="simulation"',
        ),
        (
            lambda: make_mesh((2,), ("x",), device="gpu"),
            MeshError,
            "make_mesh((2,), ('x',)): device='gpu' is no device, give a type such as \"cpu\" or \"cuda\"",
        ),
        (
            lambda: make_mesh((2,), ("x",), device="cuda:1"),
            MeshError,
            "make_mesh((2,), ('x',)): device='cuda:1' names one device, but a mesh takes a type: "
            'write device="cuda"; '
            "each process uses the device that LOCAL_RANK names, in simulation the current one",
        ),
        (
            lambda: Mesh((2,), ("x",)),
            MeshError,
            'Mesh(...) is not called directly: write make_mesh((2, 4), ("dp", "tp"))',
        ),
        (
            lambda: PLAIN["pp"],
            AxisError,
            "mesh['pp']: mesh(dp=2, tp=4) has no axis 'pp', its axes are ('dp', 'tp')",
        ),
        (
            lambda: PLAIN["tp", "tp"],
            AxisError,
            "mesh[('tp', 'tp')]: name each axis of mesh(dp=2, tp=4) at most once",
        ),
        (lambda: PLAIN[0], AxisError, "mesh[0]: mesh(dp=2, tp=4) has no axis 0, its axes are ('dp', 'tp')"),  # type: ignore[index]
        (
            lambda: PLAIN.groups("x"),
            AxisError,
            "groups('x'): mesh(dp=2, tp=4) has no axis 'x', its axes are ('dp', 'tp')",
        ),
        (
            lambda: PLAIN.axis_size(("dp", None)),  # type: ignore[arg-type]
            AxisError,
            "axis_size(('dp', None)): mesh(dp=2, tp=4) has no axis None, its axes are ('dp', 'tp')",
        ),
        (
            lambda: PLAIN.rank_at((2, 0)),
            MeshError,
            "rank_at((2, 0)): expected 2 indices, one per axis of mesh(dp=2, tp=4), each from 0 to the axis's size - 1",
        ),
        (lambda: PLAIN.flatten((), "all"), AxisError, "flatten((), 'all'): name at least one axis of ('dp', 'tp')"),
        (
            lambda: PLAIN.flatten(("dp", "x"), "all"),
            AxisError,
            "flatten(('dp', 'x'), 'all'): mesh(dp=2, tp=4) has no axis 'x', its axes are ('dp', 'tp')",
        ),
        (
            lambda: PLAIN.unflatten("x", {"a": 2}),
            AxisError,
            "unflatten('x', {'a': 2}): mesh(dp=2, tp=4) has no axis 'x', its axes are ('dp', 'tp')",
        ),
        (
            lambda: PLAIN.split(("tp",), (2, 2)),  # type: ignore[arg-type]
            AxisError,
            "split(('tp',), (2, 2)): mesh(dp=2, tp=4) has no axis ('tp',), its axes are ('dp', 'tp')",
        ),
        (
            lambda: Mesh.concatenate([PLAIN], "x"),
            AxisError,
            "concatenate([mesh(dp=2, tp=4)], 'x'): mesh(dp=2, tp=4) has no axis 'x', its axes are ('dp', 'tp')",
        ),
        (
            lambda: PLAIN.flatten(("dp",), "tp"),
            MeshError,
            "flatten(('dp',), 'tp'): the axis names must differ, but 'tp' would name two axes of ('tp', 'tp')",
        ),
        (
            lambda: PLAIN.unflatten("tp", {"a": 3, "b": -1}),
            MeshError,
            "unflatten('tp', {'a': 3, 'b': -1}): the axis has size 4, which the given sizes' product 3 does not divide",
        ),
        (
            lambda: PLAIN.unflatten("tp", {"a": 3, "b": 2}),
            MeshError,
            "unflatten('tp', {'a': 3, 'b': 2}): the sizes (3, 2) multiply to 6, but the axis has size 4",
        ),
        (
            lambda: PLAIN.unflatten("tp", {"a": -1, "b": -1}),
            MeshError,
            "unflatten('tp', {'a': -1, 'b': -1}): give at least one size, each at least 1 except that one may be -1, "
            "not (-1, -1)",
        ),
        (
            lambda: PLAIN.unflatten("tp", {"dp": 2, "b": 2}),
            MeshError,
            "unflatten('tp', {'dp': 2, 'b': 2}): the axis names must differ, but 'dp' would name two axes of "
            "('dp', 'dp', 'b')",
        ),
        (
            lambda: PLAIN.unflatten("tp", (2, 2)),  # type: ignore[arg-type]
            MeshError,
            'unflatten(\'tp\', (2, 2)): sizes must be a dict from name to size, such as {"replica": 2, "shard": -1}',
        ),
        (
            lambda: PLAIN.split("tp", (1, 2)),
            MeshError,
            "split('tp', (1, 2)): sizes must be >= 1 and sum to 4, the size of 'tp' in mesh(dp=2, tp=4)",
        ),
        (
            lambda: PLAIN.split("tp", 2),  # type: ignore[arg-type]
            MeshError,
            "split('tp', 2): sizes must be a tuple of integers, such as (2,), not 2",
        ),
        (lambda: Mesh.concatenate([], "x"), MeshError, "concatenate([], 'x'): give at least one mesh"),
        (
            lambda: Mesh.concatenate([PLAIN, PLAIN["dp"]], "dp"),
            MeshError,
            "concatenate([mesh(dp=2, tp=4), mesh(dp=2)], 'dp'): the names and sizes of all axes but 'dp' must be the "
            "same in all meshes",
        ),
        (
            lambda: Mesh.concatenate([PLAIN, make_mesh((2, 4), ("dp", "tp"), device="meta")], "dp"),
            MeshError,
            "concatenate([mesh(dp=2, tp=4), mesh(dp=2, tp=4)], 'dp'): device type and transport must be the same in "
            "all meshes, but they are [('cpu', 'simulation'), ('meta', 'simulation')]",
        ),
        (
            lambda: Mesh.concatenate([PLAIN, PLAIN], "dp"),
            MeshError,
            "concatenate([mesh(dp=2, tp=4), mesh(dp=2, tp=4)], 'dp'): rank 0 would stand in two places, "
            "give each rank one",
        ),
        (
            lambda: PLAIN.process_group("tp"),
            MeshError,
            "process_group('tp'): mesh(dp=2, tp=4) has no process groups, its transport is 'simulation': make the "
            "mesh under torchrun for them",
        ),
        (
            lambda: set_mesh("dp"),  # type: ignore[arg-type]
            MeshError,
            "set_mesh takes a mesh, or None, but got str; make one: make_mesh((4,), ('x',))",
        ),
        (
            lambda: Mesh.from_device_mesh("dp"),  # type: ignore[arg-type]
            MeshError,
            "from_device_mesh takes a torch DeviceMesh, but got str",
        ),
    ],
)
def test_errors_say_what_was_given_expected_and_what_to_write(
    make: Callable[[], object], kind: type[FspmdError], message: str
) -> None:
    with pytest.raises(kind) as caught:
        make()
    assert str(caught.value) == message
    assert current_mesh() is None


# ----------------------------------------------------------------------------------------------------------- DeviceMesh


def test_a_simulated_mesh_as_a_device_mesh() -> None:
    mesh = make_mesh((2, 3), ("x", "y"), ranks=[3, 1, 4, 5, 9, 2])
    dm = mesh.to_device_mesh()
    assert dm.mesh_dim_names == ("x", "y")
    assert dm.mesh.tolist() == [[3, 1, 4], [5, 9, 2]]
    assert Mesh.from_device_mesh(dm) == mesh


def test_equal_meshes_are_one_object() -> None:
    """Whatever they were made by; in several threads; and what none has any more is forgotten."""
    mesh = make_mesh((2, 3), ("a", "b"))
    assert make_mesh((2, 3), ("a", "b"), ranks=[0, 1, 2, 3, 4, 5]) is mesh
    assert pickle.loads(pickle.dumps(mesh)) is mesh
    assert mesh.flatten(("a", "b"), "c").unflatten("c", {"a": 2, "b": 3}) is mesh
    assert make_mesh((2, 3), ("a", "b"), ranks=[0, 2, 1, 3, 4, 5]) is not mesh
    with ThreadPoolExecutor(8) as pool:
        for n in range(20):
            made = list(pool.map(lambda _, n=n: make_mesh((n + 1, 7), ("p", "q")), range(16)))
            assert all(one is made[0] for one in made)
    del made
    gc.collect()
    before = len(grid._GRIDS)
    for n in range(50):
        make_mesh((n + 1, 11), ("p", "q"))
    gc.collect()
    assert len(grid._GRIDS) <= before


def test_a_mesh_may_be_made_while_garbage_is_collected() -> None:
    class Late:
        itself: Any

        def __del__(self) -> None:
            made.append(make_mesh((3, 5), ("p", "q")))

    made: list[Mesh] = []
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for n in range(50):
            late = Late()
            late.itself = late
            del late
            make_mesh((n + 1, 13), ("p", "q"))
    finally:
        gc.set_threshold(*threshold)
    gc.collect()
    assert len(made) == 50
