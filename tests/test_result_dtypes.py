"""Dtypes that torch has no kernel for: refused as torch refuses them, on all ranks, before anything moves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from full import FULL
from processes import Processes
from torch import Tensor
from torch.nn import functional as F

from fspmd import ArgumentError, P, communication_log, device_put, make_mesh

DTYPES: Final = (
    *(torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float64),
    *(torch.complex64, torch.complex128),
)
_OF_ALL_OR_A_DIM: Final = (
    "sum mean median nanmedian count_nonzero prod any all nansum var std var_mean std_mean amax amin aminmax "
    "argmax argmin max min argsort sort"
)
_OF_A_DIM: Final = "mode softmax log_softmax logsumexp cumsum cumprod cummax cummin logcumsumexp"
CALLS: Final[dict[str, Callable[[Any], Any]]] = {
    **{name: getattr(torch, name) for name in _OF_ALL_OR_A_DIM.split()},
    **{
        f"{name} of a dim": functools.partial(getattr(torch, name), dim=0)
        for name in (_OF_ALL_OR_A_DIM + " " + _OF_A_DIM).split()
    },
    "a norm": torch.linalg.vector_norm,
    "topk": lambda x: torch.topk(x, 3, 0),
    "kthvalue": lambda x: torch.kthvalue(x, 3, 0),
    "histc": lambda x: torch.histc(x, 4, 0, 3),
    "layer_norm": lambda x: F.layer_norm(x, (5,)),
    "max_pool1d": lambda x: F.max_pool1d(x[None], 2),
    "avg_pool1d": lambda x: F.avg_pool1d(x[None], 3),
    "a product of matrices": lambda x: x.mT @ x,
    "distances": lambda x: torch.cdist(x, x),
}
SPECS: Final = (P(), P("a"), P(None, "b"), P(("a", "b")), P("a", "b"))


def _refusals(name: str, mesh: Any, shape: tuple[int, int] = (4, 5)) -> list[str]:
    """Where a call on Sharded values is refused otherwise than torch refuses it."""
    wrong = []
    for dtype in DTYPES:
        x = torch.ones(shape, dtype=dtype)
        expected = _refused(CALLS[name], x)
        for spec in SPECS:
            value = device_put(x, spec, mesh=mesh)
            with communication_log() as log:
                found = _refused(CALLS[name], value)
            if (expected is None) != (found is None) or not isinstance(found, ArgumentError | None) or (found and log):
                wrong.append(f"{dtype} {spec}: {found!r} for {expected!r}")
    return wrong


def _refused(call: Callable[[Any], Any], x: Tensor) -> Exception | None:
    try:
        call(x)
    except Exception as error:
        return error
    return None


@pytest.mark.one_of(12)
@pytest.mark.parametrize("name", CALLS)
def test_dtypes_are_refused_as_torch_does(name: str) -> None:
    assert not _refusals(name, make_mesh((2, 3), ("a", "b")))


@pytest.mark.parametrize("name", ["median", "var", "amax", "argmin of a dim", "topk"])
def test_the_words_are_those_of_the_kernel(name: str) -> None:
    kind = torch.bool if name == "var" else torch.complex64
    x = torch.ones((4, 5), dtype=kind)
    expected = _refused(CALLS[name], x)
    found = _refused(CALLS[name], device_put(x, P("a"), mesh=make_mesh((2, 3), ("a", "b"))))
    assert str(expected) in str(found)


def _on_a_process() -> list[str]:
    names = ["var", "median of a dim", "amax", "argmin", "nansum", "topk", "sort"]
    mesh = make_mesh((2, 1), ("a", "b"))
    every = [(name, shape) for shape in ((1, 5), (4, 5), (3, 5)) for name in names]
    return [one for name, shape in every[:: 1 if FULL else 4] for one in _refusals(name, mesh, shape)]


def test_processes_refuse_alike_where_some_have_no_elements() -> None:
    with Processes(2) as pool:
        assert pool.run(_on_a_process) == [[], []]


@pytest.mark.parametrize(
    "draw", [torch._standard_gamma, lambda x: F.fractional_max_pool2d(x.view(1, 4, 6), 2, output_size=(2, 3))]
)
def test_asking_draws_no_random_numbers(draw: Callable[[Any], Any]) -> None:
    """Neither of a function that torch tags as random, nor of one that draws in Python."""
    x = device_put(torch.ones(4, 6, dtype=torch.float64), P("a"), mesh=make_mesh((2, 3), ("a", "b")))
    after = []
    for _ in range(2):  # the first call is planned
        torch.manual_seed(0)
        draw(x)
        after.append(float(torch.rand(())))
    assert after[0] == after[1]
