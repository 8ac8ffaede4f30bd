"""One collective, fully decided: which kernel, over which axes of which mesh, with which dims and block sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fspmd.meshes.mesh import Mesh
from fspmd.transport.pending import Pending
from fspmd.transport.rows import Routes
from fspmd.transport.windows import Reblock, Regroup

Sizes = tuple[int, ...]
Layout = tuple[torch.dtype, Sizes]


class Options(NamedTuple):
    """What a kernel needs besides its operand and its axes.

    ``sizes`` are the block lengths along ``dim`` per rank of the group where they are uneven, else None (even).
    """

    op: str = "sum"  # reduce: sum, max, min, product
    dim: int = 0  # gather, reduce_scatter, slice: the dim; exchange: the split dim
    sizes: Sizes | None = None
    concat_dim: int = 0  # exchange only
    concat_sizes: Sizes | None = None
    perm: tuple[tuple[int, int], ...] = ()  # permute: (source, destination)
    index_groups: tuple[Sizes, ...] | None = None
    root: int = 0  # broadcast, at_root: the position whose value is everybody's, or that alone has one
    routes: Routes | None = None  # ragged: which rows go where
    move: Reblock | None = None  # reblock: from which layout to which
    dims: Regroup | None = None  # view: of which layout blocks are, and of which they become
    factor: float = 1.0  # scale: what the cotangent is multiplied with


class Transport:
    """The kernels that move bytes; one subclass per way to move them. ``x`` is this rank's block, below autograd."""

    #: leaves of one dtype are packed into one call
    coalesces = False
    #: kernels that give a view of their operand
    views: frozenset[str] = frozenset()
    #: kernels that have a twin, `reduce_in_place` of `reduce`, which writes into a contiguous operand of floats
    in_place: frozenset[str] = frozenset()

    def reduce(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Pending:
        """``[A] [B] [C] => [A+B+C]`` on every rank (or max, min, product)."""
        raise NotImplementedError

    def reduce_once(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Pending:
        """The same, of a type that tells that all ranks have it: a simulation holds it once."""
        return self.reduce(x, mesh, axes, o)

    def gather(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Pending:
        """``[A] [B] [C] => [A, B, C]`` on every rank, joined along ``dim``."""
        raise NotImplementedError

    def gather_once(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Pending:
        """The same, of a type that tells that all ranks have it: a simulation holds it once."""
        return self.gather(x, mesh, axes, o)

    def reduce_scatter(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Pending:
        """``[A0, A1] [B0, B1] => [A0+B0] [A1+B1]`` along ``dim``."""
        raise NotImplementedError

    def gather_into(self, out: Tensor, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Pending:
        """`gather` along dim 0 into a contiguous tensor."""
        raise NotImplementedError

    def reduce_scatter_into(self, out: Tensor, x: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Pending:
        """`reduce_scatter` along dim 0 into a contiguous tensor."""
        raise NotImplementedError

    def slice(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Pending:
        """``[A, B, C]`` on every rank ``=> [A] [B] [C]`` along ``dim``; moves nothing."""
        raise NotImplementedError

    def exchange(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Pending:
        """``[A0, A1] [B0, B1] => [A0, B0] [A1, B1]``: split along ``dim``, joined along ``concat_dim``."""
        raise NotImplementedError

    def ragged(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Pending:
        """Rows along ``dim`` sent as ``routes`` say, into zeros."""
        raise NotImplementedError

    def permute(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Pending:
        """Each pair ``(i, j)`` sends rank i's block to rank j; a rank nobody sends to gets zeros."""
        raise NotImplementedError

    def reblock(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Pending:
        """``[a, b] [c, d] => [a] [b, c, d]``: from the blocks of one layout to those of another, as ``move`` says.

        A process that is no member of the mesh it leads from, or to, has an empty tensor there.
        """
        raise NotImplementedError

    def broadcast(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Pending:
        """``[A] [B] [C] => [A] [A] [A]``: the block of position ``root``."""
        raise NotImplementedError

    def broadcast_once(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Pending:
        """The same, of a type that tells that all ranks have it: a simulation holds it once."""
        return self.broadcast(x, mesh, axes, o)

    def reduce_to_root(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Pending:
        """``[A] [B] [C] => [A+B+C] [0] [0]``."""
        raise NotImplementedError

    def agree(self, complaint: str, mesh: Mesh) -> str:
        """The complaint of the first rank that has one, on all ranks; "" when none has."""
        raise NotImplementedError

    def layouts(self, blocks: Sequence[Tensor | None], mesh: Mesh) -> list[tuple[Layout | None, ...]]:
        """dtype and shape of each block on every rank, in row-major order of mesh coordinates; known to all ranks.

        None stands for what is no tensor.
        """
        raise NotImplementedError

    def tell(self, message: bytes, mesh: Mesh, source: int) -> bytes:
        """The message of the rank at position ``source`` of the mesh, on all its ranks."""
        raise NotImplementedError

    def transfer(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], mesh: Mesh
    ) -> Pending:
        """Send contiguous tensors to positions of the mesh, and receive into others."""
        raise NotImplementedError

    def alias(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Pending:
        """The same value under another type; moves nothing."""
        raise NotImplementedError

    def view(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Pending:
        """``[A] [B] => [A'] [B']``: blocks with their dims taken apart or put together, as ``dims`` says."""
        assert o.dims is not None
        return Pending(o.dims.view(x, mesh.coordinate() or ()))

    def at_root(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Pending:
        """``A`` on every rank ``=> [A] [0] [0]``: the terms of a pending sum, or of a gradient; moves nothing."""
        raise NotImplementedError

    def per_rank(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Pending:
        """The same value with a copy for each rank, where the transport would hold it once."""
        return self.alias(x, mesh, axes, o)

    def scale(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Pending:
        """``factor * x``: each rank's part of the cotangent of an unchecked output."""
        return Pending(x * o.factor)

    def mean(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Pending:
        """``factor`` times the sum over ranks; the transpose of `scale`."""
        return Pending(self.reduce_once(x, mesh, axes, o).wait() * o.factor)

    def pick(self, x: Tensor, mesh: Mesh, axes: tuple[str, ...], o: Options) -> Pending:
        """The first rank's value, taken to be everybody's: an unchecked output."""
        raise NotImplementedError

    def index(self, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
        """This rank's position along the axes, a 0-d int64 tensor."""
        raise NotImplementedError
