"""A simulated value as an object: how it prints, parameters and optimizers, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from simulated import F64, GRID, MESH, run, shards, simulated
from torch import Tensor, nn

from fspmd import (
    FspmdError,
    P,
    Sharded,
    VarianceError,
    device_get,
    device_put,
    pcast,
    psum,
    shard_map,
)
from fspmd.transport.local_tensor import LocalTensor

# --- printing -------------------------------------------------------------------------------------------------------


def test_print_shows_each_block_with_its_coordinates(capsys: pytest.CaptureFixture[str]) -> None:
    def body(x: Tensor, y: Tensor) -> Tensor:
        print(x)
        print(f"{y} and {x}")
        print(psum(x, ("x", "y")))
        return x

    shard_map(body, mesh=GRID, in_specs=(P("x", "y"), P("x")), out_specs=P("x", "y"))(
        torch.arange(6).view(2, 3), torch.tensor([0.5, 1.5])
    )
    blocks = "\n".join(f"[x={i // 3}, y={i % 3}] tensor([[{i}]])" for i in range(6))
    assert (
        capsys.readouterr().out
        == f"{blocks}\n[x=0] tensor([0.5000])\n[x=1] tensor([1.5000]) and {blocks}\ntensor([[15]])\n"
    )


def test_repr_of_uneven_blocks_lists_and_sizes() -> None:
    x = device_put(torch.arange(3), P("x"), mesh=MESH)
    assert (
        repr(x.local) == "[x=0] tensor([0])\n[x=1] tensor([1])\n[x=2] tensor([2])\n[x=3] tensor([], dtype=torch.int64)"
    )
    assert str(tuple(x.local.shape)) == "({1, 1, 1, 0},)"
    assert str([x.local[:0]]) == f"[{x.local[:0]!r}]"


def test_repr_of_a_differentiated_value_shows_no_graph() -> None:
    x = simulated(1).requires_grad_()
    y = x * 0 + 1
    assert repr(y) == "\n".join(f"[x={i}] tensor([1.], dtype=torch.float64)" for i in range(4))


def test_len_iteration_and_metadata() -> None:
    x = simulated(3, 2)
    assert len(x) == 3
    assert [tuple(row.shape) for row in x] == [(2,)] * 3
    assert (x.shape, x.ndim, x.dtype, x.device.type) == (torch.Size([3, 2]), 2, F64, "cpu")
    assert isinstance(x, Tensor)
    assert hash(x) == id(x) or isinstance(hash(x), int)


# --- parameters, modules, optimizers --------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p, **kw: torch.optim.AdamW(p, lr=0.1, **kw),
    "Adam, amsgrad": lambda p, **kw: torch.optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1, **kw),
    "SGD": lambda p, **kw: torch.optim.SGD(p, lr=0.1, momentum=0.9, **kw),
    "RMSprop": lambda p, **kw: torch.optim.RMSprop(p, lr=0.1, **kw),
    "Adagrad": lambda p, **kw: torch.optim.Adagrad(p, lr=0.1, **kw),
    "NAdam": lambda p, **kw: torch.optim.NAdam(p, lr=0.1, **kw),
}
FUSED = ("AdamW", "Adam, amsgrad", "SGD")
WAYS = [
    (name, way)
    for name in OPTIMIZERS
    for way in ({}, {"foreach": True}, {"foreach": False}, {"fused": True})
    if name in FUSED or "fused" not in way
]


@pytest.mark.parametrize(("name", "way"), WAYS, ids=str)
def test_an_optimizer_steps_each_rank_alone(name: str, way: dict[str, bool]) -> None:
    """On sharded and on replicated leaves at once."""
    params = [
        nn.Parameter(simulated(3, 2)),
        nn.Parameter(torch.arange(3, dtype=F64)),
        nn.Parameter(simulated(2, seed=1)),
    ]
    alone = [[nn.Parameter(block.clone()) for block in shards(p)] for p in params]
    together = OPTIMIZERS[name](params, **way)
    each = [OPTIMIZERS[name]([column[rank] for column in alone]) for rank in range(4)]
    for _ in range(3):
        for p in [*params, *(q for column in alone for q in column)]:
            p.grad = p.detach().square().sin()
        together.step()
        for optimizer in each:
            optimizer.step()
    for p, column in zip(params, alone, strict=True):
        for block, q in zip(shards(p), column, strict=True):
            torch.testing.assert_close(block, q.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_gradients_of_each_rank(foreach: bool | None) -> None:
    p, q = nn.Parameter(simulated(3, 2)), nn.Parameter(torch.arange(3, dtype=F64))
    p.grad, q.grad = p.detach() * 3, q.detach() * 5
    alone = []
    for block in shards(p):
        pair = [nn.Parameter(block.clone()), nn.Parameter(q.detach().clone())]
        pair[0].grad, pair[1].grad = block * 3, q.detach() * 5
        alone.append((torch.nn.utils.clip_grad_norm_([pair[0]], 1.0), pair[0].grad))
    norm = torch.nn.utils.clip_grad_norm_([p], 1.0, foreach=foreach)
    for rank, (expected, grad) in enumerate(alone):
        torch.testing.assert_close(shards(norm)[rank], expected)
        torch.testing.assert_close(shards(p.grad)[rank], grad)


def test_a_module_of_simulated_parameters() -> None:
    plain = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    module = copy.deepcopy(plain)
    for part in module.modules():
        for name, value in list(part._parameters.items()):
            blocks = torch.stack([value.detach() * (rank + 1) for rank in range(4)])
            part._parameters[name] = nn.Parameter(device_put(blocks, P("x"), mesh=MESH).local[0])
    x = simulated(5, 3)
    module(x).square().sum().backward()
    for rank in range(4):
        alone = copy.deepcopy(plain)
        with torch.no_grad():
            for value in alone.parameters():
                value.mul_(rank + 1)
        alone(shards(x)[rank]).square().sum().backward()
        for mine, theirs in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(shards(mine.grad)[rank], theirs.grad, rtol=1e-12, atol=1e-12)
    twin = copy.deepcopy(module)
    assert all(isinstance(p, nn.Parameter) and type(p) is LocalTensor for p in twin.parameters())
    for mine, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        assert mine.shards[0].data_ptr() != theirs.shards[0].data_ptr()
        torch.testing.assert_close(shards(mine.grad)[1], shards(theirs.grad)[1])
    twin.load_state_dict(module.state_dict())
    twin.float()
    assert {p.dtype for p in twin.parameters()} == {torch.float32} == {p.shards[0].dtype for p in twin.parameters()}
    twin.zero_grad()
    assert all(p.grad is None for p in twin.parameters())


def test_deepcopy_of_a_computed_value_is_refused() -> None:
    with pytest.raises(FspmdError, match=r"copy x\.detach"):
        copy.deepcopy(simulated(2).requires_grad_() * 2)


def test_assigning_data() -> None:
    x, y = simulated(2), simulated(3, seed=1)
    x.data = y
    assert x.shape == (3,)
    torch.testing.assert_close(shards(x)[2], shards(y)[2])
    with pytest.raises(FspmdError, match=r"x\.data = y where x differs from rank to rank and y does not"):
        x.data = torch.zeros(3, dtype=F64)


# --- what a simulated value cannot do -------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "pickle": (pickle.dumps, "is not pickled"),
    "copy.copy": (copy.copy, "is not pickled"),
    "torch.save": (lambda x: torch.save(x, "/dev/null"), "is not pickled"),
    "sparse": (lambda x: x.to_sparse(), "cannot have the layout torch.sparse_coo"),
    "shared memory": (lambda x: x.share_memory_(), "nothing is to be shared"),
    "dlpack": (lambda x: x.__dlpack__(), "needs one Python value"),
    "numpy": (lambda x: x.numpy(), "needs one Python value"),
    "array": (lambda x: x.__array__(), "needs one Python value"),
    "out= of another shape": (lambda x: torch.add(x, x, out=x.new_empty(0)), "keeps its shape"),
    "out= that is equal on all ranks": (
        lambda x: torch.add(x, x, out=torch.empty_like(shards(x)[0])),
        "would write a value that varies",
    ),
    "into a value equal on all ranks": (
        lambda x: torch.zeros(2, 2, dtype=F64).add_(x),
        "would write a value that varies",
    ),
    "into a conjugate": (lambda x: torch.complex(x, x).conj().add_(1), "shares its memory with its argument"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_simulated_is_refused(name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(FspmdError, match=text):
        call(simulated(2, 2))


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_plain_tensor_takes_no_simulated_data_in_a_body(check_vma: bool) -> None:
    """Its memory would be that of the wrapper, which has none."""

    def body(x: Tensor) -> None:
        torch.zeros(2).data = x

    with pytest.raises(VarianceError, match=r"x\.data = y would write a value that varies over 'x' into f(32|64)\[2"):
        run(body, torch.zeros(8), check_vma=check_vma)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("write", [lambda y: y.add_(1), lambda y: y[0].zero_(), lambda y: y.view(-1)[:1].fill_(3.0)])
def test_writing_into_a_cast_or_a_view_of_it_is_refused(write: Callable[[Tensor], Any], check_vma: bool) -> None:
    """All ranks' copies are one tensor."""
    w = torch.ones(2, 2)
    f = (lambda w: write(pcast(w, "x", to="varying"))) if check_vma else (lambda w: write(w + 0))
    if check_vma:
        with pytest.raises(VarianceError, match=r"write into a copy: pcast\(...\).clone\(\)"):
            run(f, w, specs=P())
    else:
        run(f, w, specs=P(), check_vma=False)
    torch.testing.assert_close(w, torch.ones(2, 2))


def test_a_sharded_global_value_is_what_its_blocks_say() -> None:
    x = torch.complex(torch.randn(8), torch.randn(8)).conj()
    y = shard_map(lambda x: x * 2, mesh=MESH, in_specs=P("x"), out_specs=P("x"))(x)
    assert isinstance(y, Sharded)
    torch.testing.assert_close(device_get(y), x * 2)
