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
    facts = facts_of(func)
    if facts.gives_values:
        name = _name_of(func)
        raise recorder.refusal(constant_of(f"{_NAMES.get(name, name)}, which makes a Python value of a tensor's"))
    if facts.shape_of_values(args, kwargs):
        raise recorder.refusal(shape_of_values(func))
    if facts.inplace_view and any(args[0] is x for x in recorder.given):
        raise recorder.refusal(
            RecordError(
                f"jit cannot record {func._schema.name.split('::')[-1]}(), which changes the shape, or how it lies in "
                f"memory, of an argument of shape {tuple(args[0].shape)}; return what becomes of it{line()}"
            )
        )
    if facts.writes:
        check_writes(func._schema.name.split("::")[-1], written_by(func, args, kwargs), recorder)


def shape_of_values(func: Any) -> RecordError:
    """The refusal of a call whose result has a shape that depends on values."""
    name = _name_of(func)
    by_rank = f"{_BY_RANK}: {style_by_rows(trace().cause.module or '...')}"
    advice = f"; {_INSTEAD.get(name, by_rank)}"
    return constant_of(f"{name}, which gives a result whose shape depends on values", advice)


def _name_of(func: Any) -> str:
    return func._schema.name.split("::")[-1].lstrip("_")  # type: ignore[no-any-return]


_BY_RANK: Final = "what each rank does with its own rows, as experts do, runs as Python"
#: functions that can be told the size -> how
_INSTEAD: Final = {
    "repeat_interleave": "or tell it the size of the result: x.repeat_interleave(repeats, dim, output_size=n)",
    "nonzero": "or tell it the number of rows: torch.nonzero_static(x, size=n)",
    "bincount": "or count by adding up: torch.zeros(n).index_add(0, x, torch.ones(len(x)))",
}
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
