"""Options of `jit` and of its passes: arguments by position and name, and checks of values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.messages import counted, described, quoted
from fspmd.programs.keys import Static
from fspmd.trees import parameter_names
from fspmd.wrapping import wraps

Numbers = int | Sequence[int] | None
Names = str | Sequence[str] | None


@dataclass(frozen=True, slots=True)
class Chosen:
    """The arguments that an option names, by position and by name."""

    numbers: frozenset[int] = frozenset()
    names: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.numbers or self.names)


def chosen(f: Callable[..., Any], option: str, numbers: Numbers, names: Names) -> Chosen:
    """The arguments that ``{option}_argnums`` and ``{option}_argnames`` name.

    Each parameter that has a position and a name is in both sets, so that a call may pass it in either way.

    Raises:
        ArgumentError: a position is no int, a name no string, or ``f`` has no such parameter.
    """
    by_number = _sequence(f"{option}_argnums", numbers, int, "an int")
    by_name = _sequence(f"{option}_argnames", names, str, "a string")
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):  # some functions written in C
        return Chosen(frozenset(_from_start(i, f, option) for i in by_number), frozenset(by_name))
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    kinds = {p.kind for p in parameters}
    positions = set()
    for i in by_number:
        if inspect.Parameter.VAR_POSITIONAL in kinds:
            positions.add(_from_start(i, f, option))
        elif not -len(positional) <= i < len(positional):
            raise ArgumentError(
                f"jit got {option}_argnums={numbers!r}, but {described(f)} takes "
                f"{counted(len(positional), 'positional argument')}{_listed(positional)}"
            )
        else:
            positions.add(i % len(positional))
    every = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for name in by_name:
        if name not in every and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise ArgumentError(
                f"jit got {option}_argnames={names!r}, but {described(f)} has no parameter {name!r}{_listed(every)}"
            )
    named = {*by_name, *(positional[i] for i in positions if i < len(positional))}
    return Chosen(frozenset({*positions, *(i for i, name in enumerate(positional) if name in named)}), frozenset(named))


def check_static_not_donated(f: Any, static: Chosen, donate: Chosen) -> None:
    """Raise `ArgumentError` where an argument is both static and donated."""
    if both := [*sorted(static.numbers & donate.numbers), *sorted(static.names & donate.names)]:
        raise ArgumentError(
            f"jit of {described(f)} got {quoted(both)} both in static_argnums or static_argnames and in "
            "donate_argnums or donate_argnames; tensors can be donated, and other values static: name it in one of them"
        )


def _sequence(option: str, given: Any, kind: type, noun: str) -> tuple[Any, ...]:
    if given is None:
        return ()
    entries = tuple(given) if isinstance(given, (tuple, list, set, frozenset)) else (given,)
    if any(not isinstance(entry, kind) or isinstance(entry, bool) for entry in entries):
        raise ArgumentError(f"jit got {described(given)} for {option}, which takes {noun} or a tuple of them")
    return entries


def _from_start(i: int, f: Any, option: str) -> int:
    if i < 0:
        raise ArgumentError(
            f"jit got {i} in {option}_argnums, but {described(f)} takes any number of positional arguments; write a "
            "position from 0 on"
        )
    return i


def _listed(names: Sequence[str]) -> str:
    return f": {', '.join(names)}" if names else ""


def mark_static(
    f: Callable[..., Any], which: Chosen, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, with each static argument as a `Static` leaf.

    Raises:
        ArgumentError: a static argument has no hash, or is a tensor.
    """
    marked = tuple(_static(f, i, x) if i in which.numbers else x for i, x in enumerate(args))
    return marked, {name: _static(f, name, x) if name in which.names else x for name, x in kwargs.items()}


def _static(f: Any, where: int | str, value: Any) -> Static:
    fix = "it must be hashable: pass a number, a string, a tuple, a frozen dataclass, a function or a module"
    if isinstance(value, Tensor):
        fix = "a static argument is a constant of the record, and a tensor is not; leave it out of static_argnums"
    else:
        try:
            return Static(value)
        except TypeError:
            pass
    name = where if isinstance(where, str) else parameter_names(f, where + 1)[where]
    raise ArgumentError(f"the static argument {name} of {described(f)} is {described(value)}; {fix}")


def with_static(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls ``f`` with the values of `Static` arguments."""

    @wraps(f)
    def run(*args: Any, **kwargs: Any) -> Any:
        return f(*map(_opened, args), **{name: _opened(x) for name, x in kwargs.items()})

    return run


def _opened(x: Any) -> Any:
    return x.value if type(x) is Static else x


def check_bytes(name: str, value: Any) -> None:
    """Raise `ArgumentError` unless the value is a number of bytes, or infinity."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ArgumentError(
            f"{name} got {described(value)}; expected a number of bytes >= 0, such as 1 << 20, or math.inf"
        )


def check_choice(name: str, value: Any) -> None:
    """Raise `ArgumentError` unless the value is True or False."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} got {described(value)}; expected True or False")


def check_counts(name: str, values: Any) -> None:
    """Raise `ArgumentError` unless the values are ints >= 1."""
    if not isinstance(values, (tuple, list)) or not all(type(n) is int and n >= 1 for n in values):
        raise ArgumentError(f"{name} got {described(values)}; expected ints >= 1, such as (2, 4, 8)")
