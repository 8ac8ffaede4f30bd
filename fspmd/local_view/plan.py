"""The plan of a `shard_map` call: checks, entries and exits, made once per structure of its arguments."""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import optree
from torch import Tensor

from fspmd.body import Body, state, usable_mesh
from fspmd.errors import ArgumentError, AxisError, FspmdError, MeshError, TreeError
from fspmd.foreign import refuse_foreign
from fspmd.local_view.closures import captured_values, held_tensors
from fspmd.local_view.entry import Entry, argument_failure, make_entry, static
from fspmd.local_view.exit import Exits, in_memory_of, make_exit, result_failure, static_failure
from fspmd.local_view.key_orders import check_order
from fspmd.meshes.mesh import Mesh
from fspmd.messages import Failure, counted, described, quoted, refuse
from fspmd.pairs import Call, call
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec
from fspmd.transport import known_values
from fspmd.transport.known_values import ArgumentRow, layout_row
from fspmd.trees import Label, check_keys, has_dicts, labels, order_of, parameter_names, prefix_over
from fspmd.user_code import code_of


@dataclass(slots=True)
class Plan:
    """The body, the entry of each leaf of the arguments, and the exits of results, by their structure."""

    body: Body
    treedef: optree.PyTreeSpec  # of the arguments, with a block in place of each Sharded
    entries: list[Entry]
    labels: list[Label]  # the name of each leaf in messages
    partitions: list[P | None]
    known: list[int]  # the places of leaves that must be equal on all processes: those that are no `Sharded`
    plain: list[tuple[int, int]]  # the places of leaves that are global tensors, and the fewest dims of their specs
    out_specs: Any
    outer_axes: frozenset[str]
    nested: bool
    widen: Call | None  # unchecked bodies: the cast of tensors closed over, whose gradients are summed
    order: list[int] | None  # the place of each leaf if dicts keep their own order; None if it is the same
    keys: int  # a number for the order of keys, in which a body iterates over dicts
    layouts: Callable[[], tuple[ArgumentRow, ...]]  # of the arguments, for messages
    closes: bool = True  # False once a graph has shown that the function closes over no differentiable tensor
    enters_as_is: bool = False  # no entry does anything
    lent: dict[int, frozenset[str]] = field(default_factory=dict)  # axes over which arguments may differ, by place
    exits: dict[Any, Exits] = field(default_factory=dict)  # by the structure of the result

    def refuse_arguments(self, leaves: list[Any]) -> NoReturn:
        """Raise the error of a later call whose leaves do not fit."""
        failures = (
            argument_failure(leaves[i], self.partitions[i], self.labels[i], self.body, self.outer_axes)
            for i, _ in self.plain
        )
        refuse(_MISFITS.format(self.body.name), [failure for failure in failures if failure is not None])

    def watched(self, function: Callable[..., Any], leaves: list[Any], flat: bool) -> Callable[..., Any]:
        """Let `known_values.hear` hear of all that processes must have alike when the body begins, and return the
        function. If nothing checks its writes, it then tells of the replicas that it has written into."""
        hear, mesh, name = known_values.hear, self.body.mesh, self.body.name
        if hear is None or mesh.transport != "process_group":
            return function
        state.collectives = 0
        known_values.hear_layouts(mesh, name, self.layouts())
        if not flat:
            hear(mesh, f"the order of keys in the arguments of {name}", self.keys)
        for i in self.known:
            hear(mesh, f"{self.labels[i]} of {name}", leaves[i])
        named_values = [(f"{label}, which {name} closes over", value) for label, value in captured_values(function)]
        for label, value in named_values:
            hear(mesh, label, value)
        if not self._shares_memory:
            return function
        shared = [(mesh, label, value) for label, value in named_values]
        for i, axes in self.lent.items():
            if copies := mesh.ordered(frozenset(mesh.axis_names) - axes):
                block = leaves[i].local if isinstance(leaves[i], Sharded) else leaves[i]
                shared.append((mesh[copies], f"{self.labels[i]} of {name}", block))
        return _telling_writes(function, hear, [(*row, _writes_into(row[-1])) for row in shared])

    def make_exits(self, function: Callable[..., Any], out: Any) -> Exits:
        """Return the exits for one structure of results, after a check of these results."""
        name, body = self.body.name, self.body
        failures: list[Failure] = []
        specs = prefix_over(self.out_specs, out, "out_specs", "result", failures)
        if failures:
            refuse(f"{name}: out_specs does not match the results", failures)
        header = f"{name}: the results do not fit out_specs"
        if out is None and isinstance(self.out_specs, P):
            text = f"result is None, but its spec is {self.out_specs!r}; return a tensor, or write out_specs=None"
            refuse(header, [Failure(text, ArgumentError)])
        leaves, treedef = optree.tree_flatten(out, none_is_leaf=True)
        check_keys(treedef)
        paths = labels(treedef, "result")
        for x, spec, path in zip(leaves, specs, paths, strict=True):
            failure = static_failure(x, path) if spec is None else result_failure(x, spec, path, body, self.outer_axes)
            if failure is not None:
                failures.append(failure)
        if failures:
            try:
                refuse(header, failures)
            except FspmdError as error:
                code = code_of(function)
                place = "" if code is None else f", which begins at {code.co_filename}:{code.co_firstlineno}"
                error.add_note(f"these results are those of {name}{place}")
                raise
        kinds = [(spec, isinstance(x, Sharded)) for x, spec in zip(leaves, specs, strict=True)]
        exits = {kind: make_exit(kind[0], body, self.outer_axes, self.nested, kind[1]) for kind in set(kinds)}
        may_share = self._shares_memory and any(each.axes for each in exits.values())
        outside = in_memory_of(leaves, held_tensors(function)) if may_share else []
        return Exits(header, paths, [exits[kind] for kind in kinds], self.lent, outside)

    @property
    def _shares_memory(self) -> bool:
        """Whether blocks that nothing checks lie in the memory of global values. In a simulation no two ranks share."""
        return not (self.nested or self.body.checked or self.body.simulated)


def _writes_into(x: Any) -> int:
    return x._version if isinstance(x, Tensor) and not x.is_inference() else 0


def _telling_writes(
    function: Callable[..., Any],
    hear: Callable[[Mesh, str, Any], None],
    shared: list[tuple[Mesh, str, Any, int]],
) -> Callable[..., Any]:
    """Return the function, which tells of the values that it has written into."""

    @functools.wraps(function, updated=())
    def told(*args: Any, **kwargs: Any) -> Any:
        out = function(*args, **kwargs)
        for mesh, label, value, writes in shared:
            if _writes_into(value) != writes:
                hear(mesh, f"{label}, after a write into it", value)
        return out

    return told


_MISFITS = "{}: the arguments do not fit in_specs"


def make_plan(
    f: Callable[..., Any],
    args: tuple[Any, ...],
    names: tuple[str, ...],
    mesh: Mesh | None,
    in_specs: Any,
    out_specs: Any,
    axis_names: frozenset[str] | None,
    checked: bool,
    outer: Body | None,
) -> Plan:
    """Return the plan of a call, after all checks that are possible before the body runs."""
    name = f"shard_map({_name_of(f)})"
    mesh = _resolve_mesh(mesh, outer, name)
    outer_axes = outer.axes if outer is not None else frozenset()
    new_axes = _resolve_axes(mesh, axis_names, outer_axes, name)
    full_mesh = outer.mesh if outer is not None else mesh
    body = Body(full_mesh, outer_axes | new_axes, checked, name, outer)
    _check_call(f, args, names, name)
    roots = [*parameter_names(f, len(args) - len(names)), *names]
    specs = _specs_of(f, args, names, in_specs, roots, name)
    leaves, treedef = optree.tree_flatten(args, none_is_leaf=True)
    check_keys(treedef)
    names_of_leaves = labels(treedef, roots)
    rows = list(zip(leaves, specs, names_of_leaves, strict=True))
    _check_meshes(rows, mesh, name)
    results = [argument_failure(leaf, spec, label, body, outer_axes) for leaf, spec, label in rows]
    if failures := [failure for failure in results if failure is not None]:
        refuse(_MISFITS.format(name), failures)
    layouts = [TensorSpec(full_mesh, p, x.shape, x.dtype) for x, p, _ in rows if p is not None and type(x) is Sharded]
    if not all(layout.even for layout in layouts):
        body.mark_uneven()
    for x in held_tensors(f, of_modules=False):
        refuse_foreign(x, f"{name} closes over")
    entries = [make_entry(leaf, spec, label, body, new_axes, outer is not None) for leaf, spec, label in rows]
    plain = [
        (i, len(spec.entries))
        for i, (leaf, spec, _) in enumerate(rows)
        if spec is not None and not isinstance(leaf, Sharded)
    ]
    order = order_of(treedef)
    if has_dicts(treedef):
        check_order((full_mesh,), name, f, order, names_of_leaves)
    return Plan(
        body=body,
        treedef=treedef,
        entries=entries,
        labels=names_of_leaves,
        partitions=specs,
        known=[i for i, leaf in enumerate(leaves) if not isinstance(leaf, Sharded)],
        plain=plain,
        out_specs=out_specs,
        outer_axes=outer_axes,
        nested=outer is not None,
        widen=None if checked else call("invariant_to_varying", full_mesh, full_mesh.ordered(new_axes)),
        order=order,
        keys=zlib.crc32(repr(order).encode()),
        layouts=_layouts(rows, name),
        enters_as_is=all(entry is static for entry in entries),
        lent=_lent(specs) if outer is None and not checked and not body.simulated else {},
    )


def _layouts(rows: list[tuple[Any, Any, Label]], name: str) -> Callable[[], tuple[ArgumentRow, ...]]:
    """Return what gives the layouts of arguments: those they have, and those that the body gets. It makes them once."""
    given = [(label, x.spec if isinstance(x, Sharded) else None, p) for x, p, label in rows if p is not None]
    return functools.cache(lambda: tuple(layout_row(str(label), name, layout, p) for label, layout, p in given))


def _lent(specs: list[P | None]) -> dict[int, frozenset[str]]:
    """Return the axes over which each argument may differ, by place. In a simulation no two ranks share a block."""
    return {i: spec.axes | spec.unreduced for i, spec in enumerate(specs) if spec is not None}


def _name_of(f: Any) -> str:
    while isinstance(f, functools.partial):
        f = f.func
    return str(getattr(f, "__name__", type(f).__name__))


# --- mesh and axes --------------------------------------------------------------------------------------------------


def _resolve_mesh(mesh: Mesh | None, outer: Body | None, name: str) -> Mesh:
    if outer is not None and mesh is not None and not outer.mesh.contains(mesh):
        raise MeshError(
            f"{name} was given {mesh!r} inside a body on {outer.mesh!r}; a nested shard_map runs on the mesh of the "
            "enclosing body: leave out mesh="
        )
    return usable_mesh(mesh or (None if outer is None else outer.mesh), name)


def _check_meshes(rows: list[tuple[Any, Any, Label]], mesh: Mesh, name: str) -> None:
    failures = [
        Failure(f"{label} is {leaf!r}", MeshError, "move it first: device_put(device_get(x), spec, mesh=mesh)")
        for leaf, _, label in rows
        if isinstance(leaf, Sharded) and leaf.spec.mesh != mesh and set(leaf.spec.mesh.ranks) != set(mesh.ranks)
    ]
    if failures:
        refuse(f"{name} runs on {mesh!r}, but some arguments lie on other ranks", failures)


def _resolve_axes(mesh: Mesh, wanted: frozenset[str] | None, bound: frozenset[str], name: str) -> frozenset[str]:
    free = frozenset(mesh.axis_names) - bound
    if wanted is None:
        if not free:
            raise AxisError(
                f"{name}: all axes of {mesh!r} are bound by the enclosing body; call the function without shard_map"
            )
        return free
    if unknown := sorted(wanted - set(mesh.axis_names)):
        raise AxisError(f"{name}: axis_names has {quoted(unknown)}, but {mesh!r} has only {quoted(mesh.axis_names)}")
    if again := sorted(wanted & bound):
        use = f"name others: {quoted(sorted(free))}" if free else "call the function without shard_map"
        raise AxisError(f"{name}: axis_names has {quoted(again)}, which the enclosing body has bound; {use}")
    return wanted


# --- calls and specs ------------------------------------------------------------------------------------------------


def _check_call(f: Any, args: tuple[Any, ...], names: tuple[str, ...], name: str) -> None:
    """Raise `ArgumentError` if the arguments do not fit the signature of the function."""
    try:
        signature = inspect.signature(f)
    except TypeError:
        return
    except ValueError:
        if isinstance(f, functools.partial) and _has_signature(f.func):
            raise ArgumentError(
                f"{name}: functools.partial binds arguments that {_name_of(f)} does not have; leave them out"
            ) from None
        return
    positional = len(args) - len(names)
    try:
        signature.bind(*args[:positional], **dict(zip(names, args[positional:], strict=True)))
    except TypeError as error:
        shown = ", ".join(signature.parameters)
        raise ArgumentError(
            f"{name} was called with arguments that do not fit {_name_of(f)}({shown}): {error}"
        ) from None


def _has_signature(f: Any) -> bool:
    """Return whether a function has a signature. Functions written in C often have none."""
    try:
        return inspect.signature(f) is not None
    except (TypeError, ValueError):
        return False


def _specs_of(
    f: Any, args: tuple[Any, ...], names: tuple[str, ...], in_specs: Any, roots: list[str], name: str
) -> list[Any]:
    """Return the spec of each leaf of the arguments."""
    if isinstance(in_specs, P) or in_specs is None:
        return [in_specs] * optree.tree_structure(args, none_is_leaf=True).num_leaves
    if not isinstance(in_specs, (tuple, list)):
        example = f"({', '.join(['P()'] * len(args))}{',' if len(args) == 1 else ''})"
        raise TreeError(
            f"{name} got {described(in_specs)} for in_specs; it is a tuple with one entry per argument, such as "
            f"in_specs={example}, or one P for all"
        )
    places = list(range(len(args)))
    if names:
        places = _places_by_name(f, len(args) - len(names), names, len(in_specs), name)
    elif len(in_specs) != len(args):
        hint = "write one spec per argument"
        if len(args) == 1 and isinstance(args[0], (tuple, list)) and len(args[0]) == len(in_specs):
            hint = f"for the entries of the one argument {roots[0]} write in_specs=(in_specs,)"
        elif left_out := _left_out(f, len(args), len(in_specs)):
            hint += f", or pass {quoted(left_out)} too"
        given = f"{counted(len(args), 'argument')}, but in_specs has {counted(len(in_specs), 'entry')}"
        raise TreeError(f"{name} was called with {given}; {hint}")
    failures: list[Failure] = []
    specs: list[Any] = []
    for place, root, arg in zip(places, roots, args, strict=True):
        specs += prefix_over(in_specs[place], arg, f"in_specs[{place}]", root, failures)
    if failures:
        refuse(f"{name}: in_specs does not match the arguments", failures)
    return specs


def _left_out(f: Any, given: int, wanted: int) -> list[str]:
    """Return the parameters that have a spec but were not given."""
    try:
        return list(inspect.signature(f).parameters)[given:wanted]
    except (TypeError, ValueError):
        return []


def _places_by_name(f: Any, positional: int, names: tuple[str, ...], count: int, name: str) -> list[int]:
    order = list(inspect.signature(f).parameters)
    places = [*range(positional), *(order.index(n) if n in order else len(order) for n in names)]
    if beyond := [i for i in places if i >= count]:
        missing = order[beyond[0]] if beyond[0] < len(order) else names[-1]
        raise TreeError(
            f"{name}: in_specs has {counted(count, 'entry')}, none for the parameter {missing!r}; write one spec per "
            "parameter, in their order"
        )
    return places
