"""The forward-backward pairs: the one table of what communicates, between which types, and what its transpose is.

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

from fspmd.errors import ArgumentError
from fspmd.meshes.mesh import Mesh
from fspmd.torch_internals import DisableTorchFunction, count_dispatch_modes, forward_ad, profiler, transforms_active
from fspmd.tracing import refuse_traced
from fspmd.transport import Options, Pending, transport_of
from fspmd.transport.carriers import FLOATS


@dataclass(frozen=True, slots=True)
class Pair:
    """One row: a collective from one type to another, and the row that is its transpose."""

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
        # of any types but pending sums, which are handed on; each rank receives what it lacks
        ("reblock", "V", "V", "reblock", "reblock", "[a,b] [c,d] => [a] [b,c,d], any blocks to any others"),
        ("pbroadcast", "V", "V", "broadcast", "psum_to_root", "[A] [B] => [A] [A]"),
        ("psum_to_root", "V", "V", "reduce_to_root", "pbroadcast", "[A] [B] => [A+B] [0]"),
        ("broadcast_invariant", "V", "I", "broadcast_once", "invariant_to_root", "[A] [B] => A"),
        ("invariant_to_root", "I", "V", "at_root", "broadcast_invariant", "A => [A] [0]"),
        # a simulated value equal on all ranks, from here on one copy per rank
        ("per_rank", "V", "V", "per_rank", "identity", "[A] [A] => [A] [A]"),
        ("identity", "V", "V", "alias", "identity", "[A] [B] => [A] [B]"),
        # of any types: blocks viewed with other dims, the same elements in the same order
        ("view", "V", "V", "view", "view", "[A] [B] => [A'] [B'], of which dims are products or factors of theirs"),
        # and back: copies that are equal, held once
        ("held_once", "V", "V", "pick", "identity", "[A] [A] => A"),
        # without types (check_vma=False): every rank's copy has a cotangent of its own
        ("psum_varying", "V", "V", "reduce", "psum_varying", "[A] [B] => [A+B] [A+B]"),
        ("leave_unchecked", "V", "I", "pick", "share_unchecked", "[A] [A] => A"),
        ("share_unchecked", "I", "V", "scale", "mean_unchecked", "A => [A/n] [A/n]"),
        ("mean_unchecked", "V", "I", "mean", "share_unchecked", "[A] [B] => (A+B)/n"),
    )
}


class Call:
    """One row over given axes with given options: a linear map, and its transpose. Interned by `call`."""

    __slots__ = (
        "__weakref__",
        "_transposed",
        "axes",
        "idle",
        "in_place",
        "kernel",
        "mesh",
        "options",
        "pair",
        "results",
        "views",
    )

    def __init__(self, name: str, mesh: Mesh, axes: tuple[str, ...], options: Options) -> None:
        self.pair = PAIRS[name]
        self.mesh = mesh
        self.axes = axes
        self.options = options
        transport = transport_of(mesh)
        self.kernel = getattr(transport, self.pair.kernel)
        self.views = self.pair.kernel in transport.views
        named = PAIRS[self.pair.transpose].kernel in transport.views  # backward it is a name alone
        self.idle = self.views and named
        with_twin = named and options.op == "sum" and self.pair.kernel in transport.in_place
        self.in_place: Any = getattr(transport, f"{self.pair.kernel}_in_place") if with_twin else None
        self.results: dict[Any, Any] = {}  # type of the operand -> type of the result, for the hot path
        self._transposed: Call | None = None

    def __repr__(self) -> str:
        return f"{self.pair.name} over {self.axes}"

    def start(self, x: Tensor) -> Pending:
        """Begin on a tensor below autograd."""
        pending: Pending = self.kernel(x, self.mesh, self.axes, self.options)
        return pending

    def run(self, x: Tensor) -> Tensor:
        """Begin and wait."""
        result: Tensor = self.kernel(x, self.mesh, self.axes, self.options).wait()
        return result

    @property
    def transposed(self) -> Call:
        """The map of gradients."""
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
            elif o.routes is not None:  # not interned: routes are as many as calls
                self._transposed = Call(
                    self.pair.transpose, self.mesh, self.axes, o._replace(routes=o.routes.transposed)
                )
                return self._transposed
            self._transposed = call(self.pair.transpose, mesh, self.axes, o)
        return self._transposed

    def into(self, x: Tensor, out: Tensor) -> Pending:
        """Begin, and have what comes of it written into ``out``."""
        kernel = getattr(transport_of(self.mesh), f"{self.pair.kernel}_into")
        return kernel(out, x, self.mesh, self.axes)  # type: ignore[no-any-return]

    def batched(self) -> Call:
        """The same map with one more dim in front of every dim."""
        o = self.options
        make = call if o.routes is None else Call
        return make(self.pair.name, self.mesh, self.axes, o._replace(dim=o.dim + 1, concat_dim=o.concat_dim + 1))


@functools.lru_cache(maxsize=8192)
def call(name: str, mesh: Mesh, axes: tuple[str, ...], options: Options = Options()) -> Call:  # noqa: B008
    """The interned `Call`: equal ones are one object for as long as somebody has it."""
    return _CALLS.setdefault((name, mesh, axes, options), Call(name, mesh, axes, options))


_CALLS: Final[WeakValueDictionary[Any, Call]] = WeakValueDictionary()


# --- differentiable application -------------------------------------------------------------------------------------

_grad_enabled = torch.is_grad_enabled


_Watch = Callable[[Any, Call], Call]
_Record = Callable[[Any, Call], Call | None]
_watch: _Watch | None = None
_record: _Record | None = None
_profiled: _Watch | None = None  # watches while torch's profiler runs, and nobody else does
_seen = False  # there is one of the first two


def watch_with(watch: _Watch | None) -> None:
    """From here on ``watch`` sees each operand and call before it is applied, and gives the call that is."""
    global _watch, _seen
    _watch = watch
    _seen = watch is not None or _record is not None


def profile_with(profiled: _Watch) -> None:
    """From here on ``profiled`` watches while torch's profiler runs."""
    global _profiled
    _profiled = profiled


def record_with(record: _Record | None) -> None:
    """The same for who records; who watches sees only calls that are not recorded, of which ``record`` gives None."""
    global _record, _seen
    _record = record
    _seen = record is not None or _watch is not None


def watches_with(watch: Callable[[Any, Call], Call]) -> bool:
    """Whether it is ``watch`` that sees what is applied."""
    return _watch is watch


def is_watched() -> bool:
    """Whether anybody sees what is applied."""
    return _watch is not None


def is_seen() -> bool:
    """Whether anybody watches or records what is applied, in any thread."""
    return _seen


class StandIn(Call):
    """A call in the place of a ``plain`` one, put there ``by`` who watches; so is its transpose."""

    __slots__ = ("by", "plain")

    def __init__(self, plain: Call, by: Any) -> None:
        self.pair, self.mesh, self.axes, self.options = plain.pair, plain.mesh, plain.axes, plain.options
        self.kernel, self.results, self.views, self.idle = plain.kernel, plain.results, False, plain.idle
        self.in_place = None
        self.plain = plain
        self.by = by

    @property
    def transposed(self) -> Call:
        return type(self)(self.plain.transposed, self.by)

    def batched(self) -> Call:
        return type(self)(self.plain.batched(), self.by)


def watched(x: Any, call: Call) -> Call:
    """The call as who watches wants it; what is done without `apply` asks for it."""
    record, watch = _record, _watch or (_profiled if profiler._is_profiler_enabled else None)  # others may end them
    if record is not None and (recorded := record(x, call)) is not None:
        return recorded
    return call if watch is None else watch(x, call)


def apply(x: Tensor, call: Call) -> Tensor:
    """``call(x)``, differentiable any number of times, in reverse and forward mode, under ``torch.func`` too."""
    if count_dispatch_modes():
        refuse_traced(repr(call))
    if _seen or profiler._is_profiler_enabled:
        call = watched(x, call)
    with DisableTorchFunction():
        if transforms_active() or forward_ad._current_level >= 0:
            try:
                return _Transformable.apply(x, call)  # type: ignore[no-any-return]
            except RuntimeError as error:
                if "Functionalize rule" not in str(error):
                    raise
                raise ArgumentError(
                    f"{call!r} was called under torch.func.functionalize, which knows nothing of collectives; leave "
                    "functionalize out: writes into values are followed without it"
                ) from error
        if x.requires_grad and _grad_enabled():
            if call.idle:
                return torch.ops.aten.alias.default(x)  # type: ignore[no-any-return] # which may be written into
            if call.in_place is not None and x.dtype in FLOATS and not x.is_neg():
                return _apply_in_place(x, call)
            return _apply_plain(x, call)  # type: ignore[no-any-return]
        return call.run(x)


def is_transformed() -> bool:
    """Whether a transform of ``torch.func`` or forward mode is at work, to which autograd is not all there is."""
    return bool(transforms_active()) or forward_ad._current_level >= 0


def given(x: Tensor, call: Call, y: Tensor) -> Tensor:
    """``call(x)``, of which ``y`` has the values: forward nothing is done, backward what is done ever."""
    if _seen or profiler._is_profiler_enabled:
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
    """The fast path: autograd alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call) -> Tensor:
        ctx.call = call
        return call.run(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return apply(g, ctx.call.transposed), None


_apply_plain = super(torch.autograd.Function, _Plain).apply  # what Function.apply calls when no transform is active


def _apply_in_place(x: Tensor, call: Call) -> Tensor:
    """Done in a clone, of which autograd knows the gradient: at half the cost of an ``autograd.Function``."""
    y = x.clone(memory_format=torch.contiguous_format)
    call.in_place(y.detach(), call.mesh, call.axes, call.options).wait()
    y._backward_hooks = {0: functools.partial(_named, call)}
    y.grad_fn._register_hook_dict(y)  # type: ignore[union-attr]
    y._backward_hooks = None  # of the node alone: those of the tensor are the user's
    return y


def _named(call: Call, g: Tensor | None) -> Tensor | None:
    """A cotangent of which nothing but the type changes, unless it has one itself."""
    if g is None or not (_seen or g.requires_grad or transforms_active()):
        return None
    return apply(g, call.transposed)


def lend(x: Tensor, call: Call) -> Tensor:
    """`apply`, of which the result is not written into; where it is a view of a leaf at half the cost.

    There a hook on an ordinary view takes the place of an ``autograd.Function``.
    """
    if (
        _seen
        or profiler._is_profiler_enabled
        or not call.views
        or type(x) is not Tensor
        or not x.is_leaf
        or not (x.requires_grad and _grad_enabled())
    ):
        return apply(x, call)
    if transforms_active() or forward_ad._current_level >= 0:
        return apply(x, call)
    y = x.view_as(x)
    y._backward_hooks = {0: functools.partial(_back, x, call)}
    y.grad_fn._register_hook_dict(y)  # type: ignore[union-attr]
    return y


def _back(x: Tensor, call: Call, g: Tensor | None) -> Tensor | None:
    """Of a view of ``x``. Without a gradient, too, it takes part in what others may communicate."""
    if g is None:
        total = apply(torch.zeros_like(x), call.transposed)
        if total.any():  # torch does not let a hook put it in place of none
            raise ArgumentError(
                f"a function between a tensor of shape {tuple(x.shape)} and its gradient gave None for it on this rank "
                "alone: let its backward return zeros there"
            )
        return None
    if _seen or g.requires_grad or type(g) is not Tensor:
        return apply(g, call.transposed)
    return call.transposed.run(g)


class _Transformable(torch.autograd.Function):
    """The same under vmap, jvp and the other transforms."""

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


# --- communication that overlaps computation ------------------------------------------------------------------------


class Flight:
    """A collective between its start and its wait. The graph keeps only its route, so that nothing refers to itself."""

    __slots__ = ("pending", "route", "token")

    def __init__(self, call: Call) -> None:
        self.route = _RoundTrip(call)
        self.pending: Pending | None = None
        self.token: Tensor | None = None


class _RoundTrip:
    """What is called, and the transpose's flight once backward has begun it."""

    __slots__ = ("back", "call")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.back: Flight | None = None


def depart(x: Tensor, call: Call) -> Flight:
    """Start without waiting. In backward the roles change: `land`'s gradient starts, `depart`'s waits."""
    flight = Flight(watched(x, call))
    with DisableTorchFunction():
        if transforms_active() or forward_ad._current_level >= 0:
            flight.pending = Pending(_Transformable.apply(x, flight.route.call))
        elif x.requires_grad and _grad_enabled():
            flight.token = _Depart.apply(x, flight)
        else:
            flight.pending = flight.route.call.start(x)
    return flight


def land(flight: Flight) -> Tensor:
    """Wait for the result."""
    with DisableTorchFunction():
        if flight.token is not None:
            return _Land.apply(flight.token, flight)  # type: ignore[no-any-return]
        assert flight.pending is not None
        return flight.pending.wait()


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: Flight) -> Tensor:
        ctx.route = flight.route
        flight.pending = flight.route.call.start(x)
        return x.new_empty(0)  # carries the graph; the data travels in the flight

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        route: _RoundTrip = ctx.route
        back, route.back = route.back, None
        assert back is not None
        if back.token is not None:
            back.token = g
        return land(back), None


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, flight: Flight) -> Tensor:
        ctx.route = flight.route
        assert flight.pending is not None
        return flight.pending.wait()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        route: _RoundTrip = ctx.route
        with DisableTorchFunction():
            route.back = depart(g, route.call.transposed)
            token = route.back.token
            return (g.new_empty(0) if token is None else token), None
