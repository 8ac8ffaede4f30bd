"""Tensors that a function closes over, found in the autograd graph of its results.

A checked body casts them as any operand. An unchecked one has no eyes: the graph is searched for ways out of the body
that do not lead through an argument, and the cotangents that leave there are summed over ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from types import CellType, FunctionType, MethodType
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from fspmd.body import Body
from fspmd.pairs import Call, apply, watched
from fspmd.torch_internals import (
    AccumulateGrad,
    current_level,
    forward_ad,
    is_batched,
    is_wrapped,
    level_of,
    next_sequence,
    pop_transform,
    transforms_active,
    wrapped_by,
)

INNER: Final = "_fspmd_inner"  # set on the autograd leaves that grad and vjp make for themselves: in which body


def now() -> int:
    """A number that graph nodes made later exceed."""
    number: int = next_sequence()
    return number


def _nodes(x: Any) -> Iterator[Node]:
    """Where the graphs of a value begin: one per level of ``torch.func`` that follows it, and those of tangents."""
    while isinstance(x, Tensor):
        if x.requires_grad:
            yield x.grad_fn or _node(x)
        if not is_batched(x) and (forward_ad._current_level >= 0 or transforms_active()):
            yield from _nodes(forward_ad.unpack_dual(x, level=0).tangent)
        x = wrapped_by(x) if is_wrapped(x) else None


def _node(x: Tensor) -> Node:
    """Where one graph begins. Torch finds that of a leaf by an op, which must be done at the leaf's own level."""
    with ExitStack() as inner_levels:
        while x.grad_fn is None and (current_level() or 0) > max(level_of(x), 0):
            inner_levels.enter_context(pop_transform())
        return get_gradient_edge(x).node


def _graph(outputs: Iterable[Any], follows: Callable[[Any], bool]) -> Iterator[Any]:
    """The nodes that the outputs were computed by, as far as ``follows`` lets."""
    seen: set[Node] = set()
    stack: list[Any] = [node for x in outputs for node in _nodes(x)]
    while stack:
        node = stack.pop()
        if node not in seen and follows(node):
            seen.add(node)
            yield node
            stack.extend([parent for parent, _ in node.next_functions if parent is not None])


def uses_closed_over(outputs: list[Any]) -> bool:
    """Whether the outputs were computed from autograd leaves other than those that derivatives make for themselves."""
    if forward_ad._current_level < 0 and not transforms_active():
        stack: list[Any] = [x.grad_fn or _node(x) for x in outputs if isinstance(x, Tensor) and x.requires_grad]
    else:
        stack = [node for x in outputs for node in _nodes(x)]
    seen: set[Any] = {None, *stack}
    for node in stack:
        if type(node) is AccumulateGrad and INNER not in node.variable.__dict__:
            return True
    for node in stack:  # grows; as in `_graph`, in as few steps as can be: every derivative asks
        for parent, _ in node.next_functions:
            if type(parent) is AccumulateGrad:
                if INNER not in parent.variable.__dict__:
                    return True
            elif parent not in seen:
                seen.add(parent)
                stack.append(parent)
    return False


def sum_closures(outputs: list[Any], arguments: Iterable[Any], body: Body, start: int, widen: Call) -> bool | None:
    """Sum the cotangents of differentiable tensors that are no arguments over the axes of ``widen``, a cast of them.

    ``outputs`` is changed in place where a result is such a tensor itself. ``start`` is when the body began. Returns
    whether there are any, None without a graph.
    """
    inputs = {node for x in arguments for node in _nodes(x)}

    def inside(node: Any) -> bool:
        if type(node) is not AccumulateGrad:
            made: int = node._sequence_nr()
            return made >= start
        within = getattr(node.variable, INNER, None)  # leaves that others made are taken for older than the body
        while within is not None and within is not body:
            within = within.outer
        return within is body

    graph = list(_graph(outputs, lambda node: node not in inputs and inside(node)))
    parents = {parent for node in graph for parent, _ in node.next_functions if parent is not None}
    outside = {node for node in parents if node not in inputs and not inside(node)}
    for node in graph if outside else ():
        _sum_what_leaves(node, outside, watched(outputs[0], widen).transposed)
    handed_on = [i for i, x in enumerate(outputs) if any(n not in inputs and not inside(n) for n in _nodes(x))]
    for i in handed_on:
        outputs[i] = apply(outputs[i], widen)
    return bool(outside or handed_on) if graph or handed_on else None


def holds_trainable(function: Any) -> bool:
    """Whether a function can be seen to hold a tensor that requires grad, or a function of its module that does."""
    return any(x.requires_grad for x in held_tensors(function))


def held_tensors(function: Any, of_modules: bool = True) -> Iterator[Tensor]:
    """The tensors that a function can be seen to hold, and functions of its module that it names."""
    seen: set[int] = set()
    stack: list[Any] = [function]
    while stack:
        one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, torch.nn.Module):
            stack.extend(one.parameters() if of_modules else ())
        elif isinstance(one, functools.partial):
            stack += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, MethodType):
            stack += [one.__func__, one.__self__]
        elif isinstance(one, FunctionType):
            if one is function or one.__module__ == getattr(function, "__module__", None):
                stack += _held_by(one)
        elif isinstance(one, (list, tuple, dict)):
            stack += one.values() if isinstance(one, dict) else one
        elif isinstance(found := getattr(one, "__wrapped__", None), FunctionType):  # of `Jitted`, `functools.cache`
            stack += _held_by(found)


def _held_by(function: FunctionType) -> list[Any]:
    """What a function closes over, its defaults, and the globals it names."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    globals_ = [function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__]
    return [*cells, *globals_, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _sum_what_leaves(node: Any, outside: set[Node], total: Call) -> None:
    """Hook a node to sum the cotangents it hands to ``outside``, and the nodes that its backward makes likewise."""
    ways_out = {i for i, (parent, _) in enumerate(node.next_functions) if parent in outside}
    if not ways_out:
        return
    began = 0

    def before(_: Any) -> None:
        nonlocal began
        began = now()

    def after(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        recent = _graph(gradients, lambda node: type(node) is not AccumulateGrad and node._sequence_nr() >= began)
        for made in list(recent):
            _sum_what_leaves(made, outside, total)
        return tuple(g if g is None or i not in ways_out else apply(g, total) for i, g in enumerate(gradients))

    node.register_prehook(before)
    node.register_hook(after)
