"""What must hold on any device: each program computes there, and is judged by torch alone on the CPU in float64.

    python tests/device_programs.py simulated cuda   # one of `PROGRAMS`, on a device

They take no pytest, so that `make gpu` can run them where there is none. `test_devices.py` runs them on the CPU.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from typing import Any, Final

import decoding_programs
import experts_programs
import pipeline_programs
import state_programs
import torch
import torch.multiprocessing as processes
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

import fspmd
from fspmd import Mesh, P, device_get, device_put, jit, make_mesh, nn, psum, shard_map

N: Final = 4


def _numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _equal(found: Any, want: Tensor, device: str, tolerance: float = 1e-9) -> None:
    """A value on the device, beside what it must be."""
    assert found.device.type == torch.device(device).type, f"the result is on {found.device}"
    whole = device_get(found) if isinstance(found, fspmd.Sharded) else found
    assert_close(whole.detach().cpu(), want.detach(), rtol=tolerance, atol=tolerance)


# --- collectives ----------------------------------------------------------------------------------------------------

#: on the block of a rank; and what comes of all blocks, stacked
COLLECTIVES: Final[dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Tensor]]]] = {
    "psum": (lambda x: psum(x, "x"), lambda b: b.sum(0).expand_as(b)),
    "pmax": (lambda x: fspmd.pmax(x, "x"), lambda b: b.amax(0).expand_as(b)),
    "pbroadcast": (lambda x: fspmd.pbroadcast(x, "x", 0), lambda b: b[0].expand_as(b)),
    "all_gather": (lambda x: fspmd.all_gather(x, "x"), lambda b: b.expand(len(b), *b.shape)),
    "psum_scatter": (lambda x: fspmd.psum_scatter(x, "x"), lambda b: b.sum(0)),
    "all_to_all": (lambda x: fspmd.all_to_all(x, "x", 0, 0), lambda b: b.transpose(0, 1)),
    "ppermute": (
        lambda x: fspmd.ppermute(x, "x", [(i, (i + 1) % fspmd.axis_size("x")) for i in range(fspmd.axis_size("x"))]),
        lambda b: b.roll(1, 0),
    ),
    "handle": (lambda x: psum(x, "x", wait=False).wait(), lambda b: b.sum(0).expand_as(b)),
}


def collectives(mesh: Mesh, device: str, names: Any = COLLECTIVES) -> None:
    """Each of them, and the gradient of a sum of squares of its result."""
    n = mesh.size
    blocks = _numbers(n, n, 3)
    for name in names:
        ours, plain = COLLECTIVES[name]

        def body(x: Tensor, ours: Any = ours) -> Tensor:
            return varying(ours(x))

        def of_squares(x: Any, body: Any = body) -> Any:
            mapped = shard_map(lambda x: psum(body(x).square().sum(), "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
            return mapped(x)

        x = device_put(blocks.flatten(0, 1).to(device), P("x"), mesh=mesh)
        found = shard_map(lambda x: body(x).unsqueeze(0), mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x)
        leaf = blocks.clone().requires_grad_()
        want = plain(leaf)
        want.square().sum().backward()
        _equal(found, want, device)
        if name != "pmax":
            assert leaf.grad is not None
            _equal(fspmd.grad(of_squares)(x), leaf.grad.flatten(0, 1), device)


def varying(x: Tensor) -> Tensor:
    """A result of a collective, which may be equal on all ranks."""
    return x if "x" in fspmd.typeof(x).variance.varying else fspmd.pcast(x, "x", to="varying")  # type: ignore[union-attr]


# --- the global view ------------------------------------------------------------------------------------------------


def _model(v: Any) -> Any:
    """A small language model: a table, attention, norms, products in columns and in rows, a loss."""
    x = F.embedding(v["ids"], v["table"])
    heads = F.layer_norm(x, (8,), v["scale"]).unflatten(-1, (4, 2)).transpose(1, 2)
    x = x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)
    x = x + F.gelu(x @ v["up"]) @ v["down"]
    return F.cross_entropy((x @ v["table"].transpose(0, 1)).flatten(0, 1), v["ids"].flatten())


SPECS: Final = {
    "ids": P("x"),
    "table": P(),
    "scale": P(),
    "up": P(None, "x"),
    "down": P("x"),
}

SHAPES: Final[dict[str, tuple[int, ...]]] = {
    "ids": (4, 5),
    "table": (12, 8),
    "scale": (8,),
    "up": (8, 16),
    "down": (16, 8),
}


def _values() -> dict[str, Tensor]:
    ids = torch.randint(0, 12, SHAPES["ids"], generator=torch.Generator().manual_seed(1))
    return {"ids": ids} | {
        name: _numbers(*shape, seed=i) for i, (name, shape) in enumerate(SHAPES.items()) if name != "ids"
    }


def _put(mesh: Mesh, device: str) -> tuple[dict[str, Any], Any]:
    put = {name: device_put(x.to(device), SPECS[name], mesh=mesh) for name, x in _values().items()}
    return put, put.pop("ids")


def loss(weights: Any, ids: Any) -> Any:
    return _model({**weights, "ids": ids})


def model(mesh: Mesh, device: str, **options: Any) -> None:
    """Loss and gradients, eager, or recorded with some options: each three times, as replays are."""
    values = _values()
    ids = values.pop("ids")
    want, total = torch.func.grad_and_value(loss)(values, ids)
    weights, mine = _put(mesh, device)
    f = fspmd.value_and_grad(loss)
    run = jit(f, **options) if options else f
    for _ in range(3):
        value, gradients = run(weights, mine)
        _equal(value, total, device)
        for name, gradient in gradients.items():
            _equal(gradient, want[name], device)


def training(mesh: Mesh, device: str) -> None:
    """Three steps of AdamW with clipped gradients, as torch makes them."""
    values = _values()
    ids = values.pop("ids")
    leaves = [x.requires_grad_() for x in values.values()]
    weights, mine = _put(mesh, device)
    sharded = [x.requires_grad_() for x in weights.values()]
    for some, tree, batch in ((leaves, values, ids), (sharded, weights, mine)):
        optimizer = torch.optim.AdamW(some, lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss(tree, batch).backward()
            torch.nn.utils.clip_grad_norm_(some, 0.5)
            optimizer.step()
    for name, x in weights.items():
        _equal(x, values[name], device)
    clipped, norm = fspmd.clip_by_global_norm({name: x.detach() for name, x in weights.items()}, 1.0)
    want = torch.cat([x.detach().flatten() for x in values.values()]).norm()
    _equal(clipped["up"], values["up"] / want, device, 1e-6)
    assert abs(float(norm) - float(want)) < 1e-9


def recurrent(mesh: Mesh, device: str) -> None:
    """Layers whose weights torch would pack for cuDNN, called and attached; and a packed batch."""
    lengths = torch.tensor([5, 3, 4, 1])
    for layer in (torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN):
        torch.manual_seed(0)
        plain = layer(3, 6, 2, dtype=torch.float64)
        x, names = _numbers(5, 4, 3), dict(plain.named_parameters())
        module = layer(3, 6, 2, dtype=torch.float64, device=device)
        mine = {name: device_put(p.detach().to(device), P(), mesh=mesh).requires_grad_() for name, p in names.items()}
        batch = device_put(x.to(device), P(None, "x"), mesh=mesh)
        packed = [torch.nn.utils.rnn.pack_padded_sequence(one, lengths, enforce_sorted=False) for one in (x, batch)]
        for given, ours in ((x, batch), packed):
            want, _ = plain(given)
            found, _ = fspmd.functional_call(module, mine, ours)
            with fspmd.attached(module, mine):
                module(ours)
            if isinstance(given, tuple):
                want, found = want.data, found.data
            _equal(found.detach(), want, device)
            gradients = torch.autograd.grad(want.sin().sum(), list(names.values()))
            every = torch.autograd.grad(found.sin().sum(), list(mine.values()))
            for gradient, expected in zip(every, gradients, strict=True):
                _equal(gradient, expected, device)


def layouts(mesh: Mesh, device: str) -> None:
    """A value from layout to layout, uneven blocks too, and new values."""
    for shape in ((8, 12), (7, 5)):
        whole = _numbers(*shape)
        x = device_put(whole.to(device), P("x"), mesh=mesh)
        for to in (P(None, "x"), P(), P("x"), P(None, None, unreduced={"x"}), P()):
            x = fspmd.reshard(x, to)
            _equal(fspmd.reshard(x, P()), whole, device)
    of_mesh = {"mesh": mesh, "spec": P("x")}
    _equal(fspmd.zeros(7, 3, **of_mesh), torch.zeros(7, 3), device)
    _equal(fspmd.arange(9, **of_mesh), torch.arange(9), device)
    _equal(fspmd.eye(5, **of_mesh), torch.eye(5), device)


def checkpoints(mesh: Mesh, device: str) -> None:
    """What was copied from the device is saved, whatever is written into it later; it is loaded onto the device."""
    wholes = {dtype: _numbers(7, 5).to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.int64)}
    tree: dict[str, Any] = {str(d): device_put(x.to(device), P("x"), mesh=mesh) for d, x in wholes.items()}
    tree |= {"plain": _numbers(3).to(device), "generator": torch.Generator(device).manual_seed(3)}
    with tempfile.TemporaryDirectory() as folder:
        for asynchronous in (True, False):
            handle = fspmd.save(folder, tree, asynchronous=asynchronous)
            for x in list(tree.values())[:4]:
                x.neg_()
            handle.wait()
            found = fspmd.load(folder, tree)
            for x in list(tree.values())[:4]:
                x.neg_()
            for dtype, whole in wholes.items():
                assert found[str(dtype)].device.type == torch.device(device).type
                assert torch.equal(device_get(found[str(dtype)]).cpu(), whole)
            assert torch.equal(found["plain"].cpu(), _numbers(3))
            assert found["plain"].device == tree["plain"].device
            assert torch.equal(found["generator"].get_state(), tree["generator"].get_state())


def sequences(mesh: Mesh, device: str) -> None:
    """Attention over a sequence that is cut over ranks, with gradients of gradients, beside its definition."""
    values = [_numbers(heads, 1024, 8, seed=heads) for heads in (8, 4, 4)]
    values[2] = values[2].flip(1)
    seen = torch.arange(1024)[:, None] - torch.arange(1024)

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(2, 0) for x in (k, v))
        scores = (q @ k.mT * 8**-0.5).masked_fill((seen < 0) | (seen >= 300), -torch.inf)
        return scores.softmax(-1) @ v

    def derivatives(f: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
        out = f(*leaves)
        grads = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
        total = torch.stack([g.cos().sum() for g in grads]).sum()
        return [out, *grads, *torch.autograd.grad(total, leaves)]

    want = derivatives(definition, [x.clone().requires_grad_() for x in values])
    for way in (nn.ring_attention, nn.gathered_attention, nn.ulysses_attention):
        lies = nn.zigzag(1024, N)
        options = {"mask": nn.Causal() & nn.SlidingWindow(300), "layout": lies}
        rows = P(None, "x")
        call = shard_map(
            lambda *x, way=way, options=options: way(*x, "x", **options), mesh=mesh, in_specs=rows, out_specs=rows
        )

        def attend(*x: Tensor, call: Any = call, lies: nn.SequenceLayout = lies) -> Tensor:
            return lies.restore(device_get(call(*(lies.store(y, 1) for y in x))), 1)

        found = derivatives(attend, [x.to(device).requires_grad_() for x in values])
        for mine, right in zip(found, want, strict=True):
            _equal(mine, right, device)


#: batch, heads, heads of keys, queries, keys, width, and width of values
_ATTENDED: Final = [
    ((2,), 4, 2, 40, 24, 16, 16),
    ((), 3, 3, 7, 33, 20, 20),
    ((2, 1), 2, 1, 64, 64, 64, 24),
    ((), 2, 2, 48, 48, 300, 300),
    ((3,), 8, 8, 1, 16, 128, 128),
]
#: by how much results differ, each as a whole; the 32 bits of a GPU may have 10 bits in products
_NEAR: Final = {torch.float64: 1e-12, torch.float32: 2e-3, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def attention_kernels(device: str) -> None:
    """Attention to one block of keys, to two, merged, and causal attention, with gradients, beside the definition."""
    one = make_mesh((1,), ("x",), transport="simulation", device=device)
    cases = itertools.product(_ATTENDED, ("no", "causal", "some", "merged"), _NEAR)
    failed = []
    for (batch, heads, kv_heads, rows, columns, width, value_width), masked, dtype in cases:
        if masked == "causal" and rows != columns:
            continue
        shapes = (heads, rows, width), (kv_heads, columns, width), (kv_heads, columns, value_width)
        operands = [_numbers(*batch, *shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
        cotangent = _numbers(*batch, heads, rows, value_width, seed=9).to(dtype)
        seen = torch.ones(rows, columns, dtype=torch.bool)
        if masked in ("some", "merged"):
            seen = _numbers(rows, columns) > 0
            seen[0] = False  # a query that sees nothing, and one that sees nothing of the second block
            seen[-1, columns // 2 :] = False
        seen = seen.tril() if masked == "causal" else seen

        def definition(q: Tensor, k: Tensor, v: Tensor, seen: Tensor = seen) -> Tensor:
            k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
            scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
            return scores.softmax(-1).nan_to_num(0) @ v

        def of_blocks(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = seen, masked: str = masked) -> Any:
            parts, seen = [], None if masked == "no" else seen
            for keys in torch.arange(k.shape[-2], device=q.device).chunk(1 + (masked == "merged")):
                sees = None if seen is None else seen.to(q.device)[:, keys]
                parts.append(nn.attend_block(q, k[..., keys, :], v[..., keys, :], sees))
            return functools.reduce(nn.merge, parts).out.to(q.dtype)

        def causal(*x: Tensor) -> Any:
            attend = functools.partial(nn.ring_attention, axis="x", mask=nn.Causal())
            rows = P(*[None] * (x[0].dim() - 2), "x")
            return device_get(shard_map(attend, mesh=one, in_specs=rows, out_specs=rows)(*x))

        exact = [x.double().requires_grad_() for x in operands]
        leaves = [x.to(device).requires_grad_() for x in operands]
        try:
            want, found = definition(*exact), (causal if masked == "causal" else of_blocks)(*leaves)
            right = torch.autograd.grad(want, exact, cotangent.double())
            mine = torch.autograd.grad(found, leaves, cotangent.to(device))
            pairs = list(zip((found, *mine), (want, *right), strict=True))
            errors = [
                float((x.detach().cpu().double() - y.detach()).norm() / y.detach().norm().clamp(min=1e-9))
                for x, y in pairs
            ]
            if not all(error < _NEAR[dtype] for error in errors):
                failed.append((masked, dtype, *(tuple(x.shape) for x in operands), errors))
        except RuntimeError as error:
            failed.append((masked, dtype, *(tuple(x.shape) for x in operands), str(error).splitlines()[0]))
    assert not failed, "\n".join(map(str, failed))


_WAYS: Final = nn.ring_attention, nn.gathered_attention, nn.ulysses_attention


def sequences_in_16_bits(
    device: str, most: float = 1.1, length: int = 1024, ways: Any = _WAYS, heads: int = 8, jitted: bool = True
) -> None:
    """In bfloat16 attention on eight ranks is as exact as on one, up to a tenth; so is a record of it.

    Args:
        most: The bound. Kernels that round parts to 16 bits keep that of the square root of 2.
    """
    rows, runs = P(None, "x"), [(1, False), (8, False), *[(8, True)] * jitted]
    q, k, v = _numbers(heads, length, 64).bfloat16(), *_numbers(2, heads // 2, length, 64, seed=1).bfloat16()
    cotangent = _numbers(heads, length, 64, seed=2).bfloat16()
    wrong = []
    for way, window in itertools.product(ways, (length, length // 3)):
        exact = [x.double().requires_grad_() for x in (q, k, v)]
        keys, values = (x.repeat_interleave(2, 0) for x in exact[1:])
        seen = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window)
        want = (exact[0] @ keys.mT / 8).masked_fill(~seen, -torch.inf).softmax(-1) @ values
        right = [want.detach(), *torch.autograd.grad(want, exact, cotangent.double())]
        errors = []
        for n, is_jitted in runs:
            mesh = make_mesh((n,), ("x",), transport="simulation", device=device)
            lies = nn.zigzag(length, 1 if way is nn.ulysses_attention else n)
            attend = functools.partial(way, axis="x", mask=nn.Causal() & nn.SlidingWindow(window), layout=lies)
            call = shard_map(attend, mesh=mesh, in_specs=rows, out_specs=rows)
            call = jit(call) if is_jitted else call
            leaves = [x.to(device).requires_grad_() for x in (q, k, v)]
            for _ in range(1 + is_jitted):
                out = lies.restore(device_get(call(*(lies.store(x, 1) for x in leaves))), 1)
            found = [out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(device))]
            errors.append([float((x.cpu().double() - y).norm() / y.norm()) for x, y in zip(found, right, strict=True)])
        for shared in errors[1:]:
            ratios = [one / alone for alone, one in zip(errors[0], shared, strict=True)]
            print(way.__name__, window, *(f"{ratio:.3f}" for ratio in ratios), f"{errors[0][0]:.5f}", flush=True)
            wrong += [ratio for ratio in ratios if ratio > most] + [x for x in errors[0] if x > 5e-3]
    assert not wrong, wrong


def parts_of_training(device: str) -> None:
    """Experts, pipelines, and parameters that are gathered, beside one device."""
    pairs: list[Any] = []
    for sizes, capacity in (((1, 4, 1), None), ((2, 2, 1), 2), ((1, 2, 2), None)):
        case = experts_programs.Case(sizes, 24, 4, 2, "random", "softmax", capacity)
        for jitted in (False, True, *(["cudagraphs"] if capacity and device == "cuda" else [])):
            pairs += experts_programs.compute(case, jitted=jitted, device=device)
    for case in itertools.product(
        ("4", "2x3"), ("rows", "mixed"), ("uneven",), ("waits", "gathers"), ("global", "body")
    ):
        pairs += state_programs.compute(case, device=device)
    for name in pipeline_programs.SCHEDULES:
        value, grads, _, schedule = pipeline_programs.compute(name, {"pp": 2, "tp": 2}, 4, device=device)
        right_value, right = pipeline_programs.dense(*pipeline_programs.arguments(schedule.stages, 4))
        pairs += [(value, right_value), *((grads[n], right[n]) for n in right)]
    for mine, right in pairs:
        assert_close(mine, right, rtol=1e-9, atol=1e-9)


def groups_of_rows(device: str) -> None:
    """Products of groups of rows in 16 and 32 bits: empty groups, rows past the last, widths of all kinds."""
    for dtype, near in ((torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 2e-3), (torch.float64, 1e-12)):
        for rows, width, columns, counts in ((24, 16, 32, [5, 0, 12, 3]), (9, 5, 7, [0, 4, 5, 0]), (4, 8, 8, [0, 0])):
            x, w = _numbers(rows, width).to(dtype), _numbers(len(counts), width, columns, seed=1).to(dtype)
            exact, leaves = (
                [y.to(to).requires_grad_() for y in (x, w)] for to in (torch.float64, torch.device(device))
            )
            ends = torch.tensor(counts).cumsum(0)
            owner = (torch.arange(rows)[:, None] >= ends).sum(1)
            one = torch.nn.functional.one_hot(owner, len(counts) + 1)[:, :-1].double()
            want = torch.einsum("tg,ta,gab->tb", one, *exact)
            found = nn.grouped_matmul(*leaves, torch.tensor(counts, device=device))
            cotangent = _numbers(rows, columns, seed=2).to(dtype)
            right = torch.autograd.grad(want, exact, cotangent.double())
            mine = torch.autograd.grad(found, leaves, cotangent.to(device))
            for a, b in zip((found, *mine), (want, *right), strict=True):
                error = float((a.detach().cpu().double() - b.detach()).norm() / b.detach().norm().clamp(min=1e-9))
                assert error < near, (dtype, rows, error)


def decoding(device: str) -> None:
    """The tokens that one device finds, eager, in replays, and in CUDA graphs."""
    for sizes, heads, kv_heads in (((1, 2, 2), 4, 2), ((1, 1, 1), 4, 1), ((2, 1, 2), 8, 2)):
        case = decoding_programs.Case(sizes, heads, kv_heads)
        for jitted in (False, "replay", *(["cudagraphs"] if device == "cuda" else [])):
            assert decoding_programs.run(case, "simulation", jitted, 3, device=device) == decoding_programs.right(case)


def random(mesh: Mesh, device: str) -> None:
    """The numbers are those of a CPU: the bits, and what is computed of them up to rounding."""
    plain = make_mesh((3,), ("x",), transport="simulation", device="cpu")
    laws: dict[str, Callable[[dict[str, Any]], Any]] = {
        "rand": lambda on: fspmd.rand(50, 7, **on),
        "rand of float64": lambda on: fspmd.rand(50, 7, dtype=torch.float64, **on),
        "rand of bfloat16": lambda on: fspmd.rand(50, 7, dtype=torch.bfloat16, **on),
        "randn": lambda on: fspmd.randn(50, 7, **on),
        "randint": lambda on: fspmd.randint(-3, 1000, (50, 7), **on),
        "randint of many": lambda on: fspmd.randint(0, 1 << 40, (50, 7), **on),
        "dropout": lambda on: F.dropout(fspmd.ones(50, 7, **on), 0.3),
        "bernoulli": lambda on: torch.bernoulli(fspmd.full((50, 7), 0.4, **on)),
        "exponential": lambda on: fspmd.ones(50, 7, **on).exponential_(),
    }
    for name, law in laws.items():
        torch.manual_seed(3)
        mine = law({"mesh": mesh, "spec": P("x")})
        torch.manual_seed(3)
        want = device_get(law({"mesh": plain, "spec": P(None, "x")}))
        _equal(mine, want, device, 1e-5 if name in ("randn", "exponential") else 0.0)


# --- where they run -------------------------------------------------------------------------------------------------


def _simulated(device: str) -> Mesh:
    return make_mesh((N,), ("x",), transport="simulation", device=device)


def _world(backend: str, rank: int, size: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")  # all on one device
    torch.distributed.init_process_group(backend)


def _port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def of_one_rank(device: str) -> None:
    """A group of one rank: NCCL on a GPU."""
    _world("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", 0, 1, _port())
    mesh = make_mesh((1,), ("x",), transport="process_group", device=device)
    collectives(mesh, device)
    for program in (model, training, layouts, random):
        program(mesh, device)
    model(mesh, device, backend="replay")
    torch.distributed.destroy_process_group()


def _on_gloo(rank: int, device: str, port: int) -> None:
    torch.set_num_threads(1)
    _world("cpu:gloo,cuda:gloo" if device == "cuda" else "gloo", rank, N, port)
    mesh = make_mesh((N,), ("x",), transport="process_group", device=device)
    failed = []
    for name in (*COLLECTIVES, "model", "layouts"):
        try:
            if name in COLLECTIVES:
                collectives(mesh, device, [name])
            else:
                {"model": model, "layouts": layouts}[name](mesh, device)
        except Exception as error:  # on all ranks alike, where Gloo does not have it on a GPU
            failed.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
        if rank == 0:
            print(name, "failed" if failed and failed[-1].startswith(name) else "right", flush=True)
    torch.distributed.destroy_process_group()
    if failed:
        raise RuntimeError("; ".join(failed))


def on_gloo(device: str) -> None:
    """Four processes with Gloo and tensors on one device."""
    processes.spawn(_on_gloo, (device, _port()), N)


def streams(device: str) -> None:
    """On a stream of its own, beside what goes on elsewhere."""
    mesh = _simulated(device)
    weights, ids = _put(mesh, device)
    want = device_get(loss(weights, ids)).cpu()
    if device != "cuda":
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = fspmd.value_and_grad(loss)(weights, ids)[0]
    torch.cuda.current_stream().wait_stream(side)
    _equal(found, want, device)


PROGRAMS: Final[dict[str, Callable[[str], None]]] = {
    "simulated collectives": lambda device: collectives(_simulated(device), device),
    "simulated model": lambda device: model(_simulated(device), device),
    "simulated training": lambda device: training(_simulated(device), device),
    "simulated recurrent layers": lambda device: recurrent(_simulated(device), device),
    "simulated layouts": lambda device: layouts(_simulated(device), device),
    "checkpoints": lambda device: checkpoints(_simulated(device), device),
    "random numbers": lambda device: random(_simulated(device), device),
    "sequences": lambda device: sequences(_simulated(device), device),
    "decoding": decoding,
    "experts, state, pipelines": parts_of_training,
    "groups of rows": groups_of_rows,
    "kernels of attention": attention_kernels,
    "sequences in 16 bits": sequences_in_16_bits,
    "replay": lambda device: model(_simulated(device), device, backend="replay"),
    "inductor": lambda device: model(_simulated(device), device, backend="inductor"),
    "CUDA graphs": lambda device: model(_simulated(device), device, backend="cudagraphs"),
    "streams": streams,
    "a group of one rank": of_one_rank,
    "Gloo on four processes": on_gloo,
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](sys.argv[2])
