"""Runs a collective over a pytree. Each leaf is a step; leaves of one dtype share a call.

A step is a `Call` with the shape changes before and after it. Where the transport coalesces, steps that share a call
in *row form* (``[rows, K]``, one row per rank of the group or one row in all) are joined along K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn

import optree
import torch
from torch import Tensor
from typing_extensions import TypeVar

from fspmd.body import Body, state
from fspmd.errors import ArgumentError, FspmdError
from fspmd.flights import Flight, depart, land
from fspmd.messages import Failure, described, refuse
from fspmd.pairs import Call, applied
from fspmd.remembered import last_write
from fspmd.torch_internals import DisableTorchFunction
from fspmd.variance import ATTRIBUTE, INVARIANT, Variance, get_variance, set_variance, show, unwrapped

T = TypeVar("T", default=Any)  # a tree and its result

Reshape = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class Rows:
    """A leaf in a packed call: its change into rows, the call on rows, and the change back."""

    call: Call
    into: Reshape
    back: Reshape


@dataclass(slots=True)
class LeafCollective:
    """One collective on one leaf."""

    call: Call | None  # None: `after` computes the result without communication
    variance: Variance  # of the result
    before: Reshape | None = None
    after: Reshape | None = None
    rows: Rows | None = None


class HandleAttributeError(ArgumentError, AttributeError):
    """An attribute of a tensor was read from a handle."""


class Handle(Generic[T]):
    """A collective in flight, as ``wait=False`` returns it. `wait` gives the result.

    Do not write into the operand before, nor into memory that it shares: `wait` refuses the result, on all transports
    alike. In backward, communication begins where forward waited for the result, and ends where forward called the
    collective.

    Raises:
        ArgumentError: the handle is used as a tensor, returned from a body, or passed to another collective; or an
            operand was written into before `wait`.

    >>> from fspmd import P, device_get, make_mesh, psum, shard_map
    >>> def body(x):
    ...     handle = psum(x, "x", wait=False)
    ...     y = x * x  # while the sum is under way
    ...     return y + handle.wait()
    >>> f = shard_map(body, mesh=make_mesh((4,), ("x",)), in_specs=P("x"), out_specs=P("x"))
    >>> device_get(f(torch.arange(4.0)))
    tensor([ 6.,  7., 10., 15.])
    """

    def __init__(self, finish: Callable[[], T], operands: Iterable[Any] = ()) -> None:
        self._finish: Callable[[], T] | None = finish
        self._result: Any = None
        self._lent = [(x, _version(x)) for x in operands if isinstance(x, Tensor)]

    def wait(self) -> T:
        """Wait for the result and return it. A second call returns the same object."""
        if self._finish is not None:
            result = self._finish()
            for x, version in self._lent:
                if _version(x) != version:
                    _refuse_written(x)
            self._result, self._finish, self._lent = result, None, []
        return self._result  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _refuse_handle(f"{getattr(func, '__name__', func)}()")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_") or not hasattr(Tensor, name):
                raise AttributeError(f"a Handle has no attribute {name!r}")
            _refuse_handle(f".{name}", HandleAttributeError)


def _version(x: Tensor) -> tuple[int, int]:
    """Return how often the memory of an operand was written into, and the last write that fspmd has seen.

    Torch counts no writes through ``x.data``, which a checked body sees, and none into inference tensors.
    """
    with DisableTorchFunction():
        x = unwrapped(x)
        return (0, 0) if x.is_inference() else (x._version, last_write(x))


def _refuse_written(x: Tensor) -> NoReturn:
    with DisableTorchFunction():
        shown = show(x)
    raise ArgumentError(
        f"the operand {shown} of a collective with wait=False, or memory that it shares, was written into before "
        "wait(): the write may have been sent or not; write after wait(), or pass the collective a clone()"
    )


def _refuse_handle(operation: str, error: type[ArgumentError] = ArgumentError) -> NoReturn:
    raise error(f"{operation} was used on the handle of a collective with wait=False; use its value: handle.wait()")


def _operator(shown: str) -> Any:
    def refuse(self: Handle, *args: Any) -> NoReturn:
        _refuse_handle(shown)

    return refuse


for _shown, _names in {
    **{"+": "add radd", "-": "sub rsub neg", "*": "mul rmul", "/": "truediv rtruediv", "@": "matmul rmatmul"},
    **{"**": "pow", "[]": "getitem setitem", "a comparison": "lt le gt ge", "bool() or a branch": "bool"},
    **{"float()": "float", "int()": "int index", "a loop": "iter", "len()": "len"},
}.items():
    for _name in _names.split():
        setattr(Handle, f"__{_name}__", _operator(_shown))


LEAF: Final = optree.tree_structure(0)  # the structure of an operand that is one tensor


@dataclass(slots=True)
class Operand:
    """The operand of a collective: a tree in a body, and the axes that it moves over."""

    what: str  # the name of the collective
    body: Body
    axes: tuple[str, ...]
    ranks: int  # along the axes
    leaves: list[Any]  # a step may put a cast in the place of its leaf
    treedef: optree.PyTreeSpec

    def steps(self, build: Callable[[int, Any], LeafCollective | None]) -> list[LeafCollective | None]:
        """One step per leaf. One error lists all leaves of a tree that fail."""
        if self.treedef == LEAF:
            return [build(0, self.leaves[0])]
        steps: list[LeafCollective | None] = []
        failures = []
        for i, leaf in enumerate(self.leaves):
            try:
                steps.append(build(i, leaf))
            except FspmdError as error:
                failures.append(Failure(f"{self.treedef.accessors()[i].codify('x')}: {error}", type(error)))
        if failures:
            refuse(f"{self.what}: leaves that do not fit", failures)
        return steps

    def run(self, steps: list[LeafCollective | None], wait: bool) -> Any:
        """Run every step, and return the tree of their results, or a handle of it. A leaf without a step stays."""
        body, leaves, treedef = self.body, self.leaves, self.treedef
        if wait is not True and wait is not False:
            raise ArgumentError(f"{self.what} got {described(wait)} for wait; expected True, or False for a handle")
        kept: list[Variance] | None = None
        if state.tracker is not None and not body.checked:  # an enclosing body tracks its own axes
            kept = [get_variance(x) if isinstance(x, Tensor) else INVARIANT for x in leaves]
        with DisableTorchFunction():
            begun = [(pack, *_begin(leaves, pack, wait)) for pack in _packs(body, leaves, steps)]

        def finish() -> Any:
            results = list(leaves)
            with DisableTorchFunction():
                for pack, widths, y in begun:
                    _end(land(y) if isinstance(y, Flight) else y, widths, pack, results)
                for i, step in enumerate(steps):
                    if step is not None:
                        set_variance(results[i], step.variance if kept is None else kept[i])
                        if step.variance is INVARIANT and body.checked:
                            setattr(results[i], ATTRIBUTE, INVARIANT)  # seen, and invariant
            return optree.tree_unflatten(treedef, results)

        return finish() if wait else Handle(finish, leaves)


_Pack = list[tuple[int, LeafCollective]]  # the numbers and the steps of leaves that share a call


def _packs(body: Body, leaves: list[Any], steps: list[LeafCollective | None]) -> list[_Pack]:
    packs: dict[Any, _Pack] = {}
    for i, step in enumerate(steps):
        if step is not None:
            packable = body.transport.coalesces and step.call is not None
            key = (step.rows.call, leaves[i].dtype, step.variance) if packable and step.rows is not None else i
            packs.setdefault(key, []).append((i, step))
    return list(packs.values())


def _begin(leaves: list[Any], pack: _Pack, wait: bool) -> tuple[list[int], Tensor | Flight]:
    """Begin the call of a pack. Returns the widths of its rows, and the result or the call under way."""
    i, step = pack[0]
    x, the_call, widths = leaves[i], step.call, list[int]()
    if len(pack) > 1:
        rows = [(leaves[i], step.rows) for i, step in pack if step.rows is not None]
        parts = [row.into(leaf) for leaf, row in rows]
        x, the_call, widths = torch.cat(parts, 1), rows[0][1].call, [part.shape[1] for part in parts]
    elif step.before is not None:
        x = step.before(x)
    return widths, x if the_call is None else applied(x, the_call) if wait else depart(x, the_call)


def _end(y: Tensor, widths: list[int], pack: _Pack, results: list[Any]) -> None:
    """Put the result of a pack into the places of its leaves."""
    if not widths:
        ((i, step),) = pack
        results[i] = y if step.after is None else step.after(y)
        return
    start = 0
    for (i, step), width in zip(pack, widths, strict=True):
        assert step.rows is not None
        results[i] = step.rows.back(y.narrow(1, start, width))  # torch forbids writes into the results of split
        start += width


# --- steps ------------------------------------------------------------------------------------------------------------


def elementwise_step(the_call: Call, after: Variance, x: Tensor) -> LeafCollective:
    """A step whose call acts element by element. A leaf of any shape is packed as one row."""
    shape = tuple(x.shape)
    return LeafCollective(
        the_call, after, rows=Rows(the_call, lambda leaf: leaf.reshape(1, -1), lambda row: row.reshape(shape))
    )


def then(step: LeafCollective, after: Callable[[Tensor], Tensor]) -> LeafCollective:
    rows = step.rows
    if rows is not None:
        back = rows.back
        rows = Rows(rows.call, rows.into, lambda row: after(back(row)))
    return LeafCollective(step.call, step.variance, step.before, after, rows)
