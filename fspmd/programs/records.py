"""Records: made of a capture, replayed, checked for being out of date, and compared between processes."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import Any, Final

import optree
import torch
from torch import Tensor

from fspmd.errors import RecordError
from fspmd.inspection.agreements import agree
from fspmd.inspection.histories import History
from fspmd.inspection.watch import Communication
from fspmd.local_view.closures import captured_values
from fspmd.local_view.key_orders import check_order
from fspmd.meshes.mesh import Mesh
from fspmd.ops.traits import autocasts, without_autocast
from fspmd.programs.backward import Halves, halves_of, replay
from fspmd.programs.cache_misses import CallOfKind
from fspmd.programs.capture import Capture
from fspmd.programs.communication import reports_of
from fspmd.programs.donation import Donation, reuse
from fspmd.programs.keys import Static, guard
from fspmd.programs.program import memory_of, owner
from fspmd.programs.replay import Maker, ProgramPart, below_autograd, draws_seed, from_lists
from fspmd.programs.shortened import in_few_steps
from fspmd.remembered import wrote
from fspmd.sharded import Sharded, is_sharded, lies, shell, shell_of
from fspmd.transport import known_values
from fspmd.transport.known_values import layout_row
from fspmd.transport.local_tensor import blocks_of, held_frame, local_tensor, strides_of
from fspmd.trees import (
    filling,
    flatten_in_order,
    flatten_values,
    has_dicts,
    labels,
    leaf_paths,
    order_of,
    parameter_names,
    paths_of,
)


class Closed:
    """Tensors that a function closes over, and their kinds when it was recorded.

    Each replay reads their values. Their shapes, dtypes, devices and strides are constants of the record, which
    ``module.to(dtype)`` and ``x.data = y`` may change. A tensor without a gradient must stay without one.
    """

    __slots__ = ("_check", "_forms", "_frozen", "tensors")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)
        self._forms = list(map(_form, self.tensors))
        self._frozen = [x for x in self.tensors if _may_thaw(x)] if torch.is_grad_enabled() else []
        self._check = _check_of(self.tensors)

    def __bool__(self) -> bool:
        return bool(self.tensors)

    def holds(self) -> bool:
        """Whether their kinds are unchanged."""
        if not self.tensors or self._check(*self.tensors):
            return True
        if next(self.changes(), None) is not None:
            return False
        self._check = _check_of(self.tensors)  # a tensor may have lost its gradient, which changes no record
        return True

    def changes(self) -> Iterator[str]:
        """The changes of their kinds."""
        for x, was in zip(self.tensors, self._forms, strict=True):
            now, shape = _form(x), was["shape"][0]
            for name, value in was.items():
                if now[name] != value:
                    yield f"a tensor of shape {shape} that it closes over: {name} {value[0]} -> {now[name][0]}"
        for x in self._frozen:
            if x.requires_grad:
                yield f"a tensor of shape {tuple(x.shape)} that it closes over: requires_grad False -> True"


def _form(x: Tensor) -> dict[str, list[Any]]:
    """The kind of a tensor: facts by name, each with an entry per block."""
    blocks = blocks_of(x)
    return {
        "shape": [tuple(block.shape) for block in blocks],
        "dtype": [block.dtype for block in blocks],
        "device": [block.device for block in blocks],
        "strides": [block.stride() for block in blocks],
    }


def _check_of(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A quick test whether tensors have the kinds of these. It may return False for tensors that have them."""
    return (tensors and guard(tensors)) or _unknown


def _unknown(*tensors: Tensor) -> bool:
    return False


def _may_thaw(x: Tensor) -> bool:
    """Whether a tensor has no gradient, and may be given one by ``requires_grad_()``."""
    return x.is_leaf and not x.requires_grad and (x.is_floating_point() or x.is_complex())


@dataclass(frozen=True, slots=True)
class Record:
    """A function that replays a recorded run, and what it depends on."""

    run: Callable[..., tuple[Any, ...]]  # takes the tensors of the arguments, and returns the tensors of the result
    strides: list[Any]  # the recorded strides of the arguments
    written: tuple[int, ...]  # arguments that ``run`` writes into
    same: dict[int, int]  # results that are arguments: the place of the argument by the place of the result
    rebuild: Callable[[tuple[Any, ...]], Any]  # makes the result of its tensors
    closed_over: Closed  # tensors closed over
    modules: tuple[Any, ...]  # modules that ran, and their states
    call: CallOfKind  # the recorded call, without values
    donation: Donation  # arguments that ``run`` takes out of lists
    halves: Halves | None  # both parts of the program if autograd follows results
    moved: tuple[Communication, ...]  # the communication of a run
    unmet: list[History]  # the collectives of each group of processes, before the ranks have agreed on them
    draws_seeds: bool  # whether a run draws seeds, which all ranks must have alike, from torch's own generator
    by_values: bool  # whether the function ran with values, on all processes at once


def meet(record: Record, function: Callable[..., Any]) -> None:
    """Let the ranks compare the collectives of a new record. Raises the errors of `agree`."""
    if record.unmet:
        agree(record.unmet, f"the first replay of {getattr(function, '__name__', function)}")
        record.unmet.clear()


def replayed(record: Record, values: list[Any], strides: list[Any]) -> Any:
    """The result for ``values``, the tensors among the leaves of the arguments; ``strides``: of the values."""
    for i in record.written:
        wrote(values[i], soon=True)
    if strides != record.strides:
        return record.rebuild(relaid(record, values))
    if record.donation.places:
        values = record.donation.given(values)
    return record.rebuild(record.run(*values))


def relaid(record: Record, values: list[Tensor]) -> tuple[Any, ...]:
    """Replay with copies in place of tensors whose strides differ from the recorded strides."""
    laid: list[Any] = [
        x if strides_of(x) == s else _with_strides(x, s) for x, s in zip(values, record.strides, strict=True)
    ]
    if record.written and len(set(map(memory_of, values))) < len(values):
        raise RecordError(
            "jit cannot replay a function that writes into an argument: arguments share memory, and have other strides "
            "than in the recording; pass x.clone()"
        )
    donated = record.donation.places
    if donated:
        given = record.donation.given(values)
        for i in donated:
            laid[i] = given[i] if laid[i] is values[i] else [laid[i]]
        del given
    out = record.run(*laid)
    with torch.no_grad():
        for i in record.written:
            if i not in donated and laid[i] is not values[i]:
                values[i].copy_(laid[i])
    return in_place_of(out, {i: place for i, place in record.same.items() if place not in donated}, values)


def in_place_of(results: Sequence[Any], same: dict[int, int], values: Sequence[Tensor]) -> tuple[Any, ...]:
    """Results, in which values replace those that are arguments. ``same``: places of values by places of results."""
    return tuple(values[same[i]] if i in same else x for i, x in enumerate(results))


def _with_strides(x: Tensor, strides: Any) -> Tensor:
    """A copy of a tensor with these strides."""
    frame = held_frame(x)
    empty = _empty(x, strides) if frame is None else local_tensor(list(map(_empty, blocks_of(x), strides)), frame)
    return empty.copy_(x)


def _empty(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)


def changed(record: Record) -> bool:
    """Whether a module is in another mode or has other parts, or a tensor closed over has another kind."""
    return not record.closed_over.holds() or any(not is_as(module, was) for module, was in record.modules)


def stale(record: Record) -> tuple[str, ...]:
    """Why a record with the right key is out of date."""
    parts = "has other parameters, buffers or submodules"
    modules = [
        f"a module {type(module).__name__}: "
        + (parts if module.training == was[0] else f"training {was[0]} -> {not was[0]}")
        for module, was in record.modules
        if not is_as(module, was)
    ]
    return *record.closed_over.changes(), *modules


def record_of(
    function: Callable[..., Any], captured: Capture, call: CallOfKind, donation: Donation, make: Maker
) -> Record:
    """The record of a capture of a function."""
    program, halves = captured.program, None
    donation = with_reuse(captured, donation, make)
    steps, deferred = program.steps, program.deferred
    reports = reports_of(function, program)
    if captured.followed is None:
        inputs = program.inputs
        donated = [inputs[i] for i in donation.places]
        infers = not any(node.meta["backward"] for node in steps)
        run = make(ProgramPart(steps, inputs, program.results, program.constants, donated, reports.replayed, infers))
        if shared := _results_to_detach(captured):
            run = _detaching(run, shared)
        if any(x.requires_grad for x in (*captured.leaves, *captured.closed_over)):
            run = below_autograd(run)
    else:
        halves = halves_of(reports, program, captured.followed, captured.again, make)
        run = replay(halves)
        if captured.same:
            run = _returning_arguments(run, captured.same)
        if donation.places:
            run = from_lists(run)  # autograd keeps the tensors, so ``run`` takes them at once
    if autocasts():
        run = _as_recorded(run)
    return Record(
        run=run,
        strides=list(map(strides_of, captured.leaves)),
        written=captured.written,
        same=captured.same,
        rebuild=rebuilder(captured.out),
        closed_over=Closed(captured.closed_over),
        modules=tuple((module, state_of(module)) for module in captured.modules),
        call=call,
        donation=donation,
        halves=halves,
        moved=reports.forward,
        unmet=[*reports.histories],
        draws_seeds=any(map(draws_seed, (*steps, *deferred))),
        by_values=not captured.is_fake,
    )


def _returning_arguments(run: Callable[..., Any], same: dict[int, int]) -> Callable[..., Any]:
    """``run``, but results that are arguments are the arguments themselves; autograd functions return new tensors."""
    return lambda *values: in_place_of(run(*values), same, values)


def _results_to_detach(captured: Capture) -> tuple[int, ...]:
    """Results that share memory with an argument, a tensor closed over or another result, but are separate tensors."""
    program = captured.program
    given = dict(zip(program.inputs, captured.leaves, strict=True)) | program.constants
    shared, seen = [], dict[Any, list[Tensor]]()
    for i, (node, x) in enumerate(zip(program.results, captured.results, strict=True)):
        before = seen.setdefault(node, [given[node]] if node in given else [])
        is_other = bool(before) or owner(node) in given
        if is_other and i not in captured.same and not any(x is y for y in before):
            shared.append(i)
        before.append(x)
    return tuple(shared)


def _detaching(run: Callable[..., Any], shared: Sequence[int]) -> Callable[..., Any]:
    """``run``, with the results at the places ``shared`` as new tensors without a gradient."""
    return lambda *values: tuple([x.detach() if i in shared else x for i, x in enumerate(run(*values))])


def with_reuse(captured: Capture, donation: Donation, make: Maker) -> Donation:
    """The donation; where steps run one by one, results are written into donated arguments."""
    if donation.places and captured.followed is None and make is in_few_steps:
        return replace(donation, written=reuse(captured, donation.places))
    return donation


def _as_recorded(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` without autocast, whose casts are steps of the record."""

    def without(*values: Any) -> Any:
        with without_autocast():
            return run(*values)

    return without


def state_of(module: torch.nn.Module) -> tuple[Any, ...]:
    """The state of a module that a record depends on: its mode, parameters, buffers and submodules."""
    return module.training, *module._parameters.values(), *module._buffers.values(), *module._modules.values()


def is_as(module: torch.nn.Module, was: tuple[Any, ...]) -> bool:
    """Whether a module is in the state ``was``."""
    now = state_of(module)
    return len(now) == len(was) and all(map(operator.is_, now, was))


#: makes a result of its tensors, without checks
Rebuilder = Callable[[tuple[Any, ...]], Any]
_FIXED: Final = (type(None), bool, int, float, str)


def rebuilder(out: Any) -> Rebuilder:
    """A rebuilder of results with the structure of ``out``."""
    leaves, treedef = flatten_values(out)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    names = "".join(f"x{i}, " for i in range(len(tensors)))
    scope: dict[str, Any] = {"shell": shell}
    lines = ["def rebuild(values):", f"    ({names.replace('x', 'v')}) = values"]
    for i, x in enumerate(tensors):
        if type(x) is not Sharded:
            lines.append(f"    x{i} = v{i}")
            continue
        scope |= {f"a{i}": shell_of(x.spec, None if x.form is x.spec else lies(x)), f"s{i}": x.spec, f"f{i}": x.form}
        lines += [f"    x{i} = shell(*a{i})", f"    x{i}.block, x{i}.spec, x{i}.form = v{i}, s{i}, f{i}"]  # as `pair`
    result = _result(out, leaves, treedef, scope)
    if result is None:
        scope["filled"], result = filling(leaves, treedef), f"filled([{names}])"
    exec("\n".join([*lines, f"    return {result}"]), scope)
    rebuild: Rebuilder = scope["rebuild"]
    return rebuild


def _result(out: Any, leaves: list[Any], treedef: optree.PyTreeSpec, scope: dict[str, Any]) -> str | None:
    """The expression of a result with the structure of ``out``, if it has one; ``scope`` gets the values of its names.

    Its tensors have the names x0, x1, ... in the order of ``leaves``.
    """
    writing = _Expressions(scope)
    result = writing.expression(out)
    if result is None or not _are(writing.leaves, leaves):
        return None
    names = [f"x{i}" for i in range(sum(isinstance(x, Tensor) for x in leaves))]
    make = eval(f"lambda {', '.join(names)}: {result}", {**scope})
    made, structure = flatten_values(make(*(x for x in leaves if isinstance(x, Tensor))))
    return result if structure == treedef and _are(made, leaves) else None


def _are(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


class _Expressions:
    """The leaves of a tree in optree's order, and its expression."""

    def __init__(self, scope: dict[str, Any]) -> None:
        self.scope = scope
        self.leaves: list[Any] = []
        self.count = 0  # of tensors

    def expression(self, tree: Any) -> str | None:
        """The expression of a tree of tuples, lists, dicts and named tuples."""
        kind = type(tree)
        if kind in _FIXED or isinstance(tree, Tensor):
            self.leaves.append(tree)
            self.count += isinstance(tree, Tensor)
            return f"x{self.count - 1}" if isinstance(tree, Tensor) else self.named(tree)
        if kind is dict:
            return self.of_dict(tree)
        if kind is not list and kind is not tuple and not optree.is_namedtuple_class(kind):
            return None
        parts = [self.expression(child) for child in tree]
        if None in parts:
            return None
        inner = "".join(f"{part}, " for part in parts)
        return f"[{inner}]" if kind is list else f"({inner})" if kind is tuple else f"{self.named(kind)}({inner})"

    def of_dict(self, tree: dict[Any, Any]) -> str | None:
        """The expression of a dict, with its keys in their order. optree takes its values by sorted keys."""
        try:
            keys = sorted(tree)
        except TypeError:
            return None
        parts = {key: self.expression(tree[key]) for key in keys}
        if None in parts.values():
            return None
        return f"{{{', '.join(f'{self.named(key)}: {parts[key]}' for key in tree)}}}"

    def named(self, value: Any) -> str:
        """A name for a value."""
        name = f"c{len(self.scope)}"
        self.scope[name] = value
        return name


def tell_values(record: Record, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let `known_values.hear` hear of the arguments of a call, and of the values that its function closes over.

    It hears of them for each mesh that the record and the arguments name. All processes must have them alike.
    """
    hear = known_values.hear
    if hear is None:
        return
    name, meshes = _call_name(function), _meshes(record, args, kwargs)
    values: list[tuple[str, Any]] = []
    layouts: list[known_values.ArgumentRow] = []
    for root, tree in _trees(function, args, kwargs):
        paths = leaf_paths(tree, root)
        if paths != [root]:
            places = {path: i for i, path in enumerate(paths)}
            order = [places[path] for path in paths_of(flatten_in_order(tree, is_sharded)[1], root)]
            values.append((f"the order of keys in {root} of {name}", zlib.crc32(repr(order).encode())))
        for path, leaf in zip(paths, flatten_values(tree)[0], strict=True):
            if type(leaf) is Sharded:
                layouts.append(layout_row(path, name, leaf.spec))
            else:
                values.append((f"{path} of {name}", leaf.value if type(leaf) is Static else leaf))
    if not any(mesh.transport == "process_group" for mesh in meshes):
        return
    values += [(f"{label}, which {name} closes over", value) for label, value in captured_values(function)]
    if record.draws_seeds:
        values.append((f"the state of torch's generator before {name}", torch.get_rng_state()))
    for mesh in meshes:
        known_values.hear_layouts(mesh, name, tuple(layouts))
        for label, value in values:
            hear(mesh, label, value)


def check_orders(record: Record, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `LockstepError` if another rank has made a record of this call with keys of dicts in another order."""
    treedef = flatten_values((*args, *(tree for _, tree in sorted(kwargs.items()))))[1]
    if has_dicts(treedef):
        names = labels(treedef, [name for name, _ in _trees(function, args, kwargs)])
        check_order(_meshes(record, args, kwargs), _call_name(function), function, order_of(treedef), names)


def _call_name(function: Callable[..., Any]) -> str:
    return f"jit({getattr(function, '__name__', type(function).__name__)})"


def _meshes(record: Record, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Mesh, None]:
    """The meshes of a record and of its arguments, in one order on all ranks."""
    leaves = flatten_values((args, kwargs))[0]
    return dict.fromkeys((*(each.mesh for each in record.moved), *(x.spec.mesh for x in leaves if type(x) is Sharded)))


def _trees(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """The arguments with their names."""
    return [*zip(parameter_names(function, len(args)), args, strict=True), *sorted(kwargs.items())]
