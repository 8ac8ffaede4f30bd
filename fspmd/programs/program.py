"""A recorded program: one FX graph of forward steps and, if autograd follows results, of backward steps.

The ``meta`` of its nodes has the facts for passes, prices and readers:

``value``     `Value` of the result; absent if the result is no tensor
``frame``     the frame of a simulated value, and whether its blocks differ in shape; None for other values
``device``    the device of the result; absent if a pass has made the step (`device_of`)
``strides``   the strides of a result if a new tensor has others, if only along dims of size 1; None for other results
``parts``     the bytes of each result of a step that returns a tuple or a list
``memory``    the node in whose memory the result lies: the node itself if the step makes a new tensor (`owner`)
``spec``      the spec of a result in the global view
``cause``     `Cause`: the user's line; for a backward step the line of the forward step that it differentiates
``backward``  whether the step computes gradients: within the recorded function, or of its results
``deferred``  whether the step runs when gradients of the results are computed
``repeats``   True if the step computes a value of forward again; else absent
``call``      the `Call` of a collective
``waits``     whether the step of a collective waits for it, or only begins it
``constant``  whether the result is the same in every run of this rank
``by_size``   True if the step replaces steps that are equal on this rank and may differ on other ranks; else absent
``effect``    whether the step does more than return its result
``left``      by pass, why the pass has not changed the step (`Left`); else absent
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fspmd.forms import packed
from fspmd.spec import describe
from fspmd.torch_internals import DisableTorchFunction, address_of
from fspmd.transport.local_tensor import blocks_of
from fspmd.variance import unwrapped


@dataclass(frozen=True, slots=True)
class Value:
    """The shape and dtype of a block; in a simulation, of the first rank's block, which is the largest."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return describe(self.dtype, self.shape)


class Left(NamedTuple):
    """Why a pass has not changed a step. ``other``: the step whose name follows the reason, if any."""

    why: str
    other: fx.Node | None


def value_of(x: Tensor) -> Value:
    """The shape and dtype of a tensor, or of its first shard."""
    block = blocks_of(x)[0]
    return Value(tuple(block.shape), block.dtype)


def shape_of(node: Any) -> tuple[int, ...]:
    """The shape of a result; () if it is no tensor."""
    return node.meta["value"].shape if "value" in node.meta else ()


def dtype_of(node: Any) -> Any:
    """The dtype of a result; None if it is no tensor."""
    return node.meta["value"].dtype if "value" in node.meta else None


def nbytes_of(node: fx.Node) -> int:
    """The bytes of a result; 0 if it is no tensor."""
    return node.meta["value"].nbytes if "value" in node.meta else 0


def strides_of(node: fx.Node) -> tuple[int, ...]:
    """The strides of a result."""
    strides: tuple[int, ...] | None = node.meta.get("strides")
    return packed(shape_of(node)) if strides is None else strides


def owner(node: fx.Node) -> fx.Node:
    """The step in whose memory a result lies: ``meta["memory"]``, or the step that has replaced it in a pass."""
    memory: fx.Node = node.meta.get("memory", node)
    return node if memory is node else owner(memory)


def by_memory(nodes: Iterable[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Values by the step in whose memory they lie."""
    within: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        within.setdefault(owner(node), []).append(node)
    return within


def device_of(node: fx.Node) -> torch.device | None:
    """The device of a result; if unknown, that of the first operand."""
    while "device" not in node.meta and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.meta.get("device")


@dataclass(slots=True)
class Program:
    """A recorded program. Passes change it in place.

    Attributes:
        graph: the steps.
        inputs: the tensors among the arguments, then the tensors closed over that have a gradient.
        constants: other tensors from before the recording. Every run reads them.
        cotangents: the gradients of results, which deferred steps take.
        uneven: why a block may have another shape on another rank; empty if all blocks have one shape.
        unlike: why ranks may have other steps: Python has read its rank, or a block is empty; empty if they have not.
        places: whether numbers of steps may be places that differ from rank to rank.
        left: by pass, the steps that it leaves alone in the whole program, and why.
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
        """Whether the ranks have equal steps."""
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
        """For each input with a gradient, the step that computes it, or None for a gradient of zero."""
        return self._ends[1]  # type: ignore[no-any-return]

    @property
    def _ends(self) -> Any:
        return self.graph.output_node().args[0]

    @property
    def steps(self) -> list[fx.Node]:
        """The steps that run when the function is called."""
        return [node for node in self.graph.nodes if node.op == "call_function" and not node.meta.get("deferred")]

    @property
    def deferred(self) -> list[fx.Node]:
        """The steps that run when gradients are computed."""
        return [node for node in self.graph.nodes if node.op == "call_function" and node.meta.get("deferred")]

    @property
    def kept(self) -> list[fx.Node]:
        """The inputs and results of forward steps that deferred steps need, in the order of their first use."""
        forward = {*self.inputs, *self.steps}
        used = dict.fromkeys(node for step in self.deferred for node in step.all_input_nodes if node in forward)
        used.update(dict.fromkeys(g for g in self.gradients if g in forward))
        return list(used)


def copied(program: Program) -> Program:
    """A copy of a program, with new nodes."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        if node.op != "output":
            known[node] = copy_node(graph, node, known.__getitem__)
            remember(known[node], node, known)
    return rebuilt(program, graph, known)


def copy_node(graph: fx.Graph, node: fx.Node, placed: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """A copy of a node in a graph. Suppresses the warning of fx about sizes that differ from rank to rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return graph.node_copy(node, placed)


def remember(made: fx.Node, node: fx.Node, known: dict[fx.Node, fx.Node]) -> None:
    """Give the node ``made`` the facts of ``node``, which it copies. ``known``: new nodes by old nodes."""
    made.meta = dict(node.meta)
    if "memory" in made.meta:
        made.meta["memory"] = known[owner(node)]


def rebuilt(program: Program, graph: fx.Graph, known: dict[fx.Node, fx.Node]) -> Program:
    """The program in another graph. ``known``: nodes of this graph by nodes of the program."""
    inputs, results, cotangents = (
        [known[node] for node in nodes] for nodes in (program.inputs, program.results, program.cotangents)
    )
    gradients = [None if node is None else known[node] for node in program.gradients]
    constants = {known[node]: x for node, x in program.constants.items()}
    made = Program.of(graph, inputs, results, constants, cotangents, gradients)
    made.uneven, made.unlike, made.places = program.uneven, program.unlike, program.places
    return made


UNLIKE = "ranks may have other steps"  # the program says why


def leave_all(program: Program, name: str, what: str, even: bool = False) -> bool:
    """Whether a pass must leave ``what`` alone in the whole program, since ranks might choose differently.

    Notes the reason in the program. ``even``: whether the pass needs blocks of one shape on all ranks.
    """
    why = f"{UNLIKE}: {program.unlike}" if program.unlike else ""
    if not why and even and program.uneven:
        why = f"ranks may have blocks of other shapes: {program.uneven}"
    if why:
        program.left[name] = f"{what}; {why}"
    return bool(why)


def leave(node: fx.Node, name: str, why: str, other: fx.Node | None = None) -> None:
    """Note that a pass leaves a step alone. ``other``: the step whose name follows ``why``."""
    node.meta["left"] = {**node.meta.get("left", {}), name: Left(why, other)}


def forget(program: Program, name: str) -> None:
    """Drop the notes of a pass, which runs again."""
    for node in program.graph.nodes:
        if name in node.meta.get("left", ()):
            node.meta["left"] = {key: left for key, left in node.meta["left"].items() if key != name}


def memory_of(x: Tensor) -> int:
    """A number that identifies the memory in which a tensor and its views lie."""
    with DisableTorchFunction():
        return int(address_of(blocks_of(unwrapped(x))[0].untyped_storage()))
