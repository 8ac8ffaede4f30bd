"""Replays with fewer steps than their records compute the same, to the bit."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from full import FULL
from processes import Processes, free_port
from torch import Tensor, fx
from torch.nn import functional as F

from fspmd import (
    P,
    all_gather,
    all_to_all,
    device_get,
    device_put,
    jit,
    make_mesh,
    pmax,
    ppermute,
    psum,
    psum_scatter,
    shard_map,
)
from fspmd.programs import shortened
from fspmd.programs.program import Value
from fspmd.programs.replay import ProgramPart, compiled, one_view

X = torch.linspace(-1, 1, 4 * 3 * 8).view(4, 3, 8)
W, V, B = torch.linspace(-2, 1, 40).view(8, 5), torch.linspace(-1, 3, 40).view(5, 8), torch.linspace(0, 1, 5)
G = torch.linspace(1, 2, 8)


def _with_a_write(x: Tensor, w: Tensor) -> Tensor:
    """The write comes between the view and the product that a matmul is made of."""
    x = x.clone()
    rows = torch.ops.aten.view(x, [12, 8])
    product = torch.ops.aten.mm(rows, w)
    x.add_(1)
    return torch.ops.aten._unsafe_view(product, [4, 3, 5]) + x.sum()


def _used_twice(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    product = torch.mm(x.view(12, 8), w)
    return torch.ops.aten._unsafe_view(product, [4, 3, 5]), product


_SUMMED = ("sum.default", "add.Tensor")
#: by name: a function, its arguments, and the functions that its replay calls
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], list[str]]] = {
    "matmul": (torch.matmul, (X, W), ["matmul"]),
    "matmul of unusual strides": (torch.matmul, (X[:, :1], W), ["matmul"]),
    "matmul of a transposed value": (lambda x, w: x.transpose(0, 1) @ w, (X, W), ["transpose.int", "matmul"]),
    "matmul of joined heads": (
        lambda x, w: x.transpose(1, 2).flatten(2) @ w,
        (X[:, :, None], W.repeat(3, 1)),
        ["one_view", "matmul"],
    ),
    "views of views": (
        lambda x: (x[:, :2].transpose(0, 2).unsqueeze(1) * 2, x.flatten()[8:].view(2, 44).t() + 1),
        (X,),
        ["one_view", "mul.Tensor", "view.default", "slice.Tensor", "view.default", "t.default", "add.Tensor"],
    ),
    "a view of views that is returned": (lambda x: x.transpose(0, 1).unsqueeze(0), (X,), ["one_view"]),
    "two matmuls": (lambda x, w, v: (x @ w) + F.linear(x, v), (X, W, V), ["matmul", "linear", "add.Tensor"]),
    "linear": (F.linear, (X, V, B), ["linear"]),
    "linear of a matrix": (F.linear, (X[0], V, B), ["t.default", "addmm.default"]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (8,), w, 1e-6), (X, G), ["rms_norm"]),
    "rms_norm of two dims": (lambda x, w: F.rms_norm(x, (3, 8), w), (X, G.expand(3, 8)), ["rms_norm"]),
    "a view of the same shape": (lambda x: x.view(4, 3, 8).expand(4, 3, 8) * 2, (X,), ["mul.Tensor"]),
    "a view with a dim of size 1": (lambda x: x.view(4, 1, 8) * 2, (X[:, :1],), ["view.default", "mul.Tensor"]),
    "a view that is returned": (lambda x: x.view(4, 3, 8), (X,), ["view.default"]),
    "a product that is used twice": (_used_twice, (X, W), ["view.default", "mm.default", "_unsafe_view.default"]),
    "a write between": (
        _with_a_write,
        (X, W),
        ["clone.default", *("view.default", "mm.default"), "add_.Tensor", "_unsafe_view.default", *_SUMMED],
    ),
    "constants": (lambda x: x + torch.arange(8.0)[None].clamp(min=2), (X,), ["add.Tensor"]),
    "a constant that is returned": (lambda x: (x + 1, torch.arange(3)), (X,), ["add.Tensor", "arange.default"]),
    "a view of one that is returned": (
        lambda x: (x + 1, torch.arange(3)[1:]),
        (X,),
        ["add.Tensor", "arange.default", "slice.Tensor"],
    ),
    "a constant that is written into": (
        lambda x: torch.zeros(8).add_(x.sum()) + x,
        (X,),
        ["zeros.default", "sum.default", "add_.Tensor", "add.Tensor"],
    ),
    "a shape that changes in place": (
        lambda x: x.view(4, 3, 8).unsqueeze_(0) + x.sum(0),
        (X,),
        ["view.default", "unsqueeze_.default", "sum.dim_IntList", "add.Tensor"],
    ),
    "a large constant": (lambda x: x.sum() + torch.ones(70_000).sum(), (X,), []),
}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The names of the functions of each replay."""
    found: list[list[str]] = []
    plain = shortened.compiled

    def compiled(part: ProgramPart) -> Callable[..., Any]:
        found.append([getattr(step.target, "__name__", "") for step in part.steps])
        return plain(part)

    monkeypatch.setattr(shortened, "compiled", compiled)
    return found


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_replays_call_what_users_call(name: str, dtype: torch.dtype, steps: list[list[str]]) -> None:
    function, args, names = PROGRAMS[name]
    args = tuple(x.to(dtype) for x in args)
    jitted = jit(function)
    with torch.no_grad():
        expected = function(*args)
        for _ in range(3):
            found = jitted(*args)
            pairs = list(zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected)), strict=True))
            assert all(torch.equal(ours, theirs) and ours.stride() == theirs.stride() for ours, theirs in pairs)
            for ours, _ in pairs:
                ours.add_(7)  # results are the caller's; one may be a view of the argument
            expected = function(*args)
    assert not names or steps == [names]


def _viewed(x: Tensor, rng: random.Random) -> Tensor:
    """A view of ``x``, which may begin later in its memory."""
    n = x.dim()
    kinds = ["unsqueeze", "t", "view", "expand", "alias"] + ["transpose", "squeeze", "slice", "select", "last"] * (
        n > 0
    )
    match rng.choice(kinds):
        case "unsqueeze":
            return x.unsqueeze(rng.randint(0, n))
        case "t":
            return x.permute(rng.sample(range(n), n))
        case "view":
            return x.view(rng.choice([(-1,), (1, -1), (*x.shape, 1), (*x.shape[:-1], 1, x.shape[-1] if n else 1)]))
        case "expand":
            return x.expand(2, *x.shape)
        case "transpose":
            return x.transpose(rng.randrange(n), rng.randrange(n))
        case "squeeze":
            return x.squeeze(rng.randrange(n))
        case "slice":
            return x.narrow(rng.randrange(n), rng.randint(0, 1), 1)
        case "select":
            return x.select(rng.randrange(n), 0)
        case "last":
            return x[..., -1]
    return torch.ops.aten.alias(x)


@pytest.mark.parametrize("seed", range(200 if FULL else 40))
def test_views_of_views_are_what_torch_gives(seed: int) -> None:
    """In values, shapes and strides, of arguments that begin anywhere in memory, and of results of kernels."""

    def views(x: Tensor) -> tuple[Tensor, ...]:
        rng, found = random.Random(seed), [x, x.exp(), x.exp().transpose(0, -1)]
        for _ in range(30):
            try:
                found.append(_viewed(rng.choice(found), rng))
            except (RuntimeError, IndexError):
                continue  # torch has no such view
            if found[-1].numel() > 1000:
                found.pop()
        return tuple(found[1:])

    memory = torch.arange(500.0)
    recorded = jit(views)
    with torch.no_grad():
        for start in (0, 7):
            x = memory.as_strided((3, 1, 4, 2), (8, 5, 2, 1), start)
            for ours, theirs in zip(recorded(x), views(x), strict=True):
                assert torch.equal(ours, theirs)
                assert ours.stride() == theirs.stride()


def test_views_of_negated_views() -> None:
    x = torch.randn(4, 6)
    assert torch.equal(jit(lambda x: torch._neg_view(x).t())(x), -x.t())


def test_a_record_may_be_wrong_about_strides() -> None:
    """A kernel may lay its result out otherwise than the record says: views of it are then taken one by one."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta.update(value=Value((3, 1, 4), torch.float32), frame=None)
    views = [graph.call_function(torch.ops.aten.unsqueeze.default, (x, 0))]
    views.append(graph.call_function(torch.ops.aten.transpose.int, (views[0], 1, 3)))
    made = graph.call_function(one_view(views), (x,))  # type: ignore[arg-type]
    replay = compiled(ProgramPart([made], [x], [made], {}))
    new = torch.arange(12.0).view(3, 1, 4)
    for given in (new, new.transpose(0, 2).contiguous().transpose(0, 2), new.as_strided((3, 1, 4), (4, 9, 1))):
        expected = given.unsqueeze(0).transpose(1, 3)
        (found,) = replay(given)
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


def _normed(x: Tensor, w: Tensor, dims: Any = -1, keep: bool = True, eps: Any = 1e-3) -> Tensor:
    """As `rms_norm` computes, but in the dtype of ``x``, and with the promotion of ``*``."""
    return x * torch.rsqrt(x.pow(2).mean(dims, keepdim=keep).add_(eps)) * w


def _scaled(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(torch.ops.aten.add.Scalar(x.pow(2).mean(-1, keepdim=True), 1e-3, 2)) * w


def _product(x: Tensor, v: Tensor, b: Tensor) -> Tensor:
    """As `linear` computes."""
    return torch.addmm(b, x.view(12, 8), v.t()).view(4, 3, 5)


def _reshaped_product(x: Tensor, v: Tensor, b: Tensor) -> Tensor:
    x = x.clone()
    rows = x.view(12, 8)
    x.transpose_(0, 1)
    return torch.addmm(b, rows, v.t()).view(4, 3, 5)


def _reshaped_matmul(x: Tensor, w: Tensor) -> Tensor:
    v = w.clone()
    w = v.t()
    v.t_()
    return x @ w


HALF = (torch.bfloat16, torch.float16)
WAVES = torch.linspace(0, 99, 96).sin().view(4, 3, 8)
#: by name: a function that computes almost as a function of torch does, and its arguments
ALMOST: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    **{f"rms_norm of {d}": (_normed, (WAVES.to(d), G.to(d))) for d in HALF},
    "rms_norm with a weight of float64": (_normed, (X, G.double())),
    "rms_norm with a weight of complex numbers": (_normed, (X, G.cfloat())),
    "rms_norm of all dims": (partial(_normed, dims=None), (X[0], G)),
    "rms_norm of no dims": (partial(_normed, dims=()), (X, torch.tensor(2.0))),
    "rms_norm of a number": (_normed, (torch.tensor(3.0), torch.tensor(2.0))),
    "rms_norm with a larger weight": (_normed, (torch.tensor(3.0), G)),
    "rms_norm along another dim": (partial(_normed, keep=False), (torch.linspace(0, 9, 64).view(8, 8), G)),
    "rms_norm with a scaled epsilon": (_scaled, (X, G)),
    **{f"linear of gaps, {d}": (_product, (WAVES.to(d).repeat(1, 1, 2)[..., :8], V.to(d), B.to(d))) for d in HALF},
    **{f"linear with one bias, {d}": (_product, (WAVES.to(d), V.to(d), B[3].to(d))) for d in HALF},
    "linear with a bias for each row": (_product, (X, V, torch.linspace(0, 1, 60).view(12, 5))),
    "linear of a value that is reshaped": (_reshaped_product, (X, V, B)),
    "matmul of a value that is reshaped": (_reshaped_matmul, (X, torch.linspace(0, 1, 64).view(8, 8))),
}


@pytest.mark.parametrize("name", ALMOST)
def test_steps_that_no_function_of_torch_runs_stay(name: str) -> None:
    function, args = ALMOST[name]
    jitted = jit(function)
    with torch.no_grad():
        expected = function(*args)
        for _ in range(2):
            found = jitted(*args)
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)


def test_rms_norm_of_narrow_floats_is_left_in_steps(steps: list[list[str]]) -> None:
    """Torch would warn of a weight that is narrower than the sums."""
    with torch.no_grad():
        jit(lambda x, w: F.rms_norm(x, (8,), w))(X.bfloat16(), G.bfloat16())
    assert "rms_norm" not in steps[0]


def test_constants_are_made_without_the_autocast_of_the_caller() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            c = torch.arange(64.0).view(8, 8) * 0.1
            return x + c @ c

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(jit(function)(X[0, :1]), function(X[0, :1]))


def test_where_autograd_follows_values_steps_stay(steps: list[list[str]]) -> None:
    """There `matmul` looks at `requires_grad`, which values of a replay lack."""
    w = W.clone().requires_grad_()
    y, z = torch.matmul(X, w), jit(torch.matmul)(X, w)
    assert torch.equal(y, z)
    assert torch.equal(*(torch.autograd.grad(one.sum(), w)[0] for one in (y, z)))
    assert "mm.default" in steps[0]


# ------------------------------------------------------------------------------------------------- functions by chance

_ROWS: list[Callable[..., Any]] = [
    lambda x, w: torch.addmm(w[0], x.reshape(-1, x.shape[-1]), w.t()).view(*x.shape[:-1], -1),
    lambda x, w: torch.ops.aten._unsafe_view(torch.mm(x.flatten(0, -2), w), [*x.shape[:-1], w.shape[-1]]),
    lambda x, w: torch.bmm(x.flatten(0, -3), w.expand(x.shape[:-2].numel(), *w.shape)).view(*x.shape[:-1], -1),
]
_OF_TWO: list[Callable[..., Any]] = [
    *(torch.matmul, F.linear, torch.mul, torch.add, *_ROWS),
    lambda x, w: F.linear(x, w, w[0]),
    lambda x, w: F.linear(x, w, w.sum()),
    lambda x, w: F.rms_norm(x, w.shape, w, 1e-3),
    lambda x, w: F.rms_norm(x, w[0].shape, w[0], 1e-3),
    lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).add_(1e-3)) * w[0],
    lambda x, w: x * torch.rsqrt(x.pow(2).mean((-1, -2), keepdim=True).add(1e-3)) * w,
    lambda x, w: x.view(x.shape) + w,
    lambda x, w: x.expand(x.shape).transpose(-1, -2) @ w,
]
_DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64]


def _by_chance(draw: random.Random) -> tuple[Callable[..., Any], list[Tensor]]:
    """A function of some calls, and two operands of few, many or no dims, some empty, with gaps, or turned."""
    calls = [draw.choice(_OF_TWO) for _ in range(draw.randint(1, 3))]
    size = draw.choice([0, 1, 3, 8])
    dtypes, operands = [draw.choice(_DTYPES)] * 2, []
    for dims, dtype in zip((draw.choice([0, 1, 2, 3, 3, 4, 5]), draw.choice([0, 1, 2, 2, 2, 3])), dtypes, strict=True):
        shape = [draw.choice([size, size, 1, 2, 0]) for _ in range(dims)]
        shape[-2:] = [n if draw.random() < 0.1 else size for n in shape[-2:]]
        x = torch.linspace(-3, 3, 4 * torch.Size(shape).numel()).sin().mul(5).to(dtype).view(4, *shape)
        change = draw.choice(["none", "gaps", "turned"])
        if change == "gaps":
            x = x.repeat_interleave(2, -1)[..., ::2] if dims else x
        elif change == "turned" and dims > 1:
            x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
        operands.append(x[draw.randrange(4)])

    def function(x: Tensor, w: Tensor) -> Tensor:
        for call in calls:
            x = call(x, w)
        return x

    return function, operands


def _outcome(function: Callable[..., Any], operands: list[Tensor]) -> Any:
    """The bits of a result, its dtype, and its strides if it has elements; None for an error."""
    try:
        y = function(*operands)
    except (RuntimeError, TypeError, IndexError, ValueError):
        return None
    bits = y.contiguous().view(getattr(torch, f"int{8 * y.dtype.itemsize}"))
    return y.dtype, y.shape, y.stride() if y.numel() else None, bits.tolist()


@pytest.mark.parametrize("seed", range(80 if FULL else 8))
def test_what_functions_by_chance_give_is_that_of_eager_torch(seed: int) -> None:
    """To the bit, with and without autocast; nan has one bit pattern here, since kernels are the same."""
    draw = random.Random(seed)
    tried = 0
    while tried < 25:
        function, operands = _by_chance(draw)
        cast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=draw.random() < 0.2)
        with torch.no_grad(), cast:
            expected = _outcome(function, operands)
            if expected is None:
                continue
            tried += 1
            jitted = jit(function)
            for _ in range(2):
                assert _outcome(jitted, operands) == expected, (seed, tried)


# ------------------------------------------------------------------------------------- sums of values that nobody reads


def _sums(port: int) -> list[list[Any]]:
    """Results of sums, and whether each writes into its operand."""
    os.environ["MASTER_PORT"] = str(port)
    mesh = make_mesh((2,), ("x",), device="cpu")
    x = device_put(torch.arange(12.0).view(6, 2), P("x"), mesh=mesh)
    found = []
    for body in SUMS.values():
        copies: list[bool] = []
        plain = shortened.compiled

        def compiled(part: ProgramPart, copies: list[bool] = copies, plain: Any = plain) -> Callable[..., Any]:
            sums = [step.target for step in part.steps if "call" in step.meta]
            copies += [getattr(run, "__qualname__", "") != "Call.writer.<locals>.run" for run in sums]
            return plain(part)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shortened, "compiled", compiled)
            step = jit(shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P(None), check_vma=False))
            values = [[device_get(y).tolist() for y in step(x)] for _ in range(2)]
        assert values[0] == values[1]
        found.append([values[0], copies])
    return found


def _with(other: Callable[[Tensor], Tensor], b: Tensor) -> tuple[Tensor, ...]:
    """The sum of a value, and what another function makes of the value."""
    y = b * 2
    return psum(y, "x"), other(y)


def _drawn_later(b: Tensor) -> tuple[Tensor, ...]:
    """The sum of a value into which a draw, which a record keeps for its effect, writes afterwards."""
    y = b * 2
    total = psum(y, "x")
    y[:1].uniform_()
    return (total,)


SUMS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "of a new value": lambda b: (psum(b * 2, "x"),),
    "of a view of a new value": lambda b: (psum((b * 2).view(2, 3), "x"),),
    "of a value that is read later": partial(_with, lambda y: y + 1),
    "of a value that is returned": partial(_with, lambda y: y),
    "of a value with a view": partial(_with, lambda y: y[0]),
    "of an argument": lambda b: (psum(b, "x"),),
    "of integers": lambda b: (psum((b * 2).long(), "x"),),
    "of a transposed value": lambda b: (psum((b * 2).t(), "x"),),
    "of a sum": lambda b: (psum(psum(b * 2, "x") + 1, "x"),),
    "of a value into which a draw writes later": _drawn_later,
}
COPIES = [[False], [False], [True], [True], [True], [True], [True], [True], [False, False], [True]]


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    with Processes(2) as pool:
        yield pool


def test_a_sum_writes_into_what_nobody_else_reads(two: Processes) -> None:
    blocks = torch.arange(12.0).view(6, 2).split(3)
    for rank, found in enumerate(two.run(_sums, free_port())):
        for (name, _), (values, copies), expected in zip(SUMS.items(), found, COPIES, strict=True):
            assert copies == expected, name
            total = 2 * (blocks[0] + blocks[1])
            total = {"of a view of a new value": total.view(2, 3), "of an argument": total / 2}.get(name, total)
            total = {"of a transposed value": total.t(), "of a sum": 2 * (total + 1)}.get(name, total)
            assert values[0] == total.tolist(), (rank, name)


ALONE: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "a sum": (lambda b: psum(b * 2, "y") + 1, ["mul.Tensor", "add.Tensor"]),
    "a sum of integers": (lambda b: psum((b * 2).long(), "y") + 1, ["mul.Tensor", "_to_copy.default", "add.Tensor"]),
    "a maximum": (lambda b: pmax(b * 2, "y") + 1, ["mul.Tensor", "add.Tensor"]),
    "a gather": (lambda b: all_gather(b * 2, "y", tiled=True) + 1, ["mul.Tensor", "add.Tensor"]),
    "an exchange": (lambda b: all_to_all(b * 2, "y", 0, 0, tiled=True) + 1, ["mul.Tensor", "add.Tensor"]),
    "a scatter": (lambda b: psum_scatter(b * 2, "y", tiled=True) + 1, ["mul.Tensor", "add.Tensor"]),
    "a permutation": (lambda b: ppermute(b * 2, "y", [(0, 0)]) + 1, ["mul.Tensor", "run", "add.Tensor"]),
    "a gather of an argument": (lambda b: all_gather(b, "y", tiled=True), ["run"]),
    "a gather of a value that is read later": (
        lambda b: torch.cat([all_gather(y := b * 2, "y", tiled=True).add_(1), y])[: len(b)],
        ["mul.Tensor", "run", "add_.Tensor", "cat.default", "slice.Tensor"],
    ),
    "a sum of an argument": (lambda b: psum(b, "y"), ["run"]),
}


def _alone(port: int) -> dict[str, tuple[list[str], list[float], list[float]]]:
    """The steps of collectives over one rank, their result, and the argument after a write into the result."""
    os.environ["MASTER_PORT"] = str(port)
    mesh = make_mesh((2, 1), ("x", "y"), device="cpu")
    x, names = device_put(torch.arange(4.0), P("x"), mesh=mesh), []
    plain, out = shortened.compiled, {}

    def compiled(part: ProgramPart) -> Callable[..., Any]:
        names.append([getattr(step.target, "__name__", "") for step in part.steps])
        return plain(part)

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(shortened, "compiled", compiled)
        for name, (body, _) in ALONE.items():
            step = jit(shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
            for _ in range(2):
                result = step(x)
                found = device_get(result).tolist()
                result.local.add_(5)
            out[name] = names[-1], found, device_get(x).tolist()
    return out


def test_a_copy_over_one_rank_is_no_step_if_nobody_else_reads_the_operand(two: Processes) -> None:
    for out in two.run(_alone, free_port()):
        for name, (names, found, given) in out.items():
            assert names == ALONE[name][1], name
            assert found == ([0, 1, 2, 3] if "of an argument" in name else [1, 3, 5, 7]), name
            assert given == [0, 1, 2, 3], name
