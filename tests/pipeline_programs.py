"""Pipelines beside the dense model in float64: what `test_pipelines` runs."""

from collections.abc import Callable
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor

from fspmd import P, checkpoint, communication_log, device_get, device_put, jit, make_mesh, reshard, shard_map
from fspmd.nn import Precision, Schedule, dual_pipe_v, gpipe, interleaved, one_f_one_b, pipeline, zbv, zero_bubble

F64 = torch.float64
SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
    "zbv": zbv,
    "dual_pipe_v": dual_pipe_v,
}
WIDTH, ROWS, WORDS = 4, 6, 5
PART = 0.1


def block(params: Any, x: Any) -> Any:
    return x + torch.tanh(x @ params["w"] + params["b"])


def first(params: Any, tokens: Any) -> Any:
    return block(params, F.embedding(tokens, params["table"]))


def last(params: Any, x: Any) -> Any:
    return block(params, x) @ params["table"].T


def only(params: Any, tokens: Any) -> Any:
    return block(params, F.embedding(tokens, params["table"])) @ params["table"].T


def loss(y: Any, target: Any) -> Any:
    return F.cross_entropy(y, target, reduction="sum", ignore_index=-1)


def count(target: Any) -> Any:
    return (target != -1).sum()


def model(stages: int, repeated: bool = False) -> list[Any]:
    """The first stage embeds and the last has the same table. ``repeated`` stages are computed again in backward."""
    found = [only] if stages == 1 else [first, *[block] * (stages - 2), last]
    return [lambda p, x, f=f: checkpoint(f)(p, x) for f in found] if repeated else found


def beside(stages: list[Any]) -> list[Any]:
    """The stages with a part of the loss, and the number of positive results."""

    def with_both(f: Any) -> Any:
        def run(params: Any, x: Any) -> Any:
            y = f(params, x)
            return y, y.square().sum() * PART, {"positive": (y > 0).sum()}

        return run

    return list(map(with_both, stages))


def arguments(stages: int, microbatches: int) -> tuple[dict[str, Tensor], list[Tensor], list[Tensor]]:
    g = torch.Generator().manual_seed(stages * 10 + microbatches)
    params = {
        "w": torch.randn(stages, WIDTH, WIDTH, dtype=F64, generator=g),
        "b": torch.randn(stages, WIDTH, dtype=F64, generator=g),
        "table": torch.randn(WORDS, WIDTH, dtype=F64, generator=g),
    }
    inputs, targets = torch.randint(WORDS, (2, microbatches, ROWS), generator=g)
    for m in range(microbatches):
        targets[m, : m % 4] = -1  # microbatches have different numbers of items
    return params, list(inputs), list(targets)


def dense(params: dict[str, Tensor], inputs: list[Tensor], targets: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The definition: one batch on one device."""
    value, grads, _ = dense_beside(params, inputs, targets, 0.0)
    return value, grads


def dense_beside(
    params: dict[str, Tensor], inputs: list[Tensor], targets: list[Tensor], part: float
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The same, with what the stages `beside` add to the loss, and count: [stages]."""
    leaves = {name: x.clone().requires_grad_() for name, x in params.items()}
    x = leaves["table"][torch.stack(inputs)]
    passed_on = []
    for w, b in zip(leaves["w"], leaves["b"], strict=True):
        passed_on.append(x := x + torch.tanh(x @ w + b))
    passed_on[-1] = x @ leaves["table"].T
    target = torch.stack(targets)
    logs = passed_on[-1].log_softmax(-1)
    picked = logs.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    more = sum(y.square().sum() for y in passed_on) * part
    value = (more - (picked * (target >= 0)).sum()) / (target >= 0).sum()
    grads = dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))
    return value.detach(), grads, torch.stack([(y > 0).sum() for y in passed_on])


def compute(
    name: str,
    shape: dict[str, int],
    microbatches: int,
    repeated: bool = False,
    scale: float = 1,
    recorded: Any = None,
    device: str | None = None,
) -> tuple[Tensor, Any, Any, Schedule]:
    """Loss, gradients in the order of stages, the log of communication, and the schedule.

    ``recorded``: the passes of a record, which runs instead of the function.
    """
    mesh = make_mesh(tuple(shape.values()), tuple(shape), device=device)
    schedule = SCHEDULES[name](shape["pp"], microbatches)
    params, inputs, targets = optree.tree_map(lambda x: x.to(device), arguments(schedule.stages, microbatches))
    order = list(schedule.order)
    laid = {"w": P("pp", None, "tp" if "tp" in shape else None), "b": P("pp", "tp" if "tp" in shape else None)}
    stored = {n: device_put(x[order] if n in laid else x, laid.get(n, P()), mesh=mesh) for n, x in params.items()}
    rows = P("dp") if "dp" in shape else P()
    x, t = device_put((inputs, targets), rows, mesh=mesh)
    step = pipeline(
        model(schedule.stages, repeated), schedule, loss=lambda y, t: loss(y, t) * scale, count=count, mesh=mesh
    )
    step = step if recorded is None else jit(step, passes=recorded)
    with communication_log() as log:
        value, grads = step(stored, x, t)
    if grads is None:
        return value, grads, log, schedule
    back = torch.tensor(order).argsort()
    found = {n: device_get(g).cpu() for n, g in grads.items()}
    return value.cpu(), {n: g[back] if n in laid else g for n, g in found.items()}, log, schedule


def compute_beside(
    name: str, shape: dict[str, int], microbatches: int, scale: float | None = None, recorded: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """The loss, the counts and the gradients of stages with a part of the loss, and the dense ones."""
    mesh = make_mesh(tuple(shape.values()), tuple(shape))
    schedule = SCHEDULES[name](shape["pp"], microbatches)
    params, inputs, targets = arguments(schedule.stages, microbatches)
    order = list(schedule.order)
    laid = {"w": P("pp", None, "tp" if "tp" in shape else None), "b": P("pp", "tp" if "tp" in shape else None)}
    stored = {n: device_put(x[order] if n in laid else x, laid.get(n, P()), mesh=mesh) for n, x in params.items()}
    x, t = device_put((inputs, targets), P("dp") if "dp" in shape else P(), mesh=mesh)
    step = pipeline(beside(model(schedule.stages, True)), schedule, loss=loss, count=count, mesh=mesh, has_aux=True)
    (value, aux), grads = (jit(step) if recorded else step)(stored, x, t, scale)
    right_value, right, counts = dense_beside(params, inputs, targets, PART)
    found = {n: device_get(g)[torch.tensor(order).argsort()] if n in laid else device_get(g) for n, g in grads.items()}
    return [
        (value, right_value),
        (device_get(aux["positive"]), counts[order]),
        *((found[n], right[n] * (scale or 1.0)) for n in right),
    ]


def worst_beside(cases: list[tuple[Any, ...]]) -> list[float]:
    """The largest distance from the dense model, for each case."""
    return [max(float((x - y).abs().max()) for x, y in compute_beside(*case)) for case in cases]


def worst(cases: list[tuple[Any, ...]]) -> list[float]:
    """The largest distance from the dense model, for each case."""
    return [error for error, _ in errors_and_permutes(cases)]


def errors_and_permutes(cases: list[tuple[Any, ...]]) -> list[tuple[float, int]]:
    """The largest distance from the dense model, and the number of permutes, for each case."""
    found = []
    for case in cases:
        value, grads, log, schedule = compute(*case)
        right_value, right = dense(*arguments(schedule.stages, schedule.microbatches))
        error = max(float((value - right_value).abs()), *(float((grads[n] - right[n]).abs().max()) for n in right))
        found.append((error, sum(call.kind == "ppermute" for call in log)))
    return found


def separate(shape: dict[str, int], name: str, microbatches: int, recorded: Any = None) -> float:
    """The largest distance from the dense model where each stage has a tree of its own, on the part of its rank."""
    mesh = make_mesh(tuple(shape.values()), tuple(shape))
    schedule = SCHEDULES[name](shape["pp"], microbatches)
    params, inputs, targets = arguments(schedule.stages, microbatches)
    parts = mesh.split("pp", [1] * shape["pp"])
    wide = "tp" if "tp" in shape else None
    trees: list[Any] = []
    for s, r in enumerate(schedule.ranks_of_stages):
        tree = {f"w{s}": (params["w"][s], P(None, wide)), f"b{s}": (params["b"][s], P(wide))}
        trees.append({n: reshard(device_put(x, P(), mesh=mesh), spec, mesh=parts[r]) for n, (x, spec) in tree.items()})
    table = device_put(params["table"], P(), mesh=mesh)

    def own(s: int) -> Any:
        def stage(p: Any, x: Any) -> Any:
            return model(schedule.stages)[s]({"w": p[0][s][f"w{s}"], "b": p[0][s][f"b{s}"], "table": p[1]}, x)

        return stage

    x, t = device_put((inputs, targets), P(), mesh=mesh)
    step = pipeline([own(s) for s in range(schedule.stages)], schedule, loss=loss, count=count, mesh=mesh)
    step = step if recorded is None else jit(step, passes=recorded)
    value, (found, grad_table) = step((trees, table), x, t)
    right_value, right = dense(params, inputs, targets)
    far = [value - right_value, device_get(grad_table) - right["table"]]
    for s, r in enumerate(schedule.ranks_of_stages):
        assert all(found[s][n].spec is trees[s][n].spec for n in trees[s])
        if parts[r].coordinate() is not None:  # this process holds the stage
            far += [device_get(found[s][f"{n}{s}"]) - right[n][s] for n in "wb"]
    return max(float(x.abs().max()) for x in far)


def separate_and_waiting(transport: str, precision: Precision | None, jitted: bool) -> float:
    """The distance from the dense model of two stages, each with a matrix of its own that "dp" cuts, and ``over``."""
    mesh = make_mesh((2, 2), ("pp", "dp"), transport=transport, device="cpu")
    parts = mesh.split("pp", [1, 1])
    torch.manual_seed(0)
    w, x, t = (torch.randn(n, 4, 4, dtype=F64) for n in (2, 3, 3))
    whole = [device_put(each, P(), mesh=mesh) for each in w]
    own = [reshard(each, P("dp"), mesh=part) for each, part in zip(whole, parts, strict=True)]
    stages = [lambda p, x, s=s: torch.tanh(x.to(p[s].dtype) @ p[s]).to(x.dtype) for s in range(2)]
    step: Any = pipeline(
        stages,
        one_f_one_b(2, 3),
        loss=lambda y, t: (y - t).square().sum(),
        mesh=mesh,
        over="dp",
        precision=precision,
    )
    value, grads = (jit(step) if jitted else step)(own, *device_put((list(x), list(t)), P("dp"), mesh=mesh))
    leaf = w.clone().requires_grad_()
    right = (torch.tanh(torch.tanh(x @ leaf[0]) @ leaf[1]) - t).square().sum() / 3
    (wanted,) = torch.autograd.grad(right, leaf)
    far = [value - right.detach()]
    for g, p, want in zip(grads, own, wanted, strict=True):
        assert g.spec is p.spec
        if p.spec.mesh.coordinate() is not None:  # this process holds the stage
            far.append(device_get(g) - want)
    return max(float(x.abs().max()) for x in far)


def waiting(
    name: str, layout: str, options: dict[str, Any], transport: str = "process_group", jitted: bool = False
) -> Any:
    """A pipeline of 2 x 2 ranks with ``options``: the largest distance from dense float64, and what moves over "dp"."""
    mesh = make_mesh((2, 2), ("pp", "dp"), transport=transport, device="cpu")
    schedule = SCHEDULES[name](2, 3)
    torch.manual_seed(0)
    w, b = torch.randn(schedule.stages, 4, 4, dtype=F64), torch.randn(4, dtype=F64)
    x, t = ([torch.randn(n, 4, dtype=F64) for n in (4, 2, 6)] for _ in range(2))
    order = list(schedule.order)
    specs = {"cut": (P("pp", None, "dp"), P("dp")), "whole": (P("pp"), P())}[layout]
    params = device_put((w[order], b), specs, mesh=mesh)

    def stage(params: Any, x: Any) -> Any:
        return torch.tanh(x.to(params[0].dtype) @ params[0] + params[1]).to(x.dtype)

    step = pipeline(
        stage,
        schedule,
        loss=lambda y, t: (y - t).square().sum(),
        count=lambda t: t.isfinite()[:, 0].sum(),
        mesh=mesh,
        **options,
    )
    step = jit(step) if jitted else step
    inputs = device_put((x, t), P("dp"), mesh=mesh)
    with communication_log() as log:
        value, grads = step(params, *inputs)
    assert [g.spec for g in grads] == [p.spec for p in params]
    leaves = w.clone().requires_grad_(), b.clone().requires_grad_()
    y = torch.cat(x)
    for each in leaves[0]:
        y = torch.tanh(y @ each + leaves[1])
    right = (y - torch.cat(t)).square().sum() / 12
    wanted = torch.autograd.grad(right, leaves)
    found = device_get(grads[0])[torch.tensor(order).argsort()], device_get(grads[1])
    error = max(float((a - b).abs().max()) for a, b in ((value, right.detach()), *zip(found, wanted, strict=True)))
    return error, sorted((call.kind, str(call.dtype)) for call in log if call.axes == ("dp",) and call.shape)


def of_any_shape(
    name: str, dtype: torch.dtype, transport: str = "process_group", jitted: bool = False, local: bool = False
) -> float:
    """The largest distance from the dense model in float64, of microbatches of 1 to 5 tokens and a float32 loss.

    Blocks are even, uneven or empty. ``local``: stages are bodies.
    """
    mesh = make_mesh((2, 2), ("pp", "dp"), transport=transport, device="cpu")
    schedule = SCHEDULES[name](2, 4)
    torch.manual_seed(0)
    w = torch.randn(schedule.stages, 3, 3).to(dtype)
    x, t = ([torch.randn(n, 3).to(dtype) for n in (2, 1, 5, 4)] for _ in range(2))

    def squares(y: Any, t: Any) -> Any:
        return (y.float() - t.float()).square().sum() if dtype is torch.bfloat16 else (y - t).square().sum()

    def block(w: Any, x: Any) -> Any:
        return x + torch.tanh(x @ w)

    body = shard_map(block, in_specs=(P(), P("dp")), out_specs=P("dp"))
    step = pipeline(body if local else block, schedule, loss=squares, count=lambda t: t.shape[0], mesh=mesh, axis="pp")
    step = jit(step) if jitted else step
    given = device_put((x, t), P("dp"), mesh=mesh)
    value, gradient = step(device_put(w[list(schedule.order)], P("pp"), mesh=mesh), *given)
    leaf = w.double().requires_grad_()
    y = torch.cat(x).double()
    for each in leaf:
        y = y + torch.tanh(y @ each)
    right = (y - torch.cat(t).double()).square().sum() / 12
    (wanted,) = torch.autograd.grad(right, leaf)
    found = device_get(gradient)[torch.tensor(schedule.order).argsort()]
    assert value.dtype is (torch.float32 if dtype is torch.bfloat16 else dtype)
    return max(float((value - right).abs().detach()), float((found - wanted).abs().max()))
