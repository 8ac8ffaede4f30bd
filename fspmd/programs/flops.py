"""FLOPs of a program: those that each rank does, and those that the model needs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod
from typing import Any, Final

import torch
from torch import fx
from torch.utils import flop_counter

from fspmd.meshes.mesh import Mesh
from fspmd.pairs import Call
from fspmd.programs.program import Program, Value
from fspmd.redistribution.cost import moves
from fspmd.spec import TensorSpec

aten: Final = torch.ops.aten

_ATTENTION: Final = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
_ON_VECTORS: Final[dict[Any, Callable[..., int]]] = {  # of shapes, which torch's table lacks
    aten.mv: lambda a, x, **_: 2 * prod(a),
    aten.addmv: lambda bias, a, x, **_: 2 * prod(a),
    aten.dot: lambda a, b, **_: 2 * prod(a),
    aten.vdot: lambda a, b, **_: 2 * prod(a),
}
#: kernels after which a value is the same on all ranks of their axes
_EQUALS: Final = ("reduce", "reduce_once", "gather", "gather_once", "broadcast", "broadcast_once", "mean")
#: others after which it is not, besides those that move it
_DIFFERS: Final = ("slice", "at_root")


def flops_of(node: fx.Node) -> int:
    """Sums and products of a matmul, a convolution or an attention, as torch counts them; 0 of anything else.

    Of a causal attention those of the pairs of query and key that it allows.
    """
    formula = _formula(node.target)
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), _shapes)
    found = int(formula(*args, **kwargs, out_val=_shapes(node)))
    if not ("scaled_dot_product" in str(node.target) and _given(node, "is_causal")):
        return found
    rows, columns = (_given(node, name).meta["value"].shape[-2] for name in ("query", "key"))
    allowed = sum(min(i + 1, columns) for i in range(rows))
    return int(found * allowed // (rows * columns))


def model_flops(program: Program) -> int:
    """Those of the whole model, over all ranks: of each function of torch once, and not again where it is repeated.

    What ranks compute alike counts once, what `checkpoint` and `Recompute` repeat not at all, nor the scores that the
    gradient of an attention computes again (Chowdhery et al., "PaLM", 2022, appendix B). Of blocks that are uneven the
    first, which is the largest, stands for all.
    """
    sizes: dict[str, int] = {}
    varies = {node: _of_spec(node, sizes) for node in (*program.inputs, *program.constants)}
    total = 0
    for node in program.steps:
        total += _add(node, varies, sizes)
    ends = frozenset[str]().union(*(varies[node] for node in program.results))
    varies.update(dict.fromkeys(program.cotangents, ends))
    for node in program.deferred:
        total += _add(node, varies, sizes)
    return total


def _add(node: fx.Node, varies: dict[fx.Node, frozenset[str]], sizes: dict[str, int]) -> int:
    """Follow a step: along which axes ranks may have different values of it; its FLOPs on all of them."""
    varies[node] = found = _after(node, frozenset[str]().union(*(varies[x] for x in node.all_input_nodes)), sizes)
    flops = 0 if node.meta.get("repeats") else flops_of(node)
    return flops and _needed(node, flops) * prod(sizes[axis] for axis in found)


def _of_spec(node: fx.Node, sizes: dict[str, int]) -> frozenset[str]:
    """Of a value that was there before; plain tensors are the same on all ranks."""
    spec: TensorSpec | None = node.meta.get("spec")
    if spec is None:
        return frozenset()
    _note(spec.mesh, sizes)
    return spec.partition.axes | spec.partition.unreduced


def _after(node: fx.Node, before: frozenset[str], sizes: dict[str, int]) -> frozenset[str]:
    call: Call | None = node.meta.get("call")
    if call is None:
        return before
    _note(call.mesh, sizes)
    kernel, move = call.pair.kernel, call.options.move
    axes = call.axes or call.mesh.axis_names
    if move is not None:
        _note(move.target.mesh, sizes)
        return move.target.partition.axes | move.target.partition.unreduced
    if kernel in _EQUALS and call.options.index_groups is None:
        return before.difference(axes)
    return before.union(axes) if kernel in _DIFFERS or moves(kernel) else before


def _note(mesh: Mesh, sizes: dict[str, int]) -> None:
    for axis, size in mesh.shape.items():
        sizes[axis] = max(size, sizes.get(axis, 1))


def _needed(node: fx.Node, flops: int) -> int:
    """Four of the five products of an attention's gradient: scores were there before."""
    name = str(node.target)
    return flops * 4 // 5 if "attention" in name and "backward" in name else flops


@functools.cache
def _formula(target: Any) -> Callable[..., int] | None:
    packet: Any = getattr(target, "overloadpacket", None)
    if packet in _ON_VECTORS:
        return flop_counter.shape_wrapper(_ON_VECTORS[packet])  # type: ignore[no-any-return]
    registry: dict[Any, Callable[..., int]] = flop_counter.flop_registry
    return registry.get(_ATTENTION.get(packet, packet))


def _given(node: fx.Node, name: str) -> Any:
    """An argument by its name in the schema."""
    target: Any = node.target
    for i, argument in enumerate(target._schema.arguments):
        if argument.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None


def _shapes(node: fx.Node) -> Any:
    if "value" in node.meta:
        value: Value = node.meta["value"]
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return tuple(map(_shapes, node.users))  # the parts of a result of several
