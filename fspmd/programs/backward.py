"""Programs whose results autograd follows: a forward part, and a backward part that computes gradients on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, fx

from fspmd.errors import RecordError
from fspmd.inspection.watch import Communication, hears_of_records, tell
from fspmd.pairs import apply, call, is_watched
from fspmd.programs.communication import Reports
from fspmd.programs.program import Program, owner
from fspmd.programs.recorder import ProgramRecorder
from fspmd.programs.replay import Maker, ProgramPart, has_randomness
from fspmd.remembered import ask_gradient, forgetting
from fspmd.torch_internals import EnableTorchFunction, transforms_active
from fspmd.transport.frame import Frame
from fspmd.transport.local_tensor import expand, held_frame, per_block
from fspmd.transport.randomness import go_on, kept_states


@dataclass(frozen=True, slots=True)
class AutogradFacts:
    """The facts about a program that autograd needs. Places are of tensors among inputs and results."""

    closed_over: tuple[Tensor, ...]  # tensors closed over that have a gradient
    results: int  # the number of results
    chosen: tuple[int, ...]  # places of results whose gradient backward can compute
    constants: frozenset[int]  # places of results without a gradient; torch has no gradient for the remaining ones
    with_gradient: tuple[int, ...]  # places of inputs with a gradient
    zeros: tuple[Tensor, ...]  # default cotangents
    uses: tuple[frozenset[int], ...]  # for each of ``chosen``, the entries of ``with_gradient`` that it depends on


@dataclass(frozen=True, slots=True)
class Halves:
    """Both parts as functions. Forward gives results and kept values; backward takes kept values and cotangents."""

    facts: AutogradFacts
    forward: Callable[..., Any]
    backward: Callable[..., Any]  # takes each kept value out of a list, and frees it
    again: Callable[..., list[Tensor]]  # the recorded function, from tensors of arguments to tensors of results
    draws: bool  # whether forward draws random numbers
    moved: tuple[Communication, ...]  # the communication of backward
    shared: tuple[int, ...]  # places of kept values that share memory with results
    aliased: tuple[int, ...]  # places of results that share memory with an earlier result or an argument


def differentiated(
    recorder: ProgramRecorder,
    leaves: Sequence[Tensor],
    inputs: list[fx.Node],
    results: list[Tensor],
    outputs: list[fx.Node],
    reduced: Sequence[Frame | None],
) -> tuple[Program, AutogradFacts]:
    """Record the backward pass of a recorded forward pass.

    Args:
        recorder: the recorder of the forward pass.
        leaves: the tensors among the arguments, which no graph of the caller reaches.
        inputs: the nodes of ``leaves``.
        results: the tensors among the results.
        outputs: the nodes of ``results``.
        reduced: for each result the simulated axes over which it is reduced.
    """
    captured = {node: x for node, x in recorder.captured.items() if x.requires_grad}
    for node, x in captured.items():
        if x.grad_fn is not None and _is_downstream([x], [y for other, y in captured.items() if other is not node]):
            raise RecordError(
                "jit cannot record a function that closes over a tensor and over another tensor computed from it, of "
                f"shape {tuple(x.shape)}; pass both as arguments, or compute the second tensor in the function"
            )
    values = [*leaves, *captured.values()]
    wanted = [i for i, x in enumerate(values) if x.requires_grad]
    followed = [i for i, x in enumerate(results) if has_gradient(x)]
    constants = frozenset(range(len(results))).difference(followed)
    if not wanted:
        raise RecordError(
            f"jit cannot record a function whose result of shape {tuple(results[followed[0]].shape)} has a gradient "
            "only with respect to tensors that the function makes; return result.detach(), or pass these tensors as "
            "arguments"
        )
    sources = [values[i] for i in wanted]
    no_derivative = _without_derivative([results[i] for i in followed], sources)
    followed = [i for place, i in enumerate(followed) if place not in no_derivative]
    with recorder.pause(), torch.no_grad():
        cotangents = [_cotangent(results[i], reduced[i]) for i in followed]
    with recorder.real(), torch.no_grad():
        zeros = tuple(map(_zeros_like, cotangents))
    given = recorder.arguments(cotangents)
    recorder.deferred = True  # processes run no collectives here, since other processes may replay meanwhile
    with _without_hooks(captured.values()):
        computed = _gradients([results[i] for i in followed], sources, cotangents, retain_graph=True)
    gradients = [None if g is None else recorder.node_of(g) for g in computed]
    recorder.deferred = False
    read = {node: x for node, x in recorder.captured.items() if node not in captured}
    program = Program.of(recorder.graph, [*inputs, *captured], outputs, read, given, gradients)
    return program, AutogradFacts(
        tuple(captured.values()),
        len(outputs),
        tuple(followed),
        constants,
        tuple(wanted),
        zeros,
        tuple(_made_of(results[i], sources) for i in followed),
    )


def has_gradient(x: Tensor) -> bool:
    """Whether autograd follows a result. A view taken under `torch.no_grad` has no graph, though it requires a
    gradient.
    """
    return x.requires_grad and not (x.grad_fn is None and x._is_view())


def halves_of(
    reports: Reports, program: Program, facts: AutogradFacts, again: Callable[..., list[Tensor]], make: Maker
) -> Halves:
    """Both parts of a program, as functions made by ``make``."""
    constants = program.constants
    forward, back = reports.replayed, reports.replayed_backward
    kept, given = program.kept, set(program.results)
    memory = {owner(node) for node in given}
    shared = tuple(i for i, node in enumerate(kept) if node not in given and owner(node) in memory)
    outside = {*program.inputs, *program.constants}
    aliased = tuple(
        i
        for i, node in enumerate(program.results)
        if node in program.results[:i] or (i in facts.constants and (owner(node) is not node or node in outside))
    )
    return Halves(
        facts,
        make(ProgramPart(program.steps, program.inputs, [*program.results, *kept], constants, replayed=forward)),
        make(ProgramPart(program.deferred, [*kept, *program.cotangents], program.gradients, constants, kept, back)),
        again,
        any(has_randomness(node) for node in program.steps),
        reports.backward,
        shared,
        aliased,
    )


def replay(halves: Halves) -> Callable[..., Any]:
    """A function of the leaves. Its results have gradients where the recorded results had gradients."""

    def run(*leaves: Tensor) -> Any:
        if torch.is_grad_enabled():
            return _ReplayFunction.apply(halves, *leaves, *halves.facts.closed_over)
        with torch.enable_grad():  # as in the recorded function
            return _ReplayFunction.apply(halves, *leaves, *halves.facts.closed_over)

    return run


def _cotangent(x: Tensor, reduced: Frame | None) -> Tensor:
    """Zeros for a result. A reduced result has an unreduced cotangent: one shard for each rank of ``reduced``."""
    zeros = torch.zeros_like(x, memory_format=torch.contiguous_format)
    return zeros if reduced is None else expand(zeros, reduced).clone()


def _zeros_like(x: Tensor) -> Tensor:
    """Zeros without memory for their elements."""
    return per_block(lambda block: torch.zeros((), dtype=x.dtype, device=x.device).expand(block.shape), x)


def _like(x: Tensor, g: Tensor) -> Tensor:
    """The cotangent ``g``, contiguous, with a shard for each simulated rank of the recorded cotangent ``x``."""
    recorded, frame = held_frame(x), held_frame(g)
    if recorded is not None and (frame is None or set(frame.axes) < set(recorded.axes)):
        g = apply(g, call("per_rank", recorded.mesh, recorded.axes))
    return g.contiguous()


class _ReplayFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, halves: Halves, *inputs: Tensor) -> Any:
        ctx.drawn = kept_states() if halves.draws else None
        values = halves.forward(*inputs)
        outs, saved = list(values[: halves.facts.results]), list(values[halves.facts.results :])
        for i in halves.aliased:  # each result needs a separate cotangent
            outs[i] = outs[i].detach()
        for i in halves.shared:  # autograd makes results new values, of which these must not be views
            saved[i] = saved[i].detach()
        ctx.halves = halves
        ctx.kinds = [isinstance(x, Tensor) for x in saved]
        ctx.not_tensors = [x for x in saved if not isinstance(x, Tensor)]
        ctx.count = len(inputs) - len(halves.facts.closed_over)
        ctx.save_for_backward(*inputs[: ctx.count], *(x for x in saved if isinstance(x, Tensor)))
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(outs[i] for i in halves.facts.constants))
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        def run(*given: Tensor) -> Sequence[Tensor | None]:
            _tell(ctx.halves)
            return ctx.halves.backward(*_kept(ctx), *given)  # type: ignore[no-any-return]

        return _backward(ctx, run, cotangents)


class _Gradients(torch.autograd.Function):
    """The backward pass whose results may be differentiated again.

    Its forward is the recorded backward, so a caller who differentiates once pays nothing more. Its backward runs the
    recorded function again.
    """

    @staticmethod
    def forward(ctx: Any, before: Any, run: Callable[..., Any], *values: Tensor) -> Any:
        ctx.halves, ctx.drawn, ctx.count = before.halves, before.drawn, before.count
        given = values[ctx.count + len(ctx.halves.facts.closed_over) :]
        ctx.save_for_backward(*values[: ctx.count], *given)
        ctx.set_materialize_grads(False)
        return tuple([None if g is None else g.detach() for g in run(*given)])  # one tensor may be two gradients

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> Any:
        halves: Halves = ctx.halves
        with torch.enable_grad():
            views = list(map(_view, ctx.saved_tensors))
            inputs, given = views[: ctx.count], views[ctx.count :]
            gradients = _by_autograd(halves, inputs, given, ctx.drawn)
        pairs = zip(gradients, cotangents, strict=True)
        used = [(g, c) for g, c in pairs if g is not None and c is not None and g.requires_grad]
        values = (*inputs, *halves.facts.closed_over, *given)
        wanted = [i for i, x in enumerate(values) if x.requires_grad]
        with _without_hooks(halves.facts.closed_over):
            second = _gradients(
                [g for g, _ in used],
                [values[i] for i in wanted],
                [c for _, c in used],
                create_graph=torch.is_grad_enabled(),
            )
        placed = dict(zip(wanted, second, strict=True))
        return None, None, *(placed.get(i) for i in range(len(values)))


def _view(x: Tensor) -> Tensor:
    """A view of a value, whose gradient excludes other uses of the value."""
    if not x.requires_grad:
        return x
    y = x.view_as(x)
    ask_gradient(y)
    return y


def _backward(ctx: Any, run: Callable[..., Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
    """The gradients of the arguments of `_ReplayFunction`: None for the record, then those of the leaves."""
    halves: Halves = ctx.halves
    given = _given(halves, cotangents)
    if not torch.is_grad_enabled():
        gradients = run(*given)
    elif transforms_active():
        gradients = _by_autograd(halves, list(map(_view, ctx.saved_tensors[: ctx.count])), given, ctx.drawn)
    else:
        gradients = _Gradients.apply(ctx, run, *ctx.saved_tensors[: ctx.count], *halves.facts.closed_over, *given)
    return _placed(ctx, cotangents, gradients)


def _kept(ctx: Any) -> list[list[Any]]:
    """The kept values, each in a list. The list holds the only reference unless the graph is retained."""
    tensors, not_tensors = iter(ctx.saved_tensors[ctx.count :]), iter(ctx.not_tensors)
    values = [[next(tensors if kind else not_tensors)] for kind in ctx.kinds]
    ctx.maybe_clear_saved_tensors()
    return values


def _tell(halves: Halves) -> None:
    if is_watched() and hears_of_records():
        tell(halves.moved)


def _given(halves: Halves, cotangents: Sequence[Any]) -> list[Tensor]:
    """The cotangents of results with a gradient; zeros for missing ones.

    Raises `RecordError` for a cotangent of a result whose gradient torch cannot compute.
    """
    for i, g in enumerate(cotangents):
        if g is not None and i not in halves.facts.chosen and i not in halves.facts.constants:
            raise RecordError(
                f"the result {i} of a jitted function, of shape {tuple(g.shape)}, has no gradient: it was computed by "
                "the gradient of a function such as fused attention, which torch cannot differentiate; detach() it"
            )
    chosen = (cotangents[i] for i in halves.facts.chosen)
    return [_like(z, z if g is None else g) for g, z in zip(chosen, halves.facts.zeros, strict=True)]


def _placed(ctx: Any, cotangents: Sequence[Any], computed: Sequence[Any]) -> tuple[Any, ...]:
    """The gradients ``computed`` for ``halves.facts.with_gradient``, at the places of arguments of `_ReplayFunction`.

    An argument without a gradient, or that no result with a cotangent depends on, has None.
    """
    halves: Halves = ctx.halves
    chosen = (cotangents[i] for i in halves.facts.chosen)
    reached = frozenset[int]().union(*(r for g, r in zip(chosen, halves.facts.uses, strict=True) if g is not None))
    gradients: list[Any] = [None] * len(ctx.needs_input_grad)
    for place, (i, g) in enumerate(zip(halves.facts.with_gradient, computed, strict=True)):
        gradients[i + 1] = g if place in reached else None
    return tuple(gradients)


def _by_autograd(halves: Halves, inputs: Sequence[Tensor], cotangents: list[Tensor], drawn: Any) -> Sequence[Any]:
    """Gradients that can be differentiated: the function runs again, with the random numbers that it drew before."""
    if _is_downstream([x for x in inputs if x.requires_grad], halves.facts.closed_over):
        raise RecordError(
            "jit cannot differentiate gradients again: an argument was computed from a tensor that the jitted function "
            "closes over; pass this tensor as an argument, too"
        )
    states = kept_states()
    if drawn is not None:
        go_on(drawn)
    # derivatives may have disabled torch functions; a recording begins without remembered moves, which change layouts
    with EnableTorchFunction(), forgetting():
        outs = halves.again(inputs)
    go_on(states)
    followed = [outs[i] for i in halves.facts.chosen]
    values = (*inputs, *halves.facts.closed_over)
    wanted = [values[i] for i in halves.facts.with_gradient]
    with _without_hooks(halves.facts.closed_over):
        return _gradients(followed, wanted, cotangents, create_graph=True)


def _gradients(
    of: Sequence[Tensor], wanted: Sequence[Tensor], cotangents: Sequence[Tensor], **how: bool
) -> Sequence[Tensor | None]:
    """``torch.autograd.grad``, also of an empty list of results, for which torch raises."""
    return torch.autograd.grad(of, wanted, cotangents, allow_unused=True, **how) if of else (None,) * len(wanted)


@contextmanager
def _without_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Within, hooks of tensors do not run, since they are for final gradients."""
    kept = [(hooks, dict(hooks)) for x in tensors if (hooks := getattr(x, "_backward_hooks", None))]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)


def _is_downstream(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
    """Whether a graph of ``sources`` goes through one of ``targets``."""
    return any(_made_of(x, targets) for x in sources if x.grad_fn is not None) if targets else False


#: autograd nodes of functions without a derivative
_NO_DERIVATIVE: Final = ("torch::autograd::NotImplemented", "torch::autograd::Error")


def _without_derivative(results: Sequence[Tensor], targets: Sequence[Tensor]) -> frozenset[int]:
    """The places of results whose gradient for one of ``targets`` torch cannot compute."""
    _, nodes = _above([x.grad_fn for x in results], targets)
    ends = {node for node in nodes if node.name() in _NO_DERIVATIVE and _above([node], targets)[0]}
    if not ends:
        return frozenset()
    return frozenset(i for i, x in enumerate(results) if ends & _above([x.grad_fn], targets)[1])


def _made_of(x: Tensor, targets: Sequence[Tensor]) -> frozenset[int]:
    """The places of ``targets`` that the graph of ``x`` goes through."""
    leaf = {i for i, y in enumerate(targets) if y is x and y.grad_fn is None}
    return _above([x.grad_fn], targets)[0] | leaf


def _above(starts: Iterable[Any], targets: Sequence[Tensor]) -> tuple[frozenset[int], set[Any]]:
    """The places of ``targets`` that the graph from ``starts`` goes through, and all its nodes."""
    nodes = {y.grad_fn: i for i, y in enumerate(targets) if y.grad_fn is not None}
    leaves = {id(y): i for i, y in enumerate(targets) if y.grad_fn is None}
    reached = set[int]()
    waiting = [node for node in starts if node is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node in nodes:
            reached.add(nodes[node])
        if (leaf := leaves.get(id(getattr(node, "variable", None)))) is not None:
            reached.add(leaf)
        following = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= following
        waiting += following
    return frozenset(reached), seen
