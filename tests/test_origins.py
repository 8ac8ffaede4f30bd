"""What is larger than what it was made of, beside a cut batch: its gradient is summed, not gathered."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fspmd import (
    ArgumentError,
    Link,
    Mesh,
    P,
    Sharded,
    Topology,
    communication_log,
    device_get,
    device_put,
    grad,
    jit,
    make_mesh,
    set_topology,
)
from fspmd.redistribution.cost import topology

F64 = torch.float64
MESHES = [make_mesh((n,), ("dp",), transport="simulation") for n in (2, 3, 4)]
MESHES += [make_mesh((2, 4), ("dp", "tp"), transport="simulation")]
B, S, D = 6, 9, 8


@pytest.fixture(autouse=True)
def bytes_count() -> Iterator[None]:
    """As they do where values are large."""
    before = topology()
    set_topology(Topology(Link(0.0, 1.0), Link(0.0, 1.0), launch=0.0))
    yield
    set_topology(before)


#: name -> rows of a table w, and what is made of it beside x [B@dp, S, D]
CASES: dict[str, tuple[int, Callable[[Any, Any, Any], Any]]] = {
    "types of tokens": (2, lambda x, w, ids: x + F.embedding(ids, w)),
    "by index": (2, lambda x, w, ids: x + w[ids]),
    "positions": (S, lambda x, w, ids: x * F.embedding(torch.arange(S).repeat(B, 1), w)),
    "a class token": (1, lambda x, w, ids: torch.cat((w[None].expand(B, -1, -1), x), 1)),
    "a token of each": (2, lambda x, w, ids: torch.cat((x, w.expand(B, 2, D)), 1)),
    "a repeated token": (1, lambda x, w, ids: torch.cat((w.repeat(B, 1, 1), x), 1)),
    "queries": (S, lambda x, w, ids: x + torch.tile(w[None], (B, 1, 1))),
    "used twice": (2, lambda x, w, ids: (x + (e := F.embedding(ids, w))).sin() * e),
    "used whole": (2, lambda x, w, ids: (x + (e := F.embedding(ids, w))).sin() * e.mean()),
    "a width that is cut": (2, lambda x, w, ids: x + F.embedding(ids, w)),
    "types doubled": (2, lambda x, w, ids: x + F.embedding(ids, w) * 2),
    "types normed": (2, lambda x, w, ids: x + F.gelu(F.layer_norm(F.embedding(ids, w), (D,)))),
    "doubled queries": (S, lambda x, w, ids: x * (w[None].expand(B, -1, -1) * 2).tanh()),
    "transposed queries": (S, lambda x, w, ids: x * (w.t()[None].expand(B, -1, -1) * 2).mT),
    "queries that attend": (S, lambda x, w, ids: x * _attention(w[None].expand(B, -1, -1))),
    "a doubled class token": (1, lambda x, w, ids: torch.cat((w[None].expand(B, -1, -1) * 2, x), 1)),
    "repeated and viewed": (S, lambda x, w, ids: x * w.repeat(B, 1).view(B, S, D)),
    "doubled between": (S, lambda x, w, ids: x * (w.repeat(B, 1).repeat(1, 1, 1)[0] * 2).sin().reshape(B, S, D)),
    "heads": (S, lambda x, w, ids: x.view(B, S, 2, -1).mT * torch.tile(w, (B, 1)).view(B, S, 2, -1).mT),
    "repeated twice": (S, lambda x, w, ids: torch.cat((x, x), 2) * w.repeat(B, 2).view(B, S, 2 * D)),
    "rows of repetitions": (S, lambda x, w, ids: x.flatten(0, 1) * w.repeat(B, 1)),
    "part of a repetition": (4, lambda x, w, ids: x.flatten(0, 1)[:52] * w.repeat(13, 1)),
    "flattened queries": (
        S,
        lambda x, w, ids: x.flatten(0, 1).view(B, S, D) * w.expand(B, S, D).reshape(B * S, D).view(B, S, D),
    ),
    "each row repeated": (S, lambda x, w, ids: x.transpose(0, 1) * w.repeat_interleave(B, 0).view(S, B, D)),
}


def _attention(x: Any) -> Any:
    return (x @ x.mT).softmax(-1) @ x


@pytest.mark.one_of(4)
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh.shape.values())))
@pytest.mark.parametrize("name", CASES)
def test_its_gradient_is_a_sum_of_what_it_was_made_of(name: str, mesh: Mesh) -> None:
    """Beside plain torch, with second derivatives; eager, and recorded."""
    rows, f = CASES[name]
    torch.manual_seed(0)
    x, w, ids = torch.randn(B, S, D, dtype=F64), torch.randn(rows, D, dtype=F64), torch.randint(0, rows, (B, S))
    cut = P(None, "tp" if name == "a width that is cut" and "tp" in mesh.shape else None)
    laid_x, laid = device_put(x, P("dp"), mesh=mesh), device_put(w, cut, mesh=mesh).requires_grad_()
    w.requires_grad_()
    with communication_log() as log:
        out = f(laid_x, laid, ids)
        (mine,) = torch.autograd.grad(out.sin().sum(), laid, create_graph=True)
    theirs = torch.autograd.grad(f(x, w, ids).sin().sum(), w, create_graph=True)[0]
    own = rows * D // (4 if cut.mentioned else 1)
    idle = mesh.shape["dp"] == 4 and "embedding" in f.__code__.co_names  # the gradient of no rows
    assert ("all_gather_invariant" in [one.kind for one in log.backward]) == idle
    assert idle or sum(one.price.moved for one in log.backward) <= (2 * own + 8) * 8
    again, other = (torch.autograd.grad(g.square().sum(), v)[0] for g, v in ((mine, laid), (theirs, w)))
    torch.testing.assert_close(device_get(mine), theirs)
    torch.testing.assert_close(device_get(again), other)
    step = jit(lambda w: torch.autograd.grad(f(laid_x, w, ids).sin().sum(), w)[0])
    for _ in range(2):
        torch.testing.assert_close(device_get(step(laid)), theirs.detach())


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh.shape.values())))
def test_a_dim_that_is_repeated_is_made_whole_and_then_cut(mesh: Mesh) -> None:
    """Each rank has other rows of it, not its own rows repeated."""
    x, q = torch.randn(6 * S, D, dtype=F64), torch.randn(S, D, dtype=F64)
    repeats: list[Callable[[Any], Any]] = [
        lambda q: q.repeat(6, 1),
        lambda q: torch.tile(q, (6, 1)),
        lambda q: q.repeat_interleave(6, 0),
        lambda q: torch.cat([q] * 6),
    ]
    for repeat in repeats:
        laid, leaf = device_put(q, P(), mesh=mesh).requires_grad_(), q.clone().requires_grad_()
        mine, theirs = device_put(x, P("dp"), mesh=mesh) * repeat(laid), x * repeat(leaf)
        torch.testing.assert_close(device_get(mine.detach()), theirs.detach())
        for loss in (mine.sin().sum(), theirs.sin().sum()):
            loss.backward()
        assert laid.grad is not None
        torch.testing.assert_close(device_get(laid.grad), leaf.grad)


def test_writes_and_copies_end_it() -> None:
    """Of the table or the value: then the value alone counts."""
    mesh, ids = MESHES[0], torch.tensor([[0, 1, 1], [1, 0, 1]])
    x = device_put(torch.ones(2, 3, D, dtype=F64), P("dp"), mesh=mesh)
    for what in ("value", "table", "copy"):
        w = device_put(torch.ones(2, D, dtype=F64), P(), mesh=mesh).requires_grad_()
        table = w * 1.0
        e = F.embedding(ids, table)
        with torch.no_grad():
            if what == "value":
                e.mul_(3)
            if what == "table":
                table.mul_(5)
        e = copy.copy(e) if what == "copy" else e
        torch.testing.assert_close(device_get(x + e), torch.full((2, 3, D), 4.0 if what == "value" else 2.0, dtype=F64))
    assert copy.deepcopy(e.detach().local).__dict__.get("_fspmd_origin") is None


#: what is asked of the gradient of the value itself, before it is used and after
ASKED: dict[str, Callable[[Any, Any], Any]] = {
    "a hook": lambda h, loss: h.register_hook(lambda g: g * 3),
    "retain_grad": lambda h, loss: h.retain_grad(),
    "autograd.grad": lambda h, loss: torch.autograd.grad(loss, h) if loss is not None else None,
    "inputs": lambda h, loss: loss.backward(inputs=[h]) if loss is not None else None,
}
LARGER: dict[str, Callable[[Any, Any], Any]] = {
    "a table": lambda w, ids: F.embedding(ids, w),
    "expanded": lambda w, ids: w[:1, None].expand(B, S, D),
    "repeated": lambda w, ids: w[:1].repeat(B, S, 1),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("made", LARGER)
@pytest.mark.parametrize("name", ASKED)
def test_who_asks_for_its_own_gradient_gets_it_or_an_error(name: str, made: str, late: bool) -> None:
    """A hook may be set on one rank alone, and bears on nothing that is sent: an error; of a copy it is gathered."""
    x, w, ids = torch.randn(B, S, D, dtype=F64), torch.randn(2, D, dtype=F64), torch.randint(0, 2, (B, S))
    found = []
    for lay in (lambda one, spec: one, lambda one, spec: device_put(one, spec, mesh=MESHES[0])):
        leaf = lay(w.clone(), P()).requires_grad_()
        h = LARGER[made](leaf, lay(ids, P()))
        if isinstance(h, Sharded):
            loss = (lay(x, P("dp")) * h).sin().sum() if late else None
            if not late:
                ASKED[name](h, loss)
            if late or name in ("a hook", "retain_grad"):
                with pytest.raises(ArgumentError, match=r"x = x\.clone\(\)"):
                    ASKED[name](h, loss) if late else lay(x, P("dp")) * h
            h = LARGER[made](leaf, lay(ids, P())).clone()
        ASKED[name](h, None)
        loss = (lay(x, P("dp")) * h).sin().sum()
        loss.backward()
        found.append(
            [device_get(one) for one in (leaf.grad, h.grad if name == "retain_grad" else None) if one is not None]
        )
    torch.testing.assert_close(*found)


def test_a_plain_operand_is_never_made_anew() -> None:
    """Torch's own `retain_grad` of it, however late, is not seen here."""
    x, w = torch.randn(B, S, D, dtype=F64), torch.randn(1, 1, D, dtype=F64)
    found = []
    for laid in (x, device_put(x, P("dp"), mesh=MESHES[0])):
        h = w.clone().requires_grad_().expand(B, S, D)
        loss = (laid * h).sin().sum()
        h.retain_grad()
        loss.backward()
        found.append(h.grad)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("connected", [False, True])
def test_derivatives_with_respect_to_what_is_expanded(connected: bool) -> None:
    x, w = torch.randn(B, S, D, dtype=F64), torch.randn(D, dtype=F64)
    lay = device_put(w, P(), mesh=MESHES[0]).requires_grad_(connected)
    laid_x = device_put(x, P("dp"), mesh=MESHES[0])
    found = grad(lambda h: (laid_x * h).sin().sum())(lay.expand(B, S, D))
    torch.testing.assert_close(device_get(found.detach()), (x * w).cos() * x)


@pytest.mark.parametrize("what", ["table", "places", "detached"])
def test_what_it_was_made_of_is_in_other_memory(what: str) -> None:
    """Or in no graph: the value was made before that, and is what it was."""
    x, w, ids = torch.randn(B, S, D, dtype=F64), torch.randn(2, D, dtype=F64), torch.randint(0, 2, (B, S))
    found = []
    for lay in (lambda one, spec: one, lambda one, spec: device_put(one, spec, mesh=MESHES[0])):
        leaf = lay(w.clone(), P()).requires_grad_()
        table, places = leaf * 1.0, lay(ids.clone(), P())
        h = F.embedding(places, table)
        if what == "table":
            table.data = table.detach() * 2
        elif what == "places":
            places.data = 1 - places
        else:
            table.detach_()
        out = lay(x, P("dp")) * h
        out.sum().backward()
        found.append([device_get(one) for one in (out.detach(), leaf.grad)])
    (out, gradient), (mine, of_mine) = found
    torch.testing.assert_close(mine, out)
    torch.testing.assert_close(of_mine, gradient)


#: of a value [B, S, D], and what is used of it
SEEN_BY: dict[str, Callable[[Any], Any]] = {
    "itself": lambda h: h,
    "transposed": lambda h: h.transpose(0, 1),
    "a view": lambda h: h.view(B, S, 2, D // 2),
    "a row": lambda h: h[:, 0],
    "expanded again": lambda h: h.unsqueeze(0).expand(2, B, S, D).transpose(0, 1),
    "doubled": lambda h: h * 2,
    "normed": lambda h: F.gelu(F.layer_norm(h, (D,))),
    "of its own dtype": lambda h: h.to(F64).contiguous(),
    "a copy": lambda h: h.clone(),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("made", [*LARGER, "twice expanded"])
def test_a_gradient_that_is_seen_is_whole_or_refused(made: str, by_hand: bool, late: bool) -> None:
    """That of the value, or of its block, of which a view is used beside a cut batch."""
    torch.manual_seed(0)
    x, w, ids = torch.randn(B, S, D, dtype=F64), torch.randn(2, D, dtype=F64), torch.randint(0, 2, (B, S))
    make = LARGER.get(made, lambda w, ids: w[0].expand(S, D)[None].expand(B, S, D))
    refused = []
    for use, used in SEEN_BY.items():
        for method in ("register_hook", "retain_grad"):
            found: list[Any] = []
            for lay in (lambda one, spec: one, lambda one, spec: device_put(one, spec, mesh=MESHES[0])):
                h, seen = make(lay(w.clone(), P()).requires_grad_(), lay(ids, P())), []
                asked: Any = h.local if by_hand and isinstance(h, Sharded) else h
                ask = lambda: getattr(asked, method)(*[seen.append] * (method == "register_hook"))  # noqa: B023, E731
                try:
                    if not late:
                        ask()
                    loss = (lay(used(x), P(*(None,) * (use == "transposed"), "dp")) * used(h)).sin().sum()
                    if late:
                        ask()
                    loss.backward()
                    found.append(device_get(seen[0] if seen else asked.grad))
                except ArgumentError:
                    refused.append(use)
            torch.testing.assert_close(found[-1], found[0])
    assert refused.count("itself") == 2
    assert "a copy" not in refused
