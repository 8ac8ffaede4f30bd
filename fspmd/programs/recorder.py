"""The recorder: a mode in which a function runs once, and each of its calls becomes a step of one FX graph.

Steps are calls below autograd and ``torch.func``, in forward and in backward: aten functions on blocks, collectives of
the pair table, and a few functions of fspmd (`fspmd.tracing.step`). In a simulation a value has a block for each rank,
and a call of a function on it is one step for all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch.nn.modules.module import register_module_forward_pre_hook

from fspmd import tracing
from fspmd.errors import RecordError, ValuesNeededError
from fspmd.fake_mode import CachingFakeMode, UnknownValues
from fspmd.global_view.interceptors import Dispatch, intercept_dispatch
from fspmd.inspection.causes import trace
from fspmd.ops.schemas import facts_of
from fspmd.ops.traits import tensors_in
from fspmd.pairs import Call, StandIn, record_with
from fspmd.programs.reachable import Generators, check_reachable, given_alone
from fspmd.programs.recorded_values import Values
from fspmd.programs.refusals import REPLACEMENTS, RefusingMode, check, check_writes, not_compiled, shape_of_values
from fspmd.programs.steps import CASTS, Routed, runner, transposed_routes
from fspmd.remembered import forgetting
from fspmd.sharded import Sharded
from fspmd.torch_internals import (
    HigherOrderOperator,
)
from fspmd.transport import Pending, as_pending
from fspmd.transport.abstract import imagined

aten: Final = torch.ops.aten

_requires_grad: Final = attrgetter("requires_grad")
_DEVICE: Final = torch.ops.prim.device.default
_LIFT: Final = aten.lift_fresh.default
#: functions by which torch makes aliases that a replay does not need
_ALIASES: Final = frozenset({aten.detach.default, aten.alias.default})


class ProgramRecorder(Values):
    """A mode that makes a step of each call."""

    supports_higher_order_operators = True

    def __init__(self, reached: Iterable[Any] = (), mode: CachingFakeMode | None = None) -> None:
        """``reached``: the values that the function gets and reaches. The recorder looks for generators in them."""
        super().__init__(mode)
        self.generators = Generators(reached, self.is_fake)
        self.modules: dict[int, torch.nn.Module] = {}  # modules that ran, by id
        self.refusing = RefusingMode(self)

    def finish(self) -> None:
        """Raise `RecordError` for effects of the function that steps do not repeat."""
        if self.refused is not None:
            raise self.refused
        with tracing.unseen():
            self.generators.check_end()
            trained = [node for node, x in self.captured.items() if x.is_leaf and x.grad is not self._gradients[node]]
            for node in trained:  # undo the effect
                self.captured[node].grad = self._gradients[node]
            if trained or any(x.grad is not None for x in self.given):
                raise RecordError(
                    "jit cannot record backward() into .grad of an argument, or of a tensor that the function closes "
                    "over, since a replay would not repeat it; use fspmd.grad or torch.autograd.grad, and return the "
                    "gradients"
                )

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            raise self.refusal(not_compiled())
        if func is _DEVICE:  # C++ asks a fake tensor for its device
            return args[0].device
        kwargs = kwargs or {}
        if Sharded in map(type, args):  # torch.tensor(x): the steps are those on the blocks
            with self:
                return Sharded.__torch_dispatch__(func, types, args, kwargs)
        if self.paused or func.namespace == "prim":  # questions that the tensor answers
            return func(*args, **kwargs)
        if func is _LIFT:
            with self.pause():
                return self.constant(func(*args), args[0])
        if facts_of(func).absent:  # torch aborts in a product with a zero tensor that a mode has seen
            func = torch.ops.aten.zeros.default
        facts, tensors = facts_of(func), list(tensors_in((*args, *kwargs.values())))
        fixed = facts.pure and self.are_constant(tensors)
        if facts.gives_values or facts.dynamic_shape or facts.writes:
            if not fixed:
                check(func, facts, args, kwargs, self)
            elif facts.gives_values or facts.shape_of_values(args, kwargs):
                self.note_read(tensors)
        placed, named = self._operands(args, kwargs)
        if facts.random:
            self.check_draws(args, kwargs)
        if self.is_fake and facts.gives_values:
            with self.real():
                return func(*map(self.values_of, args), **kwargs)
        followed = any(map(_requires_grad, tensors))
        self.paused = True
        try:
            out = func(*args, **kwargs)
        except UnknownValues as error:
            if not error.for_shape:
                raise
            raise self.refusal(shape_of_values(func)) from error
        finally:
            self.paused = False
        has_node = followed or not torch.is_grad_enabled()  # else autograd has made no node for the call
        if func in _ALIASES:
            if not torch.is_grad_enabled():
                self._cause()  # for the backward of an `autograd.Function`, which is a step
            self._know(out, placed[0])
            return out
        return self._results(out, self._put(func, placed, named, constant=fixed, has_node=has_node))

    def step(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], real: bool = False
    ) -> Any:
        """Record a function of fspmd as one step. ``real``: run it on tensors with values."""
        placed, named = self._operands(args, kwargs)
        self.check_draws(args, kwargs)
        checked = given_alone(args, self) if hasattr(function, "python") else nullcontext()
        runs, out = (getattr(function, "imagined", function) if self.is_fake else function), None
        if not getattr(function, "reads", False):  # a function that reads prints values in a replay, and returns None
            try:
                states_kept = self.generators.kept() if self.is_fake and real else nullcontext()
                with self.real() if real else self.pause(), checked, states_kept:
                    out = runs(*args, **kwargs)
            except UnknownValues as error:
                raise self.refusal(
                    ValuesNeededError(
                        f"jit(f).lower(...) has shapes alone, but got a call of {trace().cause.what} whose sizes "
                        "depend on values; call jit(f), or lower the parts before and after it"
                    )
                ) from error
        node = self._put(function, placed, named)
        node.meta["effect"] = True
        return self._results(out, node)

    def collective(self, call: Call, x: Tensor, waits: bool) -> Any:
        """Record a call of the pair table as a step."""
        placed = self._placed(x)
        o = call.options
        for spec in (o.move.source, o.move.target) if o.move is not None else ():
            self.note_blocks(spec)
        if not _is_even(call):
            self.note_uneven(lambda: f"{call.pair.name} moves blocks of different sizes")
        if 0 in (*(o.sizes or ()), *(o.concat_sizes or ())):
            self.note_unlike(lambda: f"{call.pair.name} moves empty blocks")
        with self.pause():
            if (self.deferred or self.is_fake) and call.mesh.transport != "simulation":
                out: Any = getattr(imagined(), call.pair.kernel)(x, call.mesh, call.axes, call.options)
                out = out if waits else as_pending(out)
            else:
                out = runner(call, waits)(x)
        if isinstance(out, Tensor) and call.mesh.transport != "simulation" and call.pair.kernel in CASTS:
            self._cause()  # for its transpose
            self._know(out, placed)
            return out
        if (routes := self._routes(call)) is not None:
            node = self._put(Routed(call, waits), (placed, routes), {}, call.pair.name)
            node.meta.update(routed=call, waits=waits, effect=True)
            return self._results(out, node)
        has_node = not torch.is_grad_enabled()  # in the forward of an `autograd.Function`
        node = self._put(runner(call, waits), (placed,), {}, call.pair.name, has_node=has_node)
        node.meta["call"], node.meta["waits"] = call, waits
        return self._results(out, node)

    def into(self, call: Call, x: Tensor, out: Tensor) -> Pending:
        """Record a call that writes its result into ``out``. The call and its wait are steps with effects."""
        check_writes(call.pair.name, [out], self)
        placed = self._placed(x), self._placed(out)
        with self.pause():
            if self.is_fake and call.mesh.transport != "simulation":
                pending = as_pending(getattr(imagined(), f"{call.pair.kernel}_into")(out, x, call.mesh, call.axes))
            else:
                pending = call.into(x, out)
        node = self._put(call.into, placed, {}, f"{call.pair.name}_into")
        node.meta.update(call=call, waits=False, effect=True)
        return self._results(pending, node)  # type: ignore[no-any-return]

    def _routes(self, call: Call) -> fx.Node | None:
        """The step that gives the routes of a ragged call, or the routes back; None if the routes are constant."""
        routes = call.options.routes
        if routes is None or not {id(routes), id(routes.transposed)} & self._objects.keys():
            return None
        if id(routes) not in self._objects:
            self._objects[id(routes)] = routes, self._put(transposed_routes, (self._placed(routes.transposed),), {})
        return self._objects[id(routes)][1]

    def values_of(self, x: Any) -> Any:
        """A constant with its values; any other value unchanged."""
        if not self.is_fake or not isinstance(x, Tensor) or not self.is_constant(x):
            return x
        with self.real(), tracing.outside_transforms():
            return self._value_of(self.node_of(x))

    def _value_of(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self.captured[node]
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._value_of)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def check_draws(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise `RecordError` where a replay of the step cannot draw as the function would."""
        try:
            self.generators.check_draw((*args, kwargs))
        except RecordError as error:
            raise self.refusal(error) from None

    def check_opaque_step(self, function: Callable[..., Any]) -> None:
        """Raise `RecordError` where a function that runs as one step reaches values of the record."""
        check_reachable(function, self)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within, calls are recorded."""

        def concerns() -> bool:
            return tracing.recorder() is self

        tracing.begin()
        before = record_with(self._recorded)
        modules = register_module_forward_pre_hook(self._module)
        try:
            with (
                self,
                forgetting(),
                self.generators.recording(),
                self.refusing.refused(concerns),
                intercept_dispatch(self._typed),
                torch.autograd.set_detect_anomaly(False),  # it reads values; in a replay it sees one function
            ):
                yield
        finally:
            modules.remove()
            record_with(before)
            tracing.end()

    def _typed(self, dispatch: Dispatch) -> Dispatch:
        """``dispatch`` with replacements, for operators on `Sharded` values: a function mode does not see them."""

        def run(func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
            if self.paused:
                return dispatch(func, types, args, kwargs)
            out = REPLACEMENTS[func](self, *args, **(kwargs or {})) if func in REPLACEMENTS else NotImplemented
            if out is NotImplemented:
                out = dispatch(func, types, args, kwargs)
            self.note_specs((*args, out))
            return out

        return run

    def _module(self, module: torch.nn.Module, inputs: Any) -> None:
        if tracing.recorder() is self:
            self.modules[id(module)] = module

    def _recorded(self, x: Any, call: Call) -> Call | None:
        if not tracing.is_recording():
            return None
        return call if type(call) is _CallStep else _CallStep(call, self)


def _is_even(call: Call) -> bool:
    """Whether the operands of a call have one shape on all ranks, and the results have one shape too."""
    o = call.options
    if o.move is not None and (o.move.across or not (o.move.source.even and o.move.target.even)):
        return False
    return o.sizes is None and o.concat_sizes is None and o.routes is None


class _CallStep(StandIn):
    """A call that becomes a step when it begins, in any thread."""

    __slots__ = ()
    by: ProgramRecorder

    def start(self, x: Tensor) -> Pending:
        if tracing.recorder() is not self.by:
            return self.plain.start(x)
        return self.by.collective(self.plain, x, False)  # type: ignore[no-any-return]

    def run(self, x: Tensor) -> Tensor:
        if tracing.recorder() is not self.by:
            return self.plain.run(x)
        return self.by.collective(self.plain, x, True)  # type: ignore[no-any-return]

    def into(self, x: Tensor, out: Tensor) -> Pending:
        if tracing.recorder() is not self.by:
            return self.plain.into(x, out)
        return self.by.into(self.plain, x, out)  # type: ignore[no-any-return]
