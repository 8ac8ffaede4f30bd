"""Methods of a `Sharded` called with wrong arguments: where torch raises, an error of ours gives its reason.

Python's own errors of signatures stay what they are. Values (places out of range, matrices that are singular) are not
looked at here: what torch raises of them it raises of blocks.
"""

from __future__ import annotations

import functools
import itertools
import warnings
import zlib
from typing import Any

import pytest
import torch
from dispatch_cases import values
from full import FULL
from processes import Processes
from torch import Tensor

import fspmd
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


@pytest.mark.one_of(8)
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


# --- tensors that no transport moves --------------------------------------------------------------------------------

_NUMBERS = torch.arange(2), torch.ones(2, dtype=torch.int64)
COLLECTIVES: dict[str, Any] = {
    **{name: lambda x, name=name: getattr(fspmd, name)(x, "x") for name in ("psum", "pmean", "pmax", "pmin")},
    "all_gather": lambda x: fspmd.all_gather(x, "x", tiled=True),
    "psum_scatter": lambda x: fspmd.psum_scatter(x, "x", tiled=True),
    "all_to_all": lambda x: fspmd.all_to_all(x, "x", 0, 0, tiled=True),
    "ppermute": lambda x: fspmd.ppermute(x, "x", [(0, 1)]),
    "pshuffle": lambda x: fspmd.pshuffle(x, "x", [1, 0]),
    "pbroadcast": lambda x: fspmd.pbroadcast(x, "x", 0),
    "pswapaxes": lambda x: fspmd.pswapaxes(x, "x", 0),
    "pcast": lambda x: fspmd.pcast(x, "x", to="varying"),
    "all_gather_into": lambda x: fspmd.all_gather_into(torch.empty(4, 2), x, "x"),
    "psum_scatter_into": lambda x: fspmd.psum_scatter_into(torch.empty(1, 2), x, "x"),
    "into a misfit": lambda x: fspmd.all_gather_into(x, torch.empty(1, 2), "x"),
    "ragged_all_to_all": lambda x: fspmd.ragged_all_to_all(
        x, torch.empty(2, 2), _NUMBERS[0], _NUMBERS[1], _NUMBERS[0], _NUMBERS[1], axis_name="x"
    ),
}
MISFITS: dict[str, Any] = {
    "quantized tensor": lambda: torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
    "sparse_coo tensor": lambda: torch.ones(2, 2).to_sparse(),
    "sparse_csr tensor": lambda: torch.ones(2, 2).to_sparse_csr(),
    "mkldnn tensor": lambda: torch.ones(2, 2).to_mkldnn(),
    "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    **{f"torch.uint{n} tensor": lambda n=n: torch.empty(2, 2, dtype=getattr(torch, f"uint{n}")) for n in (1, 4, 7)},
    "torch.int4 tensor": lambda: torch.empty(2, 2, dtype=torch.int4),
}


def refused(transport: Any) -> list[str]:
    """What of a misfit is not refused by its name: collectives of it, the entry of a body, and new values."""
    mesh = make_mesh((2,), ("x",), transport=transport, device="cpu")

    def within(collective: Any, check_vma: bool, x: Any) -> Any:
        def body(y: Tensor) -> Tensor:
            collective(x)
            return y

        specs = {"in_specs": P("x"), "out_specs": P("x"), "check_vma": check_vma}
        return fspmd.shard_map(body, mesh=mesh, **specs)(torch.ones(2))

    calls: dict[str, Any] = {
        "an argument": fspmd.shard_map(torch.clone, mesh=mesh, in_specs=P("x"), out_specs=P("x")),
        "device_put": lambda x: device_put(x, P("x"), mesh=mesh),
        "reshard": lambda x: fspmd.reshard(x, P("x"), mesh=mesh),
        "from_local": lambda x: fspmd.from_local(x, P("x"), mesh=mesh),
    }
    for name, check_vma in itertools.product(COLLECTIVES, (True, False)):
        calls[f"{name}, check_vma={check_vma}"] = functools.partial(within, COLLECTIVES[name], check_vma)
    wrong = []
    for (name, make), (what, call) in itertools.product(MISFITS.items(), calls.items()):
        try:
            call(make())
        except fspmd.ArgumentError as error:
            if name not in str(error):
                wrong.append(f"{what} of a {name}: {error}")
        else:
            wrong.append(f"{what} of a {name}")
    return wrong


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_no_transport_moves_are_refused_by_every_collective() -> None:
    assert refused("simulation") == []
    with Processes(2) as pool:
        assert pool.run(refused, "process_group") == [[]] * 2
