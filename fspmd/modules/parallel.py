"""`parallelize`: a tree of parameters laid out by styles, and the plan that lays out values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fspmd.body import the_mesh
from fspmd.errors import ArgumentError, TreeError
from fspmd.meshes.mesh import Mesh
from fspmd.messages import Failure, described, refuse
from fspmd.modules.paths import leaves_by_name
from fspmd.modules.plans import ParallelPlan, make_plan
from fspmd.modules.styles import Style
from fspmd.placement.device_put import put
from fspmd.placement.scatter import PLANNED, lacks_values
from fspmd.sharded import Sharded
from fspmd.spec import TensorSpec


def parallelize(
    params: Any,
    styles: Mapping[str, Style],
    mesh: Mesh | None = None,
    *,
    axis: str | None = None,
    src_data_rank: int | None = None,
) -> tuple[Any, ParallelPlan]:
    """A tree of parameters laid out by styles, and the plan that lays out values: ``(params, plan)``.

    Args:
        params: Dicts, lists and tuples of tensors, flat (``dict(module.named_parameters())``) or nested. Leaves are
            global plain tensors, which every rank has, or `Sharded` values, which are moved. To plan a module without
            memory, pass tensors on the meta device and a mesh of transport "abstract", or `TensorSpec` leaves.
        styles: A dict from globs on qualified names to styles. ``"layers.*.attn.wq"`` matches a leaf or a subtree;
            ``*`` is one key, ``**`` any number of keys. The last match decides. A leaf without a match is replicated.
        mesh: By default the current mesh.
        axis: The axis of styles that name none; by default the only axis of the mesh.
        src_data_rank: The global rank whose values are taken, as ``src`` of `device_put`. The other ranks pass a tree
            of the same structure, shapes and dtypes, which may be on the meta device. By default each rank cuts its
            blocks from the values that it passes. Nothing moves, so the values must be equal on all ranks.

    A result is an autograd leaf if its parameter is. Pass the plan to `functional_call` as ``styles=plan``. Without
    modules, ``plan[path](f)`` is ``f`` with its arguments and results laid out.

    Raises:
        TreeError: a pattern matches nothing, in ``styles`` or in ``specs``, or a style has no layout. The error names
            all of them. Patterns of `PrepareInput` and `PrepareOutput` may match paths without parameters.
        AxisError, SpecError, ArgumentError: a style has no axis, or does not fit a leaf.
        ShapeError: with ``src_data_rank``, on all ranks alike, a rank passes another tree than the source rank.

    >>> import torch
    >>> from fspmd import ColwiseParallel, make_mesh
    >>> params = {"up": {"weight": torch.ones(8, 6), "bias": torch.ones(8)}, "scale": torch.ones(6)}
    >>> params, plan = parallelize(params, {"up": ColwiseParallel()}, make_mesh((4,), ("x",)))
    >>> print(plan)
    on mesh(x=4)
    leaf       layout       pattern  style
    up.weight  f32[8@x, 6]  up       ColwiseParallel(axis='x')
    up.bias    f32[8@x]     up       ColwiseParallel(axis='x')
    scale      f32[6]       -
    """
    mesh = the_mesh(mesh, "parallelize")
    if not isinstance(params, (Mapping, list, tuple)):
        raise TreeError(f"parallelize got {described(params)} for params; give it a dict of tensors by name")
    named = {name: leaf for name, leaf, _, _ in leaves_by_name(params) if leaf is not None}
    _check_named(named, mesh if src_data_rank is None else None)
    shapes = {name: (tuple(leaf.shape), leaf.dtype) for name, leaf in named.items()}
    plan = make_plan(shapes, styles, mesh, axis, "parallelize")
    specs = plan.specs
    leaves = {(id(leaf), specs[name]): leaf for name, leaf in named.items()}  # a tied leaf is laid out once per spec
    given = [leaf if isinstance(leaf, TensorSpec) else leaf.detach() for leaf in leaves.values()]
    placed = put(given, [partition for _, partition in leaves], mesh, src_data_rank, "parallelize")
    for leaf, x in zip(leaves.values(), placed, strict=True):
        if isinstance(x, Sharded) and leaf.requires_grad:
            x.requires_grad_()
    results = dict(zip(leaves, placed, strict=True))
    return _mapped(params, "", lambda name, leaf: results[id(leaf), specs[name]]), plan


def _check_named(named: Mapping[str, Any], mesh: Mesh | None) -> None:
    """Check that all leaves are tensors, and that they have values. If ``mesh`` is None they need no values."""
    failures = []
    for name, leaf in named.items():
        if not isinstance(leaf, (Tensor, TensorSpec)):
            failures.append(Failure(f"{name!r} is {described(leaf)}, not a tensor", TreeError))
        elif lacks_values(leaf, mesh):
            failures.append(Failure(f"{name!r} is on the meta device, which has no values", ArgumentError, PLANNED))
    if failures:
        refuse("parallelize lays out trees of tensors", failures)


def _mapped(tree: Any, prefix: str, f: Callable[[str, Any], Any]) -> Any:
    """The tree with each leaf that is not None replaced by ``f(name, leaf)``."""
    if isinstance(tree, Mapping):
        return type(tree)({key: _mapped(value, f"{prefix}.{key}", f) for key, value in tree.items()})  # type: ignore[call-arg]
    if isinstance(tree, (list, tuple)):
        values = [_mapped(value, f"{prefix}.{i}", f) for i, value in enumerate(tree)]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree if tree is None else f(prefix[1:], tree)
