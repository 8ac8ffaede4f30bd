"""Experts on the ranks of a mesh, beside a loop over tokens and experts in float64: what `test_experts` runs."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fspmd import P, device_get, jit, make_mesh, psum, shard_map
from fspmd.errors import ShapeError
from fspmd.nn import experts, grouped_matmul, route

F64 = torch.float64


class Case(NamedTuple):
    """A program: ranks of dp, ep and tp, tokens of the batch, experts, and how these are chosen."""

    sizes: tuple[int, int, int]
    tokens: int
    total: int
    k: int
    choice: str
    score: Any = "softmax"
    capacity: int | None = None


SIZES = ((1, 1, 1), (1, 2, 1), (1, 3, 1), (1, 4, 1), (1, 6, 1), (2, 2, 1), (2, 3, 1), (1, 2, 2), (2, 2, 2))
CASES = [
    Case(sizes, tokens, total, k, choice, score, capacity)
    for sizes, tokens, k, choice, score, capacity in itertools.product(
        SIZES, (24, 11, 1, 0), (1, 2), ("random", "one"), ("softmax", "sigmoid"), (None, 2, 40)
    )
    for total in sorted({sizes[1], 3 * sizes[1], *((sizes[1] + 1, 2 * sizes[1] - 1) if sizes[1] > 1 else ())})
    if k <= total and not (capacity is not None and tokens % (sizes[0] * sizes[1]))
]


def operands(case: Case) -> list[Tensor]:
    """Tokens [N, 4], the router [4, E], a bias of the choice [E], and matrices of experts [E, 4, 6] and [E, 6, 4]."""
    torch.manual_seed(sum(case.sizes) + 10 * case.tokens + case.total + case.k)
    total = case.total
    shapes = (case.tokens, 4), (4, total), (total,), (total, 4, 6), (total, 6, 4)
    x, router, bias, up, down = (torch.randn(shape, dtype=F64) for shape in shapes)
    if case.choice == "one":
        bias = bias * 0
        bias[-1] = 100
    return [x, router, bias * 0.3, up, down]


def dense(case: Case, x: Tensor, router: Tensor, bias: Tensor, up: Tensor, down: Tensor) -> tuple[list[Tensor], int]:
    """The definition: the result, both losses and the counts; and the number of dropped choices."""
    total, ranks = bias.shape[0], case.sizes[0] * case.sizes[1]
    block = -(-case.tokens // ranks)
    counts, rows, dropped = [0] * total, [], 0
    shares = torch.zeros(total, dtype=F64)
    z = torch.zeros((), dtype=F64)
    sent: dict[tuple[int, int], int] = {}
    for i in range(case.tokens):
        logits = x[i] @ router
        scores = logits.exp() / logits.exp().sum() if case.score == "softmax" else 1 / (1 + (-logits).exp())
        shares = shares + scores / scores.sum()
        z = z + logits.exp().sum().log() ** 2
        chosen = (scores + bias).sort(descending=True).indices.tolist()[: case.k]
        row = torch.zeros(4, dtype=F64)
        for e in chosen:
            counts[e] += 1
            place = sent.setdefault((i // block, e), 0)
            sent[i // block, e] += 1
            if case.capacity is not None and place >= case.capacity:
                dropped += 1
            else:
                row = row + scores[e] / sum(scores[j] for j in chosen) * ((x[i] @ up[e]).tanh() @ down[e])
        rows.append(row)
    n = max(case.tokens, 1)
    even = (torch.tensor(counts, dtype=F64) / (n * case.k) * shares / n).sum() * total
    out = torch.stack(rows) if rows else x @ router.new_zeros(4, 4)
    return [out, even, z / n, torch.tensor(counts)], dropped


def program(
    case: Case, transport: str, jitted: bool | str, recomputed: bool, rows: int | None, device: str = "cpu"
) -> Any:
    """``jitted`` may be the name of a backend."""
    mesh = make_mesh(case.sizes, ("dp", "ep", "tp"), transport=transport, device=device)
    batch = ("dp", "ep")

    def body(x: Tensor, router: Tensor, bias: Tensor, up: Tensor, down: Tensor) -> Any:
        def layer(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Any:
            routing = route(x @ router, case.k, bias=bias, score=case.score, axes=batch)

            def f(rows: Tensor, counts: Tensor) -> Tensor:
                hidden = grouped_matmul(rows, up, counts).tanh()
                return psum(grouped_matmul(hidden, down, counts), "tp")

            out, dropped = experts(x, routing, f, axis="ep", capacity=case.capacity, rows=rows)
            return out, routing.balance_loss, routing.z_loss, routing.counts, psum(dropped, batch)

        if recomputed:
            return checkpoint(layer, x, router, up, down, use_reentrant=False)
        return layer(x, router, up, down)

    tokens = P(batch)
    given = tokens, P(), P(), P("ep", None, "tp"), P("ep", "tp")
    call = shard_map(body, mesh=mesh, in_specs=given, out_specs=(tokens, P(), P(), P(), P()))
    return jit(call, **({"backend": jitted} if isinstance(jitted, str) else {})) if jitted else call


def compute(
    case: Case,
    transport: str = "simulation",
    jitted: bool | str = False,
    recomputed: bool = False,
    scale: float = 1.0,
    device: str = "cpu",
) -> list[tuple[Tensor, Tensor]]:
    """What the program gives, and what the definition gives: results, and the gradients of all operands."""
    leaves = operands(case)
    needed = [i for i in range(5) if i != 2]
    for i in needed:
        leaves[i].requires_grad_()
    rows = case.tokens * case.k if jitted and not case.capacity else None
    call = program(case, transport, jitted, recomputed, rows, device)
    there = [x.to(device) for x in leaves]
    if jitted:
        call(*there)  # the next call replays the record
    *mine, dropped = (device_get(x).cpu() for x in call(*there))
    right, gone = dense(case, *leaves)
    cotangent = torch.randn(case.tokens, 4, dtype=F64)
    pairs = [*zip(mine, right, strict=True), (dropped, torch.tensor(gone))]
    grads = [
        torch.autograd.grad((a * cotangent).sum() * s + b * s + c * s, [leaves[i] for i in needed], allow_unused=True)
        for (a, b, c, _), s in ((mine, scale), (right, 1.0))
    ]
    for a, b in zip(*grads, strict=True):
        pairs.append((a / scale if a is not None else torch.zeros(()), b if b is not None else torch.zeros(())))
    return [(a.detach(), b.detach().to(a.dtype).expand_as(a)) for a, b in pairs]


def worst(cases: list[Case], jitted: bool) -> list[tuple[Case, float]]:
    """The largest error of each case on processes."""
    return [
        (case, max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in compute(case, "process_group", jitted)))
        for case in cases
    ]


def second_derivatives(tokens: int, dtype: torch.dtype, transport: str = "process_group") -> float:
    """The largest error of second derivatives of matrices and tokens on 4 ranks, some of them without a token."""
    torch.manual_seed(0)
    mesh = make_mesh((4,), ("ep",), transport=transport, device="cpu")
    x, w = torch.randn(tokens, 2, dtype=dtype), torch.randn(3, 2, 2, dtype=dtype)
    logits = torch.randn(tokens, 3, dtype=dtype)

    def body(x: Tensor, w: Tensor, logits: Tensor) -> Tensor:
        return experts(
            x, route(logits, 1), lambda rows, counts: grouped_matmul(rows, w, counts).sin(), axis="ep", capacity=2
        )[0]

    on_ranks = shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))

    def second(f: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [v.to(dtype).requires_grad_() for v in (x, w)]
        first = torch.autograd.grad(f(*leaves, logits.to(dtype)).square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.sin().sum() for g in first), leaves)

    found = second(lambda *given: device_get(on_ranks(*given)), dtype)
    wanted = second(lambda x, w, logits: torch.einsum("ta,tab->tb", x, w[logits.argmax(1)]).sin(), F64)
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def told_of_little_room(transport: str, sizes: tuple[int, int], jitted: bool) -> str:
    """The error where one group of ranks has room for all rows, and another does not. Only some ranks get too many."""
    mesh = make_mesh(sizes, ("dp", "ep"), transport=transport, device="cpu")

    def body(x: Tensor, logits: Tensor) -> Tensor:
        return experts(x, route(logits, 1, axes=("dp", "ep")), lambda rows, counts: rows, axis="ep", rows=3)[0]

    call = shard_map(body, mesh=mesh, in_specs=P(("dp", "ep")), out_specs=P(("dp", "ep")))
    each, ranks = 2, sizes[0] * sizes[1]
    logits = torch.eye(sizes[1])[torch.arange(each * ranks) % sizes[1]]
    run = jit(call) if jitted else call
    run(torch.ones(each * ranks, 4), logits)
    logits[: each * sizes[1]] = torch.eye(sizes[1])[-1]  # of the first group all to the last expert
    try:
        run(torch.ones(each * ranks, 4), logits)
    except ShapeError as error:
        return str(error)
    return ""
