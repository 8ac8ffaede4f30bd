"""Checkpointing that recomputes inside the body it came from: axes bound, types tracked, random draws repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fspmd.body import state, within
from fspmd.tracking import Tracker


def run_checkpointed(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``f(*args, **kwargs)`` keeping only its inputs; each run has casts of its own, freed with it."""
    body = state.body

    def run(*inputs: Any) -> Any:
        tracker = Tracker(body) if body is not None and body.checked else None
        with within(body, tracker):
            return f(*inputs, **kwargs)

    return torch_checkpoint(run, *args, use_reentrant=False)
