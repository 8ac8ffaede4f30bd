"""A value that was settled, gathered or exchanged once serves all its uses: counts, values, gradients, how long."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fspmd import (
    ArgumentError,
    Mesh,
    P,
    Sharded,
    checkpoint,
    communication_log,
    device_get,
    device_put,
    grad,
    jit,
    make_mesh,
    remembered,
    with_spec,
)

F64 = torch.float64
LINE = make_mesh((4,), ("x",), transport="simulation")
MESHES = [LINE, *(make_mesh((n,), ("x",), transport="simulation") for n in (2, 3))]
MESHES += [make_mesh((2, 3), ("dp", "x"), transport="simulation")]
Count = dict[str, int]


def _values(mesh: Mesh) -> tuple[list[Tensor], list[Sharded]]:
    """A batch, and weights cut by columns and by rows; sizes that ranks share unevenly."""
    torch.manual_seed(0)
    plain = [torch.randn(shape, dtype=F64, requires_grad=True) for shape in ((4, 5, 6), (6, 7), (7, 6))]
    specs = [P("dp" if "dp" in mesh.axis_names else None), P(None, "x"), P("x")]
    laid = [device_put(one.detach(), spec, mesh=mesh).requires_grad_() for one, spec in zip(plain, specs, strict=True)]
    return plain, laid


def _counted(log: Any) -> list[Count]:
    """Of forward and backward, without the sums of gradients over the batch."""
    return [dict(Counter(one.kind for one in part if "dp" not in one.axes)) for part in (log.forward, log.backward)]


def _norm(x: Any) -> Any:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def _cast_norm(x: Any) -> Any:
    """In a narrower dtype, as libraries write it for a wider one."""
    return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).double()


def _block(x: Any, w: Any, v: Any) -> Any:
    return torch.tanh(x @ w) @ v


def _stream(x: Any, w: Any, v: Any) -> Any:
    """Two blocks of a transformer, as libraries write them."""
    x = x + _block(_norm(x), w, v)
    x = x + _block(_norm(x), w, v)
    return _norm(x)


PSUM = "psum_unreduced"
#: name -> function of x, w and v; sums forward; sums of gradients backward
SETTLED: dict[str, tuple[Callable[..., Any], int, int]] = {
    "two uses": (lambda x, w, v: torch.sin(p := _block(x, w, v)) * torch.cos(p), 1, 1),
    "sums that stay pending": (lambda x, w, v: (torch.sin(p := _block(x, w, v)) + p + p * 2).cos(), 1, 1),
    "a product": (lambda x, w, v: _block(torch.sin(p := _block(x, w, v)), w, v) + (p @ w) @ v, 2, 3),
    "a view of its own": (lambda x, w, v: torch.sin(p := _block(x, w, v)) + p.view(20, 6).cos().view(4, 5, 6), 2, 1),
    "pieces": (lambda x, w, v: sum((i + 2) * one.sin() for i, one in enumerate(_block(x, w, v).split(2, -1))), 1, 1),
    "rows": (lambda x, w, v: sum((i + 2) * one.sin() for i, one in enumerate(_block(x, w, v).mT)), 1, 1),
    "pieces of pieces": (
        lambda x, w, v: sum(row[:, i].mT.sin() for row in (_block(x, w, v) * 2).mT.chunk(2, 1) for i in (0, 2)),
        1,
        1,
    ),
    "all, then pieces": (
        lambda x, w, v: (p := _block(x, w, v)).sin() * p.unbind(1)[0][:, None] + p.chunk(2, 1)[1][:, :1],
        1,
        1,
    ),
    "a narrower dtype": (lambda x, w, v: _cast_norm(p := _block(x, w, v)) + _cast_norm(p + _cast_norm(p)), 1, 1),
    "a transformer": (_stream, 2, 2),
}


@pytest.mark.one_of(6)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh.shape.values())))
@pytest.mark.parametrize("name", SETTLED)
def test_a_pending_sum_is_settled_once(name: str, mesh: Mesh) -> None:
    """Beside plain torch, with second derivatives; eager, and recorded."""
    f, forward, backward = SETTLED[name]
    close = dict.fromkeys(("rtol", "atol"), 1e-4 if "dtype" in name else 1e-9)  # of gradients that are cast, too
    plain, laid = _values(mesh)
    with communication_log() as log:
        out = f(*laid)
        mine = torch.autograd.grad(out.sin().sum(), laid, create_graph=True)
    seconds = torch.autograd.grad(sum(g.square().sum() for g in mine), laid)
    wanted = f(*plain)
    theirs = torch.autograd.grad(wanted.sin().sum(), plain, create_graph=True)
    others = torch.autograd.grad(sum(g.square().sum() for g in theirs), plain)
    for one, other in zip((out, *mine, *seconds), (wanted, *theirs, *others), strict=True):
        torch.testing.assert_close(device_get(one), other, **close)
    assert _counted(log)[0].get(PSUM, 0) == forward
    assert _counted(log)[1].get("psum", 0) == backward
    loss = jit(grad(lambda *leaves: f(*leaves).sin().sum(), argnums=(0, 1, 2)))
    for _ in range(2):  # recorded, and replayed
        with communication_log() as log:
            found = loss(*[one.detach() for one in laid])
        assert _counted(log)[0].get(PSUM, 0) == forward
        for one, other in zip(found, theirs, strict=True):
            torch.testing.assert_close(device_get(one), other.detach(), **close)


def _pending(mesh: Mesh = LINE) -> tuple[Sharded, Tensor]:
    """A pending sum that autograd follows, and its value."""
    plain, laid = _values(mesh)
    return _block(*laid), _block(*plain).detach()


def _sums(f: Callable[[], Any]) -> tuple[int, Any]:
    with communication_log() as log:
        out = f()
    return len([one for one in log if one.kind in (PSUM, "psum") and not one.backward]), out


def test_without_gradients_pieces_are_views_of_a_pending_sum() -> None:
    """Which may be written into, and are settled one by one."""
    p, value = _pending()
    with torch.no_grad():
        p = p.detach()
        one, other = p.split(3, -1)
        one.mul_(2)
        count, out = _sums(lambda: one.sin() + other.sin())
        torch.testing.assert_close(device_get(out), (2 * value[..., :3]).sin() + value[..., 3:].sin())
        torch.testing.assert_close(device_get(p)[..., :3], 2 * value[..., :3])
    assert count == 2


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        (torch.float32, torch.float16),
        (F64, torch.float32),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.bfloat16),
    ],
)
def test_terms_are_not_rounded_one_by_one(wide: torch.dtype, narrow: torch.dtype) -> None:
    """Their sum is a number of the narrower dtype, and they are none: too large, or too long."""
    big = 1e5 if torch.finfo(wide).max > 1e5 > torch.finfo(narrow).max else 1.0 + torch.finfo(wide).eps
    x = device_put(torch.tensor([[big], [0.0], [0.0], [-big if big > 2 else -1.0]], dtype=wide), P("x"), mesh=LINE)
    total = x.sum(0)
    assert total.spec.partition.unreduced
    assert torch.equal(device_get(total.to(narrow)), device_get(x).sum(0).to(narrow))


def test_a_write_ends_what_is_remembered() -> None:
    p, value = _pending()
    with torch.no_grad():
        assert _sums(lambda: torch.sin(p) + torch.cos(p))[0] == 1
        p.mul_(2)
        count, out = _sums(lambda: torch.sin(p) + torch.cos(p))
    assert count == 1
    torch.testing.assert_close(device_get(out), (2 * value).sin() + (2 * value).cos())


#: what may be made of a matrix, or done to it
MADE: tuple[Callable[..., Any], ...] = (
    lambda x: x.mT, lambda x: x[1:], lambda x: x[:, 0:1], lambda x: x.view(x.shape), lambda x: x.chunk(2)[-1],
    lambda x: x.float(), lambda x: x.double(), lambda x: x * 2, lambda x: x.clone(), lambda x: -x,
    lambda x: x.mul_(3), lambda x: x[:1].add_(x[:1] * 2), lambda x: x.detach(), lambda x: x + x.mean(),
)  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_what_was_made_of_pending_sums_is_what_torch_makes(seed: int) -> None:
    """Views, casts and writes in any order, each value looked at now and then; with the same writes through views."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    w, v = (torch.randn(shape, dtype=F64) for shape in ((4, 12), (12, 6)))
    laid = [device_put(w, P(None, "x"), mesh=LINE), device_put(v, P("x"), mesh=LINE)]
    pairs: list[tuple[Any, Any]] = [(laid[0] @ laid[1], w @ v)]
    for _ in range(20):
        mine, theirs = choose.choice(pairs)
        if choose.random() < 0.4:
            torch.testing.assert_close(device_get(mine.abs()), theirs.abs(), rtol=1e-4, atol=1e-4)
        elif theirs.numel() > 1:
            make = choose.choice(MADE)
            pairs.append((make(mine), make(theirs)))
    for mine, theirs in pairs:
        torch.testing.assert_close(device_get(mine.abs()), theirs.abs(), rtol=1e-4, atol=1e-4)


#: by what name a pending sum is written into
NAMES: dict[str, Callable[[Any], Any]] = {
    "detached": lambda p: p.detach().mul_(2),
    "data": lambda p: p.data.mul_(2),
    "a row": lambda p: p[0].mul_(2),
    "drawn": lambda p: p.normal_(),
    "a list": lambda p: torch._foreach_mul_([p], 2.0),
    "out": lambda p: torch.add(p, p, out=p),
    "replayed": (twice := jit(lambda p: p.mul_(2))),
    "replayed again": twice,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_write_by_any_name_ends_it(name: str) -> None:
    with torch.no_grad():
        p, _ = _pending()
        torch.sin(p)
        NAMES[name](p)
        torch.testing.assert_close(device_get(torch.sin(p)), device_get(p * 1).sin())


@pytest.mark.parametrize("mesh", MESHES[:2])
def test_a_write_by_hand_is_refused(mesh: Mesh) -> None:
    """Which may be one of this rank alone; one of another value, or before the first use, is none of its business."""
    p, _ = _pending(mesh)
    with torch.no_grad():
        p.local.mul_(2)
        torch.sin(p)
        (p * 1).local.mul_(2)
        torch.sin(p)
        p.local.mul_(2)
        with pytest.raises(ArgumentError, match="written into by hand"):
            torch.sin(p)
        with pytest.raises(ArgumentError, match="written into by hand"):
            p * 2


@pytest.mark.parametrize("mesh", MESHES[:2])
def test_another_block_is_refused_after_a_use(mesh: Mesh) -> None:
    """Which may be one of this rank alone; before the first use it is what the value is, and of a leaf ever."""
    (y, value), (other, _) = _pending(mesh), _pending(mesh)
    p, q = y.detach(), other.detach()
    p.local = p.local * 2
    torch.testing.assert_close(device_get(torch.sin(p)), (2 * value).sin())
    for one, block in ((p, q.local), (q, p.local), (y, y.local * 2), (y, q.local), (q, y.local)):
        with pytest.raises(ArgumentError, match=r"x\.local = block was written for Sharded f64"):
            one.local = block
    with pytest.raises(RuntimeError, match="has weakref"):
        torch.utils.swap_tensors(p.local, q.local)
    w = device_put(torch.ones(3, dtype=F64), P(), mesh=mesh).requires_grad_()
    x = device_put(torch.ones(6, 3, dtype=F64), P("x"), mesh=mesh)
    for scale in (1, 2, 4):
        out = (x * w).square().sum()
        out.backward()
        assert w.grad is not None
        torch.testing.assert_close(device_get(w.grad), torch.full((3,), 12.0 * scale, dtype=F64))
        with pytest.raises(ArgumentError, match="their requires_grad differs"):
            w.local = w.local.detach() * 2
        w.local = (w.local.detach() * 2).requires_grad_()


def test_what_was_detached_is_not_settled_again() -> None:
    """Nor does it hold the graph that it has left."""
    p, value = _pending()
    node = weakref.ref(p.local.grad_fn)
    count, out = _sums(lambda: torch.sin(p) * torch.cos(p.detach_()))
    assert (count, p.requires_grad) == (1, False)
    torch.testing.assert_close(device_get(out), value.sin() * value.cos())
    del out
    assert node() is None


def test_what_shares_memory_unseen_remembers_nothing() -> None:
    """After ``x.data = y`` neither tells the other of writes, as in torch."""
    p, value = _pending()
    with torch.no_grad():
        p, q = p * 1, p * 2
        p.data = q
        assert all((device_get(torch.sin(one)) - (2 * value).sin()).abs().max() < 1e-12 for one in (p, q))
        q.mul_(2)
        torch.testing.assert_close(device_get(torch.sin(p)), (4 * value).sin())
        p.mul_(2)
        torch.testing.assert_close(device_get(torch.sin(q)), (8 * value).sin())


#: what remembers -> how it is made of a leaf, and used
DETACHED: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "a sum": (lambda w, ids: w @ w.T, lambda h, x: h.exp()),
    "a cast": (lambda w, ids: w * 1.0, lambda h, x: (h * x).exp()),
    "an origin": (lambda w, ids: F.embedding(ids, w), lambda h, x: (h * x).exp()),
}


@pytest.mark.parametrize(("followed", "by_hand"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("kind", DETACHED)
def test_what_is_detached_in_place_forgets_its_graph(kind: str, followed: bool, by_hand: bool) -> None:
    """A use before `detach_` leads to what the value was made of; one after it ends there."""
    torch.manual_seed(0)
    w, x, ids = torch.randn(2, 8, dtype=F64), torch.randn(8, 2, 8, dtype=F64), torch.randint(0, 2, (8, 2))
    make, use = DETACHED[kind]

    def gradients(lay: Callable[[Tensor, P], Any]) -> list[Any]:
        leaf = lay(w.clone(), P(None, "x" if kind == "a sum" else None)).requires_grad_()
        h, rows = make(leaf, lay(ids, P())), lay(x, P("x"))
        before = use(h, rows).sum()
        (h.local if by_hand and isinstance(h, Sharded) else h).detach_().requires_grad_(followed)
        (before + use(h, rows).sum() * 3).backward()
        return [one.grad if one.grad is None else device_get(one.grad) for one in (leaf, h)]

    mine = gradients(lambda one, spec: device_put(one, spec, mesh=LINE))
    torch.testing.assert_close(mine, gradients(lambda one, spec: one))


def test_without_and_with_gradients() -> None:
    """What was settled under no_grad has no gradient; what was settled with one serves both."""
    p, value = _pending()
    with torch.no_grad():
        assert _sums(lambda: torch.sin(p))[0] == 1
    count, out = _sums(lambda: torch.sin(p))
    assert (count, out.requires_grad) == (1, True)
    with torch.no_grad():
        count, out = _sums(lambda: torch.cos(p))
    assert (count, out.requires_grad) == (0, False)
    torch.testing.assert_close(device_get(out), value.cos())
    with torch.inference_mode():
        q = p * 2
        torch.testing.assert_close(device_get(torch.sin(q) + torch.cos(q)), (2 * value).sin() + (2 * value).cos())
    torch.testing.assert_close(
        device_get(torch.sin(q * 2) + q[1:].mT.cos().sum()), (r := 4 * value).sin() + (r[1:] / 2).cos().sum()
    )


def _held(x: Sharded) -> list[weakref.ref[Tensor]]:
    return [weakref.ref(value) for value, *_ in vars(x.local).get("_fspmd_moves", {}).values()]


def test_what_is_remembered_lives_as_long_as_its_value() -> None:
    """With and without gradients, without the garbage collector; of a parameter nothing is held."""
    gc.disable()
    try:
        for follows in (True, False):
            with torch.set_grad_enabled(follows):
                p, _ = _pending()
                out = torch.sin(p)
                (settled,) = _held(p)
                del out
                assert settled() is not None
                del p
                assert settled() is None
        x = device_put(torch.ones(8, 6, dtype=F64), P("x"), mesh=LINE).requires_grad_()
        with communication_log() as log:
            torch.cumsum(x, 0) + torch.linalg.svdvals(x.mT @ torch.ones(8, 6, dtype=F64)) + x.view(6, 8).sum()
        assert log
        assert not _held(x)
    finally:
        gc.enable()


def test_threads_remember_apart() -> None:
    p, _ = _pending()
    assert _sums(lambda: torch.sin(p))[0] == 1
    counts: list[int] = []
    thread = threading.Thread(target=lambda: counts.append(_sums(lambda: torch.sin(p) + torch.cos(p))[0]))
    thread.start()
    thread.join()
    assert counts == [1]
    assert _sums(lambda: torch.sin(p))[0] == 0


def test_what_a_thread_remembers_ends_with_it() -> None:
    p, _ = _pending()
    for _ in range(3):
        thread = threading.Thread(target=lambda: torch.sin(p))
        thread.start()
        thread.join()
    assert not _held(p)
    torch.sin(p)
    assert len(_held(p)) == 1


def test_a_scope_that_an_interrupt_has_cut_off_ends_without_a_word() -> None:
    remembered._Scope.__new__(remembered._Scope).__del__()


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    "checkpointed", [checkpoint, lambda f: lambda *args: torch_checkpoint(f, *args, use_reentrant=False)]
)
def test_a_checkpointed_function_settles_by_itself(checkpointed: Any, before: bool) -> None:
    """Once forward, once when it is computed again; whatever was settled before, or is after."""
    plain, laid = _values(LINE)
    wanted = sum(torch.autograd.grad(_norm(_norm(q := _block(*plain))).sum() + q.sin().sum(), plain)[0].flatten())
    with communication_log() as log:
        p = _block(*laid)
        own = p.sin() if before else None
        loss = checkpointed(lambda p: _norm(_norm(p)))(p).sum() + (p.sin() if own is None else own).sum()
        g = torch.autograd.grad(loss, laid)[0]
    torch.testing.assert_close(device_get(g).sum(), wanted)
    assert len([one for one in log if one.kind == PSUM and not one.backward]) == 2
    assert len([one for one in log if one.kind == PSUM and one.backward]) == 1


def test_a_record_knows_nothing_of_before() -> None:
    """Of a value that is closed over, settled before it is recorded or not; and nothing of it stays behind."""
    p, value = _pending()
    texts = []
    for settles in (False, True):
        if settles:
            torch.sin(p)
        with torch.no_grad():
            f = jit(lambda y: torch.sin(p) + torch.cos(p) * y)
            texts.append(f.lower(torch.ones((), dtype=F64)).as_text())
            with communication_log() as log:
                out = f(torch.ones((), dtype=F64))
        torch.testing.assert_close(device_get(out), value.sin() + value.cos())
        assert [one.kind for one in log] == [PSUM]
    assert texts[0] == texts[1]
    assert _sums(lambda: torch.sin(p))[0] == 0


#: name -> function of a stream and weights; how the sum of its layers ends; what its gradient takes besides
GATHERED: dict[str, tuple[Callable[..., Any], str, Count]] = {
    "by three layers": (lambda x, ws: sum(torch.tanh(x @ w) @ w.mT for w in ws), PSUM, {}),
    "beside other uses": (
        lambda x, ws: sum(torch.tanh(x @ w) @ w.mT for w in ws) + x.sin(),
        "psum_scatter_unreduced",
        {"all_gather_reduced": 1},
    ),
}


@pytest.mark.parametrize("name", GATHERED)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_equal_gathers_are_one(name: str, n: int) -> None:
    """Of a stream that is cut along the sequence, three layers gather it once, and send one reduce-scatter back."""
    mesh = make_mesh((n,), ("x",), transport="simulation")
    torch.manual_seed(0)
    x, ws = torch.randn(2, 12, 8, dtype=F64), [torch.randn(8, 48, dtype=F64) for _ in range(3)]
    plain = [one.clone().requires_grad_() for one in (x, *ws)]
    laid = [device_put(x, P(None, "x"), mesh=mesh), *(device_put(w, P(None, "x"), mesh=mesh) for w in ws)]
    for one in laid:
        one.requires_grad_()
    f, end, back = GATHERED[name]
    with communication_log() as log:
        out = f(torch.relu(laid[0]), laid[1:])
        mine = torch.autograd.grad(out.sin().sum(), laid)
    theirs = torch.autograd.grad(f(torch.relu(plain[0]), plain[1:]).sin().sum(), plain)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(device_get(one), other)
    assert _counted(log) == [{"all_gather_reduced": 1, end: 1}, {"psum_scatter_unreduced": 1, **back}]


def test_a_sum_is_settled_before_it_is_made_wider() -> None:
    """As norms of libraries widen it: in the narrow dtype, once for both uses."""
    plain, laid = _values(LINE)
    p = _block(*[one.detach().float().requires_grad_() for one in laid])
    with communication_log() as log:
        out = p * torch.rsqrt(p.to(F64).pow(2).mean(-1, keepdim=True))
    assert [(one.kind, one.dtype) for one in log] == [(PSUM, torch.float32)]
    value = _block(*plain)
    torch.testing.assert_close(
        device_get(out), value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True)), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("cut", [P(), P(None, "tp"), P("tp")], ids=str)
def test_the_gradient_of_a_tied_weight_is_summed_once(cut: P) -> None:
    """Over the batch, of an embedding and the head of a model; eager and recorded."""
    mesh = make_mesh((2, 2), ("dp", "tp"), transport="simulation")
    torch.manual_seed(0)
    w, ids = torch.randn(12, 8, dtype=F64), torch.randint(0, 12, (4, 5))
    laid, places = device_put(w, cut, mesh=mesh).requires_grad_(), device_put(ids, P("dp"), mesh=mesh)
    w.requires_grad_()

    def loss(w: Any, ids: Any) -> Any:
        return F.linear(torch.tanh(F.embedding(ids, w) * 8**0.5), w).logsumexp(-1).mean()

    wanted = torch.autograd.grad(loss(w, ids), w)[0]
    for step in (grad(loss), jit(grad(loss))):
        with communication_log() as log:
            found = step(laid.detach(), places)
        torch.testing.assert_close(device_get(found), wanted)
        sums = [one for one in log if "dp" in one.axes and len(one.shape) == 2]
        assert [one.axes for one in sums] == [("dp",)], str(log)


def test_what_was_made_of_a_copy_does_not_keep_it_in_use() -> None:
    mesh = make_mesh((2, 3), ("x", "y"), transport="simulation")
    whole = torch.zeros(6, 6, dtype=torch.float64)
    x = device_put(whole, P(None, "x"), mesh=mesh)
    part = x[:, 1].clone()  # of a column that one rank has: a pending sum
    part.add_(1)
    x[:, 1] = part
    torch.testing.assert_close(device_get(x)[:, 1], torch.ones(6, dtype=torch.float64))


def test_a_derivative_holds_casts_no_longer_than_it_lasts() -> None:
    w = device_put(torch.ones(3, dtype=F64), P(), mesh=LINE)
    x = device_put(torch.ones(4, 3, dtype=F64), P("x"), mesh=LINE)
    leaves: list[Any] = []

    def loss(w: Any, fails: bool) -> Any:
        leaves.append(weakref.ref(w.local))
        y = (x * w).square().sum() + (x * w).sum() + w.sum()
        if fails:
            raise KeyError
        return y

    gc.disable()
    try:
        with communication_log() as log:
            gradient = grad(loss)(w, False)
        with pytest.raises(KeyError):
            grad(loss)(w, True)
        assert [leaf() for leaf in leaves] == [None, None]
    finally:
        gc.enable()
    assert torch.equal(device_get(gradient), torch.full((3,), 13.0, dtype=F64))
    assert [one.kind for one in log.backward] == ["psum"]  # of the one cast that both products share


@pytest.mark.parametrize("is_cast", [False, True])
def test_slices_of_a_value_that_is_cast_before_a_loop_share_one_sum(is_cast: bool) -> None:
    """A scan over positions as in Mamba, whose state is cut; `C` is equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    first, whole = (torch.randn(n, 5, dtype=F64, generator=generator) for n in (8, 6))

    def loss(c: Any, h: Any) -> Any:
        if is_cast and isinstance(c, Sharded):
            c = with_spec(c, P(reduced={"x"}))
        state, out = h * 0, []
        for i in range(6):
            state = state * 0.5 + h
            out.append(state @ c[i])
        return torch.stack(out).square().sum()

    expected = torch.func.grad(loss)(whole, first)
    with communication_log() as log:
        found = grad(loss)(device_put(whole, P(), mesh=LINE), device_put(first, P("x"), mesh=LINE))
    torch.testing.assert_close(device_get(found), expected)
    assert len(log.backward) == (1 if is_cast else 6)
