"""`nn.Module`s as functions of their parameters: `functional_call`, `attached` and `attach`.

Leaves stand in the places of the module's tensors, which are known by name. Threads wait for each other's calls of one
module.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from fspmd.errors import ArgumentError, TreeError
from fspmd.foreign import foreign_misfit
from fspmd.inspection.causes import name_modules_of
from fspmd.messages import Failure, described, quoted, refuse
from fspmd.modules.paths import leaves_by_name, near
from fspmd.modules.plans import ParallelPlan
from fspmd.modules.style_hooks import hook, styled_modules
from fspmd.sharded import is_sharded
from fspmd.torch_internals import FLAT_WEIGHT_REFS, FLAT_WEIGHTS, RUNS_BACKWARD, make_parameter
from fspmd.tracing import LASTING, RecomputeContext, recomputed_in

# --- names -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value of the tree of parameters, the container that has it, and its key there."""

    value: Any
    container: Any
    key: Any


def named_leaves(tree: Any, failures: list[Failure]) -> dict[str, Leaf]:
    """Each leaf by its qualified name, in which dots join the keys. A name that is given twice is a failure."""
    leaves: dict[str, Leaf] = {}
    for part in tree if isinstance(tree, tuple) else (tree,):
        if not isinstance(part, (Mapping, list)):
            text = f"params is {described(part)}; give it a dict by name, such as dict(m.named_parameters())"
            failures.append(Failure(text, TreeError))
            continue
        for name, value, container, key in leaves_by_name(part):
            if name in leaves:
                failures.append(Failure(f"{name!r} is given twice; give it once", TreeError))
            leaves[name] = Leaf(value, container, key)
    return leaves


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a tensor in a module: the dict of parameters or buffers, and the key there."""

    tensors: dict[str, Any]
    key: str

    @property
    def value(self) -> Any:
        """The present value."""
        return self.tensors.get(self.key)

    @property
    def exists(self) -> bool:
        """Whether the module still has the place. ``torch.nn.utils.prune`` removes it."""
        return self.key in self.tensors

    def put(self, value: Any) -> None:
        """Put another value there."""
        self.tensors[self.key] = value


def slots_of(module: nn.Module) -> dict[str, Slot]:
    """The place of every parameter and buffer by qualified name. A submodule with several names appears under each."""
    return {
        f"{prefix}.{key}" if prefix else key: Slot(tensors, key)
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for tensors in (owner._parameters, owner._buffers)
        for key in tensors
    }


def _values_by_name(leaves: dict[str, Leaf], slots: dict[str, Slot], failures: list[Failure]) -> dict[str, Any]:
    """The value for each slot. A value for one of several tied slots is for all of them."""
    for name, leaf in leaves.items():
        if name not in slots:
            failures.append(Failure(f"the module has no {name!r}{near(name, slots)}", TreeError))
        elif leaf.value is not None and not isinstance(leaf.value, Tensor):
            failures.append(Failure(f"{name!r} is {described(leaf.value)}; expected a tensor", ArgumentError))
        elif foreign := foreign_misfit(leaf.value):
            failures.append(Failure(f"{name!r} is {foreign[0]}", ArgumentError, foreign[1]))
    tied: dict[int, list[str]] = {}
    for name, slot in slots.items():
        if (value := slot.value) is not None:
            tied.setdefault(id(value), []).append(name)
        elif name in leaves and leaves[name].value is not None:
            failures.append(Failure(f"the module has no {name!r}: it is None there; leave it out", TreeError))
    values: dict[str, Any] = {}
    for names in tied.values():
        given = {id(leaves[name].value): name for name in names if name in leaves}
        if len(given) > 1:
            text = f"{quoted(given.values())} are one tensor in the module, but params gives several; give it once"
            failures.append(Failure(text, TreeError))
        elif given:
            values |= dict.fromkeys(names, leaves[next(iter(given.values()))].value)
        elif slots[names[0]].value.is_meta:
            text = f"{names[0]!r} is left out, and the module has it on the meta device"
            is_buffer = not isinstance(slots[names[0]].value, nn.Parameter)
            advice = "give it buffers, too: (params, dict(module.named_buffers()))" if is_buffer else ""
            failures.append(Failure(text, TreeError, advice))
    return values


# --- turns -----------------------------------------------------------------------------------------------------------


class _Turn:
    """The right to use a module. One thread has it at a time, and shares it with autograd while it is in backward."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.owner = 0

    @contextmanager
    def acquired(self) -> Iterator[None]:
        """Wait until no other thread has the module, and have it in the context."""
        while not self.lock.acquire(timeout=_PATIENCE):
            if _is_in_backward(self.owner):
                yield
                return
        before, self.owner = self.owner, threading.get_ident()
        try:
            yield
        finally:
            self.owner = before
            self.lock.release()


_PATIENCE: Final = 0.02  # seconds after which a thread looks whether the owner is in backward
_turns: Final[WeakKeyDictionary[nn.Module, _Turn]] = WeakKeyDictionary()
_turns_lock: Final = threading.Lock()


def _is_in_backward(thread: int) -> bool:
    """Whether a thread waits for autograd."""
    frame = sys._current_frames().get(thread)
    return frame is not None and frame.f_code.co_name == RUNS_BACKWARD


def turn_of(module: nn.Module) -> _Turn:
    """The turn of a module."""
    with _turns_lock:
        return _turns.setdefault(module, _Turn())


# --- leaves in a module ----------------------------------------------------------------------------------------------


class Attachment:
    """Leaves for the places of a module's tensors, and the styles of a plan, to be put there any number of times.

    An attachment keeps neither the module nor its submodules alive.
    """

    def __init__(self, module: nn.Module, params: Any, plan: ParallelPlan | None, what: str) -> None:
        failures: list[Failure] = []
        self.leaves = named_leaves(params, failures)
        slots = slots_of(module)
        values = _values_by_name(self.leaves, slots, failures)
        if failures:
            refuse(f"{what} of {type(module).__name__}: params does not fit the module", failures)
        self.caller, self.turn = what, turn_of(module)
        name_modules_of(module)
        self.slots = {name: slots[name] for name in values}
        self.values = values
        self.recurrent = [ref(owner) for owner in module.modules() if isinstance(owner, nn.RNNBase)]
        self.plan = plan
        self.styled = [] if plan is None else styled_modules(module, plan, what)
        self.hooked = False

    def mark_parameters(self) -> None:
        """Make the leaves in the places of parameters parameters, as ``nn.Parameter(x)`` of a `Sharded` is one.

        They stay the same objects, which optimizers hold.
        """
        for name, value in self.values.items():
            if is_sharded(value) and value.is_leaf and isinstance(self.slots[name].value, nn.Parameter):
                make_parameter(value)

    def called(self) -> AbstractContextManager[None]:
        """The context of one call, which one thread enters at a time.

        At its end tensors that forward replaced are put into ``params``. When backward repeats a part of the call, the
        leaves are in their places again.
        """
        return self._in_place(self.values, hands_back=True)

    def current(self) -> RecomputeContext:
        """The context in which backward repeats a part of the call: with the present values in the places.

        These may be values that the user put there.
        """
        values = {name: self.slots[name].value for name in self.values if self.slots[name].exists}
        return functools.partial(self._in_place, values)

    @contextmanager
    def _in_place(self, values: Mapping[str, Any], *, hands_back: bool = False) -> Iterator[None]:
        with self.turn.acquired(), ExitStack() as stack:
            self.enter(stack, values)
            with recomputed_in(self.current):
                yield
            if hands_back:
                self.hand_back()

    def enter(self, stack: ExitStack, values: Mapping[str, Any]) -> None:
        """Put values and hooks into the module, and onto the stack the calls that remove them."""
        replaced = [
            (self.slots[name], x, old) for name, x in values.items() if (old := self.slots[name].value) is not x
        ]
        stack.callback(_put_back, replaced)
        for name, value in values.items():
            self.slots[name].put(value)
        for reference in self.recurrent:
            if (owner := reference()) is not None:
                stack.callback(_put_back_weights, reference, {n: x for n, x in vars(owner).items() if n in _WEIGHTS})
                weights = [x for layer in owner.all_weights for x in layer]
                vars(owner).update({FLAT_WEIGHTS: weights, "flatten_parameters": _left_apart})
        if self.plan is not None and not self.hooked:
            self.hooked = True
            stack.callback(setattr, self, "hooked", False)
            for styled, placed in self.styled:
                if (module := styled()) is not None:
                    hook(module, placed, self.plan, stack)

    def hand_back(self) -> None:
        """Write tensors that forward put in the places of leaves into the containers of these leaves."""
        for name, leaf in self.leaves.items():
            if name not in self.slots or (value := self.slots[name].value) is leaf.value:
                continue
            if not self.slots[name].exists:
                raise ArgumentError(
                    f"{self.caller}: the module has removed its {name!r}, as torch.nn.utils.prune does, so its own "
                    "tensor cannot be put back; attach params for good instead, attach(module, params), then prune; "
                    f"before detach() write prune.remove(module, {name!r})"
                )
            if not isinstance(leaf.container, (MutableMapping, MutableSequence)):
                raise TreeError(
                    f"{self.caller}: forward put another tensor in the place of {name!r}, but params has it in "
                    f"{described(leaf.container)}, which cannot be written; put it into a dict"
                )
            leaf.container[leaf.key] = value


def _put_back(replaced: list[tuple[Slot, Any, Any]]) -> None:
    """Put the module's own tensors back. Pruning may have moved a leaf to another key, where it is searched."""
    for slot, leaf, value in replaced:
        if slot.exists:
            slot.put(value)
        else:
            slot.tensors.update((key, value) for key, x in slot.tensors.items() if x is leaf)


#: what a recurrent layer keeps beside its parameters: their list, and here the method that packs them on a GPU
_WEIGHTS: Final = frozenset({FLAT_WEIGHTS, FLAT_WEIGHT_REFS, "flatten_parameters"})


def _left_apart() -> None:
    """Pack no weights into one piece of memory, as cuDNN likes them: of a `Sharded` there are only blocks."""


def _put_back_weights(owner: ref[nn.RNNBase], kept: dict[str, Any]) -> None:
    if (module := owner()) is not None:
        for name in _WEIGHTS:
            vars(module).pop(name, None)
        vars(module).update(kept)


# --- public functions ------------------------------------------------------------------------------------------------

M = TypeVar("M", bound=nn.Module)


def functional_call(
    module: nn.Module, params: Any, /, *args: Any, styles: ParallelPlan | None = None, **kwargs: Any
) -> Any:
    """``module(*args, **kwargs)`` with ``params`` in the place of its parameters and buffers.

    Args:
        module: Any module, also on the meta device. It has its own tensors again when the call ends or fails.
        params: `Sharded` values or plain tensors by qualified name: a flat dict (``{"layers.0.weight": w}``), a nested
            tree of dicts and lists (``{"layers": [{"weight": w}]}``), or a tuple of several (parameters, buffers). A
            tensor without a leaf keeps the module's own value. One leaf is enough for several tied names.
        styles: The plan of `parallelize`. Its styles lay out arguments and results of the modules at their patterns.

    Outside a body the leaves are `Sharded`, and the module's functions run on global shapes. In a body of `shard_map`
    the leaves are blocks, and so are the values in ``forward``.

    Buffers that ``forward`` writes in place (running statistics) change in ``params``. A buffer that ``forward``
    replaces by another tensor is put into the dict of ``params`` that had it. Calls of one module from several threads
    wait for each other. A checkpoint of torch in ``forward``, reentrant or not, computes again with the same leaves.

    Communication: that of the functions in ``forward``.

    Raises:
        TreeError: before the call. It names every leaf whose name is unknown, given twice, or at odds with a tied leaf;
            every parameter that is left out while the module is on the meta device; and every pattern of ``styles``
            without a module.
        ArgumentError: ``module`` is no ``nn.Module``, or was compiled by TorchScript; or a leaf is no tensor.

    >>> from fspmd import P, device_put, make_mesh
    >>> with torch.device("meta"):
    ...     module = nn.Linear(6, 8)
    >>> w = device_put(torch.ones(8, 6), P("x"), mesh=make_mesh((4,), ("x",)))
    >>> functional_call(module, {"weight": w, "bias": torch.zeros(8)}, torch.ones(3, 6))
    Sharded f32[3, 8@x] on mesh(x=4)
    """
    _check_module(module, "functional_call", "module, params, x")
    with Attachment(module, params, styles, "functional_call").called():
        out = module(*args, **kwargs)
        if styles is not None:
            styles.warn_of_unused()
    return out


@contextmanager
def attached(module: M, params: Any, /, *, styles: ParallelPlan | None = None) -> Iterator[M]:
    """Within ``with attached(module, params):`` the module has ``params`` in the place of its own tensors.

    All code that takes the module then sees them: ``module(x)``, ``module.generate(...)``, ``module.parameters()``, and
    optimizers. Leaves in the places of parameters become parameters, as ``nn.Parameter(x)`` is one, so that they can be
    tied. Arguments, errors and writes are those of `functional_call`. Other threads' calls of the module wait until the
    context ends. Backward may follow later, even if a checkpoint computes again in it.

    >>> from fspmd import P, device_put, make_mesh
    >>> module, mesh = nn.Linear(6, 8), make_mesh((4,), ("x",))
    >>> params = {name: device_put(value, P("x"), mesh=mesh) for name, value in module.state_dict().items()}
    >>> with attached(module, params):
    ...     list(module.parameters()), module(torch.ones(3, 6))
    ([Sharded f32[8@x, 6] on mesh(x=4), Sharded f32[8@x] on mesh(x=4)], Sharded f32[3, 8@x] on mesh(x=4))
    """
    _check_module(module, "attached", "module, params")
    attachment = Attachment(module, params, styles, "attached")
    attachment.mark_parameters()
    with attachment.called():
        yield module


_lasting: Final[WeakKeyDictionary[nn.Module, Attached]] = WeakKeyDictionary()


class Attached:
    """The leaves that `attach` has put into a module, until `detach`."""

    def __init__(self, module: nn.Module, attachment: Attachment) -> None:
        self._attachment = attachment
        self._stack = ExitStack()
        attachment.mark_parameters()
        attachment.enter(self._stack, attachment.values)
        LASTING.append(attachment.current)
        weakref.finalize(module, self._on_deleted_module)

    def detach(self) -> None:
        """Put the module's own tensors back. A second call, or a call after another `attach`, does nothing.

        Raises:
            ArgumentError: the module has removed a tensor, as ``torch.nn.utils.prune`` does. The module is unchanged.
        """
        if self._attachment.current in LASTING:
            self._attachment.hand_back()
            LASTING.remove(self._attachment.current)
            self._stack.close()

    def _on_deleted_module(self) -> None:
        with suppress(ArgumentError):
            self.detach()
        if self._attachment.current in LASTING:
            LASTING.remove(self._attachment.current)


def attach(module: nn.Module, params: Any, /, *, styles: ParallelPlan | None = None) -> Attached:
    """Put ``params`` into a module, as `attached` does, until ``detach()`` of the result or another `attach`.

    >>> from fspmd import P, device_put, make_mesh
    >>> module = nn.Linear(6, 8, bias=False)
    >>> leaves = attach(module, {"weight": device_put(torch.ones(8, 6), P("x"), mesh=make_mesh((4,), ("x",)))})
    >>> optimizer = torch.optim.AdamW(module.parameters())
    >>> module(torch.ones(3, 6))
    Sharded f32[3, 8@x] on mesh(x=4)
    >>> leaves.detach()
    >>> type(module.weight)
    <class 'torch.nn.parameter.Parameter'>
    """
    _check_module(module, "attach", "module, params")
    with turn_of(module).acquired():
        before = _lasting.get(module)
        if before is not None:
            before.detach()
        _lasting[module] = leaves = Attached(module, Attachment(module, params, styles, "attach"))
    return leaves


def _check_module(module: Any, what: str, given: str) -> None:
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"{what} got {described(module)} for module; give it an nn.Module: {what}({given})")
    if isinstance(module, torch.jit.ScriptModule):
        raise ArgumentError(
            f"{what} got a module compiled by TorchScript, whose tensors cannot be exchanged; "
            "give it the module before compilation"
        )
