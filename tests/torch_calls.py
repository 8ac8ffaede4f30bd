"""Torch calls of every kind, on operands described by name: what a simulation and a type tracker must get right.

A call is a function of blocks. `operands` draws the blocks of one rank; on uneven ranks the rows of a block differ in
number (2, 2, 1 and 0). Results are trees of tensors and Python numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Call = tuple[Callable[..., Any], str]
F64 = torch.float64


def operands(kinds: str, rank: int, rows: int = 4) -> list[Tensor]:
    """One block per letter: Matrix, Square, Positive definite, Vector, Image, Bits (a mask), Numbers, Complex."""
    generator = torch.Generator().manual_seed(1000 + rank)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=F64)

    made: dict[str, Callable[[], Tensor]] = {
        "m": lambda: draw(rows, 6),
        "s": lambda: draw(4, 4),
        "p": lambda: torch.cov(draw(4, 9)) + torch.eye(4, dtype=F64),
        "v": lambda: draw(6),
        "i": lambda: draw(rows if rows != 4 else 2, 3, 8, 8),
        "b": lambda: draw(rows, 6) > 0,
        "n": lambda: torch.randint(0, 4, (rows if rows != 4 else 5,), generator=generator),
        "c": lambda: torch.complex(draw(rows, 6), draw(rows, 6)),
    }
    return [made[kind]() for kind in kinds]


def _weight() -> Tensor:
    return torch.linspace(-1, 1, 30, dtype=F64).view(5, 6)


def _table() -> Tensor:
    return torch.linspace(-1, 1, 24, dtype=F64).view(4, 6)


def on_copy(write: Callable[..., Any]) -> Callable[..., Any]:
    """What a call leaves in a fresh copy of its first operand."""

    def run(x: Tensor, *others: Tensor) -> Tensor:
        x = x.clone()
        write(x, *others)
        return x

    return run


def into(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a call writes into ``out=`` of its first operand's shape."""

    def run(x: Tensor, *others: Tensor) -> Tensor:
        out = torch.empty_like(x)
        function(x, *others, out=out)
        return out

    return run


def _foreach_in_place(x: Tensor, y: Tensor) -> list[Tensor]:
    both = [x.clone(), y.clone()]
    torch._foreach_mul_(both, 2.0)
    torch._foreach_add_(both, [y, x], alpha=3.0)
    return both


def _set(x: Tensor, index: Any, value: Any) -> None:
    x[index] = value


def _view_then_write(x: Tensor, y: Tensor) -> None:
    x.view(-1)[3:5].add_(y.view(-1)[:2])
    x.t()[1].mul_(2)


ELEMENTWISE: dict[str, Call] = {
    "add": (lambda x, y: x + y, "mm"),
    "number plus x": (lambda x: 2 + x, "m"),
    "number minus x": (lambda x: 1 - x, "m"),
    "number to the x": (lambda x: 2**x, "m"),
    "number over x": (lambda x: 1 / x, "m"),
    "floor division": (lambda x: x // 0.5, "m"),
    "remainder": (lambda x: x % 0.5, "m"),
    "divmod": (lambda x: torch.div(x, 0.3, rounding_mode="floor"), "m"),
    "less": (lambda x, y: x < y, "mm"),
    "equal elements": (lambda x, y: x == y, "mm"),
    "isclose": (torch.isclose, "mm"),
    "bits and": (lambda n: n & 3, "n"),
    "bits not": (lambda b: ~b, "b"),
    "shift": (lambda n: n << 1, "n"),
    "isin": (lambda n: torch.isin(n, torch.tensor([1, 2])), "n"),
    "erf": (torch.erf, "m"),
    "special i0": (torch.special.i0, "m"),
    "special xlogy": (lambda x, y: torch.special.xlogy(x, y.abs()), "mm"),
    "lgamma": (lambda x: torch.lgamma(x.abs() + 1), "m"),
    "polygamma": (lambda x: torch.polygamma(1, x.abs() + 1), "m"),
    "atan2": (torch.atan2, "mm"),
    "clamp": (lambda x, y: x.clamp(max=y), "mm"),
    "lerp": (lambda x, y: x.lerp(y, 0.3), "mm"),
    "addcmul": (lambda x, y: torch.addcmul(x, x, y, value=2), "mm"),
    "frexp": (torch.frexp, "m"),
    "nan_to_num": (torch.nan_to_num, "m"),
    "where": (lambda x, y, b: torch.where(b, x, y), "mmb"),
    "where with a number": (lambda x, b: torch.where(b, x, 0.0), "mb"),
    "where of numbers": (lambda b: torch.where(b, 1.0, 0.0), "b"),
    "masked_fill": (lambda x, b: x.masked_fill(b, -1), "mb"),
    "to float32": (lambda x: x.float(), "m"),
    "to int32": (lambda x: x.to(torch.int32), "m"),
    "to bfloat16": (lambda x: x.bfloat16(), "m"),
    "to a device": (lambda x: x.to("cpu"), "m"),
    "cpu": (lambda x: x.cpu(), "m"),
    "to the dtype of another": (lambda x, n: n.to(x), "mn"),
    "type": (lambda x: x.type(torch.float32), "m"),
    "type_as": (lambda x, n: n.type_as(x), "mn"),
    "bool": (lambda x: x.bool(), "m"),
}
VIEWS: dict[str, Call] = {
    "view": (lambda x: x.view(2, 12), "m"),
    "view as integers": (lambda x: x.view(torch.int64), "m"),
    "reshape": (lambda x: x.reshape(-1), "m"),
    "t": (lambda x: x.t(), "m"),
    "T": (lambda x: x.T, "m"),
    "mT": (lambda x: x.mT, "m"),
    "permute": (lambda x: x.permute(1, 0), "m"),
    "movedim": (lambda x: x.movedim(0, 1), "m"),
    "narrow": (lambda x: x.narrow(0, 1, 2), "m"),
    "expand": (lambda x: x[:, None].expand(4, 3, 6), "m"),
    "as_strided": (lambda x: x.as_strided((2, 2), (1, 2)), "m"),
    "as_strided of a part": (lambda x: x[1:].as_strided((2, 2), (1, 2), 6), "m"),
    "diagonal": (lambda x: x.diagonal(), "m"),
    "unfold": (lambda x: x.unfold(0, 2, 1), "m"),
    "unflatten": (lambda x: x.unflatten(1, (2, 3)), "m"),
    "squeeze": (lambda x: x[None].squeeze(0), "m"),
    "data": (lambda x: x.data, "m"),
    "detach": (lambda x: x.detach(), "m"),
    "clone": (lambda x: x.clone(), "m"),
    "contiguous": (lambda x: x.T.contiguous(), "m"),
    "channels last": (lambda x: x.to(memory_format=torch.channels_last), "i"),
    "split": (lambda x: x.split(2), "m"),
    "split by sizes": (lambda x: x.split([1, 3]), "m"),
    "chunk": (lambda x: x.chunk(3), "m"),
    "unbind": (lambda x: x.unbind(0), "m"),
    "tensor_split": (lambda x: x.tensor_split(3, 1), "m"),
    "hsplit": (lambda x: torch.hsplit(x, 2), "m"),
    "iteration": (lambda x: [row.sum() for row in x], "m"),
    "cat": (lambda x, y: torch.cat([x, y]), "mm"),
    "cat with a constant": (lambda x: torch.cat([x, _weight()]), "m"),
    "stack": (lambda x, y: torch.stack([x, y], 1), "mm"),
    "hstack": (lambda x, y: torch.hstack([x, y]), "mm"),
    "block_diag": (torch.block_diag, "mm"),
    "meshgrid": (lambda v: torch.meshgrid(v, v, indexing="ij"), "v"),
    "cartesian_prod": (lambda v: torch.cartesian_prod(v, v), "v"),
    "broadcast_tensors": (torch.broadcast_tensors, "vm"),
    "atleast_2d": (torch.atleast_2d, "v"),
    "tile": (lambda x: x.tile(2, 1), "m"),
    "repeat": (lambda x: x.repeat(2, 2), "m"),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 0), "m"),
    "roll": (lambda x: x.roll(1, 0), "m"),
    "flip": (lambda x: x.flip(0), "m"),
    "rot90": (lambda x: x.rot90(), "m"),
    "tril": (lambda x: x.tril(), "m"),
    "shape, numel, stride": (lambda x: (list(x.shape), x.numel(), x.T.stride(), x.dim(), len(x)), "m"),
    "is_contiguous": (lambda x: (x.is_contiguous(), x.T.is_contiguous()), "m"),
    "zeros_like": (torch.zeros_like, "m"),
    "ones_like": (torch.ones_like, "m"),
    "full_like": (lambda x: torch.full_like(x, 2.0), "m"),
    "new_zeros": (lambda x: x.new_zeros(3), "m"),
    "new_ones": (lambda x: x.new_ones((2, 2)), "m"),
    "new_full": (lambda x: x.new_full((2,), 3.0), "m"),
}
IN_PLACE: dict[str, Call] = {
    "add_": (on_copy(lambda x, y: x.add_(y)), "mm"),
    "x += y": (on_copy(lambda x, y: x.__iadd__(y)), "mm"),
    "mul_": (on_copy(lambda x: x.mul_(2)), "m"),
    "zero_": (on_copy(lambda x: x.zero_()), "m"),
    "fill_": (on_copy(lambda x: x.fill_(3)), "m"),
    "copy_": (on_copy(lambda x, y: x.copy_(y)), "mm"),
    "clamp_": (on_copy(lambda x: x.clamp_(min=0)), "m"),
    "x[0:2] = y": (on_copy(lambda x, y: _set(x, slice(0, 2), y[:2])), "mm"),
    "x[0, 1] = 7": (on_copy(lambda x: _set(x, (0, 1), 7.0)), "m"),
    "x[mask] = 0": (on_copy(lambda x, b: _set(x, b, 0.0)), "mb"),
    "x[n] = y": (on_copy(lambda x, y, n: _set(x, n[:1], y[:1])), "mmn"),
    "write into views": (on_copy(_view_then_write), "mm"),
    "t_": (on_copy(lambda x: x.t_()), "m"),
    "unsqueeze_": (on_copy(lambda x: x.unsqueeze_(0)), "m"),
    "squeeze_": (on_copy(lambda x: x.unsqueeze_(0).squeeze_(0)), "m"),
    "transpose_": (on_copy(lambda x: x.transpose_(0, 1)), "m"),
    "masked_fill_": (on_copy(lambda x, b: x.masked_fill_(b, 0)), "mb"),
    "index_add_": (on_copy(lambda x, y, n: x.index_add_(0, n, y[[0, 0, 1, 2, 3]])), "mmn"),
    "scatter_": (on_copy(lambda x, n: x.scatter_(0, n[None], 1.5)), "mn"),
    "add, out=": (into(lambda x, y, out: torch.add(x.detach(), y.detach(), out=out)), "mm"),
    "mm, out=": (into(lambda x, y, out: torch.mm(x.detach(), y.detach(), out=out)), "ss"),
    "foreach": (lambda x, y: torch._foreach_add([x, y], [y, x]), "mm"),
    "foreach in place": (_foreach_in_place, "mm"),
    "foreach norm": (lambda x, y: torch._foreach_norm([x, y]), "mm"),
    "foreach addcdiv": (lambda x, y: torch._foreach_addcdiv([x], [y], [x], value=2.0), "mm"),
}
INDEXING: dict[str, Call] = {
    "x[n]": (lambda x, n: x[n], "mn"),
    "x[n, n]": (lambda x, n: x[n, n], "mn"),
    "x[:, n, None]": (lambda x, n: x[:, n, None], "mn"),
    "x[..., n]": (lambda x, n: x[..., n], "mn"),
    "x[mask]": (lambda x, b: x[b], "mb"),
    "gather": (lambda x, n: x.gather(0, n[:, None].expand(5, 6)[:4]), "mn"),
    "scatter_add": (lambda x, n: x.scatter_add(0, n[None, :], x[:1, :5]), "mn"),
    "index_select": (lambda x, n: x.index_select(0, n), "mn"),
    "take": (lambda x, n: x.take(n), "mn"),
    "take_along_dim": (lambda x: x.take_along_dim(x.argsort(0), 0), "m"),
    "index_fill": (lambda x: x.index_fill(0, torch.tensor([0]), 2.0), "m"),
    "index_copy": (lambda x, y: x.index_copy(0, torch.tensor([1, 2]), y[:2]), "mm"),
    "index_put": (lambda x, y, n: x.index_put((n % 4,), y[0], accumulate=True), "mmn"),
    "nonzero": (lambda b: b.nonzero(), "b"),
    "where of a mask": (torch.where, "b"),
    "masked_select": (lambda x, b: x.masked_select(b), "mb"),
    "unique": (lambda n: n.unique(), "n"),
    "bincount": (lambda n: n.bincount(minlength=6), "n"),
    "embedding": (lambda n: F.embedding(n, _weight()), "n"),
    "embedding of a block": (lambda x, n: F.embedding(n % 4, x), "mn"),
    "embedding_bag": (lambda x, n: F.embedding_bag(n[None] % 4, x), "mn"),
    "one_hot": (lambda n: F.one_hot(n, 5), "n"),
    "searchsorted": (lambda x, y: torch.searchsorted(x.sort().values, y), "mm"),
    "bucketize": (lambda x: torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0], dtype=F64)), "m"),
}
REDUCTIONS: dict[str, Call] = {
    "sum": (lambda x: x.sum(), "m"),
    "mean": (lambda x: x.mean(0), "m"),
    "std": (lambda x: x.std(0), "m"),
    "var_mean": (lambda x: torch.var_mean(x, 0), "m"),
    "prod": (lambda x: x.prod(), "m"),
    "all": (lambda b: b.all(), "b"),
    "any": (lambda b: b.any(1), "b"),
    "logsumexp": (lambda x: x.logsumexp(0), "m"),
    "amax": (lambda x: x.amax(0), "m"),
    "aminmax": (lambda x: x.aminmax(), "m"),
    "count_nonzero": (lambda b: b.count_nonzero(), "b"),
    "nansum": (lambda x: x.nansum(), "m"),
    "quantile": (lambda x: x.quantile(0.3, dim=0), "m"),
    "histc": (lambda x: x.detach().float().histc(4), "m"),
    "cov": (lambda x: x.cov(), "m"),
    "corrcoef": (lambda x: x.corrcoef(), "m"),
    "diff": (lambda x: x.diff(), "m"),
    "trapezoid": (torch.trapezoid, "m"),
    "gradient": (torch.gradient, "m"),
    "renorm": (lambda x: x.renorm(2, 0, 1.0), "m"),
    "sort": (torch.sort, "m"),
    "topk": (lambda x: x.topk(2), "m"),
    "argsort": (lambda x: x.argsort(), "m"),
    "argmax": (lambda x: x.argmax(1), "m"),
    "max": (lambda x: x.max(), "m"),
    "max along a dim": (lambda x: x.max(0), "m"),
    "median": (lambda x: x.median(0), "m"),
    "kthvalue": (lambda x: x.kthvalue(2), "m"),
    "mode": (lambda x: x.mode(), "m"),
    "cumsum": (lambda x: x.cumsum(0), "m"),
    "cumprod": (lambda x: x.cumprod(1), "m"),
    "cummax": (lambda x: x.cummax(0), "m"),
    "logcumsumexp": (lambda x: x.logcumsumexp(0), "m"),
}
LINEAR_ALGEBRA: dict[str, Call] = {
    "matmul": (lambda x, y: x @ y.T, "mm"),
    "matmul with a constant": (lambda x: x @ _weight().T, "m"),
    "addmm": (lambda x, y: torch.addmm(x, x, y.T @ y), "mm"),
    "bmm": (lambda x: torch.bmm(x[0], x[0]), "i"),
    "baddbmm": (lambda x: torch.baddbmm(x[0], x[0], x[0]), "i"),
    "einsum": (lambda x, y: torch.einsum("ij,kj->ik", x, y), "mm"),
    "einsum of three": (lambda x, y: torch.einsum("ij,kj,kl->il", x, y, x), "mm"),
    "tensordot": (lambda x, y: torch.tensordot(x, y, dims=([1], [1])), "mm"),
    "kron": (torch.kron, "mm"),
    "trace": (lambda s: s.trace(), "s"),
    "cdist": (torch.cdist, "mm"),
    "bilinear": (lambda x, y: F.bilinear(x, y, torch.ones(2, 6, 6, dtype=F64)), "mm"),
    "svdvals": (torch.linalg.svdvals, "m"),
    "inv": (torch.linalg.inv, "p"),
    "solve": (torch.linalg.solve, "pm"),
    "cholesky": (torch.linalg.cholesky, "p"),
    "eigvalsh": (torch.linalg.eigvalsh, "p"),
    "eigvals": (lambda s: torch.linalg.eigvals(s.detach()).abs().sort().values, "s"),
    "qr": (torch.linalg.qr, "s"),
    "det": (torch.linalg.det, "p"),
    "slogdet": (torch.linalg.slogdet, "p"),
    "norm": (torch.linalg.norm, "m"),
    "vector_norm": (lambda x: torch.linalg.vector_norm(x, dim=1), "m"),
    "pinv": (torch.linalg.pinv, "m"),
    "matrix_exp": (torch.linalg.matrix_exp, "s"),
    "matrix_power": (lambda s: torch.linalg.matrix_power(s, 3), "s"),
    "multi_dot": (lambda s: torch.linalg.multi_dot([s, s, s]), "s"),
}
COMPLEX: dict[str, Call] = {
    "complex": (torch.complex, "mm"),
    "conj": (lambda z: z.conj(), "c"),
    "conj, then times": (lambda z: z.conj() * 2 + z, "c"),
    "real": (lambda z: z.real, "c"),
    "imag of conj": (lambda z: z.conj().imag * 2, "c"),
    "H": (lambda z: z.H, "c"),
    "mH @ z": (lambda z, w: z.mH @ w, "cc"),
    "view_as_real": (torch.view_as_real, "c"),
    "angle": (torch.angle, "c"),
    "polar": (lambda x, y: torch.polar(x.abs(), y), "mm"),
    "fft": (torch.fft.fft, "m"),
    "rfft and back": (lambda x: torch.fft.irfft(torch.fft.rfft(x)), "m"),
    "fft2": (torch.fft.fft2, "m"),
    "fftshift": (torch.fft.fftshift, "m"),
    "stft": (lambda x: torch.stft(x.reshape(-1), 8, return_complex=True, window=torch.ones(8, dtype=F64)), "m"),
}
NETWORKS: dict[str, Call] = {
    "softmax": (lambda x: x.softmax(-1), "m"),
    "log_softmax": (lambda x: F.log_softmax(x, 1), "m"),
    "gelu": (F.gelu, "m"),
    "silu": (F.silu, "m"),
    "glu": (F.glu, "m"),
    "elu": (F.elu, "m"),
    "softplus": (F.softplus, "m"),
    "prelu": (lambda x: F.prelu(x, torch.tensor([0.1], dtype=F64)), "m"),
    "layer_norm": (lambda x: F.layer_norm(x, (6,)), "m"),
    "rms_norm": (lambda x: F.rms_norm(x, (6,)), "m"),
    "normalize": (F.normalize, "m"),
    "linear": (lambda x: F.linear(x, _weight(), torch.ones(5, dtype=F64)), "m"),
    "cross_entropy": (lambda x, n: F.cross_entropy(x, n[:4]), "mn"),
    "nll_loss": (lambda x, n: F.nll_loss(x.log_softmax(1), n[:4]), "mn"),
    "mse_loss": (F.mse_loss, "mm"),
    "huber_loss": (F.huber_loss, "mm"),
    "bce": (lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), "mm"),
    "kl_div": (lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"), "mm"),
    "cosine_similarity": (F.cosine_similarity, "mm"),
    "triplet_margin_loss": (lambda x, y: F.triplet_margin_loss(x, y, y.flip(0)), "mm"),
    "conv2d": (lambda x: F.conv2d(x, torch.ones(4, 3, 3, 3, dtype=F64), padding=1), "i"),
    "conv_transpose2d": (lambda x: F.conv_transpose2d(x, torch.ones(3, 4, 3, 3, dtype=F64)), "i"),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), "i"),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), "i"),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 1), "i"),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), "i"),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), "i"),
    "group_norm": (lambda x: F.group_norm(x, 3), "i"),
    "instance_norm": (F.instance_norm, "i"),
    "pad": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), "i"),
    "pixel_unshuffle": (lambda x: F.pixel_unshuffle(x, 2), "i"),
    "unfold to columns": (lambda x: F.unfold(x, 3), "i"),
    "grid_sample": (lambda x: F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False), "i"),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), "i"),
    "causal attention": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), "i"),
    "masked attention": (
        lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(8, 8, dtype=torch.bool).tril()),
        "i",
    ),
    "multi-head attention": (
        lambda x: F.multi_head_attention_forward(
            *(x[:, None],) * 3,
            6,
            2,
            torch.full((18, 6), 0.1, dtype=F64),
            None,
            None,
            None,
            False,
            0.0,
            torch.eye(6, dtype=F64),
            None,
            training=False,
        )[0],
        "m",
    ),
    "rnn cell": (
        lambda x: torch.rnn_relu_cell(x, x[:, :5], torch.ones(5, 6, dtype=F64), torch.ones(5, 5, dtype=F64)),
        "m",
    ),
}
CALLS: dict[str, Call] = {
    **ELEMENTWISE,
    **VIEWS,
    **IN_PLACE,
    **INDEXING,
    **REDUCTIONS,
    **LINEAR_ALGEBRA,
    **COMPLEX,
    **NETWORKS,
}

#: calls on blocks of 2, 2, 1 and 0 rows; many name the number of rows
UNEVEN_CALLS: dict[str, Call] = {
    "add": (lambda x, y: x + y, "mm"),
    "matmul": (lambda x: x @ _weight().T, "m"),
    "x.T @ x": (lambda x: x.T @ x, "m"),
    "x @ x.T": (lambda x: x @ x.T, "m"),
    "reshape by rows": (lambda x: x.reshape(x.shape[0], 2, 3), "m"),
    "reshape by product": (lambda x: x.reshape(x.shape[0] * 6), "m"),
    "reshape by -1": (lambda x: x.reshape(-1, 3), "m"),
    "view": (lambda x: x.view(-1, 2, 3), "m"),
    "flatten": (lambda x: x.flatten(), "m"),
    "unflatten": (lambda x: x.unflatten(0, (1, -1)), "m"),
    "transposes": (lambda x: x.T.contiguous().view(2, 3, x.shape[0]).transpose(0, 2).reshape(-1, 2), "m"),
    "heads": (lambda x: x.view(x.shape[0], 2, 3).transpose(0, 1).contiguous().view(2, x.shape[0] * 3), "m"),
    "unsqueeze": (lambda x: x[:, None] * x[None], "m"),
    "mean": (lambda x: x.mean(1), "m"),
    "mean of all rows": (lambda x: torch.cat([x, x.new_ones(1, 6)]).mean(0), "m"),
    "sum over rows": (lambda x: x.sum(0), "m"),
    "prod": (lambda x: x.prod(), "m"),
    "norm": (lambda x: (x + 1).norm(), "m"),
    "centred": (lambda x: x - x.sum(0, keepdim=True), "m"),
    "cat": (lambda x, y: torch.cat([x, y]), "mm"),
    "cat with a constant": (lambda x: torch.cat([x, _weight()]), "m"),
    "stack": (lambda x, y: torch.stack([x, y]), "mm"),
    "repeat": (lambda x: x.repeat(2, 1), "m"),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 0), "m"),
    "softmax": (lambda x: x.softmax(1), "m"),
    "layer_norm": (lambda x: F.layer_norm(x, (6,)), "m"),
    "linear": (lambda x: F.linear(x, _weight()), "m"),
    "gelu": (F.gelu, "m"),
    "cross_entropy": (lambda x, n: F.cross_entropy(x, n, reduction="sum"), "mn"),
    "mse_loss": (lambda x, y: F.mse_loss(x, y, reduction="sum"), "mm"),
    "embedding": (lambda n: F.embedding(n, _weight()), "n"),
    "where": (lambda x, y: torch.where(x > 0, x, y), "mm"),
    "masked_fill": (lambda x, b: x.masked_fill(b, 0), "mb"),
    "x[mask]": (lambda x, b: x[b], "mb"),
    "zeros_like": (lambda x: torch.zeros_like(x) + x, "m"),
    "new_zeros": (lambda x: x.new_zeros(x.shape) + x, "m"),
    "zeros of a shape": (lambda x: torch.zeros(x.shape, dtype=F64) + x, "m"),
    "ones of rows": (lambda x: torch.ones((x.shape[0], 6), dtype=F64) * x, "m"),
    "arange": (lambda x: torch.arange(x.shape[0])[:, None] * x, "m"),
    "full": (lambda x: torch.full((x.shape[0],), 2.0), "m"),
    "eye": (lambda x: torch.eye(x.shape[0], dtype=x.dtype) @ x, "m"),
    "linspace": (lambda x: torch.linspace(0, 1, x.shape[0]), "m"),
    "expand a constant": (lambda x: _weight()[0].expand(x.shape[0], 6) * x, "m"),
    "expand_as": (lambda x: _weight()[0].expand_as(x) * x, "m"),
    "broadcast_tensors": (lambda x: torch.broadcast_tensors(_weight()[0], x), "m"),
    "arithmetic on sizes": (
        lambda x: ((x.shape[0] * 2 + 1) // 2, -x.shape[0] % 5, 7 - x.shape[0], x.shape[0] ** 2),
        "m",
    ),
    "numel": (lambda x: x.numel(), "m"),
    "a constant size": (lambda x: x.shape[1] + 1, "m"),
    "torch.sym_max": (lambda x: torch.sym_max(x.shape[0], 1), "m"),
    "x over rows": (lambda x: x.sum(0) / (x.shape[0] + 1), "m"),
    "x over numel": (lambda x: x.sum() / (x.numel() + 1), "m"),
    "x times rows": (lambda x: x.sum(0) * x.shape[0], "m"),
    "rows over x": (lambda x: x.shape[0] / (x.sum(0) + 9), "m"),
    "x to the rows": (lambda x: (x.abs() + 1) ** x.shape[0], "m"),
    "half the rows": (lambda x: x * (x.shape[0] / 2), "m"),
    "whether there are rows": (lambda x: x.sum(0) * (x.shape[0] > 0), "m"),
    "compared with rows": (lambda x: x > x.shape[0], "m"),
    "clamped by rows": (lambda x: x.clamp(max=x.shape[0]), "m"),
    "a constant times rows": (lambda x: x.sum() + (_weight() * x.shape[0]).sum(), "m"),
    "tensor of rows": (lambda x: x.sum() / torch.tensor([x.shape[0] + 1.0]), "m"),
    "new_tensor of rows": (lambda x: x.new_full((), x.shape[0]), "m"),
    "slice": (lambda x: x[:1], "m"),
    "slice from the end": (lambda x: x[:-1], "m"),
    "slice with a step": (lambda x: x[::2], "m"),
    "a constant up to rows": (lambda x: _table()[: x.shape[0]] * x, "m"),
    "a constant from rows": (lambda x: _table()[x.shape[0] :].sum() + x.sum(), "m"),
    "narrow": (lambda x: _table().narrow(0, 0, x.shape[0]) + x, "m"),
    "columns": (lambda x: x[:, [0, 2]], "m"),
    "x[n]": (lambda n: _table()[n], "n"),
    "index_add": (lambda x, n: torch.zeros(4, 6, dtype=x.dtype).index_add(0, n, x), "mn"),
    "flip": (lambda x: x.flip(0), "m"),
    "split along whole dim": (lambda x: x.split(3, 1), "m"),
    "unbind along whole dim": (lambda x: x.unbind(1), "m"),
    "sort": (lambda x: x.sort(0).values, "m"),
    "cumsum": (lambda x: x.cumsum(0), "m"),
    "topk": (lambda x: x.topk(2, 1), "m"),
    "argmax": (lambda x: x.argmax(1), "m"),
    "take_along_dim": (lambda x: x.take_along_dim(x.argsort(0), 0), "m"),
    "einsum": (lambda x, y: torch.einsum("ij,kj->ik", x, y), "mm"),
    "kron": (lambda x: torch.kron(x, _weight()), "m"),
    "cdist": (lambda x, y: torch.cdist(x, y + 1), "mm"),
    "addmm": (lambda x: torch.addmm(x, x, torch.eye(6, dtype=F64)), "m"),
    "conv2d": (lambda x: F.conv2d(x, torch.ones(4, 3, 3, 3, dtype=F64)), "i"),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), "i"),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2), "i"),
    "batch_norm": (lambda x: F.batch_norm(x, torch.zeros(3).double(), torch.ones(3).double()), "i"),
    "group_norm": (lambda x: F.group_norm(x, 3), "i"),
    "attention": (lambda x: F.scaled_dot_product_attention(x, x, x), "i"),
    "normalize": (F.normalize, "m"),
    "pad to two rows": (lambda x: F.pad(x, (0, 0, 0, 2 - x.shape[0])), "m"),
    "to float32": (lambda x: x.float(), "m"),
    "view as integers": (lambda x: x.view(torch.int64), "m"),
    "add_": (on_copy(lambda x, y: x.add_(y)), "mm"),
    "copy_": (on_copy(lambda x, y: x.copy_(y)), "mm"),
    "x[0:1] = 5": (on_copy(lambda x: _set(x, slice(0, 1), 5.0)), "m"),
    "fill with rows": (on_copy(lambda x: x.fill_(x.shape[0])), "m"),
    "add, out=": (into(lambda x, y, out: torch.add(x.detach(), y.detach(), out=out)), "mm"),
    "foreach": (lambda x, y: torch._foreach_add([x], [y]), "mm"),
    "shape": (lambda x: tuple(x.shape), "m"),
    "product of the shape": (lambda x: math.prod(x.shape), "m"),
    "sum of the shape": (lambda x: sum(x.shape), "m"),
}
ROWS = (2, 2, 1, 0)
