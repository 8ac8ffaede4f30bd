"""A recorded program: one FX graph of forward steps and, where results are followed by autograd, of backward steps.

Its nodes say in ``meta`` what passes, prices and readers ask for:

``value``     `Value` of the result; absent where that is no tensor
``held``      of a simulated value the axes over which it is held apart, and whether its blocks differ in shape; or None
``device``    of a result; absent where a pass has made the step (`device_of`)
``strides``   of a result that lies in memory otherwise than contiguous; or None
``parts``     bytes of each of several results, where the step gives a tuple or a list
``memory``    the node in whose memory the result lies: itself, where the step makes a tensor of its own (`owner`)
``spec``      how the result lies, of one in the global view
``cause``     `Cause`: the user's line; of a backward step that of the forward step whose gradient it computes
``backward``  it computes gradients: within the recorded function, or of its results
``deferred``  it runs when somebody asks for gradients of the results
``repeats``   it computes again what forward has computed; else absent
``call``      the `Call` of a collective; ``waits``: whether the step ends it, or only begins it
``constant``  the result is the same in every run of this rank
``by_size``   it stands for several that are equal on this rank, and may not be on others; else absent
``effect``    the step does more than give its result
``left``      by pass, why it has left the step as it is (`Left`); else absent
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fspmd.spec import describe
from fspmd.transport.local_tensor import blocks_of


@dataclass(frozen=True, slots=True)
class Value:
    """A block; of all simulated ranks that of the first, which is the largest."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return describe(self.dtype, self.shape)


class Left(NamedTuple):
    """Why a pass has left a step as it is; ``other``: the step that this speaks of."""

    why: str
    other: fx.Node | None


def value_of(x: Tensor) -> Value:
    """What is known of a tensor when it is recorded."""
    block = blocks_of(x)[0]
    return Value(tuple(block.shape), block.dtype)


def owner(node: fx.Node) -> fx.Node:
    """The step in whose memory a result lies: ``meta["memory"]``, or what a pass has put in its place."""
    above: fx.Node = node.meta.get("memory", node)
    return node if above is node else owner(above)


def device_of(node: fx.Node) -> torch.device | None:
    """Where a result lies: where the first operand does, if nobody says."""
    while "device" not in node.meta and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.meta.get("device")


@dataclass(slots=True)
class Program:
    """What was recorded. Passes change it in place; `results` and `gradients` follow what they replace.

    ``inputs`` are the tensors among the arguments, then those closed over that have a gradient; ``cotangents`` are
    what deferred steps are given besides; ``constants`` are tensors that were there before, read in every run.

    ``uneven`` says why a block may have another shape on another rank, ``unlike`` why ranks may have other steps:
    Python has learnt which rank it runs on, or a block is empty. Where one of them says nothing, that is so on no
    rank. ``places``: numbers of steps may be places that each rank has for itself. ``left`` says, by pass, what it
    leaves alone in all the program, and why.
    """

    graph: fx.Graph
    inputs: list[fx.Node]
    constants: dict[fx.Node, Tensor]
    cotangents: list[fx.Node]
    uneven: str = ""
    unlike: str = ""
    places: bool = False
    left: dict[str, str] = field(default_factory=dict)

    @property
    def even(self) -> bool:
        """Whether all blocks have one shape on all ranks."""
        return not self.uneven

    @property
    def alike(self) -> bool:
        """Whether all ranks have the same steps."""
        return not self.unlike

    @staticmethod
    def of(
        graph: fx.Graph,
        inputs: Sequence[fx.Node],
        results: Sequence[fx.Node],
        constants: dict[fx.Node, Tensor],
        cotangents: Sequence[fx.Node] = (),
        gradients: Sequence[fx.Node | None] = (),
    ) -> Program:
        """A program that ends with ``results`` and ``gradients``."""
        graph.output((tuple(results), tuple(gradients)))
        return Program(graph, list(inputs), dict(constants), list(cotangents))

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """The tensors among the results of the function."""
        return self._ends[0]  # type: ignore[no-any-return]

    @property
    def gradients(self) -> tuple[fx.Node | None, ...]:
        """For each input that has a gradient, what the deferred steps make of the cotangents; None for nothing."""
        return self._ends[1]  # type: ignore[no-any-return]

    @property
    def _ends(self) -> Any:
        return self.graph.output_node().args[0]

    @property
    def steps(self) -> list[fx.Node]:
        """Those that run when the function is called."""
        return [node for node in self.graph.nodes if node.op == "call_function" and not node.meta.get("deferred")]

    @property
    def deferred(self) -> list[fx.Node]:
        """Those that run when gradients are asked for."""
        return [node for node in self.graph.nodes if node.op == "call_function" and node.meta.get("deferred")]

    @property
    def kept(self) -> list[fx.Node]:
        """What the deferred steps need of the inputs and of the steps before, in the order in which they use it."""
        here = {*self.inputs, *self.steps}
        used = dict.fromkeys(node for step in self.deferred for node in step.all_input_nodes if node in here)
        used.update(dict.fromkeys(g for g in self.gradients if g in here))
        return list(used)
