"""What processes run in `test_gloo`: mistakes that one rank alone could see, values put on meshes, events in time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import optree
import torch
from torch import Tensor

import fspmd
from fspmd import (
    FspmdError,
    Mesh,
    P,
    TensorSpec,
    all_gather,
    all_gather_into,
    all_to_all,
    axis_index,
    communication_log,
    device_get,
    device_put,
    from_callback,
    from_local,
    make_mesh,
    pbroadcast,
    pcast,
    pmax,
    ppermute,
    process_allgather,
    pshuffle,
    psum,
    psum_scatter,
    ragged_all_to_all,
    rank_map,
    shard_map,
)
from fspmd.pairs import call, lend
from fspmd.transport.frame import frame_over
from fspmd.transport.local_tensor import LocalTensor

# --- mistakes -------------------------------------------------------------------------------------------------------


def _on_uneven(collective: Callable[[Tensor], Any], shape: tuple[int, ...] = (5, 4)) -> Any:
    """A collective on the blocks (2, 2, 1, 0) of a dim of 5."""

    def run(mesh: Mesh) -> None:
        body = shard_map(lambda x: (collective(x), x.sum())[1], mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        body(torch.ones(shape))

    return run


def _one_group_uneven(mesh: Mesh) -> None:
    grid = make_mesh((2, 2), ("x", "y"), transport=mesh.transport, device="cpu")

    def body(x: Tensor) -> Tensor:
        odd = rank_map(lambda i: torch.ones(3 if int(i) == 3 else 2), axis_index(("x", "y")))
        return psum(odd, "y").sum() + x.sum()

    shard_map(body, mesh=grid, in_specs=P(), out_specs=P(("x",)))(torch.ones(1))


def _other_kind(make: Callable[[int], Tensor]) -> Any:
    """psum of what `make` makes of a rank's number."""

    def run(mesh: Mesh) -> None:
        def body(x: Tensor) -> Tensor:
            return psum(rank_map(lambda i: make(int(i)), axis_index("x")), "x").sum()

        shard_map(body, mesh=mesh, in_specs=P(), out_specs=P())(torch.ones(1))

    return run


def _local(make: Callable[[int], Tensor], spec: Any) -> Any:
    """from_local of what `make` makes of a rank's number."""

    def run(mesh: Mesh) -> None:
        if mesh.transport == "simulation":
            local: Tensor = LocalTensor([make(i) for i in range(4)], frame_over(mesh, ("x",)))
        else:
            local = make(torch.distributed.get_rank())
        from_local(local, spec(mesh) if callable(spec) else spec, mesh=mesh)

    return run


def _callback(mesh: Mesh) -> None:
    from_callback((8, 2), P("x"), lambda index: torch.ones(2, 2 + (index[0].start == 4)), mesh=mesh)


def _callback_dtype(mesh: Mesh) -> None:
    from_callback(
        (8,), P("x"), lambda i: torch.ones(2, dtype=torch.float64 if i[0].start == 4 else torch.float32), mesh=mesh
    )


def _result(mesh: Mesh) -> None:
    """Blocks of 1, 2, 2 and 2, which torch.chunk would not make."""

    def body(x: Tensor) -> Any:
        return rank_map(lambda i: torch.ones(1 if int(i) == 0 else 2), axis_index("x"))

    shard_map(body, mesh=mesh, in_specs=P(), out_specs=P("x"))(torch.ones(1))


def _float8(collective: Callable[[Tensor], Any]) -> Any:
    def run(mesh: Mesh) -> None:
        def body(x: Tensor) -> Tensor:
            collective(x.to(torch.float8_e5m2))
            return x

        shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(torch.ones(16))

    return run


@torch.library.custom_op("fspmd_mistakes::write", mutates_args=("x",))
def _write(x: Tensor, by: Tensor) -> None:
    x.copy_(by)


@torch.library.custom_op("fspmd_mistakes::neg", mutates_args=())
def _linear_by_name(x: Tensor) -> Tensor:
    return x.abs()


_OPS = torch.ops.fspmd_mistakes


def _write_by(write: Callable[[Tensor, Tensor], Any]) -> Any:
    """Into a value that is equal on all ranks, of one that is not."""

    def run(mesh: Mesh) -> None:
        def body(w: Tensor, x: Tensor) -> Tensor:
            whole = w * 1
            write(whole, x)
            return whole

        shard_map(body, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())(torch.ones(2), torch.arange(8.0))

    return run


def _no_sum(function: Callable[[Tensor], Tensor]) -> Any:
    """Of a pending sum."""

    def run(mesh: Mesh) -> None:
        def body(x: Tensor) -> Tensor:
            return function(pcast(x, "x", to="unreduced"))

        shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P(unreduced={"x"}))(torch.arange(4.0) - 2)

    return run


def _ragged(change: Callable[[int, list[Tensor]], None], odd: bool = False) -> Any:
    """An exchange of one row with each rank, after ``change`` of a rank's four lists of numbers."""

    def run(mesh: Mesh) -> None:
        def numbers(index: Tensor) -> Tensor:
            rows = [torch.arange(4), torch.ones(4), int(index) * torch.ones(4), torch.ones(4)]
            change(int(index), rows)
            return torch.stack(rows).long()

        def body(x: Tensor) -> Tensor:
            operand = rank_map(lambda i: torch.ones(4, 2 + (odd and int(i) == 1)), axis_index("x"))
            lists = rank_map(numbers, axis_index("x")).unbind(0)
            return ragged_all_to_all(operand, operand.new_zeros(4, 2), *lists, axis_name="x").sum() + x.sum()

        shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(torch.ones(4))

    return run


def _set(rank: int, which: int, place: int, value: int) -> Callable[[int, list[Tensor]], None]:
    def change(index: int, rows: list[Tensor]) -> None:
        if index == rank:
            rows[which][place] = value

    return change


def _put(tree: Any, specs: Any, src: int | None = None) -> Any:
    def run(mesh: Mesh) -> None:
        device_put(tree, specs, mesh=mesh, src=src)

    return run


_RING = [(i, (i + 1) % 4) for i in range(4)]


def _sparse_gradient(mesh: Mesh) -> None:
    def loss(w: Tensor, i: Tensor) -> Tensor:
        return psum(torch.nn.functional.embedding(i, w, sparse=True).square().sum(), "x")

    f = shard_map(loss, mesh=mesh, in_specs=(P(), P("x")), out_specs=P())
    fspmd.grad(f)(torch.ones(5, 3), torch.arange(4))


#: what goes wrong on some ranks only, or on all
MISTAKES: dict[str, Callable[[Mesh], None]] = {
    "psum": _on_uneven(lambda x: psum(x, "x")),
    "psum of a tree": _on_uneven(lambda x: psum({"a": x.sum(), "b": [x]}, "x")),
    "pmax": _on_uneven(lambda x: pmax(x, "x")),
    "psum without waiting": _on_uneven(lambda x: psum(x, "x", wait=False).wait()),
    "gather stacked": _on_uneven(lambda x: all_gather(x, "x")),
    "gather tiled": _on_uneven(lambda x: all_gather(x, "x", tiled=True)),
    "gather of another size": _on_uneven(lambda x: all_gather(x, "x", tiled=True, size=6)),
    "gather of an even size": _on_uneven(lambda x: all_gather(x, "x", tiled=True, size=8)),
    "gather of a smaller size": _on_uneven(lambda x: all_gather(x, "x", tiled=True, size=4)),
    "gather along another dim": _on_uneven(lambda x: all_gather(x, "x", tiled=True, axis=1, size=16)),
    "gather of even blocks": _on_uneven(lambda x: all_gather(x, "x", tiled=True, size=5), shape=(8, 4)),
    "scatter": _on_uneven(lambda x: psum_scatter(x, "x", tiled=True)),
    "scatter along the other dim": _on_uneven(lambda x: psum_scatter(x, "x", scatter_dimension=1, tiled=True)),
    "scatter of a size": _on_uneven(lambda x: psum_scatter(x, "x", tiled=True, size=2)),
    "all to all": _on_uneven(lambda x: all_to_all(x, "x", 1, 0, tiled=True)),
    "all to all of another size": _on_uneven(lambda x: all_to_all(x, "x", 1, 0, tiled=True, size=7)),
    "all to all of uneven splits": _on_uneven(lambda x: all_to_all(x, "x", 0, 1, tiled=True, size=16)),
    "all to all of a split": _on_uneven(lambda x: all_to_all(x, "x", 0, 1, tiled=True)),
    "permute": _on_uneven(lambda x: ppermute(x, "x", _RING)),
    "shuffle": _on_uneven(lambda x: pshuffle(x, "x", [3, 2, 1, 0])),
    "broadcast": _on_uneven(lambda x: pbroadcast(x, "x", 0)),
    "gather into": _on_uneven(lambda x: all_gather_into(x.new_empty(5, 4), x, "x")),
    "one group of two": _one_group_uneven,
    "dtype of one rank": _other_kind(lambda i: torch.ones(2, dtype=torch.float64 if i == 2 else torch.float32)),
    "dims of one rank": _other_kind(lambda i: torch.ones(2, 1) if i == 2 else torch.ones(2)),
    "local shape": _local(lambda i: torch.ones(3 if i == 2 else 2), P("x")),
    "local shape of another dim": _local(lambda i: torch.ones(2, 3 if i == 2 else 2), P("x")),
    "local shape of a copy": _local(lambda i: torch.ones(3 if i == 3 else 2), P()),
    "local shape of a spec": _local(
        lambda i: torch.ones(2), lambda mesh: TensorSpec(mesh, P("x"), (6,), torch.float32)
    ),
    "callback shape": _callback,
    "callback dtype": _callback_dtype,
    "result blocks": _result,
    "float8 psum": _float8(lambda x: psum(x, "x")),
    "float8 pmax": _float8(lambda x: pmax(x, "x")),
    "float8 scatter": _float8(lambda x: psum_scatter(x, "x", tiled=True)),
    "ragged offset outside": _ragged(_set(2, 0, 1, 4)),
    "ragged sizes that differ": _ragged(_set(1, 1, 3, 0)),
    "ragged place outside": _ragged(_set(3, 2, 0, 4)),
    "ragged received size": _ragged(_set(3, 3, 0, 2)),
    "ragged rows of other lengths": _ragged(_set(0, 0, 0, 0), odd=True),
    "write by an op": _write_by(_OPS.write),
    "write by an op's overload": _write_by(_OPS.write.default),
    "write by an op, by name": _write_by(lambda w, x: _OPS.write(by=x, x=w)),
    "write by name": _write_by(lambda w, x: torch.clamp_(input=w, min=x)),
    "no sum of an op": _no_sum(_OPS.neg),
    "no sum of an op's overload": _no_sum(_OPS.neg.default),
    "put of a long spec": _put({"w": torch.ones(4)}, P(None, "x")),
    "put of an unknown axis": _put(torch.ones(4), P("z")),
    "put from a rank outside": _put(torch.ones(4), P("x"), src=9),
    "put from one rank of a long spec": _put({"w": torch.ones(4)}, P(None, "x"), src=2),
    "put from one rank of another tree": _put({"w": torch.ones(4)}, {"v": P("x")}, src=1),
}
#: mistakes that a simulation cannot make: its blocks are one tensor
ONLY_PROCESSES: dict[str, Callable[[Mesh], None]] = {
    "local dtype": _local(lambda i: torch.ones(2, dtype=torch.float64 if i == 1 else torch.float32), P("x")),
    "local dims": _local(lambda i: torch.ones(2, 1) if i == 1 else torch.ones(2), P("x")),
    "sparse gradient": _sparse_gradient,
}
#: what a simulation refuses already where the blocks are made
SEEN_EARLIER = {"dtype of one rank", "dims of one rank"}


def complaint(mistake: Callable[[Mesh], None], transport: str) -> str:
    """What a mistake raises; then a psum that shows whether ranks are still in step."""
    mesh = make_mesh((4,), ("x",), transport=transport, device="cpu")
    try:
        mistake(mesh)
        text = "nothing was raised"
    except FspmdError as error:
        text = f"{type(error).__name__}: {error}"
    total = shard_map(lambda x: psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P())(torch.arange(4.0))
    assert fspmd.device_get(total).tolist() == [6.0]
    return text


def complaints(names: list[str]) -> list[str]:
    """The errors of mistakes, by name, on this process."""
    return [complaint({**MISTAKES, **ONLY_PROCESSES}[name], "process_group") for name in names]


# --- tangents without memory ----------------------------------------------------------------------------------------


def zeros_travel() -> list[float]:
    """What each moving collective makes of a product with a forward-mode tangent of zeros, which has no memory."""
    calls: list[Callable[[Tensor], Any]] = [
        lambda t: all_gather(t, "x"),
        lambda t: all_gather(t, "x", axis=1),
        lambda t: psum_scatter(t, "x", tiled=True),
        lambda t: all_to_all(t, "x", 0, 0, tiled=True),
        lambda t: ppermute(t, "x", [(0, 1), (1, 2)]),
    ]

    def body(x: Tensor) -> Any:
        t = x * torch._efficientzerotensor(x.shape)
        return tuple(psum(call(t).sum() + x.sum(), "x") for call in calls)

    mesh = make_mesh((4,), ("x",), transport="process_group", device="cpu")
    results = shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P())(torch.ones(16, 2))
    return [result.local.item() for result in results]


# --- gradients of gradients where blocks are empty ------------------------------------------------------------------


def convolved_thrice_differentiated(mesh: Mesh | None, check: bool) -> list[float]:
    """Of 5 numbers, on 4 ranks 2, 2, 1 and 0: torch cuts off the graph of a gradient of an empty convolution."""
    x = torch.linspace(0.5, 1.7, 5, dtype=torch.float64)
    total: Callable[[Tensor], Tensor] = torch.sum if mesh is None else lambda x: psum(x.sum(), "x")

    def body(x: Tensor) -> Tensor:
        rows = (x * total(x))[:, None, None].expand(-1, 1, 3)
        return x * total(torch.nn.functional.conv1d(rows, rows.new_ones(1, 1, 3)).flatten() ** 2)

    f: Callable[[Any], Any] = body
    if mesh is not None:
        f = shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=check)

    def squares(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda x: (f(x) ** 2).sum()

    gradient = fspmd.grad(squares(fspmd.grad(squares(fspmd.grad(squares(f))))))
    return fspmd.device_get(gradient(x if mesh is None else device_put(x, P("x"), mesh=mesh))).tolist()


def convolved_on_processes(check: bool) -> list[float]:
    return convolved_thrice_differentiated(make_mesh((4,), ("x",), transport="process_group", device="cpu"), check)


# --- leaves that are cast for their gradients -----------------------------------------------------------------------


def _weight_and_batch() -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(0)
    w, x = (torch.randn(shape, generator=numbers, dtype=torch.float64) for shape in ((5, 3), (7, 5)))
    return w, x


def _used_twice(w: Any, x: Any) -> Any:
    return ((x @ w).tanh() * (x @ w)).square().sum()


def leaves_differentiated() -> list[Any]:
    """The loss, its gradient, a gradient of that, and that of a closed over factor 1 of both; by torch alone."""
    w, x = _weight_and_batch()
    first, value = torch.func.grad_and_value(_used_twice)(w, x)
    again = torch.func.grad(lambda w: torch.func.grad(_used_twice)(w, x).square().sum())(w)
    return [one.tolist() for one in (value, first, again, value + first.sum(), 4 * first)]


def leaves_on_processes(*specs: P) -> tuple[list[Any], int]:
    """The same of a weight and a batch that lie so; and how often a gradient of the weight communicates."""
    mesh = make_mesh((4,), ("x",), transport="process_group", device="cpu")
    w, x = (device_put(one, p, mesh=mesh) for one, p in zip(_weight_and_batch(), specs, strict=True))
    c = device_put(torch.ones((), dtype=torch.float64), P(), mesh=mesh).requires_grad_()
    value, first = fspmd.value_and_grad(_used_twice)(w, x)
    again = fspmd.grad(lambda w: fspmd.grad(_used_twice)(w, x).square().sum())(w)
    scaled, gradient = fspmd.value_and_grad(lambda w: _used_twice(w, x) * c)(w)
    (scaled + gradient.sum()).backward()
    leaf = w.detach().requires_grad_()
    total = _used_twice(leaf, x) + _used_twice(leaf, x)
    total.backward(retain_graph=True)
    total.backward()
    with fspmd.communication_log() as log:
        fspmd.grad(_used_twice)(w, x)
    return [fspmd.device_get(one).tolist() for one in (value, first, again, c.grad, leaf.grad)], len(log)


def ended_sum_hooked_and_written() -> tuple[list[Any], list[Any]]:
    """Gradients by way of an ended sum that a hook scales and that is written into; the same by torch alone."""
    found = []
    for specs in ((P(None, "x"), P("x")), None):
        w, x = _weight_and_batch()
        if specs is not None:
            mesh = make_mesh((4,), ("x",), transport="process_group", device="cpu")
            x, w = (device_put(one, p, mesh=mesh) for one, p in zip((x, w), specs, strict=True))
        x.requires_grad_()
        y = x @ w
        y = y if specs is None else fspmd.reshard(y, P())
        y.register_hook(lambda g: 2 * g)
        y.mul_(3)
        y.square().sum().backward()
        found.append([one.tolist() for one in map(fspmd.device_get, (y.detach(), x.grad))])
    return found[0], found[1]


class _Cut(torch.autograd.Function):
    """The identity, whose gradient some ranks have."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: tuple[int, ...]) -> Tensor:
        ctx.ranks = ranks
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None]:
        return (g if torch.distributed.get_rank() in ctx.ranks else None), None


def lent_without_a_gradient(ranks: tuple[int, ...], watcher: Callable[[], AbstractContextManager[Any]]) -> str:
    """Whoever has no gradient takes part in the sum of the others all the same, and says so if there are any."""
    mesh = make_mesh((4,), ("x",), transport="process_group", device="cpu")
    x = torch.ones((), requires_grad=True)
    with watcher():
        y = _Cut.apply(lend(x, call("invariant_to_varying", mesh, ("x",))), ranks)
        try:
            y.backward()
        except FspmdError as error:
            return str(error)
    return str(x.grad)


def cut_off_in(where: str, ranks: tuple[int, ...]) -> list[float | None]:
    """Sums of the gradients of a batch and a weight, of a Function that gives None on other ranks."""
    mesh = make_mesh((4,), ("x",), transport="process_group", device="cpu")
    x = device_put(torch.linspace(0, 1, 48, dtype=torch.float64).view(8, 6), P("x"), mesh=mesh).requires_grad_()
    w = device_put(torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3), P(), mesh=mesh).requires_grad_()
    if where == "rule":
        out = fspmd.rule(lambda y: _Cut.apply(y, ranks), "m n -> m n")(x @ w).sin().sum()
    else:
        body = lambda x, w: psum(_Cut.apply(x @ w, ranks).sin().sum(), "x")  # noqa: E731
        checks = where == "checked"
        out = shard_map(body, mesh=mesh, in_specs=(P("x"), P()), out_specs=P(), check_vma=checks)(x, w)
    out.backward()
    return [None if one.grad is None else float(one.grad.local.sum()) for one in (x, w)]


# --- what is remembered -----------------------------------------------------------------------------------------------


def settled_whatever_the_garbage() -> list[tuple[int, int]]:
    """A pending sum with uses of which some are garbage in cycles, which one rank alone collects: what is sent."""
    mesh = make_mesh((4,), ("x",), device="cpu")
    w = device_put(torch.linspace(-1, 1, 42, dtype=torch.float64).view(6, 7), P(None, "x"), mesh=mesh).requires_grad_()
    x = torch.linspace(0, 1, 30, dtype=torch.float64).view(5, 6).requires_grad_()
    counts = []
    for _ in range(2):
        with communication_log() as log:
            y = torch.tanh(x @ w) @ w.mT
            held: list[Any] = [torch.sin(y)]
            held.append(held)
            del held
            if mesh.coordinate() == (0,):
                gc.collect()
            torch.autograd.grad((torch.cos(y) + y.exp()).sum(), [w, x])
        counts.append((len(log.forward), len(log.backward)))
    return counts


# --- what takes lists of parameters ---------------------------------------------------------------------------------


def clipped_and_stepped(placed: bool) -> tuple[float, list[list[float]]]:
    """Two steps of a fused optimizer on the leaves of a tree, clipped by the norm of all gradients."""
    torch.manual_seed(0)
    params: Any = {"w": torch.randn(5, 3), "b": torch.randn(4), "whole": torch.randn(3)}
    if placed:
        params = device_put(
            params, {"w": P("x"), "b": P("x"), "whole": P()}, mesh=make_mesh((4,), ("x",), device="cpu")
        )
    leaves: list[Any] = [x.requires_grad_() for x in optree.tree_leaves(params)]
    optimizer = torch.optim.AdamW(leaves, lr=0.1, fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        sum((x**3).sum() for x in leaves).backward()  # type: ignore[union-attr]
        norm: Any = torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        optimizer.step()
    with torch.no_grad():
        return float(norm), [x.flatten().tolist() for x in leaves]


def tables_beside_a_batch() -> tuple[list[str], float]:
    """A table looked up for a whole batch, beside its cut: what its gradient sends, and how far it is from torch's."""
    mesh = make_mesh((4,), ("x",), device="cpu")
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(8, 900, 64, generator=numbers, dtype=torch.float64)
    w, ids = torch.randn(2, 64, generator=numbers, dtype=torch.float64), torch.arange(7200).view(8, 900) % 2
    found = []
    with communication_log() as log:
        for batch, leaf in ((device_put(x, P("x"), mesh=mesh), device_put(w, P(), mesh=mesh)), (x, w.clone())):
            leaf.requires_grad_()
            out = batch * torch.nn.functional.embedding(ids, leaf)
            found.append(torch.autograd.grad(out.sin().sum(), leaf)[0])
    return [one.kind for one in log], float((fspmd.device_get(found[0]) - found[1]).abs().max())


def steps_of_training() -> float:
    """How far parameters are from those of one device, where a step's result lives until the next one's is there."""
    mesh = make_mesh((2, 2), ("x", "y"), device="cpu")
    given = torch.Generator().manual_seed(0)
    x, y = (torch.randn(12, n, generator=given, dtype=torch.float64) for n in (6, 5))
    whole = [torch.randn(shape, generator=given, dtype=torch.float64) for shape in ((6, 8), (8,), (8, 5), (5,))]
    specs = [P(None, "y"), P("y"), P("y"), P()]

    def trained(params: list[Any], x: Any, y: Any) -> list[Any]:
        params = [p.detach().clone().requires_grad_() for p in params]
        optimizer = torch.optim.SGD(params, lr=0.1)
        for _ in range(3):
            up, up_bias, down, bias = params
            out = torch.nn.functional.gelu(x @ up + up_bias) @ down + bias
            (out - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in params]

    expected = trained(whole, x, y)
    found = trained(device_put(whole, specs, mesh=mesh), *device_put((x, y), P("x"), mesh=mesh))
    gathered = [process_allgather(one.local) for one in found]  # replicas must not differ
    assert all(torch.equal(one[:2], one[2:]) for one in gathered)
    return max(float((a - b).abs().max()) for a, b in zip(device_get(found), expected, strict=True))


def complaints_outside_a_mesh() -> list[str]:
    """Of functions that need to know where this process is; on members they run."""
    whole, pair = (make_mesh((n,), ("x",), device="cpu") for n in (4, 2))
    x = fspmd.reshard(device_put(torch.arange(32.0).view(8, 4), P("x"), mesh=whole), P("x"), mesh=pair)
    said = []
    for f in (lambda x: torch.cat([x, x]), lambda x: x.flip(0), lambda x: x.view(4, 8), torch.rand_like):
        try:
            f(x)
        except fspmd.MeshError as error:
            said.append(str(error))
    return said


# --- the functions of Python that a step calls ------------------------------------------------------------------------


def _functions(kind: type) -> list[type]:
    return [each for child in kind.__subclasses__() for each in (child, *_functions(child))]


def functions_of_a_step(biased: bool) -> list[str]:
    """The forwards of `torch.autograd.Function` in a step of two layers, by columns and then rows, of a cut batch."""
    mesh = make_mesh((2, 2), ("dp", "tp"), device="cpu")
    specs, shapes = [P(None, "tp"), P("tp"), P("tp"), P()], [(6, 8), (8, 6), (8,), (6,)]
    count = 4 if biased else 2
    params = device_put([torch.ones(shape) for shape in shapes[:count]], specs[:count], mesh=mesh)
    x = device_put(torch.ones(4, 6), P("dp"), mesh=mesh)

    def loss(params: list[Any], x: Any) -> Any:
        hidden = torch.relu(torch.addmm(params[2], x, params[0]) if biased else x @ params[0])
        return (hidden @ params[1] + (params[3] if biased else 0)).square().mean()

    step = fspmd.value_and_grad(loss)
    step(params, x)
    codes = {
        method.__code__: f"{kind.__module__}.{kind.__name__}"
        for kind in _functions(torch.autograd.Function)
        if hasattr(method := getattr(kind.__dict__.get("forward"), "__func__", None), "__code__")
    }
    called: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in codes:
            called.append(codes[frame.f_code])

    sys.setprofile(note)
    try:
        step(params, x)
    finally:
        sys.setprofile(None)
    return called
