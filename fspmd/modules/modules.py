"""`nn.Module`s as functions of their parameters: `functional_call`, on `Sharded` or plain leaves, flat or nested."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fspmd.errors import ArgumentError, TreeError
from fspmd.messages import Failure, described, quoted, refuse
from fspmd.modules.parallel import ParallelPlan, Placed
from fspmd.modules.paths import leaves_by_name, matches, near
from fspmd.sharded import Sharded


def functional_call(
    module: nn.Module, params: Any, /, *args: Any, styles: ParallelPlan | None = None, **kwargs: Any
) -> Any:
    """``module(*args, **kwargs)`` with ``params`` in the place of its parameters and buffers.

    Args:
        module: Any module as it is, on the meta device too; its own tensors are back when the call ends or fails.
        params: `Sharded` values or plain tensors by qualified name: a flat dict (``{"layers.0.weight": w}``), a nested
            one of dicts and lists (``{"layers": [{"weight": w}]}``), or a tuple of several (parameters, buffers).
            What it leaves out keeps the module's own value. One name of several that are tied stands for all.
        styles: The plan of `parallelize`: arguments and results of the modules where its styles stand are arranged.

    Outside a body the leaves are `Sharded` and the module's functions run on global shapes; in a body of shard_map the
    leaves are blocks and so are the values in ``forward``. Buffers written in place (running statistics) change in
    ``params``; a buffer that ``forward`` replaces by another tensor is put into the dict that held it. Calls of one
    module from several threads wait for each other. Communication: what the functions in ``forward`` need.

    Raises:
        TreeError: before the call, naming every leaf whose name is unknown, given twice, or at odds with one it is
            tied to, every parameter that was left out while the module is on the meta device, and every pattern of
            ``styles`` at which there is no module.
        ArgumentError: ``module`` is no ``nn.Module`` or has been compiled by TorchScript; a leaf is no tensor;
            ``forward`` calls a module in a checkpoint, whose recomputation would find the module's own tensors.

    >>> from fspmd import P, device_put, make_mesh
    >>> with torch.device("meta"):
    ...     module = nn.Linear(6, 8)
    >>> w = device_put(torch.ones(8, 6), P("x"), mesh=make_mesh((4,), ("x",)))
    >>> functional_call(module, {"weight": w, "bias": torch.zeros(8)}, torch.ones(3, 6))
    Sharded f32[3, 8@x] on mesh(x=4)
    """
    _check_module(module)
    with _lock_of(module), _swapped(module, params), _arranged(module, styles), _no_recomputation(module):
        return module(*args, **kwargs)


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        call = "functional_call(module, params, x)"
        raise ArgumentError(f"functional_call got {described(module)} for module; give it an nn.Module: {call}")
    if isinstance(module, torch.jit.ScriptModule):
        raise ArgumentError(
            "functional_call got a module compiled by TorchScript, whose tensors cannot be exchanged; "
            "give it the module that was compiled"
        )


_locks: Final[WeakKeyDictionary[nn.Module, threading.RLock]] = WeakKeyDictionary()
_making = threading.Lock()


def _lock_of(module: nn.Module) -> threading.RLock:
    with _making:
        return _locks.setdefault(module, threading.RLock())


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
    owner: nn.Module


def slots_of(module: nn.Module) -> dict[str, Slot]:
    """Every parameter and buffer by qualified name; of a module that stands in several places, by each name."""
    return {
        f"{prefix}.{key}" if prefix else key: Slot(held, key, owner)
        for prefix, owner in module.named_modules(remove_duplicate=False)
        for held in (owner._parameters, owner._buffers)
        for key in held
    }


# --- the exchange ----------------------------------------------------------------------------------------------------


@contextmanager
def _swapped(module: nn.Module, params: Any) -> Iterator[None]:
    """The leaves of ``params`` in the module's own dicts, and its own back again."""
    failures: list[Failure] = []
    leaves = named_leaves(params, failures)
    slots = slots_of(module)
    values = _values_by_name(leaves, slots, failures)
    if failures:
        refuse(f"functional_call of {type(module).__name__}: params does not fit the module", failures)
    own = [(slots[name], slots[name].held[slots[name].key]) for name in values]
    with ExitStack() as stack:
        for slot, value in own:
            stack.callback(slot.held.__setitem__, slot.key, value)
        for name, value in values.items():
            slots[name].held[slots[name].key] = value
        for owner in {id(slot.owner): slot.owner for slot, _ in own if isinstance(slot.owner, nn.RNNBase)}.values():
            stack.callback(setattr, owner, "_flat_weights", owner._flat_weights)
            owner._flat_weights = [getattr(owner, name) for name in owner._flat_weights_names]
        yield
        for name, leaf in leaves.items():
            _hand_back(name, leaf, slots[name].held.get(slots[name].key))


def _values_by_name(leaves: dict[str, Leaf], slots: dict[str, Slot], failures: list[Failure]) -> dict[str, Any]:
    """What each slot gets, tied ones too."""
    for name, leaf in leaves.items():
        if name not in slots:
            failures.append(Failure(f"the module has no {name!r}{near(name, slots)}", TreeError))
        elif leaf.value is not None and not isinstance(leaf.value, (Tensor, Sharded)):
            failures.append(Failure(f"{name!r} is {described(leaf.value)}; expected a tensor", ArgumentError))
    tied: dict[int, list[str]] = {}
    for name, slot in slots.items():
        if (value := slot.held[slot.key]) is not None:
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
        elif slots[names[0]].held[slots[names[0]].key].is_meta:
            failures.append(Failure(f"{names[0]!r} is left out, and the module has it on the meta device", TreeError))
    return values


def _hand_back(name: str, leaf: Leaf, now: Any) -> None:
    """A tensor that forward put in the place of a leaf, into the container that held the leaf."""
    if now is leaf.value:
        return
    if not isinstance(leaf.holder, (MutableMapping, MutableSequence)):
        raise TreeError(
            f"functional_call: forward put another tensor in the place of {name!r}, but params holds that in "
            f"{described(leaf.holder)}, which cannot be written; hold it in a dict"
        )
    leaf.holder[leaf.key] = now


@contextmanager
def _arranged(module: nn.Module, plan: ParallelPlan | None) -> Iterator[None]:
    """Hooks on the modules where styles stand, for one call."""
    if plan is None:
        yield
        return
    found = [(owner, plan.at(path)) for path, owner in module.named_modules(remove_duplicate=False)]
    used = {pattern for _, placed in found if placed is not None for pattern in placed.styles}
    lost = [p for p in plan.styles if p not in used and not any(matches(p, row.name) for row in plan.rows)]
    if lost:
        paths = [path for path, _ in module.named_modules(remove_duplicate=False)][1:]
        failures = [Failure(f"no module at {pattern!r}{near(pattern, paths)}", TreeError) for pattern in lost]
        refuse(f"functional_call of {type(module).__name__}: styles do not fit the module", failures)
    with ExitStack() as stack:
        for owner, placed in found:
            if placed is not None:
                _hook(owner, placed, stack)
        yield


def _hook(owner: nn.Module, placed: Placed, stack: ExitStack) -> None:
    before = owner.register_forward_pre_hook(lambda _, args, kwargs: placed.inputs(args, kwargs), with_kwargs=True)
    stack.callback(before.remove)
    stack.callback(owner.register_forward_hook(lambda _, args, out: placed.outputs(out)).remove)


@contextmanager
def _no_recomputation(module: nn.Module) -> Iterator[None]:
    """Refuses checkpoints within the call: what they compute again in backward sees other parameters."""
    outside = _saved_tensors_hooks(True)

    def check(owner: nn.Module, _: Any) -> None:
        hooks = _saved_tensors_hooks(True)
        known = outside is not None and hooks is not None and hooks[0] is outside[0]
        if hooks is not None and not known and "_checkpoint_hook" in hooks[0].__qualname__:
            raise ArgumentError(
                f"functional_call of {type(module).__name__}: its forward calls {type(owner).__name__} in a "
                "checkpoint, which computes again in backward, when the module has its own tensors back; call that "
                "part as fspmd.checkpoint(lambda params, x: functional_call(part, params, x))(params, x)"
            )

    handle = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
