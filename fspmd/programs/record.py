"""Recording: a function runs once, and what it asks of torch and of the mesh is put down as one FX graph.

The steps are those below autograd and ``torch.func``, of forward and backward alike: aten functions on blocks,
collectives of the pair table, and a few functions of ours (`fspmd.tracing.step`). In a simulation a block is a
`LocalTensor`, and its functions are one step for all ranks.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import TensorWeakRef

from fspmd import tracing
from fspmd.errors import RecordError
from fspmd.local_view.type_rules import tensors_of
from fspmd.pairs import Call, StandIn, watch_with
from fspmd.programs.calls import Routed, runner, way_back
from fspmd.programs.escapes import Escapes
from fspmd.programs.generators import Generators, generators_of
from fspmd.programs.program import value_of
from fspmd.programs.refusals import check
from fspmd.sharded import Sharded, above
from fspmd.tracing import RecordingMode
from fspmd.transport import Pending
from fspmd.transport.abstract import imagined
from fspmd.transport.local_tensor import LocalTensor
from fspmd.transport.rows import Routes
from fspmd.watching.causes import Cause, trace

aten: Final = torch.ops.aten
functorch: Final = torch._C._functorch

#: kernels that give what they are given, where each process has a block of its own
_NAMES_ALONE: Final = frozenset({"alias", "apart", "pick"})
#: what torch does without being asked, and replays need not
_ALIASES: Final = frozenset({aten.detach.default, aten.alias.default})


class Number(int):
    """An integer that a step gave, such as a seed: known by its identity."""

    __slots__ = ()


class Recorder(RecordingMode):
    """The graph, and the node of every value that is alive."""

    def __init__(self, generators: Iterable[torch.Generator] = (), imagines: bool = False) -> None:
        super().__init__()
        self.imagines = imagines  # tensors are fake, and have no values
        self.graph = fx.Graph()
        self.given: list[Tensor] = []  # arguments
        self.refused: RecordError | None = None  # if somebody catches it, it is raised again
        self.generators = Generators(generators)
        self.modules: dict[int, torch.nn.Module] = {}  # those that ran
        self._gradients: dict[fx.Node, Any] = {}  # of what is captured
        self.captured: dict[fx.Node, Tensor] = {}  # tensors that were there before
        self.written: set[fx.Node] = set()  # arguments
        self._owners: dict[int, fx.Node] = {}  # of memory that was there before
        self.deferred = False  # steps run when gradients are asked for; collectives of processes are not done
        self._causes: dict[int, Cause] = {}  # of forward steps, by the numbers of autograd's nodes
        self._nodes: dict[int, tuple[TensorWeakRef, fx.Node]] = {}
        self._objects: dict[int, tuple[Any, fx.Node]] = {}  # of what is no tensor
        self._shards: dict[int, tuple[TensorWeakRef, fx.Node, int]] = {}  # of values of all ranks

    # --- values ---------------------------------------------------------------------------------------------------

    def argument(self, x: Tensor) -> fx.Node:
        """A tensor that the recorded function, or its backward, is called with."""
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(first):
            node = self.graph.placeholder(f"x{len(self._nodes)}")
        self._know(x, node)
        self._owners.setdefault(memory_of(x), node)
        self.given.append(x)
        return node

    def was_there(self, x: Tensor) -> bool:
        """Whether a tensor is an argument or closed over, and no result of a step."""
        known = self._nodes.get(id(x))
        found = known is not None and known[0]() is x
        return not found or any(x is y for y in (*self.given, *self.captured.values()))

    def refusal(self, error: RecordError) -> RecordError:
        """An error to be raised, now and at the end."""
        self.refused = self.refused or error
        return error

    def finish(self) -> None:
        """Raises for what has happened, and is no step."""
        if self.refused is not None:
            raise self.refused
        with self.real():
            self.generators.check()
            self.generators.check_python()
            trained = [node for node, x in self.captured.items() if x.is_leaf and x.grad is not self._gradients[node]]
            for node in trained:  # as if it had not happened
                self.captured[node].grad = self._gradients[node]
            if trained or any(x.grad is not None for x in self.given):
                raise RecordError(
                    "jit cannot record backward() into .grad of an argument, or of a tensor that the function closes "
                    "over: it happens once, and not in the record; use fspmd.grad or torch.autograd.grad, and return "
                    "the gradients"
                )

    def node_of(self, x: Tensor) -> fx.Node:
        """Of a value, or of what was there before."""
        known = self._nodes.get(id(x))
        if known is not None and known[0]() is x:
            return known[1]
        if type(x) is LocalTensor and any(self._is_known(shard) for shard in x.shards):  # ours put it together
            args = [self.node_of(shard) for shard in x.shards], x.frame, x.borrowed, x.storage_offset()
            node = self._put(LocalTensor, args, {}, constant=all(map(self.is_constant, x.shards)))
        elif (shard := self._shards.get(id(x))) is not None and shard[0]() is x:
            node = self._put(shard_of, shard[1:], {}, constant=self.is_constant(x))
        else:
            node = self.graph.create_node("get_attr", f"captured{len(self.captured)}")
            self.captured[node] = x
            self._gradients[node] = x.grad if x.is_leaf else None
            self._owners.setdefault(memory_of(x), node)
        self._know(x, node)
        return node

    def owner(self, x: Tensor) -> fx.Node | None:
        """Whose memory, of what was there before, a tensor lies in."""
        self.node_of(x)
        return self._owners.get(memory_of(x))

    def constant(self, x: Tensor) -> Tensor:
        """A tensor that is the same in every run of this rank, so that Python may know its value."""
        node = self.graph.create_node("get_attr", f"captured{len(self.captured)}")
        with self.real():
            self.captured[node] = x.clone()
            _describe(node, x)
        self._gradients[node] = None
        copy = self._put(aten.clone.default, (node,), {}, constant=True)
        self._know(x, copy)
        return x

    def lies(self, out: Any) -> None:
        """Say of results in the global view how they lie."""
        if type(out) is Sharded:
            known = self._nodes.get(id(out.local))
            if known is not None and known[0]() is out.local:
                known[1].meta.setdefault("spec", out.spec)
        elif isinstance(out, (tuple, list)):
            for one in out:
                self.lies(one)

    def is_constant(self, x: Tensor) -> bool:
        """Whether a value is the same in every run of this rank, so that Python may know it."""
        for table in (self._nodes, self._shards):
            found: Any = table.get(id(x))
            if found is not None and found[0]() is x:  # and nothing was written into it, or into what it is a view of
                return bool(found[1].meta.get("constant")) and not x._version
        return False

    def _is_known(self, x: Tensor) -> bool:
        found: Any = self._nodes.get(id(x)) or self._shards.get(id(x))
        return found is not None and found[0]() is x

    def _know(self, x: Tensor, node: fx.Node) -> None:
        self._nodes[id(x)] = TensorWeakRef(x), node
        if "value" not in node.meta:
            _describe(node, x)
        for i, shard in enumerate(x.shards) if type(x) is LocalTensor else ():
            self._shards[id(shard)] = TensorWeakRef(shard), node, i

    def _placed(self, value: Any) -> Any:
        """An argument as the graph has it."""
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return type(value)(map(self._placed, value)) if type(value) in (list, tuple) else value
        known = self._objects.get(id(value))
        return value if known is None else known[1]

    def _put(
        self,
        target: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        name: str | None = None,
        constant: bool = False,
    ) -> fx.Node:
        with warnings.catch_warnings():  # of sizes that differ from rank to rank, which are what they are
            warnings.simplefilter("ignore")
            node = self.graph.create_node("call_function", target, args, kwargs, name)
        node.meta["cause"], node.meta["backward"] = self._cause()
        node.meta["constant"] = constant
        node.meta["deferred"] = self.deferred
        return node

    def _cause(self) -> tuple[Cause, bool]:
        """Who asked for a step, and whether it computes gradients."""
        node: Any = torch._C._current_autograd_node()
        if node is not None:
            return self._causes.get(node._sequence_nr()) or trace().cause, True
        found = trace().cause
        self._causes.setdefault(torch.autograd._get_sequence_nr() - 1, found)  # type: ignore[attr-defined]
        return found, self.deferred

    def _results(self, out: Any, node: fx.Node) -> Any:
        """Make the results of a step known; numbers become such as can be told apart."""
        if isinstance(out, Tensor):
            self._know(out, node)
        elif type(out) in (tuple, list):
            return type(out)(self._results(one, _part(node, i)) for i, one in enumerate(out))
        elif type(out) is int:
            out = Number(out)
            self._objects[id(out)] = out, node
        elif isinstance(out, Pending):
            return _Landing(out, node, self)
        elif out is not None and type(out) is not bool:  # there is but one True
            self._objects[id(out)] = out, node
        return out

    # --- steps ----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or func.namespace == "prim":  # what is asked of a fake tensor, which a real one knows
            return func(*args, **kwargs)
        fixed = is_pure(func) and all(map(self.is_constant, tensors_of((*args, *kwargs.values()))))
        if not fixed:
            check(func, args, self)
        placed = tuple(map(self._placed, args))
        named = {name: self._placed(value) for name, value in kwargs.items()}
        random = draws(func)
        if random:
            self.check_draws(args, kwargs)
        with self.pause():
            if self.imagines and torch.Tag.data_dependent_output in func.tags:
                with self.real():
                    return func(*map(self.values_of, args), **kwargs)
            out = func(*args, **kwargs)
        if random:
            with self.real():
                self.generators.hide()
        if func in _ALIASES:
            self._know(out, placed[0])
            return out
        if func is aten.lift_fresh.default:  # of a constant, which must stay what it is
            func, fixed = aten.clone.default, True
        return self._results(out, self._put(func, placed, named, constant=fixed))

    def step(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], real: bool = False
    ) -> Any:
        """A function of ours, as one step."""
        placed = tuple(map(self._placed, args))
        named = {name: self._placed(value) for name, value in kwargs.items()}
        self.check_draws(args, kwargs)
        out: Any = None
        if not (getattr(function, "reads", False) and (self.deferred or self.imagines)):  # there is nothing to read
            try:
                with self.real() if real else self.pause():
                    out = function(*args, **kwargs)
            except DataDependentOutputException as error:
                raise self.refusal(
                    RecordError(
                        f"jit(f).lower(...) knows shapes alone, but what {trace().cause.what} moves depends on values; "
                        "call jit(f), or lower what stands before and after it"
                    )
                ) from error
        with self.real():
            self.generators.hide()
        node = self._put(function, placed, named)
        node.meta["effect"] = True
        return self._results(out, node)

    def collective(self, call: Call, x: Tensor, waits: bool) -> Any:
        """A call of the pair table."""
        placed = self._placed(x)
        with self.pause():
            if (self.deferred or self.imagines) and call.mesh.transport != "simulation":
                out: Any = getattr(imagined(), call.pair.kernel)(x, call.mesh, call.axes, call.options)
                out = out.wait() if waits else out
            else:
                out = (runner(call, waits) if call.options.routes is None else call.run if waits else call.start)(x)
        if isinstance(out, Tensor) and call.mesh.transport != "simulation" and call.pair.kernel in _NAMES_ALONE:
            self._know(out, placed)
            return out
        if call.options.routes is not None:
            node = self._put(Routed(call, waits), (placed, self._routes(call.options.routes)), {}, call.pair.name)
            node.meta["effect"] = True
            return self._results(out, node)
        node = self._put(runner(call, waits), (placed,), {}, call.pair.name)
        node.meta["call"], node.meta["waits"] = call, waits
        return self._results(out, node)

    def _routes(self, routes: Routes) -> fx.Node:
        """The step that gives routes, or the way back along them."""
        if id(routes) not in self._objects:
            self._objects[id(routes)] = routes, self._put(way_back, (self._placed(routes.transposed),), {})
        return self._objects[id(routes)][1]

    def values_of(self, x: Any) -> Any:
        """A constant with its values, where it is imagined without."""
        if not self.imagines or not isinstance(x, Tensor):
            return x
        with self.real():
            return self._value_of(self.node_of(x))

    def _value_of(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self.captured[node]
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._value_of)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    @contextmanager
    def real(self) -> Iterator[None]:
        """The same, and tensors made there have values."""
        with self.pause(), _disable_current_modes() if self.imagines else nullcontext():
            yield

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What runs inside is no step."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def check_draws(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises where a step would draw other numbers when it is replayed; it may draw from here on."""
        with self.real():
            try:
                self.generators.check(generators_of((*args, kwargs)))
                self.generators.show()
            except RecordError as error:
                self.refusal(error)
                raise

    @contextmanager
    def recording(self) -> Iterator[None]:
        """What runs inside is recorded."""
        tracing.begin()
        watch_with(self._watched)
        modules = register_module_forward_pre_hook(self._module)
        dispatch = above.dispatch
        above.dispatch = self._typed(dispatch)
        self.generators.hide()
        try:
            with self, Escapes(self):
                yield
        finally:
            self.generators.show()
            above.dispatch = dispatch
            modules.remove()
            watch_with(None)
            tracing.end()

    def _typed(self, dispatch: Any) -> Any:
        """What operators of `Sharded` values call, which are no torch functions to a mode."""

        def run(*args: Any) -> Any:
            out = dispatch(*args)
            if tracing.recorder() is self:
                self.lies(out)
            return out

        return run

    def _module(self, module: torch.nn.Module, inputs: Any) -> None:
        if tracing.recorder() is self:
            self.modules[id(module)] = module

    def _watched(self, x: Any, call: Call) -> Call:
        return call if type(call) is _Recorded else _Recorded(call, self)


def _describe(node: fx.Node, x: Tensor) -> None:
    """Say of a node what its result is, and in whose memory it lies."""
    node.meta["value"] = value_of(x)
    node.meta["held"] = (x.frame, x.uneven) if type(x) is LocalTensor else None
    node.meta["storage"] = storage = memory_of(x)
    before = node.all_input_nodes  # which are alive
    if node.target in (operator.getitem, Pending.wait):
        before = before[0].all_input_nodes
    owner = next((one for one in before if one.meta.get("storage") == storage), None)
    node.meta["memory"] = node if owner is None else owner.meta["memory"]


def _part(node: fx.Node, i: int) -> fx.Node:
    """One of the results of a step that gives several."""
    part = node.graph.call_function(operator.getitem, (node, i))
    part.meta.update({key: node.meta[key] for key in ("cause", "backward", "deferred")})
    return part


def state_of(module: torch.nn.Module) -> tuple[Any, ...]:
    """What of a module is a constant of a record: its mode, and which tensors are its parameters and buffers."""
    return module.training, *module._parameters.values(), *module._buffers.values()


def is_as(module: torch.nn.Module, was: tuple[Any, ...]) -> bool:
    """Whether a module is as it was."""
    now = state_of(module)
    return len(now) == len(was) and all(map(operator.is_, now, was))


def is_pure(func: Any) -> bool:
    """Whether an aten function gives the same of the same, and does nothing else."""
    return not func._schema.is_mutable and not draws(func)


def draws(func: Any) -> bool:
    """Whether an aten function draws from a generator."""
    return torch.Tag.nondeterministic_seeded in func.tags


def memory_of(x: Tensor) -> int:
    """What tells the memory of a tensor, and of its views, from that of others."""
    with torch._C.DisableTorchFunction():
        while functorch.is_functorch_wrapped_tensor(x):
            x = functorch.get_unwrapped(x)
        return int((x.shards[0] if type(x) is LocalTensor else x).untyped_storage()._cdata)


def shard_of(x: LocalTensor, i: int) -> Tensor:
    """The block of one simulated rank."""
    return x.shards[i]


class _Recorded(StandIn):
    """A call that is put down when it begins, on whatever thread."""

    __slots__ = ()
    by: Recorder

    def start(self, x: Tensor) -> Pending:
        if tracing.recorder() is not self.by:
            return self.plain.start(x)
        return self.by.collective(self.plain, x, False)  # type: ignore[no-any-return]

    def run(self, x: Tensor) -> Tensor:
        if tracing.recorder() is not self.by:
            return self.plain.run(x)
        return self.by.collective(self.plain, x, True)  # type: ignore[no-any-return]


class _Landing(Pending):
    """A collective under way, whose wait is a step too."""

    __slots__ = ("node", "recorder")

    def __init__(self, plain: Pending, node: fx.Node, recorder: Recorder) -> None:
        super().__init__(plain)
        self.node = node
        self.recorder = recorder

    def wait(self) -> Tensor:
        plain: Pending = self._value
        recorder = self.recorder
        if tracing.recorder() is not recorder:
            return plain.wait()
        with recorder.pause():
            out = plain.wait()
        return recorder._results(out, recorder._put(Pending.wait, (self.node,), {}))  # type: ignore[no-any-return]
