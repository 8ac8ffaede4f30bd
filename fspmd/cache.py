"""Caches of plans and records: one limit, one order in which entries go, one set of counters."""

from __future__ import annotations

import itertools
from typing import Any, Final, NamedTuple

from typing_extensions import TypeVar

K = TypeVar("K", default=Any)
V = TypeVar("V", default=Any)

#: how many plans or records a cache keeps
LIMIT: Final = 4096


class CacheInfo(NamedTuple):
    """Statistics of a cache, with the fields of ``functools.lru_cache``."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


class Cache(dict[K, V]):
    """A dict of at most ``maxsize`` entries. The oldest goes first, on all ranks alike: a hit changes nothing.

    >>> cache = Cache(2)
    >>> for i in range(4):
    ...     cache[i] = i
    >>> list(cache), cache.info()
    ([2, 3], CacheInfo(hits=0, misses=0, maxsize=2, currsize=2))
    """

    __slots__ = ("hits", "maxsize", "misses")

    def __init__(self, maxsize: int = LIMIT) -> None:
        super().__init__()
        self.maxsize = maxsize
        self.hits = self.misses = 0

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self.maxsize:
            self.shrink()

    def shrink(self) -> None:
        """Drop the oldest entries above the limit."""
        for key in list(itertools.islice(self, max(0, len(self) - self.maxsize))):
            self.pop(key, None)  # another thread may have dropped it

    def clear(self) -> None:
        """Forget all entries, and count from zero."""
        super().clear()
        self.hits = self.misses = 0

    def info(self) -> CacheInfo:
        """Return the counters and the size."""
        return CacheInfo(self.hits, self.misses, self.maxsize, len(self))
