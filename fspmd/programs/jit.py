"""`jit`: a function runs once and is recorded; later calls with arguments of the same kind replay the record."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any, Concatenate, Final, Generic, NamedTuple, ParamSpec, Protocol, TypeVar, overload

from fspmd.body import state
from fspmd.errors import ArgumentError, RecordError
from fspmd.first_use import begin
from fspmd.meshes.world import world_size
from fspmd.messages import described
from fspmd.pairs import is_seen, is_watched
from fspmd.programs.arguments import Names, Numbers, check_apart, chosen
from fspmd.programs.backends import Backend, maker
from fspmd.programs.capture import recording
from fspmd.programs.checked import side_by_side
from fspmd.programs.keys import guard, kinds_of, not_hashable, taken_apart, without_key
from fspmd.programs.lower import Lowered
from fspmd.programs.passes.table import Passes, passes_of
from fspmd.programs.recordable import Recordable
from fspmd.programs.records import Record, changed, replayed
from fspmd.torch_internals import top_saved_tensors_hooks, transforms_active
from fspmd.tracing import is_recording, is_traced
from fspmd.watching.watch import hears_of_records, tell

Q = ParamSpec("Q")
Q2 = ParamSpec("Q2")
R = TypeVar("R")
T = TypeVar("T")
_NEAR: Final = 4  # records of calls that differ in their leaves alone


class CacheInfo(NamedTuple):
    """Like that of ``functools.lru_cache``."""

    hits: int
    misses: int
    currsize: int


class _Decorator(Protocol):
    def __call__(self, f: Callable[Q, R], /) -> Jitted[Q, R]: ...


@overload
def jit(
    f: Callable[Q, R],
    *,
    static_argnums: Numbers = None,
    static_argnames: Names = None,
    donate_argnums: Numbers = None,
    donate_argnames: Names = None,
    passes: Passes = None,
    backend: Backend = "replay",
    check: bool = False,
) -> Jitted[Q, R]: ...
@overload
def jit(
    f: None = None,
    *,
    static_argnums: Numbers = None,
    static_argnames: Names = None,
    donate_argnums: Numbers = None,
    donate_argnames: Names = None,
    passes: Passes = None,
    backend: Backend = "replay",
    check: bool = False,
) -> _Decorator: ...
def jit(
    f: Callable[..., Any] | None = None,
    *,
    static_argnums: Numbers = None,
    static_argnames: Names = None,
    donate_argnums: Numbers = None,
    donate_argnames: Names = None,
    passes: Passes = None,
    backend: Backend = "replay",
    check: bool = False,
) -> Any:
    """``f``, recorded at its first call with arguments of one kind and replayed at later ones; also a decorator.

    The kind is the tree of the arguments, the specs of `Sharded` ones, shape and dtype of tensors and whether they have
    a gradient, the values of all else; and the grad mode, the mesh of `set_mesh`, the default dtype. Tensors that lie
    in memory otherwise than when they were recorded are copied so that they do, which takes time. A replay
    runs the functions of blocks and the collectives of ``f``, forward and backward, in their order, and
    none of the Python around them: no rules, no types, no autograd. Random functions draw anew, as they would without
    `jit`. Results are followed by autograd where arguments, or tensors that ``f`` closes over, have a gradient.

    In a body, in a ``torch.func`` transform, under `checkpoint` and `explicit` ``f`` runs as it is; within another
    jitted function it is a part of that function's record. `communication_log` is told what the record communicates.
    Processes record for themselves, without communication, and all run the record; but where shapes or the ways of
    values are only known from values (uneven blocks, `ragged_all_to_all`, `rank_map`) the first call is recorded while
    it runs, by all at once.

    Arguments that ``static_argnums`` (ints, from the end where negative) or ``static_argnames`` name are handed on as
    they are: functions, modules, whole trees. They tell records apart by type and equality, so they must be hashable.
    `explain_cache_misses` says why calls are recorded anew.

    Tensors of the arguments that ``donate_argnums`` or ``donate_argnames`` name give their memory away: a replay frees
    each after its last use, or writes a result into it, and the peak is lower for it. Whoever uses them afterwards gets
    a `DonationError`. Views of them that the caller holds stay what they are, and keep the memory. Where ``f`` runs as
    it is nothing is donated.

    ``passes`` change the record before it is replayed: names ("equal_steps", "rewrites", "dead_code", "chunked",
    "coalesce", "overlap", "recompute"), or passes with options (`Chunked`, `Coalesce`, `Overlap`, `Recompute`), in the
    order in which they run. By default the first three, which always gain, and change no numbers but by the order of
    sums: equal steps are done once, collectives in a row are one or none, what nothing needs is left out. They rely on
    it that the Python of ``f`` takes the same way on all processes; where it learns which rank it runs on, as in a
    branch on `axis_index`, and where a block is empty, they leave collectives as they are.

    ``backend`` runs what was recorded: ``"replay"`` calls step by step; ``"inductor"`` has the steps between
    collectives compiled by ``torch.compile``'s inductor, and rounds as that does; ``"cudagraphs"`` has them, on a GPU,
    captured as CUDA graphs at the first replay, of which each starts at once: arguments are copied into memory of the
    graphs and results out of it, so memory is held between calls, and a call waits for one in another thread. A
    function gets all steps as a ``torch.fx.GraphModule``, with example inputs, and gives a function of such inputs:
    once for the steps of the call, once for those of its gradients, when they are run for the first time.

    Each tensor of the arguments is one of its own within ``f``: of ``jit(f)(a, a)`` gradients are told by place.
    ``x[i]`` with a tensor ``i`` of one number, another in each call, is a copy and no view: to write into either while
    both are there is refused; ``x[i] = y`` sets it.

    ``f`` must be pure. It is recorded on tensors without values, of its arguments and of what it makes, and the record
    is then run. What it reads from outside is a constant of the record: globals, attributes, hooks, lists and numbers
    that it closes over, random numbers of Python and NumPy, seeds and states of generators. Tensors that leave it
    otherwise than as results, as in a list that it appends to, have no values. What it does from outside is not
    recorded, but is an error where it is seen: values that it asks of tensors, seeds that it sets, what other threads
    compute for it. Tensors closed over are read anew, and modules that ran are recorded anew in another mode
    (``eval()``) or with other parameters. As in a CUDA graph ``torch.cuda.is_current_stream_capturing()`` is True:
    libraries leave out branches on values.

    ``check=True`` finds functions that are not pure: each call runs ``f``, its record before ``passes`` and its record,
    on copies of the arguments, and raises `RecordError` where results, arguments, random draws or collectives differ.

    Raises:
        ArgumentError: an option names no parameter, or no backend of this machine; a static argument has no hash, or
            is a tensor; a donated one has a gradient, or is given twice.
        RecordError: what a record cannot hold: branches on values, shapes that depend on values, values that leave
            torch (``tolist()``, ``numpy()``, ``print``; there is `debug_print`), writes into tensors that ``f`` closes
            over, ``backward()`` into ``.grad`` of what was there before, seeds that are set, generators that are made
            within, lists and dicts of the arguments that change.

    ``jit(f).lower(*args)`` records and runs nothing: `Lowered` tells what the program is and costs. A `TensorSpec` may
    stand for a `Sharded`, on a mesh without ranks too (``make_mesh(..., transport="abstract")``).

    ``jit(f).cache_info()`` counts replays, recorded runs and records; ``jit(f).clear_cache()`` forgets them.

    >>> import torch
    >>> from fspmd import P, device_put, grad, make_mesh
    >>> w = device_put(torch.arange(4.0), P("x"), mesh=make_mesh((4,), ("x",)))
    >>> step = jit(lambda w: w - 0.1 * grad(lambda w: (w * w).sum())(w))
    >>> step(step(w))
    Sharded f32[4@x] on mesh(x=4)
    >>> step.cache_info()
    CacheInfo(hits=1, misses=1, currsize=1)
    >>> power = jit(lambda x, n: torch.stack([x**i for i in range(n)]), static_argnums=1)
    >>> power(torch.tensor(2.0), 4)
    tensor([1., 2., 4., 8.])
    >>> update = jit(lambda w, g: w - 0.1 * g, donate_argnums=0)
    >>> w = torch.ones(2)
    >>> w = update(w, torch.ones(2))  # the tensor that w was has no memory anymore
    """
    changes = passes_of(passes)
    if f is None:
        return functools.partial(
            jit,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            passes=changes,
            backend=backend,
            check=check,
        )
    if not callable(f):
        raise ArgumentError(f"jit takes a function, but got {described(f)}; write jit(f), not jit(f(x))")
    static = chosen(f, "static", static_argnums, static_argnames)
    donate = chosen(f, "donate", donate_argnums, donate_argnames)
    check_apart(f, static, donate)
    recordable = Recordable(f, static, donate, changes, maker(backend))
    return _Checked(recordable) if check else Jitted(recordable)


class _Records(dict[Any, Record]):
    """Those of one function, by their keys; ``hits``: calls that found theirs, ``misses``: runs that were recorded.

    ``near``: by what calls have but for the leaves of their arguments, records with what tells of leaves whether a
    record is theirs (`guard`), those that were found last in front.
    """

    __slots__ = ("hits", "misses", "near", "recordable")

    def __init__(self, recordable: Recordable) -> None:
        super().__init__()
        self.recordable = recordable
        self.near: dict[Any, list[tuple[Callable[..., bool], Record]]] = {}
        self.hits = self.misses = 0

    def called(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], around: Any, watched: bool
    ) -> Any:
        """The result of a call; ``leaves``: of its arguments."""
        try:
            kinds, values, strides = kinds_of(leaves)
        except RuntimeError as error:
            raise without_key(leaves, error) from None
        try:
            record = self.get((around, kinds))
        except TypeError:
            raise not_hashable(args, kwargs) from None
        ran = None
        if record is None or changed(record):
            if (found := self.made((around, kinds), args, kwargs)) is None:
                return self.recordable.plain(*args, **kwargs)
            record, ran = found
        else:
            self.hits += 1
        if watched:
            tell(record.moved)
        if ran is not None:
            return ran[0]
        if strides == record.strides:
            self.bring_near(record, around, leaves)
        return replayed(record, values, strides)

    def made(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Record, tuple[Any] | None] | None:
        """A record, and the result if the function ran; None where another thread records, which may wait for this."""
        if not recording.acquire(blocking=world_size() > 1):
            return None
        self.misses += 1
        try:
            self[key], _ = found = self.recordable.record(args, kwargs, self.values(), self.get(key))
        finally:
            recording.release()
        return found

    def bring_near(self, record: Record, around: Any, leaves: list[Any]) -> None:
        """Have calls with leaves like these find a record sooner."""
        closed = record.closed.tensors
        if not record.modules and (check := guard([*leaves, *closed])) is not None:
            is_alike = (lambda *leaves: check(*leaves, *closed)) if closed else check
            self.near[around] = [(is_alike, record), *self.near.get(around, ())][:_NEAR]

    def info(self) -> CacheInfo:
        """What ``cache_info`` tells."""
        return CacheInfo(self.hits, self.misses, len(self))

    def clear(self) -> None:
        """Forget all, and count from zero."""
        super().clear()
        self.near.clear()
        self.hits = self.misses = 0


class Jitted(Generic[Q, R]):
    """What `jit` makes of a function: it is called as that is, and tells what was recorded.

    It has the function's name, docstring and signature, binds as a method does, and is copied and pickled by name, as
    functions are.

    >>> import torch
    >>> double = jit(lambda x: 2 * x)
    >>> double(torch.ones(2)), double(torch.ones(2))
    (tensor([2., 2.]), tensor([2., 2.]))
    >>> double
    Jitted(<lambda>, hits=1, misses=1, currsize=1)
    >>> double.lower(torch.ones(2)).cost().flops
    0
    """

    __slots__ = ("__dict__", "__weakref__", "_function", "_has_static", "_recordable", "_records")
    __wrapped__: Callable[Q, R]

    def __init__(self, recordable: Recordable) -> None:
        if not isinstance(recordable, Recordable):
            raise ArgumentError(f"Jitted got {described(recordable)}; jit makes it of a function: jit(f)")
        begin()
        self._function: Callable[..., Any] = recordable.function
        self._has_static = bool(recordable.static)
        self._recordable = recordable
        self._records = _Records(recordable)
        functools.update_wrapper(self, recordable.function, updated=())  # as `wraps` does

    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> R:
        """The function's result: replayed, or recorded where there is no record of arguments of this kind."""
        # in a body, a transform or a checkpoint, which compares what is saved; while somebody watches or records
        if state.body is not None or transforms_active() or top_saved_tensors_hooks(True) is not None or is_traced():
            return self._function(*args, **kwargs)  # type: ignore[no-any-return]
        if watched := is_seen():
            watched = is_watched()
            if is_recording() or (watched and not hears_of_records()):
                return self._function(*args, **kwargs)  # type: ignore[no-any-return]
        positional: tuple[Any, ...] = args
        named: dict[str, Any] = kwargs
        if self._has_static:
            positional, named = self._recordable.marked(positional, named)
        leaves, around = taken_apart(positional, named)
        records = self._records
        try:
            near = records.near.get(around)
        except TypeError:
            raise not_hashable(positional, named) from None
        for is_alike, record in near or ():
            if is_alike(*leaves):
                records.hits += 1
                if watched:
                    tell(record.moved)
                values = record.run(*(leaves if record.plain else record.donation.given(leaves)))
                return record.rebuild(values)  # type: ignore[no-any-return]
        return records.called(positional, named, leaves, around, watched)  # type: ignore[no-any-return]

    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        """Record the function and run nothing. A `TensorSpec` may stand for a `Sharded`.

        Raises:
            RecordError: in a body, a transform or a function that is recorded; what a record cannot hold.
        """
        if state.body is not None or transforms_active() or is_recording():
            raise RecordError(
                f"jit({self._name}).lower(...) was called in a shard_map body, a torch.func transform or a function "
                "that is recorded; lower it outside of them, with a TensorSpec for what it is given there"
            )
        return self._recordable.lowered(args, kwargs)

    def cache_info(self) -> CacheInfo:
        """How many calls were replays, how many were recorded, and how many records there are."""
        return self._records.info()

    def clear_cache(self) -> None:
        """Forget all records, and count from zero."""
        self._records.clear()

    @property
    def _name(self) -> str:
        return str(getattr(self._function, "__name__", self._function))

    def __repr__(self) -> str:
        counts = ", ".join(f"{name}={count}" for name, count in self.cache_info()._asdict().items())
        return f"Jitted({self._name}, {counts})"

    def __reduce__(self) -> str:
        return str(getattr(self._function, "__qualname__", self._name))

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Jitted[Q, R]: ...
    @overload
    def __get__(self: Jitted[Concatenate[T, Q2], R], instance: T, owner: Any = None) -> Callable[Q2, R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a function in a class: with ``self`` before its arguments."""
        return self if instance is None else MethodType(self, instance)


class _Checked(Jitted[Q, R]):
    """The same, and each call is compared with one of the function."""

    __slots__ = ("_plain",)

    def __init__(self, recordable: Recordable) -> None:
        super().__init__(recordable)
        self._plain: Jitted[Q, R] = Jitted(replace(recordable, passes=()))

    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> R:
        found: R = side_by_side(self._name, self._function, self._plain, super().__call__, args, kwargs)
        return found
