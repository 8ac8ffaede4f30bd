"""The ways a model of `model_cases` is run: unsharded, and on a mesh, eagerly or recorded; results are whole."""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from model_cases import CASES, Case, Collectives
from torch import Tensor, nn

import fspmd
from fspmd import CommunicationLog, Mesh, P, ParallelPlan, communication_log, device_get, device_put, functional_call


class Step(NamedTuple):
    """Of a training step: the logits (None of a recorded one), the loss, and the gradient of each parameter."""

    logits: Tensor | None
    loss: Tensor
    gradients: dict[str, Tensor]

    def error(self, other: Step) -> tuple[float, float]:
        """Largest difference of logits and loss, and of gradients."""
        values = [_difference(self.loss, other.loss)]
        if self.logits is not None and other.logits is not None:
            values.append(_difference(self.logits, other.logits))
        assert self.gradients.keys() == other.gradients.keys()
        return max(values), max(_difference(g, other.gradients[name]) for name, g in self.gradients.items())

    def deviation(self, exact: Step) -> float:
        """The largest distance of a gradient, relative to its length."""
        return max(_distance(g, exact.gradients[name]) for name, g in self.gradients.items())


def _distance(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).norm() / (y.double().norm() + 1e-3))


def _difference(x: Tensor, y: Tensor) -> float:
    assert x.shape == y.shape
    assert x.dtype == y.dtype
    return float((x.double() - y.double()).abs().max())


@functools.cache
def unsharded(name: str, dtype: torch.dtype | None = None) -> Step:
    """The step of torch alone."""
    case = CASES[name]
    model = case.make(dtype)
    out = model(**batch_of(case, dtype))
    out.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return Step(out.logits.detach(), out.loss.detach(), gradients)


def batch_of(case: Case, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The batch, its floating-point numbers of the model's dtype."""
    dtype = dtype or case.dtype
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in case.batch().items()}


@dataclass
class Placed:
    """A model on a mesh: its parameters laid out by its styles, its buffers and batch."""

    case: Case
    mesh: Mesh
    dtype: torch.dtype | None = None
    styled: bool = True
    model: nn.Module = field(init=False)
    params: dict[str, Any] = field(init=False)
    plan: ParallelPlan = field(init=False)
    buffers: dict[str, Any] = field(init=False)
    batch: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.model = self.case.make(self.dtype)
        params = dict(self.model.named_parameters())
        self.params, self.plan = fspmd.parallelize(params, self.case.styles, self.mesh, axis="tp")
        self.buffers = device_put({name: x.clone() for name, x in self.model.named_buffers()}, P(), mesh=self.mesh)
        self.batch = device_put(batch_of(self.case, self.dtype), self.case.spec, mesh=self.mesh)

    def __call__(self, params: Any, buffers: Any, batch: Mapping[str, Any]) -> Any:
        """What the model gives; norms of batches write their statistics into the buffers."""
        styles = self.plan if self.styled else None
        return functional_call(self.model, (params, buffers), **batch, styles=styles)

    def step(self) -> tuple[Step, Collectives]:
        """Eagerly, with ``backward()``, and what that communicates."""
        with communication_log() as log:
            out = self(self.params, self.buffers, self.batch)
            out.loss.backward()
        gradients = {name: x.grad for name, x in self.params.items() if x.grad is not None}
        return Step(*device_get((out.logits.detach(), out.loss.detach(), gradients))), counted(log)

    def recorded(self, passes: list[str] | None = None) -> tuple[Step, Collectives]:
        """By `jit`, twice: recorded, changed by passes, and replayed; and what the replay communicates."""
        step, *args = self._recordable()
        run = fspmd.jit(step, passes=passes)
        run(*args)
        with communication_log() as log:
            value, gradients = run(*args)
        found = {name: x.detach() for name, x in gradients.items()}
        return Step(None, *device_get((value.detach(), found))), counted(log)

    def lowered(self, passes: list[str]) -> fspmd.Lowered:
        """The step as a process records it."""
        step, *args = self._recordable()
        return fspmd.jit(step, passes=passes).lower(*args)

    def _recordable(self) -> tuple[Any, ...]:
        """The step, loss and gradients, and its arguments."""
        trained = {name: x.detach() for name, x in self.params.items() if x.requires_grad}
        others = {name: x for name, x in self.params.items() if name not in trained}

        def loss(trained: Any, others: Any, buffers: Any, batch: Any) -> Any:
            return self(trained | others, buffers, batch).loss

        return fspmd.value_and_grad(loss), trained, others, self.buffers, self.batch


def generated(name: str, mesh: Mesh | None = None, styled: bool = True) -> Tensor:
    """The tokens that a model generates, on a mesh or on one device."""
    case = CASES[name]
    if mesh is None:
        model, prompt = case.make().eval(), batch_of(case)
        return model.generate(**{key: prompt[key] for key in case.prompt}, **case.generate)  # type: ignore
    placed = Placed(case, mesh, styled=styled)
    model = placed.model.eval()
    tensors, styles = (placed.params, placed.buffers), placed.plan if styled else None
    with fspmd.attached(model, tensors, styles=styles), torch.no_grad():
        found = model.generate(**{key: placed.batch[key] for key in case.prompt}, **case.generate)  # type: ignore
    return device_get(found)  # type: ignore[no-any-return]


def counted(log: CommunicationLog) -> Collectives:
    """What a step communicates."""
    found = collections.Counter(("dp" in one.axes, one.backward) for one in log)
    return Collectives(*(found[key] for key in itertools.product((False, True), repeat=2)))


def on_processes(names: list[str], styled: bool) -> dict[str, tuple[float, float]]:
    """Errors of the steps of models on a mesh (2, 2) of processes; what they generate is checked, too."""
    mesh = fspmd.make_mesh((2, 2), ("dp", "tp"), device="cpu")
    for name in names:
        if CASES[name].generate is not None:
            assert torch.equal(generated(name, mesh, styled), generated(name)), name
    return {name: Placed(CASES[name], mesh, styled=styled).step()[0].error(unsharded(name)) for name in names}
