"""`linearity.py` tells the truth: each function that it names is linear, in what it says, by torch alone.

Samples are those of torch's database of functions, and calls written here for what that lacks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import optree
import pytest
import torch
import torch.nn.functional as F
from full import FULL
from opinfo.sweep import ops
from torch import Tensor

from fspmd import P, VarianceError, device_get, device_put, make_mesh, pcast, psum, shard_map
from fspmd.ops.linearity import ADDED, AVERAGES, BETWEEN, LINEAR, WHEN

F64, aten = torch.float64, torch.ops.aten
Sample = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
PLACES = torch.tensor([2, 0, 2])
_RANDOM = torch.Generator().manual_seed(0)


def _numbers(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=_RANDOM)


def _complex(*shape: int) -> Tensor:
    return _numbers(*shape, dtype=torch.complex128)


def _resized(name: str, n: int, *options: Any) -> Sample:
    return getattr(aten, name), (_numbers(1, 2, *(3, 4, 5)[:n]), [5, 3, 4][:n], *options), {}


#: of functions that the database lacks
CALLS: dict[str, list[Sample]] = {
    **{f"_adaptive_avg_pool{n}d": [_resized(f"adaptive_avg_pool{n}d", n)] for n in (1, 2, 3)},
    **{f"upsample_nearest{n}d": [_resized(f"upsample_nearest{n}d", n)] for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": [_resized(f"_upsample_nearest_exact{n}d", n)] for n in (1, 2, 3)},
    "upsample_linear1d": [_resized("upsample_linear1d", 1, True)],
    "upsample_bilinear2d": [_resized("upsample_bilinear2d", 2, False)],
    "upsample_bicubic2d": [_resized("upsample_bicubic2d", 2, False)],
    "upsample_trilinear3d": [_resized("upsample_trilinear3d", 3, False)],
    "_upsample_bicubic2d_aa": [_resized("_upsample_bicubic2d_aa", 2, False)],
    **{
        f"{kind}_pad{n}d": [(getattr(aten, f"{kind}_pad{n}d"), (_numbers(1, 2, *(4,) * n), [1, 2] * n), {})]
        for kind in ("reflection", "replication")
        for n in (1, 2, 3)
    },
    **{name: [(getattr(aten, name), (_complex(3, 2),), {})] for name in ("_conj", "_conj_physical", "_neg_view")},
    "_fft_c2c": [(aten._fft_c2c, (_complex(4, 3), [0], 0, True), {})],
    "_fft_r2c": [(aten._fft_r2c, (_numbers(4, 3), [0], 0, True), {})],
    "_fft_c2r": [(aten._fft_c2r, (_complex(4, 3), [0], 0, 6), {})],
    "_to_copy": [(aten._to_copy, (_numbers(3),), {"dtype": torch.complex128})],
    "index": [(aten.index, (_numbers(4, 3), [PLACES]), {})],
    "_unsafe_index": [(aten._unsafe_index, (_numbers(4, 3), [PLACES]), {})],
    "_unsafe_index_put": [
        (aten._unsafe_index_put, (_numbers(4), [PLACES], _numbers(3), to), {}) for to in (True, False)
    ],
    "_unsafe_view": [(aten._unsafe_view, (_numbers(4, 3), [12]), {})],
    "alias": [(aten.alias, (_numbers(3),), {})],
    "lift_fresh_copy": [(aten.lift_fresh_copy, (_numbers(3),), {})],
    "col2im": [(aten.col2im, (_numbers(1, 4, 6), [3, 4], [2, 2], [1, 1], [0, 0], [1, 1]), {})],
    "im2col": [(aten.im2col, (_numbers(1, 1, 3, 4), [2, 2], [1, 1], [0, 0], [1, 1]), {})],
    "fold": [(F.fold, (_numbers(1, 4, 6), (3, 4), 2), {})],
    "convolution": [
        (aten.convolution, (_numbers(1, 2, 5), _numbers(3, 2, 2), bias, [1], [0], [1], False, [0], 1), {})
        for bias in (None, _numbers(3))
    ],
    "copy": [(aten.copy, (_numbers(3), _numbers(3)), {})],
    "data": [(lambda x: x.data, (_numbers(3),), {})],
    "detach": [(torch.detach, (_numbers(3),), {})],
    "getitem": [(operator.getitem, (_numbers(4, 3), index), {}) for index in (1, (slice(1, 3), None), PLACES, ...)],
    "pos": [(operator.pos, (_numbers(3),), {})],
    "rmul": [(Tensor.__rmul__, (_numbers(3), 2.5), {})],
    "type": [(Tensor.type, (_numbers(3), torch.complex128), {})],
    "type_as": [(Tensor.type_as, (_numbers(3), _complex(1)), {})],
    "zero": [(aten.zero, (_numbers(3),), {})],
}


def _in_database() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for op in ops().values():
        if op.name.startswith(("masked.", "sparse.")):
            continue
        for name in (op.name, *(alias.name for alias in op.aliases)):
            for key in {name, name.rsplit(".", 1)[-1], name.replace(".", "_")}:
                found.setdefault(key, []).append(op)
    return found


DATABASE = _in_database()


def samples(name: str) -> Iterator[Sample]:
    """Calls of a function, on values of double precision."""
    yield from CALLS.get(name, ())
    for op in DATABASE.get(name, ()) if name not in CALLS else ():
        dtype = F64 if F64 in op.dtypes else torch.complex128
        for i, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=False)):
            if i < (200 if FULL else 12):
                yield op.op, (sample.input, *sample.args), sample.kwargs


def _terms(name: str, tensors: list[Tensor]) -> list[list[int]]:
    """In what the function is said to be linear: each entry are tensors that are varied together."""
    floats = [i for i, x in enumerate(tensors) if x.is_floating_point() or x.is_complex()]
    if LINEAR[name] == "first":
        return [[0]]
    if LINEAR[name] == "sum":
        return [[0, len(tensors) - 1] if name in BETWEEN else floats]
    added = [i for i in floats if i == ADDED.get(name)]
    return [[i, *added] for i in floats if i not in added]


def is_linear(name: str, sample: Sample) -> bool:
    """Whether the results on two terms add up to the result on their sum."""
    function, args, kwargs = sample
    leaves, treedef = optree.tree_flatten((args, kwargs), none_is_leaf=True)
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
    for together in _terms(name, [leaves[i] for i in places]):
        found = []
        one, two = ([torch.randn_like(leaves[places[i]]) for i in together] for _ in range(2))
        for values in (one, two, [a + b for a, b in zip(one, two, strict=True)]):
            given = list(leaves)
            for i, value in zip(together, values, strict=True):
                given[places[i]] = value
            args, kwargs = treedef.unflatten(given)
            found.append([x for x in optree.tree_leaves(function(*args, **kwargs)) if isinstance(x, Tensor)])
        for a, b, both in zip(*found, strict=True):
            exact = 20 * torch.finfo(both.dtype).eps  # of a narrow dtype: terms are rounded
            if not torch.allclose(a + b, both, rtol=max(exact, 1e-9), atol=max(exact, 1e-9)):
                return False
    return True


def _is_finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", sorted(LINEAR))
def test_what_is_called_linear_is(name: str) -> None:
    torch.manual_seed(0)
    count = 0
    for sample in samples(name):
        function, args, kwargs = sample
        tensors = [x for x in optree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if (name in WHEN and not WHEN[name](*args, **kwargs)) or not all(map(_is_finite, tensors)):
            continue
        assert is_linear(name, sample), (function, args, kwargs)
        count += 1
    assert count


@pytest.mark.parametrize("name", sorted(WHEN))
def test_what_is_linear_of_some_arguments_alone_is_not_of_others(name: str) -> None:
    refused = {
        **dict.fromkeys(("add", "sub", "subtract", "rsub"), (_numbers(3), 2.0)),
        **dict.fromkeys(AVERAGES, (_integers(3),)),
        "view": (_numbers(4), torch.int64),
        "pad": (_numbers(4), (1, 1), "constant", 2.0),
        "constant_pad_nd": (_numbers(4), (1, 1), 2.0),
        "scatter_reduce": (_numbers(3), 0, PLACES, _numbers(3), "amax"),
        "index_put": (_numbers(4), (PLACES,), _numbers(3), False),
        "_unsafe_index_put": (_numbers(4), [PLACES], _numbers(3), False),
    }
    named = {"rounding_mode": "floor"} if name in ("div", "divide", "true_divide") else {}
    if name == "diff":
        named = {"prepend": _numbers(1)}
    if name.startswith("atleast"):
        refused[name] = _numbers(3), _numbers(3)
    args = refused.get(name, (_numbers(3), 0.7) if named.get("rounding_mode") else (_numbers(3),))
    assert not WHEN[name](*args, **named)


#: calls on a pending sum u, another one v, a plain w and one of places, all of [3]: near what is linear, and not linear
NEAR: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "a rounded quotient": lambda u, v, w: torch.div(u, 2, rounding_mode="floor"),
    "other bits": lambda u, v, w: u.view(torch.float32),
    "the type of one": lambda u, v, w: w.type_as(u),
    "a number": lambda u, v, w: u + 1,
    "a number in front": lambda u, v, w: 1 - u,
    "padding with ones": lambda u, v, w: F.pad(u, (1, 1), value=1.0),
    "values set": lambda u, v, w: u.index_put((PLACES,), v),
    "values scattered": lambda u, v, w: u.scatter(0, PLACES, v),
    "the bias alone": lambda u, v, w: torch.addmm(u, w[:, None], w[None]),
    "the product alone": lambda u, v, w: torch.addmm(w, u[:, None], w[None]),
    "both factors": lambda u, v, w: torch.outer(u, v),
    "written into a plain one": lambda u, v, w: w.clone().mul_(u),
    "an equal one": lambda u, v, w: u.add_(w),
    "two at once": lambda u, v, w: torch.atleast_2d(u, w),
    "a join with a plain one": lambda u, v, w: torch.cat([u, w]),
    "a number by name": lambda u, v, w: torch.add(u, other=1),
    "both operands by name": lambda u, v, w: torch.add(other=1, input=u),
    "a number subtracted by name": lambda u, v, w: u.sub(other=1),
    "a number added in place": lambda u, v, w: (u * 1).add_(other=1),
    "a number of NumPy's": lambda u, v, w: u + np.float32(1),
    "an integer of NumPy's": lambda u, v, w: u + np.int64(1),
    "a rounded quotient by name": lambda u, v, w: u.div(other=2, rounding_mode="floor"),
    "both factors by name": lambda u, v, w: F.linear(u[None], bias=w[:1], weight=v[None]),
    "both matrices by name": lambda u, v, w: torch.addmm(mat1=u[None], mat2=v[:, None], input=w[:1, None]),
    "both sides of a convolution": lambda u, v, w: F.conv1d(u[None, None], bias=w[:1], weight=v[None, None, :2]),
    "two of a difference": lambda u, v, w: torch.diff(prepend=v, input=u),
    "padding by name": lambda u, v, w: F.pad(value=1.0, pad=(1, 1), input=u),
}
#: the same of integers
NEAR_INTEGERS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "truths": lambda u, v, w: u.to(torch.bool),
    "a sum of truths": lambda u, v, w: u.sum(dtype=torch.bool),
    "truths of complex numbers": lambda u, v, w: torch.complex(u.double(), v.double()).to(torch.bool),
    "integers of complex numbers": lambda u, v, w: torch.complex(u.double(), v.double()).to(torch.int64),
    "floats copied": lambda u, v, w: (u * 1).copy_(v * 0.5),
    "floats joined": lambda u, v, w: u.slice_scatter(v * 0.5),
    "a float set": lambda u, v, w: u.select_scatter((v * 0.5)[0], 0, 0),
    "a diagonal of floats": lambda u, v, w: u.diag().diagonal_scatter(v * 0.5),
    "an average": lambda u, v, w: F.avg_pool2d(u[:2].expand(1, 2, 2), 2),
    "between bytes": lambda u, v, w: F.interpolate(u.to(torch.uint8).expand(1, 1, 2, 3), size=(3, 5), mode="bilinear"),
}


def _integers(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=_RANDOM) | 1


#: what is near linear, with numbers that show it
CASES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], Callable[..., Tensor]]] = {
    **{name: (call, _numbers) for name, call in NEAR.items()},
    **{name: (call, _integers) for name, call in NEAR_INTEGERS.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_near_linear_is_refused_in_bodies(name: str) -> None:
    call, numbers = CASES[name]

    def body(a: Tensor, w: Tensor) -> Tensor:
        u, v = pcast(a, "x", to="unreduced"), pcast(2 * a, "x", to="unreduced")
        return psum(call(u, v, w), "x")

    mesh = make_mesh((4,), ("x",))
    with pytest.raises(VarianceError, match=r"unreduced over|rounding a pending sum"):
        shard_map(body, mesh=mesh, in_specs=(P("x"), P()), out_specs=P())(numbers(12), numbers(3))


@pytest.mark.parametrize("name", CASES)
def test_what_is_near_linear_adds_up_first_in_the_global_view(name: str) -> None:
    call, numbers = CASES[name]
    a, w = numbers(4, 3), numbers(3)
    total, mesh = a.sum(0), make_mesh((4,), ("x",))
    x = device_put(a, P("x"), mesh=mesh)
    found = call(x.sum(0), (2 * x).sum(0), device_put(w, P(), mesh=mesh))
    torch.testing.assert_close(device_get(found), call(total, 2 * total, w), rtol=1e-12, atol=1e-12)


#: calls that keep a sum pending since both views read one registry
KEPT: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "addmm": lambda u, v, w: torch.addmm(v, u[:, None], w[None]),
    "a convolution": lambda u, v, w: F.conv1d(u[None, None], w[None, None, :2]),
    "reflected": lambda u, v, w: F.pad(u[None], (1, 1), mode="reflect"),
    "in place": lambda u, v, w: (u * 1).mul_(w).div_(2).neg_(),
    "zero": lambda u, v, w: (u * 1).zero_(),
    "copied": lambda u, v, w: (u * 1).copy_(v),
    "0 + x": lambda u, v, w: sum([u, v]),
    "a product by name": lambda u, v, w: torch.addmm(mat1=w[None], mat2=u[:, None], input=v[:1, None]),
    "a difference by name": lambda u, v, w: torch.diff(input=u),
    "added rows by name": lambda u, v, w: u.index_add(source=v, dim=0, index=PLACES),
    "scattered by name": lambda u, v, w: torch.scatter_add(src=v, index=PLACES, dim=0, input=u),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_linear_keeps_a_sum_pending_in_bodies(name: str) -> None:
    def body(a: Tensor, w: Tensor) -> Tensor:
        u, v = pcast(a, "x", to="unreduced"), pcast(2 * a, "x", to="unreduced")
        return psum(KEPT[name](u, v, w), "x")

    a, w = _numbers(12), _numbers(3)
    found = shard_map(body, mesh=make_mesh((4,), ("x",)), in_specs=(P("x"), P()), out_specs=P())(a, w)
    total = torch.stack(a.chunk(4)).sum(0)
    torch.testing.assert_close(found.local, KEPT[name](total, 2 * total, w), rtol=1e-12, atol=1e-12)
