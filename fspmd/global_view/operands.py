"""Operands of a torch function, moved and cast to lie as its plan has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fspmd.global_view.propagate import OpPlan
from fspmd.ops.signatures import Place, at
from fspmd.redistribution.shared_moves import along, cast_once
from fspmd.remembered import holds_casts
from fspmd.torch_internals import transforms_active

_grad_enabled = torch.is_grad_enabled


def move_operands(plan: OpPlan, blocks: list[Any]) -> list[Tensor]:
    """Move them; gives the slices of what will have a gradient, whose uses share one gather in backward."""
    found: list[Tensor] = []
    for place, legs in plan.moves:
        x = at(blocks, place)
        for leg in legs:
            x = along(x, leg, found, plan.copies != place)
        _set(blocks, place, x)
    return found


def cast_operands(plan: OpPlan, blocks: list[Any]) -> list[Tensor]:
    """Cast what will have a gradient; gives the casts that the graph is to keep."""
    found: list[Tensor] = []
    follows = transforms_active()
    if not (follows or _grad_enabled()):
        return found
    for place, casts in plan.casts:
        x = blocks[place] if type(place) is int else at(blocks, place)
        if follows or x.requires_grad:
            held = holds_casts(x)
            for cast in casts:
                x = cast_once(x, cast)
            if type(place) is int:
                blocks[place] = x
            else:
                _set(blocks, place, x)
            if not (held and len(casts) == 1):
                found.append(x)
    return found


def _set(blocks: list[Any], place: Place, x: Tensor) -> None:
    if isinstance(place, tuple):
        blocks[place[0]] = [*blocks[place[0]]]  # it may be the caller's own list
        blocks[place[0]][place[1]] = x
    else:
        blocks[place] = x
