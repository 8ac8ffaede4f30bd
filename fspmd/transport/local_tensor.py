"""A tensor that holds every simulated rank's block: one process plays all ranks.

A torch op on a `LocalTensor` is applied to each rank's block. Autograd and ``torch.func`` work above it, as on any
tensor subclass. A value that is equal on all ranks is a plain ``torch.Tensor`` and is computed once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from fspmd.errors import ArgumentError, ShapeError, VarianceError
from fspmd.forms import overlaps, packed
from fspmd.meshes.mesh import Mesh
from fspmd.messages import WRITTEN_CAST, one_python_value, written_in_place
from fspmd.ops.schemas import FACTS, OpFacts, facts_of
from fspmd.spec import describe
from fspmd.torch_internals import (
    NO_LEVEL,
    current_autograd_node,
    disabled_torch_function,
    is_zero_tangent,
    level_of,
    make_wrapper_subclass,
)
from fspmd.transport.frame import Frame, frame_over, spread, union
from fspmd.transport.local_int import SYMBOLS, LocalInt, local_int
from fspmd.transport.randomness import per_rank_generators

_inference = torch.is_inference_mode_enabled
_strided = torch.strided
_SYMBOLS = frozenset(SYMBOLS)
_SEQUENCES = frozenset((list, tuple, torch.Size))


class LocalTensor(Tensor):
    """The blocks of all simulated ranks: ``shards[i]`` belongs to the i-th coordinate of ``frame``.

    ``borrowed`` marks shards that alias another value (``pcast``); writing in place into them is refused. The storage
    offset is that within the value it is a view of, as autograd needs it; shards have offsets of their own.
    """

    __slots__ = ("borrowed", "frame", "shards", "uneven")
    frame: Frame
    shards: list[Tensor]
    borrowed: bool
    uneven: bool  # the shards have different shapes
    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, shards: list[Tensor], frame: Frame, borrowed: bool = False, offset: Any = 0) -> LocalTensor:
        first = shards[0]
        size: Any = first.shape
        strides: Any
        uneven = False
        if first.layout is not torch.strided:
            _refuse_layout(first)
        if first.is_conj() or first.is_neg():  # lazy bits do not reach per-rank ops
            shards, borrowed = [resolved(shard) for shard in shards], True
        for other in shards:
            if other.shape != size:
                size, strides = _uneven(shards, frame)
                uneven = True
                break
        else:
            strides = shards[0].stride()
        make: Callable[..., Any] = make_wrapper_subclass
        if _inference() and not first.is_inference():  # views of what was made before
            make = torch.inference_mode(False)(make)
        self: LocalTensor = make(
            cls, size, strides=strides, storage_offset=offset, dtype=first.dtype, device=first.device
        )
        self.shards = shards
        self.frame = frame
        self.borrowed = borrowed
        self.uneven = uneven
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return apply_per_rank(func, args, kwargs or {})

    def at(self, frame: Frame) -> list[Tensor]:
        """Returns the shards in the order of a frame that includes this one's."""
        if frame is self.frame:
            return self.shards
        return [self.shards[i] for i in spread(self.frame, frame)]

    @property
    def data(self) -> Tensor:
        """The same blocks, without a graph."""
        return _DATA.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, LocalTensor):
            raise VarianceError(
                "x.data = y where x differs from rank to rank and y does not: expand it first, "
                "y.expand_as(x).clone(), or copy into x under torch.no_grad(): x.copy_(y)"
            )
        _DATA.__set__(self, value)
        for name in LocalTensor.__slots__:
            setattr(self, name, getattr(value, name))

    def untyped_storage(self) -> torch.UntypedStorage:
        """A storage without memory. Torch refuses to give it to another tensor, which would read where no data is."""
        own: Any = super().untyped_storage()
        if not hasattr(own, "simulated"):
            own.simulated = torch.UntypedStorage(self.shards[0].untyped_storage().nbytes(), device="meta")
        own.simulated.__dict__.update(own.__dict__)
        return own.simulated  # type: ignore[no-any-return]

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        lines = []
        for coordinate, shard in zip(self.frame.coordinates(), self.shards, strict=True):
            where = ", ".join(f"{axis}={c}" for axis, c in zip(self.frame.axes, coordinate, strict=True))
            lines.append(f"[{where}] {shard!r}")
        return "\n".join(lines)

    def __format__(self, spec: str) -> str:
        return repr(self) if not spec else refuse_python_value(self, "a format such as f'{x:.3f}'")

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            raise ArgumentError(
                "copy.deepcopy of a tensor computed by autograd is not possible; copy x.detach() instead"
            )
        shards = [copy.deepcopy(shard, memo) for shard in owned(self).shards]  # which a view may share
        made: Any = LocalTensor(shards, self.frame, offset=self.storage_offset()).requires_grad_(self.requires_grad)
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))  # as torch does: the type, and what users have set
        if self.grad is not None:
            made.grad = self.grad.__deepcopy__(memo)
        return made  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise VarianceError(
            "copy.copy or pickle got a value of simulated ranks, which is not pickled; write x.clone() for a copy, and "
            "save what the function returns: torch.save(device_get(y), path)"
        )

    def share_memory_(self) -> NoReturn:
        raise ArgumentError(
            "x.share_memory_() on a simulated value: all ranks live in this process, nothing is to be shared"
        )

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse_python_value(self, "x.__dlpack__()")

    def apply_(self, function: Callable[[Any], Any]) -> Tensor:
        """Calls a function of numbers, which torch would call on the memory of one tensor."""
        return self.copy_(per_block(lambda block: block.clone().apply_(function), self.detach()))

    def tolist(self) -> NoReturn:
        refuse_python_value(self, "x.tolist()")

    def numpy(self, *, force: bool = False) -> NoReturn:
        refuse_python_value(self, "x.numpy()")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        refuse_python_value(self, "numpy")


_DATA: Any = Tensor.data


def refuse_python_value(x: LocalTensor, call: str) -> NoReturn:
    raise VarianceError(one_python_value(call, _shown(x), x.frame.axes))


def _shown(x: Tensor) -> str:
    return describe(x.dtype, x.shape).replace(", ", ",")


def _refuse_layout(x: Tensor) -> NoReturn:
    raise ArgumentError(
        f"a simulated value that differs from rank to rank cannot have the layout {x.layout}; keep it dense "
        "(torch.strided), or work on such tensors inside rank_map"
    )


def _uneven(shards: list[Tensor], frame: Frame) -> tuple[Any, Any]:
    """Returns the sizes and strides of blocks whose shapes differ."""
    first = shards[0]
    if any(shard.ndim != first.ndim for shard in shards):
        raise ShapeError(
            f"the blocks of one value have different numbers of dims on different ranks: "
            f"{[tuple(shard.shape) for shard in shards]}; give them one number of dims, for example squeeze no dim "
            "whose size differs from rank to rank"
        )
    dims = range(first.ndim)
    size = tuple(local_int(frame, [shard.shape[d] for shard in shards]) for d in dims)
    strides = [shard.stride() if shard.numel() else packed(shard.shape) for shard in shards]  # an empty one has any
    return size, tuple(local_int(frame, [step[d] for step in strides]) for d in dims)


def shards_of(x: Tensor, frame: Frame) -> list[Tensor]:
    """Returns the block of each coordinate of ``frame``. A plain tensor is equal on all."""
    return x.at(frame) if type(x) is LocalTensor else [resolved(x)] * frame.volume


def blocks_of(x: Tensor) -> Sequence[Tensor]:
    """Returns the blocks of all simulated ranks, or the tensor itself."""
    return x.shards if type(x) is LocalTensor else [x]


def owned(x: Any) -> LocalTensor:
    """Returns a value, or a copy if its shards alias another value."""
    return x.detach().clone() if x.borrowed else x  # type: ignore[no-any-return]


def is_borrowed(x: Any) -> bool:
    """Whether the shards of a value alias another value."""
    return type(x) is LocalTensor and x.borrowed


def is_simulated(x: Any) -> bool:
    """Whether a value has a block for each of several simulated ranks."""
    return type(x) is LocalTensor


def held_frame(x: Any) -> Frame | None:
    """Returns the frame in whose order a value has a block per simulated rank; None for another value."""
    return x.frame if type(x) is LocalTensor else None


def per_block(function: Callable[..., Tensor], x: Any, *others: Tensor) -> Tensor:
    """Applies a function of tensors to the blocks of each simulated rank, or to ``x`` itself."""
    if type(x) is not LocalTensor:
        return function(x, *others)
    rows = zip(x.shards, *(shards_of(other, x.frame) for other in others), strict=True)
    return LocalTensor([function(*row) for row in rows], x.frame)


def layout_of_blocks(x: Any) -> tuple[Frame, bool] | None:
    """Returns the `held_frame` of a simulated value, and whether its blocks are uneven; None for another value."""
    return (x.frame, x.uneven) if type(x) is LocalTensor else None


def with_blocks(x: Any, make: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns ``make`` of ``x``, or of the block of each simulated rank, which lie in their base as before."""
    if type(x) is not LocalTensor:
        return make(x)
    return LocalTensor(list(map(make, x.shards)), x.frame, x.borrowed, x.storage_offset())


def take_blocks(x: Any, others: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns a new value that has the blocks of the simulated value ``x``. Each is replaced by ``others`` of it."""
    taken = LocalTensor(x.shards, x.frame, x.borrowed, x.storage_offset())
    x.shards = list(map(others, x.shards))
    return taken


def kinds_of(leaves: list[Any], others: Callable[[Any], Any]) -> tuple[tuple[Any, ...], list[Tensor], list[Any]]:
    """Returns the kinds of leaves, by which they are told apart; the tensors among the leaves; their strides.

    ``others`` gives the kind of a leaf that is no tensor.
    """
    kinds: list[Any] = []
    values, strides = [], []
    for leaf in leaves:
        kind = type(leaf)
        if kind is Tensor:
            kinds += leaf.dtype, leaf.shape, leaf.requires_grad, leaf.device
            if leaf.is_conj() or leaf.is_neg() or leaf.layout is not _strided:
                kinds += leaf.is_conj(), leaf.is_neg(), leaf.layout
        elif kind is LocalTensor:
            shapes = tuple([shard.shape for shard in (leaf.shards if leaf.uneven else leaf.shards[:1])])
            kinds.append((leaf.dtype, leaf.frame, shapes, leaf.requires_grad, leaf.device))
        elif isinstance(leaf, Tensor):
            kinds.append((kind, leaf.dtype, leaf.shape, leaf.requires_grad, leaf.device))
        else:
            kinds.append(others(leaf))
            continue
        values.append(leaf)
        strides.append(strides_of(leaf))
    return tuple(kinds), values, strides


def strides_of(x: Any) -> Any:
    """Returns the strides of a tensor; in a simulation those of each block."""
    return x.stride() if type(x) is not LocalTensor else [shard.stride() for shard in x.shards]


def has_overlaps(x: Tensor) -> bool:
    """Returns whether elements of a block share memory, as those of an expanded one do."""
    return any(not block.is_contiguous() and overlaps(block.shape, block.stride()) for block in blocks_of(x))


def shard_of(x: LocalTensor, i: int) -> Tensor:
    """Returns the block of one simulated rank; a step of records."""
    return x.shards[i]


def parts_of(x: Any) -> tuple[list[Tensor], Frame, bool, Any]:
    """Returns the arguments with which `JOINED` makes a simulated value."""
    return x.shards, x.frame, x.borrowed, x.storage_offset()


#: the step of records that joins the blocks of simulated ranks
JOINED: Final[Any] = LocalTensor


def placed_blocks(x: Tensor, mesh: Mesh) -> Iterator[tuple[dict[str, int], Tensor]]:
    """Yields the blocks of a value, each with the coordinate by axis of the first rank that has it."""
    if type(x) is not LocalTensor:
        yield dict(zip(mesh.axis_names, mesh.coordinate() or (), strict=True)), x
        return
    for place, block in zip(x.frame.coordinates(), x.shards, strict=True):
        yield dict.fromkeys(mesh.axis_names, 0) | dict(zip(x.frame.axes, place, strict=True)), block


def resolved(x: Tensor) -> Tensor:
    """Makes lazy conjugates, negatives and zeros of ``x`` real: torch does so above the dispatch to a `LocalTensor`."""
    if is_zero_tangent(x):
        return torch.zeros_like(x)
    return x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x


def local_tensor(shards: Sequence[Tensor], frame: Frame, borrowed: bool = False) -> Tensor:
    """Makes a LocalTensor; where the frame has no axes, returns the one plain tensor."""
    return LocalTensor(list(shards), frame, borrowed) if frame.axes else shards[0]


def block_type(frame: Frame | None) -> type[Tensor]:
    """Returns the type of a block: `LocalTensor` for simulated ranks, `torch.Tensor` for a process."""
    return LocalTensor if frame is not None and frame.axes else Tensor


#: the types of blocks
BLOCKS: Final = frozenset((Tensor, torch.nn.Parameter, LocalTensor))


def frame_of(x: Tensor, mesh: Mesh) -> Frame:
    """Returns the frame of a simulated value; that of a plain tensor has no axes."""
    return x.frame if type(x) is LocalTensor else frame_over(mesh, ())


def is_uneven(x: Tensor) -> bool:
    """Whether simulated ranks hold blocks of different shapes, under a ``torch.func`` transform too."""
    if type(x) is LocalTensor:
        return x.uneven
    return level_of(x) != NO_LEVEL and not all(type(length) is int for length in x.shape)


def expand(x: Tensor, frame: Frame) -> LocalTensor:
    """Gives ``x`` a block per rank over at least the axes of ``frame``. They share memory, and are marked borrowed."""
    if type(x) is LocalTensor:
        whole = union(x.frame, frame)
        return x if whole is x.frame else LocalTensor(x.at(whole), whole, borrowed=True)
    return LocalTensor([resolved(x.detach())] * frame.volume, frame, borrowed=True)  # shards lie below autograd


# --- one op on every rank -------------------------------------------------------------------------------------------


def apply_per_rank(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Applies an aten op to each rank's blocks. Plain arguments go to every rank as they are."""
    facts = facts_of(func)
    if facts.asks:
        if facts.asks == "value" and args[0].dtype is torch.bool and _looks_for_nan():
            return any(func(shard) for shard in args[0].shards)
        _refuse_numbers(func, facts.asks, args[0])
    if facts.elementwise and (parts := _parts_by_frame(args)):
        return _apply_in_parts(func, args, kwargs, parts)
    frame = common_frame(args, None)
    if kwargs:
        frame = common_frame(kwargs.values(), frame)
    assert frame is not None  # torch dispatches here only with a LocalTensor among the arguments
    if facts.writes:
        _check_writes(func, facts, args, kwargs, frame)
    results = _results(func, facts, args, kwargs, frame)
    if facts.writes:
        if facts.inplace_view:
            x = args[0]
            x.data = LocalTensor(x.shards, x.frame, borrowed=x.borrowed)  # with the sizes that the shards have now
            return x
        return _written(func, facts, args, kwargs, results, frame)
    return _gather_results(func, results, frame, args[0] if facts.view else None)


def _results(func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], frame: Frame) -> list[Any]:
    if facts.strided and len(args) > 3 and args[3] is not None:
        here = [args[3] - args[0].storage_offset() + shard.storage_offset() for shard in args[0].shards]
        args = (*args[:3], local_int(frame, here), *args[4:])
    rows: Iterable[Any] = zip(*(column(arg, frame) for arg in args), strict=True) if args else [()] * frame.volume
    if not kwargs:
        named: list[dict[str, Any]] = [kwargs] * frame.volume
    else:
        columns = zip(*(column(value, frame) for value in kwargs.values()), strict=True)
        named = [dict(zip(kwargs, row, strict=True)) for row in columns]
    if facts.random:
        return _drawn(func, zip(rows, named, strict=True), frame, kwargs.get("generator"))
    if kwargs:
        return [func(*row, **kw) for row, kw in zip(rows, named, strict=True)]
    return [func(*row) for row in rows]


def _drawn(func: Any, calls: Iterable[Any], frame: Frame, generator: torch.Generator | None = None) -> list[Any]:
    """Returns the results of a call per rank, each of which draws from the rank's own stream."""
    results = []
    with per_rank_generators(frame, generator) as switch:
        for i, (row, named) in enumerate(calls):
            switch(i)
            results.append(func(*row, **named))
    return results


def call_per_rank(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: Frame, draws: bool = False) -> Any:
    """Calls a torch function of numbers that differ over ``frame``, such as ``torch.zeros(x.shape)``, for each rank.

    ``draws``: each rank draws from its own stream.
    """
    columns = [column(value, frame) for value in (*args, *kwargs.values())]
    calls = [(row[: len(args)], dict(zip(kwargs, row[len(args) :], strict=True))) for row in zip(*columns, strict=True)]
    results = _drawn(func, calls, frame) if draws else [func(*row, **named) for row, named in calls]
    return _gather_results(func, results, frame)


def common_frame(values: Iterable[Any], frame: Frame | None) -> Frame | None:
    """Returns the smallest frame that includes those of all LocalTensors and local numbers among ``values``."""
    for value in values:
        kind = type(value)
        if kind is LocalTensor:
            frame = value.frame if frame is None else frame if value.frame is frame else union(frame, value.frame)
        elif kind in _SEQUENCES:
            frame = common_frame(value, frame)
        elif kind in _SYMBOLS and isinstance(value.node, LocalInt):
            frame = value.node.frame if frame is None else union(frame, value.node.frame)
    return frame


def column(value: Any, frame: Frame) -> list[Any]:
    """Returns one argument as each rank has it."""
    kind = type(value)
    if kind is LocalTensor:
        shards: list[Any] = value.shards if value.frame is frame else value.at(frame)
        return shards
    if kind in _SEQUENCES:
        if any(type(v) is LocalTensor or type(v) in _SEQUENCES or type(v) in _SYMBOLS for v in value):
            kind = tuple if kind is torch.Size else kind
            return [kind(row) for row in zip(*(column(v, frame) for v in value), strict=True)]
    elif kind in _SYMBOLS and isinstance(value.node, LocalInt):
        numbers: list[Any] = value.node.at(frame)
        return numbers
    return [value] * frame.volume


# --- lists of tensors, each with its own frame ----------------------------------------------------------------------


def _parts_by_frame(args: tuple[Any, ...]) -> dict[Frame | None, list[int]] | None:
    """Groups positions of lists, such as those of ``torch._foreach_add_``, by the frame of their tensors.

    Returns None where all have one frame.
    """
    lists = [arg for arg in args if type(arg) is list and arg]
    parts: dict[Frame | None, list[int]] = {}
    for i in range(len(lists[0])):
        parts.setdefault(common_frame((each[i] for each in lists if i < len(each)), None), []).append(i)
    return parts if len(parts) > 1 else None


def _apply_in_parts(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], parts: dict[Frame | None, list[int]]
) -> Any:
    results: dict[int, Any] = {}
    count = sum(map(len, parts.values()))
    for positions in parts.values():
        chosen = tuple([a[i] for i in positions] if type(a) is list and len(a) == count else a for a in args)
        frame = common_frame((*chosen, *kwargs.values()), None)
        out = func(*chosen, **kwargs) if frame is None else apply_per_rank(func, chosen, kwargs)
        if out is not None:
            results.update(zip(positions, out, strict=True))
    return [results[i] for i in range(count)] if results else None


# --- what an op writes and returns ----------------------------------------------------------------------------------


def _looks_for_nan() -> bool:
    """Whether autograd itself asks, as under ``torch.autograd.detect_anomaly``."""
    return torch.is_anomaly_check_nan_enabled() and current_autograd_node() is not None


def _refuse_numbers(func: Any, asks: str, x: LocalTensor) -> None:
    if asks == "value":
        refuse_python_value(x, "a branch, or a Python number such as x.item(),")
    if x.uneven:
        raise ShapeError(
            f"this torch function needs the sizes of its operand as plain numbers, but a block of shape "
            f"{tuple(x.shape)} differs in size from rank to rank; run it per rank with rank_map, or pad the blocks to "
            "one size"
        )


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str) -> Any:
    return args[index] if index < len(args) else kwargs.get(name)


def _written_tensors(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Tensor]:
    for target in facts.written(args, kwargs):
        for x in target if isinstance(target, (list, tuple)) else (target,):
            if isinstance(x, Tensor):
                yield x


def _check_writes(func: Any, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], frame: Frame) -> None:
    for target in _written_tensors(facts, args, kwargs):
        axes = frame_of(target, frame.mesh).axes
        if missing := [
            axis for axis, size in zip(frame.axes, frame.sizes, strict=True) if size > 1 and axis not in axes
        ]:
            raise VarianceError(written_in_place(_name_of(func), _shown(target), missing))
        if type(target) is LocalTensor and target.borrowed:
            raise VarianceError(WRITTEN_CAST.format(_name_of(func)))


def _name_of(func: Any) -> str:
    return f"{func.overloadpacket.__name__}()"


def _written(func: Any, facts: OpFacts, args: Any, kwargs: dict[str, Any], results: list[Any], frame: Frame) -> Any:
    """Returns what an in-place or out= op returns: the very tensors that it wrote into."""
    if facts.resizes:
        _check_resized(func, facts, args, kwargs)
    outs: Any = facts.returns
    if None in facts.returns:  # among them are new values
        fresh = _gather_results(func, results, frame)
        outs = fresh if len(outs) > 1 else (fresh,)
    places = zip(facts.returns, outs, strict=True)
    final = tuple([out if place is None else _argument(args, kwargs, *place) for place, out in places])
    return final if len(final) > 1 else final[0] if final else None


def _check_resized(func: Any, facts: OpFacts, args: Any, kwargs: dict[str, Any]) -> None:
    for target in _written_tensors(facts, args, kwargs):
        if type(target) is not LocalTensor:
            continue
        columns = [column(size, target.frame) for size in target.shape]
        for i, shard in enumerate(target.shards):
            if list(shard.shape) != [column[i] for column in columns]:
                raise ShapeError(
                    f"{func.name()} gave the blocks the shape {tuple(shard.shape)}, but they were written into a "
                    f"tensor of shape {tuple(target.shape)}; a simulated tensor keeps its shape: leave out=... away, "
                    "or give a tensor of the result's shape"
                )


def _view(results: list[Tensor], frame: Frame, base: LocalTensor) -> LocalTensor:
    shards = base.at(frame)
    count = frame.volume if base.uneven else 1
    moved: list[Any] = [results[i].storage_offset() - shards[i].storage_offset() for i in range(count)]
    offset = local_int(frame, moved) if base.uneven else moved[0]
    return LocalTensor(results, frame, base.borrowed, base.storage_offset() + offset)


def _gather_results(func: Callable[..., Any], results: list[Any], frame: Frame, base: Any = None) -> Any:
    """Joins the results of all ranks to one value; ``base`` is the value that they are views of."""
    first = results[0]
    if isinstance(first, Tensor):
        return LocalTensor(results, frame) if type(base) is not LocalTensor else _view(results, frame, base)
    if isinstance(first, (list, tuple)):
        if len({len(result) for result in results}) > 1:
            raise VarianceError(f"{func} returned a different number of tensors on different ranks; use rank_map")
        columns = zip(*results, strict=True)
        return type(first)(_gather_results(func, list(column), frame, base) for column in columns)
    if any(result != first for result in results):
        if isinstance(first, int) and not isinstance(first, bool):
            return local_int(frame, results)
        facts = FACTS.get(func)
        if isinstance(first, bool) and facts is not None and not facts.gives_values:
            return False  # torch asks about memory, as whether a tangent needs a copy: yes if so on all ranks
        raise VarianceError(
            f"{func} gave different Python values on different ranks; make its operands equal first (psum, pmax, "
            "all_gather to='invarying'), or run it rank by rank with rank_map"
        )
    return first
