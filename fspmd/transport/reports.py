"""Short texts that processes leave for each other in the store of torch.distributed, beside the collectives.

A rank that fails tells the others, so that their errors can say why they waited in vain. Nothing is sent before there
is an error. The store may have ended with its process, so each function takes a failure of the store for silence.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch.distributed as dist

from fspmd.errors import PeerError
from fspmd.meshes import world
from fspmd.torch_internals import store_of_ranks
from fspmd.user_code import line_of_error

PATIENCE: Final = 2.0  # seconds for an answer of the store
_told: list[str] = []  # the last failure that this process told
_clones: Final[list[tuple[Any, Any]]] = []  # a weak reference to the store, and a connection of our own to it
_cloning: Final = threading.Lock()
_threads: Final[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()


def beside(run: Callable[[], None], name: str = "fspmd store") -> threading.Thread:
    """Start a thread that asks the store. At the end of the program the interpreter waits for it, but not for long.

    A thread whose call of C++ returns while the interpreter ends would abort the process.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


@atexit.register  # before the functions that let such threads end, so it runs after them
def _end_threads() -> None:
    end = time.monotonic() + PATIENCE
    for thread in list(_threads):
        thread.join(max(0.0, end - time.monotonic()))


def own_store(prefix: str) -> Any:
    """The store of all ranks under a prefix, over a connection of our own. A connection serves one thread at a time.

    It does not keep the store, whose port another world may need. A thread that opens a connection holds up no other:
    where the store has ended, it tries for minutes.
    """
    store = store_of_ranks("")
    base = store.underlying_store
    clone = _clone_of(base)
    if clone is None:
        try:
            opened = base.clone()
        except (AttributeError, RuntimeError):
            return type(store)(prefix, base)
        with _cloning:
            clone = _clone_of(base)
            if clone is None:
                _clones[:] = [(weakref.ref(base), opened)]
                clone = opened
    return type(store)(prefix, clone)


def _clone_of(base: Any) -> Any:
    """The connection of our own to a store; None if there is none yet."""
    return next((clone for ref, clone in list(_clones) if ref() is base), None)


def store_here(prefix: str) -> Any:
    """The store of all ranks under a prefix, for this thread. Only the main thread waits on torch's own connection.

    A connection of our own may take seconds to open, where the names of hosts are looked up.
    """
    if threading.current_thread() is threading.main_thread():
        return store_of_ranks(prefix)
    return own_store(prefix)


@contextmanager
def store_needed() -> Iterator[None]:
    """Raise an error of ours where the store of all ranks has ended, with the process that holds it.

    Raises:
        PeerError: it has.
    """
    try:
        yield
    except dist.DistError as error:
        raise PeerError(
            "the store of torch.distributed has ended, and with it the process that holds it (rank 0, unless a "
            f"launcher does): {str(error).splitlines()[0]}"
        ) from error


def within(seconds: float, ask: Callable[[], Any], otherwise: Any = None) -> Any:
    """The result of ``ask``, or ``otherwise`` if it raises or takes longer. A stopped store never answers."""
    answer = [otherwise]

    def run() -> None:
        try:
            answer[0] = ask()
        except Exception:
            return

    beside(run).join(seconds)
    return answer[0]


def tell_failure(error: BaseException, where: str = "") -> None:
    """Tell the other processes of an error on this one. An error is told once."""
    if not world.initialised() or getattr(error, "is_told", False):
        return
    error.is_told = True  # type: ignore[attr-defined] # kept here, an error would keep all that its frames hold
    line = line_of_error(error)
    text = f"{where or 'raised'} {failure_text(error)}" + (f" ({line})" if line else "")
    _told[:] = [text]
    rank, now = world.process_rank(), time.time()
    within(PATIENCE, lambda: store_of_ranks("fspmd.failures").set(str(rank), f"{now} {text}"))


def last_failure() -> str:
    """The last failure that this process has told; "" if there is none."""
    return _told[0] if _told else ""


def failures(ranks: Iterable[int]) -> dict[int, tuple[float, str]]:
    """The last failure that each of some ranks has told: the seconds since then, and the text."""
    store, told = own_store("fspmd.failures"), {}
    for rank in ranks:
        if store.check([str(rank)]):
            then, _, text = store.get(str(rank)).decode().partition(" ")
            told[rank] = (time.time() - float(then), text)
    return told


def failure_text(error: BaseException) -> str:
    """``KeyError: 'x'``: the class of an error, the first line of its message, and the first of a list in it."""
    head, *lines = f"{type(error).__name__}: {error}".splitlines()
    first = next((line.strip(" *") for line in lines if line.startswith("  * ")), "")
    return f"{head[:400]} {first[:400]}".rstrip(": ")


@atexit.register
def _tell_end() -> None:
    """Tell the other processes that this one ends by an error."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, BaseException):
        tell_failure(error, "has ended with")
