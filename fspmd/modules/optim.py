"""`Sharded` parameters in ``torch.optim`` and ``torch.nn.utils.clip_grad_norm_``.

An optimizer computes with torch functions, which take `Sharded` values. Three of its functions do not: optimizers,
clipping and averaged models group tensors below Python, the norm of gradients knows one mesh, and states are loaded as
plain tensors. These are wrapped here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import optree
import torch
import torch.nn.utils.clip_grad
from torch import Tensor

from fspmd.placement.device_put import device_get, device_put
from fspmd.sharded import Sharded, is_sharded
from fspmd.spec import P

Groups = dict[Any, tuple[list[list[Any]], list[int]]]
_GROUP = "_group_tensors_by_device_and_dtype"
_NORM = "get_total_norm"


def install() -> None:
    """Wrap the functions of torch. Without a `Sharded` each wrapper calls torch at once."""
    original = getattr(torch.nn.utils.clip_grad, _GROUP)
    grouping = _grouping(original)
    for module in list(sys.modules.values()):  # the module that defines it, and modules that imported it from there
        if getattr(module, "__dict__", {}).get(_GROUP) is original:
            setattr(module, _GROUP, grouping)
    norm = _over_meshes(torch.nn.utils.get_total_norm)
    for module, name in ((torch.nn.utils, _NORM), (torch.nn.utils.clip_grad, f"_{_NORM}")):
        setattr(module, name, norm)
    optimizer: Any = torch.optim.Optimizer
    optimizer.add_param_group = _adding(optimizer.add_param_group)


def _grouping(original: Any) -> Any:
    """Group lists of tensors by the device and dtype of the tensors of the first list."""

    @functools.wraps(original)
    def group(lists: Sequence[Sequence[Any]], with_indices: bool = False) -> Groups:
        groups: Groups = {}
        if not any(map(is_sharded, lists[0])):
            groups = original(lists, with_indices)
            return groups
        for i, first in enumerate(lists[0]):
            columns, indices = groups.setdefault((first.device, first.dtype), ([[] for _ in lists], []))
            indices.append(i)
            for column, values in zip(columns, lists, strict=True):
                if values:
                    column.append(values[i])
        return groups

    return group


def _over_meshes(get_total_norm: Any) -> Any:
    """The norm of values on several meshes: the norm of the norms of each mesh, which every rank has."""

    @functools.wraps(get_total_norm)
    def wrapper(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensors, Tensor):
            return get_total_norm([tensors], norm_type, *args, **kwargs)
        listed = list(tensors)
        by_mesh: dict[Any, list[Any]] = {}
        for x in listed:
            by_mesh.setdefault(x.spec.mesh if isinstance(x, Sharded) else None, []).append(x)
        if len(by_mesh.keys() - {None}) > 1:
            listed = [device_get(get_total_norm(values, norm_type)) for values in by_mesh.values()]
        return get_total_norm(listed, norm_type, *args, **kwargs)

    return wrapper


def _adding(original: Any) -> Any:
    """Let an optimizer of `Sharded` parameters lay out the states that it loads."""

    @functools.wraps(original)
    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        original(self, param_group)
        known = self._optimizer_load_state_dict_post_hooks.values()
        if any(map(is_sharded, self.param_groups[-1]["params"])) and _lay_out not in known:
            self.register_load_state_dict_post_hook(_lay_out)

    return add_param_group


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Give the states of an optimizer the layouts of the parameters, whatever layouts were saved."""
    for param, state in optimizer.state.items():
        optimizer.state[param] = optree.tree_map(functools.partial(_laid_out, param), state, none_is_leaf=True)


def _laid_out(param: Any, x: Any) -> Any:
    """A state of a parameter: in the parameter's layout if the shapes are equal, else whole on every rank."""
    if not isinstance(x, Tensor) or (not x.ndim and not is_sharded(x)):
        return x
    if not is_sharded(param):
        return device_get(x)
    partition = param.spec.partition if x.shape == param.shape else P()
    return device_put(x, partition, mesh=param.spec.mesh)
