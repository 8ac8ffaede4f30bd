"""Python that runs in every replay of a record: one step of it, and one more for its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fspmd.errors import RecordError
from fspmd.torch_internals import transforms_active
from fspmd.tracing import python, step
from fspmd.transport.local_tensor import blocks_of
from fspmd.variance import unwrapped

#: of leaves and a seed: the leaves of the results, and their tree
Function = Callable[[list[Any], int], tuple[list[Any], Any]]


def as_step(function: Function) -> Function:
    """The same, where it is recorded."""

    def run(leaves: list[Any], seed: int) -> tuple[list[Any], Any]:
        made = _Python(function, leaves, seed)
        outs = iter(_Forward.apply(made, *(x for x in leaves if isinstance(x, Tensor))))
        return [next(outs) if isinstance(x, Tensor) else x for x in made.out], made.treedef

    return run


class _Python:
    """What runs, on which leaves beside tensors; and what came of it when it was recorded."""

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
        """The tensors among the results.

        Raises:
            RecordError: the others, the structure, dtypes or shapes are not those of the record.
        """
        leaves = list(self.fixed)
        for i, x in zip(self.places, tensors, strict=True):
            leaves[i] = x
        out, treedef = self.function(leaves, seed)
        if self.treedef is None:
            self.out, self.treedef = [x.detach() if isinstance(x, Tensor) else x for x in out], treedef
        now, before = ([_kind(x) for x in one] for one in (out, self.out))
        if treedef != self.treedef or now != before:
            raise RecordError(
                f"the function that rank_map runs gave {treedef} of {now}, but {self.treedef} of {before} when jit "
                "recorded it; let it give the same structure, dtypes and shapes in every run, or call it outside of jit"
            )
        return [x for x in out if isinstance(x, Tensor)]


def _kind(x: Any) -> Any:
    return (x.dtype, *(tuple(one.shape) for one in blocks_of(x))) if isinstance(x, Tensor) else x


class _Tape:
    """The graph of one run, from results to arguments."""

    __slots__ = ("given", "out")

    def __init__(self, given: list[Tensor], out: list[Tensor]) -> None:
        self.given, self.out = given, out


@python
def _run(made: _Python, seed: int, tensors: list[Tensor]) -> list[Any]:
    """The graph, if there is one, and the results, which are in memory of their own."""
    before = [one._version for x in tensors for one in blocks_of(x)]
    follows = made.follows and not torch.is_inference_mode_enabled()
    with torch.set_grad_enabled(follows), _keeping():
        given = [x.detach().requires_grad_(follows and one) for x, one in zip(tensors, made.wanted, strict=True)]
        out = made(given, seed)
    if before != [one._version for x in tensors for one in blocks_of(x)]:
        raise write_of_python()
    _check_closed_over(out, given)
    return [_tape(given, out), *map(Tensor.detach, out)]


def _keeping() -> Any:
    """What graphs save inside is kept: a checkpoint would run rank_map again for it, outside of the record."""
    return saved_tensors_hooks(lambda x: x, lambda x: x)


def _tape(given: list[Tensor], out: list[Tensor]) -> _Tape | None:
    return _Tape(given, out) if any(x.requires_grad for x in out) else None


def unaliased(out: Iterable[Any], given: Iterable[Any]) -> list[Any]:
    """Results of which each tensor is in memory of its own, that is none of the arguments'."""
    taken = set[int]().union(*(_memory(x) for x in given if isinstance(x, Tensor)))
    found = []
    for x in out:
        own = isinstance(x, Tensor) and _memory(x)
        found.append(x.clone() if own and own & taken else x)
        taken |= own or set()
    return found


def write_of_python() -> RecordError:
    """The refusal of what a replay would not know of."""
    return RecordError(
        "jit cannot record a function that rank_map runs and that writes into its arguments; let it write into a "
        "clone, and return that"
    )


@step
def _pull(tape: _Tape, cotangents: list[Tensor], follows: bool) -> list[Any]:
    """The gradients of those arguments that have some, after the graph of them, if they are to have gradients."""
    with torch.set_grad_enabled(follows), _keeping():
        grads = [g.detach().requires_grad_(follows and _is_smooth(g)) for g in cotangents]
        chosen = [(x, g) for x, g in zip(tape.out, grads, strict=True) if x.requires_grad]
        given = [x for x in tape.given if x.requires_grad]
        outs, into = zip(*chosen, strict=True)
        found = torch.autograd.grad(outs, given, into, allow_unused=True, retain_graph=True, create_graph=follows)
        out = [torch.zeros_like(x) if g is None else g for x, g in zip(given, found, strict=True)]
    return [_tape([*tape.given, *grads], out), *unaliased(map(Tensor.detach, out), cotangents)]


class _Taped(torch.autograd.Function):
    """A step whose own graph, ``after``, tells its gradients; of what it is made by, and the tensors of that graph."""

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
    """Of the arguments."""

    @staticmethod
    def forward(made: _Python, *tensors: Tensor) -> Any:
        made.after, *out = _run(made, made.seed, list(tensors))
        return tuple(out)


class _Pulled:
    """A graph from which gradients are asked for, whether these have some, and their graph."""

    def __init__(self, tape: _Tape) -> None:
        self.tape, self.follows = tape, torch.is_grad_enabled()
        self.after: _Tape | None = None


class _Backward(_Taped):
    """Of what a graph was made of, on which its gradients depend, and of cotangents."""

    @staticmethod
    def forward(made: _Pulled, *tensors: Tensor) -> Any:
        cotangents = list(tensors[len(made.tape.given) :])
        made.after, *out = _pull(made.tape, cotangents, made.follows)
        return tuple(out)


def _gradients(tape: _Tape | None, given: Sequence[Tensor], cotangents: Sequence[Tensor]) -> list[Tensor | None]:
    """Of what a graph was made of; None where there is none."""
    if tape is None:
        return [None] * len(given)
    found = iter(_Backward.apply(_Pulled(tape), *given, *cotangents))
    return [next(found) if x.requires_grad else None for x in tape.given]


def _refuse(what: str) -> NoReturn:
    raise RecordError(
        f"jit cannot record a rank_map that {what}: of the Python that it runs the record has one step, and one for "
        "its gradients; call it outside of jit, or write it with torch.where, without rank_map"
    )


def _check_closed_over(out: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Raises where gradients would go to other tensors than the arguments."""
    mine = set(map(id, given))
    waiting = [x.grad_fn for x in out if x.grad_fn is not None]
    seen = set(waiting)
    others = any(x.grad_fn is None and x.requires_grad and id(x) not in mine for x in out)
    while waiting and not others:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        others = variable is not None and id(variable) not in mine
        after = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= after
        waiting += after
    if others:
        raise RecordError(
            "jit cannot record a function that rank_map runs and that closes over a tensor with a gradient; pass it as "
            "an argument: rank_map(fn, x, w)"
        )


def _is_smooth(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _memory(x: Tensor) -> set[int]:
    return {one.untyped_storage()._cdata for one in blocks_of(unwrapped(x)) if one.layout is torch.strided}
