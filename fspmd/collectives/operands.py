"""Preparation of the operands of a collective: flattening, type checks and casts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.body import Body, state
from fspmd.collectives.steps import Handle, LeafCollective, Rows
from fspmd.errors import ArgumentError, FspmdError, VarianceError
from fspmd.foreign import refuse_misfit
from fspmd.messages import Failure, as_axis_name, described, quoted, refuse
from fspmd.pairs import Call
from fspmd.sharded import Sharded, is_plain, is_sharded
from fspmd.torch_internals import DisableTorchFunction
from fspmd.trees import check_keys
from fspmd.variance import Variance, get_variance, show

AxisName = str | Sequence[str]
Groups = Sequence[Sequence[int]] | None

WORDS = {"I": "invariant", "V": "varying", "U": "unreduced", "R": "reduced"}


def flatten_operand(tree: Any, what: str) -> tuple[list[Any], Any]:
    """The leaves, all tensors or Python numbers, and the treedef."""
    if is_plain(tree):
        with DisableTorchFunction():  # no mode need see questions about a tensor
            refuse_misfit(tree, f"{what} got")
        return [tree], _LEAF
    leaves, treedef = optree.tree_flatten(tree)
    check_keys(treedef)
    failures = []
    for i, leaf in enumerate(leaves):
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


_LEAF = optree.tree_structure(0)


def steps_of(
    leaves: list[Any], treedef: optree.PyTreeSpec, what: str, build: Callable[[int, Any], LeafCollective | None]
) -> list[LeafCollective | None]:
    """One step per leaf. One error lists all leaves of a tree that fail."""
    if treedef == _LEAF:
        return [build(0, leaves[0])]
    steps: list[LeafCollective | None] = []
    failures = []
    for i, leaf in enumerate(leaves):
        try:
            steps.append(build(i, leaf))
        except FspmdError as error:
            failures.append(Failure(f"{treedef.accessors()[i].codify('x')}: {error}", type(error)))
    if failures:
        refuse(f"{what}: leaves that do not fit", failures)
    return steps


def tensor_leaves(tree: Any, what: str) -> tuple[list[Any], Any]:
    leaves, treedef = flatten_operand(tree, what)
    return [leaf if is_plain(leaf) else torch.as_tensor(leaf) for leaf in leaves], treedef


def elementwise_step(the_call: Call, after: Variance, x: Tensor) -> LeafCollective:
    """A step whose call acts element by element. A leaf of any shape is packed as one row."""
    shape = tuple(x.shape)
    return LeafCollective(
        the_call, after, rows=Rows(the_call, lambda leaf: leaf.reshape(1, -1), lambda row: row.reshape(shape))
    )


def then(step: LeafCollective, after: Callable[[Tensor], Tensor]) -> LeafCollective:
    rows = step.rows
    if rows is not None:
        back = rows.back
        rows = Rows(rows.call, rows.into, lambda row: after(back(row)))
    return LeafCollective(step.call, step.variance, step.before, after, rows)


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
