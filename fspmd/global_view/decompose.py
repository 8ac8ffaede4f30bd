"""A torch function without a rule, as a graph of simpler functions.

The graph is traced once, on fake tensors of the global shapes. Each node is then a call on `Sharded` values, with a
rule of its own. Blocks run through the graph, never through the original kernel.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Number
from typing import Any, Final

import optree
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fspmd.cache import cached
from fspmd.fake_mode import FakeMode, UnknownValues
from fspmd.forms import packed
from fspmd.rules import handler_of, row_of
from fspmd.rules.losses import DECOMPOSED
from fspmd.sharded import Sharded, call_torch, lies
from fspmd.torch_internals import (
    DispatchKey,
    OpOverload,
    OpOverloadPacket,
    aten_to_copy,
    constant_source,
    decomposition_table,
    kernel_of,
    op_of,
    schema_of,
)
from fspmd.tracing import outside_transforms

Function = Callable[..., Any]


class NotTraceable(Exception):
    """The function reads values, or something else that a tensor without data does not have."""


class WritesOperand(Exception):
    """The function writes into one of its operands."""


@dataclass(frozen=True, slots=True)
class _Node:
    """One call: its target, and its arguments as leaves."""

    target: Function
    leaves: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]  # (leaf, number of the earlier value that it is)
    arguments: optree.PyTreeSpec
    calls: bool  # the target is a torch function, not an operator of Python


@dataclass(frozen=True, slots=True)
class Graph:
    """Calls in their order. Values are numbered: first the `operands_of` the call, then the results of the nodes."""

    nodes: tuple[_Node, ...]
    results: tuple[Any, ...]  # leaves of the result; those at ``places`` are numbers of values
    places: frozenset[int]
    structure: optree.PyTreeSpec
    fixed: frozenset[int]  # floats among the arguments (leaves) whose value the function reads: constants of the graph

    def run(self, operands: Sequence[Any]) -> Any:
        """Run the graph: each node with a `Sharded` operand is one call of a torch function."""
        values = list(operands)
        for node in self.nodes:
            leaves = list(node.leaves)
            for place, number in node.places:
                leaves[place] = values[number]
            args, kwargs = node.arguments.unflatten(leaves)
            if node.calls and any(type(leaf) is Sharded for leaf in leaves):
                values.append(call_torch(node.target, args, kwargs))
            else:
                values.append(_ON_PLAIN.get(node.target, node.target)(*args, **kwargs))
        return self.structure.unflatten(values[x] if i in self.places else x for i, x in enumerate(self.results))


#: targets for plain operands, whose strides may differ from those that were traced
_ON_PLAIN: Final[dict[Any, Function]] = {torch.ops.aten.view.default: torch.ops.aten.reshape.default}


def _without_writes(graph: fx.Graph) -> None:
    """Turn each write into a value of the graph into a new value."""
    for node in graph.nodes:
        if node.op != "call_function" or not _writes(node.target):
            continue
        name = node.target.overloadpacket.__name__
        pure = getattr(getattr(torch.ops.aten, name[:-1], None), node.target.__name__.rpartition(".")[2], None)
        target = node.args[0]
        if target.op == "placeholder":
            raise WritesOperand(name)
        if pure is None or not name.endswith("_") or _is_view(target):
            raise NotTraceable(f"{name}() writes into a view")
        if any(_is_view(user) and user is not node for user in target.users):
            raise NotTraceable(f"{name}() writes into a tensor that has a view")
        node.target = pure
        later = False
        for user in graph.nodes:
            if later:
                user.replace_input_with(target, node)
            later = later or user is node


def _without_copies(graph: fx.Graph) -> None:
    """Replace each overwritten value by the value written: of the old one only shape and dtype count."""
    aten: Any = torch.ops.aten
    for node in [node for node in graph.nodes if node.target is aten.copy.default]:
        old, new = node.args[:2]
        like, given = old.meta["val"], new.meta["val"]
        with graph.inserting_before(node):
            if given.dtype is not like.dtype:
                new = graph.call_function(aten_to_copy, (new,), {"dtype": like.dtype})
            if given.shape != like.shape:
                new = graph.call_function(aten.expand.default, (new, [*like.shape]))
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user.op != "output")


def _writes(target: Any) -> bool:
    return isinstance(target, OpOverload) and bool(schema_of(target).is_mutable)


def _is_view(node: fx.Node) -> bool:
    """Whether a node gives a view of an operand."""
    if not isinstance(node.target, OpOverload):
        return False
    return any(result.alias_info is not None for result in schema_of(node.target).returns)


def _graph(module: fx.GraphModule, structure: optree.PyTreeSpec, fixed: frozenset[int]) -> Graph:
    numbers: dict[fx.Node, int] = {}
    nodes: list[_Node] = []
    for node in module.graph.nodes:
        leaves, places, arguments = _linked((_plain(node.args), dict(node.kwargs)), numbers)
        if node.op == "output":
            results, at, _ = _linked(_plain(node.args[0]), numbers)
            return Graph(tuple(nodes), results, frozenset(place for place, _ in at), structure, fixed)
        if node.op == "get_attr":
            constant = getattr(module, str(node.target))
            nodes.append(_Node(functools.partial(_same, constant), (), (), _NOTHING, False))
        elif node.op == "call_function":
            nodes.append(_Node(node.target, leaves, places, arguments, node.target is not operator.getitem))
        numbers[node] = len(numbers)
    raise AssertionError("a graph has an output")


def _same(x: Any) -> Any:
    return x


def _linked(tree: Any, numbers: dict[fx.Node, int]) -> tuple[tuple[Any, ...], tuple[tuple[int, int], ...], Any]:
    """Return the leaves of a tree with numbers in place of nodes, the places of these, and the treedef."""
    leaves, treedef = optree.tree_flatten(tree, none_is_leaf=True)
    places = tuple((i, numbers[x]) for i, x in enumerate(leaves) if isinstance(x, fx.Node))
    for i, number in places:
        leaves[i] = number
    return tuple(leaves), places, treedef


_NOTHING = optree.tree_structure(((), {}), none_is_leaf=True)


def _plain(tree: Any) -> Any:
    """Return lists and tuples of fx as those of Python."""
    if isinstance(tree, list):
        return [_plain(x) for x in tree]
    return tuple(_plain(x) for x in tree) if type(tree) is tuple else tree


def operands_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the operands of a graph: the tensors, `Sharded` values and finite floats of a call."""
    return [x for x in _leaves(args, kwargs)[0] if _is_operand(x)]


def numbers_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, Any, bool]]:
    """Return the numbers of a call: for each its leaf, its value, and whether it is an operand."""
    leaves, _ = _leaves(args, kwargs)
    return [(place, x, _is_operand(x)) for place, x in enumerate(leaves) if isinstance(x, Number)]


def _leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], optree.PyTreeSpec]:
    leaves: list[Any]
    leaves, treedef = optree.tree_flatten((args, kwargs), none_is_leaf=True)
    return leaves, treedef


def _is_operand(x: Any) -> bool:
    return isinstance(x, Tensor) or (type(x) is float and isfinite(x))


def written(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph:
    """Return the graph of the value that a function leaves in its first operand."""

    def pure(x: Any, *args: Any, **kwargs: Any) -> Any:
        copy = x.clone()
        func(copy, *args, **kwargs)
        return copy

    graph = decompose(pure, args, kwargs)
    assert graph is not None  # ``pure`` is no node of its own graph
    return graph


def decompose(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Graph | None:
    """Return the graph of a call, or None if the function is a node of its own graph.

    Raises:
        NotTraceable: The result, or its shape, depends on values.
        WritesOperand: The function writes into an operand.
    """
    try:
        return _traced(func, args, kwargs, symbolic=any(type(x) is float for x in operands_of(args, kwargs)))
    except (NotTraceable, WritesOperand):
        raise
    except Exception:  # the function may not take symbols
        pass
    return _traced(func, args, kwargs, symbolic=False)


def _traced(func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], *, symbolic: bool) -> Graph | None:
    """Return the graph of a call, with its floats as symbols or as constants."""
    leaves, treedef = _leaves(args, kwargs)
    places = [i for i, x in enumerate(leaves) if _is_operand(x)]
    floats = frozenset(number for number, place in enumerate(places) if type(leaves[place]) is float)
    structure: list[optree.PyTreeSpec] = []

    def flat(*operands: Any) -> list[Any]:
        filled = list(leaves)
        for place, x in zip(places, operands, strict=True):
            filled[place] = x
        given, named = treedef.unflatten(filled)
        results: list[Any]
        results, spec = optree.tree_flatten(func(*given, **named), none_is_leaf=True)
        structure[:] = [spec]
        return results

    symbols = _Symbols() if symbolic else None
    operands = [leaves[place] for place in places]
    # `auto_spec` has plain tensors with data beside `Sharded` values without: all become meta tensors
    is_meta = any(x.device.type == "meta" for x in operands if isinstance(x, Sharded))
    try:
        with (
            outside_transforms(),
            FakeMode(allow_non_fake_inputs=True, shape_env=symbols and symbols.env) as mode,
        ):
            for i, x in enumerate(operands):
                if i not in floats:
                    device = torch.device("meta") if is_meta else x.device
                    operands[i] = torch.empty_strided(x.shape, _strides_of(x), dtype=x.dtype, device=device)
                elif symbols is not None:
                    operands[i] = symbols.of(x, i)
        with torch.no_grad(), outside_transforms(), mode:  # the graph is the same within a transform
            table = {**_simpler(), **_own(func), **DECOMPOSED}
            module = make_fx(torch.func.functionalize(flat), decomposition_table=table)(*operands)
    except UnknownValues as error:
        raise NotTraceable(str(error)) from error
    _without_writes(module.graph)
    _without_copies(module.graph)
    module.graph.eliminate_dead_code(_does_something)
    fixed = floats if symbols is None else symbols.looked_at()
    graph = _graph(module, structure[0], frozenset(places[number] for number in fixed))
    return None if any(node.target is func for node in graph.nodes) else graph


def _strides_of(x: Sharded | Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor. The graph of a function may depend on them."""
    if isinstance(x, Sharded):
        return lies(x).strides or packed(x.spec.shape)
    return x.stride() if x.layout is torch.strided else packed(x.shape)


def _does_something(node: fx.Node) -> bool:
    """Whether a node must stay even if its result is unused: it has no result, or torch calls it impure."""
    schema = schema_of(node.target)
    return node.is_impure() or (schema is not None and not schema.returns)


class _Symbols:
    """The symbols for the floats of one trace, which record whether the function reads their values."""

    def __init__(self) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv  # its import takes a second

        self.env = ShapeEnv()
        self._numbers: dict[object, int] = {}  # symbol -> number of its operand

    def of(self, x: float, number: int) -> float | torch.SymFloat:
        """Return a symbol for the operand of this number."""
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = constant_source(f"operand_{number}")
        symbol = self.env.create_symbol(x, source, DimDynamic.DYNAMIC, None, None, do_not_specialize_zero_one=True)
        self._numbers[symbol] = number
        return self.env.create_symfloatnode(symbol, hint=x, source=source)

    def looked_at(self) -> frozenset[int]:
        """Return the numbers of the operands whose values the function has read or compared."""
        known = {*self.env.replacements}.union(*(guard.expr.free_symbols for guard in self.env.guards))
        return frozenset(number for symbol, number in self._numbers.items() if symbol in known)


@cached
def _simpler() -> dict[Any, Function]:
    """Return torch's decompositions of functions without a rule."""
    table = torch.export.default_decompositions()
    return {op: f for op, f in table.items() if row_of(op) is None and handler_of(op) is None}


def _own(func: Function) -> dict[Any, Function]:
    """Return the decompositions of an op: registered ones, or kernels made of other ops that autograd records too."""
    op = op_of(func)
    packet = getattr(op, "overloadpacket", op)
    if not isinstance(packet, OpOverloadPacket) or packet is torch.ops.aten.embedding:  # it drops `scale_grad_by_freq`
        return {}
    overloads = [getattr(packet, name) for name in packet.overloads()]
    table = {overload: decomposition_table[overload] for overload in overloads if overload in decomposition_table}
    for overload in overloads:
        has = overload.has_kernel_for_dispatch_key
        if overload not in table and has(_EXPLICIT) and not has(DispatchKey.Autograd):
            table[overload] = kernel_of(overload, _EXPLICIT)
    return table


_EXPLICIT: Final = DispatchKey.CompositeExplicitAutograd
