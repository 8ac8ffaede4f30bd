"""The question of a call: its operands, its results and its factors, before a strategy is chosen."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from math import nan
from typing import Any, Final, NamedTuple

import optree
import torch
from torch import Tensor

from fspmd.forms import Strided
from fspmd.global_view.call_keys import keyed
from fspmd.global_view.flat_dims import ViewedCall, regrouped, with_flat_dims_split
from fspmd.global_view.kernels import GlobalCall
from fspmd.global_view.local_calls import untouched
from fspmd.global_view.refusals import refuse_global, refuse_shared_memory
from fspmd.global_view.result_types import (
    Kind,
    ResultMemory,
    Shape,
    outcome_of,
    strides_known,
    views_any,
)
from fspmd.meshes.mesh import Mesh
from fspmd.ops.linearity import stay_sums
from fspmd.ops.signatures import Place, at, by_signature, in_order, may_view
from fspmd.ops.traits import writes
from fspmd.rules import Factors, Row, ShapedCall, row_of
from fspmd.rules.factors import elementwise
from fspmd.rules.views import reshaped
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec, is_float


class Question(NamedTuple):
    """A call before a strategy is chosen: its operands in the order of the rule, its results, its factors."""

    func: Any
    row: Row
    positional: int  # the number of positional arguments
    names: tuple[str, ...]  # of the keyword arguments
    places: Sequence[Place]  # of the operands
    operands: Sequence[TensorSpec]
    results: Sequence[TensorSpec]  # their layouts are arbitrary as yet
    kind: Kind | None  # the container of the results; None for a single result
    factors: Factors
    linear: str  # see `Row.linear`
    fixed: bool = False  # the call writes into its first operand, which is not moved, and lies as it does
    viewed: Place | None = None  # the operand that the results view
    viewed_call: ViewedCall | None = None  # where dims are `Flat`: the call on views, for which strategies are found
    plain: frozenset[int] = frozenset()  # operands that are plain tensors
    made: frozenset[int] = frozenset()  # operands that are made of less (`forms.py`)
    memory: Sequence[ResultMemory] | None = None  # the memory of the results in torch; None: as of new tensors
    may_alias: bool = False  # a block may be viewed where torch copies the global tensor
    loose: bool = False  # gives a view of a block, or a copy if its strides allow no view
    gradients: frozenset[int] = frozenset()  # operands that will have a gradient
    weighs: bool = False  # sums of gradients of whole operands are a part of the price

    @property
    def passes_on(self) -> str:
        """The operands whose pending sums the call passes on (see ``Row.linear``).

        If a call gives several views and autograd follows them, it passes on none. Each view would settle a sum of its
        own, so the operand is settled first. The views are then copies, but autograd forbids writes into them anyway.
        """
        return "" if self.gradients and self.viewed is not None and len(self.results) > 1 else self.linear

    def at(self, specs: Sequence[TensorSpec]) -> Question:
        """Return the question for other layouts of the operands."""
        views = viewed_call(self.row, self.factors, specs, self.results)
        return self._replace(operands=specs, viewed_call=views, weighs=_weighs(self.row, self.factors, specs))

    @property
    def on_views(self) -> Question:
        """The question of the call on views, where dims are `Flat`."""
        assert self.viewed_call is not None
        operands, results = self.viewed_call.views
        return self._replace(factors=self.viewed_call.factors, operands=operands, results=results, viewed_call=None)


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
    ordered = by_signature(func, len(args), list(kwargs), operands) if kwargs else operands
    if ordered is None:
        return None
    specs = [spec for _, spec in ordered]
    given = [*args, *kwargs.values()]
    values = [given[place] if type(place) is int else at(given, place) for place, _ in ordered]
    call = GlobalCall(func, args, kwargs, ordered)
    outcome, factors = outcome_of(row, call, values)
    if outcome is None:
        return None
    results = [_undecided_spec(shape, dtype, specs[0]) for shape, dtype in outcome.results]
    fixed, as_is, may_alias = writes(func), False, False
    if fixed:
        refuse_shared_memory(func, values[0], at_once=not row.sets)
    if factors is None:
        plain = [None if isinstance(arg, Tensor) else arg for arg in args]
        shaped = ShapedCall([spec.shape for spec in specs], plain, kwargs, [shape for shape, _ in outcome.results])
        try:
            factors = row.rule(shaped)
        except (IndexError, TypeError) as error:  # a dim that is out of range, or is not an int
            refuse_global(func, specs, error)
        if outcome.same and not fixed:  # x[:, 0:], or x.split(8) of 8 rows, gives all of x: then no dim need be whole
            as_is = row.as_is and all(map(strides_known, values))
            if as_is or factors.whole or factors.summed:
                local = functools.partial(untouched, outcome.kind, len(results))
                row = replace(row, rule=elementwise, linear="first", local=local, body=None, blocks=None)
                factors = elementwise(shaped)
        if not _fits(factors, shaped, row):
            return None
        is_copy = outcome.bases[0] is None and not fixed and outcome.kind is None
        may_alias = is_copy and results[0].dtype is specs[0].dtype and may_view(func)
    viewed = None if fixed else outcome.bases[0]
    sharded = [(i, x) for i, x in enumerate(values) if type(x) is Sharded]
    return Question(
        func=func,
        row=row,
        positional=len(args),
        names=tuple(kwargs),
        places=[place for place, _ in ordered],
        operands=specs,
        results=results,
        kind=outcome.kind,
        factors=factors,
        linear=_linearity(row, func, args, kwargs, specs, results[0]),
        fixed=fixed,
        viewed=viewed,
        viewed_call=viewed_call(row, factors, specs, results),
        plain=frozenset([i for i, x in enumerate(values) if type(x) is not Sharded]),
        made=frozenset([i for i, x in sharded if isinstance(x.form, Strided) and x.form.made]),
        memory=outcome.memory,
        may_alias=may_alias,
        loose=viewed is not None and not as_is and not views_any(call),
        weighs=_weighs(row, factors, specs),
    )


def _weighs(row: Row, factors: Factors, specs: Sequence[TensorSpec]) -> bool:
    """Whether sums of gradients of whole operands count: they do if only added operands (a bias) are sharded."""
    added = factors.added
    return row.weighs or (bool(added) and all(i in added or not any(spec.partition) for i, spec in enumerate(specs)))


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


def _fits(factors: Factors, call: ShapedCall, row: Row) -> bool:
    """Whether each factor has one size in all dims. A rule that does not fit a call is not used.

    Where the row has ``blocks``, dims of the result may have other sizes. The strategy checks that their blocks are the
    same shares.
    """
    rows, shapes = (*factors.operands, *factors.results), (*call.shapes, *call.results)
    free = factors.scaled if row.body is None else factors.scaled | factors.whole  # may have several sizes
    if [*map(len, rows)] != [*map(len, shapes)]:
        return False
    sizes: dict[int | None, int] = {}
    known = zip(rows, shapes, strict=True) if row.blocks is None else zip(factors.operands, call.shapes, strict=True)
    for dims, shape in {*known}:
        if tuple(map(sizes.setdefault, dims, shape)) != shape and any(
            sizes[f] != size and f is not None and f not in free for f, size in zip(dims, shape, strict=True)
        ):
            return False
    return True


# --- the operands of a call among its arguments ----------------------------------------------------------------------

#: common types of arguments that contain no other values
_LEAVES: Final = frozenset((Sharded, Tensor, int, float, bool, str, type(None), torch.dtype))


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the tensors and `Sharded` values of a call."""
    leaves: list[Any] = []
    for arg in (*args, *kwargs.values()):
        if type(arg) is list or type(arg) is tuple:
            leaves += arg
        else:
            leaves.append(arg)
    if not _LEAVES.issuperset(map(type, leaves)):
        leaves = optree.tree_leaves((args, kwargs), none_is_leaf=True)
    return [x for x in leaves if isinstance(x, Tensor)]


def sharded_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Sharded]:
    """Return all `Sharded` values of a call, at any depth."""
    tree: Any = (args, kwargs)
    return [x for x in optree.tree_leaves(tree) if isinstance(x, Sharded)]


def places_of(args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh) -> list[tuple[Place, TensorSpec]]:
    """Return the places and specs of the tensors among the arguments, and in lists among them."""
    operands: list[tuple[Place, TensorSpec]] = []
    for i, arg in enumerate((*args, *kwargs.values())):
        if isinstance(arg, Tensor):
            operands.append((i, spec_of(arg, mesh)))
        elif isinstance(arg, (list, tuple)):
            operands += [((i, k), spec_of(item, mesh)) for k, item in enumerate(arg) if isinstance(item, Tensor)]
    return operands


def spec_of(x: Sharded | Tensor, mesh: Mesh) -> TensorSpec:
    """Return the spec of a value; a plain tensor is replicated on the mesh."""
    return x.spec if isinstance(x, Sharded) else TensorSpec(mesh, P(), x.shape, x.dtype)
