"""The body of a ``shard_map`` as it runs: which axes are bound, on which mesh, and whether types are checked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fspmd.errors import AxisError
from fspmd.mesh import Mesh
from fspmd.transport import Transport, transport_of


class Body:
    """What holds inside a body. One object serves every call of the same plan."""

    __slots__ = ("axes", "calls", "checked", "foreign", "mesh", "name", "outer", "transport", "typed", "uneven")
    mesh: Mesh
    axes: frozenset[str]  # bound axes, those of enclosing bodies too
    typed: frozenset[str]  # axes over which the types of values are known
    foreign: frozenset[str]  # axes of enclosing bodies whose types are not kept as they are here: no collectives

    def __init__(self, mesh: Mesh, axes: frozenset[str], checked: bool, name: str, outer: Body | None = None) -> None:
        self.mesh = mesh
        self.axes = axes
        self.checked = checked
        self.name = name
        self.outer = outer
        above = (outer.axes, outer.typed) if outer is not None else (frozenset[str](), frozenset[str]())
        self.typed = above[1] | (axes - above[0]) if checked else above[1]
        self.foreign = axes - self.typed if checked else self.typed
        self.transport: Transport = transport_of(mesh)
        self.calls: dict[Any, Any] = {}  # collectives already decided here, for the hot path
        self.uneven = False  # a block's shape may differ from rank to rank

    def sizes(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The sizes of mesh axes."""
        return tuple(self.mesh.shape[axis] for axis in axes)


class _State(threading.local):
    body: Body | None = None
    tracker: Any = None


state = _State()


def bound_body(what: str, example: str) -> Body:
    """The running body; raises `AxisError` outside any."""
    body = state.body
    if body is None:
        raise AxisError(
            f"{what} was called outside a shard_map body, where no mesh axis is bound; call it in a function run by "
            f"shard_map, for example shard_map(lambda x: {example}, mesh=mesh, in_specs=P('x'), out_specs=P())(x)"
        )
    return body


def resolve_axes(body: Body, axis_name: Any, what: str) -> tuple[str, ...]:
    """The axes as a tuple of bound names; raises `AxisError` for anything else."""
    if isinstance(axis_name, str):
        axes: tuple[str, ...] = (axis_name,)
    elif isinstance(axis_name, (tuple, list)):
        axes = tuple(axis_name)
    else:
        raise AxisError(
            f"{what} got axis_name={axis_name!r} of type {type(axis_name).__name__}; expected a mesh axis name such "
            f"as {min(body.axes, default='x')!r}, or a tuple of names in rank order"
        )
    known = ", ".join(repr(a) for a in body.mesh.axis_names if a in body.axes) or "none"
    for axis in axes:
        if not isinstance(axis, str) or axis not in body.axes:
            hint = ""
            if axis in body.mesh.axis_names:
                hint = f"; {axis!r} is an axis of {body.mesh!r} but not manual here: add it to axis_names of shard_map"
            raise AxisError(
                f"{what} got the axis {axis!r}, which is not bound in {body.name}; bound axes: {known}{hint}"
            )
        if axis in body.foreign:
            raise AxisError(
                f"{what} got the axis {axis!r} of an enclosing body with check_vma={not body.checked}, but "
                f"{body.name} has check_vma={body.checked}; give both the same, or communicate in the enclosing body"
            )
    if len(set(axes)) < len(axes):
        raise AxisError(f"{what} got the axes {axes}, which repeat an axis; name each axis once")
    return axes


@contextmanager
def within(body: Body | None, tracker: Any) -> Iterator[None]:
    """Run in a body again, for example to recompute a part of it in backward."""
    before = state.body, state.tracker
    state.body, state.tracker = body, tracker
    try:
        if tracker is None:
            yield
        else:
            with torch._C._EnableTorchFunction(), tracker:  # backward may have been started with it disabled
                yield
    finally:
        state.body, state.tracker = before
