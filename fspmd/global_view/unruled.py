"""A call that no rule decides: what its function is made of, or where values decide a gather."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final

import optree
from torch import Tensor

from fspmd.copies import refuse_copy
from fspmd.errors import ShapeError
from fspmd.forms import UNKNOWN, Laid, is_dense, order_in_memory
from fspmd.global_view.decompose import Graph, NotTraceable, WritesOperand, decompose, numbers_of, operands_of, written
from fspmd.global_view.operands import places_of, sharded_values
from fspmd.global_view.refusals import TOLD, NoRuleError, refuse_global, refuse_rule, shown
from fspmd.global_view.result_gradients import Followed
from fspmd.global_view.result_types import dtype_complaint
from fspmd.ops.traits import autocasts, name_of
from fspmd.redistribution.redistribute import redistribute
from fspmd.rules import writes
from fspmd.sharded import Sharded, call_torch, is_plain, laid, lies
from fspmd.spec import P, TensorSpec
from fspmd.transport.local_tensor import blocks_of

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]
_GRAPHS: Final = 64  # of one plan, by the numbers in them


def unruled(func: Any, specs: list[TensorSpec], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Run, bool]:
    """What does such calls, and whether it calls other functions alone.

    Raises:
        NoRuleError: nothing does.
        ArgumentError: the call fails on the global tensors.
    """
    found = _GraphsByNumbers(func, specs)
    graph = found.trace(args, kwargs)
    run = found.run if numbers_of(args, kwargs) else found.run_alike
    return run, getattr(graph, "func", None) is _composed


class _GraphsByNumbers:
    """The graphs of a function; those of its floats that it does not look at are operands, others constants.

    Autocast is a part of a graph: its casts are calls there.
    """

    def __init__(self, func: Any, specs: list[TensorSpec]) -> None:
        self.func, self.specs = func, specs
        self.fixed = frozenset[int]()  # leaves that are constants in some graph
        self.graphs: dict[Any, Run] = {}

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call."""
        graph = self.graphs.get(self._key(args, kwargs)) or self.trace(args, kwargs)
        return graph(args, kwargs)

    def run_alike(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call without numbers."""
        graph = self.graphs.get((autocasts(),)) or self.trace(args, kwargs)
        return graph(args, kwargs)

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The numbers that are constants, as text: 0.0 and -0.0 differ, and nan equals nothing."""
        numbers = numbers_of(args, kwargs)
        fixed = [(i, type(x), repr(x)) for i, x, is_operand in numbers if not is_operand or i in self.fixed]
        return autocasts(), *fixed

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        """The graph of calls with such numbers."""
        graph, fixed = _by_graph(self.specs, self.func, args, kwargs)
        if not fixed <= self.fixed or len(self.graphs) >= _GRAPHS:
            self.graphs.clear()
        self.fixed |= fixed
        self.graphs[self._key(args, kwargs)] = graph
        return graph


def _by_graph(
    specs: list[TensorSpec], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Run, frozenset[int]]:
    """What does a call, and the leaves that are constants there."""
    if not (writes(func) or isinstance(func, FunctionType)) and specs[0].mesh.device_type == "cpu":
        complaint = dtype_complaint(func, args, kwargs, places_of(args, kwargs, specs[0].mesh))
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
    except TOLD:
        raise
    except NotImplementedError as error:
        if "Meta" not in str(error):  # in the function's own words
            refuse_global(func, specs, error)
        refuse_rule(func, specs)  # there is no kernel for fake tensors
    except Exception as error:
        refuse_global(func, specs, error)
    if graph is None:
        refuse_rule(func, specs)
    return functools.partial(_write if writes(func) else _composed, func, graph, Followed(func)), graph.fixed


def _composed(func: Any, graph: Graph, followed: Followed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function without a rule, by what it is made of."""
    try:
        return followed.results(graph.run(operands_of(args, kwargs)), args, kwargs)
    except NoRuleError as error:
        refuse_rule(func, [x.spec for x in sharded_values(args, kwargs)], error)


def _write(
    func: Any, graph: Graph, followed: Followed, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Sharded | Tensor:
    """A write by a function without a rule: the new value, laid out as the operand, is copied into its blocks."""
    x: Sharded | Tensor = args[0]
    if isinstance(x, Sharded):
        refuse_copy(x.local, shown(func))
    new = _composed(func, graph, followed, args, kwargs)
    if (new.shape, new.dtype) != (x.shape, x.dtype):
        raise ShapeError(f"{shown(func)} would make {x!r} a {new!r}; write x = x.{name_of(func).rstrip('_')}(...)")
    if isinstance(x, Sharded):
        call_torch(Tensor.copy_, (x, new), {})
    else:
        x.copy_(redistribute(new.local, new.spec, new.spec.with_partition(P())))
    return x


def gathered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call on global tensors: what it gives, or its shape, depends on values."""
    mesh = sharded_values(args, kwargs)[0].spec.mesh

    lying = True

    def at_home(x: Any) -> Any:
        nonlocal lying
        if not isinstance(x, Sharded):
            return x
        whole, lies_so = _as_told(redistribute(x.local, x.spec, x.spec.with_partition(P())), x)
        lying &= lies_so
        return whole

    def wrapped(x: Any) -> Any:
        if not is_plain(x):
            return x
        spec = TensorSpec(mesh, P(), x.shape, x.dtype)
        told = (lying or x.ndim < 2) and x._base is None
        return laid(x, spec, Laid(blocks_of(x)[0].stride()) if told else UNKNOWN)

    whole: Any = optree.tree_map(at_home, (args, kwargs), none_is_leaf=True)
    try:
        out = func(*whole[0], **whole[1])
    except TOLD:
        raise
    except Exception as error:
        refuse_global(func, [x.spec for x in sharded_values(args, kwargs)], error)
    return optree.tree_map(wrapped, out, none_is_leaf=True)


def _as_told(whole: Tensor, x: Sharded) -> tuple[Tensor, bool]:
    """A value that was gathered, in memory as torch would keep it, and whether it is; then so are results."""
    shape, strides = x.spec.shape, lies(x).strides
    if strides is None or not is_dense(shape, strides):
        return whole, False
    order = order_in_memory(strides)
    back = sorted(range(len(shape)), key=order.__getitem__)
    return whole.permute(order).contiguous().permute(back), True
