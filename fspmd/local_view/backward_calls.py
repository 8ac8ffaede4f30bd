"""Calls in a checked body that run backward, such as `torch.autograd.grad`: the types of cotangents and gradients."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fspmd.errors import VarianceError
from fspmd.local_view.uneven import per_rank_like
from fspmd.ops.traits import tensors_in
from fspmd.transport.frame import UNEVEN
from fspmd.variance import get_variance, set_variance, show


def call_backward(
    tracker: Any, signature: tuple[str, int, str], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Handles a call that runs backward: casts cotangents to the dual types of outputs, and types the gradients.

    ``tracker``: of the body. The inputs of such a call are places in the graph, not operands.
    """
    name, place, cotangents = signature
    outputs = args[0] if args else kwargs[name]
    if len(args) > place:
        args = (*args[:place], _cotangents(tracker, outputs, args[place]), *args[place + 1 :])
    elif cotangents in kwargs:
        kwargs = {**kwargs, cotangents: _cotangents(tracker, outputs, kwargs[cotangents])}
    results = func(*args, **kwargs)
    if results is not None:
        inputs = args[1] if len(args) > 1 else kwargs["inputs"]
        for x, gradient in zip(tensors_in((inputs,)), results, strict=True):
            if gradient is not None:
                set_variance(gradient, get_variance(x).dual)
    return results


def _cotangents(tracker: Any, outputs: Any, cotangents: Any) -> Any:
    if isinstance(cotangents, Tensor):
        output = outputs if isinstance(outputs, Tensor) else outputs[0]
        return _cotangent(tracker, output, cotangents)
    if not isinstance(cotangents, (list, tuple)) or isinstance(outputs, Tensor) or len(cotangents) != len(outputs):
        return cotangents
    return [_cotangent(tracker, *row) for row in zip(outputs, cotangents, strict=True)]


def _cotangent(tracker: Any, output: Any, cotangent: Any) -> Any:
    if not isinstance(output, Tensor) or not isinstance(cotangent, Tensor):
        return cotangent
    if extra := get_variance(cotangent).varying - get_variance(output).varying:
        raise VarianceError(
            f"a cotangent {show(cotangent)} was given for an output {show(output)}: it varies "
            f"over {', '.join(map(repr, sorted(extra)))}, the output does not; psum it first"
        )
    to = get_variance(output).dual
    if not to.unreduced:
        given, cotangent = cotangent, tracker.cast(cotangent, to)
        if cotangent is given:  # autograd may return it as a gradient, which has another type
            cotangent = set_variance(given.view_as(given), get_variance(given))
    return per_rank_like(cotangent, output) if UNEVEN and tracker.simulated else cotangent
