"""`jit`: records a function once for arguments of one kind, and runs the record in every call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any, Concatenate, Final, Generic, NamedTuple, ParamSpec, Protocol, TypeVar, overload

import torch

from fspmd import pairs
from fspmd.body import state
from fspmd.cache import Cache
from fspmd.errors import ArgumentError, RecordError
from fspmd.inspection.replays import leave_out
from fspmd.inspection.watch import hears_of_records, tell
from fspmd.local_view.modes import leave_to_python
from fspmd.meshes.mesh import ambient_mesh
from fspmd.meshes.world import world_size
from fspmd.messages import described
from fspmd.programs.backends import Backend, maker
from fspmd.programs.capture import recording
from fspmd.programs.checked import side_by_side
from fspmd.programs.donation import Taker
from fspmd.programs.keys import (
    Names,
    Numbers,
    Surroundings,
    autocast_is_on,
    check_static_not_donated,
    chosen,
    flatten_call,
    guard,
    identity,
    not_hashable,
    shared_strides,
    surroundings,
    without_key,
)
from fspmd.programs.lower import Lowered
from fspmd.programs.passes.table import Passes, passes_of
from fspmd.programs.readers import Reader, picker, reader
from fspmd.programs.recordable import Recordable
from fspmd.programs.records import Record, changed, check_orders, meet, replayed, tell_values
from fspmd.torch_internals import (
    count_dispatch_modes,
    function_mode_is_on,
    top_saved_tensors_hooks,
    transforms_active,
)
from fspmd.tracing import is_recording, is_traced
from fspmd.transport.local_tensor import kinds_of
from fspmd.wrappers import begin

Q = ParamSpec("Q")
Q2 = ParamSpec("Q2")
R = TypeVar("R")
T = TypeVar("T")
_grad_enabled = torch.is_grad_enabled
_default_dtype = torch.get_default_dtype
_NEAR: Final = 4  # the most records that are tried by their guards before a key is made


class JitCacheInfo(NamedTuple):
    """Counts of a cache, with the names that ``functools.lru_cache`` uses."""

    hits: int
    misses: int
    currsize: int


class _JitDecorator(Protocol):
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
) -> _JitDecorator: ...
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
    """Record ``f`` at its first call with arguments of one kind, and replay the record at later calls.

    Also a decorator. A replay runs the functions on blocks and the collectives of ``f``, forward and backward, in
    their order. It runs none of the Python around them: no rules, no types, no autograd. Random functions draw anew in
    each call. Results have gradients if arguments, or tensors that ``f`` closes over, require them.

    **Kinds.** The kind of a call consists of the tree of the arguments; the spec of each `Sharded`; the shape, dtype,
    device and ``requires_grad`` of each tensor; the value of every other argument; the grad mode, the mesh of
    `set_mesh` and the default dtype. Strides are no part of the kind, unless elements of a tensor share memory
    (``x.expand(...)``). A tensor whose strides differ from the recorded strides is copied, which takes time.
    `explain_cache_misses` says why a call is recorded anew.

    **Purity.** ``f`` must be pure. It is recorded on tensors without values, and then the record runs. Everything that
    ``f`` reads from outside is a constant of the record: globals, attributes, hooks, lists and numbers that it closes
    over, random numbers of Python and NumPy, seeds and states of generators. Effects on the outside are not recorded.
    A tensor that leaves ``f`` in another way than as a result, such as in a list that ``f`` appends to, has no values.
    fspmd raises an error for the effects that it sees: ``f`` reads the value of a tensor, sets a seed, or uses tensors
    that another thread computes. Tensors that ``f`` closes over are read anew in each call. If a module that ``f``
    calls has another mode (``eval()``) or other parameters than before, ``f`` is recorded anew. While ``f`` is
    recorded, ``torch.cuda.is_current_stream_capturing()`` is True, as in a CUDA graph, so that libraries leave out
    branches on values.

    Within ``f``, each tensor of the arguments is a separate tensor: ``jit(f)(a, a)`` has two gradients. If ``i`` is a
    tensor of one number, ``x[i]`` is a copy and not a view, since ``i`` may differ in each call. Writing into ``x`` or
    ``x[i]`` while both are in use raises an error; ``x[i] = y`` is allowed.

    **Where it applies.** In a body, in a ``torch.func`` transform, under `checkpoint` and under `explicit`, ``f`` runs
    unrecorded. Within another jitted function, ``f`` becomes a part of that function's record. `communication_log` logs
    the communication of the record. Each process records alone. Before the first replay the ranks of each group compare
    the collectives of the record, through the store of torch.distributed: the row of the pair table, the axes, the
    options, the shape, the dtype and the user's line, forward and backward. They do so once for equal collectives, and
    a process that lacks a record makes it while others replay theirs. A replay compares nothing, but each rank keeps
    which records it has replayed. Ranks compare that where they talk: in `check_replicas`, `save`, `load`, `barrier`,
    `assert_equal`, before a new record, after each 2,048 replays of a group, and when a rank waits for long. So ranks
    that replay records in different orders are told of it, and of the first replay that differs; what was computed
    since may be wrong. `debug` finds it in seconds, and finds collectives outside of records, too.

    Some functions need values: `rank_map`, and functions of blocks whose sizes are measured. Such a function is
    recorded while it runs once on copies of the arguments, on all processes at once.

    Args:
        static_argnums: positions of arguments that ``f`` gets unchanged, such as functions, modules and whole trees;
            negative positions count from the end. Static arguments must be hashable: calls whose static arguments
            differ in type or value have separate records.
        static_argnames: names of static arguments.
        donate_argnums: positions of arguments whose memory a replay may reuse. A replay frees each tensor after its
            last use, or writes a result into it, which lowers the peak. A later use of a donated tensor raises
            `DonationError`. Views of it that the caller holds keep their memory and values. Nothing is donated where
            ``f`` runs unrecorded.
        donate_argnames: names of donated arguments.
        passes: the changes to a record before it is replayed, in order. Each is a name ("equal_steps", "rewrites",
            "dead_code", "chunked", "coalesce", "overlap", "recompute") or a pass with options (`Chunked`, `Coalesce`,
            `Overlap`, `Recompute`). The default is the first three: equal steps run once, collectives in a row become
            one or none, unneeded steps go. They never make a record slower, and change numbers only by the order of
            sums. They rely on the Python of ``f`` making the same choices on all processes. They leave collectives
            unchanged if ``f`` learns its rank, as in a branch on `axis_index`, or if a block is empty.
        backend: ``"replay"`` calls step by step. ``"inductor"`` compiles the steps between collectives with the
            inductor of ``torch.compile``, and rounds as inductor does. ``"cudagraphs"`` captures these steps on a GPU
            as CUDA graphs at the first replay: arguments are copied into the memory of the graphs and results out of
            it, the memory is held between calls, and a call waits for a call in another thread. A function as a backend
            gets all steps as a ``torch.fx.GraphModule`` and example inputs, and returns a function of such inputs. It
            is called once for the steps of the call and once for the steps of its gradients, when they first run.
        check: whether to look for impurity. Each call runs ``f``, its record before ``passes`` and its record after
            them, on copies of the arguments, and raises `RecordError` if results, arguments, random draws or
            collectives differ.

    Raises:
        ArgumentError: an option names no parameter, or a backend that this machine lacks; a static argument has no
            hash, or is a tensor; a donated argument has a gradient, or is given twice.
        RecordError: ``f`` does something that a record cannot hold: it branches on values, has shapes that depend on
            values, takes values out of torch (``tolist()``, ``numpy()``, ``print``; use `debug_print`), writes into
            tensors that it closes over, calls ``backward()`` into ``.grad`` of tensors from outside, sets seeds, makes
            generators, or changes lists and dicts of the arguments.
        LockstepError: ranks have recorded different collectives, have replayed records in different orders, or wait
            elsewhere for a rank that has recorded some.
        PeerError, DeadlineError: another rank has failed, or does not come within the time limit of the process group.

    ``jit(f).lower(*args)`` records and runs nothing. Its result, a `Lowered`, shows the program and its cost. A
    `TensorSpec` may stand for a `Sharded`, also on a mesh without ranks (``make_mesh(..., transport="abstract")``).

    ``jit(f).cache_info()`` counts replays, recorded runs and records. ``jit(f).clear_cache()`` forgets them.

    >>> import torch
    >>> from fspmd import P, device_put, grad, make_mesh
    >>> w = device_put(torch.arange(4.0), P("x"), mesh=make_mesh((4,), ("x",)))
    >>> step = jit(lambda w: w - 0.1 * grad(lambda w: (w * w).sum())(w))
    >>> step(step(w))
    Sharded f32[4@x] on mesh(x=4)
    >>> step.cache_info()
    JitCacheInfo(hits=1, misses=1, currsize=1)
    >>> power = jit(lambda x, n: torch.stack([x**i for i in range(n)]), static_argnums=1)
    >>> power(torch.tensor(2.0), 4)
    tensor([1., 2., 4., 8.])
    >>> update = jit(lambda w, g: w - 0.1 * g, donate_argnums=0)
    >>> w = torch.ones(2)
    >>> w = update(w, torch.ones(2))  # the old tensor w has no memory anymore
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
    check_static_not_donated(f, static, donate)
    recordable = Recordable(f, static, donate, changes, maker(backend))
    return _Checked(recordable) if check else Jitted(recordable)


class _Near(NamedTuple):
    """A record, and how to know calls like the one that found it."""

    read: Reader
    is_alike: Callable[..., bool]  # the `guard` of the leaves
    record: Record
    take: Taker | None  # of the donated leaves, if any
    around: Surroundings


class _Records(Cache[Any, Record]):
    """The records of one function by their keys. ``near`` has the latest."""

    __slots__ = ("_known", "near", "recordable")

    def __init__(self, recordable: Recordable) -> None:
        super().__init__()
        self.recordable = recordable
        self.near: list[_Near] = []
        self._known: Cache[Any, _Near] = Cache()  # by the keys of records: those that were near once

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any], around: Surroundings, watched: bool) -> Any:
        """The result of a call, by a record that is found by its key, or made.

        ``watched``: whether watchers hear of the communication of the record.
        """
        leaves, structure = flatten_call(args, kwargs)
        try:
            kinds, values, strides = kinds_of(leaves, identity)
        except RuntimeError as error:
            raise without_key(leaves, error) from None
        key: tuple[Any, ...] = (*structure, *around), kinds
        try:
            record = self.get(key)
        except TypeError:
            raise not_hashable(args, kwargs) from None
        if record is None or (strides != record.strides and not record.by_values):
            key = *key, *shared_strides(values)
            record = self.get(key)
        if record is None or changed(record):
            record = self.made(key, args, kwargs, around)
            if record is None:
                return self.recordable.plain(*args, **kwargs)
        else:
            self.hits += 1
        if watched:
            tell_values(record, self.recordable.function, args, kwargs)
        meet(record, self.recordable.function)
        if watched:
            tell(record.moved)
        if strides == record.strides:
            self.bring_near(key, around, record, leaves, args, kwargs)
        return replayed(record, values, strides)

    def made(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], around: Surroundings) -> Record | None:
        """A new record; None if another thread is recording, since that thread may wait for this thread."""
        if not recording.acquire(blocking=False) and (world_size() == 1 or not recording.acquire()):
            return None
        self.misses += 1
        try:
            record = self.recordable.record(args, kwargs, around, self.values(), self.get(key))
            check_orders(record, self.recordable.function, args, kwargs)
            self[key[:2] if record.by_values else key] = record
        finally:
            recording.release()
        return record

    def bring_near(
        self,
        key: Any,
        around: Surroundings,
        record: Record,
        leaves: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Let calls with similar leaves and equal `surroundings` find the record without a key."""
        closed_over = record.closed_over.tensors
        before = self.near
        near = self._known.get(key)
        if near is None or near.record is not record or any(near is x for x in before):  # that did not know this call
            if record.modules or (check := guard([*leaves, *closed_over])) is None:
                return
            is_alike = (lambda *leaves: check(*leaves, *closed_over)) if closed_over else check
            read, donation = reader(args, kwargs, leaves), record.donation
            places = donation.places
            take = donation.taker(picker(args, kwargs, leaves, places), leaves) if places else None
            near = self._known[key] = _Near(read, is_alike, record, take, around)
        self.near = [near, *(x for x in before if x.record is not record)][:_NEAR]

    def counts(self) -> JitCacheInfo:
        """The counts for ``cache_info``."""
        return JitCacheInfo(self.hits, self.misses, len(self))

    def clear(self) -> None:
        """Forget all records, and count from zero."""
        super().clear()
        self.near = []
        self._known.clear()


class Jitted(Generic[Q, R]):
    """A function under `jit`. It is called like the function, and gives information about its records.

    It has the function's name, docstring and signature. It binds like a method, and is copied and pickled by name.

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
            raise ArgumentError(f"Jitted got {described(recordable)}; write jit(f)")
        begin()
        self._function: Callable[..., Any] = recordable.function
        self._has_static = bool(recordable.static)
        self._recordable = recordable
        self._records = _Records(recordable)
        functools.update_wrapper(self, recordable.function, updated=())  # as `wraps` does

    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> R:
        """The function's result, by a record for arguments of this kind. The first call makes the record."""
        # a body, a checkpoint (which compares saved tensors), a transform, a trace and a watcher need the function
        if state.body is not None or top_saved_tensors_hooks(True) is not None:
            return self._function(*args, **kwargs)  # type: ignore[no-any-return]
        grad, dtype, mesh = _grad_enabled(), _default_dtype(), ambient_mesh()
        more: tuple[Any, ...] = ()
        watched = False
        if pairs.seen or count_dispatch_modes() or function_mode_is_on() or autocast_is_on() or autocast_is_on("cpu"):
            if is_traced() or is_recording():
                return self._function(*args, **kwargs)  # type: ignore[no-any-return]
            watched = pairs.is_watched()
            if watched and not hears_of_records():
                leave_out()
                return self._function(*args, **kwargs)  # type: ignore[no-any-return]
            more = surroundings()[-1]
        positional: tuple[Any, ...] = args
        named: dict[str, Any] = kwargs
        if self._has_static:
            positional, named = self._recordable.marked(positional, named)
        records = self._records
        for read, is_alike, record, take, (its_grad, its_dtype, its_mesh, its_more) in records.near:
            if its_grad is grad and its_dtype is dtype and its_mesh is mesh and its_more == more:
                leaves = read(positional, named)
                if leaves is not None and is_alike(*leaves):  # which fails in transforms, and in torch.jit.trace
                    records.hits += 1
                    if watched:
                        tell_values(record, self._recordable.function, positional, named)
                        tell(record.moved)
                    if take is not None:
                        take(positional, named, leaves)
                    return record.rebuild(record.run(*leaves))  # type: ignore[no-any-return]
        if transforms_active() or is_traced():
            return self._function(*args, **kwargs)  # type: ignore[no-any-return]
        return records.called(positional, named, (grad, dtype, mesh, more), watched)  # type: ignore[no-any-return]

    def lower(self, /, *args: Any, **kwargs: Any) -> Lowered:
        """Record the function and run nothing. A `TensorSpec` may stand for a `Sharded`.

        Raises:
            RecordError: the call is in a body, a transform or a recording; or the function cannot be recorded.
        """
        if state.body is not None or transforms_active() or is_recording():
            raise RecordError(
                f"jit({self._name}).lower(...) was called in a shard_map body, a torch.func transform or a function "
                "that is recorded; call it outside of them, with a TensorSpec for each argument"
            )
        return self._recordable.lowered(args, kwargs)

    def cache_info(self) -> JitCacheInfo:
        """The numbers of replays, of recorded calls and of records."""
        return self._records.counts()

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
        """Bind to an instance, as a function in a class does."""
        return self if instance is None else MethodType(self, instance)


leave_to_python(Jitted.__call__, "what jit runs is compiled by jit(f, backend='inductor')")


class _Checked(Jitted[Q, R]):
    """A jitted function that compares each of its calls with a call of the function."""

    __slots__ = ("_plain",)

    def __init__(self, recordable: Recordable) -> None:
        super().__init__(recordable)
        self._plain: Jitted[Q, R] = Jitted(replace(recordable, passes=()))

    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> R:
        result: R = side_by_side(self._name, self._function, self._plain, super().__call__, args, kwargs)
        return result
