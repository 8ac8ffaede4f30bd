"""torch's autograd engine on `Sharded` values: ``backward``, ``torch.autograd.grad``, hooks on gradients.

Modules have hooks on gradients too, such as ``register_full_backward_hook``. Torch sends the arguments of a module, and
its results, through a custom Function that changes nothing, and puts the hooks on the node of this Function in the
graph. Here blocks go through the Function. A hook sees the gradient that a hook of ``x.register_hook`` would see.

Where a hook returns None, a leaf gets no gradient, as in torch. Any other value gets zeros. Torch would skip the nodes
after it in backward, or make zeros, whose shape torch does not know for uneven blocks. Collectives in these nodes must
run, and give their operands gradients, alike in every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from fspmd.autodiff.leaves import cotangent_of, local_of, scalar_of, show_leaf
from fspmd.errors import ArgumentError
from fspmd.forms import UNKNOWN
from fspmd.local_view.hooks import completing
from fspmd.messages import counted, described
from fspmd.remembered import is_bypassed, refuse_partial
from fspmd.sharded import Sharded, alike, held_as, laid
from fspmd.torch_internals import PUTS_MODULE_HOOKS

Tensors = Tensor | Sharded | Sequence[Tensor | Sharded]


def backward(
    tensors: Tensors,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
    *,
    what: str = "torch.autograd.backward()",
) -> None:
    """``torch.autograd.backward`` and `Sharded.backward`; ``what`` is the caller's name in errors."""
    values: Tensor | list[Tensor]
    cotangents: Tensor | list[Tensor | None] | None
    if type(tensors) is Sharded and (grad_tensors is None or isinstance(grad_tensors, Tensor)):  # the fast path
        if grad_tensors is None:
            values, cotangents = scalar_of(tensors, what), None
        else:
            values, cotangents = tensors.local, cotangent_of(grad_tensors, tensors, what)
        if not tensors.local.requires_grad:
            _refuse_constant(tensors, what)
    else:
        outs = _listed(tensors)
        values, cotangents = _seeds(outs, grad_tensors, what)
        for x in outs:
            if not local_of(x).requires_grad:
                _refuse_constant(x, what)
    if inputs is not None:
        for x in _listed(inputs):
            _refuse_bypassed(x, f"inputs= of {what}")
        inputs = [local_of(x) for x in _listed(inputs)]
    torch.autograd.backward(values, cotangents, retain_graph, create_graph, None, inputs)


def _refuse_constant(x: Any, what: str) -> NoReturn:
    raise ArgumentError(
        f"{what} of {show_leaf(x)}, which was computed from no tensor that requires grad, or under no_grad; "
        "write w.requires_grad_() before w is used, or take the gradient with grad(f)(w)"
    )


def _refuse_bypassed(x: Any, what: str) -> None:
    if is_bypassed(local_of(x)):
        refuse_partial(what, show_leaf(x))


def gradients(
    outputs: Tensors, inputs: Tensors, grad_outputs: Any = None, is_grads_batched: bool = False, **options: Any
) -> tuple[Sharded | Tensor | None, ...]:
    """``torch.autograd.grad`` on `Sharded` values. Each gradient has the layout of `Sharded.grad`."""
    what = "torch.autograd.grad()"
    if is_grads_batched:
        raise ArgumentError(f"{what} got is_grads_batched=True for Sharded values; use vjp and vmap")
    outs, ins = _listed(outputs), _listed(inputs)
    values, cotangents = _seeds(outs, grad_outputs, what)
    for x in (*outs, *ins):
        if not local_of(x).requires_grad:
            raise ArgumentError(
                f"{what} of {show_leaf(x)}, which does not require grad and was computed from no tensor that does; "
                "write w.requires_grad_() before w is used, or take the gradient with grad(f)(w)"
            )
    for x in ins:
        _refuse_bypassed(x, what)
    grads = torch.autograd.grad(values, [local_of(x) for x in ins], cotangents, **options)
    return tuple(laid_out(g, x) for g, x in zip(grads, ins, strict=True))


def _listed(given: Tensors) -> tuple[Any, ...]:
    listed = (given,) if isinstance(given, (Tensor, GradientEdge)) else tuple(given)
    if any(isinstance(x, GradientEdge) for x in listed):
        raise ArgumentError(
            "torch.autograd got a GradientEdge beside Sharded values; an edge does not know how a value lies: give it "
            "the value itself"
        )
    return listed


def _seeds(outs: Sequence[Any], gradients: Any, what: str) -> tuple[list[Tensor], list[Tensor | None]]:
    """The blocks that backward starts from, and their cotangents. A scalar needs none."""
    given = [None] * len(outs) if gradients is None else _listed(gradients)
    if len(given) != len(outs):
        raise ArgumentError(f"{what} got {counted(len(given), 'gradient')} for {counted(len(outs), 'output')}")
    values = [scalar_of(y, what) if g is None else local_of(y) for y, g in zip(outs, given, strict=True)]
    return values, [
        cotangent_of(g, y, what) if g is not None and isinstance(y, Sharded) else g
        for y, g in zip(outs, given, strict=True)
    ]


def laid_out(gradient: Tensor | None, leaf: Any) -> Any:
    """The gradient of ``leaf`` for the user, from the gradient of its block."""
    if gradient is None or not isinstance(leaf, Sharded):
        return gradient
    return laid(held_as(gradient, leaf.spec.dual), leaf.spec.dual, UNKNOWN)


def on_gradient(x: Sharded, hook: Callable[[Sharded], Any]) -> Any:
    """``x.register_hook``. The hook sees a gradient with the layout of `Sharded.grad`, and may return another."""
    if not callable(hook):
        raise ArgumentError(f"register_hook got {described(hook)}; give it a function of the gradient")
    if not x.requires_grad:
        raise ArgumentError(
            f"register_hook of {x!r}, which does not require grad and so gets no gradient; write x.requires_grad_() "
            "first"
        )
    like = x.detach()

    def on_block(gradient: Tensor) -> Tensor | None:
        new = hook(laid_out(gradient, like))
        return None if new is None else cotangent_of(new, like, "register_hook")

    return x.local.register_hook(on_block)


# --- hooks of modules ---

_OF_MODULES: Final = "a hook on the gradients of a module"


def install() -> None:
    """Wrap torch's function that sends tensors through the custom Function."""
    original = getattr(*PUTS_MODULE_HOOKS)

    def on_tensors(self: Any, put_hook: Callable[[Any], None], args: tuple[Any, ...]) -> Any:
        if Sharded not in map(type, args):
            return original(self, put_hook, args)
        tensors = [x for x in args if isinstance(x, Tensor)]
        outputs, leaves = [x.detach() for x in tensors], [x.is_leaf for x in tensors]
        blocks = tuple(x.local if type(x) is Sharded else x for x in args)
        out, places = completing(original, self, lambda node: put_hook(_LaidOutNode(node, outputs, leaves)), blocks)
        if places is None:
            return args, None
        values = [alike(new, x) if type(x) is Sharded else new for new, x in zip(out, args, strict=True)]
        return tuple(values) if type(args) is tuple else type(args)(*values), places

    setattr(*PUTS_MODULE_HOOKS, on_tensors)


class _LaidOutNode:
    """A node of the graph that shows hooks its gradients as gradients of the values ``outputs``."""

    def __init__(self, node: Any, outputs: list[Any], leaves: list[bool]) -> None:
        self._node, self._likes, self._leaves = node, outputs, leaves
        node.materialize_grads = False  # torch does not know the shapes of uneven blocks; `completing` does

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        """Register a hook of the user. It sees zeros in place of gradients that do not exist."""
        outputs, leaves = self._likes, self._leaves

        def local_hook(after: tuple[Tensor | None, ...], before: tuple[Tensor | None, ...]) -> Any:
            filled = [torch.zeros_like(local_of(x)) if g is None else g for g, x in zip(after, outputs, strict=True)]
            new = hook(tuple(map(laid_out, filled, outputs)), tuple(map(laid_out, before, outputs)))
            return None if new is None else tuple(map(_block, new, outputs, after, leaves))

        return self._node.register_hook(local_hook)


def _block(gradient: Any, like: Any, before: Tensor | None, leaf: bool) -> Any:
    """The block of the gradient that a hook returned. Torch takes none where there was no gradient before."""
    if before is None or (gradient is None and leaf):
        return None
    if gradient is None:
        return torch.zeros_like(before)
    return cotangent_of(gradient, like, _OF_MODULES) if type(like) is Sharded else gradient
