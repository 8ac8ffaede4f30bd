"""Fake tensors that were remembered are those that torch works out: the judge is its own mode, which remembers none."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from full import FULL
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch_calls import CALLS, UNEVEN_CALLS, Call, operands

from fspmd import fake_mode, jit
from fspmd.fake_mode import CachingFakeMode, UnknownValues


def _judge() -> FakeTensorMode:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False
    return mode


def _looks(values: list[Any]) -> list[Any]:
    """All there is to say of tensors without values, whose memory they share included."""
    memory = [x.untyped_storage()._cdata if isinstance(x, Tensor) else None for x in values]
    return [
        (x.dtype, x.shape, x.stride(), x.storage_offset(), x.device, x.requires_grad, x._version)
        + (x.untyped_storage().nbytes(), memory.index(memory[i]), torch._C._dispatch_keys(x).raw_repr())
        + ({name: one for name, one in vars(x).items() if name not in ("fake_mode", "constant")}, _fails(x))
        if isinstance(x, Tensor)
        else (type(x), x)
        for i, x in enumerate(values)
    ]


def _fails(x: Tensor) -> bool:
    """Whether reading where it lies is refused."""
    with warnings.catch_warnings(record=True):
        try:
            return bool(x.data_ptr())
        except RuntimeError:
            return True


def _run(mode: FakeTensorMode, call: Callable[..., Any], given: list[Tensor]) -> list[Any] | str:
    fake_of = mode.fake_of if isinstance(mode, CachingFakeMode) else mode.from_tensor
    fakes = [fake_of(x).requires_grad_(x.requires_grad) for x in given]
    with mode:
        try:
            results = pytree.tree_leaves(call(*fakes))
            ends = [x.sum() for x in results if isinstance(x, Tensor) and x.requires_grad]
            starts = [x for x in fakes if x.requires_grad]
            found = torch.autograd.grad(ends, starts, allow_unused=True) if ends else ()
        except Exception as error:
            return type(error.__cause__ if isinstance(error, UnknownValues) else error).__name__  # of torch's own
        return _looks([*fakes, *results, *found])


@pytest.mark.parametrize(("calls", "rows"), [(CALLS, 4), (UNEVEN_CALLS, 1), (UNEVEN_CALLS, 0)])
def test_results_and_gradients_are_those_of_torch(calls: dict[str, Call], rows: int) -> None:
    fake_mode._ENTRIES.clear()
    chosen = list(calls.items())[:: 1 if FULL else 3]
    for name, (call, kinds) in chosen:
        given = [x.requires_grad_(x.is_floating_point()) for x in operands(kinds, 0, rows)]
        expected = _run(_judge(), call, given)
        for _ in range(2):
            assert _run(CachingFakeMode(), call, given) == expected, name
    assert sum(map(len, fake_mode._ENTRIES.values())) > len(chosen)


def test_what_is_remembered_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    below = FakeTensorMode.__torch_dispatch__
    monkeypatch.setattr(
        FakeTensorMode, "__torch_dispatch__", lambda self, f, *a, **k: asked.append(f) or below(self, f, *a, **k)
    )
    fake_mode._ENTRIES.clear()
    for i in range(2):
        with CachingFakeMode():
            x = torch.zeros(4, 6)
            y, z = (x @ x.t()).unbind(), x + i  # a number that is not the same
            assert (y[0].shape, z.shape) == ((4,), (4, 6))
        counts = [
            asked.count(f) for f in (torch.ops.aten.mm.default, torch.ops.aten.unbind.int, torch.ops.aten.add.Tensor)
        ]
        assert counts == [1, 1, 1 + i]


def test_sparse_tensors() -> None:
    for _ in range(2):
        with CachingFakeMode():
            x = torch.ones(3, 2, requires_grad=True)
            sparse = x.to_sparse()
            assert (sparse.layout, sparse.shape) == (torch.sparse_coo, (3, 2))
            assert (sparse * 2).layout == torch.sparse_coo
            assert sparse.transpose(0, 1).to_dense().shape == (2, 3)


def test_default_dtypes_and_operands_alike_but_for_a_bit_have_results_of_their_own() -> None:
    fake_mode._ENTRIES.clear()
    with CachingFakeMode():
        ones = torch.ones(3, dtype=torch.int64)
        number = torch.ones(3, dtype=torch.complex64)
        for dtype in (torch.float32, torch.float64, torch.float32):
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                assert (ones + 0.5).dtype == torch.zeros(2).dtype == dtype
            finally:
                torch.set_default_dtype(before)
        for x in (number, number.conj(), number.imag, number.conj().imag):
            assert x.clone().is_conj() == x.clone().is_neg() == False  # noqa: E712
            assert (x.detach().is_conj(), x.detach().is_neg()) == (x.is_conj(), x.is_neg())
        with torch.inference_mode():
            assert (ones + ones).is_inference()
        assert not (ones + ones).is_inference()


_PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda a, b: a[0] @ b[0],
    "bmm": torch.bmm,
    "baddbmm": lambda a, b: torch.baddbmm(a.new_zeros(a.shape[0], a.shape[1], b.shape[2]), a, b),
    "einsum": lambda a, b: torch.einsum("zij,zjk->zki", a, b),
}


@pytest.mark.parametrize("name", _PRODUCTS)
@pytest.mark.parametrize("sizes", [(2, 0, 3, 4), (2, 3, 0, 4), (2, 3, 4, 0)], ids=str)
def test_products_of_nothing_take_the_dtypes_that_kernels_take(name: str, sizes: tuple[int, ...]) -> None:
    z, i, j, k = sizes

    def outcome(f: Callable[..., Tensor], dtypes: Any) -> Any:
        a, b = torch.zeros(z, i, j, dtype=dtypes[0]), torch.zeros(z, j, k, dtype=dtypes[1])
        a, b = (x.requires_grad_(x.is_floating_point()) for x in (a, b))
        try:
            out = f(a, b)
            gradients = torch.autograd.grad(out.sum(), [x for x in (a, b) if x.requires_grad])
        except RuntimeError:
            return "refused"
        return [(x.dtype, x.shape, bool(x.any())) for x in (out, *gradients)]

    for dtypes in itertools.product((torch.float32, torch.float64, torch.bfloat16, torch.int64), repeat=2):
        assert outcome(jit(_PRODUCTS[name]), dtypes) == outcome(_PRODUCTS[name], dtypes)


aten = torch.ops.aten
POINTWISE: dict[str, tuple[Any, dict[str, Any]]] = {
    "mul": (aten.mul.Tensor, {}),
    "add": (aten.add.Tensor, {"alpha": 2}),
    "sub": (aten.sub.Tensor, {}),
    "div": (aten.div.Tensor_mode, {"rounding_mode": "floor"}),
    "maximum": (aten.maximum.default, {}),
    "atan2": (aten.atan2.default, {}),
    "pow": (aten.pow.Tensor_Tensor, {}),
    "silu_backward": (aten.silu_backward.default, {}),
    "gelu_backward": (aten.gelu_backward.default, {}),
    "tanh_backward": (aten.tanh_backward.default, {}),
    "sigmoid_backward": (aten.sigmoid_backward.default, {}),
    "addcmul": (aten.addcmul.default, {"value": 2}),
    "addcdiv": (aten.addcdiv.default, {}),
    "lerp": (aten.lerp.Tensor, {}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", POINTWISE)
def test_strides_of_expanded_operands_are_those_of_kernels(name: str, dtype: torch.dtype) -> None:
    """A gradient is often expanded, and the value that it meets transposed."""
    function, options = POINTWISE[name]
    one, row, x = torch.ones((), dtype=dtype), torch.ones(5, dtype=dtype), torch.ones(2, 4, 3, 5, dtype=dtype)
    laid = [x.expand(2, 3, 4, 5) for x in (one, row)]
    laid += [x.transpose(1, 2), x.mT.permute(0, 3, 1, 2), x[:1].transpose(1, 2).expand(2, 3, 4, 5)]
    mode = CachingFakeMode()
    count = sum(isinstance(argument.type, torch.TensorType) for argument in function._schema.arguments)
    for given in itertools.product(laid, repeat=count):
        fakes = [mode.from_tensor(y) for y in given]
        with mode:
            found = function(*fakes, **options)
        assert found.stride() == function(*given, **options).stride(), [y.stride() for y in given]
        assert found.dtype is dtype


def test_strides_of_a_kernel_with_its_operands_in_another_order() -> None:
    """That of relu takes the value first, and its function the gradient."""
    laid = torch.randn(4, 1, 3).expand(4, 5, 3), torch.randn(3, 5, 4).permute(2, 1, 0)
    mode = CachingFakeMode()
    fakes = [mode.from_tensor(x) for x in laid]
    with mode:
        found = aten.threshold_backward(*fakes, 0)
    assert found.stride() == aten.threshold_backward(*laid, 0).stride()


@pytest.mark.parametrize("reverse", [False, True])
def test_fakes_of_conjugated_and_negated_views_lie_in_the_memory_of_their_base(reverse: bool) -> None:
    x = torch.ones(3, dtype=torch.complex64)
    views = [x, x.conj(), x.conj()[1:], x.imag, x.conj().imag]
    mode = CachingFakeMode()
    fakes = [mode.fake_of(view.detach()) for view in (reversed(views) if reverse else views)]
    assert len({fake.untyped_storage()._cdata for fake in fakes}) == 1
    for view, fake in zip(views, reversed(fakes) if reverse else fakes, strict=True):
        assert (fake.is_conj(), fake.is_neg(), fake.dtype) == (view.is_conj(), view.is_neg(), view.dtype)
        assert (fake.shape, fake.stride()) == (view.shape, view.stride())
        assert fake.storage_offset() == view.storage_offset()
