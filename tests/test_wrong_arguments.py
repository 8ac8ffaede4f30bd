"""Methods of a `Sharded` called with wrong arguments: where torch raises, an error of ours gives its reason.

Python's own errors of signatures stay what they are. Values (places out of range, matrices that are singular) are not
looked at here: what torch raises of them it raises of blocks.
"""

from __future__ import annotations

import warnings
import zlib
from typing import Any

import pytest
import torch
from dispatch_cases import values
from full import FULL
from torch import Tensor

from fspmd import FspmdError, P, Sharded, device_put, make_mesh

MESH = make_mesh((4,), ("x",), transport="simulation")  # the last block of five rows is empty
_NINE, _SEVEN = torch.ones(9, 9, dtype=torch.float64), torch.ones(7, dtype=torch.float64)
WRONG: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "nothing": ((), {}),
    "text": (("a",), {}),
    "None": ((None,), {}),
    "no dim": ((99,), {}),
    "no dims": ((99, 98), {}),
    "no dim by name": ((), {"dim": 77}),
    "dims twice": (([0, 0],), {}),
    "no such dtype": ((1j,), {}),
    "another shape": ((_NINE,), {}),
    "another rank": ((_SEVEN,), {}),
    "two of other shapes": ((0, _NINE, _SEVEN), {}),
    "no tensor": ((object(),), {}),
    "too many": (tuple(range(9)), {}),
    "no such name": ((), {"nonsense": 1}),
}
METHODS = [
    name
    for name in dir(Tensor)
    if not name.startswith("_") and callable(getattr(Tensor, name)) and (FULL or zlib.crc32(name.encode()) % 8 == 0)
]


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", METHODS)
def test_what_torch_refuses_is_refused_by_an_error_of_ours(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind, (args, kwargs) in WRONG.items():
            refused = _refusal(values(((5, 3),))[0].clone(), name, args, kwargs)
            for spec in (P("x"), P()):
                given = [args]
                if any(isinstance(x, Tensor) for x in args):
                    given.append(tuple(device_put(x, spec, mesh=MESH) if isinstance(x, Tensor) else x for x in args))
                for some in given:
                    found = _refusal(device_put(values(((5, 3),))[0], spec, mesh=MESH), name, some, kwargs)
                    expected = (FspmdError, TypeError) if isinstance(refused, TypeError) else FspmdError
                    assert found is None or isinstance(found, expected), (kind, spec, refused, found)
                    if refused is not None and not isinstance(refused, TypeError):
                        assert found is not None, (kind, spec, refused)


def _refusal(x: Tensor | Sharded, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    try:
        getattr(x, name)(*args, **kwargs)
    except Exception as error:
        return error
    return None
