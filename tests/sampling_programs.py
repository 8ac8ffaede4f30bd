"""Tokens from logits whose vocabulary is cut, beside sorted logits in float64: what `test_sampling` runs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fspmd import P, device_get, jit, make_mesh, shard_map
from fspmd.nn import greedy, sample
from fspmd.random import key, split

F64 = torch.float64


def drawn(
    sizes: tuple[int, int], logits: Tensor, transport: str = "simulation", jitted: bool = False, **options: Any
) -> Tensor:
    """Tokens of rows of logits on a mesh, as a body samples them: each row has its key."""
    mesh = make_mesh(sizes, ("dp", "tp"), transport=transport, device="cpu")
    slots, vocabulary = logits.shape
    rows = P("dp")
    names = [name for name, x in options.items() if isinstance(x, Tensor)]

    def body(logits: Tensor, keys: Tensor, positions: Tensor, *given: Tensor) -> Tensor:
        here = options | dict(zip(names, given, strict=True))
        return sample(logits, keys, positions, "tp", vocabulary=vocabulary, **here)

    specs = P("dp", "tp"), rows, rows, *[rows] * len(names)
    call: Callable[..., Any] = shard_map(body, mesh=mesh, in_specs=specs, out_specs=rows)
    call = jit(call) if jitted else call
    keys, positions = split(key(7), slots), torch.arange(slots) % 5
    given = [options[name] for name in names]
    if jitted:
        call(logits, keys, positions, *given)
    return device_get(call(logits, keys, positions, *given))


def best(sizes: tuple[int, int], logits: Tensor, transport: str = "simulation") -> Tensor:
    """The tokens of `greedy` on a mesh."""
    mesh, n = make_mesh(sizes, ("dp", "tp"), transport=transport, device="cpu"), logits.shape[1]
    call = shard_map(lambda x: greedy(x, "tp", vocabulary=n), mesh=mesh, in_specs=P("dp", "tp"), out_specs=P("dp"))
    return device_get(call(logits))


def probabilities(row: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """The definition, on sorted logits of one sequence. Tokens as probable as the last one of a choice belong to it."""
    row = row.double()
    kept = torch.ones_like(row, dtype=torch.bool)
    if top_k is not None:
        kept = row >= row.sort(descending=True).values[: min(top_k, len(row))][-1]
    if top_p is not None:
        p = (row / temperature).where(kept, -torch.inf).softmax(0)
        more = torch.stack([p[row > x].sum() for x in row])
        kept = kept & (more < top_p)
    return (row / temperature).where(kept, -torch.inf).softmax(0)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.6},
    {"temperature": 1.3, "top_k": 7, "top_p": 0.8},
    {"temperature": torch.tensor([0.0, 0.5, 1.0, 2.0, 0.0, 1.0]), "top_k": torch.tensor([1, 2, 3, 50, 9, 9])},
    {"top_p": torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9, 1.0])},
]


def all_drawn(sizes: tuple[int, int], transport: str, dtype: torch.dtype) -> list[list[int]]:
    """The tokens for all settings, and those of `greedy`."""
    logits = torch.randn(6, 21, generator=torch.Generator().manual_seed(1), dtype=F64).to(dtype)
    found = [drawn(sizes, logits, transport, **options) for options in SETTINGS]
    return [tokens.tolist() for tokens in (*found, best(sizes, logits, transport))]
