"""`checkpoint`: recomputation in the body of the first run, with its axes, its types and its random draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fspmd.autodiff.leaves import check_function
from fspmd.body import state
from fspmd.torch_internals import transforms_active
from fspmd.wrappers import wraps

Q = ParamSpec("Q")
R = TypeVar("R")


def checkpoint(f: Callable[Q, R]) -> Callable[Q, R]:
    """``f`` without its intermediate values kept for backward, which computes them again.

    Backward repeats the collectives of forward, and its random draws. Arguments are plain tensors and `Sharded` values,
    in a body or outside.

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
    """``f(*args, **kwargs)``, of which only the inputs are kept.

    Each run has its own casts, which are freed at its end. `local_view/hooks.py` makes later runs run in the body.
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
