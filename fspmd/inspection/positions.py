"""The position of this rank in its program: the collective that runs, and the user's line. It is read off the stack."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, Final

from fspmd.inspection.causes import Cause, trace
from fspmd.messages import quoted
from fspmd.pairs import Call, StandIn, land
from fspmd.spec import describe
from fspmd.torch_internals import current_autograd_node
from fspmd.user_code import is_library

#: the name under which a replay has the causes of its steps, by the lines of its code
CAUSES: Final = "fspmd_causes"


def collective_text(kind: str, mesh: Any, axes: tuple[str, ...], dtype: Any, shape: Any) -> str:
    """``psum over 'x' of mesh(x=4), f32[4]``."""
    return f"{kind} over {quoted(axes or mesh.axis_names)} of {mesh!r}, {describe(dtype, shape)}"


class Rendezvous:
    """A wait for other ranks that is no collective. Functions that wait for it name it ``agreement``."""

    def __init__(self, what: str, ranks: tuple[int, ...]) -> None:
        self.what, self.ranks = what, ranks


def position(innermost: FrameType | None = None) -> tuple[str, tuple[int, ...]]:
    """The text of the collective that this thread runs, and the ranks of its group; () if it is of no mesh.

    ``innermost``: the innermost frame of another thread, about which to tell.
    """
    frame: FrameType | None = innermost or sys._getframe(1)
    call: Call | None = None
    replayed: Cause | None = None
    forward, operand = "", None
    while frame is not None and is_library[frame.f_code.co_filename]:
        named = frame.f_locals
        found = named["flight"].trip.call if frame.f_code is land.__code__ else named.get("call", named.get("self"))
        if isinstance(found, StandIn) and not forward:
            line = getattr(found.by, "where", "")  # a recorder is at no line
            forward = line and f", for {line}"
        if call is None and isinstance(found, Call):
            call, operand = found, named.get("x")
        replayed = replayed or frame.f_globals.get(CAUSES, {}).get(frame.f_lineno)
        if isinstance(agreement := named.get("agreement"), Rendezvous):
            return f"{agreement.what} ({trace(innermost).cause.where})", agreement.ranks
        frame = frame.f_back
    cause = replayed or trace(innermost).cause
    backward = current_autograd_node() is not None
    here = f" ({'backward, ' * backward}{cause.where}{forward if backward else ''})"
    if call is None:
        return f"{cause.what}{here}", ()
    axes = call.axes or call.mesh.axis_names
    if operand is None:
        return f"{call.pair.name} over {quoted(axes)} of {call.mesh!r}{here}", call.mesh.group_ranks(axes)
    text = collective_text(call.pair.name, call.mesh, call.axes, operand.dtype, tuple(operand.shape))
    return text + here, call.mesh.group_ranks(axes)
