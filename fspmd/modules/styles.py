"""Parallel styles as data: the layouts of the parameters of a subtree, and of the arguments and results of a module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fspmd.entries import Entry, Flat, entry_axes, without
from fspmd.errors import ArgumentError
from fspmd.messages import described, quoted
from fspmd.modules.paths import matches
from fspmd.spec import P

#: The layout of a value over the axis of a style: the dim that the axis cuts (counted from the end if negative), or one
#: of the words. Its layout over other axes stays. A P is the layout over all axes. None leaves the value as it is.
Layout = int | Literal["replicated", "unreduced", "reduced"] | P | None
Layouts = Layout | tuple[Layout, ...]
_WORDS = ("replicated", "unreduced", "reduced")


@dataclass(frozen=True, kw_only=True)
class Style:
    """The layouts of a subtree of parameters and of the values around it. Every field may get another value.

    Args:
        axis: The mesh axis; by default the axis of `parallelize`.
        weight: Layout of parameters of two dims and more.
        vector: Layout of parameters of one dim. Scalars are replicated.
        specs: Layouts of single parameters, by glob below the subtree. They go before ``weight`` and ``vector``.
        input: Layout of the first argument, or a tuple for the first few. The call may pass them by name.
        kwargs: Layouts of arguments by name. The call may pass them by position.
        result: Layout of the result of ``f`` when it runs on blocks (`Placed.local`).
        output: Layout of the result, or a tuple for a tuple of results.

    A dim that the axis cuts may be `Flat`. A result keeps it, and so does an argument if ``specs`` have `Flat` dims.
    Otherwise the argument is moved to consecutive blocks, like the parameters.
    """

    axis: str | None = None
    weight: Layout = None
    vector: Layout = None
    specs: Mapping[str, Layout] = field(default_factory=dict)
    input: Layouts = None
    kwargs: Mapping[str, Layout] = field(default_factory=dict)
    result: Layout = None
    output: Layouts = None

    def __post_init__(self) -> None:
        if self.axis is not None and not isinstance(self.axis, str):
            raise ArgumentError(
                f"{type(self).__name__} got {described(self.axis)} for axis; expected the name of a mesh axis, or None "
                "for the axis of parallelize"
            )
        for name, layouts in (("specs", self.specs), ("kwargs", self.kwargs)):
            if not isinstance(layouts, Mapping):
                raise ArgumentError(
                    f"{type(self).__name__} got {described(layouts)} for {name}; expected a dict of layouts"
                )
        given = [("weight", self.weight), ("vector", self.vector), ("result", self.result)]
        given += [(f"specs[{key!r}]", value) for key, value in self.specs.items()]
        given += [(f"kwargs[{key!r}]", value) for key, value in self.kwargs.items()]
        given += [("input", value) for value in several(self.input)]
        given += [("output", value) for value in several(self.output)]
        for name, layout in given:
            if not (layout is None or isinstance(layout, P) or type(layout) is int or layout in _WORDS):
                raise ArgumentError(
                    f"{type(self).__name__} got {described(layout)} for {name}; expected a dim such as -1, one of "
                    f"{quoted(_WORDS)}, a P, or None"
                )

    @property
    def flat(self) -> bool:
        """Whether ``specs`` have `Flat` dims."""
        partitions = [layout for layout in self.specs.values() if isinstance(layout, P)]
        return any(isinstance(entry, Flat) for partition in partitions for entry in partition)

    @property
    def places(self) -> bool:
        """Whether the style has layouts of parameters."""
        return self.weight is not None or self.vector is not None or bool(self.specs)

    @property
    def arranges(self) -> bool:
        """Whether the style has layouts of arguments or results."""
        layouts = several(self.input) + several(self.output) + tuple(self.kwargs.values())
        return any(layout is not None for layout in layouts)

    def of_parameter(self, below: str, ndim: int) -> Layout:
        """The layout of the parameter at the path ``below``, which begins at the subtree."""
        for pattern, layout in self.specs.items():
            if matches(pattern, below):
                return layout
        return self.weight if ndim >= 2 else self.vector if ndim == 1 else "replicated"

    def __repr__(self) -> str:
        fields, defaults = vars(self), vars(type(self)())
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in fields.items() if v != defaults[k])})"


@dataclass(frozen=True, kw_only=True, repr=False)
class ColwiseParallel(Style):
    """A linear layer cut by its outputs: weight ``[out, in]`` and bias along out (for ``x @ w``: ``weight=-1``).

    Forward, nothing moves if the input is replicated; backward, the gradient of the input is an all-reduce. An input
    cut over the axis, such as the output of `SequenceParallel`, is gathered; backward, its gradient is a
    reduce-scatter. Layers with the same input, such as q, k and v, share both collectives.

    The ``in_proj_weight`` of ``nn.MultiheadAttention`` has the weights of q, k and v one after another. An even cut
    does not divide it by heads. The values are still right, because its rule moves the missing rows to each rank. To
    move nothing, cut each of the three, ``specs={"in_proj_*": P(Flat((3, None), (width, "x")))}``, or use one layer
    each for q, k and v.
    """

    weight: Layout = -2
    vector: Layout = -1
    input: Layouts = "replicated"
    result: Layout = -1
    output: Layouts = -1


@dataclass(frozen=True, kw_only=True, repr=False)
class RowwiseParallel(Style):
    """A linear layer cut by its inputs: weight ``[out, in]`` along in (for ``x @ w``: ``weight=-2``), bias replicated.

    Forward, the output is an all-reduce, and with ``output=1`` a reduce-scatter. Backward, nothing moves, and with
    ``output=1`` there is an all-gather.
    """

    weight: Layout = -1
    vector: Layout = "replicated"
    input: Layouts = -1
    result: Layout = "unreduced"
    output: Layouts = "replicated"


@dataclass(frozen=True, kw_only=True, repr=False)
class VocabParallel(Style):
    """An embedding ``[vocabulary, width]`` cut by the vocabulary. Forward, an all-reduce; backward, nothing moves."""

    weight: Layout = -2
    vector: Layout = "replicated"
    input: Layouts = "replicated"
    result: Layout = "unreduced"
    output: Layouts = "replicated"


@dataclass(frozen=True, kw_only=True, repr=False)
class SequenceParallel(Style):
    """A norm or dropout on values cut along the sequence (dim 1): parameters replicated, gradients all-reduced.

    The following styles cut the stream of a transformer block along the sequence. They communicate two gathers and two
    reduce-scatters forward, and as many backward. ::

        {
            "norm1": SequenceParallel(), "attn.[qkv]": ColwiseParallel(), "attn.o": RowwiseParallel(output=1),
            "norm2": SequenceParallel(), "up": ColwiseParallel(), "down": RowwiseParallel(output=1),
        }
    """

    weight: Layout = "replicated"
    vector: Layout = "replicated"
    input: Layouts = 1
    result: Layout = 1
    output: Layouts = 1


@dataclass(frozen=True, kw_only=True, repr=False)
class Replicated(Style):
    """Parameters and input equal on all ranks of the axis."""

    weight: Layout = "replicated"
    vector: Layout = "replicated"
    input: Layouts = "replicated"
    result: Layout = "replicated"


@dataclass(frozen=True, kw_only=True, repr=False)
class OnBlocks(Style):
    """A module whose ``forward`` runs on each rank's blocks, as ordinary Python on plain tensors, by `functional_call`.

    Each rank sees its own rows of the arguments, and its own part of the parameters, which ``specs`` cut. Nothing moves
    within. Loops and shapes may therefore depend on values, as in a mixture of experts that sorts tokens by expert. The
    result has as many rows as the first tensor among the arguments.

    By default the result is a pending sum over the axis, like the result of a column-parallel layer and a row-parallel
    one. Forward, it is all-reduced; backward, there is an all-reduce for each argument that is not cut over the axis.
    If nothing is cut over the axis, nothing is summed. With ``input=None, result=None, output=None`` rows keep their
    layout, such as that of a batch.
    """

    input: Layouts = "replicated"
    result: Layout = "unreduced"
    output: Layouts = "replicated"


@dataclass(frozen=True, kw_only=True, repr=False)
class PrepareInput(Style):
    """Lays out arguments by ``input`` and ``kwargs``, and no parameters.

    A cut argument that is to be ``"replicated"`` is gathered as ``"reduced"`` if layers below are cut by columns.
    Backward is then one reduce-scatter for all these layers, in place of an all-reduce.
    """


@dataclass(frozen=True, kw_only=True, repr=False)
class PrepareOutput(Style):
    """Lays out results by ``output``, and no parameters."""


def several(layouts: Layouts) -> tuple[Layout, ...]:
    """One layout, or a tuple of them, as a tuple."""
    return layouts if isinstance(layouts, tuple) else (layouts,)


def laid_out(partition: P, ndim: int, axis: str, layout: Layout, *, flat: bool = False) -> P:
    """The partition with another layout over one axis. With ``flat`` a `Flat` dim that the axis cuts stays as it is.

    >>> laid_out(P("data", None, "tp"), 3, "tp", 0), laid_out(P("data"), 2, "tp", "unreduced")
    (P(('data', 'tp'), None, None), P('data', None, unreduced={'tp'}))
    """
    if layout is None or isinstance(layout, P):
        return partition if layout is None else layout
    entries = [without(entry, (axis,)) for entry in partition]
    entries += [None] * (ndim - len(entries))
    if isinstance(layout, int):
        if not -ndim <= layout < ndim:
            raise ArgumentError(f"a style cuts dim {layout}, but the value has {ndim} dims; write another layout")
        before = partition[layout] if len(partition) == ndim else None
        stays = flat and isinstance(before, Flat) and axis in before.axes
        entries[layout] = before if stays else _cut(entries[layout], axis)
    unreduced = partition.unreduced - {axis} | ({axis} if layout == "unreduced" else set())
    reduced = partition.reduced - {axis} | ({axis} if layout == "reduced" else set())
    return P(*entries, unreduced=unreduced, reduced=reduced)


def _cut(entry: Entry, axis: str) -> Entry:
    """The entry of a dim, cut over one more axis. Of a `Flat` dim the leading factor is cut."""
    if isinstance(entry, Flat):
        (size, axes), *others = entry.factors
        return Flat((size, (*axes, axis)), *others)
    return (*entry_axes(entry), axis)
