"""Chains of views and writes through them, by chance, beside the same on whole tensors: no write is lost.

`view_programs` writes the programs. A sample runs always, six thousand with FSPMD_FULL=1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from full import FULL
from processes import Processes
from view_programs import check_seeds

from fspmd import ArgumentError, FspmdError, P, VarianceError, device_get, device_put, make_mesh, shard_map
from fspmd.copies import as_copies, refuse_copy

LINE = make_mesh((4,), ("x",), transport="simulation")


@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded")
@pytest.mark.parametrize("seed", range(0, 6000 if FULL else 25, 25))
def test_a_write_is_seen_by_all_views_or_refused(seed: int) -> None:
    check_seeds(seed, seed + 25)


@pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded")
@pytest.mark.parametrize("start", range(0, 400 if FULL else 2, 50))
@pytest.mark.parametrize("ranks", [2, 3, 4, 6] if FULL else [4])
def test_ranks_agree_on_what_is_refused(ranks: int, start: int) -> None:
    """Blocks of one element, or of none, decide nothing."""
    with Processes(ranks) as pool:
        for seed in range(start, start + (50 if FULL else 2), 2):
            first, *others = pool.run(check_seeds, seed, seed + 2, None, ranks)
            for other in others:
                assert other == first
            assert first == check_seeds(seed, seed + 2, "simulation", ranks)


EACH = (P("x"), P(None, "x"))
#: writes, and layouts that they move nothing of
WRITES: dict[str, tuple[Callable[[Any], Any], tuple[P, ...]]] = {
    "a cache": (lambda x: x[..., :4].view(1, 4, 2, 2)[:, 0].fill_(1), EACH[:1]),
    "squeezed": (lambda x: x.transpose(1, 2).squeeze(0)[1].fill_(1), EACH[1:]),
    "unflattened": (lambda x: x.transpose(1, 2).unflatten(1, (2, 3))[:, 1].fill_(1), EACH),
    "the same shape": (lambda x: x.transpose(1, 2).view(1, 6, 4).fill_(1), EACH),
    "a flattened dim of a part": (lambda x: x[..., :4].flatten(2).fill_(1), EACH),
    "detached": (lambda x: x.detach().add_(1), EACH),
    "data": (lambda x: x.data.add_(1), EACH),
    "other bits": (lambda x: x.view(torch.int32).fill_(1), EACH),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_into_views_that_need_no_move_go_through(name: str) -> None:
    (write, specs), whole = WRITES[name], torch.zeros(1, 4, 6)
    write(whole)
    for spec in specs:
        x = device_put(torch.zeros(1, 4, 6), spec, mesh=LINE)
        write(x)
        assert torch.equal(device_get(x), whole)


@pytest.mark.parametrize("hand_on", [lambda x: x.detach(), lambda x: x.data, lambda x: x.view(torch.int32)])
def test_a_copy_is_one_however_it_is_handed_on(hand_on: Callable[[Any], Any]) -> None:
    x = device_put(torch.arange(8.0), P("x"), mesh=LINE)
    with pytest.raises(VarianceError, match="writes into a copy"):
        hand_on(x[:2]).add_(1)
    part = x[:2]
    with pytest.raises(VarianceError, match="would not see the write"):
        hand_on(x).add_(1)
    del part
    hand_on(x).zero_()
    assert not device_get(x).any()


def test_results_of_a_body_that_are_not_packed() -> None:
    """Their blocks have no view that the global tensor would have."""
    x = device_put(torch.arange(48.0).view(8, 6), P("x"), mesh=LINE)
    y = shard_map(lambda b: (b * 1).t(), mesh=LINE, in_specs=P("x"), out_specs=P(None, "x"))(x)
    whole = torch.arange(48.0).view(8, 6).t().contiguous()
    assert y.stride() == whole.stride()
    with pytest.raises(VarianceError, match="writes into a copy"):
        y.view(-1).add_(1)
    for one in (y, whole):
        one.view(3, 2, 8)[1].fill_(7)
        one.contiguous(memory_format=torch.contiguous_format)[0].fill_(5)
    assert torch.equal(device_get(y), whole)


@pytest.mark.parametrize("size", [0, 3])
def test_a_copy_of_a_copy_is_one_of_what_that_is_of(size: int) -> None:
    """Of blocks without elements, too, though other ranks have some."""
    x = torch.zeros(size)
    first = as_copies(x[:], x, "first()")
    second = as_copies(first.clone(), first, "second()")
    del first
    with pytest.raises(VarianceError, match=r"while the result of second\(\) is in use"):
        refuse_copy(x, "add_()")
    with pytest.raises(VarianceError, match="writes into a copy"):
        refuse_copy(second, "add_()")
    del second
    refuse_copy(x, "add_()")


@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: x.masked_fill_(x > 0, 1), lambda x: x.fill_(2)])
def test_writes_into_what_is_expanded_are_refused_on_all_ranks(write: Callable[[Any], Any]) -> None:
    """Torch's kernels refuse some, of blocks with elements alone."""
    x = device_put(torch.ones(5), P("x"), mesh=LINE).expand(3, 5)
    with pytest.raises(ArgumentError, match=r"as those of expand\(\) do"):
        write(x)


_NINES = torch.full((1, 9), 9.0)
_PLACES = torch.zeros(1, 9, dtype=torch.long)


@pytest.mark.parametrize("spec", [P(), P("x")])
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.index_fill_(0, torch.tensor([0]), 3),
        lambda x: x.index_put_((torch.tensor([0]),), torch.tensor(3.0)),
        lambda x: x.index_copy_(0, torch.tensor([0]), _NINES),
        lambda x: x.index_add_(0, torch.tensor([0]), _NINES),
        lambda x: x.scatter_(0, _PLACES, 3.0),
        lambda x: x.scatter_add_(0, _PLACES, _NINES),
        lambda x: x.scatter_reduce_(0, _PLACES, _NINES, "amax"),
        lambda x: x.masked_scatter_(torch.tensor([[True], [False]]).expand(2, 9), _NINES.expand(2, 9)),
        lambda x: x.put_(torch.arange(9), _NINES[0]),
        lambda x: x.tril_(-1),
        lambda x: x.__setitem__(0, 3.0),
        lambda x: x.__setitem__(torch.tensor([0]), 3.0),
    ],
)
def test_writes_into_some_windows_do_not_lose_what_they_share_with_others(write: Callable[[Any], Any], spec: P) -> None:
    """A write that computes all windows anew would copy old elements over new ones."""
    whole = torch.arange(12.0)
    x = device_put(whole, spec, mesh=LINE) * 1
    with pytest.raises(FspmdError, match=r"as those of unfold\(\) do|writes into a copy"):
        write(x.unfold(0, 9, 3))
    assert torch.equal(device_get(x), whole)


def test_writes_into_a_window_are_seen() -> None:
    x, whole = device_put(torch.arange(12.0), P(), mesh=LINE) * 1, torch.arange(12.0)
    for one in (x, whole):
        windows = one.unfold(0, 9, 3)
        windows[0].fill_(3)
        windows[1].mul_(2)
    assert torch.equal(device_get(x), whole)


def test_a_write_by_places_of_a_flat_dim_is_not_lost() -> None:
    x = device_put(torch.zeros(4, 4, 1), P("x", "y"), mesh=make_mesh((2, 3), ("x", "y"), transport="simulation"))
    y = x.reshape(8, 2, 1)
    try:
        y.index_fill_(0, torch.tensor([0]), 3)
    except FspmdError:
        y[0] = 3
    assert device_get(x).flatten().tolist() == [3, 3, *[0] * 14]
