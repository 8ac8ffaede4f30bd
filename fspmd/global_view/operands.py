"""Operands of a torch function, moved and cast to lie as its plan has them."""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.copies import moved_from
from fspmd.global_view.outcomes import Place, at
from fspmd.global_view.propagate import OpPlan
from fspmd.pairs import Call, apply, lend

_transforms_active = torch._C._are_functorch_transforms_active
_grad_enabled = torch.is_grad_enabled
_CASTS: Final = "_fspmd_casts"


class _Casts(dict[Call, tuple["weakref.ref[Tensor]", int]]):
    """The casts of a tensor that are alive, and its version when they were made; a copy of the tensor has none."""

    def __reduce__(self) -> Any:
        return _Casts, ()

    def __deepcopy__(self, memo: Any) -> _Casts:
        return _Casts()


def move_operands(plan: OpPlan, blocks: list[Any]) -> list[Tensor]:
    """Move them; gives the slices of what will have a gradient, whose uses share one gather in backward."""
    found = []
    for place, steps in plan.moves:
        x = before = at(blocks, place)
        for step in steps:
            if step.pair.name == "slice" and x.requires_grad and _grad_enabled():
                x = _cast(x, step)
                found.append(x)
            else:
                x = apply(x, step)
        if plan.copies:
            moved_from(before, x)
        _set(blocks, place, x)
    return found


def cast_operands(plan: OpPlan, blocks: list[Any]) -> list[Tensor]:
    """Cast what will have a gradient; gives the casts."""
    found: list[Tensor] = []
    follows = _transforms_active()
    if not (follows or _grad_enabled()):
        return found
    for place, casts in plan.casts:
        x = blocks[place] if type(place) is int else at(blocks, place)
        if follows or x.requires_grad:
            for cast in casts:
                x = _cast(x, cast)
            if type(place) is int:
                blocks[place] = x
            else:
                _set(blocks, place, x)
            found.append(x)
    return found


def keep(casts: list[Tensor], out: Any) -> None:
    """Alive as long as the graph is, and no longer."""
    for one in (out,) if isinstance(out, Tensor) else out:
        node: Any = one.grad_fn
        if node is not None:
            node.metadata[_CASTS] = casts


def _cast(x: Tensor, cast: Call) -> Tensor:
    """An invariant operand beside a varying one: one cast serves all uses whose graph is alive, forward for free."""
    known = x.__dict__.get(_CASTS)
    if known is not None and (found := known.get(cast)) is not None and found[1] == x._version:
        y: Tensor | None = found[0]()
        if y is not None:
            return y
    y = lend(x, cast)
    if not _transforms_active():
        if known is None:
            known = _Casts()
            setattr(x, _CASTS, known)
        known[cast] = weakref.ref(y), x._version
    return y


def _set(blocks: list[Any], place: Place, x: Tensor) -> None:
    if isinstance(place, tuple):
        blocks[place[0]] = [*blocks[place[0]]]  # it may be the caller's own list
        blocks[place[0]][place[1]] = x
    else:
        blocks[place] = x
