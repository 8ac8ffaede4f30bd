"""What a tracker must see: every way to call torch on a value that differs from rank to rank, on every transport."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from simulated import typed
from torch import Tensor, nn
from torch_calls import CALLS, F64, operands

import fspmd
from fspmd import Mesh, P, VarianceError, axis_index, make_mesh, shard_map

#: calls without a tensor in their results
NO_TENSORS = ("shape, numel, stride", "is_contiguous")
TENSOR_CALLS = [name for name in CALLS if name not in NO_TENSORS]


def after(x: Any, change: Callable[[Any], Any]) -> Any:
    change(x)
    return x


WAYS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "operator": lambda x, w: x + w,
    "reflected": lambda x, w: 1 / (2 - x) ** 2,
    "method": lambda x, w: w.add(x),
    "function": lambda x, w: torch.add(w, x, alpha=2),
    "keyword": lambda x, w: torch.add(input=w, other=x),
    "nn.functional": lambda x, w: F.softplus(w * x),
    "linalg": lambda x, w: torch.linalg.vector_norm(x * w),
    "fft": lambda x, w: torch.fft.rfft(x * w),
    "special": lambda x, w: torch.special.expit(x * w),
    "aten packet": lambda x, w: torch.ops.aten.add(w, x),
    "aten overload": lambda x, w: torch.ops.aten.add.Tensor(w, x),
    "aten of a list": lambda x, w: torch.ops.aten.cat.default([w, x]),
    "prims": lambda x, w: torch.ops.prims.sin(x),
    "list": lambda x, w: torch.stack([w, x]),
    "tuple": lambda x, w: torch.cat((w, x, w)),
    "nested lists": lambda x, w: torch.block_diag(*[w, x]),
    "three outputs": lambda x, w: torch.linalg.svd(torch.outer(x, w)),
    "named tuple": lambda x, w: (x * w).max(0),
    "field of a named tuple": lambda x, w: (x * w).sort().values,
    "T": lambda x, w: torch.outer(x, w).T,
    "mT": lambda x, w: torch.outer(x, w).mT,
    "H": lambda x, w: torch.outer(x, w).H,
    "real": lambda x, w: torch.complex(x, w).real,
    "imag": lambda x, w: torch.complex(w, x).imag,
    "data": lambda x, w: x.data,
    "index": lambda x, w: w[x.argsort()],
    "slice": lambda x, w: x[1:],
    "chain of views": lambda x, w: x[None].expand(2, 2).t().reshape(-1),
    "mask": lambda x, w: w[x > 0],
    "where": lambda x, w: torch.where(x > 0, w, 0.0),
    "comparison": lambda x, w: x < w,
    "bool": lambda x, w: (x < w) & (x > 0),
    "axis_index": lambda x, w: axis_index("x"),
    "index by axis_index": lambda x, w: w[axis_index("x") % 2],
    "axis_index beside a number": lambda x, w: 3 - axis_index("x"),
    "module": lambda x, w: nn.Linear(2, 3, dtype=F64)(x),
    "new_zeros": lambda x, w: x.new_zeros(3),
    "zeros_like": lambda x, w: torch.zeros_like(x),
    "no_grad": lambda x, w: torch.no_grad()(lambda: x * w)(),
    "copy": lambda x, w: torch.tensor(x),
    "as_tensor": lambda x, w: torch.as_tensor(x),
    "type of another": lambda x, w: (x * w).type_as(w),
    "deepcopy": lambda x, w: __import__("copy").deepcopy(x),
    "out=": lambda x, w: torch.add(x, w, out=torch.empty_like(x)),
    "in place": lambda x, w: (x * 1).add_(w),
    "in-place operator": lambda x, w: after(x * 1, lambda y: y.__iadd__(w)),
    "setitem": lambda x, w: after(x * 1, lambda y: y.__setitem__(0, w[0])),
    "data of another": lambda x, w: after(x * 1, lambda y: setattr(y, "data", w * x)),
    "named dims of einsum": lambda x, w: torch.einsum("i,j->ij", [x, w]),
    "split": lambda x, w: x.split(1),
    "checkpoint": lambda x, w: fspmd.checkpoint(lambda x: x * w)(x),
    "torch checkpoint": lambda x, w: torch.utils.checkpoint.checkpoint(lambda x: x * w, x, use_reentrant=False),
    "parameter": lambda x, w: nn.Parameter(x),
    "frozen parameter": lambda x, w: nn.Parameter(x, requires_grad=False) * w,
    "buffer": lambda x, w: nn.Buffer(x),
    "parameters of a module": lambda x, w: nn.ParameterList([x, x * w])[1],
    "weight of a module": lambda x, w: after(
        nn.Linear(2, 1, bias=False, dtype=F64), lambda m: setattr(m, "weight", nn.Parameter(x[None]))
    )(w),
    "state of a module": lambda x, w: nn.ParameterDict({"w": x}).state_dict()["w"],
    "as_subclass": lambda x, w: x.as_subclass(Tensor),
    "Tensor of a tensor": lambda x, w: Tensor(x),
    "DoubleTensor of a tensor": lambda x, w: torch.DoubleTensor(x),
    "DoubleTensor beside another": lambda x, w: torch.DoubleTensor(x[0:]) * w,
    "LongTensor of a tensor": lambda x, w: torch.LongTensor(x.long()),
    "new of a tensor": lambda x, w: w.new(x),
    "pad_sequence": lambda x, w: nn.utils.rnn.pad_sequence([x * w, x[:1]]),
    "apply_": lambda x, w: (x * w).apply_(math.floor),
    "stop_gradient": lambda x, w: fspmd.stop_gradient(x),
}

#: calls that would hand on the memory of a value, without its type -> a part of the error
REFUSED_WAYS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "set_": (lambda x: torch.zeros(2, dtype=F64).set_(x), "set_.. would write a value that varies over 'x'"),
    "set_ to a storage": (
        lambda x: torch.zeros(2, dtype=F64).set_(x.untyped_storage()),
        "the storage of a value {V:x}",
    ),
    "Tensor of a storage": (lambda x: Tensor(x.float().untyped_storage()), "the storage of a value {V:x}"),
    "copy of a storage": (lambda x: x.untyped_storage().clone(), "storage.copy_.. got the storage of a value {V:x}"),
    "copy into a storage": (
        lambda x: torch.zeros(2, dtype=F64).untyped_storage().copy_(x.untyped_storage()),
        "storage.copy_.. got the storage of a value {V:x}",
    ),
    "bytes of a storage": (lambda x: x.untyped_storage()[0], r"storage.i. got the storage of a value {V:x}"),
    "write into a storage": (lambda x: x.untyped_storage().fill_(0), "storage.fill_.. got the storage of a value"),
    "size of a storage": (lambda x: x.untyped_storage().resize_(0), "storage.resize_.. got the storage of a value"),
    "Tensor of a list": (lambda x: Tensor([x[0], x[1]]), "torch.Tensor.. needs one Python value"),
    "new of a list": (lambda x: x.new([x[0], x[1]]), "x.new.. needs one Python value"),
    "scalar_tensor": (lambda x: torch.scalar_tensor(x.sum()), "needs one Python value"),
    "dlpack": (torch.from_dlpack, "x.__dlpack__.. needs one Python value"),
    "dlpack of a function": (torch.utils.dlpack.to_dlpack, "needs one Python value"),
}


def types_of_way(name: str, mesh: Mesh) -> set[str]:
    """The types of a result on four ranks."""
    x, w = torch.arange(8, dtype=F64), torch.tensor([1.0, -2.0], dtype=F64)
    return typed(WAYS[name], x, w, mesh=mesh, specs=(P("x"), P()))


def untyped_on_processes() -> list[str]:
    """The calls and ways whose results have not the type of their operands, or that are not refused, on four ranks."""
    mesh = make_mesh((4,), ("x",), transport="process_group", device="cpu")
    found = [name for name in WAYS if types_of_way(name, mesh) != {"{V:x}"}]
    for name in TENSOR_CALLS:
        f, kinds = CALLS[name]
        whole = [torch.cat([x] * 4) for x in operands(kinds, 0)]
        if typed(f, *whole, mesh=mesh, specs=P("x")) != {"{V:x}"}:
            found.append(name)
    for name, (way, _) in REFUSED_WAYS.items():
        try:
            typed(way, torch.arange(8, dtype=F64), mesh=mesh, specs=P("x"))
            found.append(name)
        except VarianceError:
            pass
    return found


def parameter_returned() -> str:
    """The error for a module whose parameter is this rank's block, and whose result is said to be equal on all."""
    mesh = make_mesh((4,), ("x",), transport="process_group", device="cpu")

    def body(w: Tensor) -> Tensor:
        module = nn.Linear(2, 1, bias=False, dtype=F64)
        module.weight = nn.Parameter(w)
        return module(torch.ones(2, dtype=F64)).sum()

    try:
        shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P())(torch.arange(8, dtype=F64).view(4, 2))
    except VarianceError as error:
        return str(error)
    return "nothing was raised"
