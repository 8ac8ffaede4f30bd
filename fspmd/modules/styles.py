"""Parallel styles as data: how the parameters of a subtree are cut, how values lie before and after its function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fspmd.entries import Entry, Flat, entry_axes, without
from fspmd.errors import ArgumentError
from fspmd.messages import described, quoted
from fspmd.modules.paths import matches
from fspmd.spec import P

#: How a value lies over the axis of a style: cut along a dim (counted from the end if negative), or one of the words;
#: what it is over other axes stays. A P says it for all axes; None leaves the value as it is.
Layout = int | Literal["replicated", "unreduced", "reduced"] | P | None
Layouts = Layout | tuple[Layout, ...]
_WORDS = ("replicated", "unreduced", "reduced")


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a subtree of parameters and the values around it lie; every field may be given another value.

    Args:
        axis: The mesh axis; by default that of `parallelize`.
        weight: Layout of parameters of two dims and more.
        vector: Layout of parameters of one dim. Scalars are replicated.
        specs: Layouts of single parameters, by glob below the subtree, instead of these.
        input: Layout of the first argument, or a tuple for the first few. Modules may be given them by name.
        kwargs: Layouts of arguments by name. Modules may be given them by place.
        result: What ``f`` gives when it runs on blocks (`Placed.local`).
        output: Layout of the result, or a tuple for a tuple of results.

    A dim cut over the axis may be `Flat`: a result stays so, and so does an argument where ``specs`` cut parameters so;
    else it is moved to consecutive blocks, as the parameters lie.
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
                "for that of parallelize"
            )
        for name, layouts in (("specs", self.specs), ("kwargs", self.kwargs)):
            if not isinstance(layouts, Mapping):
                raise ArgumentError(
                    f"{type(self).__name__} got {described(layouts)} for {name}; expected a dict of layouts"
                )
        given = [("weight", self.weight), ("vector", self.vector), ("result", self.result)]
        given += [(f"specs[{key!r}]", value) for key, value in self.specs.items()]
        given += [(f"kwargs[{key!r}]", value) for key, value in self.kwargs.items()]
        given += [("input", one) for one in several(self.input)] + [("output", one) for one in several(self.output)]
        for name, layout in given:
            known = layout is None or isinstance(layout, P) or type(layout) is int or layout in _WORDS
            if not known:
                raise ArgumentError(
                    f"{type(self).__name__} got {described(layout)} for {name}; expected a dim such as -1, one of "
                    f"{quoted(_WORDS)}, a P, or None"
                )

    @property
    def flat(self) -> bool:
        """Whether parameters are cut along dims that are `Flat`."""
        given = [layout for layout in self.specs.values() if isinstance(layout, P)]
        return any(isinstance(entry, Flat) for layout in given for entry in layout)

    @property
    def places(self) -> bool:
        """Whether the style says how parameters lie."""
        return self.weight is not None or self.vector is not None or bool(self.specs)

    @property
    def arranges(self) -> bool:
        """Whether the style says how arguments or results lie."""
        said = several(self.input) + several(self.output) + tuple(self.kwargs.values())
        return any(layout is not None for layout in said)

    def of_parameter(self, below: str, ndim: int) -> Layout:
        """The layout of the parameter that stands at a path below the subtree."""
        for pattern, layout in self.specs.items():
            if matches(pattern, below):
                return layout
        return self.weight if ndim >= 2 else self.vector if ndim == 1 else "replicated"

    def __repr__(self) -> str:
        ours, usual = vars(self), vars(type(self)())
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in ours.items() if v != usual[k])})"


@dataclass(frozen=True, kw_only=True, repr=False)
class ColwiseParallel(Style):
    """A linear layer cut by its outputs: weight ``[out, in]`` along out (for ``x @ w``: ``weight=-1``), bias too.

    Forward nothing moves if the input is replicated; backward the input's gradient is an all-reduce. An input cut over
    the axis, as `SequenceParallel` gives it, is gathered; backward its gradient is then a reduce-scatter. Layers that
    take one input, as q, k and v do, share both.

    The ``in_proj_weight`` of ``nn.MultiheadAttention`` holds those of q, k and v one after another, which no even cut
    divides by heads: the values are right, and its rule moves what each rank's heads lack. Each of the three cut, with
    ``specs={"in_proj_*": P(Flat((3, None), (width, "x")))}``, or a layer each for q, k and v moves nothing.
    """

    weight: Layout = -2
    vector: Layout = -1
    input: Layouts = "replicated"
    result: Layout = -1
    output: Layouts = -1


@dataclass(frozen=True, kw_only=True, repr=False)
class RowwiseParallel(Style):
    """A linear layer cut by its inputs: weight ``[out, in]`` along in (for ``x @ w``: ``weight=-2``), bias replicated.

    Forward the output is an all-reduce, with ``output=1`` a reduce-scatter; backward nothing moves, or an all-gather.
    """

    weight: Layout = -1
    vector: Layout = "replicated"
    input: Layouts = -1
    result: Layout = "unreduced"
    output: Layouts = "replicated"


@dataclass(frozen=True, kw_only=True, repr=False)
class VocabParallel(Style):
    """An embedding ``[vocabulary, width]`` cut by the vocabulary. Forward an all-reduce, backward nothing moves."""

    weight: Layout = -2
    vector: Layout = "replicated"
    input: Layouts = "replicated"
    result: Layout = "unreduced"
    output: Layouts = "replicated"


@dataclass(frozen=True, kw_only=True, repr=False)
class SequenceParallel(Style):
    """A norm or dropout on values cut along the sequence (dim 1): parameters replicated, gradients all-reduced.

    A block of a transformer whose stream is cut along the sequence: two gathers and two reduce-scatters forward, and as
    many backward. ::

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
    """A module whose ``forward`` runs on each rank's blocks, as ordinary Python on plain tensors; by `functional_call`.

    Each rank sees its own rows of the arguments and its own part of the parameters, which ``specs`` cut, and nothing
    moves within: loops and shapes may depend on values, as in a mixture of experts whose tokens are sorted by expert.
    It gives as many rows as its first tensor has. By default that is a part of a sum over the axis, as of columns then
    rows: forward an all-reduce of it, backward one for each argument that is not cut over the axis. If nothing is cut
    over the axis it is no part, and nothing is summed. With ``input=None, result=None, output=None`` rows stay as they
    lie, as of a batch.
    """

    input: Layouts = "replicated"
    result: Layout = "unreduced"
    output: Layouts = "replicated"


@dataclass(frozen=True, kw_only=True, repr=False)
class PrepareInput(Style):
    """Arguments laid out by ``input`` and ``kwargs``; says nothing of parameters.

    Where layers below it are cut by columns, a cut argument that is to be ``"replicated"`` is gathered as
    ``"reduced"``: backward is one reduce-scatter for all of them, in place of an all-reduce.
    """


@dataclass(frozen=True, kw_only=True, repr=False)
class PrepareOutput(Style):
    """Results laid out by ``output``; says nothing of parameters."""


def several(layouts: Layouts) -> tuple[Layout, ...]:
    return layouts if isinstance(layouts, tuple) else (layouts,)


def laid_out(partition: P, ndim: int, axis: str, layout: Layout, *, flat: bool = False) -> P:
    """The partition with another layout over one axis; ``flat``: a `Flat` dim that it cuts stays as it is cut.

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
        is_cut = flat and isinstance(before, Flat) and axis in before.axes
        entries[layout] = before if is_cut else _cut(entries[layout], axis)
    pending = partition.unreduced - {axis} | ({axis} if layout == "unreduced" else set())
    return P(
        *entries, unreduced=pending, reduced=partition.reduced - {axis} | ({axis} if layout == "reduced" else set())
    )


def _cut(entry: Entry, axis: str) -> Entry:
    """The entry of a dim, cut over one more axis: of a `Flat` one the leading dim."""
    if isinstance(entry, Flat):
        (size, axes), *others = entry.factors
        return Flat((size, (*axes, axis)), *others)
    return (*entry_axes(entry), axis)
