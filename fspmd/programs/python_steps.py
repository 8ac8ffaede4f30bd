"""Python of the user's as one step, which `rank_map` runs: it has nothing of the record but what it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fspmd.errors import RecordError, ValuesNeededError
from fspmd.local_view.python_step import write_of_python
from fspmd.local_view.type_rules import tensors_of
from fspmd.programs.facts import memory_of
from fspmd.programs.impurities import line
from fspmd.programs.reachable import reached
from fspmd.programs.refusals import written_by
from fspmd.sharded import Sharded
from fspmd.tracing import DispatchMode
from fspmd.transport.local_tensor import blocks_of


def check_reached(function: Callable[..., Any], recorder: Any) -> None:
    """Raises where a function reaches values of the record, before it runs."""
    if recorder.imagines:
        raise recorder.refusal(
            ValuesNeededError(
                "jit(f).lower(...) knows shapes alone, and what rank_map gives may depend on values; call jit(f), or "
                f"lower what stands before and after it{line()}"
            )
        )
    for x in reached(function):
        _check_stranger(x.local if type(x) is Sharded else x, recorder)


@contextmanager
def given_alone(given: Any, recorder: Any) -> Iterator[None]:
    """What runs inside uses no values of the record but those that it is given, and writes into none."""
    blocks = [block for x in tensors_of(given) for block in blocks_of(x)]
    objects, memory = set(map(id, (*tensors_of(given), *blocks))), set(map(memory_of, blocks))

    def check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for x in tensors_of((*args, *kwargs.values())):
            if id(x) not in objects:
                _check_stranger(x, recorder)
        if any(memory_of(block) in memory for x in written_by(func, args, kwargs) for block in blocks_of(x)):
            raise recorder.refusal(write_of_python())

    with _Looks(check):
        yield


def _check_stranger(x: Any, recorder: Any) -> None:
    """Raises for a value of the record."""
    if isinstance(x, Tensor) and recorder.is_value(x):
        raise recorder.refusal(
            RecordError(
                f"jit cannot record a function that rank_map runs and that closes over a tensor of shape "
                f"{tuple(x.shape)} which the jitted function was given or has computed: it would be a constant of "
                f"the record. Pass it as an argument: rank_map(fn, x, y){line()}"
            )
        )


class _Looks(DispatchMode):
    """Has a look at each call."""

    def __init__(self, check: Callable[..., None]) -> None:
        super().__init__()
        self.check = check

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.check(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
