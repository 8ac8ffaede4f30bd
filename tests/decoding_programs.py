"""A small decoder on a mesh, beside the same decoder on one device in float64: what `test_decoding` runs.

The reference keeps no cache: for each token it computes the whole sequence anew, one position and one head at a time.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from fspmd import P, communication_log, device_get, device_put, jit, make_mesh, psum, shard_map
from fspmd.errors import ArgumentError, AxisError, FspmdError, ShapeError
from fspmd.nn import KVCache, cached_attention, greedy, own_heads

F64 = torch.float64
WIDTH, HIDDEN, LAYERS = 3, 8, 2
Weights = dict[str, Any]


class Case(NamedTuple):
    """A decoder: ranks of dp, tp and cp, heads, KV heads, tokens of the vocabulary, and the capacity of the cache."""

    sizes: tuple[int, int, int]
    heads: int
    kv_heads: int
    vocabulary: int = 13
    capacity: int = 11


SIZES = (
    (1, 1, 1),
    (1, 2, 1),
    (1, 4, 1),
    (1, 1, 2),
    (1, 1, 3),
    (1, 1, 4),
    (1, 2, 2),
    (2, 2, 1),
    (2, 1, 2),
    (2, 2, 2),
    (3, 1, 1),
    (3, 1, 2),
)
HEADS = ((4, 4), (4, 2), (4, 1), (8, 2), (8, 4))
CASES = [
    Case(sizes, *heads, vocabulary, capacity)
    for sizes, heads, vocabulary, capacity in itertools.product(SIZES, HEADS, (13, 16), (11, 12))
]
PROMPTS = [[1, 5, 2, 7, 3], [4], [2, 2], [6, 0, 9, 8, 1, 3, 2]]  # one of each slot
NEW = 4  # tokens that each sequence gets


def weights(case: Case) -> Weights:
    torch.manual_seed(sum(case.sizes) + case.heads + case.kv_heads)
    shapes = {
        "q": (HIDDEN, case.heads * WIDTH),
        "k": (HIDDEN, case.kv_heads * WIDTH),
        "v": (HIDDEN, case.kv_heads * WIDTH),
        "o": (case.heads * WIDTH, HIDDEN),
    }
    layers = [{name: torch.randn(shape, dtype=F64) for name, shape in shapes.items()} for _ in range(LAYERS)]
    return {
        "layers": layers,
        "tokens": torch.randn(case.vocabulary, HIDDEN, dtype=F64),
        "places": torch.randn(case.capacity + 1, HIDDEN, dtype=F64),
        "out": torch.randn(HIDDEN, case.vocabulary, dtype=F64),
    }


# --- the reference --------------------------------------------------------------------------------------------------


def dense(w: Weights, case: Case, tokens: list[int]) -> Tensor:
    """The logits [vocabulary] of the token after these."""
    x = [w["tokens"][token] + w["places"][place] for place, token in enumerate(tokens)]
    for layer in w["layers"]:
        q, k, v = ([(row @ layer[name]).view(-1, WIDTH) for row in x] for name in "qkv")
        rows = []
        for i, row in enumerate(x):
            heads = []
            for head in range(case.heads):
                shared = head * case.kv_heads // case.heads
                scores = torch.stack([q[i][head] @ k[j][shared] / WIDTH**0.5 for j in range(i + 1)])
                share = scores.exp() / scores.exp().sum()
                heads.append(sum(share[j] * v[j][shared] for j in range(i + 1)))
            rows.append((row + torch.cat(heads) @ layer["o"]).tanh())
        x = rows
    return x[-1] @ w["out"]


def completed(w: Weights, case: Case, prompt: list[int], new: int) -> list[int]:
    """The tokens that follow a prompt, each the most probable one."""
    tokens = list(prompt)
    for _ in range(new):
        logits = dense(w, case, tokens).tolist()
        tokens.append(max(range(len(logits)), key=logits.__getitem__))
    return tokens[len(prompt) :]


# --- the program ----------------------------------------------------------------------------------------------------


def layout(case: Case) -> Weights:
    """The specs of the weights. Where KV heads are fewer than ranks, all ranks have the weights of all."""
    shared = P() if case.kv_heads % case.sizes[1] else P(None, "tp")
    layer = {"q": P(None, "tp"), "k": shared, "v": shared, "o": P("tp")}
    return {"layers": [layer] * LAYERS, "tokens": P(), "places": P(), "out": P(None, "tp")}


def forward(
    case: Case, w: Weights, cache: KVCache, tokens: Tensor, counts: Tensor, slots: Tensor | None
) -> tuple[Tensor, KVCache]:
    """In a body, the logits [slots, vocabulary / tp] after the last token of each sequence, and the cache."""
    positions = (cache.lengths if slots is None else cache.lengths[slots])[:, None] + torch.arange(
        tokens.shape[1], device=tokens.device
    )
    x = w["tokens"][tokens] + w["places"][positions.clamp(max=case.capacity)]
    layers, options = [], {"axis": "cp", "counts": counts, "slots": slots}
    for layer, part in zip(w["layers"], cache.layers, strict=True):
        q, k, v = ((x @ layer[name]).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for name in "qkv")
        if case.kv_heads % case.sizes[1]:
            k, v = own_heads(k, "tp"), own_heads(v, "tp")
        grown = part.append(k, v, **options)
        out = cached_attention(q, grown, **options)
        x = (x + psum(out.transpose(1, 2).flatten(2) @ layer["o"], "tp")).tanh()
        layers.append(grown)
    last = x.gather(1, (counts - 1).clamp(min=0)[:, None, None].expand(-1, -1, HIDDEN))[:, 0]
    return last @ w["out"], KVCache.of(layers)


Pick = Callable[[Tensor, KVCache], Tensor]  # the next tokens, of the logits of a rank and the cache


def decoder(case: Case, mesh: Any, cache: KVCache, jitted: bool | str, pick: Pick | None = None) -> Callable[..., Any]:
    """``step(w, cache, tokens, counts, slots)`` gives the next token of each sequence, and the cache."""

    def body(w: Weights, cache: KVCache, tokens: Tensor, counts: Tensor, slots: Tensor | None) -> Any:
        logits, cache = forward(case, w, cache, tokens, counts, slots)
        found = greedy(logits, "tp", vocabulary=case.vocabulary) if pick is None else pick(logits, cache)
        return found, cache

    def mapped(batch: P) -> Any:
        specs = cache.specs
        given = layout(case), specs, batch, batch, P()
        return shard_map(body, mesh=mesh, in_specs=given, out_specs=(batch, specs))

    rows, some = mapped(cache.specs.lengths), mapped(P())

    def step(w: Weights, cache: KVCache, tokens: Tensor, counts: Tensor, slots: Tensor | None = None) -> Any:
        return (rows if slots is None else some)(w, cache, tokens, counts, slots)

    options: dict[str, Any] = {"backend": jitted} if isinstance(jitted, str) else {}
    return jit(step, donate_argnums=1, **options) if jitted else step


def run(
    case: Case,
    transport: str,
    jitted: bool | str,
    chunk: int,
    new: int = NEW,
    pick: Pick | None = None,
    device: str = "cpu",
) -> list[Any]:
    """The tokens that each prompt gets, after a prefill in chunks. ``jitted`` may be the name of a backend."""
    mesh = make_mesh(case.sizes, ("dp", "tp", "cp"), transport=transport, device=device)
    slots = len(PROMPTS)
    cache = KVCache.zeros(
        LAYERS, slots, case.kv_heads, case.capacity, WIDTH, dtype=F64, spec=P("dp", "tp", "cp"), mesh=mesh
    )
    step, w = decoder(case, mesh, cache, jitted, pick), optree.tree_map(lambda x: x.to(device), weights(case))
    left, found = [list(prompt) for prompt in PROMPTS], [list[int]() for _ in PROMPTS]
    with torch.no_grad():
        while any(len(row) < new for row in found):
            rows, counts = [], []
            for slot in range(slots):
                given = left[slot][:chunk]
                left[slot] = left[slot][chunk:]
                rows.append(given + [0] * (chunk - len(given)))
                counts.append(len(given))
            tokens, cache = step(w, cache, torch.tensor(rows, device=device), torch.tensor(counts, device=device))
            for slot, token in enumerate(device_get(tokens).tolist()):
                if counts[slot] and not left[slot]:
                    found[slot].append(token)
                    left[slot] = [token] if len(found[slot]) < new else []
            if not any(len(row) > 1 for row in left):
                chunk = 1
    cache.check()
    return found


@functools.cache
def right(case: Case) -> list[list[int]]:
    w = weights(case)
    return [completed(w, case, prompt, NEW) for prompt in PROMPTS]


def wrong(cases: list[Case], jitted: bool) -> list[Any]:
    """The cases that give other tokens on the processes of this world."""
    return [(case, found) for case in cases if (found := run(case, "process_group", jitted, 3)) != right(case)]


def served(case: Case, transport: str, prompts: list[list[int]], slots: int, new: int = 3) -> tuple[Any, Any]:
    """The tokens that prompts get which come one after another, as slots become free; and the numbers of records.

    A prompt is read alone, in chunks of 2 and into its slot, while the other slots keep theirs. Then all slots decode.
    """
    mesh = make_mesh(case.sizes, ("dp", "tp", "cp"), transport=transport, device="cpu")
    spec = P(None, "tp", "cp")
    cache = KVCache.zeros(LAYERS, slots, case.kv_heads, case.capacity, WIDTH, dtype=F64, spec=spec, mesh=mesh)
    w = weights(case)
    read, step = (decoder(case, mesh, cache, True) for _ in range(2))
    waiting, found = list(range(len(prompts))), [list[int]() for _ in prompts]
    of_slot: list[int | None] = [None] * slots
    with torch.no_grad():
        while waiting or any(who is not None for who in of_slot):
            for slot, who in enumerate(of_slot):
                if who is None and waiting:
                    of_slot[slot] = waiting.pop(0)
                    cache = cache.reset(device_put(torch.arange(slots) == slot, P(), mesh=mesh))
                    prompt = prompts[of_slot[slot]]  # type: ignore[index]
                    for part in (prompt[i : i + 2] for i in range(0, len(prompt), 2)):
                        tokens = torch.tensor([part + [0] * (2 - len(part))])
                        token, cache = read(w, cache, tokens, torch.tensor([len(part)]), torch.tensor([slot]))
                    found[of_slot[slot]].append(int(device_get(token)))  # type: ignore[index]
            last = torch.tensor([[0 if who is None else found[who][-1]] for who in of_slot])
            tokens, cache = step(w, cache, last, torch.tensor([int(who is not None) for who in of_slot]))
            for slot, who in enumerate(of_slot):
                if who is not None:
                    found[who].append(int(device_get(tokens)[slot]))
                    of_slot[slot] = who if len(found[who]) < new else None
    cache.check()
    return found, (read.cache_info().misses, step.cache_info().misses)


Refused = tuple[type[Exception], str, Callable[[KVCache], Any]]  # the error, its words, and the call in a body


def refused() -> list[Refused]:
    """Calls that do not fit a cache of 3 slots, one KV head on each rank of tp, and 8 positions, of width 4."""

    def pair(*shape: int, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
        return torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)

    def query(*shape: int, **options: Any) -> Callable[[KVCache], Any]:
        return lambda cache: cached_attention(torch.zeros(shape, dtype=F64), cache, axis="cp", **options)

    def append(*operands: Tensor, **options: Any) -> Callable[[KVCache], Any]:
        return lambda cache: cache.append(*operands, axis="cp", **options)

    whole = torch.zeros(3, dtype=torch.int64)
    return [
        (ShapeError, "9 positions for a cache with room for 8", append(*pair(3, 1, 9, 4))),
        (ShapeError, "9 positions for a cache with room for 8", query(3, 2, 9, 4)),
        (ShapeError, "cache of 3 slots", append(*pair(2, 1, 1, 4))),
        (ShapeError, "cache of 3 slots", query(2, 2, 1, 4)),
        (ShapeError, "cache of 3 slots", append(*pair(3, 1, 1, 4), counts=whole[:2])),
        (ShapeError, "slots", append(*pair(3, 1, 1, 4), slots=whole[:2])),
        (ShapeError, "own_heads", append(*pair(3, 2, 1, 4))),
        (ShapeError, "of widths 4 and 4", append(*pair(3, 1, 1, 5))),
        (ShapeError, "of widths 4 and 4", query(3, 2, 1, 5)),
        (ShapeError, "of widths 4 and 4", append(pair(3, 1, 1, 4)[0], pair(3, 1, 2, 4)[0])),
        (ShapeError, r"\[slots, heads, n, width\]", append(*pair(3, 1, 4))),
        (ArgumentError, "float32 for a cache of torch.float64", append(*pair(3, 1, 1, 4, dtype=torch.float32))),
        (ArgumentError, "for counts", append(*pair(3, 1, 1, 4), counts=[1, 1, 1])),
        (ArgumentError, "for slots", append(*pair(3, 1, 1, 4), slots=whole.double())),
        (ArgumentError, "for mask", query(3, 2, 1, 4, mask="causal")),
        (AxisError, "pp", lambda cache: cache.append(*pair(3, 1, 1, 4), axis="pp")),
        (AxisError, "pp", lambda cache: cached_attention(pair(3, 2, 1, 4)[0], cache, axis="pp")),
    ]


def refusals(transport: str) -> list[tuple[str, str, int]]:
    """The error that each of these calls raises on 4 ranks, its words, and the number of collectives before it."""
    mesh = make_mesh((2, 2), ("tp", "cp"), transport=transport, device="cpu")
    cache = KVCache.zeros(1, 3, 2, 8, 4, dtype=F64, spec=P(None, "tp", "cp"), mesh=mesh)
    found = []
    for _, _, call in refused():
        mapped = shard_map(lambda cache, call=call: call(cache), mesh=mesh, in_specs=(cache.specs,), out_specs=P())
        with communication_log() as log:
            try:
                mapped(cache)
                found.append(("none", "", len(list(log))))
            except FspmdError as error:
                found.append((type(error).__name__, str(error), len(list(log))))
    return found
