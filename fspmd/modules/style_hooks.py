"""The hooks by which styles act at the modules where they stand, and at those that have the same parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from weakref import ref

from torch import nn

from fspmd.errors import ArgumentError, TreeError
from fspmd.messages import Failure, described, refuse
from fspmd.modules.on_blocks import run_on_blocks
from fspmd.modules.paths import matches, near
from fspmd.modules.plans import ParallelPlan, Placed

Stands = list[tuple[ref[nn.Module], Placed]]


def stands(module: nn.Module, plan: ParallelPlan, what: str) -> Stands:
    """The modules at which styles act. A pattern with no module, or a name that forward has not, is refused."""
    if not isinstance(plan, ParallelPlan):
        raise ArgumentError(
            f"{what} got {described(plan)} for styles; give it the plan of params, plan = parallelize(params, styles)"
        )
    owners = list(module.named_modules(remove_duplicate=False))
    found = [(path, owner, placed) for path, owner in owners if (placed := plan.at(path)) is not None]
    failures = [failure for _, owner, placed in found for failure in _unknown_names(owner, placed)]
    used = {pattern for _, _, placed in found for pattern in placed.styles}
    for pattern in plan.styles:
        if pattern not in used and not any(matches(pattern, row.name) for row in plan.rows):
            text = f"no module at {pattern!r}{near(pattern, [path for path, _ in owners][1:])}"
            failures.append(Failure(text, TreeError))
    if failures:
        refuse(f"{what} of {type(module).__name__}: styles do not fit the module", failures)
    return [(ref(owner), placed) for _, owner, placed in (*found, *_tied(owners, found, plan))]


def _tied(owners: Any, found: Any, plan: ParallelPlan) -> Iterator[tuple[str, nn.Module, Placed]]:
    """Modules without a style of their own that have a parameter of one with a style."""
    users: dict[int, list[tuple[str, nn.Module]]] = {}
    for path, owner in owners:
        for x in owner._parameters.values():
            if x is not None and plan.at(path) is None:
                users.setdefault(id(x), []).append((path, owner))
    seen = {id(owner) for _, owner, _ in found}
    for _, first, placed in found:
        for x in first._parameters.values():
            for path, owner in users.get(id(x), ()) if x is not None else ():
                alike = type(owner).forward is type(first).forward
                there = None if id(owner) in seen else placed.elsewhere(path, alike)
                if there is not None:
                    seen.add(id(owner))
                    yield path, owner, there


def _unknown_names(owner: nn.Module, placed: Placed) -> Iterator[Failure]:
    for pattern, style in placed.styles.items():
        for key in style.kwargs:
            names, takes_more = _parameters_of(getattr(owner.forward, "__func__", owner.forward))
            if key not in names and not takes_more:
                text = f"{pattern!r}: forward of {type(owner).__name__} has no {key!r} of kwargs{near(key, names)}"
                yield Failure(text, TreeError)


@functools.lru_cache(maxsize=1024)
def _parameters_of(forward: Any) -> tuple[tuple[str, ...], bool]:
    """The names of a forward's parameters but the module, and whether it takes others by name."""
    try:
        parameters = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        return (), True
    names = [x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)]
    takes_more = any(x.kind is x.VAR_KEYWORD for x in parameters)
    return tuple(names[1:] if names[:1] == ["self"] else names), takes_more


def hook(owner: nn.Module, placed: Placed, plan: ParallelPlan, stack: ExitStack) -> None:
    """Have the styles act, until the stack ends."""
    names, _ = _parameters_of(getattr(owner.forward, "__func__", owner.forward))
    if (style := placed.on_blocks) is not None and style.axis is not None:
        run_on_blocks(owner, style.axis, style.result, placed.mesh, stack)

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        plan.hear(placed.styles)
        return placed.inputs(args, kwargs, names)

    stack.callback(owner.register_forward_pre_hook(before, with_kwargs=True).remove)
    stack.callback(owner.register_forward_hook(lambda _, args, out: placed.outputs(out)).remove)
