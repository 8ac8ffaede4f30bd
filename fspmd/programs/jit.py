"""`jit`: a function runs once and is recorded; later calls with arguments of the same kind replay the record."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from fspmd.body import state
from fspmd.errors import ArgumentError, RecordError
from fspmd.meshes.mesh import current_mesh
from fspmd.messages import described
from fspmd.pairs import is_watched
from fspmd.programs.backward import followed, halves_of, replay
from fspmd.programs.capture import capture
from fspmd.programs.record import is_as, memory_of
from fspmd.programs.replay import below_autograd, compiled
from fspmd.sharded import Sharded
from fspmd.spec import TensorSpec
from fspmd.transport.local_tensor import LocalTensor
from fspmd.trees import flatten, flatten_args

_grad_enabled = torch.is_grad_enabled
_strided = torch.strided
_default_dtype = torch.get_default_dtype
_transforms_active = torch._C._are_functorch_transforms_active
_any_autocast = torch._C._is_any_autocast_enabled
_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def _autocasts() -> tuple[Any, ...]:
    """Whether torch computes in other dtypes than it is asked to, and in which."""
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))


_recording = threading.Lock()


class CacheInfo(NamedTuple):
    """Like that of ``functools.lru_cache``."""

    hits: int
    misses: int
    currsize: int


@dataclass(frozen=True, slots=True)
class Record:
    """One recorded run."""

    run: Callable[..., tuple[Any, ...]]  # of the tensors among the leaves of the arguments: those of the result
    strides: list[Any]  # of those when they were recorded
    written: tuple[int, ...]  # those that it writes into
    rebuild: Callable[[tuple[Any, ...]], Any]  # the result, of its tensors
    frozen: tuple[Tensor, ...]  # tensors closed over that had no gradient
    modules: tuple[Any, ...]  # modules that ran, and how they were


@overload
def jit(f: Callable[..., Any]) -> Callable[..., Any]: ...
@overload
def jit(f: None = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
def jit(f: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """``f``, recorded at its first call with arguments of one kind and replayed at later ones; also a decorator.

    The kind is the tree of the arguments, the specs of `Sharded` ones, shape, strides and dtype of tensors and whether
    they have a gradient, the values of all else; and the grad mode, the mesh of `set_mesh`, the default dtype. A replay
    runs the functions of blocks and the collectives that the first call ran, forward and backward, in their order, and
    none of the Python around them: no rules, no types, no autograd. Random functions draw anew, as they would without
    `jit`. Results are followed by autograd where arguments, or tensors that ``f`` closes over, have a gradient.

    In a body, in a ``torch.func`` transform, under `checkpoint` and while communication is watched ``f`` runs as it is;
    within another jitted function it is a part of that function's record.

    Of Python's state ``f`` is recorded as it finds it: globals, attributes, lists and numbers that it closes over are
    constants. Tensors closed over are read anew, and modules that ran are recorded anew in another mode (``eval()``) or
    with other parameters.

    Raises:
        RecordError: what a record cannot hold: branches on values, shapes that depend on values, values that leave
            torch (``tolist()``, ``numpy()``, ``print``), writes into tensors that ``f`` closes over, ``backward()``
            into ``.grad`` of what was there before, seeds that are set, generators that are no arguments, lists and
            dicts of the arguments that change.

    ``jit(f).cache_info()`` counts replays, recorded runs and records; ``jit(f).clear_cache()`` forgets them.

    >>> from fspmd import P, device_put, grad, make_mesh
    >>> w = device_put(torch.arange(4.0), P("x"), mesh=make_mesh((4,), ("x",)))
    >>> step = jit(lambda w: w - 0.1 * grad(lambda w: (w * w).sum())(w))
    >>> step(step(w))
    Sharded f32[4@x] on mesh(x=4)
    >>> step.cache_info()
    CacheInfo(hits=1, misses=1, currsize=1)
    """
    if f is None:
        return jit
    if not callable(f):
        raise ArgumentError(f"jit takes a function, but got {described(f)}; write jit(f), not jit(f(x))")
    function = f
    records: dict[Any, Record] = {}
    hits = misses = 0

    @functools.wraps(f)
    def jitted(*args: Any, **kwargs: Any) -> Any:
        nonlocal hits, misses
        # in a body, a transform or a checkpoint, which compares what is saved; while somebody watches or records
        if state.body is not None or _transforms_active() or is_watched() or _saved_tensor_hooks(True) is not None:
            return function(*args, **kwargs)
        leaves, structure = flatten((args, kwargs)) if kwargs else flatten_args(args)
        key = [structure, _grad_enabled(), _default_dtype(), _autocasts() if _any_autocast() else (), current_mesh()]
        if kwargs:
            key.append(dict)  # the structure is of a dict, too
        values, strides = [], []
        for leaf in leaves:
            if type(leaf) is Tensor:
                key += leaf.dtype, leaf.shape, leaf.requires_grad, leaf.device
                if leaf.is_conj() or leaf.is_neg() or leaf.layout is not _strided:
                    key += leaf.is_conj(), leaf.is_neg(), leaf.layout
                values.append(leaf)
                strides.append(leaf.stride())
            else:
                key.append(_kind(leaf))
                if isinstance(leaf, Tensor):
                    values.append(leaf)
                    strides.append(_strides(leaf))
        try:
            record = records.get(known := tuple(key))
        except TypeError:
            raise _not_hashable(leaves) from None
        if record is None or (record.frozen and _thawed(record)) or (record.modules and _changed(record)):
            if not _recording.acquire(blocking=False):
                return function(*args, **kwargs)  # another thread records
            misses += 1
            try:
                records[known], out = _recorded(function, args, kwargs)
            finally:
                _recording.release()
            return out
        hits += 1
        if strides != record.strides:
            return record.rebuild(_relaid(record, values))
        return record.rebuild(record.run(*values))

    def clear_cache() -> None:
        nonlocal hits, misses
        records.clear()
        hits = misses = 0

    setattr(jitted, "cache_info", lambda: CacheInfo(hits, misses, len(records)))  # noqa: B010 (not known to type checkers)
    setattr(jitted, "clear_cache", clear_cache)  # noqa: B010
    return jitted


def _kind(leaf: Any) -> Any:
    """What a leaf that is no plain tensor is in a key."""
    if type(leaf) is LocalTensor:
        shapes = tuple(shard.shape for shard in (leaf.shards if leaf.uneven else leaf.shards[:1]))
        return leaf.dtype, leaf.frame, shapes, leaf.requires_grad, leaf.device
    if isinstance(leaf, Tensor):
        return type(leaf), leaf.dtype, leaf.shape, leaf.requires_grad, leaf.device
    return type(leaf), repr(leaf) if type(leaf) in (float, complex) else leaf  # of two zeros, and of nan


def _strides(x: Tensor) -> Any:
    """How a tensor lies in memory; this is no part of a key, since it may differ from process to process."""
    return x.stride() if type(x) is not LocalTensor else [shard.stride() for shard in x.shards]


def _relaid(record: Record, values: list[Tensor]) -> tuple[Any, ...]:
    """Replay on tensors that lie in memory as they did when they were recorded."""
    laid = [x if _strides(x) == s else _lying(x, s) for x, s in zip(values, record.strides, strict=True)]
    if record.written and len(set(map(memory_of, values))) < len(values):
        raise RecordError(
            "jit cannot replay a function that writes into an argument which shares memory with another, where they "
            "lie in memory otherwise than when it was recorded; pass x.clone()"
        )
    out = record.run(*laid)
    with torch.no_grad():
        for i in record.written:
            if laid[i] is not values[i]:
                values[i].copy_(laid[i])
    return out


def _lying(x: Tensor, strides: Any) -> Tensor:
    if type(x) is LocalTensor:
        empty: Tensor = LocalTensor(list(map(_empty, x.shards, strides)), x.frame)
    else:
        empty = _empty(x, strides)
    return empty.copy_(x)


def _empty(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)


def _not_hashable(leaves: list[Any]) -> ArgumentError:
    for leaf in leaves:
        try:
            hash(leaf)
        except TypeError:
            return ArgumentError(
                f"jit got {described(leaf)} for an argument; arguments that are no tensors tell records apart, so they "
                "must be hashable: pass tensors, numbers, strings, or trees of those"
            )
    return ArgumentError("jit got an argument that has no hash; pass tensors, numbers, strings, or trees of those")


def _thawed(record: Record) -> bool:
    """Whether a tensor that had no gradient when it was closed over has one now."""
    return any(x.requires_grad for x in record.frozen)


def _changed(record: Record) -> bool:
    """Whether a module is in another mode, or has other parameters, than when it was recorded."""
    return any(not is_as(module, was) for module, was in record.modules)


def _recorded(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Record, Any]:
    """Run a function and record it; the record, and the result."""
    found = capture(function, args, kwargs)
    program, halves = found.program, None
    if found.followed is None:
        run = below_autograd(compiled(program.steps, program.inputs, program.results, program.constants))
    else:
        halves = halves_of(program, found.followed, found.again)
        run = replay(halves)
    if _autocasts():
        run = _as_recorded(run)
    frozen = tuple(x for x in found.closed if _may_thaw(x)) if _grad_enabled() else ()
    record = Record(run, list(map(_strides, found.leaves)), found.written, _rebuilder(found.out), frozen, found.modules)
    if halves is None:
        return record, found.out
    results = followed(halves, found.drawn, found.given, found.leaves, found.results)
    return record, record.rebuild(tuple(results))


def _as_recorded(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same where autocast is on: casts are steps of the record, and no others are wanted."""
    kinds = [kind for kind, _ in _autocasts()]

    def without(*values: Any) -> Any:
        with ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return run(*values)

    return without


def _may_thaw(x: Tensor) -> bool:
    return x.is_leaf and not x.requires_grad and (x.is_floating_point() or x.is_complex())


def _pair(local: Tensor, spec: TensorSpec) -> Sharded:
    """A `Sharded` without the checks of its constructor."""
    made = object.__new__(Sharded)
    made.local, made.spec = local, spec
    return made


def _rebuilder(out: Any) -> Callable[[tuple[Any, ...]], Any]:
    """What makes a result like ``out`` of its tensors."""
    if isinstance(out, Tensor):
        return lambda values: values[0]
    if type(out) is Sharded:
        spec = out.spec
        return lambda values: _pair(values[0], spec)
    if type(out) is tuple and all(type(x) is Sharded for x in out):
        specs = tuple(x.spec for x in out)
        return lambda values: tuple(map(_pair, values, specs))
    leaves, treedef = flatten(out)
    kept = [None if isinstance(x, Tensor) else x for x in leaves]
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]

    def rebuild(values: tuple[Any, ...]) -> Any:
        full = list(kept)
        for i, x in zip(places, values, strict=True):
            full[i] = x
        return treedef.unflatten(full)

    return rebuild
