"""Exits of a body: each checks a result's type against its spec, and turns the result into a `Sharded`."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fspmd.body import Body
from fspmd.cache import Cache
from fspmd.collectives.measured_layouts import spec_of_blocks
from fspmd.collectives.steps import Handle
from fspmd.entries import Flat, entry_axes, entry_of
from fspmd.errors import ArgumentError, MeshError, ShapeError, SpecError, VarianceError
from fspmd.foreign import misfit
from fspmd.local_view.entry import spec_failure
from fspmd.messages import Failure, as_axis_name, described, quoted, refuse
from fspmd.pairs import apply, call
from fspmd.redistribution.redistribute import from_blocks, from_even_blocks
from fspmd.sharded import Sharded, is_plain, pair
from fspmd.spec import P, TensorSpec
from fspmd.torch_internals import DisableTorchFunction, transforms_active
from fspmd.tracing import recorder
from fspmd.transport import Options
from fspmd.transport.frame import Frame, frame_over, groups
from fspmd.transport.local_tensor import BLOCKS, block_type, blocks_of, frame_of, held_frame, is_borrowed, is_uneven
from fspmd.trees import Label
from fspmd.variance import (
    ATTRIBUTE,
    INVARIANT,
    Variance,
    copied,
    get_variance,
    set_variance,
    show,
    storage_of,
    variance_of_spec,
)


@dataclass(frozen=True, slots=True)
class Exit:
    """The exit of leaves with one spec. If the fast path ``known`` gives None, ``failure`` checks, ``leave`` converts.

    ``failure`` and ``leave`` take the leaf and its label. ``axes``: those over which the result may differ.
    """

    known: Callable[[Any], Any]
    leave: Callable[[Any, Label], Any]
    failure: Callable[[Any, Label], Failure | None]
    axes: frozenset[str] = frozenset()


class Exits:
    """The exits of the leaves of one tree of results. All leaves are checked before one communicates.

    ``lent``: arguments whose memory the body may give back, by place, and the axes over which each may differ. A result
    that may differ over more axes must not share it: a write into its block would make replicas of the argument differ.
    ``outside``: the places of results in the memory of tensors that the body closes over, which have no axes.
    """

    __slots__ = ("_failures", "_header", "_known", "_labels", "_leave", "_lent", "_outside", "shares")

    def __init__(
        self, header: str, labels: list[Label], exits: list[Exit], lent: dict[int, frozenset[str]], outside: list[int]
    ) -> None:
        self._header, self._labels = header, labels
        wider = {i: [j for j, e in enumerate(exits) if e.axes - axes] for i, axes in lent.items()}
        self._lent = [(i, places) for i, places in wider.items() if places]
        self._outside = [j for j in outside if exits[j].axes]
        self.shares = bool(self._lent or self._outside)
        self._known = [e.known for e in exits]
        self._leave = [e.leave for e in exits]
        self._failures = [e.failure for e in exits]

    def converted(self, leaves: list[Any]) -> list[Any]:
        """Return results, after a check of the leaves."""
        done: list[Any] = []
        for y in map(operator.call, self._known, leaves):
            if y is None:
                self._check(leaves)
                return self.leave(leaves)
            done.append(y)
        return done

    def _check(self, leaves: list[Any]) -> None:
        results = map(operator.call, self._failures, leaves, self._labels)
        if failures := [failure for failure in results if failure is not None]:
            refuse(self._header, failures)

    def unshared(self, leaves: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Return leaves, with copies in place of those that share memory with a value that they must not change."""
        separate, memory = list(leaves), list(map(_memory, leaves))
        for j in self._outside:
            separate[j] = copied(leaves[j])
        for i, places in self._lent:
            lent = _memory(args[i])
            for j in places:
                if lent is not None and memory[j] == lent and separate[j] is leaves[j]:
                    separate[j] = copied(leaves[j])
        return separate

    def leave(self, leaves: list[Any]) -> list[Any]:
        """Convert leaves that have been checked."""
        done, failures = [], []
        for leave, x, label in zip(self._leave, leaves, self._labels, strict=True):
            try:
                done.append(leave(x, label))
            except ShapeError as error:
                failures.append(Failure(str(error), ShapeError))
        if failures:
            refuse(self._header, failures)
        return done


def static_failure(x: Any, path: object) -> Failure | None:
    """Return the failure of a result without a spec, which must not be a block, or None."""
    if isinstance(x, (Tensor, Handle)):
        return Failure(f"{path} is {described(x)}, but its spec is None (a static result); give it a P", SpecError)
    return None


def result_failure(x: Any, partition: P, path: object, body: Body, outer_axes: frozenset[str]) -> Failure | None:
    """Return the failure of a result under its spec, or None."""
    if type(x) not in BLOCKS and not is_plain(x):
        return _kind_failure(x, partition, path)
    if problem := misfit(x):
        return Failure(f"{path} is {problem[0]}, but a body returns blocks", ArgumentError, problem[1])
    if failure := spec_failure(x, partition, path, body, outer_axes):
        return failure
    return _type_failure(x, partition, path, body.axes - outer_axes) if body.checked else None


def _kind_failure(x: Any, partition: P, path: object) -> Failure | None:
    if x is None or (isinstance(x, (int, float, complex)) and not partition.mentioned):
        return None
    if isinstance(x, (int, float, complex)):
        return Failure(f"{path} is {described(x)}, the same on all ranks; write P() for it", SpecError)
    if isinstance(x, Handle):
        return Failure(f"{path} is a collective under way; return handle.wait()", ArgumentError)
    if isinstance(x, Sharded):
        advice = "pass it as an argument with its spec and return its block, or give it None in out_specs"
        return Failure(f"{path} is {x!r}, but a body returns blocks", ArgumentError, advice)
    text = f"{path} is {described(x)}, not a tensor; give it None in out_specs (a static result)"
    return Failure(text, ArgumentError)


def _type_failure(x: Tensor, partition: P, path: object, inner: frozenset[str]) -> Failure | None:
    """Return the failure of a value whose type does not fit its spec, or None."""
    variance = get_variance(x)
    if variance is variance_of_spec(partition) and type(x) is Tensor:
        return None

    def shown() -> str:
        return f"{path}, {show(x)},"

    if extra := variance.varying & inner - partition.mentioned:
        over = sorted(extra)
        named = f" ({_with_axes(partition, over, x.ndim)!r} would)" if x.ndim else ""
        text = f"{shown()} varies over {quoted(over)}, but its spec {partition!r} does not say so{named}"
        return Failure(text, VarianceError, _EQUAL[bool(x.ndim)].format(as_axis_name(over), P(tuple(over))))
    rows = (
        ("unreduced", variance.unreduced & inner, partition.unreduced, variance.varying),
        ("reduced", variance.reduced & inner, partition.reduced, frozenset[str]()),
    )
    for word, have, want, castable in rows:
        if have - want:
            axes = quoted(sorted(have - want))
            text = f"{shown()} is {word} over {axes}, but its spec {partition!r} does not say so"
            return Failure(text, VarianceError, _SETTLE[word].format(as_axis_name(sorted(have - want)), axes))
        if missing := want - have - castable:
            text = f"{shown()} is not {word} over {quoted(sorted(missing))}, but its spec {partition!r} says so"
            axis = as_axis_name(sorted(missing))
            return Failure(text, VarianceError, _BECOME["varying" if missing & variance.varying else word].format(axis))
    frame = held_frame(x)
    if frame is not None and (untyped := set(frame.axes) & inner - variance.varying - variance.unreduced):
        text = f"{shown()} has another value on each rank over {quoted(sorted(untyped))}, which its type does not say"
        return Failure(text, VarianceError, _UNTYPED)
    return None


_UNTYPED = (
    "it comes from a block that the body was not given: x.local of a Sharded, or a value kept from another body; pass "
    "it as an argument, the Sharded with its spec in in_specs"
)


_SETTLE = {
    "unreduced": "add it up: psum(value, {0}), or psum_scatter with tiled=True; or write unreduced={{{1}}} in its spec",
    "reduced": "cast it: pcast(value, {0}, to='varying'), a copy per rank; or write reduced={{{1}}} in its spec",
}
_BECOME = {
    "unreduced": "leave unreduced= out of its spec; only a varying value can be cast to unreduced",
    "reduced": "cast it: pcast(value, {0}, to='reduced'); or leave reduced= out of its spec",
    "varying": "gather it: all_gather(value, {0}, tiled=True, to='reduced'); or leave reduced= out of its spec",
}


_EQUAL = {
    True: "make it equal on all ranks first: psum(value, {0}), pmean(value, {0}) or "
    "all_gather(value, {0}, tiled=True, to='invarying'); or name {0} in its spec",
    False: "make it equal on all ranks first: psum(value, {0}) or pmean(value, {0}); "
    "or return value[None] with the spec {1!r}",
}


def _with_axes(partition: P, axes: list[str], ndim: int) -> P:
    entries = [*partition.entries, *(None,) * (ndim - len(partition))]
    entries[0] = entry_of((*entry_axes(entries[0]), *axes))
    return partition.with_entries(entries)


def make_exit(partition: P | None, body: Body, outer_axes: frozenset[str], nested: bool, static: bool) -> Exit:
    """Return the exit of leaves with one spec, made once per plan and result tree. ``static``: unchanged Shardeds."""
    if partition is None:
        return Exit(_unknown, lambda x, _: x, _unknown if static else static_failure)
    target = variance_of_spec(partition)
    specs: Cache[Any, TensorSpec] = Cache()
    simulated = body.simulated
    share = None
    if not body.checked and (absent := body.mesh.ordered(body.axes - outer_axes - partition.mentioned)):
        share = call("leave_unchecked", body.mesh, absent, Options(factor=1 / body.mesh.axis_size(absent)))
    frame = frame_over(body.mesh, partition.axes | partition.unreduced) if simulated else None
    kind: Any = block_type(frame)
    has_frame, checked = kind is not Tensor, body.checked

    def known(x: Any) -> Any:
        """Convert the common case: a block of the right type and frame, and of a shape seen before."""
        if type(x) is not kind or body.uneven or (share is not None and (simulated or _needs_gradient(x))):
            return None
        if has_frame and (x.frame is not frame or x.uneven or x.borrowed):
            return None
        if checked and (getattr(x, ATTRIBUTE, None) or getattr(x._base, ATTRIBUTE, INVARIANT)) is not target:
            return None
        spec = specs.get((x.shape, x.dtype, x.layout))
        return None if spec is None else pair(x, spec)

    def leave(x: Any, path: Label) -> Any:
        if x is None:
            return None
        if not is_plain(x):
            x = torch.tensor(x, device=body.mesh.device)
        if body.checked:
            if get_variance(x) is not target:
                widened = target.varying - get_variance(x).varying
                x = _typed(x, target, body, outer_axes)
                x = copied(x) if widened and not nested else x
        elif share is not None and (simulated or _needs_gradient(x)):
            x = set_variance(apply(x, share), get_variance(x))
        if frame is not None and not nested:
            x = _in_frame(x, frame, body)
        uneven = is_uneven(x) if simulated else body.uneven
        if nested and (not uneven or (not body.uneven and _even_along(x, partition.axes))):
            return _in_outer_body(x, partition, body)
        if uneven:
            if body.mesh.transport == "abstract":
                raise MeshError(
                    f"{path}: blocks may differ in shape from rank to rank, and {body.mesh!r} is abstract: it has no "
                    'ranks to measure them; make sizes even, or take a mesh of transport="simulation"'
                )
            spec = spec_of_blocks(x, partition, body.mesh, path)
        else:
            spec = _even_spec(x, partition, body)
            if spec.flat and (not spec.even or spec.block_shape != tuple(x.shape)):  # the sizes in a `Flat` are claims
                spec = spec_of_blocks(x, partition, body.mesh, path)
            if not nested:
                specs[x.shape, x.dtype, x.layout] = spec
        return _in_outer_body(x, spec, body) if nested else pair(x, spec)

    def failure(x: Any, path: Label) -> Failure | None:
        return result_failure(x, partition, path, body, outer_axes)

    return Exit(_unknown if nested else known, leave, failure, partition.axes | partition.unreduced)


def _memory(x: Any) -> int | None:
    """Return the number of a block's storage, or None if it is none."""
    return storage_of(x) if is_plain(x) and x.layout is torch.strided else None


def in_memory_of(leaves: Sequence[Any], tensors: Iterable[Tensor]) -> list[int]:
    """Return the places of results that lie in the memory of some tensors. A recorder knows it of fake ones."""
    mode = recorder()
    memory = _memory if mode is None else lambda x: None if _memory(x) is None else mode.memory(x)
    memories = {memory(x) for x in tensors} - {None}
    return [i for i, x in enumerate(leaves) if memory(x) in memories]


def _needs_gradient(x: Tensor) -> bool:
    """Return whether a value may have a gradient. Under ``torch.func`` its ``requires_grad`` does not say so."""
    return x.requires_grad or bool(transforms_active())


def _unknown(x: Any, label: Any = None) -> None:
    return None


def _typed(x: Tensor, target: Variance, body: Body, outer_axes: frozenset[str]) -> Tensor:
    variance = get_variance(x)
    for axes, row in (
        (target.varying - variance.varying, "invariant_to_varying"),
        (target.unreduced & variance.varying, "varying_to_unreduced"),
    ):
        if axes:
            with DisableTorchFunction():
                x = apply(x, call(row, body.mesh, body.mesh.ordered(axes)))
    outer = (outer_axes & axes for axes in (variance.varying, variance.unreduced, variance.reduced))
    pairs = zip((target.varying, target.unreduced, target.reduced), outer, strict=True)
    setattr(x, ATTRIBUTE, Variance(*(inner_axes | kept for inner_axes, kept in pairs)))
    return x


def _in_frame(x: Tensor, frame: Frame, body: Body) -> Tensor:
    """Give a simulated result the frame of its spec, in its own memory."""
    if frame_of(x, body.mesh) is frame and not is_borrowed(x):
        return x
    with DisableTorchFunction():
        return apply(x, call("per_rank", body.mesh, frame.axes)).clone()


def _even_along(x: Tensor, axes: frozenset[str]) -> bool:
    """Return whether simulated blocks have one shape along ``axes``. They may differ along axes of enclosing bodies."""
    frame = held_frame(x)
    if frame is None:
        return False
    _, table = groups(frame, tuple(axis for axis in frame.axes if axis in axes))
    shapes = [block.shape for block in blocks_of(x)]
    return all(len({shapes[i] for i in group}) == 1 for group in table)


def _even_spec(x: Tensor, partition: P, body: Body) -> TensorSpec:
    shape = list(x.shape)
    for dim, entry in enumerate(partition.entries):
        shape[dim] = entry.size if isinstance(entry, Flat) else shape[dim] * math.prod(body.sizes(entry_axes(entry)))
    return TensorSpec(body.mesh, partition, shape, x.dtype)


def leave_as(x: Tensor, spec: TensorSpec, body: Body, path: str) -> Tensor:
    """Cast a result to a known spec, and give it the frame of the spec.

    Raises:
        VarianceError: The type of the result does not fit.
    """
    failure = result_failure(x, spec.partition, path, body, frozenset())
    if failure is not None:
        refuse(f"{body.name}: the results do not fit", [failure])
    target = variance_of_spec(spec.partition)
    if get_variance(x) is not target:
        x = _typed(x, target, body, frozenset())
    if body.mesh.transport != "simulation":
        return x
    return _in_frame(x, frame_over(body.mesh, spec.partition.axes | spec.partition.unreduced), body)


def _in_outer_body(x: Tensor, spec: TensorSpec | P, body: Body) -> Tensor:
    """Make a result whole over the inner axes, for an enclosing body. A P is enough if its blocks are even."""
    outer = get_variance(x)
    partition = spec if isinstance(spec, P) else spec.partition
    with DisableTorchFunction():
        y = from_even_blocks(x, spec, body.mesh) if isinstance(spec, P) else from_blocks(x, spec)
    return set_variance(y, outer.moved(partition.mentioned, "I") if body.checked else outer)
