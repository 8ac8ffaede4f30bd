"""Tensors that a function closes over, found in the autograd graph of its results.

A checked body casts them as any operand. An unchecked body does not see them. There the graph is searched for edges
that leave the body without passing an argument, and the cotangents on these edges are summed over ranks.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from fspmd.body import Body
from fspmd.cache import cached
from fspmd.pairs import Call, apply, watched
from fspmd.torch_internals import (
    NO_LEVEL,
    NOT_MAPPED,
    AccumulateGrad,
    batch_dim_of,
    forward_ad,
    level_of,
    next_sequence,
    pop_transform,
    running_transforms,
    transforms_active,
    wrapped_by,
)
from fspmd.variance import INVARIANT, get_variance

INNER: Final = "_fspmd_inner"  # set on the autograd leaves that grad and vjp make for themselves: the body


def now() -> int:
    """Return a number that is at most the number of any graph node made later."""
    number: int = next_sequence()
    return number


def _nodes(x: Any) -> Iterator[Node]:
    """Yield the last node of each graph of a value: one per level of ``torch.func``, and those of its tangents."""
    while isinstance(x, Tensor):
        if x.requires_grad:
            yield x.grad_fn or _node(x)
        if batch_dim_of(x) == NOT_MAPPED and (forward_ad._current_level >= 0 or transforms_active()):
            yield from _nodes(forward_ad.unpack_dual(x, level=0).tangent)
        x = wrapped_by(x) if level_of(x) != NO_LEVEL else None


def _node(x: Tensor) -> Node:
    """Return the node of a leaf. Torch finds it by an op, which must run at the level of the leaf."""
    with ExitStack() as inner_levels:
        for transform in reversed(running_transforms()):
            if x.grad_fn is not None or transform.level() <= level_of(x):
                break
            inner_levels.enter_context(pop_transform())
        return get_gradient_edge(x).node


def _graph(outputs: Iterable[Any], follows: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield the nodes by which outputs were computed, as far as ``follows(node)`` is true."""
    seen: set[Node] = set()
    stack: list[Any] = [node for x in outputs for node in _nodes(x)]
    while stack:
        node = stack.pop()
        if node not in seen and follows(node):
            seen.add(node)
            yield node
            stack.extend([parent for parent, _ in node.next_functions if parent is not None])


def uses_closed_over(outputs: list[Any]) -> bool:
    """Return whether outputs depend on autograd leaves other than those that derivatives make for themselves."""
    if forward_ad._current_level < 0 and not transforms_active():
        stack: list[Any] = [x.grad_fn or _node(x) for x in outputs if isinstance(x, Tensor) and x.requires_grad]
    else:
        stack = [node for x in outputs for node in _nodes(x)]
    seen: set[Any] = {None, *stack}
    for node in stack:
        if type(node) is AccumulateGrad and INNER not in node.variable.__dict__:
            return True
    for node in stack:  # the stack grows; this repeats `_graph` in fewer steps, since every derivative runs it
        for parent, _ in node.next_functions:
            if type(parent) is AccumulateGrad:
                if INNER not in parent.variable.__dict__:
                    return True
            elif parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return False


def sum_closures(outputs: list[Any], arguments: Iterable[Any], body: Body, start: int, widen: Call) -> bool | None:
    """Sum the cotangents of differentiable tensors that a body closes over, by the transpose of ``widen``, their cast.

    ``start`` is the number of `now` when the body began. A result that is a closed-over tensor itself is replaced in
    ``outputs``. Returns whether there are such tensors, or None if there is no graph.
    """
    inputs = {node for x in arguments for node in _nodes(x)}

    def inside(node: Any) -> bool:
        if type(node) is not AccumulateGrad:
            made: int = node._sequence_nr()
            return made >= start
        within = getattr(node.variable, INNER, None)  # other leaves count as older than the body
        while within is not None and within is not body:
            within = within.outer
        return within is body

    graph = list(_graph(outputs, lambda node: node not in inputs and inside(node)))
    parents = {parent for node in graph for parent, _ in node.next_functions if parent is not None}
    outside = {node for node in parents if node not in inputs and not inside(node)}
    for node in graph if outside else ():
        _sum_leaving(node, outside, watched(outputs[0], widen).transposed)
    closed_over = [i for i, x in enumerate(outputs) if any(n not in inputs and not inside(n) for n in _nodes(x))]
    for i in closed_over:
        outputs[i] = apply(outputs[i], widen)
    return bool(outside or closed_over) if graph or closed_over else None


def holds_trainable(function: Any) -> bool:
    """Return whether `held_tensors` finds a tensor that requires grad."""
    return any(x.requires_grad for _, x in _named_tensors(function, True, of_buffers=False))


def held_tensors(function: Any, of_modules: bool = True) -> Iterator[Tensor]:
    """Yield the tensors that a function visibly holds, directly or by functions of its module that it names."""
    return (x for _, x in _named_tensors(function, of_modules))


def captured_values(function: Any) -> list[tuple[str, Any]]:
    """Return the invariant tensors of `held_tensors` and the numbers that the function itself holds, sorted by names.

    >>> rate, weights = 0.5, {"w": torch.ones(2)}
    >>> captured_values(lambda x: x * rate * weights["w"])
    [('rate', 0.5), ("weights['w']", tensor([1., 1.]))]
    """
    tensors = [(name, x) for name, x in _named_tensors(function, True) if get_variance(x) is INVARIANT]
    values: list[tuple[str, Any]] = []
    inner = function
    while not isinstance(inner, FunctionType) or hasattr(inner, "__wrapped__"):
        if isinstance(inner, functools.partial):
            values += _bound_by(inner)
            inner = inner.func
        elif (inner := getattr(inner, "__wrapped__", getattr(inner, "__func__", None))) is None:
            break
    if inner is not None:
        values += _captured_by(inner)
    numbers = [(name, x) for name, x in values if isinstance(x, (int, float, complex))]
    return sorted([*tensors, *numbers], key=lambda named: named[0])


def _named_tensors(function: Any, of_modules: bool, of_buffers: bool = True) -> Iterator[tuple[str, Tensor]]:
    home = function
    while isinstance(home, functools.partial):
        home = home.func
    module = getattr(home, "__module__", None)
    seen: set[Any] = set()
    stack: list[tuple[str, Any]] = [("", function)]
    while stack:
        name, value = stack.pop()
        is_method = isinstance(value, MethodType)  # made anew each time
        key = (id(value.__func__), id(value.__self__)) if is_method else id(value)
        if key in seen:
            continue
        seen.add(key)
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, torch.nn.Module):
            own: list[tuple[str, Tensor]] = [*value.named_parameters()] if of_modules else []
            if of_modules and of_buffers:
                own += value.named_buffers()
            stack += [(f"{name}.{path}".lstrip("."), x) for path, x in own]
        elif isinstance(value, functools.partial):
            stack += [(name, value.func), *_bound_by(value)]
        elif is_method:
            owner = name.rpartition(".")[0] or "self"
            stack += [(name, value.__func__), (owner, value.__self__)]
            if of_modules and isinstance(value.__func__, FunctionType):
                stack += _attributes(owner, value.__self__, value.__func__)
        elif isinstance(value, FunctionType):
            if value is function or value.__module__ == module:
                rows = _captured_by(value)
                stack += rows
                if of_modules:
                    stack += [row for name_of, x in rows for row in _attributes(name_of, x, value)]
        elif isinstance(value, (list, tuple, dict)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            stack += [(f"{name}[{_key_text(key, i)}]", x) for i, (key, x) in enumerate(items)]
        elif isinstance(inner := _own(value).get("__wrapped__"), FunctionType):  # `Jitted`, `functools.cache`
            stack += _captured_by(inner)
        elif value is home and isinstance(method := type(value).__call__, FunctionType):
            stack.append((name, MethodType(method, value)))


def _attributes(name: str, x: Any, function: FunctionType) -> list[tuple[str, Any]]:
    """Return the attributes and methods of an object that a function may use, if it is of a class of the user: those
    that the function names, and the call of the object."""
    kind = type(x)
    if kind.__module__ != function.__module__ or isinstance(x, (type, torch.nn.Module)):
        return []
    own, rows = _own(x), []
    for attribute in (*_attributes_of(function.__code__), "__call__"):
        if attribute in own:
            rows.append((f"{name}.{attribute}", own[attribute]))
            continue
        method = next((vars(each)[attribute] for each in kind.__mro__ if attribute in vars(each)), None)
        if isinstance(method, FunctionType):
            rows.append((f"{name}.{attribute}", MethodType(method, x)))
    return rows


def _own(x: Any) -> dict[str, Any]:
    """Return the attributes of an object itself. None of its code runs, as ``getattr`` would let it."""
    try:
        attributes: dict[str, Any] = object.__getattribute__(x, "__dict__")
    except AttributeError:
        return {}
    return attributes


def _key_text(key: Any, place: int) -> str:
    """Return the text of a key that is the same on all processes; of an object or an address, its place."""
    return repr(key) if isinstance(key, str) or (isinstance(key, int) and key < 1 << 32) else f"key {place}"


def _captured_by(function: FunctionType) -> list[tuple[str, Any]]:
    """Return the values that a function closes over, its defaults, and the globals that it names."""
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    captured = [(name, cell.cell_contents) for name, cell in cells if cell != CellType()]
    globals_ = [(name, function.__globals__[name]) for name in _globals_of(code) if name in function.__globals__]
    defaults = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    return [*captured, *globals_, *zip(names, defaults, strict=True), *(function.__kwdefaults__ or {}).items()]


def _bound_by(function: functools.partial[Any]) -> list[tuple[str, Any]]:
    return [*((f"args[{i}]", x) for i, x in enumerate(function.args)), *function.keywords.items()]


@cached(maxsize=1024)
def _globals_of(code: CodeType) -> tuple[str, ...]:
    """Return the globals that a function names. Its ``co_names`` has attributes as well."""
    return _named_by(code, "LOAD_GLOBAL")


@cached(maxsize=1024)
def _attributes_of(code: CodeType) -> tuple[str, ...]:
    """Return the attributes and methods that a function names."""
    return _named_by(code, "LOAD_ATTR", "LOAD_METHOD")


def _named_by(code: CodeType, *operations: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(step.argval for step in dis.get_instructions(code) if step.opname in operations))


def _sum_leaving(node: Any, outside: set[Node], total: Call) -> None:
    """Hook a node so that it sums its cotangents for nodes ``outside``. Nodes that its backward makes do the same."""
    leaving = {i for i, (parent, _) in enumerate(node.next_functions) if parent in outside}
    if not leaving:
        return
    began = 0

    def before(_: Any) -> None:
        nonlocal began
        began = now()

    def after(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        recent = _graph(gradients, lambda node: type(node) is not AccumulateGrad and node._sequence_nr() >= began)
        for made in list(recent):
            _sum_leaving(made, outside, total)
        return tuple(g if g is None or i not in leaving else apply(g, total) for i, g in enumerate(gradients))

    node.register_prehook(before)
    node.register_hook(after)
