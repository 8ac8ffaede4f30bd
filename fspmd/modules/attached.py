"""Leaves in the places of a module's tensors: which name is which place, and who has a module when."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from fspmd.errors import ArgumentError, TreeError
from fspmd.inspection.module_paths import name_modules_of
from fspmd.messages import Failure, described, quoted, refuse
from fspmd.modules.paths import leaves_by_name, near
from fspmd.modules.plans import ParallelPlan
from fspmd.modules.style_hooks import hook, stands
from fspmd.sharded import is_sharded
from fspmd.tracing import RecomputeContext, recomputed_in

# --- names -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value of the tree of parameters, and the container that holds it."""

    value: Any
    holder: Any
    key: Any


def named_leaves(tree: Any, failures: list[Failure]) -> dict[str, Leaf]:
    """Each leaf by its qualified name, dots joining the keys on the way; names given twice are failures."""
    found: dict[str, Leaf] = {}
    for part in tree if isinstance(tree, tuple) else (tree,):
        if not isinstance(part, (Mapping, list)):
            text = f"params is {described(part)}; give it a dict by name, such as dict(m.named_parameters())"
            failures.append(Failure(text, TreeError))
            continue
        for name, value, holder, key in leaves_by_name(part):
            if name in found:
                failures.append(Failure(f"{name!r} is given twice; give it once", TreeError))
            found[name] = Leaf(value, holder, key)
    return found


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a module keeps a tensor: the dict of its parameters or buffers, and the key there."""

    held: dict[str, Any]
    key: str

    @property
    def value(self) -> Any:
        """What is there now."""
        return self.held.get(self.key)

    @property
    def is_there(self) -> bool:
        """Whether the module has not given it up since, as ``torch.nn.utils.prune`` has it do."""
        return self.key in self.held

    def put(self, value: Any) -> None:
        """Another value in its place."""
        self.held[self.key] = value


def slots_of(module: nn.Module) -> dict[str, Slot]:
    """Every parameter and buffer by qualified name; of a module that stands in several places, by each name."""
    return {
        f"{prefix}.{key}" if prefix else key: Slot(held, key)
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for held in (owner._parameters, owner._buffers)
        for key in held
    }


def _values_by_name(leaves: dict[str, Leaf], slots: dict[str, Slot], failures: list[Failure]) -> dict[str, Any]:
    """What each slot gets, tied ones too."""
    for name, leaf in leaves.items():
        if name not in slots:
            failures.append(Failure(f"the module has no {name!r}{near(name, slots)}", TreeError))
        elif leaf.value is not None and not isinstance(leaf.value, Tensor):
            failures.append(Failure(f"{name!r} is {described(leaf.value)}; expected a tensor", ArgumentError))
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
    """One thread at a time has a module. While it waits in backward, threads of autograd's run for it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.owner = 0

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Waits for it."""
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


_PATIENCE: Final = 0.02  # seconds, after which a thread asks what the owner does
_turns: Final[WeakKeyDictionary[nn.Module, _Turn]] = WeakKeyDictionary()
_making = threading.Lock()


def _is_in_backward(thread: int) -> bool:
    """Whether a thread waits for autograd."""
    frame = sys._current_frames().get(thread)
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def turn_of(module: nn.Module) -> _Turn:
    """The one of a module."""
    with _making:
        return _turns.setdefault(module, _Turn())


# --- leaves in a module ----------------------------------------------------------------------------------------------


class Attachment:
    """Leaves for the places of a module's tensors, and the styles of a plan: there for a while, any number of times.

    Of the module and its parts it keeps none alive.
    """

    def __init__(self, module: nn.Module, params: Any, plan: ParallelPlan | None, what: str) -> None:
        failures: list[Failure] = []
        self.leaves = named_leaves(params, failures)
        slots = slots_of(module)
        values = _values_by_name(self.leaves, slots, failures)
        if failures:
            refuse(f"{what} of {type(module).__name__}: params does not fit the module", failures)
        self.what, self.turn = what, turn_of(module)
        name_modules_of(module)
        self.slots = {name: slots[name] for name in values}
        self.values = values
        self.recurrent = [ref(owner) for owner in module.modules() if isinstance(owner, nn.RNNBase)]
        self.plan = plan
        self.styled = [] if plan is None else stands(module, plan, what)
        self.hooked = False

    def mark_parameters(self) -> None:
        """Leaves in the places of parameters are parameters, as ``nn.Parameter(x)`` of a Sharded is.

        They stay the objects that they are, which optimizers hold.
        """
        for name, value in self.values.items():
            if is_sharded(value) and value.is_leaf and isinstance(self.slots[name].value, nn.Parameter):
                value._is_param = True

    @contextmanager
    def called(self) -> Iterator[None]:
        """For one call: alone, what forward replaces handed back, and there again for what backward repeats of it."""
        with self.turn.taken(), ExitStack() as stack:
            self.enter(stack, self.values)
            with recomputed_in(self.again):
                yield
            self.hand_back()

    def again(self) -> RecomputeContext:
        """What a part of the call is to be repeated in: what is in the places now, be it put there by the user."""
        now = {name: self.slots[name].value for name in self.values if self.slots[name].is_there}
        return functools.partial(self._repeated, now)

    @contextmanager
    def _repeated(self, values: Mapping[str, Any]) -> Iterator[None]:
        with self.turn.taken(), ExitStack() as stack:
            self.enter(stack, values)
            with recomputed_in(self.again):
                yield

    def enter(self, stack: ExitStack, values: Mapping[str, Any]) -> None:
        """Put values and hooks there; the stack takes them away again."""
        own = [(self.slots[name], x, held) for name, x in values.items() if (held := self.slots[name].value) is not x]
        stack.callback(_put_back, own)
        for name, value in values.items():
            self.slots[name].put(value)
        for found in self.recurrent:
            if (owner := found()) is not None:
                stack.callback(_give_weights, found, owner._flat_weights)
                owner._flat_weights = [getattr(owner, name) for name in owner._flat_weights_names]
        if self.plan is not None and not self.hooked:
            self.hooked = True
            stack.callback(setattr, self, "hooked", False)
            for at, placed in self.styled:
                if (module := at()) is not None:
                    hook(module, placed, self.plan, stack)

    def hand_back(self) -> None:
        """Tensors that forward put in the places of leaves, into the containers that held the leaves."""
        for name, leaf in self.leaves.items():
            if name not in self.slots or (now := self.slots[name].value) is leaf.value:
                continue
            if not self.slots[name].is_there:
                raise ArgumentError(
                    f"{self.what}: the module has given up its {name!r}, as torch.nn.utils.prune has it do, and cannot "
                    "be as it was before; put params there for good instead, attach(module, params), then prune; "
                    f"before detach() write prune.remove(module, {name!r})"
                )
            if not isinstance(leaf.holder, (MutableMapping, MutableSequence)):
                raise TreeError(
                    f"{self.what}: forward put another tensor in the place of {name!r}, but params holds that in "
                    f"{described(leaf.holder)}, which cannot be written; hold it in a dict"
                )
            leaf.holder[leaf.key] = now


def _put_back(own: list[tuple[Slot, Any, Any]]) -> None:
    """Own tensors, under the name that a leaf has by now: pruning gives it another."""
    for slot, leaf, value in own:
        if slot.is_there:
            slot.put(value)
        else:
            slot.held.update((key, value) for key, held in slot.held.items() if held is leaf)


def _give_weights(owner: ref[nn.RNNBase], weights: list[Any]) -> None:
    if (module := owner()) is not None:
        module._flat_weights = weights
