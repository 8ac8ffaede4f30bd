"""Calls without a rule: by the graph of the function, or on gathered operands if values decide the result."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

import optree
from torch import Tensor

from fspmd.copies import refuse_copy, share_memory
from fspmd.errors import ShapeError
from fspmd.forms import UNKNOWN, Laid, overlaps, packed
from fspmd.global_view.decompose import Graph, NotTraceable, WritesOperand, decompose, numbers_of, operands_of, written
from fspmd.global_view.kernels import GlobalCall, dtype_complaint
from fspmd.global_view.question import places_of, sharded_values
from fspmd.global_view.refusals import (
    PASSING,
    NoRuleError,
    refuse_global,
    refuse_rule,
    refuse_shared_memory,
    shown,
)
from fspmd.global_view.results import Followed
from fspmd.ops.traits import autocasts, name_of, writes
from fspmd.redistribution.redistribute import redistribute
from fspmd.sharded import Sharded, call_torch, is_plain, laid, lies
from fspmd.spec import P, TensorSpec
from fspmd.transport.local_tensor import blocks_of

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_GRAPHS: Final = 64  # of one plan at most, one for each set of numbers


def unruled(func: Any, specs: list[TensorSpec], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Run, bool]:
    """Return a function that runs such calls, and whether it only calls other functions.

    Raises:
        NoRuleError: The function, or a function that it calls, has no rule.
        ArgumentError: The call fails on the global tensors.
    """
    graphs = _GraphsByNumbers(func, specs)
    graph = graphs.trace(args, kwargs)
    run = graphs.run if numbers_of(args, kwargs) else graphs.run_alike
    return run, getattr(graph, "func", None) is _composed


class _GraphsByNumbers:
    """The graphs of a function. Floats whose values it reads are constants of a graph; other floats are operands.

    The casts of autocast are calls in a graph.
    """

    def __init__(self, func: Any, specs: list[TensorSpec]) -> None:
        self.func, self.specs = func, specs
        self.fixed = frozenset[int]()  # leaves that are constants in some graph
        self.graphs: dict[Any, Run] = {}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call."""
        graph = self.graphs.get(self._key(args, kwargs)) or self.trace(args, kwargs)
        return graph(args, kwargs)

    def run_alike(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call without numbers."""
        graph = self.graphs.get((autocasts(),)) or self.trace(args, kwargs)
        return graph(args, kwargs)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the numbers that are constants, as text: 0.0 == -0.0, and nan != nan."""
        numbers = numbers_of(args, kwargs)
        fixed = [(i, type(x), repr(x)) for i, x, is_operand in numbers if not is_operand or i in self.fixed]
        return autocasts(), *fixed

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        """Trace and keep the graph of calls with these numbers."""
        graph, fixed = _by_graph(self.specs, self.func, args, kwargs)
        if not fixed <= self.fixed or len(self.graphs) >= _GRAPHS:
            self.graphs.clear()
        self.fixed |= fixed
        self.graphs[self._key(args, kwargs)] = graph
        return graph


def _by_graph(
    specs: list[TensorSpec], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Run, frozenset[int]]:
    """Return a function that runs a call, and the leaves of the arguments that are constants in its graph."""
    if not (writes(func) or isinstance(func, FunctionType)):
        complaint = dtype_complaint(GlobalCall(func, args, kwargs, places_of(args, kwargs, specs[0].mesh)))
        if complaint is not None:
            refuse_global(func, specs, complaint)
    try:
        graph = written(func, args, kwargs) if writes(func) else decompose(func, args, kwargs)
    except WritesOperand:
        refuse_rule(func, specs)
    except NotTraceable:
        if writes(func):
            refuse_rule(func, specs)
        return functools.partial(gathered, func), frozenset()
    except PASSING:
        raise
    except NotImplementedError as error:
        if "Meta" not in str(error):  # raised by the function itself
            refuse_global(func, specs, error)
        refuse_rule(func, specs)  # there is no kernel for fake tensors
    except Exception as error:
        refuse_global(func, specs, error)
    if graph is None:
        refuse_rule(func, specs)
    return functools.partial(_write if writes(func) else _composed, func, graph, Followed(func)), graph.fixed


def _composed(func: Any, graph: Graph, followed: Followed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the graph of a function without a rule."""
    try:
        return followed.results(graph.run(operands_of(args, kwargs)), args, kwargs)
    except NoRuleError as error:
        refuse_rule(func, [x.spec for x in sharded_values(args, kwargs)], error)


def _write(
    func: Any, graph: Graph, followed: Followed, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sharded | Tensor:
    """Run a write without a rule: compute the new value, and copy it into the operand in the operand's layout."""
    x: Sharded | Tensor = args[0]
    if isinstance(x, Sharded):
        refuse_copy(x.local, shown(func))
        refuse_shared_memory(func, x, at_once=False)
    new = _composed(func, graph, followed, args, kwargs)
    if (new.shape, new.dtype) != (x.shape, x.dtype):
        raise ShapeError(f"{shown(func)} would turn {x!r} into a {new!r}; write x = x.{name_of(func).rstrip('_')}(...)")
    if isinstance(x, Sharded):
        call_torch(Tensor.copy_, (x, new), {})
    else:
        x.copy_(redistribute(new.local, new.spec, new.spec.with_partition(P())))
    return x


def gathered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call on gathered operands, since its result, or the shape of it, depends on values."""
    mesh = sharded_values(args, kwargs)[0].spec.mesh

    has_strides = True
    operands: list[Tensor] = []

    def gather(x: Any) -> Any:
        nonlocal has_strides
        if not isinstance(x, Sharded):
            return x
        whole, lies_right = _in_memory_of(redistribute(x.local, x.spec, x.spec.with_partition(P())), x)
        has_strides &= lies_right
        operands.append(whole)
        return whole

    def wrapped(x: Any) -> Any:
        if not is_plain(x):
            return x
        spec = TensorSpec(mesh, P(), x.shape, x.dtype)
        is_known = (has_strides or x.ndim < 2) and not (
            x._base is not None and any(share_memory(x, operand) for operand in operands)
        )
        block = blocks_of(x)[0]
        return laid(x, spec, Laid(block.stride(), int(block.storage_offset())) if is_known else UNKNOWN)

    whole: Any = optree.tree_map(gather, (args, kwargs), none_is_leaf=True)
    try:
        out = func(*whole[0], **whole[1])
    except PASSING:
        raise
    except Exception as error:
        refuse_global(func, [x.spec for x in sharded_values(args, kwargs)], error)
    return optree.tree_map(wrapped, out, none_is_leaf=True)


def _in_memory_of(whole: Tensor, x: Sharded) -> tuple[Tensor, bool]:
    """Return a gathered value with the strides of the global tensor, and whether that was possible."""
    shape, strides = x.spec.shape, lies(x).strides
    if strides is None:
        return whole, False
    repeated = [d for d, (n, step) in enumerate(zip(shape, strides, strict=True)) if step == 0 and n > 1]
    for d in repeated:
        whole = whole.narrow(d, 0, 1)
    if overlaps(whole.shape, strides):
        return whole.expand(shape), False
    if strides != packed(shape):
        whole = whole.new_empty_strided(whole.shape, strides).copy_(whole)
    return whole.expand(shape), True
