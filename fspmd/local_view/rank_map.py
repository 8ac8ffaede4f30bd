"""`rank_map`: arbitrary Python, run once per rank on the blocks of that rank.

In a record it is one step, which runs in every replay, and one more for its gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import optree
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fspmd.body import bound_body, state
from fspmd.errors import ArgumentError, RecordError, TreeError
from fspmd.local_view.modes import run_in
from fspmd.local_view.unbind import bind, unbind
from fspmd.meshes import world
from fspmd.meshes.mesh import Mesh
from fspmd.messages import described
from fspmd.torch_internals import DisableTorchFunction, address_of, transforms_active
from fspmd.tracing import python, recorder, step
from fspmd.transport import transport_named
from fspmd.transport.frame import Frame, frame_over
from fspmd.transport.local_tensor import blocks_of
from fspmd.transport.randomness import draw_seed, one_stream
from fspmd.trees import tree_text
from fspmd.variance import Variance, set_variance, unwrapped

#: (leaves, seed) -> (leaves of the results, their tree)
Function = Callable[[list[Any], int], tuple[list[Any], Any]]


def as_step(function: Function) -> Function:
    """Return a function whose calls are one step of a record."""

    def run(leaves: list[Any], seed: int) -> tuple[list[Any], Any]:
        made = _Python(function, leaves, seed)
        outs = iter(_Forward.apply(made, *(x for x in leaves if isinstance(x, Tensor))))
        return [next(outs) if isinstance(x, Tensor) else x for x in made.out], made.treedef

    return run


class _Python:
    """A call of a user's function: its leaves other than tensors, and the results that it had when it was recorded."""

    def __init__(self, function: Function, leaves: list[Any], seed: int) -> None:
        self.function, self.seed = function, seed
        self.fixed = [None if isinstance(x, Tensor) else x for x in leaves]
        self.places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.follows = torch.is_grad_enabled()
        active = transforms_active()
        tensors = [leaves[i] for i in self.places]
        self.wanted = [self.follows and _is_smooth(x) and (active or x.requires_grad) for x in tensors]
        self.out: list[Any] = []
        self.treedef: Any = None
        self.after: _Tape | None = None

    def __call__(self, tensors: Sequence[Tensor], seed: int) -> list[Tensor]:
        """Run the function, and return the tensors among its results.

        Raises:
            RecordError: The structure, the dtypes, the shapes or the other results differ from the record.
        """
        leaves = list(self.fixed)
        for i, x in zip(self.places, tensors, strict=True):
            leaves[i] = x
        out, treedef = self.function(leaves, seed)
        if self.treedef is None:
            self.out, self.treedef = [x.detach() if isinstance(x, Tensor) else x for x in out], treedef
        now, before = ([_kind(x) for x in results] for results in (out, self.out))
        if treedef != self.treedef or now != before:
            raise RecordError(
                f"the function that rank_map runs returned {treedef} of {now}, but {self.treedef} of {before} when jit "
                "recorded it; return the same structure, dtypes and shapes in every run, or call it outside of jit"
            )
        return [x for x in out if isinstance(x, Tensor)]


def _kind(x: Any) -> Any:
    return (x.dtype, *(tuple(block.shape) for block in blocks_of(x))) if isinstance(x, Tensor) else x


class _Tape:
    """The graph of one run, from its results to its arguments."""

    __slots__ = ("args", "out")

    def __init__(self, args: list[Tensor], out: list[Tensor]) -> None:
        self.args, self.out = args, out


@python
def _run(made: _Python, seed: int, tensors: list[Tensor]) -> list[Any]:
    """Return the graph or None, and the results, each in its own memory."""
    before = [block._version for x in tensors for block in blocks_of(x)]
    follows = made.follows and not torch.is_inference_mode_enabled()
    with torch.set_grad_enabled(follows), _keep_saved_tensors():
        args = [x.detach().requires_grad_(follows and wanted) for x, wanted in zip(tensors, made.wanted, strict=True)]
        out = made(args, seed)
    if before != [block._version for x in tensors for block in blocks_of(x)]:
        raise write_of_python()
    _check_closed_over(out, args)
    return [_tape(args, out), *map(Tensor.detach, out)]


def _keep_saved_tensors() -> Any:
    """Keep the tensors that graphs save. A checkpoint would run rank_map again for them, outside of the record."""
    return saved_tensors_hooks(lambda x: x, lambda x: x)


def _tape(args: list[Tensor], out: list[Tensor]) -> _Tape | None:
    return _Tape(args, out) if any(x.requires_grad for x in out) else None


def unaliased(out: Iterable[Any], args: Iterable[Any]) -> list[Any]:
    """Return results of which no tensor shares memory with an argument or another result."""
    used = set[int]().union(*(_memory(x) for x in args if isinstance(x, Tensor)))
    results = []
    for x in out:
        memory = isinstance(x, Tensor) and _memory(x)
        results.append(x.clone() if memory and memory & used else x)
        used |= memory or set()
    return results


def write_of_python() -> RecordError:
    """Return the error for a write that a replay would not see."""
    return RecordError(
        "jit cannot record a function that rank_map runs and that writes into its arguments; let it write into a "
        "clone, and return that"
    )


@step
def _pull(tape: _Tape, cotangents: list[Tensor], follows: bool) -> list[Any]:
    """Return the graph of the gradients, if they need gradients (``follows``), and the gradients of the arguments."""
    with torch.set_grad_enabled(follows), _keep_saved_tensors():
        grads = [g.detach().requires_grad_(follows and _is_smooth(g)) for g in cotangents]
        chosen = [(x, g) for x, g in zip(tape.out, grads, strict=True) if x.requires_grad]
        args = [x for x in tape.args if x.requires_grad]
        outs, into = zip(*chosen, strict=True)
        pulled = torch.autograd.grad(outs, args, into, allow_unused=True, retain_graph=True, create_graph=follows)
        out = [torch.zeros_like(x) if g is None else g for x, g in zip(args, pulled, strict=True)]
    return [_tape([*tape.args, *grads], out), *unaliased(map(Tensor.detach, out), cotangents)]


class _Taped(torch.autograd.Function):
    """A step with its own graph, ``after``, which gives its gradients. It takes its maker and the maker's tensors."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        made, *tensors = inputs
        ctx.tape = made.after
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(x for x in output if not _is_smooth(x)))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return None, *_gradients(ctx.tape, ctx.saved_tensors, cotangents)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        _refuse("is differentiated in forward mode")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> NoReturn:
        _refuse("is under vmap")


class _Forward(_Taped):
    """The step that runs the function on its arguments."""

    @staticmethod
    def forward(made: _Python, *tensors: Tensor) -> Any:
        made.after, *out = _run(made, made.seed, list(tensors))
        return tuple(out)


class _Pulled:
    """The gradients of a graph, whether these need gradients, and their graph."""

    def __init__(self, tape: _Tape) -> None:
        self.tape, self.follows = tape, torch.is_grad_enabled()
        self.after: _Tape | None = None


class _Backward(_Taped):
    """The step that computes gradients, from the arguments of a graph and its cotangents."""

    @staticmethod
    def forward(made: _Pulled, *tensors: Tensor) -> Any:
        cotangents = list(tensors[len(made.tape.args) :])
        made.after, *out = _pull(made.tape, cotangents, made.follows)
        return tuple(out)


def _gradients(tape: _Tape | None, args: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of the arguments of a graph, and None for arguments without one."""
    if tape is None:
        return [None] * len(args)
    gradients = iter(_Backward.apply(_Pulled(tape), *args, *cotangents))
    return [next(gradients) if x.requires_grad else None for x in tape.args]


def _refuse(what: str) -> NoReturn:
    raise RecordError(
        f"jit cannot record a rank_map that {what}: the record has one step for its Python, and one for the gradients "
        "of it; call it outside of jit, or write it with torch.where, without rank_map"
    )


def _check_closed_over(out: Sequence[Tensor], args: Sequence[Tensor]) -> None:
    """Raise `RecordError` if gradients would go to tensors other than the arguments."""
    allowed = set(map(id, args))
    waiting = [x.grad_fn for x in out if x.grad_fn is not None]
    seen = set(waiting)
    others = any(x.grad_fn is None and x.requires_grad and id(x) not in allowed for x in out)
    while waiting and not others:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        others = variable is not None and id(variable) not in allowed
        parents = {parent for parent, _ in node.next_functions if parent is not None} - seen
        seen |= parents
        waiting += parents
    if others:
        raise RecordError(
            "jit cannot record a function that rank_map runs and that closes over a tensor with a gradient; pass it as "
            "an argument: rank_map(fn, x, w)"
        )


def _is_smooth(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _memory(x: Tensor) -> set[int]:
    return {address_of(block.untyped_storage()) for block in blocks_of(unwrapped(x)) if block.layout is torch.strided}


def rank_map(fn: Callable[..., Any], *args: Any) -> Any:
    """Run ``fn(*args)`` on every rank, with ordinary Python control flow on the values of that rank.

    ``fn`` calls no collectives. Results vary over all bound axes. Numbers become 0-d tensors, and shapes may differ
    from rank to rank. A result that would share memory with an argument or another result is a copy. The call is
    differentiable with respect to tensor arguments. Random numbers drawn inside differ from rank to rank.

    Within `jit` the function is one step, which runs as Python in every replay. Its results must always have the shapes
    that they had in the recording. The function must not write into its arguments, has derivatives in reverse mode
    only, and may use tensors that the jitted function has computed only as arguments.

    Raises:
        RecordError: Within `jit`, the function breaks one of these rules.
        TreeError, ShapeError, ArgumentError: In a simulation, ranks return different trees, dtypes or objects.

    >>> from fspmd import P, device_get, make_mesh, shard_map
    >>> collatz = lambda n: n * 3 + 1 if n % 2 else n // 2
    >>> mesh = make_mesh((4,), ("x",))
    >>> f = shard_map(lambda n: rank_map(collatz, n), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    >>> device_get(f(torch.arange(4)))
    tensor([ 0,  4,  1, 10])
    """
    body = bound_body("rank_map")
    if not callable(fn):
        raise ArgumentError(f"rank_map got {described(fn)} for fn; give it a function: rank_map(fn, x)")
    axes = body.mesh.ordered(body.axes)
    leaves, treedef = optree.tree_flatten(args, none_is_leaf=True)
    if body.checked and state.tracker is not None:
        varying = Variance(varying=axes)
        leaves = [state.tracker.cast(x, varying) if isinstance(x, Tensor) else x for x in leaves]
    body.mark_uneven()
    run = _simulated if body.simulated else _here

    def on_ranks(leaves: list[Any], seed: int) -> Any:
        with DisableTorchFunction():
            return run(fn, leaves, treedef, body.mesh, axes, seed)

    def mapped(leaves: list[Any], seed: int) -> Any:
        state.rank_mapped = True
        try:
            return run_in(None, None, on_ranks, leaves, seed)
        finally:
            state.rank_mapped = False

    mode = recorder()
    if mode is not None:
        mode.check_opaque_step(fn)
    out_leaves, out_treedef = (mapped if mode is None else as_step(mapped))(leaves, draw_seed())
    if body.checked:
        for x in out_leaves:
            if isinstance(x, Tensor):
                set_variance(x, Variance(varying=axes))
    return optree.tree_unflatten(out_treedef, out_leaves)


def _called(fn: Callable[..., Any], leaves: list[Any], treedef: Any, device: torch.device) -> tuple[list[Any], Any]:
    out, tree = optree.tree_flatten(fn(*treedef.unflatten(leaves)))
    results = [torch.tensor(x, device=device) if isinstance(x, (int, float, complex)) else x for x in out]
    return unaliased(results, leaves), tree


def _here(fn: Callable[..., Any], leaves: list[Any], treedef: Any, mesh: Mesh, axes: tuple[str, ...], seed: int) -> Any:
    with one_stream(seed, int(transport_named(mesh.transport).index(mesh, axes))):
        return _called(fn, leaves, treedef, mesh.device)


def _simulated(
    fn: Callable[..., Any], leaves: list[Any], treedef: Any, mesh: Mesh, axes: tuple[str, ...], seed: int
) -> Any:
    frame = frame_over(mesh, axes)
    columns = [unbind(x, frame) if isinstance(x, Tensor) else (x,) * frame.volume for x in leaves]
    rows, outer = [], world.SIMULATED.get()
    try:
        for i, at in enumerate(frame.mesh_coordinates()):
            world.SIMULATED.set(mesh.rank_at(at))
            with one_stream(seed, i):
                rows.append(_called(fn, [column[i] for column in columns], treedef, mesh.device))
    finally:  # by one call of C, as an interrupt may end a function of Python at its start
        world.SIMULATED.set(outer)
    trees = [tree for _, tree in rows]
    if any(tree != trees[0] for tree in trees):
        other = next(i for i, tree in enumerate(trees) if tree != trees[0])
        raise TreeError(
            f"rank_map: the function returned the tree {tree_text(trees[0])} on the first rank, but "
            f"{tree_text(trees[other])} on rank {other}; return the same structure on all ranks"
        )
    outs = zip(*(row for row, _ in rows), strict=True)
    return [_bound(column, frame) for column in outs], trees[0]


def _bound(column: tuple[Any, ...], frame: Frame) -> Any:
    if all(isinstance(x, Tensor) for x in column):
        if other := next((i for i, x in enumerate(column) if x.dtype is not column[0].dtype), 0):
            raise ArgumentError(
                f"rank_map: the function returned {column[0].dtype} on the first rank, but {column[other].dtype} on "
                f"rank {other}; return one dtype on all ranks"
            )
        return bind(column, frame)
    if all(type(x) is type(column[0]) and x == column[0] for x in column):
        return column[0]
    raise ArgumentError(
        f"rank_map: the function returned {described(column[0])} on the first rank, and something else on "
        "others; results that differ from rank to rank must be tensors or numbers"
    )
