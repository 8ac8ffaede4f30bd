"""`jit`: a function is recorded once for arguments of one kind; every call runs the record."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any, Concatenate, Final, Generic, NamedTuple, ParamSpec, Protocol, TypeVar, overload

from fspmd.body import state
from fspmd.errors import ArgumentError, RecordError
from fspmd.first_use import begin
from fspmd.inspection.watch import hears_of_records, tell
from fspmd.meshes.world import world_size
from fspmd.messages import described
from fspmd.pairs import is_seen, is_watched
from fspmd.programs.backends import Backend, maker
from fspmd.programs.capture import recording
from fspmd.programs.checked import side_by_side
from fspmd.programs.keys import flatten_call, guard, kinds_of, not_hashable, without_key
from fspmd.programs.lower import Lowered
from fspmd.programs.options import Names, Numbers, check_static_not_donated, chosen
from fspmd.programs.passes.table import Passes, passes_of
from fspmd.programs.recordable import Recordable
from fspmd.programs.records import Record, changed, replayed
from fspmd.torch_internals import top_saved_tensors_hooks, transforms_active
from fspmd.tracing import is_recording, is_traced

Q = ParamSpec("Q")
Q2 = ParamSpec("Q2")
R = TypeVar("R")
T = TypeVar("T")
_NEAR: Final = 4  # records that are tried one after another before a key is made


class JitCacheInfo(NamedTuple):
    """Counts of a cache, as ``functools.lru_cache`` has them."""

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
    """``f``, recorded at its first call with arguments of one kind, and replayed at later ones; also a decorator.

    A replay runs the functions of blocks and the collectives of ``f``, forward and backward, in their order. It runs
    none of the Python around them: no rules, no types, no autograd. Random functions draw anew in each call. Autograd
    follows the results where arguments, or tensors that ``f`` closes over, have a gradient.

    **Kinds.** A kind is the tree of the arguments; the spec of each `Sharded`; shape, dtype and device of each tensor,
    and whether it has a gradient; the value of all else; and the grad mode, the mesh of `set_mesh` and the default
    dtype. Strides are no part of it: tensors with other strides than the recorded ones are copied, which takes time.
    `explain_cache_misses` says why a call is recorded anew.

    **Purity.** ``f`` must be pure. It is recorded on tensors without values, and the record is then run. Whatever it
    reads from outside is a constant of the record: globals, attributes, hooks, lists and numbers that it closes over,
    random numbers of Python and NumPy, seeds and states of generators. Tensors that leave it otherwise than as results,
    as in a list that it appends to, have no values. Effects on the outside are not recorded. They are errors where they
    are seen: values that it asks of tensors, seeds that it sets, tensors that other threads compute for it. Tensors
    that it closes over are read anew in each call; a module that ran is recorded anew in another mode (``eval()``) or
    with other parameters. As in a CUDA graph, ``torch.cuda.is_current_stream_capturing()`` is True: libraries then
    leave out branches on values.

    Each tensor of the arguments is a tensor of its own within ``f``: gradients of ``jit(f)(a, a)`` are told by place.
    ``x[i]`` with a tensor ``i`` of one number, another in each call, is a copy and no view. Writing into either while
    both are there is refused; ``x[i] = y`` sets it.

    **Where it applies.** In a body, in a ``torch.func`` transform, under `checkpoint` and `explicit`, ``f`` runs as it
    is. Within another jitted function it is a part of that function's record. `communication_log` is told of the
    communication of the record. Processes record without communication, each for itself, and all run the record. Some
    functions need values: `ragged_all_to_all` with sizes that were computed, `rank_map`, blocks whose sizes are
    measured. They run once on copies of the arguments to be recorded, on all processes at once.

    Args:
        static_argnums: positions of arguments that are handed on as they are, such as functions, modules and whole
            trees; negative ones count from the end. They tell records apart by type and equality, so they need a hash.
        static_argnames: the same by name.
        donate_argnums: positions of arguments whose tensors give their memory away. A replay frees each after its last
            use, or writes a result into it, so the peak is lower. Using one afterwards raises `DonationError`. Views of
            it that the caller holds keep the memory and their values. Nothing is donated where ``f`` runs as it is.
        donate_argnames: the same by name.
        passes: the changes to a record before it is replayed, in order: names ("equal_steps", "rewrites", "dead_code",
            "chunked", "coalesce", "overlap", "recompute") or passes with options (`Chunked`, `Coalesce`, `Overlap`,
            `Recompute`). The first three are the default. They always gain, and change no numbers but by the order of
            sums: equal steps run once, collectives in a row become one or none, unneeded steps go. They rely on the
            Python of ``f`` taking the same way on all processes. Where it learns which rank it runs on, as in a branch
            on `axis_index`, and where a block is empty, they leave collectives as they are.
        backend: ``"replay"`` calls step by step. ``"inductor"`` compiles the steps between collectives by the inductor
            of ``torch.compile``, and rounds as that does. ``"cudagraphs"`` captures them on a GPU as CUDA graphs at the
            first replay: arguments are copied into memory of the graphs and results out of it, memory is held between
            calls, and a call waits for one in another thread. A function gets all steps as a ``torch.fx.GraphModule``
            and example inputs, and gives a function of such inputs. It is called once for the steps of the call and
            once for those of its gradients, each when they run for the first time.
        check: find functions that are not pure. Each call runs ``f``, its record before ``passes`` and its record, on
            copies of the arguments, and raises `RecordError` where results, arguments, random draws or collectives
            differ.

    Raises:
        ArgumentError: an option names no parameter, or no backend of this machine; a static argument has no hash, or
            is a tensor; a donated one has a gradient, or is given twice.
        RecordError: ``f`` does something that a record cannot hold: it branches on values, has shapes that depend on
            values, takes values out of torch (``tolist()``, ``numpy()``, ``print``; there is `debug_print`), writes
            into tensors that it closes over, calls ``backward()`` into ``.grad`` of tensors that were there before,
            sets seeds, makes generators, or changes lists and dicts of the arguments.

    ``jit(f).lower(*args)`` records and runs nothing: `Lowered` shows the program and its cost. A `TensorSpec` may
    stand for a `Sharded`, on a mesh without ranks too (``make_mesh(..., transport="abstract")``).

    ``jit(f).cache_info()`` counts replays, recorded runs and records; ``jit(f).clear_cache()`` forgets them.

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
    check_static_not_donated(f, static, donate)
    recordable = Recordable(f, static, donate, changes, maker(backend))
    return _Checked(recordable) if check else Jitted(recordable)


class _Records(dict[Any, Record]):
    """The records of one function by their keys, and how many calls found theirs (``hits``) or not (``misses``).

    ``near`` finds some of them without a key: it has, for all of a key but the leaves, records with a `guard` of the
    leaves, the latest first.
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
        """The result of a call whose arguments have these leaves."""
        try:
            kinds, values, strides = kinds_of(leaves)
        except RuntimeError as error:
            raise without_key(leaves, error) from None
        try:
            record = self.get((around, kinds))
        except TypeError:
            raise not_hashable(args, kwargs) from None
        if record is None or changed(record):
            record = self.made((around, kinds), args, kwargs)
            if record is None:
                return self.recordable.plain(*args, **kwargs)
        else:
            self.hits += 1
        if watched:
            tell(record.moved)
        if strides == record.strides:
            self.bring_near(record, around, leaves)
        return replayed(record, values, strides)

    def made(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Record | None:
        """A new record; None where another thread records, which may wait for this one."""
        if not recording.acquire(blocking=world_size() > 1):
            return None
        self.misses += 1
        try:
            record = self[key] = self.recordable.record(args, kwargs, self.values(), self.get(key))
        finally:
            recording.release()
        return record

    def bring_near(self, record: Record, around: Any, leaves: list[Any]) -> None:
        """Let calls with leaves like these find a record without a key."""
        closed = record.closed.tensors
        if not record.modules and (check := guard([*leaves, *closed])) is not None:
            is_alike = (lambda *leaves: check(*leaves, *closed)) if closed else check
            self.near[around] = [(is_alike, record), *self.near.get(around, ())][:_NEAR]

    def info(self) -> JitCacheInfo:
        """The counts for ``cache_info``."""
        return JitCacheInfo(self.hits, self.misses, len(self))

    def clear(self) -> None:
        """Forget all records, and count from zero."""
        super().clear()
        self.near.clear()
        self.hits = self.misses = 0


class Jitted(Generic[Q, R]):
    """A function under `jit`. It is called like the function, and tells of its records.

    It has the function's name, docstring and signature. It binds as a method does, and is copied and pickled by name.

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
        """The function's result, by a record of arguments of this kind, which is made where there is none."""
        # the function itself in a body, a transform or a checkpoint (it compares saved tensors), and while watched
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
        leaves, around = flatten_call(positional, named)
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
            RecordError: it is called in a body, a transform or a recording; or the function cannot be recorded.
        """
        if state.body is not None or transforms_active() or is_recording():
            raise RecordError(
                f"jit({self._name}).lower(...) was called in a shard_map body, a torch.func transform or a function "
                "that is recorded; lower it outside of them, with a TensorSpec for each argument that it is given there"
            )
        return self._recordable.lowered(args, kwargs)

    def cache_info(self) -> JitCacheInfo:
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
        """A method, as functions in a class are."""
        return self if instance is None else MethodType(self, instance)


class _Checked(Jitted[Q, R]):
    """A jitted function whose calls are each compared with a call of the function."""

    __slots__ = ("_plain",)

    def __init__(self, recordable: Recordable) -> None:
        super().__init__(recordable)
        self._plain: Jitted[Q, R] = Jitted(replace(recordable, passes=()))

    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> R:
        found: R = side_by_side(self._name, self._function, self._plain, super().__call__, args, kwargs)
        return found
