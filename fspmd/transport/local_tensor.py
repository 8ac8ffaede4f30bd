"""A tensor that holds every simulated rank's block: one process plays all ranks.

A torch op on a `LocalTensor` is applied to each rank's block. Autograd and ``torch.func`` work above it, as on any
tensor subclass. A value that is equal on all ranks is a plain ``torch.Tensor`` and is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from fspmd.errors import VarianceError
from fspmd.mesh import Mesh
from fspmd.transport.frame import UNEVEN, Frame, frame, spread, union
from fspmd.transport.local_int import LocalInt, local_int
from fspmd.transport.randomness import per_rank_generators

_make = Tensor._make_wrapper_subclass
_BRANCH = (
    "a value that differs from rank to rank has no single Python value: in a program run by all ranks alike, make it "
    "equal first (psum, pmax, all_gather), choose with torch.where, or run per-rank Python with rank_map"
)


class LocalTensor(Tensor):
    """The blocks of all simulated ranks: ``shards[i]`` belongs to the i-th coordinate of ``frame``.

    ``borrowed`` marks shards that alias another value (``pcast``); writing in place into them is refused.
    """

    __slots__ = ("borrowed", "frame", "shards", "uneven")
    frame: Frame
    shards: list[Tensor]
    borrowed: bool
    uneven: bool  # the shards have different shapes
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, shards: list[Tensor], held: Frame, borrowed: bool = False) -> LocalTensor:
        first = shards[0]
        size: Any = first.shape
        strides: Any = first.stride()
        uneven = False
        for other in shards:
            if other.shape != size:
                UNEVEN.add(held.mesh)
                uneven = True
                size = tuple(local_int(held, [s.shape[d] for s in shards]) for d in range(first.ndim))
                strides = tuple(local_int(held, [s.stride(d) for s in shards]) for d in range(first.ndim))
                break
        self: LocalTensor = _make(cls, size, strides=strides, dtype=first.dtype, device=first.device)
        self.shards = shards
        self.frame = held
        self.borrowed = borrowed
        self.uneven = uneven
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return apply_per_rank(func, args, kwargs or {})

    def at(self, held: Frame) -> list[Tensor]:
        """The shards in the order of a frame that includes this one's."""
        if held is self.frame:
            return self.shards
        return [self.shards[i] for i in spread(self.frame, held)]

    def __repr__(self, *, tensor_contents: object = None) -> str:
        lines = []
        for coordinate, shard in zip(self.frame.coordinates(), self.shards, strict=True):
            where = ", ".join(f"{axis}={c}" for axis, c in zip(self.frame.axes, coordinate, strict=True))
            lines.append(f"[{where}] {shard!r}")
        return "\n".join(lines)

    def __format__(self, spec: str) -> str:
        return repr(self) if not spec else _refuse_python_value(self, f"format(x, {spec!r})")

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalTensor:
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        return copy  # type: ignore[return-value]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise VarianceError("a LocalTensor holds simulated ranks and is not pickled; save device_get(x) instead")

    def tolist(self) -> NoReturn:
        return _refuse_python_value(self, "x.tolist()")

    def numpy(self, *, force: bool = False) -> NoReturn:
        return _refuse_python_value(self, "x.numpy()")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        return _refuse_python_value(self, "numpy.asarray(x)")


def _refuse_python_value(x: LocalTensor, call: str) -> NoReturn:
    axes = ", ".join(map(repr, x.frame.axes))
    raise VarianceError(f"{call} on a value that varies over {axes}: {_BRANCH}")


def shards_of(x: Tensor, held: Frame) -> list[Tensor]:
    """The block of each coordinate of ``held``; a plain tensor is equal on all."""
    return x.at(held) if type(x) is LocalTensor else [resolved(x)] * held.volume


def resolved(x: Tensor) -> Tensor:
    """``x`` without lazy conjugation or negation, which torch resolves above the dispatch to a `LocalTensor` only."""
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x


def local_tensor(shards: Sequence[Tensor], held: Frame) -> Tensor:
    """A LocalTensor, or the plain tensor itself where the frame has no axes."""
    return LocalTensor(list(shards), held) if held.axes else shards[0]


def frame_of(x: Tensor, mesh: Mesh) -> Frame:
    """The axes over which a simulated value is held apart; none for a plain tensor."""
    return x.frame if type(x) is LocalTensor else frame(mesh, ())


def expand(x: Tensor, held: Frame) -> LocalTensor:
    """``x`` held apart over at least the axes of ``held``; the new shards are the old tensors, marked borrowed."""
    if type(x) is LocalTensor:
        whole = union(x.frame, held)
        return x if whole is x.frame else LocalTensor(x.at(whole), whole, borrowed=True)
    return LocalTensor([resolved(x)] * held.volume, held, borrowed=True)


# --- one op on every rank -------------------------------------------------------------------------------------------


def apply_per_rank(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply an aten op to each rank's blocks; plain arguments go to every rank as they are."""
    held = _common_frame(args, None)
    if kwargs:
        held = _common_frame(kwargs.values(), held)
    assert held is not None  # torch dispatches here only with a LocalTensor among the arguments
    func = _EAGER.get(func, func)
    facts = _FACTS.get(func) or _learn(func)
    if facts.returns_value:
        if func is torch.ops.aten._local_scalar_dense.default:
            _refuse_python_value(args[0], "bool(x), int(x), float(x), x.item() or a branch")
    if facts.writes:
        _check_writes(func, facts, args, kwargs, held)
    columns = [_column(arg, held) for arg in args]
    n = held.volume
    if kwargs:
        names = tuple(kwargs)
        named = [dict(zip(names, row, strict=True)) for row in zip(*(_column(v, held) for v in kwargs.values()))]
    else:
        named = [kwargs] * n
    if facts.random and kwargs.get("generator") is None:
        results = []
        with per_rank_generators(held) as switch:
            for i, row in enumerate(zip(*columns, strict=True)):
                switch(i)
                results.append(func(*row, **named[i]))
    elif kwargs:
        results = [func(*row, **kw) for row, kw in zip(zip(*columns, strict=True), named, strict=True)]
    else:
        results = [func(*row) for row in zip(*columns, strict=True)]
    if facts.writes:
        if torch.Tag.inplace_view in func.tags:
            return return_and_correct_aliasing(func, args, kwargs, args[0])
        return _written(func, facts, args, kwargs, results, held)
    return _gather_results(func, results, held)


#: shards are never lazily conjugated or negated
_EAGER = {
    torch.ops.aten._conj.default: torch.ops.aten._conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}


def call_per_rank(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A torch function of plain tensors and sizes that differ from rank to rank, such as ``torch.zeros(x.shape)``."""
    held = _common_frame((*args, *kwargs.values()), None)
    if held is None:
        return func(*args, **kwargs)
    columns = [_column(value, held) for value in (*args, *kwargs.values())]
    rows = zip(*columns, strict=True)
    results = [func(*row[: len(args)], **dict(zip(kwargs, row[len(args) :], strict=True))) for row in rows]
    return _gather_results(func, results, held)


class _Facts:
    """What an op's schema says, learnt once: does it write, which argument does each return alias, is it random."""

    __slots__ = ("random", "returns_value", "writes")

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.random: bool = torch.Tag.nondeterministic_seeded in func.tags
        self.returns_value: bool = any(str(r.type) not in ("Tensor", "List[Tensor]") for r in schema.returns)
        self.writes: list[tuple[int, str]] = [
            (i, arg.name)
            for i, arg in enumerate(schema.arguments)
            if arg.alias_info is not None and arg.alias_info.is_write
        ]


_FACTS: dict[Any, _Facts] = {}


def _learn(func: Any) -> _Facts:
    facts = _FACTS[func] = _Facts(func)
    return facts


def _common_frame(values: Iterable[Any], held: Frame | None) -> Frame | None:
    for value in values:
        kind = type(value)
        if kind is LocalTensor:
            held = value.frame if held is None else held if value.frame is held else union(held, value.frame)
        elif kind is list or kind is tuple or kind is torch.Size:
            held = _common_frame(value, held)
        elif kind is torch.SymInt and isinstance(value.node, LocalInt):
            held = value.node.frame if held is None else union(held, value.node.frame)
    return held


def _column(value: Any, held: Frame) -> list[Any]:
    """One argument as seen by each rank."""
    kind = type(value)
    if kind is LocalTensor:
        return value.shards if value.frame is held else value.at(held)
    if kind is list or kind is tuple or kind is torch.Size:
        kind = tuple if kind is torch.Size else kind
        if any(type(v) in (LocalTensor, list, tuple, torch.SymInt) for v in value):
            return [kind(row) for row in zip(*(_column(v, held) for v in value), strict=True)]
    elif kind is torch.SymInt and isinstance(value.node, LocalInt):
        return value.node.at(held)
    return [value] * held.volume


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str) -> Any:
    return args[index] if index < len(args) else kwargs.get(name)


def _check_writes(func: Any, facts: _Facts, args: tuple[Any, ...], kwargs: dict[str, Any], held: Frame) -> None:
    for index, name in facts.writes:
        target = _argument(args, kwargs, index, name)
        for one in target if isinstance(target, (list, tuple)) else (target,):
            if not isinstance(one, Tensor):
                continue
            axes = frame_of(one, held.mesh).axes
            if missing := [axis for axis in held.axes if axis not in axes]:
                raise VarianceError(
                    f"{func.name()} would write a value that varies over {', '.join(map(repr, missing))} in place into "
                    f"a tensor of shape {tuple(one.shape)} that is equal along that axis; compute a new tensor instead "
                    "(x = x + y, not x += y), or start from one that varies: torch.zeros_like(y), y.new_zeros(shape)"
                )
            if type(one) is LocalTensor and one.borrowed:
                raise VarianceError(
                    f"{func.name()} would write in place into the result of a pcast, which aliases its argument; "
                    "write into a copy: x = pcast(x, ...).clone()"
                )


def _written(func: Any, facts: _Facts, args: Any, kwargs: dict[str, Any], results: list[Any], held: Frame) -> Any:
    """In-place and out= ops return the very tensors they wrote into."""
    returns = func._schema.returns
    if not returns:
        return None
    fresh = _gather_results(func, results, held)
    outs = fresh if len(returns) > 1 else (fresh,)
    writes = iter(facts.writes)
    final = tuple(
        _argument(args, kwargs, *next(writes)) if r.alias_info is not None and r.alias_info.is_write else out
        for r, out in zip(returns, outs, strict=True)
    )
    return final if len(returns) > 1 else final[0]


def _gather_results(func: Callable[..., Any], results: list[Any], held: Frame) -> Any:
    first = results[0]
    if isinstance(first, Tensor):
        return LocalTensor(results, held)
    if isinstance(first, (list, tuple)):
        if len({len(result) for result in results}) > 1:
            raise VarianceError(f"{func} returned a different number of tensors on different ranks; use rank_map")
        return type(first)(_gather_results(func, list(column), held) for column in zip(*results, strict=True))
    if any(result != first for result in results):
        if isinstance(first, int) and not isinstance(first, bool):
            return local_int(held, results)
        raise VarianceError(f"{func} gave different Python values on different ranks: {_BRANCH}")
    return first
