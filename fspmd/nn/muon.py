"""Muon: an optimizer of matrices that makes updates orthogonal (Jordan et al., 2024), spread over ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fspmd.entries import entry_axes
from fspmd.errors import ArgumentError, ShapeError
from fspmd.messages import described, quoted
from fspmd.nn.arguments import Count, FloatDtype, checked
from fspmd.nn.optimizers import Leaves, Lies, Optimizer, Rate, Slots, check_known, check_numbers, leafwise
from fspmd.nn.parameters import moved
from fspmd.placement.reshard import reshard
from fspmd.sharded import is_sharded
from fspmd.spec import P, TensorSpec
from fspmd.variance import Variance, get_variance

ADJUSTMENTS = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


@checked
def muon(
    rate: Rate = 1e-3,
    momentum: float = 0.95,
    decay: Any = 0.1,
    *,
    nesterov: bool = True,
    coefficients: Sequence[float] = (3.4445, -4.775, 2.0315),
    steps: Count = 5,
    eps: float = 1e-7,
    adjustment: str = "original",
    dtype: FloatDtype | None = torch.bfloat16,
    specs: Any = None,
) -> Optimizer:
    """Muon, as ``torch.optim.Muon``, on matrices of any layout, and on blocks in a body.

    A parameter [..., m, n] is a matrix, or a stack of matrices: of layers, of experts. An update needs whole matrices.
    Those of one shape and layout are stacked, and the stack is cut over all ranks by matrices: each rank makes its
    share of them orthogonal, and no rank computes what another does.

    Args:
        rate, decay, specs: As for `adamw`.
        momentum: The decay of the running mean of gradients. ``nesterov`` mixes the gradient into it once more.
        coefficients: Of the Newton-Schulz iteration, which runs ``steps`` times.
        eps: The least norm by which a matrix is divided.
        adjustment: How the rate follows the shape: "original" or "match_rms_adamw", as in torch.
        dtype: Of the iteration; None for that of the parameter.

    Communication: for matrices [m, n] of b bytes that an axis of n ranks cuts, k in a stack, an all-to-all of the stack
    to whole matrices and one back, k b (n - 1) / n**2 bytes of a rank each. For matrices that no axis cuts, a slice and
    an all-gather.

    Raises:
        ShapeError: a parameter has fewer than two dims.
        VarianceError, ArgumentError: As `adafactor`.

    >>> from fspmd import communication_log, device_put, make_mesh
    >>> mesh = make_mesh((4,), ("dp",), transport="simulation")
    >>> params = device_put([torch.eye(8) for _ in range(4)], P("dp"), mesh=mesh)
    >>> init, update = muon(0.1)
    >>> with communication_log() as log:
    ...     params, state = update(params, init(params), params)
    >>> [call.kind for call in log], params[0]
    (['all_to_all', 'all_to_all'], Sharded f32[8@dp, 8] on mesh(dp=4))
    """
    check_numbers("muon", [("rate", rate, 0, math.inf), ("eps", eps, 0, math.inf), ("momentum", momentum, 0, math.inf)])
    if len(coefficients) != 3 or not all(isinstance(x, Real) for x in coefficients):
        raise ArgumentError(f"muon got {described(coefficients)} for coefficients; give it three numbers")
    if adjustment not in ADJUSTMENTS:
        raise ArgumentError(f"muon got adjustment={adjustment!r}; expected one of {quoted(ADJUSTMENTS)}")

    def slots_of(p: Any, lie: Lies) -> dict[str, Any]:
        check_known(p, lie, "muon")
        if p.ndim < 2:
            raise ShapeError(
                f"muon got a parameter of shape {tuple(p.shape)}; it takes matrices, and stacks of them, [..., m, n], "
                "so give other parameters to adamw"
            )
        return {"mean": torch.zeros_like(p)}

    def rule(
        grads: Leaves, slots: Slots, params: Leaves, rate: Any, step: Tensor, decays: list[float], lies: list[Lies]
    ) -> tuple[Leaves, Slots]:
        means = [m.lerp(g, 1 - momentum) for m, g in zip(slots["mean"], grads, strict=True)]
        changes = [g.lerp(m, momentum) for m, g in zip(means, grads, strict=True)] if nesterov else means
        whole = _each_orthogonal(changes, lies, coefficients, steps, eps, dtype)
        shapes = [p.shape if lie is None else lie.shape for p, lie in zip(params, lies, strict=True)]
        scales = [ADJUSTMENTS[adjustment](*shape[-2:]) if math.prod(shape) else 1.0 for shape in shapes]
        news = [
            p * (1 - rate * w) - u * (rate * scale)
            for p, u, w, scale in zip(params, whole, decays, scales, strict=True)
        ]
        return news, {"mean": means}

    return leafwise(lambda shape: {"mean": shape}, slots_of, rule, rate, decay, specs)


def _each_orthogonal(
    matrices: Leaves,
    lies: list[Lies],
    coefficients: Sequence[float],
    steps: int,
    eps: float,
    dtype: torch.dtype | None,
) -> Leaves:
    """Each matrix made orthogonal, by the ranks that have its share of the stacks."""
    stacks: dict[Any, list[int]] = {}
    for i, (x, lie) in enumerate(zip(matrices, lies, strict=True)):
        stacks.setdefault(lie or (x.spec if is_sharded(x) else (x.shape, x.dtype, x.device)), []).append(i)
    done: Leaves = [*matrices]
    for lie, places in stacks.items():
        stack: Any = torch.stack([matrices[i] for i in places])
        given = stack.to(dtype or stack.dtype)
        if is_sharded(stack):
            spread = reshard(given, _by_matrices(stack.spec))
            whole = reshard(orthogonal(spread, coefficients, steps, eps), stack.spec.partition)
        elif isinstance(lie, TensorSpec):
            there = TensorSpec(lie.mesh, P(None, *lie.partition), (len(places), *lie.shape), given.dtype)
            here = there.with_partition(_by_matrices(there))
            spread = moved(given, there, here, Variance(varying=lie.mesh.axis_names))
            whole = moved(orthogonal(spread, coefficients, steps, eps), here, there, get_variance(stack))
        else:
            whole = orthogonal(given, coefficients, steps, eps)
        for i, x in zip(places, whole.to(stack.dtype).unbind(), strict=True):
            done[i] = x
    return done


def _by_matrices(spec: TensorSpec) -> P:
    """The layout that cuts a stack [..., m, n] over all axes by matrices.

    Cuts of the leading dims stay. Each other axis cuts the leading dim of which a block has the most.
    """
    mesh, sizes = spec.mesh.shape, spec.shape[:-2]
    cuts = [entry_axes(entry) for entry in (*spec.partition, *[None] * len(sizes))[: len(sizes)]]
    left = [math.ceil(size / math.prod(mesh[axis] for axis in axes)) for size, axes in zip(sizes, cuts, strict=True)]
    for axis in spec.mesh.axis_names:
        if axis not in itertools.chain(*cuts):
            dim = left.index(max(left))
            cuts[dim], left[dim] = (*cuts[dim], axis), math.ceil(left[dim] / mesh[axis])
    return P(*(axes or None for axes in cuts))


def orthogonal(stack: Any, coefficients: Sequence[float], steps: int, eps: float) -> Any:
    """Matrices [..., m, n] with singular values near 1, by the Newton-Schulz iteration."""
    a, b, c = coefficients
    tall = stack.shape[-2] > stack.shape[-1]
    x = stack.mT if tall else stack
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x
