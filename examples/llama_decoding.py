"""Decoding with the model of llama.py, on the mesh that trained it: a prompt at once, then token by token.

A slot is a sequence. The cache is cut by slots (the axes of the batch), heads (tp) and positions (cp). Shapes in
comments are those of one rank's block: b slots, n positions.
"""

from __future__ import annotations

import functools
from typing import Any

import llama
import torch
from llama import BATCH, Config, Params
from torch import Tensor

import fspmd
from fspmd import Mesh, P, nn, shard_map
from fspmd.nn import KVCache

CACHE, SLOTS, IDS = P(BATCH, "tp", "cp"), P(BATCH), P(BATCH, None)


def decode_step(
    c: Config, temperature: float, params: Params, cache: KVCache, ids: Tensor, counts: Tensor, keys: Tensor
) -> tuple[Tensor, KVCache]:
    """A step of decoding, or of a prompt: the next token of each slot, [b], and the cache after it.

    Slot i has the first counts[i] of the tokens ids [b, n] more. The cache that is given may be donated.

    Keys are those of `fspmd.random`, one for each slot. So tokens depend on neither the mesh nor other slots.
    """
    at, layers = (cache.lengths[:, None] + torch.arange(ids.shape[1], device=ids.device))[:, None], []
    x = llama.embedded(c, params, ids)
    for own, layer in zip(llama.of_layers(params), cache.layers, strict=True):

        def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, layer: KVCache = layer) -> Tensor:
            layers.append(layer.append(k, v, axis="cp", counts=counts))
            return nn.cached_attention(q, layers[-1], axis="cp", mask=c.mask, counts=counts, sinks=sinks)

        x, _ = llama.layer(c, own, x, at, attend, BATCH)
    last = x.gather(1, (counts - 1)[:, None, None].expand(-1, -1, c.D))[:, 0]
    cache = KVCache.of(layers)
    logits = llama.logits(c, params, last)
    return nn.sample(logits, keys, cache.lengths, "tp", vocabulary=c.V, temperature=temperature), cache


def generate(
    c: Config, mesh: Mesh, params: Params, prompts: list[list[int]], count: int, temperature: float, seed: int
) -> list[list[int]]:
    """``count`` tokens after each prompt. With a temperature of 0 each is the most probable one."""
    slots, longest = len(prompts), max(map(len, prompts))
    dtype = params["embedding"].dtype if c.precision is None else c.precision.compute
    cache: Any = KVCache.zeros(c.layers, slots, c.G, longest + count, c.K, dtype=dtype, spec=CACHE, mesh=mesh)
    body = shard_map(
        functools.partial(decode_step, c, temperature),
        mesh=mesh,
        in_specs=(llama.param_specs(c), cache.specs, IDS, SLOTS, SLOTS),
        out_specs=(SLOTS, cache.specs),
    )
    step: Any = body if c.experts and c.capacity is None else fspmd.jit(body, donate_argnums=1)
    given = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts])
    ids, counts = fspmd.device_put((given, torch.tensor(list(map(len, prompts)))), (IDS, SLOTS), mesh=mesh)
    keys = fspmd.device_put(fspmd.random.split(fspmd.random.key(seed), slots), SLOTS, mesh=mesh)
    one, found = fspmd.device_put(torch.ones(slots, dtype=torch.int64), SLOTS, mesh=mesh), []
    for _ in range(count):
        tokens, cache = step(params, cache, ids, counts, keys)
        ids, counts = tokens[:, None], one
        found.append(tokens)
    return torch.stack([fspmd.device_get(tokens) for tokens in found], 1).tolist()
