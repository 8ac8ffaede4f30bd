"""Views of moved values: where torch gives a view, moving an operand makes a copy, which must not be written into."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from fspmd.errors import VarianceError

_COPY: Final = "_fspmd_copy"


def as_copies(out: Any, name: str, own: bool) -> Any:
    """The results of a function that gives views, on an operand that had to be moved.

    Views of them are copies too, and known by what they are views of: the moved operand where that is their own, or
    else a copy made here.
    """
    if isinstance(out, Tensor):
        return _as_copy(out, name, own)
    return type(out)([_as_copy(one, name, own) for one in out])


def _as_copy(x: Tensor, name: str, own: bool) -> Tensor:
    if x._base is not None:
        if own:
            setattr(x._base, _COPY, name)
        else:
            x = x.clone()
    setattr(x, _COPY, name)
    return x


def handed_on(out: Any, x: Any) -> Any:
    """What a function gives of a simulated block, rank by rank: copies where the block is one."""
    made_by = getattr(x, _COPY, None)
    if made_by is not None:
        for one in (out,) if isinstance(out, Tensor) else out:
            setattr(one, _COPY, made_by)
    return out


def refuse_copy(block: Tensor, name: str) -> None:
    """Raise `VarianceError` for a write into a block that is such a copy, or a view of one."""
    made_by = getattr(block, _COPY, None) or getattr(block._base, _COPY, None)
    if made_by is not None:
        raise VarianceError(
            f"{name} writes into a copy: {made_by} gave no view, since its operand had to be moved to "
            "another layout; write into the operand itself, x[...] = value, or reshard it before the view is taken"
        )
