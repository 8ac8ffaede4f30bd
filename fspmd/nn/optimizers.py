"""Optimizers as pairs of pure functions over trees: AdamW and Adafactor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, Final, NamedTuple

import optree
import torch
from torch import Tensor

from fspmd.body import state as running
from fspmd.collectives import psum
from fspmd.entries import entry_axes
from fspmd.errors import ArgumentError, ShapeError, VarianceError
from fspmd.foreign import loose_kind
from fspmd.messages import described, quoted
from fspmd.nn.arguments import FloatDtype, checked
from fspmd.nn.parameters import cast_terms, layouts
from fspmd.placement.creation import zeros
from fspmd.placement.reshard import reshard
from fspmd.sharded import is_sharded
from fspmd.spec import P, TensorSpec
from fspmd.transport.local_tensor import is_uneven
from fspmd.trees import Entries, broadcast_prefix, leaf_paths, prefix_over
from fspmd.variance import get_variance, show

Rate = float | Tensor | Callable[[Tensor], Any]
State = dict[str, Any]  # "step", and for each slot a tree like the parameters


class Optimizer(NamedTuple):
    """A pair of pure functions.

    ``init(params)`` gives the state: a dict of the number of steps, and of trees like the parameters.
    ``update(grads, state, params)`` gives the next parameters and the next state, each leaf laid out as before.
    """

    init: Callable[[Any], State]
    update: Callable[[Any, State, Any], tuple[Any, State]]


Leaves = list[Any]
Slots = dict[str, Leaves]
Shape = tuple[int, ...]
#: how a block lies in a body; None for a global value
Lies = TensorSpec | None
#: of gradients, slots, parameters, the learning rate, the step, the decay of each leaf, and in a body how it lies: new
#: parameters and slots
Rule = Callable[[Leaves, Slots, Leaves, Any, Tensor, list[float], list[Lies]], tuple[Leaves, Slots]]
_NUMBERS: Final = Entries(lambda x: isinstance(x, Real), lambda _: "expected a number", "number")


@checked
def adamw(
    rate: Rate = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    decay: Any = 1e-2,
    *,
    specs: Any = None,
) -> Optimizer:
    """AdamW, as ``torch.optim.AdamW``: on global values of any layout, and on blocks in a body.

    Args:
        rate: The learning rate: a number, a 0-d tensor, or a function of the step, a 0-d tensor that begins at 1.
        betas: The decay of the running means of gradients and of their squares.
        eps: Added to the square root of the mean of squares.
        decay: The weight decay, or a prefix of the parameters of such numbers.
        specs: How the state lies: a prefix of the parameters of `P`, or None for the layout of the parameter. The
            update is computed there. With ``P("dp")`` for parameters of ``P()`` it is ZeRO 1. In a body: how the
            parameters lie, as for `gathered`; the state lies as they do.

    Communication: none where ``specs`` is None. Otherwise gradients and parameters move to ``specs`` (slices, or a
    reduce-scatter of pending sums), and new parameters move back (an all-gather).

    Raises:
        ArgumentError: trees do not fit.
        VarianceError, ShapeError, SpecError: in a body, ``specs`` do not fit the blocks.

    >>> from fspmd import P, device_get, device_put, make_mesh
    >>> mesh = make_mesh((4,), ("dp",), transport="simulation")
    >>> params = device_put({"w": torch.ones(6)}, P("dp"), mesh=mesh)
    >>> init, update = adamw(0.1, decay=0)
    >>> params, state = update(params, init(params), params)
    >>> device_get(params)["w"], state["square"]["w"]
    (tensor([0.9000, 0.9000, 0.9000, 0.9000, 0.9000, 0.9000]), Sharded f32[6@dp] on mesh(dp=4))
    """
    check_numbers("adamw", [("rate", rate, 0, math.inf), ("eps", eps, 0, math.inf)])
    if len(betas) != 2:
        raise ArgumentError(f"adamw got {described(betas)} for betas; give it two numbers, such as (0.9, 0.999)")
    check_numbers("adamw", [("betas[0]", betas[0], 0, 1), ("betas[1]", betas[1], 0, 1)])
    first, second = betas

    def rule(
        grads: Leaves, slots: Slots, params: Leaves, rate: Any, step: Tensor, decays: list[float], _: list[Lies]
    ) -> tuple[Leaves, Slots]:
        left, left_square = 1 - first**step, (1 - second**step).sqrt()
        means = [m.lerp(g, 1 - first) for m, g in zip(slots["mean"], grads, strict=True)]
        squares = [s * second + g * g * (1 - second) for s, g in zip(slots["square"], grads, strict=True)]
        news = [
            p * (1 - rate * w) - m / (s.sqrt() / left_square + eps) * (rate / left)
            for p, m, s, w in zip(params, means, squares, decays, strict=True)
        ]
        return news, {"mean": means, "square": squares}

    def slots_of(p: Any, _: Lies) -> dict[str, Any]:
        return {"mean": torch.zeros_like(p), "square": torch.zeros_like(p)}

    return leafwise(lambda shape: {"mean": shape, "square": shape}, slots_of, rule, rate, decay, specs)


@checked
def with_master(optimizer: Optimizer, dtype: FloatDtype = torch.float32, *, specs: Any = None) -> Optimizer:
    """The optimizer on master weights: copies of the parameters in a wider dtype, which are part of the state.

    An update changes the master weights. Parameters are their values, rounded. So small changes are not lost.

    Args:
        specs: How master weights lie, outside of bodies: a prefix of the parameters of `P`, or None for the layout of
            the parameter. With the ``specs`` of the optimizer they are cut as the rest of its state (ZeRO 1).

    Communication: that of the optimizer. Where ``specs`` say so, new parameters move from there (an all-gather), in
    their own dtype.

    Raises:
        ArgumentError: ``specs`` do not fit, or are given in a body, where master weights lie as the parameters.

    >>> init, update = with_master(adamw(1e-4, decay=0))
    >>> params = {"w": torch.ones(1, dtype=torch.bfloat16)}
    >>> state = init(params)
    >>> for _ in range(100):
    ...     params, state = update(params, state, params)
    >>> params["w"], state["master"]["w"]
    (tensor([0.9883], dtype=torch.bfloat16), tensor([0.9900]))
    """

    def wide(tree: Any) -> Any:
        return optree.tree_map(lambda x: cast_terms(x.detach(), dtype), tree, is_leaf=is_sharded)

    def copied(tree: Any, of: Any) -> Any:  # a cast to the same dtype shares memory, and may not be donated beside it
        return optree.tree_map(lambda x, y: x.clone() if x.dtype is y.dtype else x, tree, of, is_leaf=is_sharded)

    def laid(tree: Any, partitions: Sequence[Any]) -> Any:
        leaves, treedef = _flat(tree)
        return treedef.unflatten(_laid(leaves, partitions))

    def init(params: Any) -> State:
        _flat(params)
        if specs is not None and running.body is not None:
            raise ArgumentError("with_master got specs in a body, where master weights lie as the parameters")
        master = copied(laid(wide(params), _partitions(params, specs)), params)
        return {"master": master, **optimizer.init(master)}

    def update(grads: Any, state: State, params: Any) -> tuple[Any, State]:
        leaves, treedef = _flat(params)
        if not isinstance(state, dict) or "master" not in state:
            raise ArgumentError(
                f"update got {described(state)} for state; give it what init(params) of with_master gave"
            )
        grads = treedef.unflatten(_like(grads, treedef, "grads"))
        inner = {name: tree for name, tree in state.items() if name != "master"}
        master, inner = optimizer.update(wide(grads), inner, state["master"])
        _like(master, treedef, "state['master']")
        news = optree.tree_map(lambda x, p: x.to(p.dtype), master, params, is_leaf=is_sharded)
        news = laid(news, _places(leaves))
        return copied(news, master), {"master": master, **inner}

    return Optimizer(init, update)


def leafwise(
    shapes_of: Callable[[Shape], dict[str, Shape]],
    slots_of: Callable[[Any, Lies], dict[str, Any]],
    rule: Rule,
    rate: Rate,
    decay: Any,
    specs: Any,
) -> Optimizer:
    """An optimizer of the slots of a leaf, by their names, and of a rule for all leaves.

    ``shapes_of`` gives the shapes of the slots for the shape of a parameter. Leaves reach the rule where ``specs``
    says. What it returns is moved to where it lay before.
    """
    names = tuple(shapes_of(()))

    @torch.no_grad()
    def init(params: Any) -> State:
        leaves, treedef = _flat(params)
        lies = _lies(params, leaves, specs)
        rows = list(map(slots_of, _laid(leaves, _partitions(params, specs)), lies))
        device = next((p.device for p in leaves), None)
        step = torch.zeros((), dtype=torch.float64, device=device)
        return {"step": step, **{name: treedef.unflatten(row[name] for row in rows) for name in names if rows}}

    @torch.no_grad()
    def update(grads: Any, state: State, params: Any) -> tuple[Any, State]:
        leaves, treedef = _flat(params)
        known = ("step", *names) if leaves else ("step",)
        if not isinstance(state, dict) or {*state} != {*known}:
            shown = f"a dict of {quoted(state)}" if isinstance(state, dict) and state else described(state)
            raise ArgumentError(
                f"update got {shown} for state; give it what init(params) gave, a dict of {quoted(known)}"
            )
        slots = {name: _like(tree, treedef, f"state[{name!r}]") for name, tree in state.items() if name != "step"}
        partitions, step = _partitions(params, specs), state["step"] + 1
        laid = _laid(leaves, partitions)
        parts = _like(grads, treedef, "grads")
        _check_shapes(parts, slots, leaves, params, shapes_of)
        given = [g.to(p.dtype) for g, p in zip(_laid(parts, _places(laid)), laid, strict=True)]
        decays, lies = broadcast_numbers(decay, params), _lies(params, leaves, specs)
        news, renewed = rule(given, slots, laid, _rate_at(step, rate), step, decays, lies)
        after = {name: treedef.unflatten(_laid(renewed[name], _places(old))) for name, old in slots.items()}
        return treedef.unflatten(_laid(news, _places(leaves))), {"step": step, **after}

    return Optimizer(init, update)


def _rate_at(step: Tensor, rate: Rate) -> Any:
    """The learning rate of a step."""
    value = rate(step) if callable(rate) else rate
    if not isinstance(value, (Real, Tensor)) or (isinstance(value, Tensor) and value.dim()):
        raise ArgumentError(f"update got {described(value)} for rate; give it a number, a 0-d tensor, or a function")
    return value


def check_numbers(what: str, numbers: Iterable[tuple[str, Any, float, float]]) -> None:
    """Raise `ArgumentError` for a number that is not from the least on and below the bound of its row."""
    for name, x, least, bound in numbers:
        if (isinstance(x, Tensor) and not x.dim()) or (callable(x) and name == "rate"):
            continue
        if not isinstance(x, Real) or not least <= float(x) < bound:
            below = "" if bound == math.inf else f", and below {bound}"
            raise ArgumentError(f"{what} got {described(x)} for {name}; give it a number from {least} on{below}")


def broadcast_numbers(prefix: Any, params: Any) -> list[float]:
    """A number for each leaf."""
    failures: list[Any] = []
    numbers = prefix_over(prefix, params, "decay", "params", failures, _NUMBERS)
    if failures:
        raise ArgumentError(f"an optimizer got a decay that does not match the parameters: {failures[0].text}")
    check_numbers("an optimizer", [("decay", x, 0, math.inf) for x in numbers])
    return numbers


def _flat(params: Any) -> tuple[Leaves, Any]:
    leaves, treedef = optree.tree_flatten(params, is_leaf=is_sharded)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            raise ArgumentError(f"an optimizer got a parameter that is {described(leaf)}; expected floating tensors")
    return leaves, treedef


def _like(tree: Any, treedef: Any, what: str) -> Leaves:
    """The leaves of a tree like the parameters."""
    try:
        leaves: Leaves = treedef.flatten_up_to(tree)
    except ValueError as error:
        raise ArgumentError(f"update got {what} that is no tree like params: {error}") from None
    for x in leaves:
        if not isinstance(x, Tensor) or (type(x) is Tensor and loose_kind(x)):
            raise ArgumentError(
                f"update got {described(x)} as a leaf of {what}; give it a dense tensor for each parameter"
            )
    return leaves


def _check_shapes(
    grads: Leaves, slots: Slots, leaves: Leaves, params: Any, shapes_of: Callable[[Shape], dict[str, Shape]]
) -> None:
    """Raise `ShapeError` for a gradient or slot of another shape, which would make a parameter of the shape of both."""
    for i, (g, p) in enumerate(zip(grads, leaves, strict=True)):
        if is_uneven(p):
            continue
        shape = tuple(p.shape)
        rows = [("", g, shape), *((name, slots[name][i], expected) for name, expected in shapes_of(shape).items())]
        for name, x, expected in rows:
            if not is_uneven(x) and tuple(x.shape) != expected:
                raise ShapeError(
                    f"update got {f'state[{name!r}]' if name else 'a gradient'} of shape {tuple(x.shape)} for "
                    f"{leaf_paths(params, 'params')[i]} of shape {shape}; give it one of shape {expected}"
                )


def _partitions(params: Any, specs: Any) -> Sequence[Any]:
    """Where the update of each leaf is computed; None for where the leaf lies."""
    if specs is None or running.body is not None:
        return ()
    return broadcast_prefix(specs, params, "specs", "params", "an optimizer got specs that do not match")


def _lies(params: Any, leaves: Leaves, specs: Any) -> list[Lies]:
    """How each block lies in a body, where ``specs`` say so."""
    if running.body is None or specs is None:
        return [None] * len(leaves)
    return [*layouts(params, leaves, specs, "an optimizer")]


def _places(leaves: Leaves) -> Sequence[Any]:
    """The partition of each leaf; None for a plain tensor."""
    return [x.spec.partition if is_sharded(x) else None for x in leaves] if running.body is None else ()


def _laid(leaves: Leaves, partitions: Sequence[Any]) -> Leaves:
    """The leaves in other layouts, in one move."""
    wanted = [
        None if place is None or not is_sharded(x) or x.spec.partition is place else place
        for x, place in zip(leaves, partitions, strict=bool(partitions))
    ]
    moved: Leaves = reshard(leaves, wanted) if any(place is not None for place in wanted) else leaves
    return moved


def check_known(p: Any, lies: Lies, what: str) -> None:
    """Raise an error in a body for a block whose cut dims are unknown."""
    if running.body is not None and lies is None and get_variance(p).varying:
        raise VarianceError(
            f"{what} in a body got {show(p)}, a block, and it needs to know which dims are cut; give the layouts of "
            f"the parameters, {what}(specs=P(...))"
        )


@checked
def adafactor(
    rate: Rate = 1e-2,
    beta2_decay: float = -0.8,
    eps: Sequence[float | None] = (None, 1e-3),
    clip: float = 1.0,
    decay: Any = 0.0,
    *,
    specs: Any = None,
) -> Optimizer:
    """Adafactor, as ``torch.optim.Adafactor``, on global values of any layout, and on blocks in a body.

    The state of a matrix [..., m, n] is a mean square for each row, [..., m, 1], and column, [..., 1, n].

    Args:
        rate: As for `adamw`. A step is at most ``1 / sqrt(step)``, relative to the size of the parameter.
        beta2_decay: The weight of a new mean square is ``step ** beta2_decay``.
        eps: The least mean square, by default that of the dtype, and the least size of a parameter.
        clip: The largest size of an update before it is scaled.
        decay, specs: As for `adamw`.

    Communication: means over a dim that is cut are all-reduces, [..., m, 1] or [..., 1, n]; three numbers of each leaf,
    the sizes of the parameter and the update and the mean of rows, are all-reduces where the leaf is cut.

    Raises:
        VarianceError: it is called in a body on blocks that vary, without ``specs``; and as `adamw`.
        ArgumentError, ShapeError, SpecError: As `adamw`.

    >>> from fspmd import device_get, device_put, make_mesh
    >>> mesh = make_mesh((4,), ("dp",), transport="simulation")
    >>> params = device_put({"w": torch.ones(6, 3)}, P("dp"), mesh=mesh)
    >>> init, update = adafactor(0.1)
    >>> params, state = update(params, init(params), params)
    >>> state["row"]["w"], state["column"]["w"]
    (Sharded f32[6@dp, 1] on mesh(dp=4), Sharded f32[1, 3] on mesh(dp=4))
    """

    if len(eps) != 2:
        raise ArgumentError(f"adafactor got {described(eps)} for eps; give it two numbers, such as (None, 1e-3)")
    sizes = [(f"eps[{i}]", x, 0, math.inf) for i, x in enumerate(eps) if x is not None]
    check_numbers("adafactor", [("rate", rate, 0, math.inf), *sizes, ("clip", clip, 1, math.inf)])
    if not beta2_decay <= 0:
        raise ArgumentError(f"adafactor got {described(beta2_decay)} for beta2_decay; give it a number up to 0")

    def slots_of(p: Any, lie: Lies) -> dict[str, Any]:
        check_known(p, lie, "adafactor")
        if p.ndim < 2:
            return {
                "row": torch.zeros_like(p),
                "column": _zeros(p, _mean_shapes(tuple(p.shape))["column"], range(p.ndim)),
            }
        if lie is not None:
            return {name: _mean(torch.zeros_like(p), d, lie) for name, d in (("row", -1), ("column", -2))}
        shapes = _mean_shapes(tuple(p.shape))
        return {"row": _zeros(p, shapes["row"], [p.ndim - 1]), "column": _zeros(p, shapes["column"], [p.ndim - 2])}

    def rule(
        grads: Leaves, slots: Slots, params: Leaves, rate: Any, step: Tensor, decays: list[float], lies: list[Lies]
    ) -> tuple[Leaves, Slots]:
        new = step**beta2_decay
        relative = torch.minimum(torch.as_tensor(rate, dtype=step.dtype, device=step.device), step**-0.5)
        news, rows, columns = [], [], []
        leaves = zip(grads, params, decays, slots["row"], slots["column"], lies, strict=True)
        for g, p, w, old_row, old_column, lie in leaves:
            least = torch.finfo(p.dtype).eps if eps[0] is None else eps[0]
            square = g * g
            if p.ndim < 2:
                estimate = row = old_row + (square - old_row) * new
                column = old_column
            else:
                row = old_row + (_mean(square, -1, lie) - old_row) * new
                column = old_column + (_mean(square, -2, lie) - old_column) * new
                estimate = row * column / _mean(row, -2, lie).clamp(min=least)
            change = g * estimate.clamp(min=least * least).rsqrt()
            size = math.sqrt(math.prod(p.shape if lie is None else lie.shape)) or 1.0
            length = relative * (_norm(p, lie) / size).clamp(min=eps[1])
            news.append(p * (1 - rate * w) - change * (length / (_norm(change, lie) / (size * clip)).clamp(min=1.0)))
            rows.append(row)
            columns.append(column)
        return news, {"row": rows, "column": columns}

    return leafwise(_mean_shapes, slots_of, rule, rate, decay, specs)


def _mean_shapes(shape: Shape) -> dict[str, Shape]:
    """The shapes of Adafactor's means of squares over columns and over rows; of a vector it keeps each square."""
    if len(shape) < 2:
        return {"row": shape, "column": (0,) * len(shape)}
    return {"row": (*shape[:-1], 1), "column": (*shape[:-2], 1, shape[-1])}


def _mean(x: Any, dim: int, lie: Lies) -> Any:
    """The mean over a dim of a value, or of a block that ``lie`` says the layout of."""
    if lie is None:
        return x.mean(dim, keepdim=True)
    total, axes = x.sum(dim, keepdim=True), entry_axes((*lie.partition, *[None] * len(lie.shape))[len(lie.shape) + dim])
    return (psum(total, axes) if axes else total) / lie.shape[dim]


def _norm(x: Any, lie: Lies) -> Any:
    if lie is None or not (axes := tuple(sorted(lie.partition.axes))):
        return x.norm()
    return psum(x.square().sum(), axes).sqrt()


def _zeros(p: Any, shape: tuple[int, ...], dims: Any) -> Any:
    """Zeros that lie as a parameter, but for the dims of another size, which are not cut."""
    if not is_sharded(p):
        return torch.zeros(shape, dtype=p.dtype, device=p.device)
    entries = [None if d in dims else entry for d, entry in enumerate(p.spec.partition)]
    return zeros(shape, spec=P(*entries), mesh=p.spec.mesh, dtype=p.dtype)
