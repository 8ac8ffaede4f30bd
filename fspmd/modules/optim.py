"""`Sharded` parameters in ``torch.optim`` and ``torch.nn.utils.clip_grad_norm_``: what these ask of tensors alone.

What an optimizer computes are torch functions, which know `Sharded` values; but it checks what it is given, and groups
tensors below Python.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import optree
import torch
import torch.nn.utils.clip_grad
from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.placing.placement import device_get, device_put
from fspmd.sharded import Sharded, is_sharded
from fspmd.spec import P

Groups = dict[Any, tuple[list[list[Any]], list[int]]]
_GROUP = "_group_tensors_by_device_and_dtype"
_NORM = "get_total_norm"
_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
_installed = False


def install() -> None:
    """Wrap them, once per process; without a `Sharded` each wrapper goes straight to torch."""
    global _installed
    if _installed:
        return
    _installed = True
    for home in (importlib.import_module("torch.optim.optimizer"), torch.nn.utils.clip_grad):
        setattr(home, _GROUP, _grouping(getattr(home, _GROUP)))
    for name in _CLIPS:
        clip = _taking_one(getattr(torch.nn.utils, name))
        for home in (torch.nn.utils, torch.nn.utils.clip_grad):
            setattr(home, name, clip)
    norm = _over_meshes(torch.nn.utils.get_total_norm)
    for home, name in ((torch.nn.utils, _NORM), (torch.nn.utils.clip_grad, f"_{_NORM}")):
        setattr(home, name, norm)
    optimizer: Any = torch.optim.Optimizer
    optimizer.add_param_group = _adding(optimizer.add_param_group)


def _grouping(original: Any) -> Any:
    """Lists of tensors by device and dtype of the first list's."""

    @functools.wraps(original)
    def group(lists: Sequence[Sequence[Any]], with_indices: bool = False) -> Groups:
        if not any(map(is_sharded, lists[0])):
            found: Groups = original(lists, with_indices)
            return found
        groups: Groups = {}
        for i, first in enumerate(lists[0]):
            columns, indices = groups.setdefault((first.device, first.dtype), ([[] for _ in lists], []))
            indices.append(i)
            for column, values in zip(columns, lists, strict=True):
                if values:
                    column.append(values[i])
        return groups

    return group


def _taking_one(clip: Any) -> Any:
    """A `Sharded` by itself is one parameter, not one for each of its rows."""

    @functools.wraps(clip)
    def wrapper(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        return clip([parameters] if is_sharded(parameters) else parameters, *args, **kwargs)

    return wrapper


def _over_meshes(get_total_norm: Any) -> Any:
    """Of values on several meshes the norm of their norms, which every rank has."""

    @functools.wraps(get_total_norm)
    def wrapper(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensors, Tensor):
            return get_total_norm([tensors], norm_type, *args, **kwargs)
        listed = list(tensors)
        by_mesh: dict[Any, list[Any]] = {}
        for x in listed:
            by_mesh.setdefault(x.spec.mesh if isinstance(x, Sharded) else None, []).append(x)
        if len(by_mesh.keys() - {None}) > 1:
            listed = [device_get(get_total_norm(own, norm_type)) for own in by_mesh.values()]
        return get_total_norm(listed, norm_type, *args, **kwargs)

    return wrapper


def _adding(original: Any) -> Any:
    """Torch checks the blocks, which are leaves where the `Sharded` parameters are; these take their places again."""

    @functools.wraps(original)
    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        given = param_group.get("params") if isinstance(param_group, dict) else None
        if given is None or isinstance(given, (Tensor, set)):
            original(self, param_group)
            return
        params = [given] if is_sharded(given) else list(given)
        values = [x[1] if type(x) is tuple else x for x in params]
        param_group["params"] = [(x[0], _block(x[1])) if type(x) is tuple else _block(x) for x in params]
        held = {id(x.local): x for x in values if is_sharded(x)}
        if held:
            _check(self, param_group, values)
            _take_lists(self, param_group)
        original(self, param_group)
        if held:
            param_group["params"] = [held.get(id(x), x) for x in param_group["params"]]
            if _named_by_number not in self._optimizer_state_dict_post_hooks.values():
                self.register_state_dict_post_hook(_named_by_number)
                self.register_load_state_dict_pre_hook(_veiled)
                self.register_load_state_dict_post_hook(_unveil)

    return add_param_group


def _block(x: Any) -> Any:
    return x.local if isinstance(x, Sharded) else x


def _check(optimizer: torch.optim.Optimizer, group: dict[str, Any], params: list[Any]) -> None:
    name = type(optimizer).__name__
    taken = {id(x) for group in optimizer.param_groups for x in group["params"]}
    if twice := [x for x in params if id(x) in taken]:
        raise ArgumentError(f"{name} got {twice[0]!r} in more than one group of parameters; give it once")


def _take_lists(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Unless told otherwise: torch keeps maxima with ``out=``, which no `Sharded` takes, but of lists in place."""
    given = {**optimizer.defaults, **group}
    if given.get("foreach", False) is None and (given.get("amsgrad") or isinstance(optimizer, torch.optim.Adamax)):
        group["foreach"] = True


def _named_by_number(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """What torch does with the states of tensors."""
    groups = zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    numbers = {id(x): n for group, packed in groups for x, n in zip(group["params"], packed["params"], strict=True)}
    state_dict["state"] = {numbers.get(id(key), key): value for key, value in state_dict["state"].items()}


class _Veiled:
    """A `Sharded` that torch hands on as it is: a value that can be iterated it would take apart."""

    __slots__ = ("value",)

    def __init__(self, value: Sharded) -> None:
        self.value = value


def _veiled(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state: Any = state_dict["state"]
    return {**state_dict, "state": _each(lambda x: _Veiled(x) if isinstance(x, Sharded) else x, state)}


def _unveil(optimizer: torch.optim.Optimizer) -> None:
    """And lay all out as the parameters lie, however they were saved."""
    for param, state in optimizer.state.items():
        optimizer.state[param] = {
            key: _each(lambda x, param=param, key=key: _laid_out(x, param, key), value) for key, value in state.items()
        }
    for group in optimizer.param_groups:
        if any(map(is_sharded, group["params"])):
            _take_lists(optimizer, group)


def _laid_out(x: Any, param: Any, key: str) -> Any:
    """A state of a parameter: of its shape as it lies, of another whole on every rank of its mesh."""
    if isinstance(x, _Veiled):
        x = x.value
        if key != "step" and param.is_floating_point():  # as torch does with tensors
            x = x.to(param.dtype)
    elif not isinstance(x, Tensor) or not x.ndim:
        return x
    if not is_sharded(param):
        return device_get(x)
    partition = param.spec.partition if x.shape == param.shape else P()
    return device_put(x, partition, mesh=param.spec.mesh)


def _each(f: Any, tree: Any) -> Any:
    return optree.tree_map(f, tree, is_leaf=is_sharded, none_is_leaf=True)
