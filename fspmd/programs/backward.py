"""Records whose results are followed by autograd: a forward part, and a backward part that runs when asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from fspmd.programs.record import Recorder
from fspmd.programs.replay import compiled, has_randomness
from fspmd.transport.local_tensor import LocalTensor, expand
from fspmd.transport.randomness import go_on, kept_states


@dataclass(frozen=True, slots=True)
class Halves:
    """Both parts. Forward gives the results, then what backward needs; backward takes that, and the cotangents."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    again: Callable[..., list[Tensor]]  # the recorded function itself, of the tensors among its leaves
    closed: tuple[Tensor, ...]  # tensors closed over that have a gradient
    draws: bool
    results: int
    constants: frozenset[int]  # results without a gradient
    with_gradient: tuple[int, ...]  # the inputs that have one
    zeros: tuple[Tensor, ...]  # cotangents that were not given


def differentiable(
    recorder: Recorder,
    again: Callable[..., Any],
    leaves: Sequence[Tensor],
    inputs: list[fx.Node],
    results: list[Tensor],
    outputs: list[fx.Node],
) -> Callable[..., Any]:
    """Record the backward pass of a recorded forward pass: a function of the leaves whose results have gradients."""
    forward = recorder.steps()
    closed = {node: x for node, x in recorder.captured.items() if x.requires_grad}
    inputs = [*inputs, *closed]
    values = [*leaves, *closed.values()]
    wanted = [i for i, x in enumerate(values) if x.requires_grad]
    followed = [i for i, x in enumerate(results) if x.requires_grad]
    with recorder.pause(), torch.no_grad():
        cotangents = [torch.zeros_like(results[i]) for i in followed]
    given = [recorder.argument(x) for x in cotangents]
    recorder.dry = True  # all processes record alike, or some replay: none may wait for the others
    found = torch.autograd.grad(
        [results[i] for i in followed],
        [values[i] for i in wanted],
        cotangents,
        retain_graph=True,
        allow_unused=True,
    )
    recorder.dry = False
    gradients = [None if g is None else recorder.node_of(g) for g in found]
    backward = recorder.steps()[len(forward) :]
    known = {*inputs, *forward}
    constants = {node: x for node, x in recorder.captured.items() if node not in closed}
    used = dict.fromkeys(node for step in backward for node in step.all_input_nodes if node in known)
    used.update(dict.fromkeys(g for g in gradients if g in known))
    extra = tuple(closed.values())
    halves = Halves(
        compiled(forward, inputs, [*outputs, *used], constants),
        compiled(backward, [*used, *given], gradients, constants),
        again,
        extra,
        any(has_randomness(node) for node in forward),
        len(outputs),
        frozenset(range(len(outputs))).difference(followed),
        tuple(wanted),
        tuple(map(_zeros_like, cotangents)),
    )
    return lambda *args: _Replay.apply(halves, *args, *extra)


def _zeros_like(x: Tensor) -> Tensor:
    """Zeros that take no memory."""
    if type(x) is LocalTensor:
        return LocalTensor([_zeros_like(shard) for shard in x.shards], x.frame)
    return x.new_zeros(()).expand(x.shape)


def _like(x: Tensor, g: Tensor) -> Tensor:
    """A cotangent, held by each simulated rank where that of the record was, and without gaps in memory."""
    if type(x) is LocalTensor and (type(g) is not LocalTensor or set(g.frame.axes) < set(x.frame.axes)):
        g = expand(g, x.frame)
    return g.contiguous()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, halves: Halves, *inputs: Tensor) -> Any:
        ctx.drawn = kept_states() if halves.draws else None
        every = halves.forward(*inputs)
        outs, saved = every[: halves.results], every[halves.results :]
        ctx.halves = halves
        ctx.kinds = [isinstance(x, Tensor) for x in saved]
        ctx.others = [x for x in saved if not isinstance(x, Tensor)]
        ctx.count = len(inputs) - len(halves.closed)
        ctx.save_for_backward(*inputs[: ctx.count], *(x for x in saved if isinstance(x, Tensor)))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(outs[i] for i in halves.constants))
        return outs

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        halves: Halves = ctx.halves
        inputs, kept = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        followed = (g for i, g in enumerate(cotangents) if i not in halves.constants)
        given = [_like(z, z if g is None else g) for g, z in zip(followed, halves.zeros, strict=True)]
        if torch.is_grad_enabled():
            found = _by_autograd(halves, inputs, given, ctx.drawn)
        else:
            tensors, others = iter(kept), iter(ctx.others)
            found = halves.backward(*(next(tensors if kind else others) for kind in ctx.kinds), *given)
        gradients: list[Any] = [None] * len(ctx.needs_input_grad)
        for i, g in zip(halves.with_gradient, found, strict=True):
            gradients[i + 1] = g
        return tuple(gradients)


def _by_autograd(halves: Halves, inputs: Sequence[Tensor], cotangents: list[Tensor], drawn: Any) -> Sequence[Any]:
    """Gradients that have gradients themselves: the function runs again, with the random numbers that it drew."""
    now = kept_states()
    if drawn is not None:
        go_on(drawn)
    outs = halves.again(inputs)
    go_on(now)
    followed = [x for i, x in enumerate(outs) if i not in halves.constants]
    every = (*inputs, *halves.closed)
    wanted = [every[i] for i in halves.with_gradient]
    return torch.autograd.grad(followed, wanted, cotangents, create_graph=True, allow_unused=True)
