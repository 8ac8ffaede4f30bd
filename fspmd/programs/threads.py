"""Other threads that a recorded function has do something: what they compute is no step, and would be a constant."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Thread
from typing import Any, Final

from torch import Tensor

from fspmd.errors import RecordError
from fspmd.programs.escapes import line
from fspmd.transport.local_tensor import blocks_of

_HANDED_ON: Final[tuple[tuple[Any, str], ...]] = ((Thread, "start"), (ThreadPoolExecutor, "submit"))


class Threads:
    """Tells tensors that are made from the first time on that a function hands something to another thread.

    They are what the garbage collector has not seen yet: it is asked to look at all that is there, and to wait.
    """

    def __init__(self) -> None:
        self.begun = self._collects = False

    def begin(self) -> None:
        """Something is handed on."""
        if not self.begun:
            gc.collect(1)
            self._collects, self.begun = gc.isenabled(), True
            gc.disable()

    def check(self, captured: Iterable[Tensor]) -> None:
        """Raises where one of the tensors that no step gave was made since; memory of NumPy's may be wrapped anew."""
        if not self.begun:
            return
        young = set(map(id, gc.get_objects(generation=0)))
        for x in captured:
            if id(x) in young and blocks_of(x)[0].untyped_storage().resizable():
                raise RecordError(
                    f"jit cannot record tensors that other threads compute, such as one of shape {tuple(x.shape)}; "
                    f"compute it in the thread of the jitted function{line()}"
                )

    @contextmanager
    def watched(self, concerns: Callable[[], bool]) -> Iterator[None]:
        """Within, threads that begin, and work that pools are given, are noticed where it ``concerns`` this."""

        def noticing(plain: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(plain)
            def run(*args: Any, **kwargs: Any) -> Any:
                if concerns():
                    self.begin()
                return plain(*args, **kwargs)

            return run

        before = [getattr(kind, name) for kind, name in _HANDED_ON]
        for (kind, name), plain in zip(_HANDED_ON, before, strict=True):
            setattr(kind, name, noticing(plain))
        try:
            yield
        finally:
            for (kind, name), plain in zip(_HANDED_ON, before, strict=True):
                setattr(kind, name, plain)
            if self._collects:
                gc.enable()
