"""Donated arguments: their memory is free after its last use, and nobody sees what becomes of it."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
from full import FULL
from global_programs import leaf, program, run
from processes import Processes
from simulated import MESH
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fspmd
from fspmd import ArgumentError, DonationError, P, device_get, device_put, jit, make_mesh
from fspmd.programs.steps import in_flight, is_wait, written
from fspmd.transport.local_tensor import LocalTensor, blocks_of

Function = Callable[..., Any]
N = 64


class Peak(TorchDispatchMode):
    """Bytes of all memory that is alive after each torch function: the most of them."""

    def __init__(self, *given: Any) -> None:
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.bytes = 0
        self.see(given)

    def see(self, values: Any) -> None:
        for x in optree.tree_leaves(values, namespace="fspmd"):
            for shard in x.shards if isinstance(x, LocalTensor) else [x] if isinstance(x, Tensor) else []:
                storage = torch.Tensor.untyped_storage(shard)
                if storage.device.type != "meta":
                    self.known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.known = {key: (ref, n) for key, (ref, n) in self.known.items() if not ref.expired()}
        self.bytes = max(self.bytes, sum(n for _, n in self.known.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.see(out)
        return out


def descend(weights: Any, gradients: Any) -> Any:
    return {name: w - 0.1 * gradients[name] for name, w in weights.items()}


def momentum(state: Any, gradients: Any) -> Any:
    velocity = {name: 0.9 * v + gradients[name] for name, v in state["v"].items()}
    return {"v": velocity, "w": {name: w - 0.1 * velocity[name] for name, w in state["w"].items()}}


def train(weights: Any, x: Any) -> Any:
    def loss(weights: Any) -> Any:
        y = x
        for w in weights.values():
            y = torch.tanh(y @ w)
        return (y * y).sum()

    value, gradients = fspmd.value_and_grad(loss)(weights)
    return value, descend(weights, gradients)


def _made(lay: Function) -> dict[str, Any]:
    torch.manual_seed(0)
    return {f"w{i}": lay(torch.randn(N, N)) for i in range(4)}


def _sharded(x: Tensor) -> Any:
    return device_put(x, P(None, "x"), mesh=MESH)


STEPS: dict[str, tuple[Function, Function, Function]] = {
    f"{name} {kind}": (f, made, lay)
    for kind, lay in (("plain", lambda x: x), ("sharded", _sharded))
    for name, f, made in (
        ("descend", descend, lambda lay: (_made(lay), _made(lay))),
        ("momentum", momentum, lambda lay: ({"w": _made(lay), "v": _made(lay)}, _made(lay))),
        ("train", train, lambda lay: (_made(lay), lay(torch.randn(4, N)))),
    )
}


def _leaves(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, fspmd.Sharded))  # type: ignore[arg-type]


def _run(f: Function, made: Function, lay: Function) -> tuple[Any, int]:
    """The result, and the peak above what was there before."""
    args = list(made(lay))
    gc.collect()
    seen = Peak(args)
    before = seen.bytes
    with seen:
        return f(*args), seen.bytes - before


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", STEPS)
def test_peak(name: str) -> None:
    """A replay needs no more memory than the function itself, and less with donated arguments."""
    f, made, lay = STEPS[name]
    expected, eager = _run(f, made, lay)
    peaks = []
    for recorded in (jit(f), jit(f, donate_argnums=0)):
        _run(recorded, made, lay)
        found, peak = _run(recorded, made, lay)
        assert recorded.cache_info() == (1, 1, 1)
        peaks.append(peak)
        for x, y in zip(_leaves(found), _leaves(expected), strict=True):
            torch.testing.assert_close(device_get(x), device_get(y))
    plain, donated = peaks
    assert plain <= eager
    whole = N * N * 4 * 1.01
    if f is train:  # gradients need as much as new weights, which take their place as it is
        assert donated <= plain
    else:  # new values take the place of the old ones; the product beside them is all there is
        assert donated <= whole < plain / 4


@pytest.mark.one_of(2)
@pytest.mark.parametrize("lay", [lambda x: x, _sharded], ids=["plain", "sharded"])
def test_peak_of_gradients_that_are_asked_for_outside(lay: Function) -> None:
    """What backward needs is let go of after its last use there, unless the graph is retained."""

    def loss(x: Any, *weights: Any) -> Any:
        for w in weights:
            x = torch.tanh(x @ w)
        return (x * x).sum()

    def made(lay: Function) -> Any:
        return [lay(w).requires_grad_() for w in (*_made(torch.clone).values(), torch.eye(N))]

    def gradients(f: Function, again: bool) -> Function:
        def run(*leaves: Any) -> Any:
            out = f(*leaves)
            found = torch.autograd.grad(out, leaves, retain_graph=again)
            return torch.autograd.grad(out, leaves) if again else found

        return run

    recorded = jit(loss)
    _run(gradients(recorded, False), made, lay)
    for again in (False, True, False):
        expected, eager = _run(gradients(loss, again), made, lay)
        found, peak = _run(gradients(recorded, again), made, lay)
        assert peak <= eager
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(device_get(x), device_get(y))
    assert recorded.cache_info() == (3, 1, 1)
    leaves = made(lay)
    out = recorded(*leaves)
    torch.autograd.grad(out, leaves)
    with pytest.raises((RuntimeError, ArgumentError)):  # a second time, of a graph that is gone
        torch.autograd.grad(out, leaves)


USES: dict[str, Function] = {
    "operator": lambda x: x + 1,
    "function": lambda x: torch.stack([x, x]),
    "reduction": lambda x: x.sum(),
    "write": lambda x: x.zero_(),
    "value": lambda x: device_get(x).tolist(),
    "numpy": lambda x: device_get(x).numpy(),
    "jit": jit(lambda x: x + 1),
    "another": jit(lambda x, _: x, donate_argnums=0),
    "body": fspmd.shard_map(lambda x: x * 2, mesh=MESH, in_specs=P("x"), out_specs=P("x")),
}
LAYOUTS: dict[str, Function] = {
    "tensor": lambda x: x,
    "parameter": torch.nn.Parameter,
    "block": lambda x: device_put(x, P("x"), mesh=MESH),
    "replicated": lambda x: device_put(x, P(), mesh=MESH),
    "uneven": lambda x: device_put(x[:5], P("x"), mesh=MESH),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_donated_tensors_are_of_no_more_use(layout: str) -> None:
    step = jit(lambda x, y: x * 2 + y, donate_argnames="x")
    for _ in range(3):  # recorded, replayed
        made = LAYOUTS[layout](torch.ones(8))
        with torch.no_grad():
            out = step(made, y=1)
        assert (device_get(out) == 3).all()
        assert made.dtype is torch.float32
        for name, use in USES.items():
            if name == "another":
                with pytest.raises(
                    DonationError, match=r"^<a tensor of shape .*, donated as x of <lambda>> was used: "
                ):
                    use(made, 1)
            elif not (layout == "parameter" and name == "write"):
                with pytest.raises(ValueError, match=r"<a tensor of shape .*, donated as x of <lambda>> was used: its"):
                    use(made)
    assert step.cache_info() == (2, 1, 1)


def test_views_of_donated_tensors_stay_what_they_are() -> None:
    step = jit(lambda state, y: (state["w"][0] * 2, y.add_(1), state["w"][1][1:]), donate_argnums=0)
    for _ in range(3):
        first, second = torch.ones(4), torch.arange(4.0)
        rows, alias = first[:2], second.detach()
        out = step({"w": [first, second]}, rows)
        assert out[0].tolist() == [2.0] * 4
        assert rows.tolist() == [2.0] * 2
        assert alias.tolist() == [0, 1, 2, 3]
        assert out[2].data_ptr() == alias[1:].data_ptr()
        assert repr(first) == "<a tensor of shape (4,), donated as state['w'][0] of <lambda>>"


def test_results_lie_where_donated_arguments_did() -> None:
    step = jit(lambda state, g: [w - 0.1 * g for w in state], donate_argnums=0)

    def places(state: list[Any]) -> list[list[int]]:
        return [[x.data_ptr() for x in blocks_of(getattr(w, "local", w))] for w in state]

    for call in range(3):
        state = [make(torch.ones(8)) for name, make in LAYOUTS.items() if name != "parameter"]
        before = places(state)
        out = step(state, 1.0)
        assert places(out) == before or not call  # the first is recorded, and not replayed
        assert all((device_get(w) == 0.9).all() if isinstance(w, fspmd.Sharded) else (w == 0.9).all() for w in out)


WRITES: dict[str, Function] = {
    "index_put": lambda x, i, y: x.index_put((i,), y),
    "index_put, added": lambda x, i, y: x.index_put((i,), y, accumulate=True),
    "index_copy": lambda x, i, y: x.index_copy(0, i, y),
    "index_add": lambda x, i, y: x.index_add(0, i, y, alpha=2),
    "scatter": lambda x, i, y: x.scatter(0, i[:, None].expand(2, 3), y),
    "scatter, a number": lambda x, i, y: x.scatter(0, i[:, None].expand(2, 3), 7.0) + y.sum() * 0,
    "scatter_add": lambda x, i, y: x.scatter_add(0, i[:, None].expand(2, 3), y),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_at_indices_need_no_new_memory(name: str) -> None:
    f, (i, y) = WRITES[name], (torch.tensor([3, 1]), torch.randn(2, 3))
    step, from_itself = jit(f, donate_argnums=0), jit(lambda x: f(x, i, x[:2]), donate_argnums=0)
    for call in range(3):
        x = torch.randn(4, 3)
        expected, at = (f(x, i, y), f(x, i, x[:2])), x.data_ptr()
        torch.testing.assert_close(from_itself(x.clone()), expected[1])
        out = step(x, i, y)
        torch.testing.assert_close(out, expected[0])
        assert out.data_ptr() == at or not call


def test_memory_of_others_stays_what_it_is() -> None:
    recorded = jit(lambda x: x + 1, donate_argnums=0)
    recorded(torch.zeros(3))
    others = bytearray(12)
    assert torch.equal(recorded(torch.frombuffer(others, dtype=torch.float32)), torch.ones(3))
    assert others == bytearray(12)
    x = torch.zeros(3)
    storage = x.untyped_storage()
    recorded(x)
    assert not any(storage)
    x = torch.zeros(3)
    file, size = x.untyped_storage()._share_fd_cpu_()[:2]
    elsewhere = torch.UntypedStorage._new_shared_fd_cpu(os.dup(file), size)  # as another process has it
    recorded(x)
    assert not any(elsewhere)


def test_views_of_blocks_stay_what_they_are() -> None:
    step = jit(lambda x: (x * 2).exp() + 1, donate_argnums=0)
    apart = fspmd.shard_map(lambda x: fspmd.pcast(x, "x", to="varying"), mesh=MESH, in_specs=P(), out_specs=P("x"))
    plain = torch.arange(6.0)
    for _ in range(3):
        for made in (
            lambda: (x := device_put(plain, P("x"), mesh=MESH), fspmd.Sharded(x.local.detach(), x.spec)),
            lambda: (x := device_put(plain, P(), mesh=MESH), apart(x)),
            lambda: (apart(x := device_put(plain, P(), mesh=MESH)), x),
        ):
            x, other = made()
            before, given = device_get(other).clone(), device_get(x).clone()
            torch.testing.assert_close(device_get(step(x)), (given * 2).exp() + 1)
            assert torch.equal(device_get(other), before)


def test_what_autograd_has_saved_stays_what_it_is() -> None:
    step = jit(lambda w: w * 0, donate_argnums=0)
    for _ in range(2):
        w = torch.arange(3.0).requires_grad_()
        h = w * 2
        y = (h * h).sum()
        with torch.no_grad():
            step(h)
        (g,) = torch.autograd.grad(y, w)
        assert g.tolist() == [0, 8, 16]


def test_results_that_autograd_follows_keep_donated_arguments() -> None:
    step = jit(lambda x, w: (x * w).sum(), donate_argnums=0)
    for _ in range(2):
        x, w = torch.arange(3.0), torch.ones(3).requires_grad_()
        loss = step(x, w)
        with pytest.raises(DonationError):
            x.sum()
        (g,) = torch.autograd.grad(loss, w, create_graph=True)
        assert g.tolist() == [0, 1, 2]
    with pytest.raises(ArgumentError, match=r"^x of <lambda> is donated, but has a gradient, so that autograd would"):
        step(torch.ones(3).requires_grad_(), w)


def test_arguments_that_cannot_be_donated() -> None:
    step = jit(lambda x, y: x + y, donate_argnums=(0,))
    x = torch.ones(3)
    step(x, x.clone())
    for _ in range(2):
        y = torch.ones(3)
        with pytest.raises(ArgumentError, match=r"^jit got the tensor donated as x of <lambda> in two arg"):
            step(y, y)
        assert y.tolist() == [1, 1, 1]
    with pytest.raises(ArgumentError, match=r"got 0, 'x' both in static_argnums or static_argnames and in donate_arg"):
        jit(lambda x: x, static_argnums=0, donate_argnames="x")


def test_donated_tensors_that_lie_in_memory_in_another_way() -> None:
    step = jit(lambda x, y: (x.mul_(2).view(-1) + 1, y.add_(1)), donate_argnums=0)
    step(torch.ones(2, 3), torch.ones(3, 2))
    x, y = torch.arange(6.0).view(3, 2).t(), torch.zeros(2, 3).t()
    assert step(x, y)[0].tolist() == [1, 5, 9, 3, 7, 11]
    assert y.tolist() == [[1.0, 1.0]] * 3
    with pytest.raises(DonationError):
        x.sum()


def check_on_processes(mesh: fspmd.Mesh) -> None:
    step = jit(lambda w, g: w - 0.5 * fspmd.reshard(g, P("x")), donate_argnums=0)
    for _ in range(2):
        w = device_put(torch.arange(6.0), P("x"), mesh=mesh)
        given = w
        w = step(w, device_put(torch.ones(6), P(), mesh=mesh))
        assert device_get(w).tolist() == (torch.arange(6.0) - 0.5).tolist()
        with pytest.raises(DonationError):
            device_get(given)
    for name, (hold, is_shared) in HOLDERS.items():
        check_held_block(mesh, name, hold, is_shared)


#: what refers to a block beside its value, and whether that sees the memory
HOLDERS: dict[str, tuple[Function, bool]] = {
    "nothing": (lambda x: None, False),
    "the value": (lambda x: x, False),
    "a view": (lambda x: x.local[:1], True),
    "a detached tensor": (lambda x: x.local.detach(), True),
    "the storage": (lambda x: x.local.untyped_storage(), True),
    "the block": (lambda x: x.local, False),
    "another value": (lambda x: fspmd.Sharded(x.local, x.spec), False),
    "a weak reference": (lambda x: weakref.ref(x.local), False),
    "an attribute": (lambda x: setattr(x.local, "mark", 1), False),
    "NumPy": (lambda x: x.local.numpy(), True),
}


def check_held_block(mesh: fspmd.Mesh, name: str, hold: Function, is_shared: bool) -> None:
    """A result lies in the memory of a donated block unless others see that memory, which stays what it is."""
    step = jit(lambda tree, g: {"n": tree["n"], "w": tree["w"] - g}, donate_argnums=0)
    tree = {"n": device_put(torch.ones(2), P(), mesh=mesh), "w": device_put(torch.arange(8.0), P("x"), mesh=mesh)}
    g = device_put(torch.ones(8), P("x"), mesh=mesh)
    for call in range(4):
        given, held, at = tree["w"], hold(tree["w"]), tree["w"].local.data_ptr()
        block, before = weakref.ref(tree["w"].local) if call == 3 else None, tree["w"].local.tolist()
        tree = step(tree, g)
        out = tree["w"].local
        assert out.tolist() == [x - 1 for x in before], name
        assert (out.data_ptr() == at) == (not is_shared) or not call, name
        assert not out.__dict__, name
        if block is not None:
            assert block() is not out, name
        if is_shared:
            kept = torch.tensor(held).view(torch.float32) if name == "the storage" else torch.as_tensor(held)
            assert kept.flatten()[:1].tolist() == before[:1], name
        for other in (given, held):
            if isinstance(other, fspmd.Sharded) or name == "the block":
                with pytest.raises(DonationError):
                    other + 1
        del given, held, out, other
    assert step.cache_info() == (3, 1, 1)
    with pytest.raises(ArgumentError, match=r"^jit got the tensor donated as tree\['n'\] of <lambda> in two arguments"):
        step({"n": tree["n"], "w": tree["n"]}, tree["n"])


@pytest.mark.one_of(2)
@pytest.mark.parametrize("seed", range(400 if FULL else 10))
def test_chains_of_torch_calls_on_donated_values(seed: int) -> None:
    written = program(seed)
    mesh = fspmd.make_mesh(written.axes, ("x", "y")[: len(written.axes)], transport="simulation")
    step = jit(lambda *leaves: run(written, list(leaves)), donate_argnums=tuple(range(len(written.leaves))))
    with torch.no_grad():
        for _ in range(3):
            mine = [device_put(leaf(i, shape), spec, mesh=mesh) for i, (shape, spec) in enumerate(written.leaves)]
            copies = [x.clone() for x in mine]
            kept = [fspmd.Sharded(x.local.detach(), x.spec) for x in mine[::2]]  # others hold the memory of some
            try:
                expected = run(written, copies)
            except fspmd.VarianceError:
                return
            values = [device_get(x).clone() for x in copies]
            for one, two in zip(step(*mine), expected, strict=True):
                torch.testing.assert_close(device_get(one), device_get(two), equal_nan=True)
            for one, two in zip(kept, values[::2], strict=True):
                torch.testing.assert_close(device_get(one), two, equal_nan=True)


SENT: dict[str, Function] = {
    "psum": lambda x, waits: fspmd.psum(x, "x", wait=waits),
    "gather": lambda x, waits: fspmd.all_gather(x, "x", tiled=True, wait=waits),
    "scatter": lambda x, waits: fspmd.psum_scatter(x, "x", tiled=True, wait=waits),
    "exchange": lambda x, waits: fspmd.all_to_all(x, "x", 0, 0, tiled=True, wait=waits),
    "permute": lambda x, waits: fspmd.ppermute(x, "x", [(0, 1)], wait=waits),
}


@pytest.mark.parametrize("sent", SENT)
@pytest.mark.parametrize("passes", [[], ["overlap"], ["coalesce", "overlap", "dead_code"]], ids=str)
def test_what_is_being_sent_is_not_written_into(sent: str, passes: list[str]) -> None:
    """Until it is waited for; from there on it is."""

    def body(x: Tensor) -> tuple[Tensor, ...]:
        view = x.view(-1, 2)
        landing = SENT[sent](view, waits := passes != [])
        first = (x * 2).sin()
        landed = landing if waits else landing.wait()
        return first, landed, (x * landed.sum()).exp()

    f = fspmd.shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    program = jit(f, passes=passes, donate_argnums=0).lower(device_put(torch.ones(64, 2), P("x"), mesh=MESH)).program
    steps = list(program.graph.nodes)
    (begin,), (wait,) = ([i for i, node in enumerate(steps) if is_(node)] for is_ in (in_flight, is_wait))
    writes = [i for i, node in enumerate(steps) if written(node)]
    assert writes
    assert begin < wait < min(writes)


class Turned(NamedTuple):
    """A named tuple that a library has registered as a node of its own, whose children come in another order."""

    w: Any
    m: Any


class _Turned(Turned):
    pass


optree.register_pytree_node(
    _Turned,
    lambda x: ((x.m, x.w), None),
    lambda _, children: _Turned(children[1], children[0]),
    namespace=optree.registry.__GLOBAL_NAMESPACE,
)


def faults_of_named_tuples(transport: str) -> list[str]:
    """Results that are wrong, and donated values that can be read."""
    mesh, wrong = make_mesh((2,), ("x",), transport=transport, device="cpu"), []
    f = jit(lambda t: _Turned(t.w - 0.5, t.m * 2), donate_argnums=0)
    for i in range(3):
        t = _Turned(*(device_put(torch.full((4,), value), P("x"), mesh=mesh) for value in (3.0, 5.0)))
        held = t.m.local if i == 2 else None
        wrong += [f"{i}: {x}" for x, y in zip(f(t), (2.5, 10.0), strict=True) if device_get(x).tolist() != [y] * 4]
        for x in t:
            try:
                wrong.append(f"{i}: {device_get(x)}")
            except DonationError:
                continue
        del held
    return wrong


def test_arguments_of_registered_named_tuples() -> None:
    assert not faults_of_named_tuples("simulation")
    with Processes(2) as pool:
        assert pool.run(faults_of_named_tuples, "process_group") == [[], []]
