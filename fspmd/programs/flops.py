"""FLOPs of a program: of each rank, and of the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from math import prod
from typing import Any, Final

import torch
from torch import fx

from fspmd.cache import cached
from fspmd.meshes.mesh import Mesh
from fspmd.pairs import Call
from fspmd.programs.program import Program, Value
from fspmd.redistribution.cost import moves
from fspmd.spec import TensorSpec
from fspmd.torch_internals import (
    aten_cpu_attention,
    aten_cpu_attention_backward,
    aten_cudnn_attention,
    aten_cudnn_attention_backward,
    aten_efficient_attention,
    aten_efficient_attention_backward,
    aten_flash_attention,
    aten_flash_attention_backward,
    aten_grouped_mm,
    schema_of,
)

aten: Final = torch.ops.aten


def _counter() -> Any:
    """torch's counts of FLOPs. Their import takes 0.1 s where there is Triton, so it waits for the first count."""
    from torch.utils import flop_counter

    return flop_counter


def _of_convolution_gradients(grad: Any, x: Any, w: Any, *options: Any, **_: Any) -> int:
    """FLOPs of the gradients of a convolution: those of forward, for each wanted gradient of input and weight."""
    transposed, wanted = options[-4], options[-1]
    return int(sum(wanted[:2]) * _counter().conv_flop_count(x, w, grad, transposed))


def of_attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """FLOPs of attention: scores for each head of the queries, and products with values. Keys may have fewer heads."""
    return int(2 * prod(q[:-1]) * k[-2] * (q[-1] + v[-1]))


def of_attention_gradients(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """FLOPs of the gradients of attention: scores again, gradients of values and scores, of queries and keys."""
    return int(2 * prod(q[:-1]) * k[-2] * (3 * q[-1] + 2 * v[-1]))


def _of_groups(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """FLOPs of products of groups: of rows [rows, k] with [groups, k, n], as if all rows belonged to groups, and so on.

    Of two operands of three dims each group has its own product.
    """
    return int(2 * prod(a[-2:]) * b[-1] * (a[0] if len(a) == len(b) == 3 else 1))


_ATTENTIONS: Final = (aten_cpu_attention, aten_flash_attention, aten_efficient_attention, aten_cudnn_attention)
_ATTENTION_GRADIENTS: Final = (
    aten_cpu_attention_backward,
    aten_flash_attention_backward,
    aten_efficient_attention_backward,
    aten_cudnn_attention_backward,
)
#: formulas that torch's table lacks, or has for fewer cases: torch 2.11 needs as many heads of keys as of queries
_FORMULAS: Final[dict[Any, Callable[..., int]]] = {
    aten.convolution_backward: _of_convolution_gradients,
    **{overload.overloadpacket: of_attention for overload in _ATTENTIONS},
    **{overload.overloadpacket: of_attention_gradients for overload in _ATTENTION_GRADIENTS},
    aten_grouped_mm.overloadpacket: _of_groups,
    aten.mv: lambda a, x, **_: 2 * prod(a),
    aten.addmv: lambda bias, a, x, **_: 2 * prod(a),
    aten.dot: lambda a, b, **_: 2 * prod(a),
    aten.vdot: lambda a, b, **_: 2 * prod(a),
}
#: kernels after which a value is the same on all ranks of their axes
_EQUALS: Final = ("reduce", "reduce_once", "gather", "gather_once", "broadcast", "broadcast_once", "mean")
#: kernels that cut a value over their axes
_CUTS: Final = ("slice", "reduce_scatter", "exchange")
#: kernels after which a value differs from rank to rank, besides kernels that move it
_DIFFERS: Final = ("at_root",)
#: for each axis along which ranks may have different values, the global size divided by that of the first rank's block
Blocks = dict[str, Fraction]


def flops_of(node: fx.Node) -> int:
    """FLOPs of a matmul, a convolution or an attention, as torch counts them; 0 for other steps.

    A causal attention counts the pairs of query and key that it allows.
    """
    formula = _formula(node.target)
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), _shapes)
    flops = int(formula(*args, **kwargs, out_val=_shapes(node)))
    if not _given(node, "is_causal"):
        return flops
    rows, columns = (_given(node, name).meta["value"].shape[-2] for name in ("query", "key"))
    allowed = sum(min(i + 1, columns) for i in range(rows))
    return int(flops * allowed // (rows * columns))


def model_flops(program: Program) -> int:
    """FLOPs of the model on global tensors (Chowdhery et al., "PaLM", 2022, appendix B).

    Equal work of several ranks counts once. Repeated work does not count: neither that of `checkpoint` and
    `Recompute`, nor the scores that the gradient of an attention computes again. If blocks are uneven, the FLOPs of the
    first rank count as often as its block fits into the global tensor: 3.5 times for 7 rows on 4 ranks, where the first
    rank has 2 rows. This is exact unless a step has blocks of two dims that are cut by the same axis.
    """
    varies = {
        node: _of_spec(node.meta["spec"]) for node in (*program.inputs, *program.constants) if "spec" in node.meta
    }
    total = Fraction(0)
    for node in program.steps:
        total += _add(node, varies)
    ends = _together(varies[node] for node in program.results if node in varies)
    varies.update(dict.fromkeys(program.cotangents, ends))
    for node in program.deferred:
        total += _add(node, varies)
    return int(total)


def _add(node: fx.Node, varies: dict[fx.Node, Blocks]) -> Fraction | int:
    """The FLOPs of a step on all ranks. Notes the axes along which ranks may have different results of the step."""
    blocks = _after(node, _together(varies[x] for x in node.all_input_nodes if x in varies))
    varies[node] = _of_spec(node.meta["spec"]) if "spec" in node.meta else blocks
    flops = 0 if node.meta.get("repeats") else flops_of(node)
    return flops and _needed(node, flops) * prod(blocks.values(), start=Fraction(1))


def _of_spec(spec: TensorSpec) -> Blocks:
    """The blocks of a value with a spec."""
    blocks = {axis: Fraction(spec.mesh.shape[axis]) for axis in spec.partition.unreduced}
    unflattened = spec.unflattened
    for dim, axes, _ in unflattened.cuts:
        blocks |= _cut(unflattened.shape[dim], axes, spec.mesh)
    return blocks


def _cut(length: int, axes: tuple[str, ...], mesh: Mesh) -> Blocks:
    """The blocks of a dim that is cut over axes. The first axis is the major one."""
    blocks = {}
    for axis in axes:
        block = -(-length // mesh.shape[axis])
        blocks[axis] = Fraction(length, block) if block else Fraction(mesh.shape[axis])
        length = block
    return blocks


def _together(values: Iterable[Blocks]) -> Blocks:
    """The blocks of a result of several values."""
    blocks: Blocks = {}
    for value in values:
        for axis, n in value.items():
            blocks[axis] = min(n, blocks.get(axis, n))
    return blocks


def _after(node: fx.Node, before: Blocks) -> Blocks:
    """The blocks of the result of a step. ``before``: the blocks of its operands."""
    call: Call | None = node.meta.get("call")
    if call is None:
        return before
    kernel, o = call.pair.kernel, call.options
    axes = call.axes or call.mesh.axis_names
    if o.move is not None:
        return _of_spec(o.move.target)
    if kernel in _EQUALS and o.index_groups is None:
        return {axis: n for axis, n in before.items() if axis not in axes}
    if kernel in _CUTS and o.sizes is not None:
        return before | _cut(sum(o.sizes), axes, call.mesh)
    even = {axis: Fraction(call.mesh.shape[axis]) for axis in axes}
    if kernel in _CUTS:
        return before | even
    return even | before if kernel in _DIFFERS or moves(kernel) else before


def _needed(node: fx.Node, flops: int) -> int:
    """The FLOPs without repeated work: four of the five products in the gradient of an attention."""
    name = str(node.target)
    return flops * 4 // 5 if "attention" in name and "backward" in name else flops


@cached
def _formula(target: Any) -> Callable[..., int] | None:
    packet: Any = getattr(target, "overloadpacket", None)
    if packet in _FORMULAS:
        return _counter().shape_wrapper(_FORMULAS[packet])  # type: ignore[no-any-return]
    registry: dict[Any, Callable[..., int]] = _counter().flop_registry
    return registry.get(packet)


def _given(node: fx.Node, name: str) -> Any:
    """The argument of a step with a name of the schema."""
    target: Any = node.target
    for i, argument in enumerate(schema_of(target).arguments):
        if argument.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, argument.default_value)
    return None


def _shapes(node: fx.Node) -> Any:
    if "value" in node.meta:
        value: Value = node.meta["value"]
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return tuple(map(_shapes, node.users))  # a step with several results
