"""Functions written in terms of others, where the graph that torch would trace is not the best one, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn import functional as F


def _unchunked(*args: Any, options: Any = None, **kwargs: Any) -> Any:
    """``options`` only bear on how a whole loss is computed in parts."""
    return F.linear_cross_entropy(*args, **kwargs)


def _dist(x: Any, y: Any, p: float = 2) -> Any:
    return torch.linalg.vector_norm(x - y, p)


#: by name of the torch function
COMPOSITES: Final[dict[str, Callable[..., Any]]] = {
    "dist": _dist,
    "linear_cross_entropy": _unchunked,
}
