"""The CUDA graph backend: the steps between collectives start as one graph.

A graph reads and writes the memory that its steps had when it was captured. So arguments are copied into buffers of
the graph, and results that may be kept are copied out. A value that one graph gives and another takes stays in place.
A graph reads closed over tensors in place, and is captured again when they have moved. Draws of random numbers and
collectives are no part of a graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor, fx

from fspmd.errors import ArgumentError
from fspmd.programs.program import device_of, owner
from fspmd.programs.replay import ProgramPart, compiled
from fspmd.programs.segments import local_steps, results_of, segmented
from fspmd.programs.steps import is_aten, is_collective
from fspmd.torch_internals import foreach_copy_
from fspmd.transport.local_tensor import blocks_of

_WARM_UP: Final = 3  # runs before a capture, as torch does them
_WAITS: Final = ("aten::linalg_", "aten::_linalg_")  # some of these wait for the device


class Captures(Protocol):
    """Captures the graphs of one program: `CudaGraphs`, or a stand-in where there is no GPU."""

    device: str

    def follow(self) -> None:
        """Order the next run of the program after the last one."""

    def capture(self, run: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        """A function that repeats ``run`` on the same memory, and the results, which lie there."""


class CudaGraphs:
    """Graphs with one pool of memory, since no two of them run at the same time."""

    device = "cuda"

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.current_stream()

    def follow(self) -> None:
        """Let the current stream wait for the stream of the last run."""
        now = torch.cuda.current_stream()
        if now != self.stream:
            now.wait_stream(self.stream)
            self.stream = now

    def capture(self, run: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        """Run on a side stream until kernels have set themselves up; then capture.

        Threads of NCCL may query their events meanwhile. So the capture restricts this thread alone.
        """
        side = torch.cuda.Stream()
        side.wait_stream(self.stream)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                run()
        self.stream.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            results = run()
        return graph.replay, results


def check_device() -> None:
    """Raise `ArgumentError` where there is no GPU."""
    if not torch.cuda.is_available():
        raise ArgumentError(
            "jit(backend='cudagraphs') needs a CUDA device, and torch.cuda.is_available() is False; "
            "write backend='replay'"
        )


def by_graphs(captures_of: Callable[[], Captures], part: ProgramPart) -> Callable[..., Any]:
    """Like `replay.compiled`, with each segment as one graph that is captured when it first runs.

    Raises:
        ArgumentError: no tensor is on such a device.
    """
    captures, turn = captures_of(), threading.Lock()
    fit = local_steps(part.steps, lambda node: _suits(node, captures.device))
    if part.steps and not any(_is_on(x, captures.device) for x in (*part.steps, *part.inputs, *part.constants)):
        found = device_of((*part.inputs, *part.steps)[0])
        raise ArgumentError(
            f"jit(backend='cudagraphs') got a function of tensors on {found}, and none on a CUDA device; put them "
            "there (make_mesh(..., device='cuda')), or write backend='replay'"
        )
    leaving = _leaving(part, fit)
    lasting = set(part.constants)  # memory that stays in place, unless somebody moves it
    graphs: list[CapturedGraph] = []

    def made(own: ProgramPart) -> CapturedGraph:
        stays = [owner(node) in lasting for node in own.inputs]
        leaves = [node in leaving for node in own.outputs]
        lasting.update(node for node in own.outputs if node not in leaving)
        graphs.append(CapturedGraph(captures, compiled(own), stays, leaves, graphs, len(graphs)))
        return graphs[-1]

    run = segmented(part, fit, made)

    def in_turn(*values: Any) -> Any:
        with turn:
            captures.follow()
            return run(*values)

    return in_turn


by_cuda_graphs: Final = partial(by_graphs, CudaGraphs)


class CapturedGraph:
    """A segment, captured when it first runs; one of ``graphs``, which run in that order."""

    def __init__(
        self,
        captures: Captures,
        function: Callable[..., Any],
        stays: Sequence[bool],
        leaves: Sequence[bool],
        graphs: Sequence[CapturedGraph],
        place: int,
    ) -> None:
        self.__name__ = "graph"
        self.captures, self.function = captures, function
        self.stays = [i for i, one in enumerate(stays) if one]
        self.moves = [i for i, one in enumerate(stays) if not one]
        self.leaves = leaves
        self.graphs, self.place = graphs, place
        self.read: list[int] | None = None  # addresses of the inputs in place; None before the capture
        self.buffers: list[Tensor] = []
        self.replay: Callable[[], None]
        self.results: Sequence[Tensor]

    def __call__(self, *values: Tensor) -> list[Tensor]:
        read = [block.data_ptr() for i in self.stays for block in blocks_of(values[i])]
        if read != self.read:
            self._capture(values)
            self.read = read
        if self.moves:
            foreach_copy_(self.buffers, [block for i in self.moves for block in blocks_of(values[i])])
        self.replay()
        return [x.clone() if leaves else x for x, leaves in zip(self.results, self.leaves, strict=True)]

    def _capture(self, values: Sequence[Tensor]) -> None:
        for later in self.graphs[self.place :]:  # they may write into memory that is free no more
            later.read = None
        own = list(values)
        with torch.inference_mode(False), torch.no_grad():
            for i in self.moves:
                own[i] = values[i].clone()
            self.buffers = [block for i in self.moves for block in blocks_of(own[i])]
            try:
                self.replay, self.results = self.captures.capture(lambda: self.function(*own))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise ArgumentError(
                    "jit(backend='cudagraphs') came upon a step that CUDA cannot capture (see the error above); write "
                    "backend='replay', or run the part that it belongs to outside of the jitted function"
                ) from error


def _is_on(node: fx.Node, device: str) -> bool:
    found = device_of(node)
    return found is not None and found.type == device


def _suits(node: fx.Node, device: str) -> bool:
    """Whether a function of torch runs on the device alone."""
    schema = node.target._schema  # type: ignore[union-attr]
    alone = all(_is_on(x, device) for x in (*results_of(node, node.users), *node.all_input_nodes))
    return alone and not schema.name.startswith(_WAITS)


def _leaving(part: ProgramPart, fit: Collection[fx.Node]) -> set[fx.Node]:
    """Memory that somebody may keep: of results, and of operands of steps that may hand it on."""
    found = {owner(x) for x in part.outputs if isinstance(x, fx.Node) and "value" in x.meta}
    for step in part.steps:
        apart = is_collective(step) and step.meta["call"].mesh.transport == "process_group"
        if not (step in fit or is_aten(step) or apart):
            found.update(owner(x) for x in step.all_input_nodes if "value" in x.meta)
    return found
