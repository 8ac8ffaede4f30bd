"""The question of a call: its operands, its results and its factors, before a strategy is chosen."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from math import nan
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.global_view.call_keys import keyed
from fspmd.global_view.flat_dims import ViewedCall, regrouped, with_flat_dims_split
from fspmd.global_view.kernels import GlobalCall, dtype_complaint
from fspmd.global_view.layouts import LayoutProblem, Strategy, as_they_lie
from fspmd.global_view.local_calls import untouched
from fspmd.global_view.refusals import refuse_global, refuse_shared_memory, shown
from fspmd.global_view.result_types import (
    Kind,
    ResultMemory,
    Shape,
    outcome_of,
    strides_known,
    views_any,
)
from fspmd.global_view.strategies import best_strategy
from fspmd.ops.linearity import stay_sums
from fspmd.ops.signatures import Place, at, by_signature, in_order, may_view
from fspmd.ops.traits import autocasts, name_of
from fspmd.rules import Factors, Row, Whole, row_of, writes
from fspmd.rules.factors import elementwise
from fspmd.rules.views import reshaped
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec, is_float

#: functions whose operands need one dtype, which the meta device does not check
_OF_ONE_DTYPE: Final = frozenset(
    ("matmul", "rmatmul", "mm", "bmm", "mv", "dot", "vdot", "linear", "convolution")
    + ("addmm", "addmv", "baddbmm", "addbmm")
)


class Question(NamedTuple):
    """A call before a strategy is chosen: its operands in the order of the rule, its results, its factors."""

    row: Row
    operands: Sequence[tuple[Place, TensorSpec]]
    results: list[TensorSpec]  # their layouts are arbitrary as yet
    kind: Kind | None  # the container of the results; None for a single result
    factors: Factors
    linear: str
    fixed: bool  # the call writes into its first operand
    viewed: Place | None  # the operand that the results view
    names: tuple[str, ...]  # of the keyword arguments
    products: ViewedCall | None  # where dims are `Flat`: the call on views, for which strategies are found
    plain: frozenset[int] = frozenset()  # operands that are plain tensors
    memory: Sequence[ResultMemory] | None = None  # the memory of the results in torch; None: as of new tensors
    may_alias: bool = False  # a block may be viewed where torch copies the global tensor
    loose: bool = False  # gives a view of a block, or a copy if its strides allow no view
    gradients: frozenset[int] = frozenset()  # operands that will have a gradient

    @property
    def weighs(self) -> bool:
        """Whether sums of gradients of whole operands count: they do if only added operands (a bias) are sharded."""
        added = self.factors.added
        return self.row.weighs or (
            bool(added) and all(i in added or not any(spec.partition) for i, (_, spec) in enumerate(self.operands))
        )

    @property
    def passes_on(self) -> str:
        """The operands whose pending sums the call passes on (see ``Row.linear``).

        If a call gives several views and autograd follows them, it passes on none. Each view would settle a sum of its
        own, so the operand is settled first. The views are then copies, but autograd forbids writes into them anyway.
        """
        return "" if self.gradients and self.viewed is not None and len(self.results) > 1 else self.linear

    def at(self, specs: Sequence[TensorSpec]) -> Question:
        """Return the question for other layouts of the operands."""
        operands = [(place, spec) for (place, _), spec in zip(self.operands, specs, strict=True)]
        return self._replace(operands=operands, products=viewed_call(self.row, self.factors, specs, self.results))

    @property
    def problem(self) -> LayoutProblem:
        """The facts that decide the layouts of this call; where dims are `Flat`, those of the call on views."""
        factors, operands, results = self.factors, [spec for _, spec in self.operands], self.results
        if self.products is not None:
            factors, (operands, results) = self.products.factors, self.products.views
        row, gradients = self.row, self.gradients
        return LayoutProblem(
            *(factors, self.passes_on, operands, results, self.fixed, row.empty, row.body),
            gradients=gradients,
            weighs=self.weighs,
        )

    def together(self, strategy: Strategy) -> Strategy:
        """Turn a strategy for views into one for the operands and results themselves."""
        if self.products is None:
            return strategy
        operands, results = self.products.together(strategy.operands, strategy.results)
        return strategy._replace(operands=operands, results=results)

    def best(self, known: list[Any] | None = None) -> Strategy | None:
        """Return the cheapest strategy, or None if there is none; ``known`` is that of `best_strategy`."""
        if self.products is not None and self.products.regrouped is not None:
            stays = tuple(spec for _, spec in self.operands)
            return Strategy(stays, ((),), (self.results[0].with_partition(self.products.regrouped),), False, {})
        problem = self.problem
        best = None if self.gradients else as_they_lie(problem)
        if best is None:
            best = best_strategy(problem, known)
        best = None if best is None else self.together(best)
        moved = best is not None and self.fixed and best.operands[0] is not self.operands[0][1]
        return None if moved else best  # a write into a moved operand would be lost


def ask(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[tuple[Place, TensorSpec]]
) -> Question | None:
    """Return the question of a call, or None if no rule decides it.

    Raises:
        ArgumentError: The call fails on the global tensors.
    """
    row = row_of(func)
    if row is None:
        return None
    if (ordered := by_signature(func, len(args), list(kwargs), operands)) is None:
        return None
    specs = [spec for _, spec in ordered]
    shapes = [spec.shape for spec in specs]
    plain = [None if isinstance(arg, Tensor) else arg for arg in args]
    given = [*args, *kwargs.values()]
    values = [given[place] if type(place) is int else at(given, place) for place, _ in ordered]
    call = GlobalCall(func, args, kwargs, ordered)
    outcome, known_factors = outcome_of(row, call, values)
    _check_dtypes(func, specs)
    if outcome is None:
        return None
    after = [shape for shape, _ in outcome.results]
    results = [_undecided_spec(shape, dtype, specs[0]) for shape, dtype in outcome.results]
    whole = Whole(shapes, plain, kwargs, after)
    try:
        factors = row.rule(whole) if known_factors is None else known_factors
    except (IndexError, TypeError) as error:  # a dim that is out of range, or is not an int
        refuse_global(func, specs, error)
    if fixed := writes(func):
        refuse_shared_memory(func, values[0], at_once=not row.sets)
    elif row.rule is not elementwise and outcome.bases[0] is None:
        complaint = dtype_complaint(call)
        if complaint is not None:
            refuse_global(func, specs, complaint)
    # x[:, 0:], or x.split(8) of 8 rows, gives all of x: then no dim need be whole
    cuts = factors.whole or factors.summed
    as_is = outcome.same and not fixed and row.as_is and all(map(strides_known, values))
    if as_is or (outcome.same and not fixed and cuts):
        local = functools.partial(untouched, outcome.kind, len(results))
        row = replace(row, rule=elementwise, linear="first", local=local, body=None, blocks=None)
        factors = elementwise(whole)
    free = factors.scaled if row.body is None else factors.scaled | factors.whole
    if known_factors is None and not _fits(factors, shapes, after, free, resized=row.blocks is not None):
        return None
    viewed = None if fixed else outcome.bases[0]
    copies = outcome.bases[0] is None and not fixed and outcome.kind is None
    return Question(
        row=row,
        operands=ordered,
        results=results,
        kind=outcome.kind,
        factors=factors,
        linear=_linearity(row, func, args, kwargs, specs, results[0]),
        fixed=fixed,
        viewed=viewed,
        names=tuple(kwargs),
        products=viewed_call(row, factors, specs, results),
        plain=frozenset([i for i, x in enumerate(values) if type(x) is not Sharded]),
        memory=outcome.memory,
        may_alias=copies and results[0].dtype is specs[0].dtype and may_view(func),
        loose=viewed is not None and not as_is and not views_any(call),
    )


def viewed_call(
    row: Row, factors: Factors, operands: Sequence[TensorSpec], results: Sequence[TensorSpec]
) -> ViewedCall | None:
    """Return the call on views, or None if no dim is `Flat`, before or after a reshape."""
    if row.rule is reshaped and results[0].dtype is operands[0].dtype:
        reshape = regrouped(operands[0], results[0])
        if reshape is not None:
            return reshape
    if True not in [spec.flat for spec in operands]:
        return None
    return with_flat_dims_split(factors, operands, results, row.body is not None)


def _check_dtypes(func: Any, specs: Sequence[TensorSpec]) -> None:
    """Raise for operands of several dtypes where the meta device does not."""
    if len({spec.dtype for spec in specs}) > 1 and name_of(func).strip("_") in _OF_ONE_DTYPE and not autocasts():
        widest = functools.reduce(torch.promote_types, (spec.dtype for spec in specs))
        given = ", ".join(spec.text for spec in specs)
        raise ArgumentError(
            f"{shown(func)} of {given} has operands of several dtypes; write x.to({widest}), or use torch.autocast"
        )


def _undecided_spec(shape: Shape, dtype: torch.dtype, like: TensorSpec) -> TensorSpec:
    """Return a result with an arbitrary layout: it is not laid out yet."""
    if (shape, dtype) == (like.shape, like.dtype):
        return like
    fits = len(shape) == like.ndim and not like.flat
    return TensorSpec(like.mesh, like.partition if fits else P(*(None,) * len(shape)), shape, dtype)


def _linearity(
    row: Row,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    specs: Sequence[TensorSpec],
    result: TensorSpec,
) -> str:
    """Return the linearity of a call, for all numbers that its key leaves out.

    A call that widens the dtype is not linear here: the sum is settled before, in the narrower dtype.
    """
    if isinstance(row.linear, str):
        linear = row.linear
    else:
        args = tuple([_some_number(func, arg, i) for i, arg in enumerate(args)])
        kwargs = {name: _some_number(func, arg, name) for name, arg in kwargs.items()}
        args, kwargs = in_order(func, args, kwargs)
        linear = row.linear(*args, **kwargs)
    first = specs[0]
    if not linear or all(spec.dtype is result.dtype for spec in specs):
        return linear
    widened = linear == "first" and result.shape == first.shape and result.dtype.itemsize > first.dtype.itemsize
    exact = not _narrows(first.dtype, result.dtype) and all(stay_sums(spec.dtype, result.dtype) for spec in specs)
    return linear if exact and not widened else ""


def _some_number(func: Any, arg: Any, place: int | str) -> Any:
    return nan if isinstance(arg, (int, float, complex)) and keyed(func, arg, place) is type(arg) else arg


def _narrows(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether a float dtype becomes one that cannot represent some of its numbers."""
    if not (is_float(before) and is_float(after)):
        return False
    old, new = torch.finfo(before), torch.finfo(after)
    return new.eps > old.eps or new.max < old.max


def _fits(factors: Factors, before: list[Shape], after: list[Shape], free: frozenset[int], *, resized: bool) -> bool:
    """Whether each factor has one size in all dims. A rule that does not fit a call is not used.

    Args:
        free: Factors that may have several sizes.
        resized: Dims of the result may have other sizes; the strategy checks that their blocks are the same shares.
    """
    rows, shapes = (*factors.operands, *factors.results), (*before, *after)
    if [*map(len, rows)] != [*map(len, shapes)]:
        return False
    sizes: dict[int | None, int] = {}
    known = zip(factors.operands, before, strict=True) if resized else zip(rows, shapes, strict=True)
    for dims, shape in {*known}:
        if tuple(map(sizes.setdefault, dims, shape)) != shape and any(
            sizes[f] != size and f is not None and f not in free for f, size in zip(dims, shape, strict=True)
        ):
            return False
    return True
