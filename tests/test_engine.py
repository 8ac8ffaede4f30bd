"""Hooks, retained gradients and torch.autograd's own functions on `Sharded` values, beside unsharded torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dispatch_cases import values
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fspmd import ArgumentError, P, Sharded, device_get, device_put, jit, make_mesh, propagation_cache_clear

GRID = make_mesh((2, 2), ("x", "y"), transport="simulation")
SPECS = [P("x", "y"), P(("y", "x")), P(None, "x"), P(), P(reduced={"x"})]
SHAPE = (5, 3)


def _pair(spec: P) -> tuple[Any, Any, Any, Any]:
    """A leaf and a weight, plain and on the mesh."""
    x, w = values((SHAPE, SHAPE))
    return (
        x.clone().requires_grad_(),
        w,
        device_put(x, spec, mesh=GRID).requires_grad_(),
        device_put(w, P("x"), mesh=GRID),
    )


def _same(found: Any, want: Tensor | None) -> None:
    assert want is not None
    torch.testing.assert_close(device_get(found), want)


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_hooks_see_and_change_gradients(spec: P) -> None:
    plain, w, x, weight = _pair(spec)
    seen: list[Any] = []
    plain.register_hook(lambda g: g * 2)
    x.register_hook(lambda g: seen.append(g) or g * 2)
    for leaf, scale in ((plain, w), (x, weight)):
        y = leaf * scale
        y.register_hook(lambda g: g + 1)
        (y * y).sum().backward()
    _same(x.grad, plain.grad)
    assert seen[0].spec is x.spec.dual
    x.register_hook(lambda g: g.sum())
    with pytest.raises(ValueError, match="register_hook: a gradient that does not fit"):
        (x * weight).sum().backward()


class _Mixed(nn.Module):
    """Takes what needs a gradient, what has none, and a number; gives two tensors."""

    def forward(self, x: Any, ids: Any, scale: float, w: Any) -> tuple[Any, Any]:
        return (x * x * scale)[ids], x.sum(0) * w


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_hooks_of_modules_see_and_change_gradients(spec: P, everywhere: bool) -> None:
    """Of arguments and of results, with and without a change, in the layouts that hooks of values have."""
    plain, w, x, weight = _pair(spec)
    seen: dict[bool, list[Any]] = {False: [], True: []}
    ids, row = torch.tensor([3, 0, 0]), torch.linspace(1, 2, 3, dtype=torch.float64)
    for ours, leaf, scale in ((False, plain, w), (True, x, weight)):
        module = _Mixed()

        def after(_: Any, given: Any, results: Any, noted: list[Any] = seen[ours]) -> Any:
            noted += [*given, *results]
            return (given[0] * 3, *given[1:])

        def before(_: Any, results: Any) -> Any:
            return results[0] * 2, results[1] if results[1] is None else results[1] + 1

        if everywhere:
            hooks = (
                nn.modules.module.register_module_full_backward_hook(after),
                module.register_full_backward_pre_hook(before),
            )
        else:
            hooks = module.register_full_backward_hook(after), module.register_full_backward_pre_hook(before)
        ids_given = device_put(ids, P("x"), mesh=GRID) if ours else ids
        first, second = module(leaf * scale, ids_given, 0.5, row)
        ((first**3).sum() if everywhere else (first**3).sum() + second.sum()).backward()
        for hook in hooks:
            hook.remove()
    _same(x.grad, plain.grad)
    for found, want in zip(seen[True], seen[False], strict=True):
        assert (found is None) == (want is None)
        if want is not None:
            _same(found, want)
    assert [type(g) for g in seen[True][:4]] == [Sharded, Sharded, type(None), Tensor]  # as the arguments were


def test_hooks_of_modules_whose_arguments_have_no_gradient() -> None:
    plain, w, x, weight = _pair(P("x"))
    shown = []
    for leaf, scale in ((plain, w), (x, weight)):
        module = nn.Linear(3, 5, bias=False).double()
        module.weight = nn.Parameter(leaf.detach())
        seen: list[Any] = []
        module.register_full_backward_pre_hook(lambda _, results: (results[0] * 2,))
        module.register_full_backward_hook(lambda _, given, results, noted=seen: noted.extend((*given, *results)))
        with pytest.warns(UserWarning, match="no inputs require gradients"):
            (module(scale) ** 2).sum().backward()
        assert seen[0] is None
        shown.append((seen[1], module.weight.grad))
    for found, want in zip(shown[1], shown[0], strict=True):
        _same(found, want)


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_hooks_of_modules_that_give_no_gradient(spec: P) -> None:
    """A leaf has none then, and what another value was computed from has zeros."""
    plain, _, x, _ = _pair(spec)
    for leaf in (plain, x):
        module = nn.Module()
        module.forward = torch.mul
        module.register_full_backward_hook(lambda _, given, results: (None, None))
        first = leaf.detach().clone().requires_grad_()
        module(leaf, (first * 2).softmax(0)).sum().backward()
        assert leaf.grad is None
    _same(first.grad, torch.zeros(SHAPE, dtype=torch.float64))


def test_hooks_of_modules_are_told_what_does_not_fit() -> None:
    module = nn.Linear(3, 5).double()
    module.register_full_backward_hook(lambda _, given, results: (given[0].sum(),))
    x = _pair(P("x"))[2]
    with pytest.raises(ValueError, match="a hook on the gradients of a module: a gradient that does not fit"):
        module(x).sum().backward()


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_gradients_of_what_is_no_leaf_and_of_chosen_inputs(spec: P) -> None:
    plain, w, x, weight = _pair(spec)
    kept = []
    for leaf, scale in ((plain, w), (x, weight)):
        y = leaf * scale
        y.retain_grad()
        torch.autograd.backward([(y * y).sum(), y.sum()], retain_graph=True)
        torch.autograd.backward(y, torch.ones(SHAPE, dtype=torch.float64), retain_graph=True)
        kept.append((y.grad, leaf.grad))
        del leaf.grad
        assert leaf.grad is None
        other = leaf.detach().clone().requires_grad_()
        (y * other).sum().backward(inputs=[leaf], retain_graph=True)
        assert other.grad is None
    (found, want) = kept[1], kept[0]
    _same(found[0], want[0])
    _same(found[1], want[1])
    _same(x.grad, plain.grad)


def test_a_hook_after_accumulation_gets_the_leaf() -> None:
    _, _, x, weight = _pair(P("x"))
    got: list[Any] = []
    x.register_post_accumulate_grad_hook(got.append)
    (x * weight).sum().backward()
    assert got == [x]
    _same(got[0].grad, device_get(weight))


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_a_selective_checkpoint_keeps_the_calls_of_the_function_alone(spec: P) -> None:
    """Its mode sees no call that planning tries the first time: it repeats what it kept, in the order of the calls."""
    plain, _, x, _ = _pair(spec)

    def policy() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    propagation_cache_clear()
    for leaf in (plain, x):
        checkpoint(lambda y: (y.sin() @ y.T).exp().sum(), leaf, use_reentrant=False, context_fn=policy).backward()
    _same(x.grad, plain.grad)


def test_mistakes() -> None:
    x = device_put(torch.ones(4), P("x"), mesh=GRID)
    with pytest.raises(ArgumentError, match=r"register_hook of .*does not require grad"):
        x.register_hook(print)
    with pytest.raises(ArgumentError, match="register_hook got the int 3"):
        x.requires_grad_().register_hook(3)
    with pytest.raises(ArgumentError, match=r"torch.autograd.backward\(\) needs a real scalar"):
        torch.autograd.backward([x])
    with pytest.raises(ArgumentError, match=r"torch.autograd.backward\(\) got 1 gradient for 2 outputs"):
        torch.autograd.backward([x, x], [x])
    edge = torch.autograd.graph.get_gradient_edge(x)
    for call in (lambda: torch.autograd.grad(edge, x, x.detach()), lambda: torch.autograd.grad(x.sum(), [edge])):
        with pytest.raises(ArgumentError, match=r"torch.autograd got a GradientEdge .*: give it the value itself"):
            call()


@pytest.mark.parametrize("f", [lambda w: (w * w).sum(), jit(lambda w: (w * w).sum())])
def test_what_torch_says_of_a_graph(f: Any) -> None:
    """One that is gone; and one that does not go through what gradients are asked for."""
    w = device_put(torch.ones(4), P("x"), mesh=GRID).requires_grad_()
    for ask in (lambda y: torch.autograd.grad(y, w), lambda y: y.backward(), torch.autograd.backward):
        y = f(w)
        ask(y)
        with pytest.raises(RuntimeError, match=r"a second time .* Specify retain_graph=True"):
            ask(y)
    with pytest.raises(RuntimeError, match=r"to not have been used in the graph. Set allow_unused=True"):
        torch.autograd.grad(f(w), w.detach().requires_grad_())
