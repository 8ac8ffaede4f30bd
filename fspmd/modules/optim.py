"""`Sharded` parameters in ``torch.optim``, ``torch.nn.utils.clip_grad_norm_`` and data parallelism; clipping of trees.

An optimizer computes with torch functions, which take `Sharded` values. Three of its functions do not: optimizers,
clipping and averaged models group tensors below Python, the norm of gradients knows one mesh, and states are loaded as
plain tensors. These are wrapped here. Torch's own data parallelism is refused.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from numbers import Real
from typing import Any, NoReturn

import optree
import torch
import torch.nn.utils.clip_grad
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fspmd.errors import ArgumentError
from fspmd.foreign import refuse_foreign
from fspmd.messages import described
from fspmd.placement.device_put import device_get, device_put
from fspmd.placement.reshard import reshard
from fspmd.sharded import Sharded, is_sharded
from fspmd.spec import P
from fspmd.torch_internals import GROUPS_TENSORS, TOTAL_NORMS, hooks_of_loading


def global_norm(tree: Any, order: float = 2.0) -> Tensor:
    """The vector norm of all elements of all leaves, a 0-d tensor that is equal on all ranks.

    Leaves may have any layouts, even or uneven, also on different meshes of the same ranks. Communication: for a finite
    order an all-reduce of a few numbers for each layout among the leaves, for an infinite order one for each leaf.

    Raises:
        ArgumentError: a leaf is no tensor, or ``order`` is not positive.

    >>> from fspmd import P, device_put, make_mesh
    >>> mesh = make_mesh((4,), ("x",), transport="simulation")
    >>> tree = {"w": device_put(torch.full((5, 3), 2.0), P("x"), mesh=mesh), "b": torch.full((4,), 1.0)}
    >>> global_norm(tree)
    tensor(8.)
    """
    leaves = optree.tree_leaves(tree)
    for x in leaves:
        if not isinstance(x, Tensor):
            raise ArgumentError(f"global_norm got a leaf that is {described(x)}; expected tensors")
        refuse_foreign(x, "global_norm got")
    if not isinstance(order, Real) or not order > 0:
        raise ArgumentError(f"global_norm got order={order!r}; expected a positive number, or math.inf")
    leaves = [x for x in leaves if x.numel()]
    if not leaves:
        return torch.zeros(())
    if math.isinf(order):
        return torch.stack([_gathered(torch.linalg.vector_norm(x, order)) for x in leaves]).amax()
    by_layout: dict[Any, list[Any]] = {}
    for x in leaves:
        wide = x.abs().to(torch.promote_types(x.abs().dtype, torch.float32))
        total = (wide * wide if order == 2 else wide**order).sum()
        by_layout.setdefault(total.spec if isinstance(total, Sharded) else total.dtype, []).append(total)
    sums = [_gathered(torch.stack(totals).sum()) for totals in by_layout.values()]
    norm: Tensor = torch.stack([x.to(torch.float64) for x in sums]).sum() ** (1 / order)
    dtype: torch.dtype = max((x.dtype for x in sums), key=lambda dtype: dtype.itemsize)
    return norm.to(dtype)


def _gathered(x: Any) -> Tensor:
    value: Tensor = device_get(x) if isinstance(x, Sharded) else x
    return value


def clip_by_global_norm(tree: Any, max_norm: float, order: float = 2.0) -> tuple[Any, Tensor]:
    """The tree, scaled down so that its `global_norm` is at most ``max_norm``, and the norm before.

    It computes as ``torch.nn.utils.clip_grad_norm_``, and returns new values. It communicates as `global_norm`.

    Raises:
        ArgumentError: as `global_norm`, or ``max_norm`` is no number.

    >>> from fspmd import P, device_get, device_put, make_mesh
    >>> mesh = make_mesh((4,), ("x",), transport="simulation")
    >>> (clipped,), norm = clip_by_global_norm([device_put(torch.full((4,), 2.0), P("x"), mesh=mesh)], 1.0)
    >>> norm, device_get(clipped)
    (tensor(4.), tensor([0.5000, 0.5000, 0.5000, 0.5000]))
    """
    if not isinstance(max_norm, (Real, Tensor)):
        raise ArgumentError(f"clip_by_global_norm got {described(max_norm)} for max_norm; expected a number")
    norm = global_norm(tree, order)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    return optree.tree_map(lambda x: _scaled(x, scale.to(x.dtype)), tree), norm


def _scaled(x: Any, scale: Tensor) -> Any:
    """The scaled value in the layout of ``x``. A pending sum stays pending."""
    out: Any = x * scale
    return reshard(out, x.spec.partition) if isinstance(x, Sharded) and out.spec is not x.spec else out


Groups = dict[Any, tuple[list[list[Any]], list[int]]]


def install() -> None:
    """Wrap the functions of torch. Without a `Sharded` each wrapper calls torch at once."""
    original, group = getattr(*GROUPS_TENSORS), GROUPS_TENSORS[1]
    grouping = _grouping(original)
    for module in list(sys.modules.values()):  # the module that defines it, and modules that imported it from there
        if getattr(module, "__dict__", {}).get(group) is original:
            setattr(module, group, grouping)
    norm = _over_meshes(torch.nn.utils.get_total_norm)
    for module, name in TOTAL_NORMS:
        setattr(module, name, norm)
    optimizer: Any = torch.optim.Optimizer
    optimizer.add_param_group = _adding(optimizer.add_param_group)
    _refuse_data_parallelism()


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
    """Let an optimizer lay out the states that it loads, which others may have saved of `Sharded` parameters."""

    @functools.wraps(original)
    def add_param_group(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        original(self, param_group)
        known = hooks_of_loading(self)
        if known is not None and _lay_out not in known.values():
            self.register_load_state_dict_post_hook(_lay_out)

    return add_param_group


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Give the states of an optimizer the layouts of the parameters, whatever layouts were saved."""
    for param, state in optimizer.state.items():
        if is_sharded(param) or any(map(is_sharded, optree.tree_leaves(state))):
            optimizer.state[param] = optree.tree_map(functools.partial(_laid_out, param), state, none_is_leaf=True)


def _laid_out(param: Any, x: Any) -> Any:
    """A state of a parameter: in the parameter's layout if the shapes are equal, else whole on every rank."""
    if not isinstance(x, Tensor) or (not x.ndim and not is_sharded(x)):
        return x
    if not is_sharded(param):
        return device_get(x)
    partition = param.spec.partition if x.shape == param.shape else P()
    return device_put(x, partition, mesh=param.spec.mesh)


def _refuse_data_parallelism() -> None:
    """Make ``DistributedDataParallel`` and ``fully_shard`` refuse `Sharded` parameters: they move the shells."""
    wrapper: Any = DistributedDataParallel
    wrapper.__init__ = _checking(wrapper.__init__)
    setattr(Sharded, "fsdp_pre_all_gather", property(_refuse_fsdp))  # noqa: B010 (fully_shard asks each parameter for it)


def _checking(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        parameters: Any = module.parameters() if isinstance(module, nn.Module) else ()
        for x in parameters:
            if type(x) is Sharded:
                _refuse_sharded("DistributedDataParallel", x)
        original(self, module, *args, **kwargs)

    return init


def _refuse_fsdp(x: Any) -> NoReturn:
    _refuse_sharded("fully_shard", x)


def _refuse_sharded(what: str, x: Sharded) -> NoReturn:
    raise ArgumentError(
        f"{what} got a module with the parameter {x!r}, whose gradient is already summed over the ranks; call the "
        "module as it is: leave it out of accelerator.prepare, or write accelerator.prepare_model(m, "
        "evaluation_mode=True); rows that differ from process to process become one batch by "
        "from_process_local(batch, spec)"
    )
