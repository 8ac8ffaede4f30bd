"""What every collective does to its operands: leaves of a pytree, one type over the axes, casts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.body import Body, state
from fspmd.collectives.steps import Handle, Rows, Step
from fspmd.errors import ArgumentError, VarianceError
from fspmd.pairs import Call
from fspmd.variance import Variance, get_variance, show

AxisName = str | Sequence[str]
Groups = Sequence[Sequence[int]] | None

WORDS = {"I": "invariant", "V": "varying", "U": "unreduced", "R": "reduced"}


def flatten_operand(tree: Any, what: str) -> tuple[list[Any], Any]:
    if type(tree) is Tensor:
        return [tree], _LEAF
    leaves, treedef = optree.tree_flatten(tree)
    for path, leaf in zip(treedef.paths(), leaves, strict=True):
        if not isinstance(leaf, (Tensor, int, float, complex, bool)):
            at = "".join(f"[{entry!r}]" for entry in path)
            raise ArgumentError(
                f"{what} got x{at} of type {type(leaf).__name__}; every leaf must be a torch.Tensor (this rank's block)"
            )
    return leaves, treedef


_LEAF = optree.tree_structure(0)


def tensor_leaves(tree: Any, what: str) -> tuple[list[Any], Any]:
    leaves, treedef = flatten_operand(tree, what)
    return [leaf if isinstance(leaf, Tensor) else torch.as_tensor(leaf) for leaf in leaves], treedef


def elementwise_step(the_call: Call, after: Variance, x: Tensor) -> Step:
    """A step whose call acts element by element, so that any shape can be packed as one row."""
    shape = tuple(x.shape)
    return Step(the_call, after, rows=Rows(the_call, lambda leaf: leaf.reshape(1, -1), lambda row: row.reshape(shape)))


def then(step: Step, after: Callable[[Tensor], Tensor]) -> Step:
    rows = step.rows
    if rows is not None:
        back = rows.back
        rows = Rows(rows.call, rows.into, lambda row: after(back(row)))
    return Step(step.call, step.variance, step.before, after, rows)


def one_state(x: Tensor, variance: Variance, axes: tuple[str, ...], what: str) -> str:
    letters = {variance.state(axis) for axis in axes}
    if len(letters) == 1:
        return letters.pop()
    states = ", ".join(f"{WORDS[variance.state(axis)]} over {axis!r}" for axis in axes)
    varying = tuple(axis for axis in axes if variance.state(axis) == "V")
    raise VarianceError(
        f"{what} of {show(x)} over {axes}: the value is {states}; one call needs one type over all its axes: name only "
        f"the axes it varies over, {varying}, or pcast it to varying over the others first"
    )


def varying_operand(body: Body, x: Tensor, axes: tuple[str, ...], what: str) -> Variance:
    variance = get_variance(x)
    if body.checked and (pending := [a for a in axes if variance.state(a) in "UR"]):
        raise VarianceError(
            f"{what} of {show(x)}: the value is {WORDS[variance.state(pending[0])]} over "
            + f"{', '.join(map(repr, pending))}; "
            + ("psum or psum_scatter it first" if variance.state(pending[0]) == "U" else "pcast it to varying first")
        )
    return variance


def as_varying(body: Body, x: Tensor, to: Variance) -> Tensor:
    """The operand as varying; an invariant one is cast, as any op's would be."""
    return state.tracker.cast(x, to) if body.checked and state.tracker is not None else x


def done(x: Any) -> Any:
    return Handle(lambda: x)
