"""Caches: of results by arguments, of plans, of records. All are limited, and meshes do not live on in them.

A result that is kept holds the layouts that it was asked for, and they hold their meshes. So the caches are forgotten
together when many meshes have come: see `forget` and its caller, `meshes/grid.py`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, overload
from weakref import WeakValueDictionary

from typing_extensions import TypeVar

K = TypeVar("K", default=Any)
V = TypeVar("V", default=Any)
T = TypeVar("T")

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper as Cached

#: how many entries a cache keeps
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

    __slots__ = ("__weakref__", "hits", "maxsize", "misses")

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

    def forget(self) -> None:
        """Forget all entries, and go on counting."""
        super().clear()

    def clear(self) -> None:
        """Forget all entries, and count from zero."""
        self.forget()
        self.hits = self.misses = 0

    def info(self) -> CacheInfo:
        """Return the counters and the size."""
        return CacheInfo(self.hits, self.misses, self.maxsize, len(self))


class Interned(Cache[K, V]):
    """A cache of values of which equal ones are one object, also where the cache has forgotten one that is in use."""

    __slots__ = ("_living",)

    def __init__(self) -> None:
        super().__init__()
        self._living: WeakValueDictionary[K, V] = WeakValueDictionary()
        forgettable(self)

    def intern(self, key: K, value: V) -> V:
        """Return the value in use with this key, or ``value`` if there is none."""
        self[key] = value = self._living.setdefault(key, value)
        return value


_forget: Final[list[Callable[[], None]]] = []  # of functions
_forgettable: Final[WeakValueDictionary[int, Cache]] = WeakValueDictionary()


@overload
def cached(function: Callable[..., T], /) -> Cached[T]: ...
@overload
def cached(*, maxsize: int = LIMIT, typed: bool = False) -> Callable[[Callable[..., T]], Cached[T]]: ...
def cached(function: Any = None, /, *, maxsize: int = LIMIT, typed: bool = False) -> Any:
    """Keep the results of a function, as ``functools.lru_cache`` does, until `forget`.

    The results must follow from the arguments, and a result that is made again must do as well as the first.

    >>> @cached
    ... def double(x):
    ...     return 2 * x
    >>> double(2), double(2), double.cache_info().hits
    (4, 4, 1)
    """
    if function is None:
        return functools.partial(cached, maxsize=maxsize, typed=typed)
    kept = functools.lru_cache(maxsize=maxsize, typed=typed)(function)
    _forget.append(kept.cache_clear)
    return kept


def forgettable(cache: Cache[K, V]) -> Cache[K, V]:
    """Return the cache, whose entries go with `forget` from now on."""
    _forgettable[id(cache)] = cache
    return cache


def forget() -> None:
    """Forget the results of all functions that are `cached`, and the entries of all caches that are `forgettable`."""
    for clear in (*_forget, *(cache.forget for cache in list(_forgettable.values()))):
        clear()
