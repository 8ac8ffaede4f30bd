"""Hooks that apply styles to the modules at their patterns, and to modules that share parameters with these."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from weakref import ref

from torch import nn

from fspmd.cache import cached
from fspmd.errors import ArgumentError, TreeError
from fspmd.messages import Failure, described, refuse
from fspmd.modules.local_forward import run_on_blocks
from fspmd.modules.paths import matches, near
from fspmd.modules.plans import ParallelPlan, Placed


def styled_modules(module: nn.Module, plan: ParallelPlan, what: str) -> list[tuple[ref[nn.Module], Placed]]:
    """The submodules to which styles apply.

    Raises:
        TreeError: a pattern matches no module, or forward has no argument of a name in ``kwargs``.
        ArgumentError: ``plan`` is no plan.
    """
    if not isinstance(plan, ParallelPlan):
        raise ArgumentError(
            f"{what} got {described(plan)} for styles; give it the plan of params, plan = parallelize(params, styles)"
        )
    owners = list(module.named_modules(remove_duplicate=False))
    styled = [(path, owner, placed) for path, owner in owners if (placed := plan.at(path)) is not None]
    failures = [failure for _, owner, placed in styled for failure in _unknown_names(owner, placed)]
    used = {pattern for _, _, placed in styled for pattern in placed.styles}
    for pattern in plan.styles:
        if pattern not in used and not any(matches(pattern, row.name) for row in plan.rows):
            text = f"no module at {pattern!r}{near(pattern, [path for path, _ in owners][1:])}"
            failures.append(Failure(text, TreeError))
    if failures:
        refuse(f"{what} of {type(module).__name__}: styles do not fit the module", failures)
    return [(ref(owner), placed) for _, owner, placed in (*styled, *_tied(owners, styled, plan))]


def _tied(owners: Any, styled: Any, plan: ParallelPlan) -> Iterator[tuple[str, nn.Module, Placed]]:
    """Modules that no pattern matches and that share a parameter with a styled module, and the styles for them."""
    users: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, owner in owners:
        for x in owner._parameters.values():
            if x is not None and plan.at(path) is None:
                users.setdefault(id(x), []).append((path, owner))
    seen = {id(owner) for _, owner, _ in styled}
    for _, first, placed in styled:
        for x in first._parameters.values():
            for path, owner in users.get(id(x), ()) if x is not None else ():
                alike = type(owner).forward is type(first).forward
                shared = None if id(owner) in seen else placed.elsewhere(path, alike)
                if shared is not None:
                    seen.add(id(owner))
                    yield path, owner, shared


def _unknown_names(owner: nn.Module, placed: Placed) -> Iterator[Failure]:
    """Failures for names in ``kwargs`` of a style that are no parameters of forward."""
    for pattern, style in placed.styles.items():
        for key in style.kwargs:
            names, takes_more = _parameters_of(getattr(owner.forward, "__func__", owner.forward))
            if key not in names and not takes_more:
                text = f"{pattern!r}: forward of {type(owner).__name__} has no argument {key!r}, which kwargs lays out"
                yield Failure(f"{text}{near(key, names)}", TreeError)


@cached(maxsize=1024)
def _parameters_of(forward: Any) -> tuple[tuple[str, ...], bool]:
    """The names of the parameters of a forward without ``self``, and whether it takes any other by name."""
    try:
        parameters = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        return (), True
    names = [x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
    takes_more = any(x.kind is x.VAR_KEYWORD for x in parameters)
    return tuple(names[1:] if names[:1] == ["self"] else names), takes_more


def hook(owner: nn.Module, placed: Placed, plan: ParallelPlan, stack: ExitStack) -> None:
    """Apply styles to a module until the stack ends."""
    names, _ = _parameters_of(getattr(owner.forward, "__func__", owner.forward))
    if (style := placed.on_blocks) is not None and style.axis is not None:
        run_on_blocks(owner, style.axis, style.result, placed.mesh, stack)

    before = functools.partial(_lay_out_arguments, plan, placed, names)
    stack.callback(owner.register_forward_pre_hook(before, with_kwargs=True).remove)
    stack.callback(owner.register_forward_hook(functools.partial(_lay_out_results, placed)).remove)


# hooks that can be pickled, since torch.save(module) saves a module's hooks


def _lay_out_arguments(
    plan: ParallelPlan, placed: Placed, names: tuple[str, ...], _: nn.Module, args: Any, kwargs: Any
) -> Any:
    plan.mark_used(placed)
    return placed.inputs(args, kwargs, names)


def _lay_out_results(placed: Placed, _: nn.Module, args: Any, out: Any) -> Any:
    return placed.outputs(out)
