"""``torch._foreach_*`` on lists with `Sharded` entries, beside unsharded torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dispatch_cases import values

from fspmd import P, device_get, device_put, make_mesh

MESH = make_mesh((2, 2), ("x", "y"), transport="simulation")
CASES: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "a number": ("add", lambda a, b: (a, 2)),
    "a list": ("add", lambda a, b: (a, b)),
    "numbers": ("mul", lambda a, b: (a, [1.5, 2.0])),
    "a tensor": ("div", lambda a, b: (a, torch.tensor(2.0, dtype=torch.float64))),
    "a value": ("addcdiv", lambda a, b: (a, a, b, 0.5)),
    "values": ("addcdiv", lambda a, b: (a, a, b, [0.5, 1.0])),
    "values of a tensor": ("addcmul", lambda a, b: (a, a, b, torch.tensor([0.5, 1.0], dtype=torch.float64))),
    "a weight": ("lerp", lambda a, b: (a, b, 0.3)),
    "a bound": ("maximum", lambda a, b: (a, 0.1)),
    "bounds": ("minimum", lambda a, b: (a, b)),
    "a base": ("pow", lambda a, b: (2.0, b)),
    "norms": ("norm", lambda a, b: (a, 3.0)),
    "largest": ("max", lambda a, b: (a,)),
    "one operand": ("sqrt", lambda a, b: (b,)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("spec", [P("x"), P(("y", "x")), P()], ids=repr)
def test_as_on_each_entry(name: str, spec: P) -> None:
    function, given = CASES[name]
    plain = [values(((5, 3), (4,))), [x.abs() + 1 for x in values(((5, 3), (4,)))]]
    ours: Any = [[device_put(x, spec, mesh=MESH) for x in xs] for xs in plain]
    want = getattr(torch, f"_foreach_{function}")(*given(*plain))
    found = getattr(torch, f"_foreach_{function}")(*given(*ours))
    written = getattr(torch, f"_foreach_{function}_", None)
    if written is not None and name != "a base":
        assert written(*given(*ours)) is None
        found = (*found, *given(*ours)[0])
        want = (*want, *want)
    for one, expected in zip(found, want, strict=True):
        torch.testing.assert_close(device_get(one), expected)
