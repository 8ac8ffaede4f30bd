"""Methods of `torch.Tensor`, in place and not, on a `Sharded`: values, shapes and gradients beside torch."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dispatch_cases import values
from full import FULL
from opinfo import sweep
from torch import Tensor

from fspmd import make_mesh

MODES = (("uneven", "line"), ("even", "grid"), ("uneven", "grid"))
#: torch's own: a broadcast that would change the operand's shape, or a method of Python 2
NOT_RUN = {"addbmm.addbmm_", "as_strided.as_strided_", "as_strided.partial_views.as_strided_", "__rdiv__.__rdiv__"}


def _forms() -> Iterator[tuple[str, str]]:
    """The ops of op_db, and the names of the methods that they have."""
    for name, op in sweep.ops().items():
        if name not in sweep.DRAWS | sweep.UNDEFINED | sweep.REFUSED.keys():
            for form in (op.method_variant, op.inplace_variant):
                method = getattr(form, "__name__", "")
                if hasattr(Tensor, method) and f"{name}.{method}" not in NOT_RUN:
                    yield name, method


def _chosen(key: str, part: int) -> bool:
    return FULL or zlib.crc32(key.encode()) % part == 0


def _check(op: Any, method: str, samples: Any, mesh: str) -> None:
    """Under some layouts of each sample's operands."""
    called = SimpleNamespace(
        name=op.name,
        variant_test_name=op.variant_test_name,
        op=lambda first, *args, **kwargs: getattr(first, method)(*args, **kwargs),
    )
    on, report = make_mesh(*sweep.MESHES[mesh], transport="simulation", device="cpu"), sweep.Report(op.name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in samples:
            if isinstance(sample.input, Tensor):
                sweep.run_sample(called, sample, on, 3, report)
    assert report.status == "clean", report.notes


@pytest.mark.one_of(4)
@pytest.mark.parametrize(("name", "method"), [one for one in _forms() if _chosen(".".join(one), 14)])
def test_methods_of_the_op_database(name: str, method: str) -> None:
    op, (sizes, mesh) = sweep.ops()[name], MODES[zlib.crc32(method.encode()) % len(MODES)]
    dtype = sweep.dtype_of(op)
    assert dtype is not None
    _check(op, method, sweep.samples(op, dtype, sizes, 2), mesh)


def _names(text: str) -> list[str]:
    return text.split()


_X, _Y = values(((5, 3), (5, 3)))
_SQUARE, _ROW = values(((3, 3), (5,)))
_SQUARE += 2 * torch.eye(3, dtype=torch.float64)
#: methods that op_db has under other names or not at all -> an operand and other arguments
OTHERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        _names(
            "absolute absolute_ adjoint arccos arccos_ arcsin arcsin_ arcsinh arcsinh_ arctan arctan_ arctanh "
            "arctanh_ fix fix_ negative negative_ relu relu_ hardshrink cpu detach dim ndimension nelement numel "
            "element_size size tolist numpy is_complex is_conj is_floating_point is_neg is_signed is_inference "
            "is_shared is_pinned"
        ),
        (_X,),
    ),
    **dict.fromkeys(_names("arccosh arccosh_"), (_X + 3,)),
    **dict.fromkeys(_names("det inverse slogdet"), (_SQUARE,)),
    **dict.fromkeys(
        _names(
            "arctan2 arctan2_ divide divide_ greater greater_ greater_equal greater_equal_ less less_ less_equal "
            "less_equal_ multiply multiply_ not_equal not_equal_ subtract subtract_ copy_ type_as is_same_size "
            "copysign_ nextafter_ fmax hypot_ ldexp_ xlogy_ float_power_"
        ),
        (_X, _Y + 2),
    ),
    "matrix_power": (_SQUARE, 3),
    "clip": (_X, -0.3, 0.4),
    "clip_": (_X, -0.3, 0.4),
    "ger": (_ROW, _ROW + 1),
    "prelu": (_X, _SQUARE[0]),
    "moveaxis": (_X, 0, 1),
    "swapaxes": (_X, 0, 1),
    "swapdims": (_X, 0, 1),
    "fill_diagonal_": (_X, 2.5),
    "type": (_X, torch.float32),
    "new_tensor": (_X, [[1.0, 2.0]]),
    "unsafe_split_with_sizes": (_X, [2, 3]),
    "item": (_X[0, 0],),
    "is_nonzero": (_X[0, 0],),
    "requires_grad_": (_X, False),
    "orgqr": (_X, _SQUARE[0]),
}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("method", [name for name in OTHERS if _chosen(name, 3)])
def test_methods_beside_the_op_database(method: str) -> None:
    first, *args = (
        x.clone().requires_grad_(method not in ("numpy", "tolist", "requires_grad_")) if isinstance(x, Tensor) else x
        for x in OTHERS[method]
    )
    sample = SimpleNamespace(input=first, args=tuple(args), kwargs={})
    for mesh in ("line", "grid"):
        _check(SimpleNamespace(name=method, variant_test_name=""), method, [sample], mesh)
