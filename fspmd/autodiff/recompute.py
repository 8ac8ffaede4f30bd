"""Checkpointing that recomputes inside the body it came from: axes bound, types tracked, random draws repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fspmd.autodiff.leaves import check_function
from fspmd.body import state
from fspmd.torch_internals import transforms_active
from fspmd.wrapping import wraps

Q = ParamSpec("Q")
R = TypeVar("R")


def checkpoint(f: Callable[Q, R]) -> Callable[Q, R]:
    """``f``, recomputed in backward instead of keeping its intermediates.

    Backward repeats the collectives of forward, and its random draws. Plain and `Sharded` arguments, in a body or not.

    Raises:
        ArgumentError: ``f`` is no function.

    >>> from fspmd import grad
    >>> def layer(w, x):
    ...     return torch.tanh(x @ w).sum()
    >>> grad(checkpoint(layer))(torch.zeros(2, 1), torch.ones(3, 2))
    tensor([[3.],
            [3.]])
    """

    check_function(f, "checkpoint")

    @wraps(f)
    def recomputed(*args: Q.args, **kwargs: Q.kwargs) -> R:
        if transforms_active() or not torch.is_grad_enabled():
            return f(*args, **kwargs)
        return _run_checkpointed(f, args, kwargs)  # type: ignore[no-any-return]

    return recomputed


def _run_checkpointed(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``f(*args, **kwargs)`` keeping only its inputs; each run has casts of its own, freed with it.

    That later runs take place in the body is the doing of `hooks`.
    """

    def run(*inputs: Any) -> Any:
        tracker = state.tracker
        if tracker is None:
            return f(*inputs, **kwargs)
        casts, tracker.casts = tracker.casts, {}
        try:
            return f(*inputs, **kwargs)
        finally:
            tracker.casts = casts

    return torch_checkpoint(run, *args, use_reentrant=False)
