"""The kernels of a transport, and their options: dims, block sizes, routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fspmd.meshes.mesh import Mesh
from fspmd.transport.pending import Pending, Result, arrived
from fspmd.transport.rows import Routes, Sizes
from fspmd.transport.windows import Reblock, Regroup

Layout = tuple[torch.dtype, Sizes]
#: a number for each dtype, the same on all ranks
DTYPES: Final = {
    dtype: i for i, dtype in enumerate(sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str))
}


class Options(NamedTuple):
    """The options of a kernel, besides its operand and its axes.

    ``sizes`` has the block length of each rank of the group along ``dim`` if they are uneven. None means even.
    """

    op: str = "sum"  # reduce: sum, max, min, product
    dim: int = 0  # gather, reduce_scatter, slice: the dim; exchange: the split dim
    sizes: Sizes | None = None
    concat_dim: int = 0  # exchange only
    concat_sizes: Sizes | None = None
    perm: tuple[tuple[int, int], ...] = ()  # permute: (source, destination)
    index_groups: tuple[Sizes, ...] | None = None
    root: int = 0  # broadcast, at_root: the position of the rank that sends its value, or keeps it
    routes: Routes | None = None  # ragged: the destinations of rows
    move: Reblock | None = None  # reblock: the layouts before and after
    dims: Regroup | None = None  # view: the layouts before and after
    factor: float = 1.0  # scale: the factor of the cotangent


class Transport:
    """The base of transports: the kernels of the pair table. ``x`` is this rank's block, below autograd.

    A kernel returns its result, or the collective that will give it.
    """

    #: whether leaves of one dtype are packed into one call
    coalesces = False
    #: kernels that return a view of their operand
    views: frozenset[str] = frozenset()
    #: kernels with a version that writes into a contiguous operand of floats, such as `reduce_in_place` for `reduce`
    in_place: frozenset[str] = frozenset()

    def reduce(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        """``[A] [B] [C] => [A+B+C]`` on every rank (or max, min, product)."""
        raise NotImplementedError

    def reduce_once(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        """`reduce` to a type that is equal on all ranks. A simulation keeps one copy of the result."""
        return self.reduce(x, mesh, axes, o)

    def gather(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        """``[A] [B] [C] => [A, B, C]`` on every rank, joined along ``dim``."""
        raise NotImplementedError

    def gather_once(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        """`gather` to a type that is equal on all ranks. A simulation keeps one copy of the result."""
        return self.gather(x, mesh, axes, o)

    def reduce_scatter(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        """``[A0, A1] [B0, B1] => [A0+B0] [A1+B1]`` along ``dim``."""
        raise NotImplementedError

    def gather_into(self, out: Tensor, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Result:
        """`gather` along dim 0 into a contiguous tensor."""
        raise NotImplementedError

    def reduce_scatter_into(self, out: Tensor, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Result:
        """`reduce_scatter` along dim 0 into a contiguous tensor."""
        raise NotImplementedError

    def slice(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        """``[A, B, C]`` on every rank ``=> [A] [B] [C]`` along ``dim``; moves nothing."""
        raise NotImplementedError

    def exchange(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        """``[A0, A1] [B0, B1] => [A0, B0] [A1, B1]``: split along ``dim``, joined along ``concat_dim``."""
        raise NotImplementedError

    def ragged(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        """Send rows along ``dim`` by ``routes``. Places that receive no row are zero."""
        raise NotImplementedError

    def permute(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        """For each pair ``(i, j)`` send rank i's block to rank j. A rank that receives no block gets zeros."""
        raise NotImplementedError

    def reblock(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        """``[a, b] [c, d] => [a] [b, c, d]``: the blocks of one layout become those of another, as ``move`` says.

        A process outside the first mesh passes an empty tensor. Outside the second mesh it gets one.
        """
        raise NotImplementedError

    def broadcast(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        """``[A] [B] [C] => [A] [A] [A]``: the block of position ``root``."""
        raise NotImplementedError

    def broadcast_once(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        """`broadcast` to a type that is equal on all ranks. A simulation keeps one copy of the result."""
        return self.broadcast(x, mesh, axes, o)

    def reduce_to_root(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        """``[A] [B] [C] => [A+B+C] [0] [0]``."""
        raise NotImplementedError

    def agree(self, complaint: str, mesh: Mesh) -> str:
        """Return on all ranks the complaint of the first rank that has one, or ""."""
        raise NotImplementedError

    def layouts(self, blocks: Sequence[Tensor | None], mesh: Mesh) -> list[tuple[Layout | None, ...]]:
        """Return on all ranks the dtype and shape of each rank's blocks, in row-major order of mesh coordinates.

        None stands for a value that is not a tensor.
        """
        raise NotImplementedError

    def tell(self, message: bytes, mesh: Mesh, source: int) -> bytes:
        """Return on all ranks of the mesh the message of the rank at position ``source``."""
        raise NotImplementedError

    def transfer(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], mesh: Mesh
    ) -> Pending:
        """Send contiguous tensors to positions of the mesh, and receive into others."""
        raise NotImplementedError

    def alias(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        """Return the same value under another type. Nothing moves."""
        raise NotImplementedError

    def view(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        """``[A] [B] => [A'] [B']``: view blocks with dims split or joined, as ``dims`` says."""
        assert o.dims is not None
        return o.dims.view(x, mesh.coordinate() or ())

    def at_root(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        """``A`` on every rank ``=> [A] [0] [0]``: the terms of a pending sum, or of a gradient; moves nothing."""
        raise NotImplementedError

    def per_rank(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        """Return the same value with one copy per rank, for a transport that keeps one copy of equal values."""
        return self.alias(x, mesh, axes, o)

    def scale(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        """``factor * x``: the part of each rank in the cotangent of an unchecked output."""
        return x * o.factor

    def mean(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        """``factor`` times the sum over ranks: the transpose of `scale`."""
        return arrived(self.reduce_once(x, mesh, axes, o)) * o.factor

    def pick(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Result:
        """Return the first rank's value for an unchecked output, which counts as equal on all ranks."""
        raise NotImplementedError

    def index(self, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """Return this rank's position along the axes, as a 0-d int64 tensor."""
        raise NotImplementedError
