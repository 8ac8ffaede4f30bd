"""Functions of torch that cannot be steps: their results depend on values, or they write into what was there before."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor, fx

from fspmd.errors import RecordError
from fspmd.messages import style_by_rows
from fspmd.programs.dynamic import written_while_copied
from fspmd.programs.impurities import constant_of, line
from fspmd.transport.op_facts import facts_of
from fspmd.watching.causes import trace


def check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recorder: Any) -> None:
    """Raises `RecordError` for what depends on values in a way that a record cannot hold."""
    facts, cause = facts_of(func), None
    if facts.gives_values:
        cause = "makes a Python value of a tensor's"
    elif facts.shape_of_values(args, kwargs):
        cause = "gives a result whose shape depends on values"
    if cause is not None:
        name = func._schema.name.split("::")[-1].lstrip("_")
        advice = "" if facts.gives_values else f"; {_BY_RANK}: {style_by_rows(trace().cause.module or '...')}"
        raise recorder.refusal(constant_of(f"{_NAMES.get(name, name)}, which {cause}", advice))
    if facts.inplace_view and any(args[0] is x for x in recorder.given):
        raise recorder.refusal(
            RecordError(
                f"jit cannot record {func._schema.name.split('::')[-1]}(), which changes the shape, or how it lies in "
                f"memory, of an argument of shape {tuple(args[0].shape)}; return what becomes of it{line()}"
            )
        )
    if facts.writes:
        check_writes(func._schema.name.split("::")[-1], written_by(func, args, kwargs), recorder)


_BY_RANK: Final = "what each rank does with its own rows, as experts do, runs as Python"
_NAMES: Final = {"local_scalar_dense": "a branch or x.item()"}


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call writes into."""
    found = facts_of(func).written(args, kwargs)
    return [x for one in found for x in (one if isinstance(one, (list, tuple)) else (one,)) if isinstance(x, Tensor)]


def check_writes(name: str, written: list[Tensor], recorder: Any) -> None:
    """Raises `RecordError` where a function of some name writes into what the recorded function closes over."""
    for x in written:
        if recorder.is_copied(x):
            raise recorder.refusal(written_while_copied(name))
        node = recorder.owner(x)
        if node is not None:
            recorder.written.add(node)
        if node in recorder.captured:
            raise recorder.refusal(
                RecordError(
                    f"{name}() writes into a tensor of shape {tuple(x.shape)} that the jitted function closes over; "
                    f"pass it as an argument, and return what becomes of it{line()}"
                )
            )
        _vary(recorder.node_of(x))


def _vary(node: fx.Node) -> None:
    """A value that was the same in every run, and what it is a view of, no longer is."""
    if node.meta.pop("constant", False):
        for one in node.all_input_nodes:
            _vary(one)
