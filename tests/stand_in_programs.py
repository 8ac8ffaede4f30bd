"""What runs on a device that is none: values without data, which cannot be looked at, nor be mixed with a CPU's.

The device is torch's PrivateUse1 with a guard that does nothing, its values those of a `FakeTensorMode`: ``.item()``,
shapes that follow from values, and operands on two devices raise. A mode above it raises where an op takes a value of
the device and gives one on the CPU. Each program runs twice: tables of places, which a plan has, are made on the CPU
and copied once; the second time nothing is made there.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from typing import Any, Final

import device_programs as programs
import optree
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import fspmd
from fspmd import Mesh, P, device_put, jit, make_mesh, psum, shard_map
from fspmd.random import blocks
from fspmd.rules import draws

DEVICE: Final = "standin"
N: Final = 4


class Watch(TorchDispatchMode):
    """Refuses what would wait for a GPU; and, once plans are made, what makes anything on the CPU."""

    def __init__(self, planned: bool) -> None:
        super().__init__()
        self.planned = planned

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = [x for x in optree.tree_leaves(out) if isinstance(x, Tensor)]
        if self.planned and any(x.device.type == "cpu" and x.numel() > 1 for x in found):
            raise AssertionError(f"{func} gave a value on the CPU")
        taken = [x for x in optree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(x.device.type == "cpu" for x in found) and any(x.device.type == DEVICE for x in taken):
            raise AssertionError(f"{func} copied a value to the CPU")
        return out


def _there(*values: Any) -> None:
    for x in optree.tree_leaves(values, is_leaf=lambda x: isinstance(x, fspmd.Sharded)):
        assert x.device.type == DEVICE, x


def _new(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def _put(mesh: Mesh) -> tuple[dict[str, Any], Any]:
    put = {}
    for name, x in programs.SHAPES.items():
        value = torch.zeros(x, dtype=torch.int64, device=DEVICE) if name == "ids" else _new(*x)
        put[name] = device_put(value, programs.SPECS[name], mesh=mesh)
    return put, put.pop("ids")


def collectives(mesh: Mesh) -> None:
    for ours, _ in programs.COLLECTIVES.values():

        def body(x: Tensor, ours: Any = ours) -> Tensor:
            return programs.varying(ours(x))

        def loss(x: Any, body: Any = body) -> Any:
            mapped = shard_map(lambda x: psum(body(x).square().sum(), "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
            return mapped(x)

        _there(fspmd.value_and_grad(loss)(device_put(_new(N * N, 3), P("x"), mesh=mesh)))


def model(mesh: Mesh) -> None:
    _there(fspmd.value_and_grad(programs.loss)(*_put(mesh)))


def replay(mesh: Mesh) -> None:
    run = jit(fspmd.value_and_grad(programs.loss))
    for _ in range(3):
        _there(run(*_put(mesh)))


def training(mesh: Mesh) -> None:
    for optimizer in (
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        functools.partial(torch.optim.AdamW, lr=0.1, capturable=True),
    ):
        weights, ids = _put(mesh)
        leaves = [x.requires_grad_() for x in weights.values()]
        steps: Any = optimizer(leaves)
        for _ in range(2):
            steps.zero_grad()
            programs.loss(weights, ids).backward()
            torch.nn.utils.clip_grad_norm_(leaves, 0.5)
            steps.step()
        _there(leaves, [x.grad for x in leaves])


def clipped(mesh: Mesh) -> None:
    _there(fspmd.clip_by_global_norm(_put(mesh)[0], 1.0))


def layouts(mesh: Mesh) -> None:
    for shape in ((8, 12), (7, 5)):
        x = device_put(_new(*shape), P("x"), mesh=mesh)
        for to in (P(None, "x"), P(), P("x"), P(None, None, unreduced={"x"}), P()):
            x = fspmd.reshard(x, to)
            _there(x)


def new_values(mesh: Mesh) -> None:
    on: dict[str, Any] = {"mesh": mesh, "spec": P("x")}
    _there(fspmd.zeros(7, 3, **on), fspmd.arange(9, **on), fspmd.eye(5, **on), fspmd.linspace(0, 1, 7, **on))
    x = fspmd.ones(7, 3, **on)
    _there(torch.zeros_like(x), x.tril(), F.one_hot(fspmd.zeros(8, dtype=torch.int64, **on), 4))


def random(mesh: Mesh) -> None:
    on: dict[str, Any] = {"mesh": mesh, "spec": P("x")}
    _there(fspmd.rand(50, 7, **on), fspmd.randn(50, 7, **on), fspmd.randint(0, 9, (50, 7), **on))
    x = fspmd.ones(50, 7, **on)
    _there(F.dropout(x, 0.3), x.exponential_(), torch.rand_like(x), x.normal_())
    _there(torch.bernoulli(x), torch.normal(x, x))


PROGRAMS: Final[dict[str, Callable[[Mesh], None]]] = {
    one.__name__: one for one in (collectives, model, replay, training, clipped, layouts, new_values, random)
}


def outcomes() -> dict[str, str]:
    """Of each program, simulated and as one of several processes: why it failed, or nothing."""
    _setup_privateuseone_for_python_backend(DEVICE)
    for module in (blocks, draws):
        module.draw_seed = lambda *_: 7  # type: ignore[attr-defined]  # a number of the host's own generator
    torch.distributed.init_process_group(f"cpu:fake,{DEVICE}:fake", store=FakeStore(), rank=1, world_size=N)
    found = {}
    with FakeTensorMode(allow_non_fake_inputs=False):
        for transport in ("simulation", "process_group"):
            mesh = make_mesh((N,), ("x",), transport=transport, device=DEVICE)
            for name, program in PROGRAMS.items():
                try:
                    for planned in (False, True):
                        with Watch(planned):
                            program(mesh)
                    found[f"{name}, {transport}"] = ""
                except Exception:
                    found[f"{name}, {transport}"] = traceback.format_exc()
    return found
