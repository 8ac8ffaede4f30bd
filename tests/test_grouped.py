"""Matrices in groups, `F.grouped_mm`, in all layouts, beside a loop over the groups on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dispatch_cases import placements
from processes import Processes
from torch import Tensor
from torch.nn import functional as F

from fspmd import ArgumentError, P, communication_log, device_get, device_put, jit, make_mesh, value_and_grad

I32, WHOLE = torch.int32, P()
SIZES = ((2,), (3,), (4,), (2, 3), (2, 2, 2))
#: where groups end: an empty one first, in the midst, last; all rows in one; no row in any; rows in none; all rows
OFFSETS = ([0, 3, 3, 7], [9, 9, 9, 9], [0, 0, 0, 0], [2, 4, 6, 6], [1, 5, 10, 10])
FORMS = {
    "rows": ((10, 6), (4, 6, 5)),
    "columns": ((4, 5, 6), (6, 10)),
    "groups": ((5, 10), (10, 6)),
    "batch": ((4, 3, 6), (4, 6, 5)),
}


def expected(form: str, a: Tensor, b: Tensor, ends: list[int]) -> Tensor:
    """In float64, zeros where no group is."""
    a, b = a.double(), b.double()
    if form == "batch":
        return a @ b
    starts = [0, *ends[:-1]]
    parts = []
    for g, rows in enumerate(map(slice, starts, ends)):
        left = a[rows] if form == "rows" else a[g] if form == "columns" else a[:, rows]
        parts.append(left @ (b[g] if form == "rows" else b[:, rows] if form == "columns" else b[rows]))
    if form == "groups":
        return torch.stack(parts)
    dim = 0 if form == "rows" else 1
    shape = [10 - ends[-1], 5] if form == "rows" else [5, 10 - ends[-1]]
    return torch.cat([*parts, torch.zeros(shape, dtype=torch.float64)], dim)


def check(
    form: str, mesh: Any, ends: list[int], specs: tuple[P, ...], where: P = WHOLE, around: Any = lambda f: f
) -> None:
    generator = torch.Generator().manual_seed(0)
    plain = [torch.randn(*shape, generator=generator) for shape in FORMS[form]]
    a, b = (x.clone().requires_grad_() for x in plain)
    wanted = expected(form, a, b, ends)
    weight = torch.randn(wanted.shape, generator=generator)
    grads = torch.autograd.grad((wanted * weight).sum(), (a, b), create_graph=True)
    seconds = torch.autograd.grad((grads[0] ** 2).sum() + (grads[1] ** 2).sum(), (a, b), allow_unused=True)
    given = [device_put(x, spec, mesh=mesh).requires_grad_() for x, spec in zip(plain, specs, strict=True)]
    offs = None if form == "batch" else device_put(torch.tensor(ends, dtype=I32), where, mesh=mesh)
    out = around(lambda a, b: F.grouped_mm(a, b, offs=offs))(*given)
    torch.testing.assert_close(device_get(out).double(), wanted.detach(), rtol=1e-4, atol=1e-5)
    found = torch.autograd.grad((out * weight).sum(), given, create_graph=True)
    for one, grad in zip(found, grads, strict=True):
        torch.testing.assert_close(device_get(one), grad.detach(), rtol=1e-4, atol=1e-5)
    again = torch.autograd.grad(sum((one * one).sum() for one in found), given)
    for one, second in zip(again, seconds, strict=True):
        torch.testing.assert_close(device_get(one), second, rtol=1e-3, atol=1e-4)


@pytest.mark.one_of(4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_values_and_gradients_twice(sizes: tuple[int, ...], form: str) -> None:
    mesh = make_mesh(sizes, tuple("xyz"[: len(sizes)]), transport="simulation")
    for n, specs in enumerate(placements(mesh, FORMS[form], 6)):
        check(form, mesh, OFFSETS[n % len(OFFSETS)], specs, P("x") if n % 2 else P())


@pytest.mark.parametrize("form", ["rows", "columns", "groups"])
def test_cotangents_may_have_any_strides(form: str) -> None:
    """Widths that torch's kernel takes as they are. Its backward raises where the cotangent is not dense, too."""
    mesh, shapes = make_mesh((2,), ("x",), transport="simulation"), {"rows": ((10, 8), (4, 8, 12))}
    shapes |= {"columns": ((4, 12, 8), (8, 12)), "groups": ((8, 12), (12, 12))}
    torch.manual_seed(0)
    plain = [torch.randn(shape) for shape in shapes[form]]
    given = [device_put(x, P(), mesh=mesh).requires_grad_() for x in plain]
    out = F.grouped_mm(*given, offs=torch.tensor([0, 3, 3, 7], dtype=I32))
    weight = torch.randn(out.shape)
    strided = device_put(weight.mT.contiguous(), P(), mesh=mesh).mT
    found = torch.autograd.grad(out, given, strided, retain_graph=True)
    for one, same in zip(found, torch.autograd.grad((out * weight).sum(), given), strict=True):
        torch.testing.assert_close(device_get(one), device_get(same))


@pytest.mark.one_of(2)
@pytest.mark.parametrize("ends", OFFSETS, ids=str)
def test_rows_and_groups_cut_move_nothing(ends: list[int]) -> None:
    mesh = make_mesh((2, 3), ("x", "y"), transport="simulation")
    for specs in ((P(), P("x")), (P("y"), P("x")), (P(), P(("x", "y"))), (P(None, "x"), P("y", "x"))):
        check("rows", mesh, ends, specs)
        a, b = (
            device_put(torch.ones(shape), spec, mesh=mesh) for shape, spec in zip(FORMS["rows"], specs, strict=True)
        )
        with communication_log() as log:
            out = F.grouped_mm(a, b, offs=torch.tensor(ends, dtype=I32))
        assert list(log) == [], str(log)
        assert out.spec.partition.unreduced


def test_halves_and_what_lies_transposed() -> None:
    mesh = make_mesh((4,), ("x",), transport="simulation")
    for dtype in (torch.bfloat16, torch.float16):
        a, w = torch.randn(10, 6).to(dtype), torch.randn(4, 5, 6).to(dtype)
        offs = torch.tensor(OFFSETS[0], dtype=I32)
        for spec in (P(), P("x"), P(None, "x"), P(None, None, "x")):
            out = F.grouped_mm(device_put(a, P(), mesh=mesh), device_put(w, spec, mesh=mesh).mT, offs=offs)
            assert out.dtype is dtype
            wanted = expected("rows", a, w.mT, OFFSETS[0])
            torch.testing.assert_close(device_get(out).double(), wanted, rtol=5e-2, atol=5e-2)


def test_under_jit_and_lowered() -> None:
    mesh = make_mesh((2, 3), ("x", "y"), transport="simulation")
    check("rows", mesh, OFFSETS[0], (P("y"), P("x")), around=jit)
    a, b = (device_put(torch.ones(shape), P("x"), mesh=mesh) for shape in FORMS["rows"])
    offs = device_put(torch.tensor(OFFSETS[0], dtype=I32), P(), mesh=mesh)
    step = jit(value_and_grad(lambda a, b: F.grouped_mm(a, b, offs=offs).sum(), argnums=(0, 1)))
    assert "_grouped_mm" in step.lower(a, b).as_text()
    value, _ = step(a, b)
    assert float(value) == 7 * 6 * 5


def test_what_torch_refuses() -> None:
    mesh = make_mesh((2,), ("x",), transport="simulation")
    a, b = device_put(torch.ones(10, 6), P("x"), mesh=mesh), torch.ones(4, 6, 5)
    offs = torch.tensor(OFFSETS[0], dtype=I32)
    for args, message in (
        ((a.double(), b.double(), offs), "Expected matrices of Float32"),
        ((a, b, offs.long()), "int32"),
        ((a, b, offs[:2]), "must match"),
        ((a, torch.ones(4, 7, 5), offs), "must match"),
        ((a, b, None), "offs"),
    ):
        with pytest.raises(ArgumentError, match=message):
            F.grouped_mm(args[0], args[1], offs=args[2])


def on_processes() -> None:
    mesh = make_mesh((2, 2), ("x", "y"))
    cases = {
        "rows": ((P("x"), P("y")), (P(None, "x"), P(("x", "y")))),
        "groups": ((P(None, "x"), P("x", "y")),),
        "columns": ((P("x"), P(None, "y")),),
    }
    for form, specs in ((form, specs) for form, several in cases.items() for specs in several):
        for ends in OFFSETS[:2]:
            check(form, mesh, ends, specs)
    check("rows", mesh, OFFSETS[0], (P("x"), P("y")), around=jit)


def test_on_processes() -> None:
    with Processes(4) as pool:
        pool.run(on_processes)
