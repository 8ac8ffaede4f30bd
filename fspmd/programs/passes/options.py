"""What options of passes may be: told when a pass is made, not when it runs."""

from __future__ import annotations

from typing import Any

from fspmd.errors import ArgumentError
from fspmd.messages import described


def check_bytes(name: str, value: Any) -> None:
    """Raises unless it is a number of bytes, infinity too."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ArgumentError(
            f"{name} got {described(value)}; expected a number of bytes from 0 on, such as 1 << 20, or math.inf"
        )


def check_choice(name: str, value: Any) -> None:
    """Raises unless it is True or False."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} got {described(value)}; expected True or False")


def check_counts(name: str, values: Any) -> None:
    """Raises unless they are counts of parts."""
    if not isinstance(values, (tuple, list)) or not all(type(n) is int and n >= 1 for n in values):
        raise ArgumentError(f"{name} got {described(values)}; expected ints from 1 on, such as (2, 4, 8)")
