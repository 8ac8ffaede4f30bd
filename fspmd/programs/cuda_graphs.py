"""The CUDA graph backend: the steps between collectives are launched as one graph.

A graph reads and writes the memory that its steps had when it was captured. So the results of other steps are copied
into buffers of the graph, and results that a caller may keep are copied out. A value that passes from one graph to
another stays in place. A graph reads arguments and tensors closed over in place, such as parameters. When these have
moved it is captured again, and arguments that have are copied from then on. Draws of random numbers and collectives
are no part of a graph.
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
from fspmd.torch_internals import foreach_copy_, schema_of
from fspmd.transport.local_tensor import blocks_of

_WARM_UP: Final = 3  # runs before a capture, as torch does them
_WAITS: Final = ("aten::linalg_", "aten::_linalg_")  # some of these wait for the device


class Captures(Protocol):
    """An object that captures the graphs of one program: `CudaGraphs`, or a stand-in without a GPU."""

    device: str

    def follow(self) -> None:
        """Order the next run of the program after its last run."""

    def capture(self, run: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        """A function that repeats ``run`` on the same memory, and the results in that memory."""


class CudaGraphs:
    """Captures graphs with one pool of memory, since no two graphs run at the same time."""

    device = "cuda"

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.current_stream()

    def follow(self) -> None:
        """Let the current stream wait for the stream of the last run."""
        current = torch.cuda.current_stream()
        if current != self.stream:
            current.wait_stream(self.stream)
            self.stream = current

    def capture(self, run: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        """Run on a side stream until kernels are initialised; then capture.

        Threads of NCCL may query their events meanwhile, so the capture restricts this thread alone.
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
            "jit(backend='cudagraphs') needs a CUDA device, but torch.cuda.is_available() is False; "
            "write backend='replay'"
        )


def by_graphs(captures_of: Callable[[], Captures], part: ProgramPart) -> Callable[..., Any]:
    """Like `replay.compiled`, with each segment as one graph that is captured when it first runs.

    Raises:
        ArgumentError: no tensor is on the device of the captures.
    """
    captures, turn = captures_of(), threading.Lock()
    fit = local_steps(part.steps, lambda node: _suits(node, captures.device))
    if part.steps and not any(_is_on(x, captures.device) for x in (*part.steps, *part.inputs, *part.constants)):
        device = device_of((*part.inputs, *part.steps)[0])
        raise ArgumentError(
            f"jit(backend='cudagraphs') got a function of tensors on {device}, and none on a CUDA device; move them to "
            "CUDA (make_mesh(..., device='cuda')), or write backend='replay'"
        )
    leaving = _leaving(part, fit)
    lasting = set(part.constants)  # memory that stays in place, unless the user moves it
    given = set(part.inputs)
    graphs: list[CapturedGraph] = []

    def make(segment: ProgramPart) -> CapturedGraph:
        kinds = [_FIXED if owner(x) in lasting else _GIVEN if owner(x) in given else _MADE for x in segment.inputs]
        leaves = [node in leaving for node in segment.outputs]
        lasting.update(node for node in segment.outputs if node not in leaving)
        graphs.append(CapturedGraph(captures, compiled(segment), kinds, leaves, graphs, len(graphs)))
        return graphs[-1]

    run = segmented(part, fit, make)

    def in_turn(*values: Any) -> Any:
        with turn:
            captures.follow()
            return run(*values)

    return in_turn


by_cuda_graphs: Final = partial(by_graphs, CudaGraphs)
#: where an input of a graph lies: where it did; where the caller has it; anywhere, so it is copied
_FIXED: Final = "fixed"
_GIVEN: Final = "given"
_MADE: Final = "made"


class CapturedGraph:
    """A segment as a graph that is captured when it first runs.

    Args:
        captures: captures the graph.
        function: the segment.
        kinds: for each input, where it lies.
        leaves: for each output, whether a caller may keep it.
        graphs: the graphs of the program, in the order in which they run.
        place: the place of this graph among ``graphs``.
    """

    def __init__(
        self,
        captures: Captures,
        function: Callable[..., Any],
        kinds: Sequence[str],
        leaves: Sequence[bool],
        graphs: Sequence[CapturedGraph],
        place: int,
    ) -> None:
        self.__name__ = "graph"
        self.captures, self.function = captures, function
        self.kinds = list(kinds)
        self.leaves = leaves
        self.graphs, self.place = graphs, place
        self.stays: list[int] = []  # inputs that are read in place
        self.moves: list[int] = []  # inputs that are copied
        self.read: list[int] | None = None  # addresses of the inputs in place; None before the capture
        self.where: dict[int, list[int]] = {}  # the same by input
        self.moved = False  # whether an argument has moved
        self.buffers: list[Tensor] = []
        self.replay: Callable[[], None]
        self.results: Sequence[Tensor]

    def __call__(self, *values: Tensor) -> list[Tensor]:
        read = [block.data_ptr() for i in self.stays for block in blocks_of(values[i])]
        if read != self.read:
            self._place(values)
            self._capture(values)
        if self.moves:
            foreach_copy_(self.buffers, [block for i in self.moves for block in blocks_of(values[i])])
        self.replay()
        return [x.clone() if leaves else x for x, leaves in zip(self.results, self.leaves, strict=True)]

    def _place(self, values: Sequence[Tensor]) -> None:
        """Read in place what has not moved. An argument that has is copied from now on; at the second time, all are."""
        given = [i for i, kind in enumerate(self.kinds) if kind == _GIVEN]
        if moved := [i for i in given if _addresses(values[i]) != self.where.get(i, _addresses(values[i]))]:
            for i in given if self.moved else moved:
                self.kinds[i] = _MADE
            self.moved = True
        self.stays = [i for i, kind in enumerate(self.kinds) if kind != _MADE]
        self.moves = [i for i, kind in enumerate(self.kinds) if kind == _MADE]

    def _capture(self, values: Sequence[Tensor]) -> None:
        for later in self.graphs[self.place :]:  # they may write into memory that this graph now uses
            later.read = None
        self.where = {i: _addresses(values[i]) for i in self.stays}
        inputs = list(values)
        with torch.inference_mode(False), torch.no_grad():
            for i in self.moves:
                inputs[i] = values[i].clone()
            self.buffers = [block for i in self.moves for block in blocks_of(inputs[i])]
            try:
                self.replay, self.results = self.captures.capture(lambda: self.function(*inputs))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                raise ArgumentError(
                    "jit(backend='cudagraphs') got a step that CUDA cannot capture (see the error above); write "
                    "backend='replay', or run this part outside of the jitted function"
                ) from error
        self.read = [address for addresses in self.where.values() for address in addresses]


def _addresses(x: Tensor) -> list[int]:
    return [block.data_ptr() for block in blocks_of(x)]


def _is_on(node: fx.Node, device: str) -> bool:
    device_of_node = device_of(node)
    return device_of_node is not None and device_of_node.type == device


def _suits(node: fx.Node, device: str) -> bool:
    """Whether a function of torch runs on the device alone."""
    schema = schema_of(node.target)
    alone = all(_is_on(x, device) for x in (*results_of(node, node.users), *node.all_input_nodes))
    return alone and not schema.name.startswith(_WAITS)


def _leaving(part: ProgramPart, fit: Collection[fx.Node]) -> set[fx.Node]:
    """Memory that a caller may keep: of results, and of operands of steps that may return them."""
    leaving = {owner(x) for x in part.outputs if isinstance(x, fx.Node) and "value" in x.meta}
    for step in part.steps:
        is_real = is_collective(step) and step.meta["call"].mesh.transport == "process_group"
        if not (step in fit or is_aten(step) or is_real):
            leaving.update(owner(x) for x in step.all_input_nodes if "value" in x.meta)
    return leaving
