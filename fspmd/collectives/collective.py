"""Runs a collective: by the step that an operand of the same kind had before, or by checks and a new step.

The checks of a collective, and its steps, follow from its options and from the kinds of its leaves: shape, dtype, type.
So a body keeps the steps. To make one takes some 20 µs, to find it 1 µs. A step holds no tensor: that could be one of
inference mode, or of a recording.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import Any, Final

import optree
import torch
from torch import Tensor

from fspmd.body import Body, bound_body, resolve_axes, state
from fspmd.collectives.steps import LEAF, Handle, LeafCollective, Operand
from fspmd.errors import ArgumentError, VarianceError
from fspmd.foreign import refuse_misfit
from fspmd.messages import Failure, as_axis_name, described, quoted, refuse
from fspmd.pairs import applied
from fspmd.sharded import Sharded, is_plain, is_sharded
from fspmd.torch_internals import DisableTorchFunction, forward_ad, transforms_active
from fspmd.transport.frame import UNEVEN
from fspmd.transport.local_tensor import is_uneven
from fspmd.trees import check_keys
from fspmd.variance import ATTRIBUTE, Variance, get_variance, show

AxisName = str | Sequence[str]
Groups = Sequence[Sequence[int]] | None

WORDS = {"I": "invariant", "V": "varying", "U": "unreduced", "R": "reduced"}

_CONSTANTS: Final = frozenset({type(None), bool, int, float, str, range})
#: makes the step of each leaf: of the number of the leaf and the leaf
Build = Callable[[int, Any], LeafCollective | None]
#: checks the operand and the options of a collective; None: there is no axis to move over
Plan = Callable[..., Build | None]


def collective(
    what: str,
    plan: Plan,
    x: Any,
    axis_name: AxisName,
    options: tuple[Any, ...],
    wait: bool,
    *,
    takes_numbers: bool = False,
) -> Any:
    """Run a collective, and return its result or a handle of it.

    Args:
        what: The name of the collective.
        plan: A function of an `Operand` and the options, from which its steps must follow.
        x: The operand: a tree of tensors.
        axis_name: The axes that it moves over.
        options: The other arguments of the collective.
        wait: Whether to wait for the result.
        takes_numbers: Whether Python numbers stay as they are.
    """
    body: Body | None = state.__dict__["body"]
    key: Any = None
    if body is not None and not body.uneven:
        with DisableTorchFunction():  # no mode need see questions about operands
            kind = type(x)
            is_block = kind is Tensor or (isinstance(x, Tensor) and kind is not Sharded)
            try:
                call_key: tuple[Any, ...] = what, axis_name
                if options:  # 0, 0.0 and False are equal
                    call_key = what, axis_name, options, *map(type, options)
                if is_block:
                    key = call_key, kind, x.dtype, x.layout, x.shape, getattr(x, ATTRIBUTE, None)
                else:
                    leaves, treedef = optree.tree_flatten(x)
                    key = call_key, treedef, tuple(map(_kind, leaves))
                known = body.calls.get(key)
            except (TypeError, AttributeError, RuntimeError):
                key = None  # an option has no hash, a leaf is no tensor, or a nested tensor, which has no shape
            if UNEVEN and body.simulated and key is not None and any(map(is_uneven, [x] if is_block else leaves)):
                key = None
            if transforms_active() or forward_ad._current_level >= 0:
                key = None
            elif key is not None and known is not None:
                before, call, after, result, rest = known
                if wait is not True or not is_block:
                    axes, ranks, steps = rest
                    given, treedef = ([x], LEAF) if is_block else (leaves, treedef)
                    return Operand(what, body, axes, ranks, given, treedef).run(steps, wait)
                y = applied(x if before is None else before(x), call)
                if after is not None:
                    y = after(y)
                if result is not None:
                    setattr(y, ATTRIBUTE, result)
                return y
    operand = operand_of(x, axis_name, what, takes_numbers=takes_numbers)
    given = list(operand.leaves)
    build = plan(operand, *options)
    if build is None:
        return x if wait else done(x)
    with DisableTorchFunction():
        steps = operand.steps(build)
    if key is not None and all(map(_is_constant, (axis_name, *options))):
        _remember(operand, key, given, steps)
    return operand.run(steps, wait)


def _kind(leaf: Tensor) -> tuple[Any, ...]:
    return type(leaf), leaf.dtype, leaf.layout, leaf.shape, getattr(leaf, ATTRIBUTE, None)


def _is_constant(option: Any) -> bool:
    """Whether an option stays what it is. An iterator, or an object of the user, may have other elements later."""
    if isinstance(option, tuple):
        return all(map(_is_constant, option))
    return type(option) in _CONSTANTS or is_dataclass(option)


def _remember(operand: Operand, key: Any, given: Sequence[Any], steps: Sequence[LeafCollective | None]) -> None:
    """Keep the steps of operands, unless another tensor takes the place of one, or would if it had a gradient."""
    body, axes = operand.body, operand.axes
    result = None
    for leaf, now, step in zip(given, operand.leaves, steps, strict=True):
        if step is None or step.call is None or now is not leaf:
            return
        result = getattr(leaf, ATTRIBUTE, None) if state.tracker is not None else None  # an enclosing body's
        if result is None and state.tracker is not None:  # the type may be that of the tensor of which this is a view
            return
        if body.checked:
            if result is None or not (result.varying.issuperset(axes) or result.unreduced.issuperset(axes)):
                return
            result = step.variance
    if steps and (step := steps[0]) is not None:
        body.calls[key] = step.before, step.call, step.after, result, (axes, operand.ranks, steps)


# --- operands ---------------------------------------------------------------------------------------------------------


def flatten_operand(tree: Any, what: str) -> tuple[list[Any], Any]:
    """The leaves, all tensors or Python numbers, and the treedef."""
    if is_plain(tree):
        with DisableTorchFunction():  # no mode need see questions about a tensor
            refuse_misfit(tree, f"{what} got")
        return [tree], LEAF
    leaves, treedef = optree.tree_flatten(tree)
    check_keys(treedef)
    failures = []
    for i, leaf in enumerate(leaves):
        with DisableTorchFunction():
            refuse_misfit(leaf, f"{what} got")
        if is_sharded(leaf) or not isinstance(leaf, (Tensor, int, float, complex)):
            label = treedef.accessors()[i].codify("x")
            if isinstance(leaf, Sharded):
                text = f"{label} is {leaf!r}; pass it as an argument of the function, with its spec in in_specs"
            elif isinstance(leaf, Handle):
                text = f"{label} is the handle of a collective; take its value: handle.wait()"
            else:
                text = f"{label} is {described(leaf)}"
            failures.append(Failure(text, ArgumentError))
    if failures:
        refuse(f"{what} takes tensors and numbers", failures)
    return leaves, treedef


def operand_of(x: Any, axis_name: AxisName, what: str, *, takes_numbers: bool = False) -> Operand:
    """The operand of a call. Python numbers become tensors, unless the collective takes them as they are."""
    body = bound_body(what)
    axes = resolve_axes(body, axis_name, what)
    ranks = math.prod(body.sizes(axes))
    leaves, treedef = flatten_operand(x, what)
    if not takes_numbers:
        leaves = [leaf if is_plain(leaf) else torch.as_tensor(leaf) for leaf in leaves]
    return Operand(what, body, axes, ranks, leaves, treedef)


def one_state(x: Tensor, variance: Variance, axes: tuple[str, ...], what: str) -> str:
    letters = {variance.state(axis) for axis in axes}
    if len(letters) == 1:
        return letters.pop()
    states = ", ".join(f"{WORDS[variance.state(axis)]} over {axis!r}" for axis in axes)
    varying = tuple(axis for axis in axes if variance.state(axis) == "V")
    invariant = tuple(axis for axis in axes if variance.state(axis) == "I")
    mend = "call it once for the axes of each type"
    if len(varying) + len(invariant) == len(axes):
        mend = f"name only {as_axis_name(varying)}, or cast it first: pcast(x, {as_axis_name(invariant)}, to='varying')"
    raise VarianceError(
        f"{what} of {show(x)} over {as_axis_name(axes)}: it is {states}, and one call takes one type; {mend}"
    )


def varying_operand(body: Body, x: Tensor, axes: tuple[str, ...], what: str) -> Variance:
    variance = get_variance(x)
    if body.checked and (pending := [a for a in axes if variance.state(a) in "UR"]):
        letter = variance.state(pending[0])
        mend = "add it up first: psum or psum_scatter" if letter == "U" else "cast it first: pcast to='varying'"
        raise VarianceError(
            f"{what} of {show(x)} over {as_axis_name(axes)}: it is {WORDS[letter]} over {quoted(pending)}; {mend}"
        )
    return variance


def as_varying(body: Body, x: Tensor, to: Variance) -> Tensor:
    """The operand as varying. An invariant one is cast, as for any torch function."""
    return state.tracker.cast(x, to) if body.checked and state.tracker is not None else x


def done(x: Any) -> Any:
    return Handle(lambda: x)
