"""The table of collectives: for each the types before and after, the kernel and the transpose.

Every row is linear, so its derivative is itself and its gradient is its transpose. ``[A] [B]`` are the blocks of two
ranks; a leading ``+`` marks a pending sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fspmd.cache import cached
from fspmd.errors import ArgumentError
from fspmd.meshes.mesh import Mesh
from fspmd.torch_internals import (
    ENDED,
    DisableTorchFunction,
    count_dispatch_modes,
    forward_ad,
    level_of,
    plain_apply,
    profiler,
    transforms_active,
    wrapped_by,
)
from fspmd.tracing import refuse_traced
from fspmd.transport import Options, Pending, arrived, as_pending, transport_named
from fspmd.transport.carriers import FLOATS


@dataclass(frozen=True, slots=True)
class Pair:
    """A row: a collective from one type to another, and the name of the row that is its transpose."""

    name: str
    source: str
    target: str
    kernel: str
    transpose: str
    picture: str


PAIRS: Final[dict[str, Pair]] = {
    row[0]: Pair(*row)
    for row in (
        ("psum", "V", "I", "reduce_once", "invariant_to_varying", "[A] [B] => A+B"),
        ("invariant_to_varying", "I", "V", "per_rank", "psum", "A => [A] [A]"),
        ("psum_unreduced", "U", "I", "reduce_once", "invariant_to_reduced", "[+A] [+B] => A+B"),
        ("invariant_to_reduced", "I", "R", "pick", "psum_unreduced", "A => A"),
        ("psum_to_reduced", "U", "R", "reduce_once", "psum_to_reduced", "[+A] [+B] => A+B"),
        ("reduced_to_varying", "R", "V", "per_rank", "varying_to_unreduced", "A => [A] [A]"),
        ("varying_to_unreduced", "V", "U", "alias", "reduced_to_varying", "[A] [B] => [+A] [+B]"),
        ("invariant_to_unreduced", "I", "U", "at_root", "reduced_to_invariant", "A => [+A] [+0]"),
        ("reduced_to_invariant", "R", "I", "pick", "invariant_to_unreduced", "A => A"),
        ("all_gather", "V", "V", "gather", "psum_scatter", "[A] [B] => [A,B] [A,B]"),
        ("psum_scatter", "V", "V", "reduce_scatter", "all_gather", "[A0,A1] [B0,B1] => [A0+B0] [A1+B1]"),
        ("all_gather_invariant", "V", "I", "gather_once", "slice", "[A] [B] => A,B"),
        ("slice", "I", "V", "slice", "all_gather_invariant", "A,B => [A] [B]"),
        ("all_gather_reduced", "V", "R", "gather_once", "psum_scatter_unreduced", "[A] [B] => A,B"),
        (
            "psum_scatter_unreduced",
            "U",
            "V",
            "reduce_scatter",
            "all_gather_reduced",
            "[+A0,+A1] [+B0,+B1] => [A0+B0] [A1+B1]",
        ),
        ("all_to_all", "V", "V", "exchange", "all_to_all", "[A0,A1] [B0,B1] => [A0,B0] [A1,B1]"),
        (
            "ragged_all_to_all",
            "V",
            "V",
            "ragged",
            "ragged_all_to_all",
            "[a0,a1] [b0,b1] => [a0,b0] [a1,b1], any lengths",
        ),
        ("ppermute", "V", "V", "permute", "ppermute", "[A] [B] => [B] [A]"),
        # types may be any; pending sums stay pending; each rank receives the elements that it lacks
        ("reblock", "V", "V", "reblock", "reblock", "[a,b] [c,d] => [a] [b,c,d], any blocks to any others"),
        ("pbroadcast", "V", "V", "broadcast", "psum_to_root", "[A] [B] => [A] [A]"),
        ("psum_to_root", "V", "V", "reduce_to_root", "pbroadcast", "[A] [B] => [A+B] [0]"),
        ("broadcast_invariant", "V", "I", "broadcast_once", "invariant_to_root", "[A] [B] => A"),
        ("invariant_to_root", "I", "V", "at_root", "broadcast_invariant", "A => [A] [0]"),
        # a simulated value that is equal on all ranks gets one copy per rank
        ("per_rank", "V", "V", "per_rank", "identity", "[A] [A] => [A] [A]"),
        ("identity", "V", "V", "alias", "identity", "[A] [B] => [A] [B]"),
        # types may be any; blocks are viewed with other dims, with the same elements in the same order
        ("view", "V", "V", "view", "view", "[A] [B] => [A'] [B'], of which dims are products or factors of theirs"),
        # the way back: of equal copies one is kept
        ("held_once", "V", "V", "pick", "identity", "[A] [A] => A"),
        # without types (check_vma=False), where each rank's copy has its own cotangent
        ("psum_varying", "V", "V", "reduce", "psum_varying", "[A] [B] => [A+B] [A+B]"),
        ("leave_unchecked", "V", "I", "pick", "share_unchecked", "[A] [A] => A"),
        ("share_unchecked", "I", "V", "scale", "mean_unchecked", "A => [A/n] [A/n]"),
        ("mean_unchecked", "V", "I", "mean", "share_unchecked", "[A] [B] => (A+B)/n"),
    )
}


class Call:
    """A row of the table over some axes with some options: a linear map, and its transpose. Interned by `call`."""

    __slots__ = (
        "__weakref__",
        "_transposed",
        "axes",
        "facts",
        "idle",
        "in_place",
        "kernel",
        "mesh",
        "options",
        "pair",
        "views",
    )

    def __init__(self, name: str, mesh: Mesh, axes: tuple[str, ...], options: Options) -> None:
        self.pair = PAIRS[name]
        self.mesh = mesh
        self.axes = axes
        self.options = options
        transport = transport_named(mesh.transport)
        self.kernel = getattr(transport, self.pair.kernel)
        self.views = self.pair.kernel in transport.views
        idle_backward = PAIRS[self.pair.transpose].kernel in transport.views
        self.idle = self.views and idle_backward
        has_in_place = idle_backward and options.op == "sum" and self.pair.kernel in transport.in_place
        self.in_place: Any = getattr(transport, f"{self.pair.kernel}_in_place") if has_in_place else None
        self._transposed: Call | None = None
        self.facts: Any = None  # what a watcher knows of the call

    def __repr__(self) -> str:
        return f"{self.pair.name} over {self.axes}"

    def start(self, x: Tensor) -> Pending:
        """Start the collective on a tensor, below autograd."""
        return as_pending(self.kernel(x, self.mesh, self.axes, self.options))

    def run(self, x: Tensor) -> Tensor:
        """Start the collective and wait for its result."""
        result = self.kernel(x, self.mesh, self.axes, self.options)
        return result.wait() if isinstance(result, Pending) else result

    def start_in_place(self, x: Tensor) -> Pending:
        """Start the collective, which writes its result into ``x``. Only calls with ``in_place`` can."""
        return as_pending(self.in_place(x, self.mesh, self.axes, self.options))

    def writer(self) -> Callable[[Tensor], Tensor] | None:
        """A function that runs a sum and writes it into its operand; None if the call is no sum, or cannot."""
        transport, kernel = transport_named(self.mesh.transport), self.pair.kernel
        if self.options.op != "sum" or kernel not in transport.in_place:
            return None
        start = getattr(transport, f"{kernel}_in_place")
        mesh, axes, options = self.mesh, self.axes, self.options

        def run(x: Tensor) -> Tensor:
            return arrived(start(x, mesh, axes, options))

        return run

    @property
    def transposed(self) -> Call:
        """The call that gradients take."""
        if self._transposed is None:
            o, mesh = self.options, self.mesh
            if o.move is not None:
                mesh, o = o.move.target.mesh, o._replace(move=o.move.transposed)
            elif o.dims is not None:
                o = o._replace(dims=o.dims.transposed)
            elif self.pair.kernel == "permute":
                o = o._replace(perm=tuple((destination, source) for source, destination in o.perm))
            elif self.pair.kernel == "exchange":
                o = o._replace(dim=o.concat_dim, sizes=o.concat_sizes, concat_dim=o.dim, concat_sizes=o.sizes)
            elif o.routes is not None:  # not interned, since each call has routes of its own
                self._transposed = Call(
                    self.pair.transpose, self.mesh, self.axes, o._replace(routes=o.routes.transposed)
                )
                return self._transposed
            self._transposed = call(self.pair.transpose, mesh, self.axes, o)
        return self._transposed

    def into(self, x: Tensor, out: Tensor) -> Pending:
        """Start the collective, which writes its result into ``out``."""
        kernel = getattr(transport_named(self.mesh.transport), f"{self.pair.kernel}_into")
        return as_pending(kernel(out, x, self.mesh, self.axes))

    def batched(self) -> Call:
        """Return the call for blocks with one more dim in front."""
        o = self.options
        make = call if o.routes is None else Call
        return make(self.pair.name, self.mesh, self.axes, o._replace(dim=o.dim + 1, concat_dim=o.concat_dim + 1))


@cached(maxsize=8192)
def call(name: str, mesh: Mesh, axes: tuple[str, ...], options: Options = Options()) -> Call:  # noqa: B008
    """Return the interned `Call`. Equal calls are one object as long as it is in use."""
    return _CALLS.setdefault((name, mesh, axes, options), Call(name, mesh, axes, options))


_CALLS: Final[WeakValueDictionary[Any, Call]] = WeakValueDictionary()


# --- differentiable application -------------------------------------------------------------------------------------

_grad_enabled = torch.is_grad_enabled


_Watch = Callable[[Any, Call], Call]
_Record = Callable[[Any, Call], Call | None]
_watch: _Watch | None = None
_record: _Record | None = None
_profiled: _Watch | None = None  # watches while torch's profiler runs and there is no other watcher
seen = False  # whether calls are watched or recorded, in any thread


def watch_with(watch: _Watch | None) -> None:
    """Let ``watch`` see each operand and call before it is applied. It returns the call that is applied instead."""
    global _watch, seen
    _watch = watch
    seen = watch is not None or _record is not None


def profile_with(profiled: _Watch) -> None:
    """Let ``profiled`` watch while torch's profiler runs."""
    global _profiled
    _profiled = profiled


def record_with(record: _Record | None) -> _Record | None:
    """Let ``record`` see each operand and call, and return the one before.

    A call for which it returns None goes to the watcher, unrecorded.
    """
    global _record, seen
    before, _record = _record, record
    seen = record is not None or _watch is not None
    return before


def watches_with(watch: Callable[[Any, Call], Call]) -> bool:
    """Return whether ``watch`` is the watcher."""
    return _watch is watch


def is_watched() -> bool:
    """Return whether there is a watcher."""
    return _watch is not None


class StandIn(Call):
    """A call that the watcher ``by`` puts in the place of a ``plain`` call. Its transpose is a stand-in, too."""

    __slots__ = ("by", "plain")

    def __init__(self, plain: Call, by: Any) -> None:
        self.pair, self.mesh, self.axes, self.options = plain.pair, plain.mesh, plain.axes, plain.options
        self.kernel, self.views, self.idle = plain.kernel, False, plain.idle
        self.in_place = None
        self.plain = plain
        self.by = by

    @property
    def transposed(self) -> Call:
        return type(self)(self.plain.transposed, self.by)

    def batched(self) -> Call:
        return type(self)(self.plain.batched(), self.by)


def watched(x: Any, call: Call) -> Call:
    """Return the call that the recorder or the watcher puts in place of ``call``. `apply` and its likes ask for it."""
    record, watch = _record, _watch or (_profiled if profiler._is_profiler_enabled else None)  # threads may reset them
    if record is not None and (recorded := record(x, call)) is not None:
        return recorded
    return call if watch is None else watch(x, call)


def apply(x: Tensor, *calls: Call) -> Tensor:
    """Return calls of ``x``, one after another.

    They are differentiable any number of times, in reverse and forward mode, and under ``torch.func``.
    """
    with DisableTorchFunction():
        for call in calls:
            x = applied(x, call)
    return x


def applied(x: Tensor, call: Call) -> Tensor:
    """`apply`, where torch functions are disabled."""
    if count_dispatch_modes():
        refuse_traced(repr(call))
    if level_of(x) == ENDED:
        x = alive(x)
    if seen or profiler._is_profiler_enabled:
        call = watched(x, call)
    if transforms_active() or forward_ad._current_level >= 0:
        try:
            return _Transformable.apply(x, call)  # type: ignore[no-any-return]
        except RuntimeError as error:
            if "Functionalize rule" not in str(error):
                raise
            raise ArgumentError(
                f"{call!r} was called under torch.func.functionalize, which does not know collectives; leave "
                "functionalize out: writes into values are followed without it"
            ) from error
    if x.requires_grad and _grad_enabled():
        if call.idle:
            return torch.ops.aten.alias.default(x)  # type: ignore[no-any-return] # the result may be written into
        if call.in_place is not None and x.dtype in FLOATS and not x.is_neg():
            return _apply_in_place(x, call)
        return _apply_plain(x, call)  # type: ignore[no-any-return]
    return call.run(x)


def alive(x: Tensor) -> Tensor:
    """Return the tensor within wrappers of transforms that have ended, as torch's dispatcher does for its functions."""
    while level_of(x) == ENDED:
        x = wrapped_by(x)
    return x


def is_transformed() -> bool:
    """Return whether a transform of ``torch.func`` or forward mode is active, so that reverse autograd is not all."""
    return bool(transforms_active()) or forward_ad._current_level >= 0


def given(x: Tensor, call: Call, y: Tensor) -> Tensor:
    """Return ``call(x)`` with the known values ``y``. Nothing runs forward. Backward runs the transpose as usual."""
    if seen or profiler._is_profiler_enabled:
        call = watched(x, call)
    with DisableTorchFunction():
        return _Given.apply(x, y.detach(), call)  # type: ignore[no-any-return]


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, call: Call) -> Tensor:
        ctx.call = call
        return y.detach()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return apply(g, ctx.call.transposed), None, None


class _Plain(torch.autograd.Function):
    """The fast path: autograd without transforms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call) -> Tensor:
        ctx.call = call
        return call.run(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return apply(g, ctx.call.transposed), None


_apply_plain = plain_apply(_Plain)


def _apply_in_place(x: Tensor, call: Call) -> Tensor:
    """Run a call in place on a clone, whose gradient autograd knows, at half the cost of an ``autograd.Function``."""
    y = x.clone(memory_format=torch.contiguous_format)
    call.start_in_place(y.detach()).wait()
    y._backward_hooks = {0: functools.partial(_back_in_place, call)}
    y.grad_fn._register_hook_dict(y)  # type: ignore[union-attr]
    y._backward_hooks = None  # the hook is the node's; the hooks of the tensor are the user's
    return y


def _back_in_place(call: Call, g: Tensor | None) -> Tensor | None:
    """Apply the transpose to a cotangent if that does more than change its type: it is recorded or differentiated."""
    if g is None or not (_record is not None or g.requires_grad or transforms_active()):
        return None
    return apply(g, call.transposed)


def lend(x: Tensor, call: Call) -> Tensor:
    """Return `apply` for a result that will not be written into.

    For a view of a leaf it costs half: a hook on an ordinary view takes the place of an ``autograd.Function``.
    """
    if (
        _record is not None
        or not call.views
        or type(x) is not Tensor
        or not x.is_leaf
        or not (x.requires_grad and _grad_enabled())
    ):
        return apply(x, call)
    if transforms_active() or forward_ad._current_level >= 0:
        return apply(x, call)
    if seen or profiler._is_profiler_enabled:
        call = watched(x, call)
    y = x.view_as(x)
    y._backward_hooks = {0: functools.partial(_back, x, call)}
    y.grad_fn._register_hook_dict(y)  # type: ignore[union-attr]
    return y


def _back(x: Tensor, call: Call, g: Tensor | None) -> Tensor | None:
    """Apply the transpose to the cotangent of a view of ``x``. A rank without one takes part in the collective, too."""
    if g is None:
        total = apply(torch.zeros_like(x), call.transposed)
        if total.any():  # torch does not let a hook replace a missing gradient
            raise ArgumentError(
                f"a function that used a tensor of shape {tuple(x.shape)} returned None for its gradient on this rank "
                "only: let its backward return zeros"
            )
        return None
    if seen or g.requires_grad or type(g) is not Tensor:
        return apply(g, call.transposed)
    return call.transposed.run(g)


class _Transformable(torch.autograd.Function):
    """A call under vmap, jvp and the other transforms."""

    @staticmethod
    def forward(x: Tensor, call: Call) -> Tensor:
        return call.run(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Call], output: Tensor) -> None:
        ctx.call = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return apply(g, ctx.call.transposed), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return apply(tangent, ctx.call)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], x: Tensor, call: Call) -> tuple[Tensor, int]:
        return apply(x.movedim(in_dims[0], 0), call.batched()), 0
