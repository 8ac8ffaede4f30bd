"""Other threads that a recorded function has do something: what they compute is no step, and would be a constant."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from threading import Thread, get_ident
from typing import Any, Final

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from fspmd.errors import RecordError
from fspmd.local_view.type_rules import tensors_of
from fspmd.programs.escapes import Escapes, constant_of, line
from fspmd.programs.replaced import replaced
from fspmd.torch_internals import pop_dispatch_mode, push_dispatch_mode
from fspmd.tracing import DispatchMode
from fspmd.transport.op_facts import facts_of

#: methods of pools that have another thread call their first argument
_HANDED_ON: Final = (
    (ThreadPoolExecutor, "submit"),
    *((ThreadPool, name) for name in ("apply_async", "_map_async", "imap", "imap_unordered")),
)


class Threads(DispatchMode):
    """Active in the threads that a function begins and in what it has pools do; notes what is computed there."""

    def __init__(self, recorder: Any, escapes: Escapes) -> None:
        super().__init__()
        self.recorder, self.escapes = recorder, escapes
        self.made: Any = WeakIdKeyDictionary()
        self.watches = False
        self.inside: set[int] = set()  # threads that do what they were given

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.watches:
            if facts_of(func).gives_values:
                raise self.recorder.refusal(constant_of("a value of a tensor that another thread reads"))
            if any(map(self.recorder.is_known, tensors_of(facts_of(func).written(args, kwargs)))):
                raise self.recorder.refusal(
                    RecordError(f"jit cannot record what another thread writes into a tensor of the function{line()}")
                )
        out = func(*args, **kwargs)
        if self.watches:
            self.made.update(dict.fromkeys(tensors_of([out]), True))
        return out

    def check(self, captured: Iterable[Tensor]) -> None:
        """Raises where one of the tensors that no step gave was computed, or written into, by one of these threads."""
        for x in captured:
            if x in self.made:
                raise RecordError(
                    f"jit cannot record tensors that other threads compute, such as one of shape {tuple(x.shape)}; "
                    f"compute it in the thread of the jitted function{line()}"
                )

    @contextmanager
    def watched(self, concerns: Callable[[], bool]) -> Iterator[None]:
        """Within, threads that begin, and work that pools are given, are watched where it ``concerns`` this."""

        handing: list[int] = []  # threads that hand something to a pool

        def concerned() -> bool:
            return get_ident() in self.inside or concerns()

        def started(plain: Any, thread: Thread) -> Any:
            if concerned() and get_ident() not in handing:  # workers outlive what they are given, which is watched
                thread.run = self._watching(thread.run)  # type: ignore[method-assign]
            return plain(thread)

        def handed_on(plain: Any, pool: Any, *args: Any, **kwargs: Any) -> Any:
            f, *others = args or (kwargs.pop("func"),)
            if not concerned():
                return plain(pool, f, *others, **kwargs)
            handing.append(get_ident())
            try:
                return plain(pool, self._watching(f), *others, **kwargs)
            finally:
                handing.remove(get_ident())

        self.watches = True
        try:
            with replaced([(Thread, "start", started), *((kind, name, handed_on) for kind, name in _HANDED_ON)]):
                yield
        finally:
            self.watches = False

    def _watching(self, f: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(f)
        def run(*args: Any, **kwargs: Any) -> Any:
            thread = get_ident()
            if thread in self.inside:
                return f(*args, **kwargs)
            self.inside.add(thread)
            push_dispatch_mode(self)  # entered, it would set what torch keeps for all threads
            try:
                with _Asked(self):
                    return f(*args, **kwargs)
            finally:
                pop_dispatch_mode()
                self.inside.discard(thread)

        return run


class _Asked(TorchFunctionMode):
    """The same of torch functions that nothing below them shows."""

    def __init__(self, threads: Threads) -> None:
        super().__init__()
        self.threads = threads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.threads.watches:
            self.threads.escapes.check(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
