"""Views of moved values: where torch gives a view, moving an operand makes a copy, which must not be written into."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from fspmd.errors import VarianceError

_COPY: Final = "_fspmd_copy"


def as_copies(out: Any, name: str) -> Any:
    """The results of a function that gives views, on an operand that had to be moved."""
    for one in (out,) if isinstance(out, Tensor) else out:
        setattr(one, _COPY, name)
    return out


def refuse_copy(block: Tensor, name: str) -> None:
    """Raise `VarianceError` for a write into a block that is such a copy, or a view of one."""
    made_by = getattr(block, _COPY, None) or getattr(block._base, _COPY, None)
    if made_by is not None:
        raise VarianceError(
            f"{name} writes into a copy: {made_by} gave no view, since its operand had to be moved to "
            "another layout; write into the operand itself, x[...] = value, or reshard it before the view is taken"
        )
