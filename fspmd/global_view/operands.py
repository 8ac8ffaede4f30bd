"""The operands of a torch function: found among its arguments, then moved and cast as its plan says."""

from __future__ import annotations

from typing import Any, Final

import optree
import torch
from torch import Tensor

from fspmd.global_view.op_plan import OpPlan
from fspmd.meshes.mesh import Mesh
from fspmd.ops.signatures import Place, at
from fspmd.redistribution.shared_moves import along, cast_once
from fspmd.remembered import holds_casts
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec
from fspmd.torch_internals import transforms_active

_grad_enabled = torch.is_grad_enabled
#: common types of arguments that contain no other values
_LEAVES: Final = frozenset((Sharded, Tensor, int, float, bool, str, type(None), torch.dtype))


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the tensors and `Sharded` values of a call."""
    leaves: list[Any] = []
    for arg in (*args, *kwargs.values()):
        if type(arg) is list or type(arg) is tuple:
            leaves += arg
        else:
            leaves.append(arg)
    if not _LEAVES.issuperset(map(type, leaves)):
        leaves = optree.tree_leaves((args, kwargs), none_is_leaf=True)
    return [x for x in leaves if isinstance(x, Tensor)]


def sharded_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Sharded]:
    """Return all `Sharded` values of a call, at any depth."""
    tree: Any = (args, kwargs)
    return [x for x in optree.tree_leaves(tree) if isinstance(x, Sharded)]


def places_of(args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh) -> list[tuple[Place, TensorSpec]]:
    """Return the places and specs of the tensors among the arguments, and in lists among them."""
    operands: list[tuple[Place, TensorSpec]] = []
    for i, arg in enumerate((*args, *kwargs.values())):
        if isinstance(arg, Tensor):
            operands.append((i, spec_of(arg, mesh)))
        elif isinstance(arg, (list, tuple)):
            operands += [((i, k), spec_of(item, mesh)) for k, item in enumerate(arg) if isinstance(item, Tensor)]
    return operands


def spec_of(x: Sharded | Tensor, mesh: Mesh) -> TensorSpec:
    """Return the spec of a value; a plain tensor is replicated on the mesh."""
    return x.spec if isinstance(x, Sharded) else TensorSpec(mesh, P(), x.shape, x.dtype)


def move_operands(plan: OpPlan, blocks: list[Any]) -> list[Tensor]:
    """Move operands; return the slices of operands with a gradient, whose uses share one gather in backward."""
    slices: list[Tensor] = []
    for place, legs in plan.moves:
        x = at(blocks, place)
        for leg in legs:
            x = along(x, leg, slices, plan.copies != place)
        _set(blocks, place, x)
    return slices


def cast_operands(plan: OpPlan, blocks: list[Any]) -> list[Tensor]:
    """Cast operands that will have a gradient; return the casts that the autograd graph must keep alive."""
    kept: list[Tensor] = []
    follows = transforms_active()
    if not (follows or _grad_enabled()):
        return kept
    for place, casts in plan.casts:
        x = blocks[place] if type(place) is int else at(blocks, place)
        if follows or x.requires_grad:
            is_held = holds_casts(x)
            for cast in casts:
                x = cast_once(x, cast)
            if type(place) is int:
                blocks[place] = x
            else:
                _set(blocks, place, x)
            if not (is_held and len(casts) == 1):
                kept.append(x)
    return kept


def _set(blocks: list[Any], place: Place, x: Tensor) -> None:
    if isinstance(place, tuple):
        blocks[place[0]] = [*blocks[place[0]]]  # it may be the caller's own list
        blocks[place[0]][place[1]] = x
    else:
        blocks[place] = x
