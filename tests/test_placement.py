"""Values put on meshes, moved between specs and taken off; `Sharded` as a value and a pytree node.

Scatters, blocks and gradients case by case, on processes beside the simulation, are in `test_gloo` (`placement_cases`).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from collective_cases import ADDED, BITS, DIFFERENTIABLE, FLOAT8, RAW, same
from full import FULL
from placement_cases import Placement, some_moves
from processes import Processes
from torch import Tensor

from fspmd import (
    Mesh,
    P,
    Sharded,
    TensorSpec,
    device_get,
    device_put,
    from_callback,
    from_local,
    grad,
    jit,
    make_mesh,
    pcast,
    reshard,
    set_mesh,
    shard_map,
    typeof,
    with_spec,
)
from fspmd.transport.frame import frame_over
from fspmd.transport.local_tensor import shards_of

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")
F64 = torch.float64
LINE = make_mesh((4,), ("x",), transport="simulation")
GRID = make_mesh((2, 3), ("x", "y"), transport="simulation")


@pytest.fixture(scope="module")
def four() -> Iterator[Processes]:
    with Processes(4) as pool:
        yield pool


def line(transport: str) -> Mesh:
    return make_mesh((4,), ("x",), transport=transport, device="cpu")


def shards(x: Sharded) -> list[Tensor]:
    """The block of every simulated rank, in the order of the mesh."""
    return list(shards_of(x.local.detach(), frame_over(x.spec.mesh, x.spec.mesh.axis_names)))


# --- exact round trips ----------------------------------------------------------------------------------------------


def every_dtype() -> list[torch.dtype]:
    """All that torch can copy on a CPU, but the quantised ones."""
    found = []
    for dtype in dict.fromkeys(x for x in vars(torch).values() if isinstance(x, torch.dtype)):
        try:
            torch.zeros(4, 16, dtype=torch.uint8).view(dtype).clone()
        except RuntimeError:
            continue
        found.append(dtype)
    return found


def drawn(dtype: torch.dtype, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    raw = torch.randint(2 if dtype is torch.bool else 256, (rows, 16), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def inexact_dtypes(transport: str) -> list[str]:
    """The dtypes and sizes that do not come back bit by bit from every way to put and take."""
    mesh, wrong = line(transport), []
    layouts = ((8, P("x")), (5, P("x")), (0, P("x")), (2, P(None, "x")), (1, P()))
    every = list(itertools.product(every_dtype(), layouts))
    for dtype, (rows, spec) in every[:: 1 if FULL else 2 if transport == "simulation" else 4]:
        whole = drawn(dtype, rows)
        put = device_put(whole, spec, mesh=mesh)
        values = {
            "put": put,
            "moved": device_put(put, P(None, "x"), mesh=mesh),
            "scattered": device_put(whole, spec, mesh=mesh, src=2),
            "local": from_local(put.local, spec, mesh=mesh),
            "called": from_callback(tuple(whole.shape), spec, whole.__getitem__, mesh=mesh),
        }
        for name, value in values.items():
            if value.dtype is not dtype or not same(device_get(value), whole, bits=True):
                wrong.append(f"{name} {dtype} of {rows} rows by {spec}")
    return wrong


def test_round_trips_are_exact_for_every_dtype_of_torch(four: Processes) -> None:
    assert {*DIFFERENTIABLE, *ADDED, *FLOAT8, *BITS} <= {str(d).removeprefix("torch.") for d in every_dtype()}
    assert inexact_dtypes("simulation") == []
    assert four.run(inexact_dtypes, "process_group") == [[]] * 4


# --- from one spec to another ---------------------------------------------------------------------------------------


def misplaced(moves: list[tuple[Placement, Placement]], transport: str) -> list[str]:
    """The moves that leave wrong blocks on this process's ranks, or give wrong gradients."""
    wrong = []
    for start, end in moves:
        first, last = start.mesh(transport), end.mesh(transport)
        here = last.coordinate()
        if here is None:
            continue
        summed = bool(start.unreduced or end.unreduced)
        whole, ct = start.draw("x", summed), start.draw("ct", True)
        moved = device_put(device_put(whole, start.partition, mesh=first), end.partition, mesh=last)
        assert moved.spec is TensorSpec(last, end.partition, whole.shape, whole.dtype)
        places = end.coordinates() if transport == "simulation" else [dict(zip(last.axis_names, here, strict=True))]
        blocks = shards(moved) if transport == "simulation" else [moved.local]
        pairs = [(block, end.block(whole, at)) for block, at in zip(blocks, places, strict=True)]
        pairs.append((device_get(moved), whole))
        results = [same(ours, judged, bits=not summed) for ours, judged in pairs]
        if start.dtype in DIFFERENTIABLE:
            leaves = [whole.clone().requires_grad_() for _ in range(2)]
            moved, again = (
                device_put(device_put(leaf, start.partition, mesh=first), end.partition, mesh=last) for leaf in leaves
            )
            device_get(moved).backward(ct)
            again.backward(ct)
            results += [leaf.grad is not None and same(leaf.grad, ct) for leaf in leaves]
        if not all(results):
            wrong.append(f"{start}\n-> {end.partition} on {last!r}: {results}")
    return wrong


def test_a_moved_value_is_as_if_put_there_at_once(four: Processes) -> None:
    assert misplaced(some_moves(600 if FULL else 120), "simulation") == []
    assert four.run(misplaced, some_moves(100 if FULL else 20, seed=1), "process_group") == [[]] * 4


def test_what_lies_right_is_not_moved() -> None:
    x = device_put(torch.arange(5.0), P("x"), mesh=GRID)
    assert device_put(x, P(("x",)), mesh=GRID).local is x.local


# --- trees ----------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["first", "second"])


def test_specs_are_a_prefix_and_the_tree_keeps_its_types() -> None:
    a, b, c = torch.arange(6.0), torch.arange(12.0).view(4, 3), torch.tensor(2)
    tree = {"z": Pair([a, {"b": b}], None), "a": OrderedDict([("q", b), ("c", c)]), "name": "layer", "n": 3, "t": (b,)}
    specs = {"z": P("x"), "a": {"c": P(), "q": P(None, "y")}, "name": None, "n": None, "t": None}
    with set_mesh(GRID):
        put = device_put(tree, specs)
    assert list(put) == list(tree)
    assert type(put["z"]) is Pair
    assert list(put["a"]) == ["q", "c"]
    assert (put["name"], put["n"], put["z"].second) == ("layer", 3, None)
    assert put["t"][0] is b
    found = [put["z"].first[0], put["z"].first[1]["b"], put["a"]["q"], put["a"]["c"]]
    assert [x.spec.partition for x in found] == [P("x"), P("x", None), P(None, "y"), P()]
    back = device_get(put)
    assert optree.tree_structure(back) == optree.tree_structure(tree)
    for ours, given in zip(optree.tree_leaves(back), optree.tree_leaves(tree), strict=True):
        assert torch.equal(ours, given) if isinstance(given, Tensor) else ours == given


def check_from_a_source(transport: str) -> None:
    """Only rank 1 holds the tree; the others hear of its structure."""
    mesh = line(transport)
    whole = torch.arange(10.0).view(5, 2)
    simulated = transport == "simulation"
    tree = {"w": (whole, [whole[0]]), "step": 7, "none": None}
    here = simulated or mesh.coordinate() == (1,)
    put = device_put(tree if here else None, {"w": P("x"), "step": None, "none": P()}, mesh=mesh, src=1)
    assert optree.tree_structure(device_get(put)) == optree.tree_structure(tree)
    assert put["step"] == 7
    assert torch.equal(device_get(put["w"][0]), whole)
    assert torch.equal(device_get(put["w"][1][0]), whole[0])
    whole.add_(1)  # the blocks are in memory of their own
    assert torch.equal(device_get(put["w"][0]), torch.arange(10.0).view(5, 2))


def test_put_from_one_source(four: Processes) -> None:
    check_from_a_source("simulation")
    four.run(check_from_a_source, "process_group")


# --- blocks computed where they lie ---------------------------------------------------------------------------------


def asked_for(shape: tuple[int, ...], spec: P, transport: str) -> list[tuple[tuple[int, int], ...]]:
    """The windows that a callback is called with on this process."""
    asked = []

    def make(index: tuple[slice, ...]) -> Tensor:
        assert all(s.step is None for s in index)
        asked.append(tuple((s.start, s.stop) for s in index))
        return torch.zeros([s.stop - s.start for s in index], dtype=torch.int16)

    made = from_callback(shape, spec, make, mesh=line(transport))
    assert made.dtype is torch.int16
    return asked


def test_a_callback_is_asked_for_local_blocks_only(four: Processes) -> None:
    blocks = [((0, 2), (0, 3)), ((2, 4), (0, 3)), ((4, 5), (0, 3)), ((5, 5), (0, 3))]
    assert asked_for((5, 3), P("x"), "simulation") == blocks
    assert four.run(asked_for, (5, 3), P("x"), "process_group") == [[block] for block in blocks]
    assert asked_for((5, 3), P(), "simulation") == [((0, 5), (0, 3))]  # all ranks have it: made once
    assert four.run(asked_for, (5, 3), P(), "process_group") == [[((0, 5), (0, 3))]] * 4


def test_a_callback_on_a_grid() -> None:
    asked: list[Any] = []
    whole = torch.arange(35).view(5, 7)

    def make(index: tuple[slice, ...]) -> Tensor:
        asked.append(index)
        return whole[index]

    x = from_callback((5, 7), P(None, ("y", "x")), make, mesh=GRID)
    spec = x.spec
    at = [(i, j) for i in range(2) for j in range(3)]
    assert [index[1].start for index in asked] == [spec.offset(place)[1] for place in at]
    assert torch.equal(device_get(x), whole)


# --- memory and gradients -------------------------------------------------------------------------------------------

SPECS = (P(), P("x"), P(None, "x"), P(reduced={"x"}), P(unreduced={"x"}))


def shared(transport: str) -> list[str]:
    """The specs under which a write into one side of device_put or device_get shows on the other."""
    wrong = []
    for mesh in (line(transport), make_mesh((4, 1), ("y", "x"), transport=transport, device="cpu")):
        for spec in SPECS:
            for requires_grad in (False, True):
                whole = torch.ones(4, 4, dtype=F64, requires_grad=requires_grad)
                put = device_put(whole, spec, mesh=mesh)
                got = device_get(put)
                with torch.no_grad():
                    whole.add_(1)
                    ones = device_get(put.detach())
                    put.local.detach().add_(1)
                if not (ones == 1).all() or not (got == 1).all():
                    wrong.append(f"{spec} on {mesh!r}, requires_grad={requires_grad}")
    return wrong


def _added(mesh: Mesh, spec: P, checked: bool) -> Callable[[Any], Any]:
    def add(block: Tensor) -> Tensor:
        return block.detach().add_(1)

    return shard_map(add, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=checked)


def _handed_on(mesh: Mesh, spec: P) -> Callable[[Any], Any]:
    return shard_map(lambda block: block, mesh=mesh, in_specs=spec, out_specs=spec)


#: what cuts a part off a whole value, and a write into the part
CUTS: dict[str, Callable[[Any, P, Mesh], Any]] = {
    "a body": lambda x, spec, mesh: _added(mesh, spec, True)(x),
    "an unchecked body": lambda x, spec, mesh: _added(mesh, spec, False)(x.detach()),
    "a body that gives its argument": lambda x, spec, mesh: _handed_on(mesh, spec)(x).detach().add_(1),
    "reshard": lambda x, spec, mesh: reshard(x, spec, mesh=mesh).detach().add_(1),
    "reshard in flight": lambda x, spec, mesh: reshard(x, spec, mesh=mesh, wait=False).wait().detach().add_(1),
    "with_spec": lambda x, spec, mesh: with_spec(x, spec).detach().add_(1),
    "device_put": lambda x, spec, mesh: device_put(x, spec, mesh=mesh).detach().add_(1),
}


def seen(transport: str) -> list[str]:
    """What cuts a part off a value so that a write into the part shows in the value; and what loses the write."""
    wrong = []
    for mesh in (line(transport), make_mesh((4, 1), ("y", "x"), transport=transport, device="cpu")):
        for name, spec, laid, requires_grad in itertools.product(CUTS, SPECS[1:3], (False, True), (False, True)):
            whole = torch.ones(5, 4, dtype=F64)
            x = (device_put(whole, P(), mesh=mesh) if laid else whole).requires_grad_(requires_grad)
            with set_mesh(mesh):
                part = CUTS[name](x, spec, mesh)
            if not (device_get(part) == 2).all() or not (device_get(x.detach()) == 1).all():
                wrong.append(f"{name}, {spec} on {mesh!r}, of a Sharded={laid}, requires_grad={requires_grad}")
    return wrong


def test_a_write_into_a_part_does_not_show_in_what_it_was_cut_off(four: Processes) -> None:
    assert seen("simulation") == []
    assert four.run(seen, "process_group") == [[]] * 4


#: bodies that get a whole value, and give its memory as a block of their own
HANDED_ON: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "the argument": (lambda b: b, True),
    "the argument of an unchecked body": (lambda b: b, False),
    "a view": (lambda b: b[1:], False),
    "a detached tensor": (lambda b: b.detach(), False),
    "a cast": (lambda b: pcast(b, "x", to="varying"), True),
    "a view of a cast": (lambda b: pcast(b, "x", to="varying")[1:], True),
    "a tensor closed over": (lambda b: b, False),
    "a view of a tensor closed over": (lambda b: b[1:].view(-1, 2), False),
}


def _of_closed_over(f: Callable[[Tensor], Tensor], t: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda _: f(t)


def handed_on(transport: str) -> list[str]:
    """The bodies whose results share memory with an argument that has the same elements on all ranks."""
    wrong = []
    mesh = line(transport)
    for name, spec, is_jitted in itertools.product(HANDED_ON, (P("x"), P(unreduced={"x"})), (False, True)):
        f, checked = HANDED_ON[name]
        if checked and spec.unreduced and "cast" not in name:
            continue  # it is refused
        x, t = device_put(torch.ones(4, 4, dtype=F64), P(), mesh=mesh), torch.ones(4, 4, dtype=F64)
        f = _of_closed_over(f, t) if "closed over" in name else f
        body = shard_map(f, mesh=mesh, in_specs=P(), out_specs=spec, check_vma=checked)
        body = jit(body) if is_jitted else body
        for requires_grad in (False, True, False):
            part = body(x.detach().requires_grad_(requires_grad))
            part.local.detach().add_(1)
            if not (device_get(x) == 1).all() or not (t == 1).all():
                wrong.append(f"{name} as {spec}, is_jitted={is_jitted}, requires_grad={requires_grad}")
    return wrong


def test_a_write_into_a_result_does_not_show_in_a_whole_argument(four: Processes) -> None:
    assert handed_on("simulation") == []
    assert four.run(handed_on, "process_group") == [[]] * 4


def written_after_a_move(transport: str) -> list[list[float]]:
    """A value with a gradient whose route ends in a slice of what was received, written into without a gradient."""
    mesh = make_mesh((2, 2), ("x", "y"), transport=transport, device="cpu")
    found = []
    for wait in (True, False):
        x = (reshard(device_put(torch.arange(8.0), P(), mesh=mesh), P(unreduced={"x"})) * 1).requires_grad_()
        y = reshard(x, P(("x", "y")), wait=wait)
        y = y if wait else y.wait()
        with torch.no_grad():
            y.add_(1)
        found.append(device_get(y).tolist())
    return found


def test_a_slice_of_what_was_received_may_be_written_into(four: Processes) -> None:
    expected = [[float(i + 1) for i in range(8)]] * 2
    assert written_after_a_move("simulation") == expected
    assert four.run(written_after_a_move, "process_group") == [expected] * 4


def test_blocks_and_what_is_taken_off_have_memory_of_their_own(four: Processes) -> None:
    assert shared("simulation") == []
    assert four.run(shared, "process_group") == [[]] * 4


@pytest.mark.parametrize("spec", [P(), P("x"), P(("y", "x")), P("y", "x"), P(reduced={"x"}), P("y", unreduced={"x"})])
def test_gradients_through_put_and_get(spec: P) -> None:
    whole = torch.linspace(-1, 1, 35, dtype=F64).view(5, 7)
    leaf = whole.clone().requires_grad_()
    x = device_put({"w": leaf.sin()}, spec, mesh=GRID)
    assert x["w"].requires_grad
    device_get(x)["w"].square().sum().backward()
    torch.testing.assert_close(leaf.grad, torch.sin(2 * whole), rtol=1e-12, atol=1e-12)
    second = grad(lambda w: grad(lambda v: device_get(device_put(v, spec, mesh=GRID)).pow(3).sum())(w).sum())(whole)
    torch.testing.assert_close(second, 6 * whole, rtol=1e-12, atol=1e-12)


def test_gradients_reach_a_local_leaf() -> None:
    block = torch.randn(2, 3, dtype=F64).requires_grad_()
    x = from_local(block, P("x"), mesh=LINE)
    ct = torch.randn(8, 3, dtype=F64)
    device_get(x).backward(ct)
    assert x.local is block
    assert x.shape == (8, 3)
    assert block.grad is not None
    for found, judged in zip(shards_of(block.grad, frame_over(LINE, ("x",))), ct.chunk(4), strict=True):
        assert torch.equal(found, judged)  # each rank's leaf has its own


def test_a_sharded_leaf_has_a_sharded_gradient() -> None:
    w = device_put(torch.arange(5, dtype=F64), P("x"), mesh=LINE).requires_grad_()
    assert w.grad is None
    device_get(w).square().sum().backward()
    assert w.grad is not None
    assert w.grad.spec is w.spec
    assert device_get(w.grad).tolist() == [0, 2, 4, 6, 8]
    assert not w.detach().requires_grad
    assert w.detach().spec is w.spec


# --- Sharded --------------------------------------------------------------------------------------------------------


def test_a_sharded_is_a_leaf_and_to_fspmd_a_node_with_one_child() -> None:
    x = device_put(torch.arange(5.0), P("x"), mesh=GRID)
    leaves, treedef = optree.tree_flatten({"w": x}, namespace="fspmd")
    assert len(leaves) == 1
    assert leaves[0] is x.local
    again = treedef.unflatten(leaves)["w"]
    assert type(again) is Sharded
    assert again.local is x.local
    assert again.spec is x.spec
    equal = optree.tree_structure(device_put(torch.zeros(5), P("x"), mesh=GRID), namespace="fspmd")
    structure = optree.tree_structure(x, namespace="fspmd")
    assert structure == equal
    assert hash(structure) == hash(equal)
    for other in (device_put(torch.zeros(6), P("x"), mesh=GRID), device_put(torch.zeros(5), P("y"), mesh=GRID)):
        assert optree.tree_structure(other, namespace="fspmd") != equal
    assert optree.tree_leaves({"w": x})[0] is x
    assert torch_pytree.tree_leaves({"w": x})[0] is x
    scaled = optree.tree_map(lambda t: t / t.norm(), x)  # on blocks each rank would have a norm of its own
    torch.testing.assert_close(device_get(scaled), torch.arange(5.0) / torch.arange(5.0).norm())


def check_properties(transport: str) -> None:
    mesh = line(transport)
    x = device_put(torch.zeros(5, 3, dtype=torch.bfloat16), P("x"), mesh=mesh)
    assert (x.shape, x.ndim, x.dtype) == ((5, 3), 2, torch.bfloat16)
    assert x.device == torch.device("cpu") == x.local.device
    assert x.spec.mesh is mesh or x.spec.mesh == mesh
    assert x.spec.partition is P("x", None)
    assert typeof(x) is x.spec
    assert not x.requires_grad
    assert x.requires_grad_() is x
    assert x.requires_grad is x.local.requires_grad is True
    assert not x.requires_grad_(False).requires_grad
    assert repr(x) == "Sharded bf16[5@x, 3] on mesh(x=4)"
    assert f"{x}".startswith(repr(x))
    assert f"{device_put(torch.tensor(2.5), P(), mesh=mesh):.2f}" == "2.50"
    assert (x.numel(), x.dim(), x.size(), x.size(0), len(x)) == (15, 2, (5, 3), 5, 5)
    assert x.data.spec is x.spec
    assert getattr(x, "absent", 7) == 7


def test_a_sharded_tells_of_the_global_tensor(four: Processes) -> None:
    check_properties("simulation")
    four.run(check_properties, "process_group")


@pytest.mark.parametrize(
    ("value", "spec", "text"),
    [
        (torch.zeros(8, 4), P("x"), "Sharded f32[8@x, 4] on mesh(x=2, y=3)"),
        (torch.tensor(1), P(), "Sharded i64[] on mesh(x=2, y=3)"),
        (torch.zeros(0, 2, dtype=torch.bool), P(("x", "y")), "Sharded bool[0@(x,y), 2] on mesh(x=2, y=3)"),
        (torch.zeros(2, dtype=torch.complex64), P("y", unreduced={"x"}), "Sharded c64[2@y]{U:x} on mesh(x=2, y=3)"),
    ],
)
def test_a_sharded_prints_its_spec(value: Tensor, spec: P, text: str) -> None:
    assert repr(device_put(value, spec, mesh=GRID)) == text


def test_raw_dtypes_are_among_those_tested() -> None:
    assert set(RAW) <= set(every_dtype())
