"""Random torch functions on simulated ranks, where each rank draws from its own stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from fspmd.torch_internals import aten_zero_tensor
from fspmd.tracing import DispatchMode, step
from fspmd.transport.frame import Frame
from fspmd.transport.local_tensor import call_per_rank
from fspmd.transport.randomness import streams


@contextmanager
def draw_per_rank(held: Frame, seed: int) -> Iterator[None]:
    """Let random ops in a ``with`` block draw from the streams of ``seed`` over the coordinates of ``held``.

    This includes ops that make tensors from sizes alone, as dropout under ``torch.func`` does.
    """
    with streams(held, seed), _MakePerRank(held):
        yield


class _MakePerRank(DispatchMode):
    """Gives tensors that are made from no other tensors one copy per rank."""

    def __init__(self, held: Frame) -> None:
        super().__init__()
        self.frame = held

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _makes_tensor(func):
            return func(*args, **kwargs)
        return _call_per_rank(func, args, kwargs, self.frame, draws=True)


_call_per_rank: Final = step(call_per_rank)


#: op -> `_makes_tensor`; zero tangents have no memory, and no rank draws them
_MAKES: dict[Any, bool] = {aten_zero_tensor: False}


def _makes_tensor(func: Any) -> bool:
    """Return whether an op returns a tensor and takes none."""
    known = _MAKES.get(func)
    if known is None:
        schema = func._schema
        takes = any("Tensor" in str(argument.type) for argument in schema.arguments)
        known = _MAKES[func] = not takes and [str(r.type) for r in schema.returns] == ["Tensor"]
    return known
