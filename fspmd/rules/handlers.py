"""Functions on `Sharded` values that make new ones or draw random numbers: each a function of its own, not a row."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch

from fspmd.op_kinds import name_of
from fspmd.rules.draws import DRAWS
from fspmd.rules.dropouts import DROPOUTS
from fspmd.rules.likes import LIKES, Handler
from fspmd.sharded import above

HANDLERS: Final[dict[str, Handler]] = {**LIKES, **DRAWS, **DROPOUTS}


def handler_of(func: Any) -> Handler | None:
    """What runs in place of a torch function when it is called with `Sharded` values; None where a rule decides."""
    if getattr(func, "__module__", None) == "torch.nn.init":
        return functools.partial(_as_written, func)
    if func is torch.autograd.grad:
        return above.gradients
    return HANDLERS.get(name_of(func))


def _as_written(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of ``torch.nn.init``, which calls methods of its tensor alone."""
    with torch._C.DisableTorchFunction():
        return func(*args, **kwargs)
