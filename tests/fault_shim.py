"""A shim over ``os``: it counts the calls that change files, stops at one of them, and models what a machine keeps.

A call is one of `CALLS`. Reads are not counted. What was written but not synced may be lost when the power goes: `Disk`
follows the calls and says what is certain to be there.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CALLS = ("open", "write", "fsync", "rename", "symlink", "mkdir", "unlink", "rmdir")


@contextmanager
def watched(before: Callable[[int, str, tuple[Any, ...]], None], after: Any = None) -> Iterator[None]:
    """Call ``before(number, name, args)`` and ``after(name, args, result)`` around every change of a file."""
    real = {name: getattr(os, name) for name in CALLS}
    count, inside = 0, False

    def shim(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count, inside
            if inside:  # of before itself
                return real[name](*args, **kwargs)
            if name != "open" or args[1] & os.O_CREAT:
                inside = True
                try:
                    before(count, name, args)
                finally:
                    inside = False
                count += 1
            result = real[name](*args, **kwargs)
            if after is not None:
                after(name, args, result)
            return result

        return call

    try:
        for name in CALLS:
            setattr(os, name, shim(name))
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def kill_at(number: int) -> Callable[[int, str, tuple[Any, ...]], None]:
    """The process ends before the call, and in the midst of a write."""
    real_write = os.write

    def before(count: int, name: str, args: tuple[Any, ...]) -> None:
        if count == number:
            if name == "write":
                real_write(args[0], bytes(args[1])[: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    return before


def fail_at(number: int, code: int, names: tuple[str, ...] = ("write",)) -> Callable[[int, str, tuple[Any, ...]], None]:
    """The call of this number among those with these names raises an `OSError`."""
    seen = 0

    def before(count: int, name: str, args: tuple[Any, ...]) -> None:
        nonlocal seen
        if name in names:
            seen += 1
            if seen == number + 1:
                raise OSError(code, os.strerror(code))

    return before


FULL, READ_ONLY = errno.ENOSPC, errno.EROFS


class _Node:
    """A file, a folder or a link, as it is, and as it was when it was synced last."""

    def __init__(self, content: Any) -> None:
        self.content = content
        self.kept: Any = {} if isinstance(content, dict) else content if isinstance(content, str) else b""

    def keep(self) -> None:
        self.kept = dict(self.content) if isinstance(self.content, dict) else self.content


class Disk:
    """Follows the calls below a folder. What is there at first is on the disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = self._read(root)
        self.files: dict[int, _Node] = {}

    def _read(self, path: Path) -> _Node:
        if path.is_symlink():
            return _Node(os.readlink(path))
        node = _Node(
            {child.name: self._read(child) for child in path.iterdir()} if path.is_dir() else path.read_bytes()
        )
        node.keep()
        return node

    def _folder(self, path: Any) -> tuple[dict[str, _Node], str]:
        parts = Path(os.fspath(path)).relative_to(self.root).parts
        node = self.top
        for part in parts[:-1]:
            node = node.content[part]
        return node.content, parts[-1] if parts else ""

    def after(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """One call has succeeded."""
        if name in ("write", "fsync"):
            node = self.files[args[0]]
            if name == "write":
                node.content += bytes(args[1])[:result]
            else:
                node.keep()
            return
        folder, last = self._folder(args[-1] if name in ("symlink",) else args[0])
        if name == "open":
            if args[1] & os.O_CREAT:
                folder[last] = _Node(b"")
            self.files[result] = folder[last] if last else self.top
        elif name == "rename":
            target, new = self._folder(args[1])
            target[new] = folder.pop(last)
        elif name in ("unlink", "rmdir"):
            del folder[last]
        else:
            folder[last] = _Node({} if name == "mkdir" else args[0])

    def lay_out(self, path: Path, names_lost: bool) -> None:
        """Write what the disk has after a loss of power. Names that were not synced are lost, or all are there."""

        def put(node: _Node, at: Path) -> None:
            if isinstance(node.content, dict):
                at.mkdir()
                for name, child in (node.kept if names_lost else node.content).items():
                    put(child, at / name)
            elif isinstance(node.content, str):
                at.symlink_to(node.content)
            else:
                at.write_bytes(node.kept)

        put(self.top, path)
