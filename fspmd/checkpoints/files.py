"""Files and folders that outlive a crash: every change goes through ``os``, and is synced where its order matters."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Self
from zlib import crc32

from fspmd.errors import ArgumentError, CheckpointError
from fspmd.messages import described

PathLike = str | os.PathLike[str]

#: Bytes of a block that one checksum covers. A reader reads whole pieces.
PIECE: Final = 1 << 20
_SMALL: Final = 1 << 16  # writes below this size are joined
_HEAD: Final = 1 << 13  # the first bytes of an item, which tell where its elements begin


def checked_path(path: Any, what: str) -> str:
    """Return an absolute path."""
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"{what} got {described(path)} for path; give it the folder of the steps")
    return os.path.abspath(os.fspath(path))


@contextmanager
def told(action: str, path: str) -> Iterator[None]:
    """Raise `CheckpointError` for an `OSError`, with the action and the path."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot {action} {path}: {error.strerror or error}") from error


def sync(path: str | os.PathLike[str]) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: str) -> None:
    """Make the names in a folder durable."""
    with told("sync the folder", path):
        sync(path)


def write_file(path: str, data: bytes) -> None:
    """Write a new file, durable itself; its name is durable after `sync_folder`."""
    with Output(path) as out:
        out.write(data)


def read_file(path: str) -> bytes:
    """Return the bytes of a file."""
    with told("read", path), open(path, "rb") as file:
        return file.read()


def remove(path: str) -> None:
    """Remove a file, a folder with all that is in it, or a link, but not the folder that a link names."""
    with told("remove", path):
        if os.path.islink(path) or not os.path.isdir(path):
            os.unlink(path)
            return
        for name in os.listdir(path):
            remove(os.path.join(path, name))
        os.rmdir(path)


@contextmanager
def locked(path: str) -> Iterator[bool]:
    """Hold a lock on a folder within the block, and tell whether nobody else has it. It ends with the process.

    Nobody has a lock in a file system that knows none, or on what cannot be opened.
    """
    import fcntl  # not on all systems

    descriptor, is_mine = None, True
    try:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                is_mine = False
        yield is_mine
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile has it open, too
            os.close(descriptor)


class Output:
    """A new file that is written from its beginning, and synced when it is closed without an error.

    `begin` and `end` mark an item. Its checksums are CRC-32, one for each `PIECE` from its beginning. A CRC-32 sees
    every change of up to three bits in a piece, and every burst of up to 32.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.position = 0
        self.checksums: list[int] = []
        self.head = bytearray()
        self._start = self._filled = 0
        self._waiting = bytearray()
        with told("write", path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def begin(self) -> None:
        """Begin an item here."""
        self._start, self._filled, self.checksums, self.head = self.position, 0, [], bytearray()

    def end(self) -> tuple[int, int, list[int]]:
        """Return where the item began, its length, and its checksums."""
        return self._start, self.position - self._start, self.checksums

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append bytes, as torch.save does."""
        view = memoryview(data).cast("B")
        self.position += len(view)
        if len(self.head) < _HEAD:
            self.head += view[: _HEAD - len(self.head)]
        self._check(view)
        if len(view) < _SMALL:
            self._waiting += view
            if len(self._waiting) >= PIECE:
                self._flush()
        else:
            self._flush()
            self._put(view)
        return len(view)

    def flush(self) -> None:
        """Nothing: torch.save calls this after each item."""

    def _check(self, view: memoryview) -> None:
        while len(view):
            room = PIECE - self._filled
            part, view = view[:room], view[room:]
            if self._filled == 0:
                self.checksums.append(0)
            self.checksums[-1] = crc32(part, self.checksums[-1])
            self._filled = (self._filled + len(part)) % PIECE

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, bytearray()
        self._put(memoryview(waiting))

    def _put(self, view: memoryview) -> None:
        with told("write", self.path):
            while len(view):
                view = view[os.write(self._descriptor, view) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._flush()
                with told("sync", self.path):
                    os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
