"""Preparation of the operands of a collective: flattening, type checks, casts, and rows of equal length.

Uneven blocks become padded rows of equal length, so that many leaves share one call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fspmd.body import Body, bound_body, resolve_axes, state
from fspmd.collectives.steps import LEAF, Handle, LeafCollective, Operand, Rows
from fspmd.errors import ArgumentError, VarianceError
from fspmd.foreign import refuse_misfit
from fspmd.messages import Failure, as_axis_name, described, quoted, refuse
from fspmd.pairs import Call, call
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


Sizes = tuple[int, ...]


def gather_rows(body: Body, x: Tensor, axes: tuple[str, ...], name: str, dim: int, lengths: Sizes) -> Rows:
    """Into rows: one row for this rank's block. Back: the blocks of ``n`` rows, joined along ``dim``."""
    longest, rest = max(lengths), _without(x, dim)

    def back(rows: Tensor) -> Tensor:
        blocks = rows.reshape(len(lengths), longest, *rest).unbind()
        return torch.cat([_cut(b, 0, n) for b, n in zip(blocks, lengths, strict=True)]).movedim(0, dim)

    return Rows(call(name, body.mesh, axes), lambda leaf: _pad(leaf.movedim(dim, 0), 0, longest).reshape(1, -1), back)


def scatter_rows(body: Body, x: Tensor, axes: tuple[str, ...], name: str, dim: int, lengths: Sizes) -> Rows:
    """Into rows: one row for each block of ``dim``. Back: this rank's block, from one row."""
    longest, rest, mine = max(lengths), _without(x, dim), _position(body, axes)

    def into(leaf: Tensor) -> Tensor:
        pieces = leaf.movedim(dim, 0).split(lengths)
        return torch.stack([_pad(piece, 0, longest) for piece in pieces]).reshape(len(lengths), -1)

    def back(row: Tensor) -> Tensor:
        return _cut(row.reshape(longest, *rest), 0, lengths[mine]).movedim(0, dim)

    return Rows(call(name, body.mesh, axes), into, back)


def exchange_rows(
    body: Body, x: Tensor, axes: tuple[str, ...], dims: tuple[int, int], split: Sizes, joined: Sizes
) -> Rows:
    """Into rows: one row for each piece of the first dim. Back: the pieces of ``n`` rows, joined along the second."""
    n, mine = len(split), _position(body, axes)
    piece = max(split), max(joined)
    rest = [length for i, length in enumerate(x.shape) if i not in dims]

    def into(leaf: Tensor) -> Tensor:
        pieces = leaf.movedim(dims, (0, 1)).split(split)
        return torch.stack([_pad(_pad(p, 0, piece[0]), 1, piece[1]) for p in pieces]).reshape(n, -1)

    def back(rows: Tensor) -> Tensor:
        blocks = _cut(rows.reshape(n, *piece, *rest), 1, split[mine]).unbind()
        return torch.cat([_cut(b, 1, length) for b, length in zip(blocks, joined, strict=True)], 1).movedim(
            (0, 1), dims
        )

    return Rows(call("all_to_all", body.mesh, axes), into, back)


def _position(body: Body, axes: tuple[str, ...]) -> int:
    return int(body.transport.index(body.mesh, axes))


def _without(x: Tensor, dim: int) -> list[int]:
    return [length for i, length in enumerate(x.shape) if i != dim]


def _pad(x: Tensor, dim: int, length: int) -> Tensor:
    missing = list(x.shape)
    missing[dim] = length - x.shape[dim]
    return torch.cat([x, x.new_zeros(missing)], dim) if missing[dim] else x


def _cut(x: Tensor, dim: int, length: int) -> Tensor:
    return x.narrow(dim, 0, length)
