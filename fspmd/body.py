"""The running body of a ``shard_map``: its mesh, its axes, whether types are checked; and checks that none runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from fspmd.cache import Cache
from fspmd.errors import ArgumentError, AxisError, MeshError, RecordError
from fspmd.meshes.mesh import Mesh, current_mesh, mesh_advice
from fspmd.messages import described, quoted
from fspmd.tracing import is_recording, refuse_traced
from fspmd.transport import Transport, transport_named
from fspmd.transport.frame import UNEVEN


class Body:
    """The state of a body. One object serves every call of the same plan."""

    __slots__ = (
        "asks",
        "axes",
        "calls",
        "checked",
        "empty",
        "foreign",
        "linear",
        "mapped",
        "mesh",
        "name",
        "outer",
        "simulated",
        "transport",
        "typed",
        "uneven",
        "unlike",
    )
    mesh: Mesh
    axes: frozenset[str]  # bound axes, including those of enclosing bodies
    typed: frozenset[str]  # axes over which the types of values are known
    foreign: frozenset[str]  # axes of an enclosing body of the other `checked`; collectives over them are refused
    uneven: bool  # the shape of a block may differ from rank to rank (`mark_uneven`)
    empty: bool  # some rank is known to have a block without elements
    simulated: bool  # the ranks of the mesh are simulated
    linear: bool  # the body is linear in pending sums
    mapped: frozenset[str]  # axes that cut a dim over which `vmap` maps: each rank has elements of its own
    unlike: frozenset[str]  # the mapped axes along which each element draws random numbers of its own
    asks: bool  # ranks compare their shapes before a collective on blocks that may be uneven

    def __init__(self, mesh: Mesh, axes: frozenset[str], checked: bool, name: str, outer: Body | None = None) -> None:
        self.mesh = mesh
        self.axes = axes
        self.checked = checked
        self.name = name
        self.outer = outer
        above = (outer.axes, outer.typed) if outer is not None else (frozenset[str](), frozenset[str]())
        self.typed = above[1] | (axes - above[0]) if checked else above[1]
        self.foreign = axes - self.typed if checked else self.typed
        self.mapped, self.unlike = (frozenset(), frozenset()) if outer is None else (outer.mapped, outer.unlike)
        self.transport: Transport = transport_named(mesh.transport)
        self.simulated = mesh.transport == "simulation"
        self.calls: Cache[Any, Any] = Cache()  # the steps of collectives by the kinds of their operands
        self.asks = True
        self.uneven = self.empty = self.linear = False

    def mark_uneven(self, empty: bool = False) -> None:
        """Note that the shape of a block may differ from rank to rank, and with ``empty`` that some block is empty."""
        self.uneven = True
        self.empty |= empty
        if self.mesh.transport != "simulation":  # a simulation knows the sizes of all ranks
            UNEVEN.add(self.mesh.transport)

    def sizes(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the sizes of mesh axes."""
        return tuple(self.mesh.shape[axis] for axis in axes)


class _State(threading.local):
    """What runs in this thread. A hot path reads ``vars(state)`` once: an attribute of a thread costs 80 ns."""

    def __init__(self) -> None:
        self.body: Body | None = None
        self.tracker: Any = None
        self.mode: Any = None  # the torch function mode of the body
        self.completes = False  # within a user's function on blocks, whose gradients must exist on all ranks
        self.rank_mapped = False  # within a function that rank_map runs
        self.collectives = 0  # how many this run of a body has come to, if ranks compare them
        self.seeks_mesh: Callable[[Mesh], None] | None = None  # called with the mesh of the first shard_map


state = _State()
#: the running bodies of all threads, by a key of each run; if there is none, `state` is not read
RUNNING: Final[dict[object, Body | None]] = {}


#: the example in an error: the call on a block of rows sharded over x, and the spec of its result
_EXAMPLES: Final = {
    "psum": ("psum(x, 'x')", "P()"),
    "pmean": ("pmean(x, 'x')", "P()"),
    "pmax": ("pmax(x, 'x')", "P()"),
    "pmin": ("pmin(x, 'x')", "P()"),
    "all_gather": ("all_gather(x, 'x', tiled=True, to='invarying')", "P()"),
    "all_gather_into": ("all_gather_into(out, x, 'x')", "P('x')"),
    "psum_scatter": ("psum_scatter(x, 'x', tiled=True)", "P('x')"),
    "psum_scatter_into": ("psum_scatter_into(out, x, 'x')", "P('x')"),
    "all_to_all": ("all_to_all(x, 'x', 1, 0, tiled=True)", "P(None, 'x')"),
    "ragged_all_to_all": ("ragged_all_to_all(x, out, ..., axis_name='x')", "P('x')"),
    "ppermute": ("ppermute(x, 'x', [(0, 1), (1, 0)])", "P('x')"),
    "pshuffle": ("pshuffle(x, 'x', range(axis_size('x')))", "P('x')"),
    "pswapaxes": ("pswapaxes(x, 'x', 0)", "P('x')"),
    "pbroadcast": ("pbroadcast(x, 'x', 0)", "P('x')"),
    "pcast": ("pcast(x, 'x', to='unreduced')", "P(unreduced={'x'})"),
    "axis_index": ("x * axis_index('x')", "P('x')"),
    "axis_size": ("x / axis_size('x')", "P('x')"),
    "rank_map": ("rank_map(torch.sin, x)", "P('x')"),
}


def bound_body(what: str) -> Body:
    """Return the running body.

    Raises:
        AxisError: No body runs.
    """
    body = state.body
    if body is None:
        if state.rank_mapped:
            raise AxisError(
                f"{what} was called inside rank_map, which runs rank by rank and has no mesh axes; call it in the "
                "shard_map body, before or after rank_map"
            )
        if what not in _EXAMPLES:
            raise AxisError(
                f"{what} was called outside a shard_map body, where no mesh axis is bound; call it in a function run "
                "by shard_map: shard_map(f, mesh=mesh, in_specs=..., out_specs=...)"
            )
        call, spec = _EXAMPLES[what]
        raise AxisError(
            f"{what} was called outside a shard_map body, where no mesh axis is bound; call it in a function run by "
            f"shard_map: shard_map(lambda x: {call}, mesh=mesh, in_specs=P('x'), out_specs={spec})(x)"
        )
    return body


def resolve_axes(body: Body, axis_name: Any, what: str) -> tuple[str, ...]:
    """Return the axes as a tuple of bound names.

    Raises:
        AxisError: ``axis_name`` is not a bound axis or a tuple of bound axes.
    """
    if isinstance(axis_name, str):
        axes: tuple[str, ...] = (axis_name,)
    elif isinstance(axis_name, (tuple, list)):
        axes = tuple(axis_name)
    else:
        hint = "; a set has no order, so write a tuple" if isinstance(axis_name, (set, frozenset)) else ""
        raise AxisError(
            f"{what} got {described(axis_name)} for axis_name; expected the name of a mesh axis, such as "
            f"{min(body.axes, default='x')!r}, or a tuple of names in rank order{hint}"
        )
    for axis in axes:
        if not isinstance(axis, str):
            raise AxisError(f"{what} got {described(axis)} in axis_name; name an axis by a string")
        if axis not in body.axes:
            known = quoted(body.mesh.ordered(body.axes))
            hint = ""
            if axis in body.mesh.axis_names:
                hint = f"; {axis!r} is an axis of {body.mesh!r}: to use it, add it to axis_names of shard_map"
            raise AxisError(f"{what} got the axis {axis!r}, but {body.name} has bound only {known}{hint}")
    if len(set(axes)) < len(axes):
        raise AxisError(f"{what} got the axes {axes}, which repeat an axis; name each axis once")
    return axes


def the_mesh(mesh: Mesh | None, what: str) -> Mesh:
    """Return ``mesh``, or the mesh that is set, for the function named ``what``.

    Raises:
        ArgumentError: A body runs, or ``mesh`` is not a mesh.
        MeshError: There is no mesh, or this process is not a member of it.
    """
    check_outside(what)
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ArgumentError(f"{what} got {described(mesh)} for mesh; make one: {mesh_advice(mesh)}")
    return usable_mesh(mesh, what)


def usable_mesh(mesh: Mesh | None, what: str) -> Mesh:
    """Return ``mesh``, or the mesh that is set. Raise `MeshError` without one, or where this process is no member."""
    mesh = mesh or current_mesh()
    if mesh is None:
        raise MeshError(f"{what} has no mesh; pass mesh=make_mesh(...), or set one with set_mesh(mesh)")
    check_member(mesh, what)
    return mesh


def check_outside(what: str) -> None:
    """Raise `ArgumentError` in a body, and `RecordError` while torch traces a graph."""
    refuse_traced(what)
    if state.body is not None:
        raise ArgumentError(
            f"{what} was called inside {state.body.name}, whose values are this rank's blocks; call it outside, and "
            "pass its result as an argument"
        )


def check_member(mesh: Mesh, what: str, error: Exception | None = None) -> None:
    """Raise `MeshError` in a process that is not a member of a mesh. ``error`` is its cause, if there is one."""
    if mesh.coordinate() is None:
        raise MeshError(
            f"{what}: this process is not a member of {mesh!r}; call it on members only: "
            "if mesh.coordinate() is not None: ..."
        ) from error


def refuse_recorded(what: str) -> None:
    """Raise `RecordError` while `jit` records, for the function named ``what``, which needs values."""
    if is_recording():
        raise RecordError(
            f"{what} was called within jit, where values are unknown; call it before or after the jitted function"
        )
