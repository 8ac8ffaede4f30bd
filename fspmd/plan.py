"""What a `shard_map` call does, decided once per structure of its arguments: checks, entries, and exits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import optree

from fspmd.body import Body
from fspmd.entry import Entry, complaint, make_entry
from fspmd.errors import AxisError, MeshError, SpecError, TreeError, join_failures
from fspmd.exit import Exit, make_exit
from fspmd.hooks import install
from fspmd.mesh import Mesh, current_mesh
from fspmd.sharded import Sharded
from fspmd.spec import P
from fspmd.trees import broadcast_prefix, key_path


@dataclass(slots=True)
class Plan:
    """The body, how each leaf enters it, and how each output leaf leaves it (by the tree of outputs)."""

    body: Body
    treedef: optree.PyTreeSpec  # of the arguments, with a block in place of each Sharded
    entries: list[Entry]
    out_specs: Any
    outer_axes: frozenset[str]
    nested: bool
    simulated: bool
    searched: bool  # no closed-over tensor has a gradient that types would have summed
    exits: dict[Any, list[Exit]] = field(default_factory=dict)  # by the structure of the result

    def make_exits(self, out: Any) -> list[Exit]:
        """The exits for one structure of outputs."""
        treedef = optree.tree_structure(out, none_is_leaf=True)
        name = self.body.name
        specs = broadcast_prefix(
            self.out_specs,
            out,
            "out_specs",
            "the result",
            f"{name}: out_specs does not match what the function returned",
        )
        failures = [
            f"result{key_path(path)} is {x!r}: a body returns blocks; mark a static result with None in out_specs"
            for path, x, spec in zip(
                optree.tree_paths(out, is_leaf=_is_sharded, none_is_leaf=True),
                optree.tree_leaves(out, is_leaf=_is_sharded, none_is_leaf=True),
                specs,
                strict=True,
            )
            if isinstance(x, Sharded) and spec is not None
        ]
        new_axes = self.body.axes - self.outer_axes
        for path, spec in zip(treedef.paths(), specs, strict=True):
            if spec is None:
                continue
            if wrong := _axes_complaint(spec, self.body, new_axes):
                failures.append(f"result{key_path(path)}: {wrong}")
        if failures:
            raise SpecError(join_failures(f"{name}: out_specs is wrong", failures))
        return [
            make_exit(spec, self.body, self.outer_axes, self.nested, f"{name} returned result{key_path(path)}")
            for path, spec in zip(treedef.paths(), specs, strict=True)
        ]


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
    """Check everything that can be checked before the body runs."""
    install()
    function = getattr(f, "__name__", type(f).__name__)
    name = f"shard_map({function})"
    mesh = _resolve_mesh(mesh, outer, args, name)
    outer_axes = outer.axes if outer is not None else frozenset()
    new_axes = _resolve_axes(mesh, axis_names, outer_axes, name)
    whole = outer.mesh if outer is not None else mesh
    body = Body(whole, outer_axes | new_axes, checked, name)
    specs = _specs_of(f, args, names, in_specs, name)
    paths = _parameter_paths(f, args, names)
    leaves = optree.tree_leaves(args, is_leaf=_is_sharded, none_is_leaf=True)
    failures = []
    for leaf, spec, path in zip(leaves, specs, paths, strict=True):
        if spec is None:
            continue
        wrong = _axes_complaint(spec, body, new_axes) or complaint(leaf, spec, body, outer is not None)
        if wrong:
            failures.append(f"{path}{_shape(leaf)}: {wrong}")
    if failures:
        raise SpecError(join_failures(f"{name}: in_specs does not fit the arguments", failures))
    for leaf, spec in zip(leaves, specs, strict=True):
        if isinstance(leaf, Sharded) and spec is not None and not leaf.spec.with_partition(spec).even:
            body.uneven = True
    entries = [
        make_entry(leaf, spec, body, new_axes, outer is not None, f"{name}: {path}")
        for leaf, spec, path in zip(leaves, specs, paths, strict=True)
    ]
    blocks = optree.tree_structure(args, is_leaf=_is_sharded, none_is_leaf=True)
    return Plan(
        body, blocks, entries, out_specs, outer_axes, outer is not None, mesh.transport == "simulation", checked
    )


def _is_sharded(x: Any) -> bool:
    return isinstance(x, Sharded)


def _shape(leaf: Any) -> str:
    shape = getattr(leaf, "shape", None)
    return f" of shape {tuple(shape)}" if shape is not None else ""


def _resolve_mesh(mesh: Mesh | None, outer: Body | None, args: Any, name: str) -> Mesh:
    found = mesh or (outer.mesh if outer is not None else current_mesh())
    if found is None:
        raise MeshError(f"{name} has no mesh; pass mesh=make_mesh(...), or set one with set_mesh(mesh)")
    if outer is not None and not outer.mesh.contains(found):
        raise MeshError(
            f"{name} was given {found!r} inside a body on {outer.mesh!r}; a nested shard_map runs on the same mesh or a "
            "slice of it: leave out mesh="
        )
    if found.coordinate() is None:
        raise MeshError(
            f"{name}: this process is not a member of {found!r}; call it on members only: "
            "if mesh.coordinate() is not None: ..."
        )
    for x in optree.tree_leaves(args, is_leaf=_is_sharded, none_is_leaf=True):
        if isinstance(x, Sharded) and x.spec.mesh != found and set(x.spec.mesh.ranks) != set(found.ranks):
            raise MeshError(
                f"{name} runs on {found!r} but was given {x!r}, on other ranks; move it first: "
                "device_put(device_get(x), spec, mesh=mesh)"
            )
    return found


def _resolve_axes(mesh: Mesh, wanted: frozenset[str] | None, bound: frozenset[str], name: str) -> frozenset[str]:
    free = frozenset(mesh.axis_names) - bound
    known = ", ".join(map(repr, mesh.axis_names))
    if wanted is None:
        if not free:
            raise AxisError(f"{name}: all axes of {mesh!r} are bound already; call the function without shard_map")
        return free
    if unknown := sorted(wanted - set(mesh.axis_names)):
        raise AxisError(f"{name}: axis_names has {unknown}, but {mesh!r} has the axes {known}; use some of those")
    if again := sorted(wanted & bound):
        raise AxisError(
            f"{name}: axis_names has {again}, bound by the enclosing body already; name free axes: {sorted(free)}"
        )
    return wanted


def _axes_complaint(spec: Any, body: Body, manual: frozenset[str]) -> str:
    """A spec of a body names its new axes and no others."""
    if not isinstance(spec, P):
        return f"expected a P, got {spec!r} of type {type(spec).__name__}"
    if unknown := sorted(spec.mentioned - set(body.mesh.axis_names)):
        return (
            f"{spec!r} names the axis {', '.join(map(repr, unknown))}, but {body.mesh!r} has the axes "
            f"{', '.join(map(repr, body.mesh.axis_names))}; use one of those"
        )
    if other := sorted(spec.mentioned - manual):
        return (
            f"{spec!r} names the axis {', '.join(map(repr, other))}, which is not manual here (manual: {sorted(manual)}); "
            "leave it out of the spec, or add it to axis_names"
        )
    return ""


def _specs_of(f: Any, args: tuple[Any, ...], names: tuple[str, ...], in_specs: Any, name: str) -> list[Any]:
    specs = tuple(in_specs) if isinstance(in_specs, list) else in_specs
    if isinstance(specs, tuple):
        if names:
            specs = _specs_by_name(f, len(args) - len(names), names, specs, name)
        elif len(specs) != len(args):
            raise TreeError(
                f"{name} was called with {len(args)} arguments, but in_specs has {len(specs)} entries; write one spec "
                "per argument"
            )
    elif not isinstance(specs, P) and specs is not None:
        raise TreeError(
            f"{name} got in_specs={in_specs!r} of type {type(in_specs).__name__}; in_specs is a tuple with one entry per "
            "argument, in_specs=(spec,), or one P for all"
        )
    return broadcast_prefix(specs, args, "in_specs", "the arguments", f"{name}: in_specs does not match the arguments")


def _specs_by_name(
    f: Any, positional: int, names: tuple[str, ...], specs: tuple[Any, ...], name: str
) -> tuple[Any, ...]:
    order = list(inspect.signature(f).parameters)
    places = [*range(positional), *(order.index(n) if n in order else len(order) for n in names)]
    if beyond := [i for i in places if i >= len(specs)]:
        raise TreeError(
            f"{name}: in_specs has {len(specs)} entries, none for the parameter "
            f"{order[beyond[0]] if beyond[0] < len(order) else names[-1]!r}; write one spec per parameter"
        )
    return tuple(specs[i] for i in places)


def _parameter_paths(f: Any, args: tuple[Any, ...], names: tuple[str, ...]) -> list[str]:
    """``w['bias']`` for every leaf, by the function's own parameter names."""
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    labels = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    positional = len(args) - len(names)
    labels = [labels[i] if i < len(labels) else f"args[{i}]" for i in range(positional)] + list(names)
    found = []
    for label, arg in zip(labels, args, strict=True):
        paths = optree.tree_paths(arg, is_leaf=_is_sharded, none_is_leaf=True)
        found += [label + key_path(path) for path in paths]
    return found
