"""Random torch functions on simulated ranks, where each rank draws from its own stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fspmd.torch_internals import aten_zero_tensor
from fspmd.tracing import DispatchMode, step
from fspmd.transport.frame import Frame
from fspmd.transport.local_tensor import call_per_rank
from fspmd.transport.randomness import per_rank_generators, streams


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
        return _draw_each_rank(self.frame, func, args, kwargs)


@step
def _draw_each_rank(held: Frame, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with per_rank_generators(held) as switch:
        ranks = iter(range(held.volume))

        def on_one_rank(*row: Any, **named: Any) -> Tensor:
            switch(next(ranks))
            made: Tensor = func(*row, **named)
            return made

        return call_per_rank(on_one_rank, args, kwargs, held)


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
