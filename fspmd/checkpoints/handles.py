"""Saves that may still be under way, and the failures that nobody has been told yet."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable

from fspmd.errors import CheckpointError


class SaveHandle:
    """A save, which may still be under way: its ``step`` and, once it is done, its ``folder``.

    ``folder`` is a checkpoint of torch.distributed.checkpoint.
    """

    def __init__(self, step: int, path: str) -> None:
        self.step = step
        self._path = path
        self._name = ""
        self._failure = f"save of step {step} in {path} was cut off"  # until it has ended
        self._told = False
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], tuple[str, str]], asynchronous: bool) -> None:
        """Do the work, which returns the name of the folder and the failure, here or in a thread."""

        def target() -> None:
            self._name, self._failure = work()

        if not asynchronous:
            target()
            self.wait()
            return
        global _last
        _last = self
        self._thread = threading.Thread(target=target, name="fspmd save")
        self._thread.start()  # no daemon, so a process that ends waits for it

    @property
    def folder(self) -> str:
        """The folder of the step. It waits for the save."""
        self.wait()
        return os.path.join(self._path, self._name)

    def done(self) -> bool:
        """Whether nothing is left to be written. The answer may differ from rank to rank."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the step is complete.

        Raises:
            CheckpointError: on all ranks alike, a rank could not write.
        """
        if self._thread is not None:
            self._thread.join()
        if self._failure:
            self._told = True
            raise CheckpointError(self._failure)

    def __repr__(self) -> str:
        return f"SaveHandle(step={self.step}, done={self.done()})"


_last: SaveHandle | None = None  # the last asynchronous save, until `finish_last`


def finish_last() -> None:
    """Wait for the asynchronous save before, and raise its failure unless it was raised already."""
    global _last
    handle, _last = _last, None
    if handle is not None and not handle._told:
        handle.wait()


@atexit.register
def _tell_last() -> None:
    """Print the failure of the last save if nobody asked for it. The interpreter has joined its thread."""
    if _last is not None and _last._failure and not _last._told:
        print(f"fspmd.CheckpointError: {_last._failure}", file=sys.stderr)
