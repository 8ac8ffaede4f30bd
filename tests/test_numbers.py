"""Floats are in no key: a second one is planned and traced no more, and its values and gradients are its own."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from dispatch_cases import values
from full import FULL
from number_cases import Numbered, may_be_planned_anew, numbered
from number_programs import NUMBERED, check_numbers
from opinfo.sweep import DRAWS, REFUSED, UNDEFINED, Report, compare, gradients, on_one_rank, ops, placements
from torch import Tensor
from torch.nn import functional as F

import fspmd
from fspmd import Mesh, P, device_get, device_put, make_mesh
from fspmd.global_view import unruled

MODES = (("uneven", (4,), ("x",)), ("even", (4,), ("x",)), ("uneven", (2, 3), ("x", "y")))
CHOSEN = [name for name in ops() if name not in REFUSED and (FULL or zlib.crc32(name.encode()) % 12 == 0)]


@pytest.mark.one_of(8)
@pytest.mark.parametrize("name", CHOSEN)
def test_another_float_is_neither_planned_nor_traced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, shape, axes = MODES[zlib.crc32(name.encode()) // 12 % len(MODES)]
    mesh, traced = make_mesh(shape, axes, transport="simulation", device="cpu"), []
    decompose = unruled.decompose
    monkeypatch.setattr(unruled, "decompose", lambda *args: traced.append(args) or decompose(*args))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in numbered(ops()[name], sizes, 3 if FULL else 1):
            _check(name, case, mesh, traced)


def _check(name: str, case: Numbered, mesh: Mesh, traced: list[Any]) -> None:
    for specs in placements(case.tensors, mesh, 6 if FULL else 2):
        fspmd.propagation_cache_clear()
        for turn, v in enumerate((case.values[0], *case.values)):
            made = fspmd.propagation_cache_info().misses, len(traced)
            call = case.of(v)
            plain = [x.detach().clone().requires_grad_(x.requires_grad) for x in case.tensors]
            expected, kind = call([x * 1 if x.requires_grad else x for x in plain])
            grads: list[Tensor | None] = gradients(expected, plain)
            if turn > 2 and not all(map(_is_finite, (*expected, *grads))):
                continue
            if name.removesuffix(".with_train") in DRAWS or "dropout" in case.name:
                alone = on_one_rank(call, case.tensors, expected)
                expected, grads = alone[0], alone[1]
                made = fspmd.propagation_cache_info().misses, len(traced)
            compare(call, case.tensors, specs, mesh, expected, grads, kind, Report(name), name not in UNDEFINED)
            if turn == 2 and not may_be_planned_anew(name):
                found = fspmd.propagation_cache_info().misses, len(traced)
                assert found == made, f"{name} of {case.name} = {v!r}, {specs}: planned, traced {made}, then {found}"


def _is_finite(x: Any) -> bool:
    return not isinstance(x, Tensor) or bool(x.isfinite().all())


@pytest.mark.one_of(6)
@pytest.mark.parametrize("numbers", [(0.25, 0.5, 0.75), (1, 2, 3)], ids=["floats", "ints"])
@pytest.mark.parametrize("name", NUMBERED)
def test_numbers_that_do_not_bear_on_layouts_never_miss(name: str, numbers: Sequence[Any]) -> None:
    for shape, axes in (((4,), ("x",)), ((3, 2), ("x", "y"))):
        check_numbers(name, make_mesh(shape, axes, transport="simulation"), numbers)


@pytest.mark.one_of(6)
@pytest.mark.parametrize("name", NUMBERED)
def test_numbers_are_constants_of_a_record(name: str) -> None:
    check_numbers(name, make_mesh((4,), ("x",), transport="simulation"), (0.25, 0.5), jitted=True)


@pytest.mark.parametrize(
    ("f", "traces"),
    [
        (lambda x, v: F.local_response_norm(x[:, :, None], 3, alpha=v, k=1 + v), 1),
        (lambda x, v: torch.gradient(x, spacing=v, dim=0)[0], 1),
        (lambda x, v: torch.cdist(x, x + 1, p=1 + v), 3),  # it looks at the number
    ],
)
def test_numbers_in_a_graph_are_operands_unless_they_are_looked_at(
    f: Callable[[Any, float], Any], traces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, traced = values(((4, 6),))[0], []
    x, decompose = device_put(whole, P("x"), mesh=make_mesh((4,), ("x",), transport="simulation")), unruled.decompose
    monkeypatch.setattr(unruled, "decompose", lambda *args: traced.append(args) or decompose(*args))
    fspmd.propagation_cache_clear()
    for v in (0.25, 0.5, 0.25, 0.5, 0.75):
        torch.testing.assert_close(device_get(f(x, v)), f(whole, v))
    assert len(traced) == traces
