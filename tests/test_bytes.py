"""Bytes that one function moves, forward and backward, where links have no latency and work takes no time.

The bounds are what has to move: counted by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from dispatch_cases import priced_by_bytes
from torch import Tensor
from torch.nn import functional as F

from fspmd import P, Sharded, communication_log, device_get, device_put, make_mesh

MESH = make_mesh((4,), ("x",), transport="simulation")
ROWS, COLUMNS, WHOLE = P("x"), P(None, "x"), P()
#: a function, its operands as (shape or tensor, layout), and bytes
Case = tuple[Callable[..., Any], list[tuple[Any, P]], float]

COUNTED = torch.linspace(-1.0, 1.0, 64).sin().reshape(8, 8)  # has no gradient


def _batch_norm(x: Any, weight: Any, bias: Any) -> Any:
    return F.batch_norm(x, None, None, weight, bias, True)


def _bce(x: Any, y: Any) -> Any:
    return F.binary_cross_entropy(x.sigmoid(), y.sigmoid())


def _gaussian(x: Any, y: Any) -> Any:
    return F.gaussian_nll_loss(x, y, y * y + 1.0)


def _index_copy(x: Any, y: Any) -> Any:
    return x.index_copy(1, torch.arange(7, -1, -1), y)


def _index_reduce(x: Any, y: Any) -> Any:
    return x.index_reduce(1, torch.arange(16) % 8, y, "amax")


def _gathered(x: Any) -> Any:
    index = torch.arange(16).reshape(8, 2) % 8
    return x.gather(1, device_put(index, ROWS, mesh=MESH) if isinstance(x, Sharded) else index)


def _to(x: Any) -> Any:
    return x.to(device_put(COUNTED, COLUMNS, mesh=MESH) if isinstance(x, Sharded) else COUNTED) * 1


def _ctc(x: Any) -> Any:
    return F.ctc_loss(x.log_softmax(-1), torch.arange(24).reshape(8, 3) % 4 + 1, (6,) * 8, (3, 2, 1, 0) * 2)


CASES: dict[str, Case] = {
    # 8 bytes an element; a gather or its transpose: 3/4 of the whole, padded, an all-reduce: twice that
    "a sharded batch stays": (torch.mm, [((8, 4), ROWS), ((4, 16), WHOLE)], 12 * 4 * 16),
    "a small operand is gathered": (torch.addmm, [((3, 3), ROWS), ((3, 3), WHOLE), ((3, 3), WHOLE)], 72),
    "the one of three stays": (torch.addcmul, [((8, 8), ROWS), ((8, 8), WHOLE), ((8, 8), WHOLE)], 2 * 6 * 8 * 8),
    "a mask is gathered": (torch.where, [(COUNTED > 0, ROWS), ((8, 8), WHOLE), ((8, 8), WHOLE)], 6 * 8),
    "the variance of a batch": (lambda x: x.var(0), [((64, 8), ROWS)], 2 * 12 * 8),
    "a norm over the batch": (_batch_norm, [((64, 2), ROWS), ((2,), WHOLE), ((2,), WHOLE)], 4 * 12 * 2),
    "groups that are cut": (lambda x: F.group_norm(x, 2), [((2, 8, 9), COLUMNS)], 4 * 12 * 4),
    "the first of the greatest": (lambda x: x * 1 + x.argmax(), [((8, 8), ROWS)], 12 + 3),
    "the greatest": (torch.max, [((8, 8), ROWS)], 24),
    "the greatest of columns": (lambda x: x.amax(0), [((8, 8), ROWS)], 24 * 8),
    "the infinite norm": (lambda x: x.norm(torch.inf), [((8, 8), COLUMNS)], 24),
    "a product of one factor": (lambda x: x.prod(0), [((1, 8), ROWS)], 0),
    "a product": (lambda x: x.prod(0), [((8, 8), ROWS)], 3 * 64),
    "a product without a gradient": (lambda x: x.prod(0), [(COUNTED, ROWS)], 12 * 8),
    "a product of integers": (lambda x: x.prod(), [((COUNTED * 9).long(), ROWS)], 12),
    "any": (lambda x: (x > 0).any(0), [((8, 8), ROWS)], 1.5 * 8),
    "all": (lambda x: (x > 0).all(), [((8, 8), COLUMNS)], 1.5),
    "few of many": (lambda x: x.topk(1, 0).values, [((32, 8), ROWS)], 2 * 24 * 8),
    "many of few": (lambda x: x.topk(6, 0).values, [((8, 8), ROWS)], 6 * 64),
    "a histogram": (lambda x: x.histc(5, -1, 1), [(COUNTED, ROWS)], 0),
    "places among bounds": (torch.bucketize, [(COUNTED, WHOLE), (COUNTED[:, 0].sort().values, ROWS)], 0),
    "dims of one that stay": (lambda x: x.squeeze(-2).unsqueeze(1).view(1, 2, 1, 1), [((1, 2, 1, 1), P("x"))], 0),
    "one dim of one of several": (lambda x: x.squeeze(2).unsqueeze(0), [((1, 2, 1, 1), P(None, None, None, "x"))], 0),
    "the row of a dim of one": (lambda x: x.unbind()[0] * 2, [((1, 8), ROWS)], 0),
    "the row of an inner dim of one": (lambda x: torch.unbind(x, dim=-2)[0], [((3, 1, 8), P(None, "x"))], 0),
    "new values": (lambda x: x.new_empty_strided((2, 3), (3, 1)).zero_(), [(COUNTED, ROWS)], 0),
    "cross entropy": (_bce, [((8, 8), WHOLE), ((8, 8), ROWS)], 6 * 64),
    "a loss of rows": (F.cosine_embedding_loss, [((8, 8), WHOLE), ((8, 8), ROWS), ((8,), WHOLE)], 6 * 64),
    "distances": (F.triplet_margin_loss, [((8, 8), ROWS), ((8, 8), WHOLE), ((8, 8), ROWS)], 6 * 64),
    "a normal loss": (_gaussian, [((8, 8), WHOLE), ((8, 8), ROWS)], 6 * 64),
    "a loss of sequences": (_ctc, [((6, 8, 5), COLUMNS)], 0),
    "rows set by places": (_index_copy, [((8, 8), COLUMNS), ((8, 8), COLUMNS)], 12 * 64),
    "a whole source": (_index_reduce, [((8, 8), COLUMNS), ((8, 16), WHOLE)], 6 * 64),
    "a start that a tensor holds": (lambda x: x.narrow(1, torch.tensor(2), 3), [((8, 8), ROWS)], 0),
    "places in a whole table": (_gathered, [((8, 8), WHOLE)], 6 * 16),
    "a transform of two dims": (lambda x: torch.fft.fft2(x).abs(), [((8, 8), ROWS)], 6 * 16 * 2 * 2),
    "reflected": (Tensor.__rmatmul__, [((4, 16, 8), ROWS), ((8, 16), ROWS)], 12 * 128),
    "to the dtype of": (_to, [((8, 8), ROWS)], 0),
    "an empty batch": (torch.mm, [((0, 8), ROWS), ((8, 16), WHOLE)], 0),
}


@pytest.fixture(autouse=True)
def by_bytes() -> Iterator[None]:
    with priced_by_bytes():
        yield


@pytest.mark.parametrize("name", CASES)
def test_moves_no_more(name: str) -> None:
    function, operands, most = CASES[name]
    torch.manual_seed(0)
    wholes = [_value(operand) for operand in operands]
    given = [device_put(x.detach(), spec, mesh=MESH) for x, (_, spec) in zip(wholes, operands, strict=True)]
    leaves = [x.requires_grad_() for x, whole in zip(given, wholes, strict=True) if whole.requires_grad]
    expected = function(*wholes)
    with communication_log() as log:
        out: Sharded = function(*given)
        found = out.requires_grad and torch.autograd.grad(
            out.local, [x.local for x in leaves], torch.ones_like(out.local.detach()), allow_unused=True
        )
    assert log.moved <= most, str(log)
    torch.testing.assert_close(device_get(out.detach()), expected.detach())
    if found:
        grads = torch.autograd.grad(expected.sum(), [x for x in wholes if x.requires_grad], allow_unused=True)
        for leaf, one, grad in zip(leaves, found, grads, strict=True):
            if grad is not None:
                torch.testing.assert_close(device_get(Sharded(one, leaf.spec)), grad)


def _value(operand: tuple[Any, P]) -> Tensor:
    """Random numbers of a shape, or the tensor given."""
    given = operand[0]
    return given if isinstance(given, Tensor) else torch.randn(given, dtype=torch.float64, requires_grad=True)
