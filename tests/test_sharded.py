"""What Python and torch ask of a `Sharded` besides torch functions: protocols, memory, parameters."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from dispatch_cases import check_case
from torch import nn
from torch.nn import functional as F

from fspmd import (
    ArgumentError,
    FspmdError,
    P,
    ShapeError,
    Sharded,
    TensorSpec,
    VarianceError,
    communication_log,
    device_get,
    device_put,
    grad,
    jit,
    make_mesh,
)

LINE = make_mesh((4,), ("x",), transport="simulation")
PLAIN = torch.arange(15.0).view(5, 3)


@pytest.fixture(params=[P("x"), P(None, "x"), P(), P(unreduced={"x"})], ids=repr)
def x(request: pytest.FixtureRequest) -> Any:
    return device_put(PLAIN, request.param, mesh=LINE)


def test_protocols(x: Any) -> None:
    assert (3.0 in x, 3.5 in x, len(x)) == (True, False, 5)
    assert torch.equal(device_get(next(iter(reversed(x)))), PLAIN[-1])
    assert complex((x + 2j)[1, 1]) == 4 + 2j
    assert math.sqrt(x[3, 0]) == 3.0
    assert (x.size(-1), x.size(dim=0)) == (3, 5)


def test_attributes_and_trees(x: Any) -> None:
    x.requires_grad = True
    assert x.local.requires_grad
    assert x.to("cpu").spec is x.spec


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_what_takes_tensors_takes_it(x: Any) -> None:
    assert isinstance(x, torch.Tensor)
    assert torch.is_tensor(x)
    assert torch.equal(device_get(torch.tensor(x)), PLAIN)
    assert torch.equal(device_get(torch.as_tensor(x, dtype=torch.float64)), PLAIN.double())
    leaf = nn.Parameter(x)
    assert isinstance(leaf, nn.Parameter)
    assert isinstance(copy.deepcopy(leaf), nn.Parameter)
    assert leaf.requires_grad
    assert not isinstance(leaf * 1, nn.Parameter)
    place = x[0, 2].long()  # 2: numbers that C asks for
    assert torch.equal(torch.arange(place), torch.arange(2))
    assert torch.ones(3).add(1, alpha=place)[place] == 3
    assert PLAIN[place].tolist() == PLAIN[2].tolist()
    torch.testing.assert_close(x.reshape(-1), PLAIN.reshape(-1))


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize(
    "make", [torch.tensor, torch.as_tensor, torch.asarray, PLAIN.new_tensor], ids=lambda make: make.__name__
)
def test_copies_of_data_obey_device(x: Any, make: Callable[..., Any]) -> None:
    """Torch asks the shell for its device, which is a meta device, so ``device="meta"`` looked like no device."""
    assert torch.equal(device_get(make(x)), PLAIN)
    assert torch.equal(device_get(make(x, device="cpu")), PLAIN)
    if x.spec.partition.mentioned:
        with pytest.raises(ArgumentError, match=r"Sharded .* to .meta.*; write device_get\(x\).to\(.meta.\)"):
            make(x, device="meta")
    else:
        assert make(x, device="meta").device.type == "meta"


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_new_tensor_of_a_sharded_is_a_copy_of_it(x: Any) -> None:
    copied = x.new_tensor(x, requires_grad=True)
    assert torch.equal(device_get(copied).detach(), PLAIN)
    assert copied.spec == x.spec
    assert copied.requires_grad
    (copied * copied).sum().backward()
    assert torch.equal(device_get(copied.grad), 2 * PLAIN)
    assert x.long().new_tensor(x).dtype == torch.int64


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_conversions_to_the_same_dtype_and_device_are_no_copies(x: Any) -> None:
    for make in torch.as_tensor, torch.asarray:
        assert make(x) is x
        assert make(x, device="cpu") is x
        assert make(x, dtype=x.dtype, device=x.device) is x
        assert make(x, dtype=torch.float64) is not x
    for copied in torch.tensor(x), torch.tensor(x, device="cpu"), PLAIN.new_tensor(x), torch.asarray(x, copy=True):
        copied.zero_()
        assert torch.equal(device_get(x), PLAIN)


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_copies_of_data_under_jit(x: Any) -> None:
    for make in torch.tensor, torch.as_tensor, x.new_tensor:
        recorded = jit(lambda x, make=make: make(x, dtype=torch.float64) * 2)
        for y in x, x + 1:
            assert torch.equal(device_get(recorded(y)), 2 * device_get(y).double())


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_no_gradient_is_lost_below_torch_functions() -> None:
    w = device_put(PLAIN, P("x"), mesh=LINE).requires_grad_()
    torch.Tensor(w).square().sum().backward()
    assert torch.equal(device_get(w.grad), 2 * PLAIN)
    with torch.no_grad():
        assert torch.equal(device_get(torch.Tensor(w)), PLAIN)
    assert not torch.tensor(w).requires_grad


@pytest.mark.parametrize("make", [torch.as_tensor, torch.asarray], ids=lambda make: make.__name__)
def test_conversions_of_data_have_gradients(x: Any, make: Callable[..., Any]) -> None:
    """Distributions convert the value so: ``Gamma(a, b).log_prob(x)``."""

    def loss(x: Any) -> Any:
        return (make(x, dtype=torch.float64, device="cpu") ** 3).sum() + (make(x, device="cpu") ** 2).sum()

    expected = 3 * PLAIN**2 + 2 * PLAIN
    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    assert torch.equal(device_get(leaf.grad), expected)
    assert torch.equal(device_get(jit(grad(loss))(x.clone())), expected)
    second = torch.autograd.grad(loss(leaf), leaf, create_graph=True)[0].sum()
    assert torch.equal(device_get(torch.autograd.grad(second, leaf)[0]), 6 * PLAIN + 2)


def test_derivatives_of_torch_func(x: Any) -> None:
    expected = torch.func.grad(lambda p: (p["w"] ** 3).sum())({"w": PLAIN})["w"]
    assert torch.equal(device_get(torch.func.grad(lambda p: (p["w"] ** 3).sum())({"w": x}))["w"], expected)
    value, pull = torch.func.vjp(torch.sin, x)
    torch.testing.assert_close(device_get(value), PLAIN.sin())
    torch.testing.assert_close(device_get(pull(x)[0]), PLAIN.cos() * PLAIN)


def test_saved_and_loaded(x: Any) -> None:
    leaf, file = x.clone().requires_grad_(), io.BytesIO()
    (leaf * 2).sum().backward()
    torch.save({"x": x, "leaf": leaf}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for copied in (loaded["x"], loaded["leaf"], pickle.loads(pickle.dumps(x)), copy.copy(x), copy.deepcopy(x)):
        assert copied.spec is x.spec
        assert torch.equal(device_get(copied.detach()), PLAIN)
    assert loaded["leaf"].requires_grad
    assert torch.equal(device_get(copy.deepcopy(leaf).grad), device_get(leaf.grad))
    leaf.seen = [leaf]
    copied = copy.deepcopy(leaf)
    assert copied.seen is not leaf.seen
    assert copied.seen[0] is copied


def _saved(tree: Any) -> Any:
    file = io.BytesIO()
    torch.save(tree, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("copied", [copy.deepcopy, _saved])
def test_copies_of_a_value_and_its_view_share_memory(x: Any, copied: Callable[[Any], Any]) -> None:
    whole, view = copied([x, x.detach()])
    whole.zero_()
    assert torch.equal(device_get(view), torch.zeros(5, 3))
    assert torch.equal(device_get(x), PLAIN)


def test_a_copy_in_place_of_a_view_is_saved_and_copied() -> None:
    """Its copies are nobody's view."""
    copied = device_put(torch.zeros(4, 0, 3), P(None, "x"), mesh=LINE).flatten(0, 1)
    with pytest.raises(VarianceError, match="writes into a copy"):
        copied.add_(1)
    for found in (pickle.loads(pickle.dumps(copied)), copy.deepcopy(copied)):
        assert found.add_(1).spec is copied.spec


def test_data_shares_memory(x: Any) -> None:
    leaf = x.requires_grad_()
    leaf.data.mul_(2)
    leaf.data *= 0.5
    leaf.data /= 0.5
    assert torch.equal(device_get(x.detach()), PLAIN * 2)
    assert not leaf.data.requires_grad
    assert leaf.grad_fn is None
    assert (leaf * 2).grad_fn is not None


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P(), P(reduced={"x"})], ids=repr)
def test_backward_adds_to_a_gradient_that_was_set(x: Any, spec: P) -> None:
    x.requires_grad_().grad = device_put(PLAIN, spec, mesh=LINE)
    assert torch.equal(device_get(x.grad * 1), PLAIN)
    (x * 2).sum().backward()
    assert torch.equal(device_get(x.grad), PLAIN + 2)


def test_a_sum_of_pending_sums_is_pending() -> None:
    x = device_put(PLAIN, P(unreduced={"x"}), mesh=LINE)
    with communication_log() as log:
        total = sum([x, x])
        same = sum([x])
    assert not log
    assert (total.spec, same.spec) == (x.spec, x.spec)
    assert same.local is not x.local
    assert torch.equal(device_get(total), 2 * PLAIN)
    assert torch.equal(device_get(0 + (x > 3)), 0 + (PLAIN > 3))


COMPARISONS = ["eq_", "ne_", "lt_", "le_", "gt_", "ge_"]


@pytest.mark.one_of(2)
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_in_place(name: str) -> None:
    def f(y: Any) -> Any:
        z = y * 2
        return getattr(z, name)(4.0) * y

    check_case(name, (f, ((5, 3),)), LINE, 10)


MISTAKES: dict[str, tuple[Callable[[Any], Any], type[FspmdError], str]] = {
    "a dim": (lambda x: x.size(5), ShapeError, r"size\(5\) of Sharded .*, whose dims are -2 to 1"),
    "len": (lambda x: len(x[0, 0]), ArgumentError, r"len\(\) got .*, which has no dims; .*write device_get\(x\)"),
    "data": (lambda x: setattr(x, "data", torch.ones(())), ArgumentError, r"torch.no_grad\(\): x.copy_\(y\)"),
    "an address": (lambda x: x.data_ptr(), ArgumentError, r"write x.local.data_ptr\(...\), of this rank's block"),
    "a function": (lambda x: x.apply_(abs), ArgumentError, r"write x.local.apply_\(...\)"),
    "a device": (
        lambda x: (x * 1 if x.spec.partition.mentioned else device_put(PLAIN, P("x"), mesh=LINE)).to("meta"),
        ArgumentError,
        r"to 'meta', but its mesh communicates on 'cpu'; write device_get\(x\).to\('meta'\)",
    ),
    "another name": (lambda x: x.to_local(), ArgumentError, r"a Sharded has no .to_local; write x.local"),
    "a collective of torch": (
        torch.distributed.all_reduce,
        ArgumentError,
        r"all_reduce\(\) got a Sharded; write reshard",
    ),
    "a size": (lambda x: x.resize_(3, 5), ArgumentError, r"write x.new_empty\(size\)"),
}


OF_ANOTHER_TENSOR: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "to": lambda x, y: x.to(y),
    "to by name": lambda x, y: x.to(other=y),
    "type_as": lambda x, y: x.type_as(y),
    "aten.to": torch.ops.aten.to.other,
    "aten._to_copy": lambda x, y: torch.ops.aten._to_copy(x, dtype=y.dtype, device=y.device),
}


@pytest.mark.parametrize("name", OF_ANOTHER_TENSOR)
def test_the_device_of_another_tensor_counts(name: str) -> None:
    f = OF_ANOTHER_TENSOR[name]
    x, same, whole = (device_put(PLAIN, spec, mesh=LINE) for spec in (P("x"), P(), P()))
    assert f(x, torch.ones(1)).dtype == f(x, same.float()).dtype == torch.float32
    assert f(whole, torch.ones(1, device="meta")).is_meta
    with pytest.raises(ArgumentError, match=r"would take .* to 'meta', but its mesh communicates on 'cpu'"):
        f(x, torch.ones(1, device="meta"))


def test_compiled_functions_call_it(x: Any) -> None:
    w = torch.ones(3, 2, requires_grad=True)  # cast, and cached on the tensor
    found = torch.compile(lambda x, w: F.softmax(x @ w, -1).sum() * 2, backend="eager")(x, w)
    torch.distributions.Distribution.set_default_validate_args(True)  # which torch.compile unsets for good
    assert device_get(found.detach()) == 10
    found.backward()


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(x: Any, name: str) -> None:
    call, error, message = MISTAKES[name]
    with pytest.raises(error, match=message):
        call(x)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8])
def test_a_contiguous_copy_of_part_of_each_row_is_a_copy_on_all_ranks(rows: int) -> None:
    """A block of one row passes for contiguous, where the whole does not."""
    whole = torch.arange(rows * 5.0).view(rows, 5)
    x = device_put(whole.clone(), P("x"), mesh=make_mesh((4,), ("x",), transport="simulation"))
    for y in (x, whole):
        y[:, :3].contiguous().add_(100)
        y.contiguous().add_(1)
    assert torch.equal(device_get(x), whole)


def test_functions_of_numpy(x: Any) -> None:
    assert torch.equal(np.add(x, 1), PLAIN + 1)
    assert torch.equal(np.multiply(np.float32(2), x), PLAIN * 2)


@pytest.mark.parametrize("spec", [P(), P("x")])
def test_arrays_are_read_only_and_their_copies_are_not(spec: P) -> None:
    """As in JAX: a write would be lost, or seen by one rank alone."""
    x = device_put(PLAIN, spec, mesh=LINE)
    for array in (x.numpy(), x.numpy(force=True), np.asarray(x)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
    for array in (np.array(x), np.asarray(x, dtype=np.float64), np.asarray(x, copy=True)):
        array[0] = 7
    assert torch.equal(device_get(x), PLAIN)


def test_no_other_tensor_takes_its_memory(x: Any) -> None:
    """There is none behind the shell: torch would read where nothing is."""
    plain = torch.zeros(5, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        plain.data = x
    with pytest.raises(RuntimeError, match="gradient with device type 'meta'"):
        plain.grad = x
    with pytest.raises(ArgumentError, match=r"write x.local.__dlpack_device__\(...\), of this rank's block"):
        torch.from_dlpack(x)
    with pytest.raises(BufferError):
        torch.utils.dlpack.to_dlpack(x)
    assert torch.equal(plain, torch.zeros(5, 3))


def test_module_apply_to_sharded() -> None:
    """What a conversion makes of parameters of another kind takes their place."""
    mesh = make_mesh((2,), ("x",))
    module = nn.Linear(6, 4)
    expected = module(torch.ones(6))
    module._apply(lambda x: device_put(x.detach(), P("x"), mesh=mesh))
    assert repr(module.weight.spec) == "f32[4@x, 6] on mesh(x=2)"
    assert module.weight.requires_grad
    torch.testing.assert_close(device_get(module(torch.ones(6))), expected)
    kept = module.weight
    module.double()
    assert module.weight is kept
    assert kept.dtype is torch.float64


def test_moments_of_batch_norm_have_no_gradient() -> None:
    x = device_put(torch.randn(4, 3, 2), P("x"), mesh=make_mesh((2,), ("x",))).requires_grad_()
    found = torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)
    assert [one.requires_grad for one in found] == [True, False, False]


@pytest.mark.parametrize("weights_only", [True, False])
def test_saved_parameters_are_parameters(weights_only: bool) -> None:
    """With the attributes that they have."""
    for partition in (P("x"), P()):
        for kind in (nn.Parameter, nn.Buffer):
            x = kind(device_put(PLAIN, partition, mesh=LINE))
            x.layer = 3
            raw = io.BytesIO()
            torch.save({"x": x}, raw)
            raw.seek(0)
            found = torch.load(raw, weights_only=weights_only)["x"]
            for one in (found, pickle.loads(pickle.dumps(x)), copy.deepcopy(x), copy.copy(x)):
                assert isinstance(one, kind)
                assert (one.layer, one.requires_grad, one.spec) == (3, x.requires_grad, x.spec)
                assert torch.equal(device_get(one.detach()), PLAIN)


# --- damaged and crafted files ----------------------------------------------------------------------------------------


class _Crafted:
    """Pickles as a call of a function of a library, which ``weights_only=True`` allows."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def _crafted() -> dict[str, Callable[[], Any]]:
    x = device_put(torch.arange(5.0), P("x"), mesh=LINE)
    load_blocks, (spec, axes, blocks, grad, *lies) = x.__reduce__()
    load_block, (block, whole, place, *_) = device_put(torch.ones(4), P(), mesh=LINE).__reduce__()
    load, (version, layouts, offset, ranks, device, transport) = LINE.__reduce__()

    def saved(**other: Any) -> _Crafted:
        given = {"spec": spec, "axes": axes, "blocks": blocks} | other
        rest = given.get("grad", grad), *given.get("lies", lies)
        return _Crafted(load_blocks, given["spec"], given["axes"], given["blocks"], *rest)

    def mesh(**other: Any) -> _Crafted:
        given = {"layouts": layouts, "offset": offset, "ranks": ranks, "device": device, "transport": transport}
        return _Crafted(load, version, *(given | other).values())

    return {
        "a block of 1000 elements": lambda: saved(blocks=[torch.ones(1000), *blocks[1:]]),
        "a block of another place": lambda: saved(blocks=blocks[::-1]),
        "a block too few": lambda: saved(blocks=blocks[:-1]),
        "no tensor": lambda: saved(blocks=[1.0, *blocks[1:]]),
        "another dtype": lambda: saved(blocks=[b.double() for b in blocks]),
        "sparse blocks": lambda: saved(blocks=[b.to_sparse() for b in blocks]),
        "no axes": lambda: saved(axes=(), blocks=blocks[:1]),
        "another axis": lambda: saved(axes=("y",)),
        "axes twice": lambda: saved(axes=("x", "x"), blocks=blocks * 4),
        "no spec": lambda: saved(spec="f32[4]"),
        "a whole of 1000 elements": lambda: _Crafted(load_block, torch.ones(1000), whole, place),
        "a place beyond the mesh": lambda: _Crafted(load_block, torch.ones(1), spec, (("x", 4),)),
        "a place on no axis": lambda: _Crafted(load_block, torch.ones(2), spec, (("z", 0),)),
        "a place that is none": lambda: _Crafted(load_block, block, whole, {"x": 0}),
        "overlapping ranks": lambda: mesh(layouts={"x": ((4,), (0,))}),
        "one rank twice": lambda: mesh(ranks=(0, 1, 1, 3)),
        "ranks too few": lambda: mesh(ranks=(0, 1, 2)),
        "a negative rank": lambda: mesh(ranks=(0, 1, -1, 3)),
        "a negative offset": lambda: mesh(offset=-1),
        "a transport that is none": lambda: mesh(transport="mail"),
        "no name": lambda: mesh(layouts={"": ((4,), (1,))}),
        "no sizes": lambda: mesh(layouts={"x": ((0,), (1,))}),
        "no layouts": lambda: mesh(layouts=[1]),
        "half a layout": lambda: mesh(layouts={"x": ((4,),)}),
        "too little of a mesh": lambda: _Crafted(load, version, layouts),
        "no device": lambda: mesh(device="banana"),
        "a number for a device": lambda: mesh(device=3),
        "strides that are none": lambda: saved(lies=["abc"]),
        "strides of too few dims": lambda: saved(lies=[(), 0]),
        "a negative stride": lambda: saved(lies=[(-1,), 0]),
        "a negative start": lambda: saved(lies=[(1,), -1]),
        "more than strides": lambda: saved(lies=[(1,), 0, 0]),
        "attributes without names": lambda: saved(lies=[(1,), 0, {0: 1}]),
        "a gradient that is none": lambda: saved(grad="yes"),
        "a gradient of numbers without": lambda: saved(
            spec=TensorSpec(LINE, P("x"), (5,), torch.int64), blocks=[b.long() for b in blocks], grad=True
        ),
    }


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("name", _crafted())
def test_a_file_that_holds_no_sharded_value_is_an_error(name: str, weights_only: bool) -> None:
    raw = io.BytesIO()
    torch.save(_crafted()[name](), raw)
    with pytest.raises(Exception, match=r"damaged|a saved mesh|integers >= 1") as caught:
        torch.load(io.BytesIO(raw.getvalue()), weights_only=weights_only)
    assert isinstance(caught.value, (FspmdError, pickle.UnpicklingError))


def test_a_safe_load_makes_no_value_without_its_checks() -> None:
    raw = io.BytesIO()
    torch.save(_Crafted(Sharded, torch.ones(1000), device_put(torch.ones(4), P(), mesh=LINE).spec), raw)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(io.BytesIO(raw.getvalue()), weights_only=True)
