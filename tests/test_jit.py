"""What jit replays is what the function would have done: values, gradients, random numbers, refusals.

Each program is recorded on some arguments and replayed on others, on which its judge knows the answer.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
import pickle
import random
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from typing import Any

import numpy as np
import optree
import pytest
import test_debug_print
import test_donation
import test_global_programs as chains
import test_jax_oracle as oracle
import test_passes as passes
import test_random_programs as bodies
import torch
import torch.nn.functional as F
from full import FULL
from hypothesis import HealthCheck, given, settings
from processes import Processes
from simulated import GRID, MESH
from torch import Tensor, func
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.dlpack import from_dlpack, to_dlpack
from torch.utils.weak import TensorWeakRef

import fspmd
from fspmd import ArgumentError, P, RecordError, Sharded, device_get, device_put, jit, psum, shard_map
from fspmd.programs.replay import PUBLIC, callable_of
from fspmd.tracing import recorder
from fspmd.transport.local_tensor import LocalTensor

F64 = torch.float64
Function = Callable[..., Any]


def replayed(f: Function, *args: Any, **options: Any) -> Any:
    """What jit replays on these arguments, recorded on others."""
    recorded = jit(f, **options)
    recorded(*optree.tree_map(_another, args))
    out = recorded(*args)
    if not recorded.cache_info().hits:  # the others lie in memory in another way
        out = recorded(*args)
    assert recorded.cache_info().hits == 1
    return out


def _another(x: Any) -> Any:
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        return x
    return (x.detach() * 0.5 + 0.1).requires_grad_(x.requires_grad)


def test_what_died_at_an_address_hides_no_block_that_lies_there_now() -> None:
    """Of blocks that ours put together; they would be constants of the record."""

    def f(x: Sharded) -> Sharded:
        y: Any = (x * 2).local
        values, dead = recorder(), TensorWeakRef(torch.empty(0))
        for shard in y.shards:
            assert id(shard) not in values._nodes
            values._nodes[id(shard)] = dead, None
        return Sharded(LocalTensor(y.shards, y.frame), x.spec) * 3

    x = device_put(torch.arange(8.0), P("x"), mesh=MESH)
    torch.testing.assert_close(device_get(replayed(f, x)), torch.arange(8.0) * 6)


def test_writes_into_constants_that_are_made_within() -> None:
    def f(x: Tensor) -> Tensor:
        made = torch.tensor([1.0, 2.0])
        before = made * x
        made[:1] += 1
        return before + made * x

    torch.testing.assert_close(replayed(f, torch.ones(2)), torch.tensor([3.0, 4.0]))


def test_writes_by_out() -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return torch.add(x, 1, out=y) * 2

    y = torch.zeros(2, 4).t()  # lies otherwise than when it is recorded
    recorded = jit(f)
    recorded(torch.ones(4, 2), torch.zeros(4, 2))
    recorded(torch.ones(4, 2), y)
    assert recorded.cache_info().hits == 1
    assert torch.equal(y, torch.full((4, 2), 2.0))
    with pytest.raises(RecordError, match="writes into a tensor of shape"):
        jit(lambda x: f(x, y))(torch.ones(4, 2))


# --- programs of the other tests ------------------------------------------------------------------------------------


#: a branch on a value, which a record cannot hold
REFUSED_OF_JAX = ("cond_on_invariant",)
ANSWERED = [name for name in oracle.SMOOTH if name not in REFUSED_OF_JAX]


@pytest.mark.one_of(8)
@pytest.mark.parametrize("name", ANSWERED[:: 1 if FULL else 5])
def test_programs_that_jax_has_answered(name: str) -> None:
    """Recorded with their gradients, and replayed with gradients by autograd, twice."""
    made = oracle.PROGRAMS[name]
    golden = oracle.GOLDEN[name]
    program, inputs, chosen = oracle.prepared(made)
    found = replayed(program, *inputs)
    oracle.agree("output", found, golden["outputs"])
    total = oracle.scalar(found)
    grads = torch.autograd.grad(total, chosen, allow_unused=True) if total.requires_grad else [None] * len(chosen)
    oracle.agree("gradient", grads, golden["grads"])
    gradient = fspmd.grad(lambda *args: oracle.scalar(program(*args)), argnums=made.differentiated())
    oracle.agree("gradient", replayed(gradient, *(x.detach() for x in inputs)), golden["grads"])


@settings(
    max_examples=1000 if FULL else 12,
    deadline=None,
    derandomize=not FULL,
    database=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
@given(bodies.programs())
def test_random_bodies(drawn: Any) -> None:
    bodies.check(*drawn, replayed)


@pytest.mark.parametrize("seed", range(0, 2000 if FULL else 5, 5))
def test_chains_of_torch_calls_on_sharded_values(seed: int) -> None:
    chains.check_seeds(range(seed, seed + 5), None, replayed)


@pytest.mark.parametrize("seed", [1201, 1725])  # arguments of which one rank's block is expanded, and others are empty
def test_uneven_arguments_that_are_expanded_on_some_ranks(seed: int) -> None:
    chains.check_seeds([seed], None, replayed)


def check_writes_of_collectives(mesh: fspmd.Mesh) -> None:
    """Gathers and scatters straight into tensors are one step each, and one more that waits."""

    def into(x: Tensor, whole: Tensor, wait: bool) -> Tensor:
        gathered = fspmd.all_gather_into(whole, x, "x", wait=wait)
        doubled = x * 2
        if not wait:
            gathered.wait()
        part = fspmd.psum_scatter_into(x.new_empty(x.shape), whole + 1, "x", wait=wait)
        return whole.sum() * doubled + (part if wait else part.wait()) * psum(x, "x", wait=False).wait()

    x, n = torch.arange(40_000.0, dtype=F64), mesh.size
    expected = 2 * x.sum() * x + n * (x + 1) * x.view(n, -1).sum(0).repeat(n)
    for wait in (True, False):
        body = shard_map(
            lambda x, wait=wait: into(x, x.new_empty(x.shape[0] * n), wait),
            mesh=mesh,
            in_specs=P("x"),
            out_specs=P("x"),
        )
        for names in (None, ["dead_code", "equal_steps", "coalesce", "overlap"]):
            recorded = jit(body, passes=names)
            for scale in (3.0, 2.0, 1.0):
                found = device_get(recorded(x * scale))
            torch.testing.assert_close(found, expected)
        told = [(one.kind, one.shape) for one in jit(body).lower(x).collectives()]
        assert told == [("all_gather", (len(x) // n,)), ("psum_scatter", x.shape), ("psum", (len(x) // n,))]
    whole = torch.empty(len(x))
    with pytest.raises(RecordError, match=r"all_gather\(\) writes into a tensor of shape .* closes over"):
        jit(shard_map(lambda x: into(x, whole, True), mesh=mesh, in_specs=P("x"), out_specs=P("x")))(x.float())


def test_writes_of_collectives() -> None:
    check_writes_of_collectives(MESH)


def _with_gains(axis: str) -> Function:
    """A body of which passes leave fewer collectives."""

    def body(x: Tensor) -> Tensor:
        whole = fspmd.all_gather(x.sin(), axis, tiled=True)
        return psum(x, axis) + psum(x, axis) * 2 + fspmd.psum_scatter(whole, axis, tiled=True)

    return body


def check_draws_of_ranks(mesh: fspmd.Mesh) -> None:
    """Of each rank its own; and a parameter is one while it is recorded."""

    def f(w: Tensor, x: Tensor) -> Tensor:
        drawn = shard_map(_dropped, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x)
        return device_get(drawn) * w if isinstance(w, torch.nn.Parameter) else w

    recorded, w = jit(f), torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=F64))
    for _ in range(3):
        found = []
        for one in (recorded, f):
            torch.manual_seed(5)
            found.append([one(w, X).detach(), torch.rand(3)])
        torch.testing.assert_close(*found)


def check_ranks_without_a_record(mesh: fspmd.Mesh) -> None:
    """Some record while others replay, in two threads; and some are watched."""
    rank, x = mesh.coordinate()[0], torch.arange(8.0)  # type: ignore[index]
    grid = fspmd.make_mesh((2, 2), ("y", "z"))
    maps = [
        shard_map(_with_gains(axis), mesh=on, in_specs=P(axis), out_specs=P(axis))
        for axis, on in (("x", mesh), ("y", grid), ("z", grid))
    ]
    expected = [f(x) for f in maps]
    recorded = [jit(f) for f in maps]

    def check(i: int) -> None:
        for k in range(8):
            if k % 4 == rank:
                recorded[i].clear_cache()
            found.append((recorded[i](x), expected[i]))

    found: list[tuple[Sharded, Sharded]] = []
    with fspmd.communication_log() if rank else contextlib.nullcontext([]) as log:
        check(0)
    once = [one.kind for one in recorded[0].lower(x).collectives()]  # type: ignore[attr-defined]
    assert [one.kind for one in log] == (once * 8 if rank else [])
    assert once.count("psum") == 1
    threads = [threading.Thread(target=check, args=(1 + (i + rank) % 2,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert len(found) == 24
    for ours, theirs in found:
        torch.testing.assert_close(ours.local, theirs.local)


def check_python_of_ranks(mesh: fspmd.Mesh) -> None:
    """What rank_map runs takes another way in each replay, and so do its gradients."""

    def way(x: Tensor, w: Tensor, n: int) -> tuple[Tensor, float]:
        y = x * w[n]
        return (y.sin() if x[0] > 1 else y.square()), float(x.detach().sum())

    def loss(x: Tensor, w: Tensor) -> Tensor:
        y, total = fspmd.rank_map(way, x, w, 1)
        return psum((y * total + fspmd.rank_map(torch.rand_like, x)).sum(), "x")

    mapped = shard_map(loss, mesh=mesh, in_specs=(P("x"), P()), out_specs=P())
    both = fspmd.value_and_grad(lambda *args: device_get(mapped(*args)), (0, 1))
    recorded, alone = jit(both), jit(mapped)
    w = torch.tensor([2.0, 3.0], dtype=F64)
    for scale in (3.0, -1.0, 1.0, 0.2):
        x = scale * torch.linspace(-1, 2, 8, dtype=F64)
        torch.manual_seed(3)
        expected = optree.tree_leaves(both(x, w))
        torch.manual_seed(3)
        torch.testing.assert_close(optree.tree_leaves(recorded(x, w)), expected)
        torch.manual_seed(3)
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        total = device_get(alone(*leaves))
        torch.testing.assert_close([total.detach(), *torch.autograd.grad(total, leaves)], expected)
    assert recorded.cache_info().hits == alone.cache_info().hits == 3


def test_python_of_ranks() -> None:
    check_python_of_ranks(MESH)
    longer = jit(_on_ranks(lambda x: fspmd.rank_map(lambda x: x[: 1 + int(x[0])], x)))
    for x in (torch.zeros(8), torch.full((8,), 0.5)):
        assert torch.equal(device_get(longer(x)), x[:4])
    with pytest.raises(
        RecordError, match=r"rank_map runs returned .*\(1,\), \(2,\)\)\].* when jit recorded it; return"
    ):
        longer(torch.tensor([0.0, 0, 0, 0, 0, 0, 1, 0]))
    with pytest.raises(RecordError, match=r"lower\(...\) has shapes alone, but got a call of rank_map"):
        longer.lower(torch.zeros(8))  # type: ignore[attr-defined]


def test_functions_that_need_values_write_and_draw_once() -> None:
    """They are recorded on copies of their arguments, which share memory as those do."""
    mapped = _on_ranks(lambda x: fspmd.rank_map(lambda x: x + float(x.sum()), x))

    def f(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return torch.as_tensor(device_get(mapped(y))) + torch.rand(8, generator=OTHER) + torch.rand(8)

    recorded, found = jit(f), []
    for run in f, recorded:
        torch.manual_seed(3)
        OTHER.manual_seed(4)
        base = torch.arange(12.0)
        for _ in range(2):
            found.append((run(base[:8], base[4:]), base.clone()))
    assert recorded.cache_info()[:2] == (1, 1)
    torch.testing.assert_close(found[:2], found[2:])


def test_arguments_that_shared_a_storage_when_they_were_recorded() -> None:
    """Later ones lie apart and have other strides, so they are copied, and what is written is copied back."""

    def f(w: Tensor, x: Tensor) -> None:
        x.sub_((w * 2).cos())

    recorded, base = jit(f), torch.rand(20, dtype=F64)
    apart = [torch.rand(3, 3, dtype=F64).t() for _ in range(2)]
    for arguments in ([base[1:10].view(3, 3), base[11:20].view(3, 3)], apart):
        want = [x.clone() for x in arguments]
        f(*want)
        recorded(*arguments)
        torch.testing.assert_close(arguments, want)
    assert recorded.cache_info()[:2] == (1, 1)


def test_gradients_of_gradients_of_python_of_ranks() -> None:
    """Each depends on the arguments, too, and not on gradients alone; with a checkpoint, and of parameters."""

    def way(x: Tensor) -> Tensor:
        return x.pow(4) if x.sum() > 0 else x.sin()

    def expected(x: Tensor, n: int) -> Tensor:
        above = x.view(4, 2).sum(1, True).expand(4, 2).flatten() > 0
        return torch.where(above, math.perm(4, n) * x ** (4 - n), (x + n * torch.pi / 2).sin())

    mapped = _on_ranks(lambda x: fspmd.rank_map(way, x))
    derived: Any = lambda x: device_get(mapped(x)).sum()  # noqa: E731
    for n in range(1, 4):
        derived = fspmd.grad(lambda x, f=derived: f(x).sum())
        recorded, again = jit(derived), jit(fspmd.checkpoint(derived))
        for x in (torch.linspace(-1, 2, 8, dtype=F64), torch.linspace(1, -3, 8, dtype=F64)):
            torch.testing.assert_close([recorded(x), again(x)], [expected(x, n)] * 2)
            parameter = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(recorded(parameter).sum(), parameter)
            torch.testing.assert_close(gradient, expected(x, n + 1))


def check_draws_under_transforms(mesh: fspmd.Mesh) -> None:
    """They look at the values that they are given, within transforms that wrap them."""

    def of_blocks(f: Function) -> Function:
        return shard_map(f, mesh=mesh, in_specs=P("x"), out_specs=P("x"))

    def pushed(f: Function) -> Function:
        return lambda x: fspmd.jvp(f, (x,), (x.cos(),))[1]

    def mapped(f: Function, randomness: str = "same") -> Function:
        return lambda x: fspmd.vmap(lambda y: f(x, x * y), randomness=randomness)(torch.tensor([0.5, 0.25]))

    x = device_put(torch.rand(8, 6, generator=torch.Generator().manual_seed(0)), P("x"), mesh=mesh)
    drawing: list[Function] = [
        of_blocks(pushed(lambda x: F.dropout(x, 0.4))),
        of_blocks(pushed(lambda x: torch.rand_like(x) * x)),
        pushed(of_blocks(lambda x: torch.rand(6) * x)),
        pushed(lambda x: x.gather(1, torch.multinomial(x.detach(), 3, replacement=True))),
        pushed(lambda x: torch.normal(x.detach(), x.detach()) * x),
        *(pushed(lambda x, draw=draw: draw(x) * x) for draw in (torch.bernoulli, torch.poisson, F.dropout)),
        mapped(lambda x, y: torch.bernoulli(y) * x),
        mapped(lambda x, y: x.gather(1, torch.multinomial(y, 3))),
        mapped(lambda x, y: torch.poisson(y) * x),
        mapped(lambda x, y: F.one_hot((y * 4).long(), 5) * 1.0),
        mapped(torch.normal),
    ]
    for f in drawing[:: 1 if FULL else 4]:
        recorded = jit(f)
        for seed in (0, 1):
            got, want = [(torch.manual_seed(seed), run(x))[1] for run in (recorded, f)]
            assert torch.equal(device_get(got), device_get(want))
    with pytest.raises(fspmd.ArgumentError, match=r"^bernoulli got"):
        jit(mapped(lambda x, y: torch.bernoulli(y - 1) * x))(x)
    with pytest.raises(fspmd.ArgumentError, match=r"^vmap with randomness='different' maps a function that draws"):
        jit(mapped(lambda x, y: torch.bernoulli(y) * x, "different"))(x)


def _on_processes(seeds: Iterable[int]) -> None:
    chains.check_seeds(seeds, 4, replayed)
    mesh = fspmd.make_mesh((4,), ("x",))
    for check in (
        check_sizes_that_are_values,
        check_writes_of_collectives,
        check_python_of_ranks,
        check_draws_of_ranks,
        check_draws_under_transforms,
        check_ranks_without_a_record,
        test_donation.check_on_processes,
        test_debug_print.check_on_processes,
    ):
        check(mesh)
    names = [name for name in ANSWERED if math.prod(oracle.PROGRAMS[name].mesh_shape) == 4]
    for name in names if FULL else [*names[::144], "custom_vjp_psum", "unchecked_derivatives_of_pcast"]:
        test_programs_that_jax_has_answered(name)


def test_on_processes() -> None:
    with Processes(4) as pool:
        pool.run(passes.on_processes, range(4 if FULL else 1))
        first, *others = pool.run(passes.collectives_in_order, range(12, 24 if FULL else 13))
        assert all(one == first for one in others)
        pool.run(_on_processes, range(400) if FULL else [399], seconds=1500 if FULL else 300)


# --- randomness -------------------------------------------------------------------------------------------------------

X = torch.linspace(-1, 2, 24, dtype=F64).view(8, 3)


def _dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.4) + torch.randn_like(x)


def _checkpointed(x: Tensor) -> Tensor:
    return psum((fspmd.checkpoint(_dropped)(x) ** 2).sum(), "x")


DRAWS: dict[str, Function] = {
    "plain": lambda x: _dropped(device_get(x)),
    "sharded": lambda x: F.dropout(x, 0.4) + torch.rand_like(x),
    "made": lambda x: x * fspmd.randn(8, 3, spec=P(None, "x"), mesh=MESH, dtype=F64) + torch.randperm(3),
    "varying": shard_map(_dropped, mesh=MESH, in_specs=P("x"), out_specs=P("x")),
    "unchecked": shard_map(_dropped, mesh=MESH, in_specs=P("x"), out_specs=P("x"), check_vma=False),
    "gradient": fspmd.grad(lambda x: (F.dropout(x, 0.4) ** 2).sum()),
    "recomputed": fspmd.grad(shard_map(_checkpointed, mesh=MESH, in_specs=P("x"), out_specs=P())),
    "tangent": lambda x: fspmd.jvp(lambda x: F.dropout(x, 0.4) * torch.rand_like(x), (x,), (x,))[1],
    "tangent of a body": lambda x: fspmd.jvp(DRAWS["varying"], (x,), (x,))[1],
}


def _drawn(f: Function, x: Sharded, times: int) -> list[Tensor]:
    torch.manual_seed(5)
    return [device_get(f(x)) for _ in range(times)]


@pytest.mark.parametrize("name", DRAWS)
def test_each_call_draws_anew_what_it_would_have_drawn(name: str) -> None:
    x = device_put(X, P("x"), mesh=MESH)
    expected = _drawn(DRAWS[name], x, 3)
    recorded = jit(DRAWS[name])
    for found in (_drawn(recorded, x, 3), _drawn(recorded, x, 3)):
        assert all(map(torch.equal, found, expected))
    assert not torch.equal(expected[0], expected[1])
    assert recorded.cache_info() == (5, 1, 1)


def test_gradients_twice_see_the_numbers_that_forward_drew() -> None:
    x = device_put(X, P("x"), mesh=MESH).requires_grad_()
    recorded = jit(lambda x: (F.dropout(x, 0.4) ** 3).sum())
    recorded(x)
    found = []
    for f in (recorded, lambda x: (F.dropout(x, 0.4) ** 3).sum()):
        torch.manual_seed(7)
        (g,) = torch.autograd.grad(f(x), x, create_graph=True)
        (h,) = torch.autograd.grad((g * g).sum(), x)
        found += [device_get(g).detach(), device_get(h)]
    torch.testing.assert_close(found[:2], found[2:])


def test_gradients_twice_through_pending_sums_between_two_records() -> None:
    """A pending sum's cotangent is one value for all ranks, and the gradient of that is pending again."""
    maker = shard_map(torch.sin, mesh=MESH, in_specs=P("x"), out_specs=P(unreduced={"x"}))
    scatter = shard_map(
        lambda u: fspmd.psum_scatter(u, "x", tiled=True).sin(),
        mesh=MESH,
        in_specs=P(unreduced={"x"}),
        out_specs=P("x"),
    )
    maker, scatter = jit(maker), jit(scatter)
    x = torch.linspace(-1, 2, 48, dtype=F64).view(16, 3).requires_grad_()

    def plain(x: Tensor) -> Tensor:
        return x.view(4, 4, 3).sin().sum(0).sin()

    expected = torch.autograd.functional.hvp(lambda x: plain(x).pow(2).sum(), x, x.detach().cos())[1]
    for _ in range(2):
        found = torch.autograd.functional.hvp(lambda x: device_get(scatter(maker(x))).pow(2).sum(), x, x.detach().cos())
        torch.testing.assert_close(found[1], expected)


@pytest.mark.parametrize("spec", [P("x"), P("y", "x"), P(None, ("x", "y")), P(unreduced={"x"})], ids=str)
def test_gradients_twice_where_both_are_taken_by_name(spec: P) -> None:
    """The function runs again within a derivative of ours, on `Sharded` values, too."""
    programs: list[Function] = [
        lambda w: torch.tanh(w @ w.mT).pow(2).sum(),
        lambda w: F.layer_norm(w, (3,)).exp().mean() + torch.logsumexp(w, 0).sum(),
    ]
    whole = torch.linspace(-1, 1, 15, dtype=F64).view(5, 3)
    w = device_put(whole, spec, mesh=GRID)

    def twice(f: Function) -> Function:
        return fspmd.grad(lambda w: (fspmd.grad(f)(w) ** 2).sum())

    for f in programs:
        expected = twice(f)(whole)
        for through in (twice(jit(f)), jit(twice(f)), jit(twice(jit(f)))):
            for _ in range(2):
                torch.testing.assert_close(device_get(through(w)), expected)


def test_a_generator_that_is_an_argument() -> None:
    recorded = jit(lambda x, g: x + torch.rand(3, generator=g))
    a, b = (torch.Generator().manual_seed(3) for _ in range(2))
    for _ in range(3):
        assert torch.equal(recorded(torch.ones(3), a), 1 + torch.rand(3, generator=b))
    assert recorded.cache_info().hits == 2


class _Holds(torch.nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.inner = {"generators": [generator]}

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(3, generator=self.inner["generators"][0])


def test_generators_that_are_closed_over() -> None:
    a, b, c, d = (torch.Generator().manual_seed(3) for _ in range(4))
    model = _Holds(d)

    def drawn(x: Tensor, generator: torch.Generator = c) -> Tensor:
        return (
            torch.rand(3, generator=a) + torch.rand(3, generator=OTHER) + torch.rand(3, generator=generator) + model(x)
        )

    recorded = jit(drawn)
    OTHER.manual_seed(3)
    for i in range(4):
        if i == 2:
            for generator in (a, b, c, d, OTHER):
                generator.manual_seed(4)
        assert torch.equal(recorded(torch.zeros(3)), 4 * torch.rand(3, generator=b))
    assert recorded.cache_info().hits == 3


def test_threads_that_draw_while_a_function_is_recorded() -> None:
    """They draw numbers of their own; after the recording the generator goes on from where it was before."""
    found: list[Tensor] = []

    def drawn(x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + torch.rand(3)
            thread = threading.Thread(target=lambda: found.append(torch.rand(3)))
            thread.start()
            thread.join()
        return F.dropout(x, 0.5)

    for run in jit(drawn), jit(drawn).lower:
        found.clear()
        torch.manual_seed(5)
        out = run(torch.ones(3))
        assert len({one[0].item() for one in found}) == 2
        torch.manual_seed(5)
        if isinstance(out, Tensor):
            torch.testing.assert_close(out, F.dropout(torch.ones(3) + torch.rand(3) + torch.rand(3), 0.5))


def test_states_that_are_set_to_what_they_are() -> None:
    """By what draws nothing, and by torch's own `checkpoint`, which sets them back in the end."""

    def f(x: Tensor) -> Tensor:
        state = OTHER.get_state()
        with torch.random.fork_rng():
            y = x * 2 + torch.rand(3, generator=a)
        OTHER.set_state(state)
        x = x.detach().requires_grad_()
        z = checkpoint.checkpoint(lambda x: F.dropout(x, 0.5) * x, x, use_reentrant=False)
        return y + torch.autograd.grad(F.dropout(z, 0.5).sum(), x)[0] + torch.rand(3) + torch.rand(3, generator=OTHER)

    a, recorded, found = torch.Generator(), jit(f), []
    for run in (f, recorded):
        for one in (torch.default_generator, OTHER, a):
            one.manual_seed(5)
        found.append([run(torch.ones(3)) for _ in range(3)] + [torch.rand(3, generator=one) for one in (OTHER, a)])
    torch.testing.assert_close(found[1], found[0])
    states = [one.get_state() for one in (torch.default_generator, OTHER, a)]
    recorded.lower(torch.ones(3))
    assert all(map(torch.equal, states, [one.get_state() for one in (torch.default_generator, OTHER, a)]))


# --- what tells records apart -----------------------------------------------------------------------------------------


def test_kinds_of_arguments() -> None:
    seen: list[Any] = []

    def f(x: Any, scale: float = 1.0, *, flip: bool = False) -> Any:
        seen.append((scale, flip))
        y = x["x"] * scale
        return {"y": -y if flip else y, "scale": scale}

    recorded = jit(f)
    a, b = torch.arange(3.0), device_put(X, P("x"), mesh=MESH)
    for _ in range(2):
        for x in (a, a.double(), torch.arange(4.0), a.clone().requires_grad_(), b, fspmd.reshard(b, P(None, "x"))):
            for scale in (1.0, 2.0, 0.0, -0.0, 1):
                out = recorded({"x": x}, scale, flip=False)
                torch.testing.assert_close(device_get(out["y"]), device_get(x) * scale, rtol=0, atol=0)
                assert str(out["scale"]) == str(scale)
                assert torch.equal(device_get(recorded({"x": x}, flip=True)["y"]), -device_get(x))
    info = recorded.cache_info()
    assert info.misses == info.currsize == len(seen) == 36
    recorded.clear_cache()
    assert recorded.cache_info() == (0, 0, 0)
    with pytest.raises(ArgumentError, match=r"^jit got the set \{1\} for an argument, which has no hash"):
        recorded({"x": a}, {1})


def test_arguments_by_name_are_none_in_a_tuple_and_a_dict() -> None:
    recorded = jit(lambda a, k: a + k if isinstance(a, Tensor) else a[0] - k["k"])
    a, k = torch.ones(2), torch.full((2,), 2.0)
    for _ in range(2):
        assert recorded(a, k=k).tolist() == [3, 3]
        assert recorded((a,), {"k": k}).tolist() == [-1, -1]
    assert recorded.cache_info() == (2, 2, 2)


def test_grad_mode_and_ambient_mesh() -> None:
    recorded = jit(lambda x: shard_map(lambda x: psum(x, "x"), in_specs=P("x"), out_specs=P())(x) * 1)
    x = X.clone().requires_grad_()
    with fspmd.set_mesh(MESH):
        assert recorded(x).requires_grad
        assert recorded(x).requires_grad
        with torch.no_grad():
            assert not recorded(x).requires_grad
            assert not recorded(x).requires_grad
        first = device_get(recorded(x))
    with fspmd.set_mesh(GRID):
        second = device_get(recorded(x))
    assert first.shape == (2, 3)
    assert second.shape == (4, 3)


def test_the_same_tensor_given_twice_or_closed_over() -> None:
    w = torch.arange(3.0)
    recorded = jit(lambda x, y: (x - 2 * y) * w)
    assert recorded(w, w).tolist() == [0, -1, -4]
    assert recorded(torch.ones(3), torch.zeros(3)).tolist() == [0, 1, 2]
    w.add_(1)  # a tensor closed over is read when it is used
    assert recorded(torch.ones(3), torch.zeros(3)).tolist() == [1, 2, 3]
    assert recorded.cache_info() == (2, 1, 1)


def test_tensors_closed_over_are_differentiable_once_they_are_trained() -> None:
    w = torch.arange(3.0)
    recorded = jit(lambda x: (x * w).sum())
    assert not recorded(torch.ones(3)).requires_grad
    w.requires_grad_()
    for _ in range(2):
        recorded(torch.full((3,), 2.0)).backward()
    assert w.grad is not None
    assert w.grad.tolist() == [4.0, 4.0, 4.0]


def test_gradients_of_what_an_argument_was_computed_from() -> None:
    """They stop at the argument: what is in front of it is the caller's."""
    w = torch.arange(3.0).requires_grad_()
    recorded = jit(lambda h: (h * w).sum())
    for _ in range(2):  # recorded, replayed
        w.grad = None
        recorded((w * w).sin()).backward()
        want = torch.arange(3.0).requires_grad_()
        ((want * want).sin() * want).sum().backward()
        torch.testing.assert_close(w.grad, want.grad)
        (g,) = torch.autograd.grad(recorded((w * w).sin()), w, create_graph=True)
        torch.testing.assert_close(g, want.grad)
        with pytest.raises(RecordError, match=r"^jit cannot differentiate gradients again: an argument was"):
            g.sum().backward()
    v = w * 2
    with pytest.raises(RecordError, match=r"^jit cannot record a function that closes over a tensor and"):
        jit(lambda x: x * w * v)(torch.ones(3))


@pytest.mark.parametrize("lay", [lambda x: x, lambda x: device_put(x, P("x"), mesh=MESH)], ids=["plain", "sharded"])
def test_gradients_twice_of_an_argument_that_another_was_computed_from(lay: Function) -> None:
    """Three times, too, and with the gradients of the first gradients' cotangents."""

    def f(a: Any, b: Any) -> Any:
        return (a.exp() * b * b).sum()

    def derivatives(f: Function, a: Any) -> list[Tensor]:
        found, y = [], f(a, a.sin() * 2) ** 2
        for _ in range(3):
            (g,) = torch.autograd.grad(y, a, create_graph=True)
            found.append(device_get(g).detach())
            y = (g * g).sum()
        return found

    recorded = jit(f)
    want = derivatives(f, X.clone().requires_grad_())
    for _ in range(3):
        torch.testing.assert_close(derivatives(recorded, lay(X.clone()).requires_grad_()), want)


def test_hooks_of_tensors_closed_over_are_called_once() -> None:
    w = torch.arange(3.0).requires_grad_()
    w.register_hook(lambda g: g * 3)
    recorded = jit(lambda x: (x * x * w).sum())
    x = torch.ones(3).requires_grad_()
    x.register_hook(lambda g: g * 5)
    for _ in range(2):
        w.grad = x.grad = None
        recorded(x).backward()
        assert w.grad is not None
        assert x.grad is not None
        assert (w.grad.tolist(), x.grad.tolist()) == ([3.0] * 3, [0.0, 10.0, 20.0])
        (g,) = torch.autograd.grad(recorded(x), x, create_graph=True)
        assert torch.autograd.grad(g.sum(), x)[0].tolist() == [0.0, 50.0, 100.0]


def test_what_a_result_was_not_made_of_gets_no_gradient() -> None:
    recorded = jit(lambda x, y: (x * y, x.sin()))
    for _ in range(2):
        x, y = torch.ones(3).requires_grad_(), torch.ones(3).requires_grad_()
        recorded(x, y)[1].sum().backward()
        assert x.grad is not None
        assert y.grad is None


@pytest.mark.parametrize("lay", [lambda x: x, lambda x: device_put(x, P("x"), mesh=MESH)], ids=["plain", "sharded"])
def test_one_value_returned_more_than_once(lay: Function) -> None:
    """With its gradient and without, as a loss is that is looked at, too; each has a cotangent of its own."""
    kinds: list[Function] = [lambda y: y, lambda y: y.detach(), lambda y: y.view_as(y), lambda y: y.detach().t()]
    for chosen in itertools.product(kinds, repeat=2):
        for made in (lambda x: x * 2, lambda x: x):

            def several(x: Any, made: Function = made, chosen: Any = chosen) -> list[Any]:
                y = made(x)
                return [one(y) for one in chosen]

            recorded = jit(several)
            for _ in range(2):
                x, z = (lay(X.clone()).requires_grad_() for _ in range(2))
                found, expected = recorded(x), several(z)
                assert [y.requires_grad for y in found] == [y.requires_grad for y in expected]
                for values in (found, expected):
                    loss = sum((i + 1) * device_get(y).sin().sum() for i, y in enumerate(values))
                    if loss.requires_grad:
                        loss.backward()
                assert (x.grad is None) is (z.grad is None)
                if z.grad is not None:
                    torch.testing.assert_close(device_get(x.grad), device_get(z.grad))


@pytest.mark.parametrize("lay", [lambda x: x, lambda x: device_put(x, P("x"), mesh=MESH)], ids=["plain", "sharded"])
def test_views_that_are_taken_without_gradients(lay: Function) -> None:
    """Torch says that they require one, of what does."""
    x, recorded = lay(X.clone()).requires_grad_(), jit(lambda x: (x.t(), x * 2))
    for _ in range(2):
        with torch.no_grad():
            view, twice = recorded(x)
        assert view.grad_fn is None
        assert not twice.requires_grad
        torch.testing.assert_close(device_get(view.detach()), X.t())


def test_modules_in_another_mode_or_with_other_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.99))
    recorded, x = jit(lambda x: model(x) * 1), torch.ones(5, 3)
    recorded(x)
    model.eval()
    assert torch.equal(recorded(x), model(x))
    model[0].weight = torch.nn.Parameter(torch.zeros(3, 3))
    for _ in range(2):
        assert torch.equal(recorded(x), model(x))
    assert recorded.cache_info() == (1, 3, 1)
    model[0] = torch.nn.Linear(3, 3)
    model.append(torch.nn.Linear(3, 2))
    assert torch.equal(recorded(x), model(x))
    model.double()
    for _ in range(2):
        assert torch.equal(recorded(x.double()), model(x.double()))


def _laid(x: Tensor) -> list[Tensor]:
    return [x, x[:2, :1], x.double(), x.t().contiguous().t(), x.bfloat16(), x[:1].expand(3, 2)]


@pytest.mark.parametrize("lay", [lambda x: x, lambda x: device_put(x, P("x"), mesh=MESH)], ids=["plain", "sharded"])
@pytest.mark.parametrize("seed", range(3))
def test_tensors_closed_over_that_change_their_kind(lay: Function, seed: int) -> None:
    """Shapes, dtypes and strides are constants of a record; values are not, nor whether there is a gradient."""
    chosen = random.Random(seed)
    w = lay(torch.arange(6.0).view(3, 2))
    block = w.local if isinstance(w, Sharded) else w

    def f(x: Tensor) -> tuple[Any, ...]:
        return (w * x).sum() / w.numel(), w.reshape(-1), w.dtype, w.stride() if w is block else ()

    recorded = jit(f)
    with fspmd.explain_cache_misses() as misses:
        for n in range(12):
            if w is block:
                block.data = chosen.choice(_laid(torch.rand(3, 2) + n))
            trained = w.requires_grad_(chosen.random() < 0.5).requires_grad
            x = lay(torch.ones(()).to(w.dtype)) if w is block else 1.0
            for _ in range(2):
                found, expected = recorded(x), f(x)
                assert found[2:] == expected[2:]
                assert found[0].requires_grad is trained
                for one, other in zip(found[:2], expected[:2], strict=True):
                    assert torch.equal(device_get(one), device_get(other))
                if trained:
                    w.grad = None
                    found[0].backward()
                    assert torch.equal(device_get(w.grad), torch.full_like(device_get(w.detach()), 1 / w.numel()))
    assert recorded.cache_info().hits >= 12
    assert w is not block or any("that it closes over: " in str(miss) for miss in misses)


def test_views_closed_over_go_straight_into_collectives() -> None:
    """Nothing else reads them first, and their base is nowhere in the function."""
    base, x = torch.arange(24.0, dtype=F64), torch.linspace(-1, 1, 4, dtype=F64)
    for view in (base[3:9], base.view(4, 6)[1], base[::6]):
        f = shard_map(lambda x, v=view: x * psum(v, "x").sum(), mesh=MESH, in_specs=P("x"), out_specs=P("x"))
        for follows in (False, True):
            out = jit(f)(x.clone().requires_grad_(follows))
            torch.testing.assert_close(device_get(out).detach(), x * MESH.shape["x"] * view.sum())


def test_windows_of_a_pending_sum_over_uneven_blocks() -> None:
    """A body makes the rows that each rank takes as a view, the same in every call."""
    x = torch.linspace(-1, 1, 40, dtype=F64).view(5, 8)
    terms = device_put(torch.stack([x - 1, 0 * x, 0 * x + 1]), P("y", None, "x"), mesh=GRID)
    specs = P("y", None, "x"), P(None, "x", unreduced={"y"})
    pending = shard_map(
        lambda b: fspmd.pcast(b[0], "y", to="unreduced"), mesh=GRID, in_specs=specs[0], out_specs=specs[1]
    )(terms)
    torch.testing.assert_close(device_get(jit(lambda x: x.unfold(1, 3, 2).cos())(pending)), x.unfold(1, 3, 2).cos())


@pytest.mark.parametrize("size", [7, 5])
def test_pieces_of_uneven_blocks(size: int) -> None:
    """A replay spells the sizes of pieces out, if all ranks have them."""
    mesh = fspmd.make_mesh((2,), ("x",), transport="simulation")
    f = shard_map(lambda x: torch.cat(x.chunk(2)[::-1]), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    whole = torch.arange(size, dtype=F64)
    torch.testing.assert_close(device_get(replayed(f, whole)), device_get(f(whole)))


COUNTS = [1, 0, 2, 1, 3]


@pytest.mark.parametrize("counts", ["made within", "closed over"])
@pytest.mark.parametrize("how", [jit, lambda f: jit(f).lower])
def test_a_shape_that_depends_on_values_is_told_beforehand(how: Any, counts: str) -> None:
    """Of constants, too, that have values, and of plain and Sharded values alike."""
    whole, there = torch.rand(5, 2, dtype=F64), torch.tensor(COUNTS)

    def repeats() -> Tensor:
        return torch.tensor(COUNTS) if counts == "made within" else there

    for x in (whole, device_put(whole, P("x"), mesh=MESH)):
        text = r"jit cannot record repeat_interleave, which gives .* depends on values.* output_size=n\)"
        with pytest.raises(RecordError, match=text):
            how(lambda x: x.repeat_interleave(repeats(), 0))(x)
        out = jit(lambda x: x.repeat_interleave(repeats(), 0, output_size=sum(COUNTS)))(x)
        torch.testing.assert_close(device_get(out), whole.repeat_interleave(there, 0))


def test_gradients_of_uneven_values_closed_over() -> None:
    """Though their blocks are used apart before they are used whole."""
    whole = torch.rand(5, 3)
    programs: list[Function] = [torch.mul, lambda w, x: w @ x.mT, lambda w, x: w.exp()[1:] + x[:-1], lambda w, x: w]
    for mesh, spec, f in itertools.product((MESH, GRID), (P("x"), P(None, "x")), programs):
        w, x = (device_put(whole, spec, mesh=mesh).requires_grad_() for _ in range(2))
        a, b = (whole.clone().requires_grad_() for _ in range(2))
        recorded = jit(lambda x, w=w, f=f: f(w, x).sum())
        f(a, b).sum().backward()
        for _ in range(2):
            w.grad = x.grad = None
            recorded(x).backward()
            for one, other in (w, a), (x, b):
                assert (one.grad is None) == (other.grad is None)
                if other.grad is not None:
                    torch.testing.assert_close(device_get(one.grad), other.grad)


def test_results_that_are_arguments_are_the_objects_that_were_given() -> None:
    """Else what a step hands on would have a graph that grows from step to step."""
    for trained in True, False:
        p, x = torch.ones(2, 3, requires_grad=trained), torch.rand(2, 3)
        for step in jit(lambda p, x: (x, {"p": p}, (p * x).sum())), jit(lambda p, x: (x, {"p": p}, p @ x.T)):
            for one in p, p, p.detach().t().contiguous().t().requires_grad_(trained):
                y, held, out = step(one, x)
                assert y is x
                assert held["p"] is one
                if trained:
                    (held["p"].sum() + out.sum()).backward()
        if trained:
            assert p.grad is not None
            torch.testing.assert_close(p.grad, 4 + 2 * x + 2 * x.sum(0))


def test_functional_calls_of_modules() -> None:
    model = torch.nn.Linear(3, 3)
    recorded = jit(lambda weights, x: func.functional_call(model, weights, (x,)))
    for i in range(3):
        weights, x = {"weight": torch.full((3, 3), float(i)), "bias": torch.ones(3)}, torch.ones(2, 3)
        assert recorded(weights, x).tolist() == [[3.0 * i + 1] * 3] * 2
    assert recorded.cache_info() == (2, 1, 1)


def test_arguments_and_results_that_are_views() -> None:
    recorded = jit(lambda x: x.sin().t())
    for made in (torch.ones(1, 3).expand(4, 3), torch.rand(4, 3), torch.rand(3, 4).t()):
        x = made.requires_grad_()
        (g,) = torch.autograd.grad(recorded(x).sum(), x)
        torch.testing.assert_close(g, x.cos())
    recorded = jit(lambda x: x * 2 if x.is_conj() else x * 3)
    z = torch.ones(2, dtype=torch.complex64)
    assert (recorded(z) == 3).all()
    assert (recorded(z.conj()) == 2).all()
    w = torch.nn.Parameter(torch.ones(2))
    assert jit(lambda x: x * 2 if isinstance(x, torch.nn.Parameter) else x)(w).tolist() == [2, 2]


def test_writes_into_views_of_results() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        part = y[1:]
        part.relu_()
        return y, part * part

    recorded = jit(f)
    for _ in range(3):
        x = torch.tensor([-1.0, -2.0, 3.0]).requires_grad_()
        y, z = recorded(x)
        (g,) = torch.autograd.grad((y * y).sum() + z.sum(), x)
        assert g.tolist() == [-8, 0, 48]


def test_inference_mode() -> None:
    recorded = jit(lambda x: x.sin() * 2 + torch.ones(3))
    x = torch.ones(3).requires_grad_()
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(recorded(torch.ones(3)), x.sin() * 2 + 1)
    assert recorded(x).requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_trained_is_known_where_nothing_has_a_gradient(mode: Any) -> None:
    recorded = jit(lambda *params: [p - 1 if p.requires_grad else p * 1 for p in params])
    outside = [torch.ones(()).requires_grad_(), torch.ones(())]
    with mode():
        inside = [torch.ones(()), torch.ones(()).requires_grad_()]
        for _ in range(2):
            assert recorded(*outside, *inside) == [0, 1, 1, 0]


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomalies_are_looked_for_in_what_runs() -> None:
    """And not while it is recorded, when nobody may look at values."""
    x = device_put(torch.tensor([4.0, 1.0, 0.0], dtype=torch.float64), P("x"), mesh=MESH).requires_grad_()
    f = jit(lambda x, scale: (scale * x).sqrt().sum())
    with torch.autograd.detect_anomaly():
        for scale in (1.0, 1.0, 4.0):
            (g,) = torch.autograd.grad(f(x, scale), x)
            assert device_get(g)[:2].tolist() == [scale**0.5 / 4, scale**0.5 / 2]
        for _ in range(2):
            with pytest.raises(RuntimeError, match="returned nan values"):
                torch.autograd.grad(f(x, 0.0), x)


def test_tensors_of_inference_mode() -> None:
    """They cannot be told when they are written into, nor kept for backward; a record has copies of them."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        y.add_(1)
        return fspmd.grad(lambda x: (x * x).sum())(x) * y

    recorded = jit(f)
    with torch.inference_mode():
        x, y = torch.arange(3.0).requires_grad_(), torch.zeros(3)
        for i in range(1, 4):
            assert recorded(x, y).tolist() == [0, 2 * i, 4 * i]
            assert y.tolist() == [i] * 3
        with pytest.raises(ArgumentError, match=r"was called in torch.inference_mode\(\), which has no gradients"):
            f(x, y)
    assert recorded.cache_info().hits == 2


def test_results_that_are_no_tensors_are_of_their_call_alone() -> None:
    recorded = jit(lambda x: (x * 2, {1}, [bytearray(b"a"), {"k": [np.zeros(2)]}], slice(1)))
    for _ in range(3):
        _, numbers, (letters, tree), _ = recorded(torch.ones(2))
        assert (numbers, letters, tree["k"][0].tolist()) == ({1}, b"a", [0, 0])
        numbers.add(2)
        letters.append(1)
        tree["k"][0] += 1
        tree["k"].append(3)


def test_a_record_keeps_no_arguments() -> None:
    recorded = jit(lambda x, *, y: (x.sin() * y).sum())
    x, y = torch.ones(3).requires_grad_(), torch.ones(3)
    kept = [weakref.ref(x), weakref.ref(y)]
    recorded(x, y=y).backward()
    del x, y
    gc.collect()
    assert [one() for one in kept] == [None, None]


def test_autocast_as_it_is_when_called() -> None:
    def f(x: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", enabled=False):
            return [x @ x]

    both = jit(lambda x: [x @ x, *f(x)])
    x = torch.rand(2, 2)
    for kind in (torch.bfloat16, torch.float16, torch.bfloat16):
        assert [y.dtype for y in both(x)] == [torch.float32] * 2
        with torch.autocast("cpu", dtype=kind):
            assert [y.dtype for y in both(x)] == [kind, torch.float32]


def test_arguments_that_lie_in_memory_in_another_way() -> None:
    """It may differ from process to process, so it tells no records apart."""
    recorded = jit(lambda x: x.view(-1).mul_(2))
    recorded(torch.ones(2, 3))
    x = torch.arange(6.0).view(3, 2).t()
    assert recorded(x).tolist() == [0, 4, 8, 2, 6, 10]
    assert x.tolist() == [[0, 4, 8], [2, 6, 10]]  # written through
    assert recorded.cache_info() == (1, 1, 1)


def test_writes_into_arguments_that_share_memory_and_lie_in_another_way() -> None:
    recorded = jit(lambda x, y: (x.add_(1), y * 1)[1])
    x = torch.zeros(3, 2)
    assert recorded(x, x.view(-1)).tolist() == [1] * 6
    with pytest.raises(RecordError, match=r"^jit cannot replay a function that writes into an argument: arg"):
        recorded(x.view(2, 3).t(), x.view(-1))


def test_writes_into_arguments_go_through() -> None:
    def f(x: Tensor) -> None:
        x[1:] += 1

    recorded = jit(shard_map(f, mesh=MESH, in_specs=P("x"), out_specs=None))
    x = device_put(torch.zeros(8), P("x"), mesh=MESH)
    for n in (1, 2):
        recorded(x)
        assert device_get(x).tolist() == [0, n] * 4


def _sent(x: Tensor, sizes: Tensor) -> Tensor:
    """Rows sent by sizes that are values: twice, the second time back."""
    starts = sizes.cumsum(0) - sizes
    received = fspmd.all_to_all(sizes, "x", 0, 0, tiled=True)
    every = fspmd.all_gather(sizes, "x")
    before = (every.cumsum(0) - every)[fspmd.axis_index("x")]
    out = x.new_zeros(12, 2)
    landed = fspmd.ragged_all_to_all(x, out, starts, sizes, before, received, axis_name="x", wait=False).wait()
    back, home = (fspmd.all_to_all(numbers, "x", 0, 0, tiled=True) for numbers in (before, starts))
    return fspmd.ragged_all_to_all(landed.sin(), x, back, received, home, sizes, axis_name="x")


def check_sizes_that_are_values(mesh: fspmd.Mesh) -> None:
    sent = shard_map(_sent, mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    within = fspmd.value_and_grad(lambda x, sizes: (device_get(sent(x, sizes)) ** 2 * torch.arange(24)[:, None]).sum())
    recorded, also = jit(sent), jit(within)
    for seed in range(4):
        torch.manual_seed(seed)
        sizes = torch.randint(0, 3, (16,)).clamp(max=1 + seed % 2)
        x = torch.randn(24, 2)
        for mine, theirs in zip(also(x, sizes), within(x, sizes), strict=True):
            torch.testing.assert_close(mine, theirs)
        found = []
        for f in (recorded, sent):
            leaf = x.clone().requires_grad_()
            out = device_get(f(leaf, sizes))
            found.append((out.detach(), *torch.autograd.grad((out**3).sum(), leaf)))
        torch.testing.assert_close(*found)
        logs = []
        for f in (recorded, sent):
            with fspmd.communication_log() as log:
                (device_get(f(x.requires_grad_(), sizes)) ** 3).sum().backward()
            logs.append([(one.kind, one.shape, one.price, one.backward) for one in log])
        assert logs[0] == logs[1]
    assert (recorded.cache_info(), also.cache_info()) == ((7, 1, 1), (3, 1, 1))


def test_sizes_that_are_values() -> None:
    check_sizes_that_are_values(MESH)
    one = shard_map(_sent, mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    recorded = jit(one)
    recorded(torch.ones(24, 2), torch.ones(16, dtype=torch.int64))
    lowered = recorded.lower(torch.ones(24, 2), torch.ones(16, dtype=torch.int64))  # as if sizes were even
    n, (there, back) = MESH.size, [one for one in lowered.collectives() if one.kind == "ragged_all_to_all"]
    assert [one.price.moved for one in (there, back)] == [-(-rows * (n - 1) // n) * 8 for rows in (24 // n, 12)]
    assert torch.equal(
        *(device_get(f(torch.ones(24, 2), torch.ones(16, dtype=torch.int64))) for f in (lowered.compile(), one))
    )
    with pytest.raises(fspmd.ShapeError, match=r"^ragged_all_to_all: on rank 0 at x=0 slice 3, 9 rows from"):
        recorded(torch.ones(24, 2), torch.ones(16, dtype=torch.int64).index_fill(0, torch.tensor(3), 9))


# --- within others ----------------------------------------------------------------------------------------------------


def test_within_bodies_transforms_and_other_recordings() -> None:
    inner = jit(lambda x: x.sin() * x)
    body = shard_map(lambda x: psum(inner(x).sum(), "x"), mesh=MESH, in_specs=P("x"), out_specs=P())
    outer = jit(fspmd.value_and_grad(lambda x: body(inner(x))))
    (a, b), (c, d) = outer(X), outer(X)
    want = X.clone().requires_grad_()
    y = want.sin() * want
    loss = (y.sin() * y).sum()
    loss.backward()
    for value, gradient in ((a, b), (c, d)):
        torch.testing.assert_close(device_get(value), loss.detach())
        torch.testing.assert_close(gradient, want.grad)
    assert inner.cache_info() == (0, 0, 0)
    torch.testing.assert_close(
        func.vmap(func.grad(lambda x: inner(x).sum()))(X), func.vmap(func.grad(lambda x: (x.sin() * x).sum()))(X)
    )
    torch.testing.assert_close(fspmd.jvp(inner, (X,), (X,)), fspmd.jvp(lambda x: x.sin() * x, (X,), (X,)))
    logs = []
    for f in (outer, outer.__wrapped__):  # type: ignore[attr-defined]
        with fspmd.communication_log() as log:
            f(X)
        logs.append([one.kind for one in log])
    assert logs[0] == logs[1] != []


@pytest.mark.parametrize("spec", [None, P(), P("x")])
def test_hessian_vector_products_of_a_mean_loss(spec: P | None) -> None:
    """Multiples of tangents that are zero, at which torch ends the process where a mode sees them."""
    target = torch.ones(8, dtype=torch.float64)

    def product(loss: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x: fspmd.jvp(fspmd.grad(lambda x: loss(torch.tanh(x), target)), (x,), (x,))[1]

    x = torch.linspace(-1, 1, 8, dtype=torch.float64)
    laid: Any = x if spec is None else device_put(x, spec, mesh=MESH)
    expected = product(lambda x, y: ((x - y) ** 2).mean())(x)
    torch.testing.assert_close(device_get(jit(product(F.mse_loss))(laid)), expected)


def test_gradients_of_what_torch_has_no_second_derivative_of() -> None:
    """The loss has a gradient; those of its gradients are refused, and only when they are asked for."""

    def loss(q: Any, w: Any) -> Any:
        return (F.scaled_dot_product_attention(q, q, q) @ w).square().sum()

    q, w = torch.randn(2, 2, 4, 8).requires_grad_(), torch.randn(8, 8).requires_grad_()
    step = jit(fspmd.value_and_grad(loss, argnums=(0, 1)))
    for _ in range(2):  # recorded, then replayed
        value, (by_q, by_w) = step(q, w)
        torch.testing.assert_close(torch.autograd.grad(value, (q, w), retain_graph=True), (by_q, by_w))
        with pytest.raises(RecordError, match=r"^the result 1 of a jitted function, of shape \(2, 2, 4, 8\), has no"):
            by_q.sum().backward()
        assert torch.autograd.grad(by_w.sum(), w)[0].shape == w.shape


def test_libraries_are_told_that_a_function_is_recorded() -> None:
    """They leave out branches on values, as where a CUDA graph is captured; other threads are told nothing."""

    def captures() -> bool:
        try:
            return torch.cuda.is_current_stream_capturing()
        except RuntimeError:  # torch is built without CUDA
            return False

    def f(x: Tensor) -> Tensor:
        with ThreadPoolExecutor() as pool:
            assert not pool.submit(captures).result()
        return x if not captures() and (x == 0).all() else x + 1

    step, x = jit(f), torch.zeros(())
    assert [float(f(x)), float(step(x)), float(step(x)), float(f(x))] == [0, 1, 1, 0]


def test_a_log_is_alike_whether_a_function_runs_is_recorded_or_replayed() -> None:
    x, w = (device_put(torch.randn(6, 4), spec, mesh=MESH) for spec in (P("x"), P()))
    f = fspmd.value_and_grad(lambda x, w: (x * w).sum().exp(), argnums=(0, 1))
    recorded, logs = jit(f), []
    for run in (f, recorded, recorded, recorded.lower):  # type: ignore[attr-defined]
        with fspmd.communication_log() as log:
            out = run(x, w)
        logs.append([(one.kind, one.axes, one.shape, one.price, one.backward) for one in log])
    logs[3] = [(one.kind, one.axes, one.shape, one.price, one.backward) for one in out.collectives()]
    assert logs[0] == logs[1] == logs[2] == logs[3]
    assert [one[-1] for one in logs[0]] == [False, True]


# --- what cannot be recorded ------------------------------------------------------------------------------------------

OTHER = torch.Generator()
Y = torch.ones(3)
V = torch.ones(3).requires_grad_()


def _seeded(x: Tensor) -> Tensor:
    torch.manual_seed(1)
    return x + torch.rand(3)


def _seeded_alike(x: Tensor) -> Tensor:
    torch.manual_seed(5)  # the state that it has at the first of two calls
    return x + torch.rand(3)


def _caught(x: Tensor) -> Tensor:
    try:
        return x * x.max().item()
    except RecordError:
        return x


def _through_data(x: Tensor) -> Tensor:
    c = torch.zeros(3)
    c.data.copy_(x)
    return x * float(c[0])


def _another_data(x: Tensor) -> Tensor:
    y = x * 1
    y.data = x * 2
    return y


class _Hidden(dict[int, Any]):
    """Where nobody looks for tensors."""

    def put(self, x: Tensor) -> tuple[Tensor]:
        self[0] = iter(lambda: x, None).__next__
        return (x * 1,)


HIDDEN = _Hidden()


def _on_ranks(body: Function) -> Function:
    return shard_map(body, mesh=MESH, in_specs=P("x"), out_specs=P("x"))


def _in_a_thread(f: Function) -> Function:
    def run(x: Tensor) -> Tensor:
        made: list[Tensor] = []
        thread = threading.Thread(target=lambda: made.append(f(x)))
        thread.start()
        thread.join()
        return made[0]

    return run


POOL, POOL_2 = ThreadPoolExecutor(1), ThreadPool(1)


def _put_in(x: list[Tensor]) -> Tensor:
    x.append(x[0] * 2)
    return x[0]


REFUSED: dict[str, tuple[Function, str]] = {
    "closure of rank_map": (
        _on_ranks(lambda x: fspmd.rank_map(lambda y: y * x.sum(), x)),
        r"^jit cannot record a function that rank_map runs: the function closes over a tensor of shape",
    ),
    "hidden from rank_map": (
        _on_ranks(lambda x: fspmd.rank_map(lambda y: y * HIDDEN[0](), *HIDDEN.put(x * 2))),
        r"^jit cannot record a function that rank_map runs: the function closes over a tensor of shape",
    ),
    "gradient of a closure of rank_map": (
        _on_ranks(lambda x: fspmd.rank_map(lambda y: y * V[:1], x)),
        r"^jit cannot record .* rank_map runs and that closes over a tensor with a gradient; pass it as an argument",
    ),
    "write of rank_map": (_on_ranks(lambda x: fspmd.rank_map(lambda y: y.neg_(), x)), r"^jit .* writes into its arg"),
    "jvp of rank_map": (
        lambda x: fspmd.jvp(_on_ranks(lambda x: fspmd.rank_map(torch.sin, x)), (x,), (x,)),
        r"^jit cannot record a rank_map that is differentiated in forward mode",
    ),
    "vmap of rank_map": (
        lambda x: fspmd.vmap(_on_ranks(lambda x: fspmd.rank_map(torch.sin, x)))(x.expand(2, 3)),
        r"^jit cannot record a rank_map that is under vmap",
    ),
    "branch": (
        lambda x: x if x.sum() > 0 else -x,
        r"^jit cannot record a branch or x.item\(\), which makes a Python value",
    ),
    "item": (lambda x: x * x.max().item(), r"keep it a tensor: torch.where\(condition, a, b\) .*\(test_jit.py:\d+\)$"),
    "shape": (lambda x: x.nonzero(), r"^jit cannot record nonzero, which gives a result whose shape depends on values"),
    "mask": (lambda x: x[x > 0], r"^jit cannot record index, which gives a result whose shape"),
    "numpy": (lambda x: x + torch.from_numpy(x.numpy().copy()), r"^jit cannot record x.numpy\(\), which makes"),
    "list": (lambda x: torch.tensor([x[0], x[1]]), r"^jit cannot record torch.tensor.* write torch.stack"),
    "legacy list": (lambda x: torch.FloatTensor([x[0], x[1]]), r"^jit cannot record a branch or x.item\(\), which"),
    "legacy list of ints": (lambda x: torch.LongTensor([x[0].long()]), r"^jit cannot record a branch or x.item\(\), w"),
    "new": (lambda x: x.new([x[0], x[1]]), r"^jit cannot record x.new\(\[y, ...\]\) of tensors; write torch.stack. It"),
    "address": (
        lambda x: x * (x.data_ptr() % 7),
        r"^jit cannot record x.data_ptr\(\), which lets code read",
    ),
    "packed": (
        lambda x: pad_packed_sequence(PackedSequence(x[:, None], x.long()), total_length=3)[0],
        r"^jit cannot record pad_packed_sequence of computed sizes; it, which makes",
    ),
    "sparse": (lambda x: x.to_sparse().to_dense(), r"^jit records dense tensors, but got a sparse_coo tensor; m"),
    "nested": (
        lambda x: torch.nested.as_nested_tensor([x]),
        r"^jit records dense tensors, but got a nested tensor",
    ),
    "cond": (
        lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
        r"^jit cannot record torch.cond, while_loop and similar .* write torch.where\(condition, a, b\)",
    ),
    "places": (lambda x: x.tensor_split((x[:1] > 0).long())[0], r"^jit cannot record x.tensor_split\(y\)"),
    "print": (lambda x: x * len(repr(x)), r"^jit cannot record print\(x\) or repr\(x\); write fspmd.debug_print"),
    "copied": (copy.deepcopy, r"^jit cannot record copy.deepcopy\(x\); write x.clone\(\)"),
    "pickled": (lambda x: pickle.loads(pickle.dumps(x)), r"^jit cannot record pickling a tensor"),
    "seeded alike": (_seeded_alike, r"^jit cannot record a function that sets the state of a generator"),
    "seeded": (_seeded, r"^jit cannot record a function that sets the state .*\(test_jit.py:\d+\)$"),
    "generator": (
        lambda x: x + torch.rand(3, generator=torch.Generator().manual_seed(0)),
        r"^jit cannot record random numbers of a torch.Generator that the function makes",
    ),
    "seeded generator": (
        lambda x: x + torch.rand(3, generator=OTHER.manual_seed(3)),
        r"^jit cannot record a function that sets",
    ),
    "distribution": (
        lambda x: torch.distributions.Categorical(logits=x).log_prob(x[0].long()),
        r"^jit cannot record a branch or x.item\(\), .* Normal\(mean, scale, validate_args=False\) for a distribution",
    ),
    "caught": (_caught, r"^jit cannot record a branch or x.item\(\)"),
    "data": (_through_data, r"^jit cannot record a branch or x.item\(\)"),
    "other data": (_another_data, r"^jit cannot record x.data = y, which writes"),
    "capsule": (lambda x: from_dlpack(to_dlpack(x * 2)), r"^jit cannot record torch.from_dlpack\(y\), whose memory"),
    "thread of a thread": (
        _in_a_thread(_in_a_thread(lambda x: x * 3)),
        r"^jit cannot record the use of a tensor of shape \(3,\) that another",
    ),
    "read by a thread of a thread": (
        lambda x: x * POOL.submit(lambda: POOL_2.apply(float, (x.sum(),))).result(),
        r"^jit cannot record ",
    ),
    "thread": (_in_a_thread(lambda x: x * 3), r"^jit cannot record the use of a tensor of shape \(3,\) that another"),
    **{
        f"read by a thread, {name}": (
            lambda x, read=read: x * POOL.submit(read, x).result(),
            r"^jit cannot record ",
        )
        for name, read in {
            "item": lambda x: x.sum().item(),
            "float": lambda x: float(x[0]),
            "tolist": lambda x: x.tolist()[0],
            "bool": lambda x: bool(x[0] > 0),
            "equal": lambda x: torch.equal(x, x),
            "computed": lambda x: (x * 2).tolist()[0],
        }.items()
    },
    **{
        f"thread of a pool, {name}": (of_pool, r"^jit cannot record the use of a tensor of shape .* that another")
        for name, of_pool in {
            "map": lambda x: x * next(POOL.map(torch.sin, [x])),
            "submit": lambda x: x * POOL.submit(torch.sin, x).result(),
            "apply": lambda x: x * POOL_2.apply(torch.sin, (x,)),
            "apply_async": lambda x: x * POOL_2.apply_async(func=torch.sin, args=(x,)).get(),
            "starmap": lambda x: x * POOL_2.starmap(torch.sin, [(x,)])[0],
            "imap": lambda x: x * next(POOL_2.imap(torch.sin, [x])),
        }.items()
    },
    "backward": (lambda x: (x * V).sum().backward(), r"^jit cannot record backward\(\) into .grad .* use fspmd.grad"),
    "gradient": (lambda x: x * 2 if V.grad is None else x, r"^the jitted function reads .grad of an argument, or of"),
    "requires_grad_": (lambda x: x.requires_grad_() * 2, r"^jit cannot record a function that calls requires_grad_"),
    "own gradient": (lambda x: x * torch.ones(3, requires_grad=True), r"^jit .* result of shape \(3,\) has a gradient"),
    **{
        name: (
            lambda x, name=name, given=given: getattr(x, name)(*given) * 2,
            rf"^jit cannot record {name}\(\), which c",
        )
        for name, given in {
            "unsqueeze_": (0,),
            "squeeze_": (),
            "t_": (),
            "resize_": (1, 3),
            "set_": (torch.ones(2),),
        }.items()
    },
    "closed over": (lambda x: Y[1:].add_(x[1:]), r"^add_\(\) writes into a tensor of shape \(2,\) that the jitted"),
}


@pytest.mark.parametrize("name", REFUSED_OF_JAX)
def test_programs_of_jax_that_cannot_be_recorded(name: str) -> None:
    program, inputs, _ = oracle.prepared(oracle.PROGRAMS[name])
    with pytest.raises(RecordError):
        jit(program)(*inputs)


@pytest.mark.one_of(6)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_recorded(name: str) -> None:
    f, message = REFUSED[name]
    recorded = jit(f)
    for seed in (5, 6):
        torch.manual_seed(seed)
        with pytest.raises(RecordError, match=message):
            recorded(torch.ones(3))
        torch.manual_seed(seed)
        with pytest.raises(RecordError):
            recorded.lower(torch.ones(3))
    assert V.grad is None
    assert Y.tolist() == [1, 1, 1]
    assert jit(lambda x: x + 1)(torch.ones(1)).item() == 2  # nothing is left behind


def test_arguments_that_are_changed_otherwise_than_by_writes() -> None:
    with pytest.raises(RecordError, match=r"^jit cannot record a function that changes a list, a dict or a Sharded"):
        jit(_put_in)([torch.ones(3)])


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x * x.sum().item(),
        lambda x: x * x.sum(0).tolist()[0],
        lambda x: torch.tensor_split(x, x[:1, 0].long())[0],
        lambda x: x.tensor_split(tensor_indices_or_sections=x[:1, 0].long())[0],
    ],
)
def test_values_of_sharded_tensors(f: Function) -> None:
    with pytest.raises(RecordError, match=r"makes a Python value"):
        jit(f)(device_put(X, P("x"), mesh=MESH))


def test_a_pool_that_is_used_first_within_a_function_is_watched_no_longer() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert replayed(lambda x: [pool.submit(len, "a").result(), x * 2][1], torch.ones(3)).tolist() == [2, 2, 2]
        assert not pool.submit(torch._C._len_torch_dispatch_stack).result()
        assert not pool.submit(torch._C._len_torch_function_stack).result()


def test_threads_that_give_nothing_of_the_record() -> None:
    table = torch.arange(3.0)
    f = _in_a_thread(lambda x: table)
    x = torch.ones(3)
    for _ in range(2):
        assert torch.equal(replayed(lambda x: f(x) * x + torch.from_numpy(np.ones(3, np.float32)), x), table + 1)
        table.add_(1)


@pytest.mark.parametrize("lay", [Tensor.to_sparse, Tensor.to_sparse_csr, lambda x: torch.nested.as_nested_tensor([x])])
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested")
def test_tensors_that_are_not_dense(lay: Function) -> None:
    x = torch.eye(3)
    y = lay(x)
    for f, argument in (lambda x: x * 2, y), (lambda x: y @ x, x):
        for run in jit(f), jit(f).lower:
            with pytest.raises(RecordError, match=r"^jit records dense tensors, but got a (sparse|nested)"):
                run(argument)


def test_what_each_rank_knows_is_a_constant() -> None:
    f = shard_map(lambda x: x[fspmd.axis_index("x") :].sum()[None], mesh=MESH, in_specs=P("x"), out_specs=P("x"))
    x = torch.arange(16.0)
    assert device_get(replayed(f, x)).tolist() == [6.0, 18.0, 21.0, 15.0]
    assert replayed(lambda x: x * int(torch.arange(4).sum()), x).tolist() == (x * 6).tolist()


def test_functions_only() -> None:
    with pytest.raises(ArgumentError, match=r"jit takes a function, but got .*; write jit\(f\), not jit\(f\(x\)\)"):
        jit(torch.ones(3))  # type: ignore[call-overload]
    with pytest.raises(ArgumentError, match=r"Jitted got the function <lambda>; write jit\(f\)"):
        fspmd.Jitted(lambda x: x)  # type: ignore[arg-type]


# --- replay -----------------------------------------------------------------------------------------------------------

M = torch.rand(3, 3, dtype=F64) + 0.5
#: arguments by the names of aten functions, where two matrices will not do
GIVEN: dict[str, tuple[Any, ...]] = {
    "addmm": (M, M, M),
    "amax": (M, [1], True),
    "amin": (M, [1], True),
    "argmax": (M, 1, True),
    "bmm": (M[None], M[None]),
    "clamp": (M, None, 1.0),
    "constant_pad_nd": (M, [0, 1], 2.0),
    "max.dim": (M, 1, True),
    "mean.dim": (M, [1], True),
    "scatter_.src": (M.clone(), 0, torch.zeros(2, 3, dtype=torch.int64), M),
    "split.Tensor": (M, 2, 1),
    "bitwise_not": (M > 1,),
    "cat": ([M, M], 1),
    "expand": (M, [2, 3, 3]),
    "gather": (M, 0, torch.zeros(2, 3, dtype=torch.int64)),
    "index_select": (M, 0, torch.tensor([1, 0])),
    "masked_fill.Scalar": (M, M > 1, 2.0),
    "native_layer_norm": (M, [3], None, None, 1e-5),
    "permute": (M, [1, 0]),
    "pow.Tensor_Scalar": (M, 2),
    "select.int": (M, 0, 1),
    "squeeze.dim": (M[None], 0),
    "stack": ([M, M], 1),
    "sum.dim_IntList": (M, [1], True),
    "transpose.int": (M, 0, 1),
    "unsqueeze": (M, 1),
    "view": (M, [9]),
    "where.self": (M > 1, M, M),
    "_softmax": (M, 1, False),
    "_log_softmax": (M, 1, False),
    "_softmax_backward_data": (M, M, 1, F64),
    "_log_softmax_backward_data": (M, M, 1, F64),
    "_scaled_dot_product_flash_attention_for_cpu": (M[None, None], M[None, None], M[None, None]),
    **dict.fromkeys(("ge.Scalar", "gt.Scalar", "le.Scalar", "lt.Scalar"), (M, 1.0)),
    **dict.fromkeys(("le.Tensor", "lt.Tensor"), (M, M.t())),
}
BINARY = ("add", "add_", "div", "div_", "eq", "maximum", "minimum", "mm", "mul", "mul_", "sub", "sub_", "copy_")


class Seen(TorchDispatchMode):
    """Which aten functions are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_functions_reach_the_aten_function_that_was_recorded(name: str) -> None:
    base, _, overload = name.removeprefix("aten::").partition(".")
    target = getattr(getattr(torch.ops.aten, base), overload or "default")
    args = GIVEN.get(name.removeprefix("aten::"), (M.clone(), M) if base in BINARY else (M.clone(),))
    with Seen() as seen:
        callable_of(target)(*args)
    assert seen.names == [name]
    assert callable_of(target) is not target._op


_CHECKED: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "inv": (lambda x: torch.linalg.inv(x + torch.eye(3)), (4, 3, 3)),
    "inv of a plain tensor": (lambda x: x @ torch.linalg.inv(device_get(x)[2] + torch.eye(3)), (4, 3, 3)),
    "bernoulli": (lambda x: torch.bernoulli(x + 1), (4, 3)),
    "multinomial": (lambda x: torch.multinomial(x + 1, 2), (4, 3)),
    "gaussian_nll_loss": (lambda x: F.gaussian_nll_loss(x, x, x + 1), (4, 3)),
}


@pytest.mark.parametrize("name", _CHECKED)
def test_values_are_checked_in_every_replay(name: str) -> None:
    function, shape = _CHECKED[name]
    recorded = jit(function)
    x, bad = torch.zeros(shape), torch.zeros(shape)
    bad[2] = -torch.eye(3) if len(shape) == 3 else -2.0
    for _ in range(2):
        recorded(device_put(x, P("x"), mesh=MESH))
    with pytest.raises((ArgumentError, torch.linalg.LinAlgError)):
        recorded(device_put(bad, P("x"), mesh=MESH))


TARGET = torch.linspace(-1, 1, 6 * 4 * 16, dtype=torch.float64).view(6, 4, 16)

#: losses of a view that is transposed: kernels lay their gradients out as torch's shape functions do not
TRANSPOSED: dict[str, Callable[[Any], Any]] = {
    "mse_loss": lambda x: F.mse_loss(x, TARGET),
    "softplus": lambda x: (F.softplus(x) * TARGET).sum(),
    "logsigmoid": lambda x: (F.logsigmoid(x) * TARGET).transpose(1, 2).reshape(6, 64).sin().sum(),
    "log_softmax": lambda x: (F.log_softmax(x, 1) * TARGET).transpose(1, 2).reshape(6, 64).sin().sum(),
    "power": lambda x: (2**x * TARGET).transpose(1, 2).reshape(6, 64).sin().sum(),
    "batch_norm": lambda x: (F.batch_norm(x, None, None, training=True) ** 3 * TARGET).sum(),
}


@pytest.mark.parametrize("spec", [P(), P("x")])
@pytest.mark.parametrize("name", TRANSPOSED)
def test_gradients_of_transposed_values_are_reshaped(name: str, spec: P) -> None:
    """Where a record takes a reshape for a view, as the strides of kernels do not allow it, the replay copies."""

    def loss(x: Any) -> Any:
        return TRANSPOSED[name](x.view(6, 16, 4).sin().transpose(1, 2))

    x = torch.linspace(-2, 3, 6 * 64, dtype=torch.float64).view(6, 64)
    expected = torch.func.grad(loss)(x)
    found = jit(fspmd.grad(loss))(device_put(x, spec, mesh=MESH))
    torch.testing.assert_close(device_get(found), expected)
