"""Functions of Python's and torch's own that a recorder has to hear of, and that tell nobody of their calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(places: Iterable[tuple[Any, str, Callable[..., Any]]]) -> Iterator[None]:
    """Within, for all threads, attributes are others: of each owner and name, what is called with the plain one first.

    A plain one has to be looked up where it is called.
    """
    places = list(places)
    before = [getattr(owner, name) for owner, name, _ in places]
    for (owner, name, instead), plain in zip(places, before, strict=True):
        setattr(owner, name, _calling(instead, plain))
    try:
        yield
    finally:
        for (owner, name, _), plain in zip(places, before, strict=True):
            setattr(owner, name, plain)


def _calling(instead: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(plain)(lambda *args, **kwargs: instead(plain, *args, **kwargs))
