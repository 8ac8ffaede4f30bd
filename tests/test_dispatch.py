"""Torch functions on `Sharded` values: every layout of every operand, values and gradients beside unsharded torch."""

from __future__ import annotations

import copy
import gc
import io
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from dispatch_cases import Case, check_case, check_lies_as_told, placements, values
from full import FULL
from processes import Processes
from torch.nn import functional as F

import fspmd
from fspmd import ArgumentError, Mesh, P, Sharded, VarianceError, device_get, device_put, jit, make_mesh
from fspmd.cache import LIMIT
from fspmd.variance import Variance, get_variance, set_variance

F64 = torch.float64
LINE = make_mesh((4,), ("x",), transport="simulation")
GRID = make_mesh((2, 2), ("x", "y"), transport="simulation")
WIDE = make_mesh((2, 3), ("x", "y"), transport="simulation")


def _with_row(x: Any, index: Any, row: Any) -> Any:
    x[index] = row * 2
    return x


CASES: dict[str, Case] = {
    "add": (lambda x, y: x + y, ((5, 6), (5, 6))),
    "add, broadcast": (lambda x, y: x + y, ((5, 6), (6,))),
    "add of rows of one": (lambda x, y: torch.add(x, y, alpha=2), ((5, 6), (5, 1))),
    "sub a number": (lambda x: 2 - x - 1.5, ((5, 6),)),
    "mul": (lambda x, y: x * y, ((4, 8), (4, 8))),
    "mul by a scalar tensor": (lambda x, y: x * y, ((5, 3), ())),
    "div": (lambda x, y: x / (y * y + 1), ((5, 6), (5, 6))),
    "div by a sum": (lambda x, y: x.sum(0) / y.sum(0), ((5, 6), (3, 6))),
    "divide a number": (lambda x: 3 / (x * x + 1), ((5, 6),)),
    "pow": (lambda x: x**2 + 2**x, ((5, 6),)),
    "relu": (torch.relu, ((5, 6),)),
    "gelu": (lambda x: F.gelu(x, approximate="tanh"), ((5, 6),)),
    "where": (lambda x, y: torch.where(x > y, x, y), ((5, 6), (6,))),
    "clamp": (lambda x: x.clamp(min=-0.5), ((1, 6),)),
    "neg": (lambda x: -x, ((5, 6),)),
    "bools": (lambda x: (x + True) * torch.where((x > 0) & True, x, False) - (True & (x > 0.5)) * x, ((5, 6),)),
    "matmul": (lambda x, y: x @ y, ((5, 6), (6, 7))),
    "matmul, batched": (lambda x, y: x @ y, ((2, 5, 3), (2, 3, 4))),
    "matmul, broadcast": (lambda x, y: x @ y, ((3, 1, 2, 5), (4, 5, 3))),
    "matmul by a vector": (torch.matmul, ((5, 6), (6,))),
    "vector by matrix": (torch.matmul, ((6,), (6, 3))),
    "dot": (lambda x, y: x @ y, ((6,), (6,))),
    "mm of empty blocks": (torch.mm, ((2, 1), (1, 3))),
    "bmm": (torch.bmm, ((2, 3, 4), (2, 4, 3))),
    "outer": (torch.outer, ((5,), (6,))),
    "sum": (lambda x: x.sum(), ((5, 6),)),
    "sum of a dim": (lambda x: x.sum(dim=-1), ((5, 6),)),
    "sum of dims": (lambda x: torch.sum(x, (0, 2), keepdim=True), ((3, 4, 5),)),
    "sums by NumPy's names": (lambda x: (x.sum(axis=0), torch.mean(x, axis=1, keepdims=True)), ((5, 6),)),
    "operands by name": (
        lambda x, y: torch.cumsum(dim=0, input=torch.mul(x1=y, x2=torch.reshape(input=x, shape=(3, 10)))),
        ((5, 6), (3, 10)),
    ),
    "arguments of composites by name": (
        lambda x, y: (
            F.batch_norm(input=x, running_mean=None, running_var=None, training=True),
            F.pairwise_distance(x1=x, x2=y) + F.linear(input=x, weight=y).sum(1) + torch.dist(input=x, other=y),
        ),
        ((5, 6), (5, 6)),
    ),
    "mean": (lambda x: x.mean(), ((5, 6),)),
    "mean of a dim": (lambda x: torch.mean(x, 0, True), ((5, 6),)),
    "sum kept": (lambda x: x.sum((0, -1), keepdim=True), ((3, 4, 5),)),
    "linear": (F.linear, ((3, 4, 6), (5, 6), (5,))),
    "linear by keyword": (lambda x, w, b: F.linear(x, weight=w, bias=b), ((4, 6), (5, 6), (5,))),
    "addmm": (lambda b, x, y: torch.addmm(b, x, y, alpha=2, beta=3), ((4, 6), (4, 5), (5, 6))),
    "einsum": (lambda x, y: torch.einsum("bij,kjb->bki", x, y), ((2, 3, 4), (5, 4, 2))),
    "einsum without a result": (lambda x, y: torch.einsum("ij,jb", x, y), ((5, 6), (6, 4))),
    "einsum of a diagonal": (lambda x: torch.einsum("iij->ij", x), ((4, 4, 3),)),
    "softmax": (lambda x: F.softmax(x, -1), ((5, 6),)),
    "log_softmax": (lambda x: x.log_softmax(0), ((5, 6),)),
    "normalize": (lambda x: F.normalize(x, 3.0, 0) + F.normalize(x), ((5, 6),)),
    "cumsum": (lambda x: x.cumsum(1), ((5, 6),)),
    "flip": (lambda x: x.flip(0), ((5, 6),)),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), ((4, 3, 6), (6,), (6,))),
    "amax": (lambda x: x.amax(0) + x.amin(dim=0), ((5, 6),)),
    "logsumexp": (lambda x: x.logsumexp((0, 1)), ((5, 6),)),
    "prod": (lambda x: x.prod(1, keepdim=True), ((5, 3),)),
    "embedding": (lambda w: F.embedding(torch.tensor([[0, 2, 4], [4, 1, 0]]), w), ((5, 6),)),
    "max of a dim": (lambda x: x.max(dim=1), ((5, 6),)),
    "median": (lambda x: (x.median(), x.median(0).values), ((5, 3),)),
    "var": (lambda x: x.var(0, correction=0) + x.std(), ((5, 6),)),
    "sort": (lambda x: torch.sort(x, 0, descending=True), ((5, 6),)),
    "topk": (lambda x: x.topk(2, dim=1), ((5, 6),)),
    "argmax": (lambda x: (x.argmax(), x.argmax(1), x.sum()), ((5, 6),)),
    "cummax": (lambda x: x.cummax(0), ((5, 6),)),
    "flatten": (lambda x: x.flatten(), ((4, 6),)),
    "flatten of uneven rows": (lambda x: x.flatten(1), ((5, 3, 2),)),
    "reshape": (lambda x: x.reshape(2, 4, -1).view(8, 3), ((4, 6),)),
    "reshape across": (lambda x: x.reshape(6, 4), ((8, 3),)),
    "unflatten": (lambda x: x.unflatten(1, (4, 3)), ((5, 12),)),
    "squeeze": (lambda x: x.squeeze() + x.squeeze(1), ((5, 1, 6),)),
    "reshape to itself and ones": (lambda x: x.reshape(1, 5, 1, 6, 1), ((5, 6),)),
    "expand": (lambda x: x.expand(3, 5, 6) * x.unsqueeze(0), ((5, 1),)),
    "getitem": (lambda x: x[:, 1:3] * x[..., None, 2], ((5, 6),)),
    "indices that are tensors": (
        lambda x: x[torch.tensor(2)] + x[1, torch.tensor(0)] + x[x[:, 0].argmax()] + x.select(0, torch.tensor(-1)),
        ((5, 6),),
    ),
    "numbers that are tensors": (
        lambda x: torch.add(x.roll(torch.tensor(1), 0), x, alpha=torch.tensor(2.0, dtype=F64)).addcmul(
            x, x, value=torch.tensor(0.5)
        ),
        ((5, 6),),
    ),
    "set at an index that is a tensor": (lambda x: _with_row(x * 1, x[:, 1].argmin(), x[0]), ((5, 6),)),
    "getitem of rows": (lambda x: (x[0], x[-2:], x[None]), ((5, 6),)),
    "select and narrow": (lambda x: x.select(0, 2) + x.narrow(0, 1, 2).sum(0), ((5, 6),)),
    "split": (lambda x: (*x.split(2), *x.split([1, 5], dim=1), *x.chunk(dim=1, chunks=4)), ((5, 6),)),
    "a plain tensor written": (lambda x: x * _with_row(torch.ones(5, 6, dtype=F64), slice(1, 3), x[2:4]), ((5, 6),)),
    "one of unsafe parts": (
        lambda x: (torch.unsafe_chunk(x, 3)[1] * 2, torch.ops.aten.unsafe_split.Tensor(x, 2, 1)[0]),
        ((5, 6),),
    ),
    "chunk": (lambda x: x.chunk(3, dim=-1), ((5, 7),)),
    "unbind": (lambda x: x.unbind(1), ((5, 3),)),
    "cat": (lambda x, y: torch.cat([x, y, x], dim=1), ((5, 3), (5, 2))),
    "cat with a plain tensor": (lambda x: torch.cat((x, torch.ones(2, 3, dtype=F64))), ((5, 3),)),
    "stack": (lambda x, y: torch.stack([x, y], -1), ((5, 3), (5, 3))),
    "transpose": (lambda x: x.transpose(0, -1), ((3, 4, 5),)),
    "permute": (lambda x: x.permute(2, 0, 1).permute((1, -1, 0)), ((3, 4, 5),)),
    "movedim": (lambda x: x.movedim((0, 1), (2, 0)), ((3, 4, 5),)),
    "unsqueeze": (lambda x: x.unsqueeze(-1) * x.unsqueeze(1), ((3, 4),)),
    "T": (lambda x: x.T @ x.mT.t(), ((4, 4),)),
    "to": (lambda x: x.to(torch.float32).double(), ((5, 6),)),
    "a chain": (lambda x, w: torch.tanh((x @ w).relu() * 2 + x.sum(1, keepdim=True)).mean(), ((5, 6), (6, 7))),
}


@pytest.mark.one_of(18)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh", [LINE, GRID, WIDE])
def test_values_and_gradients(mesh: Mesh, name: str) -> None:
    check_case(name, CASES[name], mesh, 24 if FULL else 12)


def _on_processes(sizes: tuple[int, ...]) -> None:
    mesh = make_mesh(sizes, ("x", "y")[: len(sizes)])
    for name, case in list(CASES.items())[:: 1 if FULL else 17]:
        check_case(name, case, mesh, 2)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_on_processes(sizes: tuple[int, ...]) -> None:
    with Processes(4) as pool:
        pool.run(_on_processes, sizes)


#: functions of a batch of four, and shapes of operands that are larger and whole
_LAYERS: dict[str, tuple[Callable[..., Any], tuple[int, ...], tuple[tuple[int, ...], ...]]] = {
    "linear": (F.linear, (4, 64), ((256, 64), (256,))),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), (4, 64), ((64, 256), (256,))),
    "mul": (torch.mul, (4, 1), ((256,),)),
    "addcmul": (torch.addcmul, (4, 256), ((4, 256), (256,))),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (256,), w, b), (4, 256), ((256,), (256,))),
    "batch_norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (4, 256), ((256,), (256,))),
    "conv2d": (F.conv2d, (4, 8, 6, 6), ((64, 8, 3, 3), (64,))),
    "conv2d, groups": (lambda x, w: F.conv2d(x, w, groups=4), (4, 8, 6, 6), ((64, 2, 3, 3),)),
    "complex": (torch.complex, (4, 256), ((256,),)),
    "cdist": (torch.cdist, (4, 16), ((300, 16),)),
}


@pytest.mark.parametrize("name", _LAYERS)
def test_a_small_batch_stays_sharded_beside_large_weights(name: str) -> None:
    f, batch, weights = _LAYERS[name]
    x = device_put(torch.ones(batch), P("x"), mesh=LINE).requires_grad_()
    y = f(x, *(device_put(torch.ones(shape), P(), mesh=LINE).requires_grad_() for shape in weights))
    assert y.spec.partition[0] == "x", y


def test_one_cast_serves_all_uses() -> None:
    """q, k and v of one x: its gradient is summed over ranks once."""
    x = device_put(values(((4, 6),))[0], P(), mesh=LINE).requires_grad_()
    weights = [device_put(w, P(None, "x"), mesh=LINE) for w in values(((6, 8),) * 3)]
    q, k, v = (x @ w for w in weights)
    casts = {edge[0] for out in (q, k, v) for edge in out.local.grad_fn.next_functions if edge[0] is not None}
    assert len(casts) == 1


def test_a_leaf_may_be_saved_and_copied_after_use() -> None:
    x = device_put(values(((4, 6),))[0], P(), mesh=GRID).requires_grad_()
    y = x * device_put(values(((4, 6),))[0], P("x"), mesh=GRID)
    torch.save(set_variance(x.local, Variance(reduced={"x"})), file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert get_variance(loaded) is get_variance(x.local)
    for copy_of in (copy.deepcopy(x.local), pickle.loads(pickle.dumps(x.local)), loaded):
        assert torch.equal(copy_of, x.local)
    assert y.requires_grad


@pytest.mark.parametrize("mesh", [LINE, GRID])
def test_writes_into_a_sharded(mesh: Mesh) -> None:
    """The operand stays as it lies, whatever the others do; of a pending sum, too."""
    programs: list[tuple[Callable[..., Any], int]] = [
        (lambda x, y: x.add_(y, alpha=2), 2),
        (lambda x, y: x.mul_(y).clamp_(min=-0.1), 2),
        (lambda x, y: x.copy_(y).mul_(3), 2),
        (lambda x, y: x.zero_().sub_(y), 2),
        (lambda x: x.fill_(2.5).div_(2), 1),
        (lambda x: x.exp_(), 1),
        (lambda x: x.cumsum_(0).tril_(), 1),
    ]
    for f, count in programs:
        plain = [x.requires_grad_() for x in values(((5, 6), (6,))[:count])]
        expected = f(plain[0] * 2, *plain[1:])
        weight = torch.linspace(0, 1, 30, dtype=F64).reshape(5, 6)
        grads = torch.autograd.grad(expected, plain, weight, allow_unused=True)
        for specs in placements(mesh, ((5, 6), (6,))[:count], 40 if FULL else 15):
            given = [device_put(x.detach(), s, mesh=mesh).requires_grad_() for x, s in zip(plain, specs, strict=True)]
            x = given[0] * 2
            assert f(x, *given[1:]) is x
            check_lies_as_told(x)
            torch.testing.assert_close(device_get(x), expected, rtol=1e-12, atol=1e-12, msg=str(specs))
            x.backward(weight)
            for leaf, grad in zip(given, grads, strict=True):
                if grad is not None and leaf.grad is not None:
                    torch.testing.assert_close(device_get(leaf.grad), grad, rtol=1e-11, atol=1e-11, msg=str(specs))


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x[1].fill_(2.0),
        lambda x: x[1].view(2, 3).mul_(2.0),
        lambda x: x[1].normal_(),
        lambda x: x[1].cumsum_(0),
        lambda x: x.view(-1).zero_(),
        lambda x: x.select(0, 1).add_(1),
        lambda x: x.T[:, 1].copy_(torch.ones(6)),
        lambda x: x[1:][::2].t()[0].fill_(3.0),
        lambda x: x.flatten()[3:8].fill_(3.0),
        lambda x: x.unflatten(1, (2, 3))[:, 1].t()[0].fill_(3.0),
        lambda x: x[:1].expand(3, 6)[0].fill_(3.0),
        lambda x: x.unfold(0, 2, 2)[1].t()[0].fill_(3.0),
    ],
)
def test_a_write_into_what_should_be_a_view_is_never_lost(write: Callable[[Any], Any]) -> None:
    """It goes through where the view is one, and is refused where the operand had to be moved."""
    for spec in (P(), P("x"), P(None, "x")):
        plain, x = torch.zeros(5, 6), device_put(torch.zeros(5, 6), spec, mesh=LINE)
        refused = ""
        try:
            write(x)
        except VarianceError as error:
            refused = str(error)
        if refused:
            assert spec.mentioned
            assert "writes into a copy" in refused
            continue
        write(plain)
        whole = device_get(x)
        assert (whole == plain).all() or whole.std() > 0.01


@pytest.mark.one_of(6)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1],
        lambda x: x[1:4][1:],
        lambda x: x.view(-1)[3:7][1:],
        lambda x: x.reshape(3, 10),
        lambda x: x.T[2:4].t(),
        lambda x: x.narrow(0, 2, 3),
        lambda x: x.diagonal()[1:],
    ],
)
def test_a_view_sees_what_is_written_later_or_the_write_is_refused(view: Callable[[Any], Any], grad: bool) -> None:
    for spec in (P(), P("x"), P(None, "x")):
        whole = torch.arange(30.0).reshape(5, 6)
        x, plain = device_put(whole, spec, mesh=LINE).requires_grad_(grad) * 1.0, whole * 1.0
        mine, theirs = view(x), view(plain)
        plain.mul_(2.0)
        refused = ""
        try:
            x.mul_(2.0)
        except VarianceError as error:
            refused, mine = str(error), None
        if refused:
            assert spec.mentioned
            assert "would not see the write" in refused
            x.mul_(2.0)
            mine = view(x)
        assert (device_get(mine) == theirs).all()


@pytest.mark.one_of(4)
@pytest.mark.parametrize("mesh", [LINE, WIDE], ids=repr)
@pytest.mark.parametrize("sign", ["+", "-", "*", "/"])
def test_an_augmented_assignment_writes_into_what_other_names_hold(mesh: Mesh, sign: str) -> None:
    f = getattr(operator, {"+": "iadd", "-": "isub", "*": "imul", "/": "itruediv"}[sign])

    def augmented(x: Any, y: Any) -> Any:
        x = x * 1
        alias = x
        x = f(x, y)
        return alias * 1, x

    for second in ((5, 6), (6,), ()):
        check_case(f"{sign}=", (augmented, ((5, 6), second)), mesh, 20)


ACTIVATIONS = "relu elu leaky_relu selu celu hardtanh relu6 silu mish hardswish hardsigmoid threshold"


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", ACTIVATIONS.split())
def test_an_activation_in_place(name: str) -> None:
    given = {"threshold": (0.1, 2.0)}.get(name, ())

    def in_place(x: Any) -> Any:
        x = x * 1
        y = getattr(F, name)(x, *given, inplace=True)
        return x * 2, y

    def in_order(x: Any) -> Any:
        x = x * 1
        defaults = {"elu": (1.0,), "leaky_relu": (0.01,), "celu": (1.0,), "hardtanh": (-1.0, 1.0)}
        return x * 2, getattr(F, name)(x, *given, *defaults.get(name, ()), True)

    check_case(name, (in_place, ((5, 6),)), WIDE, 20)
    check_case(name, (in_order, ((5, 6),)), LINE, 4)


def test_spectral_norms_write_into_their_buffers() -> None:
    torch.manual_seed(0)
    module = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 4).double())
    plain = {name: x.detach().clone() for name, x in (*module.named_parameters(), *module.named_buffers())}
    specs = {name: P("x") if x.dim() == 2 or name.endswith("_u") else P() for name, x in plain.items()}
    held = {name: device_put(x, specs[name], mesh=LINE) for name, x in plain.items()}
    x = values(((5, 3),))[0]
    want = module(x)
    torch.testing.assert_close(device_get(fspmd.functional_call(module, held, device_put(x, P("x"), mesh=LINE))), want)
    for name, buffer in module.named_buffers():
        torch.testing.assert_close(device_get(held[name]), buffer)


def test_distributions_check_their_arguments() -> None:
    torch.distributions.Distribution.set_default_validate_args(True)  # which torch.compile unsets for good
    logits = device_put(values(((5, 6),))[0], P("x"), mesh=LINE)
    index = torch.arange(5)
    found = torch.distributions.Categorical(logits=logits).log_prob(index)
    want = torch.distributions.Categorical(logits=device_get(logits)).log_prob(index)
    torch.testing.assert_close(device_get(found), want)
    with pytest.raises(ValueError, match="to satisfy the constraint"):
        torch.distributions.Normal(logits, -logits.abs())


def test_numbers_of_numpy_leave_operators_to_sharded() -> None:
    x = device_put(torch.ones(5, 6, dtype=F64), P("x"), mesh=LINE).requires_grad_()
    for y in (np.sqrt(2.0) * x, np.float64(2) + x, np.int64(2) - x, np.float32(2) / x):
        assert isinstance(y, Sharded)
        assert (y.spec, y.requires_grad) == (x.spec, True)


ARRAY = np.arange(30.0).reshape(5, 6)
ARRAYS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, a: x + a,
    "from the left": lambda x, a: a - x if isinstance(x, Sharded) else -(x - a),
    "matmul": lambda x, a: x @ a.T,
    "index": lambda x, a: x[np.array([0, 4])],
    "mask": lambda x, a: x[a > 3],
    "compare": lambda x, a: (x > a) * x,
    "into": lambda x, a: (x * 1).add_(a),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_numpy_are_global_values(name: str) -> None:
    def f(x: Any) -> Any:
        return ARRAYS[name](x, ARRAY if isinstance(x, Sharded) else torch.from_numpy(ARRAY))

    check_case(name, (f, ((5, 6),)), LINE, 20)


def test_an_array_that_is_no_tensor() -> None:
    x = device_put(torch.ones(2), P("x"), mesh=LINE)
    with pytest.raises(ArgumentError, match=r"^\+ got an array that cannot become a tensor: can't convert"):
        x + np.array(["a", "b"])
    with pytest.raises(ArgumentError, match=r"^\+ got Sharded .* and the set \{1\}; give it tensors and numbers"):
        x + {1}


def test_an_operator_with_what_is_no_tensor_is_as_python_has_it() -> None:
    class Other:
        def __radd__(self, x: Sharded) -> str:
            return "other"

    x: Any = device_put(torch.ones(2), P("x"), mesh=LINE)
    assert (x == "mean", x != "mean", x + Other()) == (False, True, "other")
    with pytest.raises(TypeError, match=r"unsupported operand type\(s\) for \+: 'Sharded' and 'list'"):
        x + [1]


@pytest.mark.parametrize("sign", ["+", "-", "*", "/", "//", "%", "**", "@", "&", "|", "^", "<<", ">>"])
def test_an_operator_from_either_side(sign: str) -> None:
    whole = torch.arange(1, 7)
    x = device_put(whole, P("x"), mesh=LINE)
    for number in ("3", "True", "2.0", "a"):
        for text in (f"{number} {sign} x", f"x {sign} {number}"):
            try:
                expected = eval(text, {"x": whole, "a": whole})
            except (TypeError, RuntimeError):
                with pytest.raises((ArgumentError, TypeError)):
                    eval(text, {"x": x, "a": whole})
            else:
                torch.testing.assert_close(device_get(eval(text, {"x": x, "a": whole})), expected)


def test_only_an_integer_is_an_index() -> None:
    assert [1, 2][device_put(torch.tensor([1]), P("x"), mesh=LINE)] == 2
    with pytest.raises(TypeError, match="interpreted as an integer"):
        range(device_put(torch.tensor(1.0), P(), mesh=LINE))  # type: ignore[call-overload]


def test_autograd_grad() -> None:
    """torch.autograd.grad of Sharded values, twice, in the layout of each operand."""
    plain = [x.requires_grad_() for x in values(((5, 6), (6,)))]
    first = torch.autograd.grad((plain[0] * plain[1] ** 3).sum(), plain, create_graph=True)
    (second,) = torch.autograd.grad(first[1].sum(), plain[1])
    for specs in placements(GRID, ((5, 6), (6,)), 40):
        x, w = (device_put(x.detach(), s, mesh=GRID).requires_grad_() for x, s in zip(plain, specs, strict=True))
        found = torch.autograd.grad((x * w**3).sum(), [x, w], create_graph=True)
        for leaf, grad, expected in zip((x, w), found, first, strict=True):
            assert grad.spec is leaf.spec.dual
            torch.testing.assert_close(device_get(grad), expected, rtol=1e-11, atol=1e-11)
        (again,) = torch.autograd.grad(found[1].sum(), w)
        torch.testing.assert_close(device_get(again), second, rtol=1e-11, atol=1e-11)
        (weighted,) = torch.autograd.grad(x * w, x, grad_outputs=torch.ones(5, 6, dtype=F64))
        torch.testing.assert_close(device_get(weighted), plain[1].detach().expand(5, 6))
    with pytest.raises(ArgumentError, match=r"torch.autograd.grad\(\) of .*does not require grad"):
        torch.autograd.grad(x.detach().sum(), x)


def test_gradients_pass_from_mesh_to_mesh() -> None:
    plain = torch.linspace(-1.0, 1.0, 7, dtype=F64)
    x = device_put(plain, P("x"), mesh=LINE).requires_grad_()
    y = fspmd.reshard(x, P(("y", "x")), GRID).requires_grad_()
    (grad,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    second = torch.autograd.grad([grad.sum(), (y * y).sum()], [x, y])
    torch.testing.assert_close([device_get(one) for one in (grad, *second)], [3 * plain**2, 8 * plain, 8 * plain])
    assert [one.spec for one in (grad, *second)] == [x.spec, x.spec, y.spec]


def test_rounding_is_not_linear() -> None:
    x = device_put(torch.full((4,), 1.5), P(unreduced={"x"}), mesh=LINE)
    half = Sharded(x.local, x.spec) + x  # 3, pending
    assert device_get(torch.div(half, 2, rounding_mode="floor")).tolist() == [1.0] * 4
    assert device_get(half.to(torch.int64)).tolist() == [3] * 4
    assert device_get(x + 1).tolist() == [2.5] * 4


def test_a_mean_of_halves_does_not_overflow() -> None:
    x = device_put(torch.full((70000,), 3.0, dtype=torch.float16), P("x"), mesh=LINE)
    assert device_get(x.mean()).item() == pytest.approx(3.0, rel=1e-3)


def test_dtypes_follow_autocast_and_the_default() -> None:
    x = device_put(torch.ones(8, 8), P("x"), mesh=LINE)
    n = device_put(torch.arange(8), P("x"), mesh=LINE)
    assert (x @ x).dtype == (n / 2).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert (x @ x).dtype == (x @ x).local.dtype == torch.bfloat16
    torch.set_default_dtype(F64)
    try:
        assert (n / 2).dtype == (n / 2).local.dtype == F64
    finally:
        torch.set_default_dtype(torch.float32)


AUTOCAST: Any = {
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(6, dtype=torch.long)),
    "of probabilities": lambda x: F.cross_entropy(x, x, label_smoothing=0.1),
    "nll_loss": lambda x: F.nll_loss(x, torch.zeros(6, dtype=torch.long)),
    "mse_loss": lambda x: F.mse_loss(x, x * 2),
    "kl_div": lambda x: F.kl_div(x, x.softmax(1), reduction="sum"),
    "with_logits": lambda x: F.binary_cross_entropy_with_logits(x, x),
    "softmax": lambda x: x.softmax(0) + x.log_softmax(1),
    "norms": lambda x: F.layer_norm(x, (8,)) + F.group_norm(x, 2),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    "products": lambda x: torch.einsum("ij,kj->ik", x.mT @ x, F.linear(x, x).mT @ x),
    "of two dtypes": lambda x: torch.bmm(x[None], (x @ x.mT)[None].mT.cos() @ x).mT,
    "sums": lambda x: x.norm() + x.prod(0) + x.cumsum(0) + x.logsumexp(0),
    "convolution": lambda x: F.conv1d(x[None], x[:, :, None]),
    "cosine": lambda x: F.cosine_similarity(x, x * 2),
}


@pytest.mark.one_of(8)
@pytest.mark.parametrize("partition", [P("x"), P(None, "x")])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, F64])
@pytest.mark.parametrize("name", AUTOCAST)
def test_dtypes_under_autocast_are_those_of_the_call(name: str, kind: torch.dtype, partition: P) -> None:
    """Whatever the same call was before."""
    x = torch.arange(48.0).view(6, 8).cos().to(kind)
    mine = device_put(x, partition, mesh=LINE)
    for enabled in (False, True, False, None, True, False, True) if FULL else (False, True, None, True, False):
        if enabled is None:
            fspmd.propagation_cache_clear()
            continue
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            try:
                want = AUTOCAST[name](x)
            except RuntimeError:  # of dtypes that torch has no kernel for
                continue
            for f in AUTOCAST[name], jit(AUTOCAST[name]):
                got = f(mine)
                assert got.dtype == got.local.dtype == want.dtype
                rounded = 0.1 if enabled or kind is torch.bfloat16 else 1e-5
                torch.testing.assert_close(device_get(got), want, rtol=rounded, atol=rounded)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.add(x, 1, out=x.local),
        lambda x: x.to_sparse(),
        lambda x: x + x.local,
    ],
)
def test_what_has_no_rule_is_refused(call: Callable[[Sharded], Any]) -> None:
    x = device_put(torch.ones(8, 8), P("x"), mesh=LINE)
    with pytest.raises(ArgumentError, match=r"has no rule for|got the blocks of all"):
        call(x)


QUESTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "all": lambda x, y: bool((x == y).all()),
    "any": lambda x, y: bool((x > y).any()),
    "all of a dim": lambda x, y: (x == y).all(0),
    "in": lambda x, y: 3.0 in x,
    "equal": torch.equal,
    "equal to another shape": lambda x, y: torch.equal(x, y[0]),
    "equal to another dtype": lambda x, y: torch.equal(x, y.float()),
    "allclose": torch.allclose,
    "allclose with nan": lambda x, y: torch.allclose(x / x, y / y, equal_nan=True),
    "allclose by far": lambda x, y: torch.allclose(x, y, rtol=0.0, atol=9.0),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_questions_about_all_elements_gather_nothing(name: str) -> None:
    """What Python asks of them is one sum of few numbers, however small the operands are; they move to lie alike."""
    question = QUESTIONS[name]
    for mesh, specs in ((LINE, (P("x"), P(None, "x"), P())), (WIDE, (P("x", "y"), P(("x", "y"))))):
        for spec in specs:
            for other in (0.0, 1.0, float("nan")):
                x = torch.arange(35.0, dtype=F64).view(7, 5)
                y = x.clone()
                y[3, 2] += other
                with fspmd.communication_log() as log:
                    found = question(*device_put((x, y), spec, mesh=mesh))
                asked = question(x, y)
                assert torch.equal(device_get(found), asked) if isinstance(asked, torch.Tensor) else found is asked
                assert all(one.kind.startswith("psum") for one in log), log


@pytest.mark.parametrize("spec", [P("x"), P(), P(unreduced={"x"})])
def test_classes_of_one_hot(spec: P) -> None:
    plain = torch.arange(7)
    x = device_put(plain, spec, mesh=LINE)
    for count in (-1, 7, 9):
        assert torch.equal(device_get(F.one_hot(x, count)), F.one_hot(plain, count))
    for wrong, count in ((x, 6), (x - 1, 7), (x, 0), (x[:0], 0)):
        with pytest.raises(ArgumentError, match=r"; pass (a greater )?num_classes"):
            F.one_hot(wrong, count)


def test_what_torch_raises_of_blocks_says_which_call_it_was() -> None:
    x = device_put(torch.ones(6, 8), P("x"), mesh=LINE)
    with pytest.raises(ArgumentError, match=r"@ of f32\[6@x, 8\], f64\[8, 3\] has operands of several dtypes"):
        x @ torch.ones(8, 3, dtype=F64)
    with pytest.raises(RuntimeError, match="index 3 is out of bounds") as caught:  # of a block of two rows
        x.gather(0, torch.full((1, 8), 6))
    assert "raised by gather() of Sharded f32[6@x, 8]" in caught.value.__notes__[0]


def test_a_transform_of_empty_blocks_that_have_no_gradient() -> None:
    x = torch.arange(48.0).reshape(6, 8)
    whole = device_get(torch.fft.rfft(device_put(x, P("x"), mesh=LINE), dim=1))
    torch.testing.assert_close(whole, torch.fft.rfft(x, dim=1))


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("y", "x"), P(None, ("y", "x")), P()], ids=repr)
def test_views_of_bits_and_rows_made_short(spec: P) -> None:
    table = values(((5, 6),))[0]
    x = device_put(table, spec, mesh=WIDE)
    for dtype in (torch.int64, torch.int16, torch.complex128):
        assert torch.equal(device_get(x.view(dtype)), table.view(dtype))
    places = torch.tensor([[0, 2, 3], [0, 4, 4]])
    for where in (places, device_put(places, P("x", "y"), mesh=WIDE)):
        found, want = x.clone().requires_grad_(), table.clone().requires_grad_()
        y, expected = (F.embedding(i, w, max_norm=1.5, norm_type=3.0) for i, w in ((where, found), (places, want)))
        torch.testing.assert_close(device_get(y), expected)
        torch.testing.assert_close(device_get(found), want)
        for one in (y, expected):
            one.square().sum().backward()
        torch.testing.assert_close(device_get(found.grad), want.grad)


PLACES = [torch.tensor([[1, 2, 2], [0, 4, 2], [0, 0, 1]]), torch.tensor(3), torch.zeros(0, dtype=torch.int64)]


@pytest.mark.one_of(4)
@pytest.mark.parametrize("padding", [None, 2, -5])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("y", "x"), P(reduced={"x"}), P()], ids=repr)
def test_gradients_of_rows_by_how_often_they_are_looked_up(spec: P, padding: int | None) -> None:
    table = values(((5, 6),))[0]
    for places in PLACES:
        want = table.clone().requires_grad_()
        F.embedding(places, want, padding, scale_grad_by_freq=True).sin().sum().backward()
        for where in (places, *(device_put(places, p, mesh=WIDE) for p in (P(), P(("y", "x")))[: 1 + places.ndim])):
            found = device_put(table, spec, mesh=WIDE).requires_grad_()
            out = F.embedding(where, found, padding, scale_grad_by_freq=True)
            assert torch.equal(device_get(out), F.embedding(places, table, padding))
            out.sin().sum().backward()
            torch.testing.assert_close(device_get(found.grad), want.grad)


def test_gradients_of_an_embedding_are_dense() -> None:
    table = device_put(values(((5, 6),))[0], P("x"), mesh=WIDE)
    flat, offsets = PLACES[0].flatten(), torch.tensor([0, 1])
    calls: list[Callable[[Any], Any]] = [
        lambda x: F.embedding(PLACES[0], x, sparse=True),
        lambda x: torch.embedding(x, PLACES[0], sparse=True),
        lambda x: F.embedding_bag(flat, x, offsets, sparse=True),
        lambda x: F.embedding_bag(flat, x, offsets, None, 2.0, False, "sum", True, flat.to(x.dtype)),
        lambda x: torch.embedding_bag(x, flat, offsets, False, 0, True)[0],
    ]
    for call in calls:
        torch.testing.assert_close(device_get(call(table)), call(device_get(table)))
        with pytest.raises(
            ArgumentError, match=r"^embedding(_bag)?\(\) got sparse=True for Sharded .*; leave sparse=True out"
        ):
            call(table.clone().requires_grad_())


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.slice_scatter(x, x, 0, 1, 4),
        lambda x: torch.select_scatter(x, x, 0, 1),
        lambda x: torch.select_scatter(x, x[0], 2, 1),
        lambda x: torch.diagonal_scatter(x, x[0], offset=1),
    ],
)
def test_sources_of_another_shape_than_the_part_are_refused(f: Callable[[Any], Any]) -> None:
    x = device_put(values(((4, 4),))[0], P("x"), mesh=LINE)
    with pytest.raises(ArgumentError, match=r"_scatter\(\) of .* fails on the global tensors: "):
        f(x)


def test_inference_mode() -> None:
    """Views there are views, and a plan made there is that of any call."""
    whole = values(((8, 6),))[0]
    x = device_put(whole, P("x"), mesh=LINE)
    with torch.inference_mode():
        found = x[:, 0], x.t(), x.unsqueeze(0).exp(), x.reshape(2, 4, 3, 2), F.embedding(torch.tensor([1, 0]), x[:3])
    want = whole[:, 0], whole.t(), whole.unsqueeze(0).exp(), whole.reshape(2, 4, 3, 2), whole[[1, 0]]
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(device_get(one), other)
    with pytest.raises(VarianceError, match=r"mul_.* writes into a copy"):
        (x * 1).reshape(2, 4, 3, 2).mul_(2)


@pytest.mark.parametrize("f", [lambda x: x.view(5, 1), lambda x: x.squeeze(), lambda x: x.view(1, 5, 1)])
def test_views_of_uneven_blocks_under_vmap(f: Callable[[Any], Any]) -> None:
    whole = values(((4, 1, 5),))[0]
    for dim, spec in ((0, P(None, None, "x")), (1, P(None, None, "x")), (2, P("x"))):
        x = device_put(whole.movedim(0, dim), spec, mesh=LINE)
        torch.testing.assert_close(
            device_get(fspmd.vmap(lambda x: f(x.reshape(1, 5)), in_dims=dim)(x)), whole.reshape(4, *f(whole[0]).shape)
        )


def test_the_cache_keeps_as_many_plans_as_it_may_the_newest_ones() -> None:
    x = device_put(values(((4, 6),))[0], P("x"), mesh=LINE)
    fspmd.propagation_cache_clear()
    try:
        fspmd.propagation_cache_resize(2)
        for call in (torch.relu, torch.exp, torch.tanh, torch.tanh, torch.relu):
            call(x)
        assert fspmd.propagation_cache_info() == (1, 4, 2, 2)
        fspmd.propagation_cache_resize(0)
        assert fspmd.propagation_cache_info().currsize == 0
        torch.relu(x)
        assert fspmd.propagation_cache_info().currsize == 0
        with pytest.raises(ArgumentError, match="a number of plans"):
            fspmd.propagation_cache_resize(-1)
    finally:
        fspmd.propagation_cache_resize(LIMIT)


def test_a_list_of_operands_is_planned_once() -> None:
    x = device_put(values(((4, 6),))[0], P("x"), mesh=LINE)
    fspmd.propagation_cache_clear()
    for _ in range(3):
        torch.cat([x, x], dim=1)
    assert fspmd.propagation_cache_info()[:2] == (2, 1)


def test_a_copy_that_only_garbage_holds_is_not_in_use() -> None:
    """When it is collected differs from rank to rank, and all must refuse a write or none."""
    x = device_put(torch.arange(7.0), P("x"), mesh=LINE)
    held: list[Any] = [x[:1]]
    held.append(held)
    gc.disable()
    try:
        with pytest.raises(VarianceError, match="would not see the write"):
            x[:1] = 5.0
        del held
        x[:1] = 5.0
    finally:
        gc.enable()
    assert device_get(x)[0] == 5


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.new_zeros(),
        lambda x: x.dist("no"),
        lambda x: x.bernoulli_("no"),
        lambda x: x.log_softmax(1.5),
        lambda x: F.dropout(x, "no"),
        lambda x: x.cov(1),
    ],
)
def test_arguments_that_a_function_cannot_take_are_refused_in_torchs_words(f: Callable[[Any], Any]) -> None:
    with pytest.raises(ArgumentError, match=r" of .*f64\[4@x, 6\].* fails on the global tensors: "):
        f(device_put(values(((4, 6),))[0], P("x"), mesh=LINE))


def test_new_takes_a_device() -> None:
    x = device_put(values(((4, 6),))[0], P("x"), mesh=LINE)
    assert (x.new(2, 3, device="cpu").shape, x.new(2, 3, device="cpu").dtype) == ((2, 3), F64)


@pytest.mark.parametrize("f", [F.linear, lambda x, w, b: torch.einsum("bij,kj->bik", x, w)])
def test_views_of_what_a_function_has_made_may_be_written_into(f: Callable[..., Any]) -> None:
    """Though an operand moves: they are views of no operand."""
    given = values(((8, 3, 4), (8, 4), (8,)))
    x, w, b = (device_put(one, P("x"), mesh=LINE) for one in given)
    torch.testing.assert_close(device_get(f(x, w, b).mul_(2)), f(*given) * 2)


#: calls that are made of new values alone, or of what torch follows no further
FOLLOWED: dict[str, Callable[..., Any]] = {
    "fill": lambda x, y: torch.fill(x, 1.0),
    "fill with a tensor": lambda x, y: torch.fill(x, y[0, 0]),
    "matrix_power": lambda x, y: torch.matrix_power(x, 0),
    "linspace": lambda x, y: torch.linspace(x[0, 0], y[0, 0], 4),
    "eq_": lambda x, y: (x * 1).eq_(y),
    "write": lambda x, y: operator.setitem(z := x * 1, 0, 2.0) or z,
}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("mesh", [LINE, WIDE], ids=str)
@pytest.mark.parametrize("name", FOLLOWED)
def test_results_are_followed_where_those_of_torch_are(name: str, mesh: Mesh) -> None:
    """``requires_grad`` of results, and gradients, of all choices of operands that are followed."""
    whole = values(((3, 3), (3, 3)))
    for followed in ((True, True), (True, False), (False, True), (False, False)):
        plain = [x.detach().clone().requires_grad_(own) for x, own in zip(whole, followed, strict=True)]
        want = FOLLOWED[name](*plain)
        for spec in (P("x"), P(None, "x"), P()):
            given = [device_put(x.detach().clone(), spec, mesh=mesh).requires_grad_(x.requires_grad) for x in plain]
            out = FOLLOWED[name](*given)
            assert (out.requires_grad, out.is_leaf) == (want.requires_grad, want.is_leaf)
            torch.testing.assert_close(device_get(out).detach(), want.detach())
            if all(followed) and want.requires_grad:
                wanted = torch.autograd.grad(want.sum(), plain, retain_graph=True, allow_unused=True)
                for one, other in zip(torch.autograd.grad(out.sum(), given, allow_unused=True), wanted, strict=True):
                    found = torch.zeros_like(whole[0]) if one is None else device_get(one)
                    torch.testing.assert_close(found, torch.zeros_like(found) if other is None else other)


@pytest.mark.parametrize("truth", [True, False])
def test_a_mask_without_dims_adds_a_dim_of_size_one_or_none(truth: bool) -> None:
    (whole,) = values(((4, 3),))
    mask = torch.tensor(truth)
    reads: tuple[Callable[..., Any], ...] = (
        lambda x, m: x[m],
        lambda x, m: x[m, 0],
        lambda x, m: x[m, :, 1:],
        lambda x, m: x[..., m],
        lambda x, m: x[m, m],
        lambda x, m: _with_row(x * 1, m, x.sum(0)),
        lambda x, m: operator.setitem(z := x * 1, m, 2.0) or z,
    )
    for read in reads:
        plain = whole.detach().clone().requires_grad_()
        want = read(plain, mask)
        (wanted,) = torch.autograd.grad(want.square().sum(), plain)
        for mesh in (LINE, WIDE):
            for m in (mask, device_put(mask, P(), mesh=mesh)):
                x = device_put(whole.detach().clone(), P("x"), mesh=mesh).requires_grad_()
                out = read(x, m)
                (gradient,) = torch.autograd.grad(out.square().sum(), x)
                torch.testing.assert_close(device_get(out), want)
                torch.testing.assert_close(device_get(gradient), wanted)


def _put(x: torch.Tensor, partition: P = P()) -> Any:  # noqa: B008
    return device_put(x, partition, mesh=LINE)


#: slices of x [5, 6], whose bounds are tensors of one integer
SLICES: dict[str, Callable[[Any, Any], Any]] = {
    "x[:n]": lambda x, n: x[:n],
    "x[n:]": lambda x, n: x[n:],
    "x[::n]": lambda x, n: x[::n],
    "x[..., -n:]": lambda x, n: x[..., -n:],
    "x[n, 1 : n + 1]": lambda x, n: x[n, 1 : n + 1],
    "x[rows, :n]": lambda x, n: x[torch.tensor([0, 3]), :n],
    "x[:n] = row": lambda x, n: _with_row(x.clone(), slice(None, n), x[0]),
    "x[:, n:] = 2": lambda x, n: _with_row(x.clone(), (slice(None), slice(n, None)), 1),
}


@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize("of_bound", [torch.clone, _put, lambda n: _put(n.expand(8), P("x")).sum() // 8])
def test_a_bound_of_a_slice_may_be_a_tensor(name: str, of_bound: Callable[[torch.Tensor], Any]) -> None:
    """Its value decides the shape, so a second one has a slice of its own."""
    f, (whole,) = SLICES[name], values(((5, 6),))
    for partition in (P(), P("x"), P(None, "x")):
        for n in (2, 4, 2):
            x, plain = (y.detach().requires_grad_() for y in (_put(whole, partition), whole))
            found, want = f(x, of_bound(torch.tensor(n))), f(plain, n)
            assert found.shape == want.shape
            torch.testing.assert_close(device_get(found), want)
            for y in (found, want):
                (y**2).sum().backward()
            torch.testing.assert_close(device_get(x.grad), plain.grad)


#: calls of x [6, 8] with a tensor of one integer, most of which decide the shape of the result
NUMBERED: dict[str, Callable[[Any, Any], Any]] = {
    "new_zeros": lambda x, n: x.new_zeros(n),
    "new_full": lambda x, n: x.new_full((n, 2), 3.0),
    "narrow": lambda x, n: x.narrow(0, 0, n),
    "view": lambda x, n: x.view(n, -1),
    "reshape": lambda x, n: torch.reshape(x, (n, -1)),
    "expand": lambda x, n: x[:1].expand(n, -1),
    "repeat": lambda x, n: x.repeat(n, 1),
    "repeat_interleave": lambda x, n: x.repeat_interleave(n, 0),
    "split": lambda x, n: torch.split(x, n)[0],
    "chunk": lambda x, n: x.chunk(n)[0],
    "tensor_split": lambda x, n: torch.tensor_split(x, n)[-1],
    "topk": lambda x, n: x.topk(n).values,
    "unfold": lambda x, n: x.unfold(0, n, 1),
    "diagonal": lambda x, n: x.diagonal(n),
    "unflatten": lambda x, n: x.unflatten(0, (n, -1)),
    "one_hot": lambda x, n: F.one_hot(x.abs().long() % 2, n),
    "pad": lambda x, n: F.pad(x, (n, 0)),
    "roll": lambda x, n: x.roll(n),
    "tril": lambda x, n: x.tril(n),
    "select": lambda x, n: x.select(0, n),
    "index": lambda x, n: x[:, n],
}


@pytest.mark.parametrize("partition", [P(), P("x"), P(None, "x")], ids=repr)
@pytest.mark.parametrize("name", NUMBERED)
def test_a_number_may_be_a_tensor(name: str, partition: P) -> None:
    f, (whole,) = NUMBERED[name], values(((6, 8),))
    for n in (2, 3, 2):
        torch.testing.assert_close(device_get(f(_put(whole, partition), torch.tensor(n))), f(whole, n))
