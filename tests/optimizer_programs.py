"""Pure optimizers on cut parameters beside ``torch.optim`` on one device, in float64: what `test_optimizers` runs."""

import itertools
from typing import Any
from unittest.mock import patch

import optree
import torch
from torch import Tensor

from fspmd import P, device_get, device_put, jit, make_mesh, shard_map
from fspmd.nn import Optimizer, adafactor, adamw, muon
from fspmd.sharded import is_sharded

F64 = torch.float64
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    **{str(n): ((n,), ("s",)) for n in (1, 2, 3, 4, 6)},
    "2x2": ((2, 2), ("r", "s")),
    "2x3": ((2, 3), ("r", "s")),
}
#: how matrices, and how other leaves lie
LAYOUTS: dict[str, tuple[P, P]] = {
    "replicated": (P(), P()),
    "rows": (P("s"), P("s")),
    "columns": (P(None, "s"), P("s")),
    "both": (P("r", "s"), P(("r", "s"))),
}
SHAPES: dict[str, tuple[int, ...]] = {"a": (6, 4), "b": (4, 6), "c": (6, 4), "d": (5, 3), "e": (1, 7)}
OTHERS: dict[str, tuple[int, ...]] = {"v": (5,), "x": (4, 3, 5), "one": (1,)}
#: stacks of matrices, with leading dims that are cut and that are not, beside the layouts of matrices
STACKS: dict[str, tuple[int, ...]] = {"x": OTHERS["x"], "deep": (2, 3, 5, 4), "like": (2, 3, 5, 4)}
STACKED = {
    "replicated": P(),
    "rows": P(None, None, "s"),
    "columns": P(None, "s"),
    "both": P("s", None, "r"),
}
Case = tuple[str, str, str, str]  # mesh, layout, optimizer, where the state lies or whether all runs in a body


def cases() -> list[Case]:
    every = itertools.product(MESHES, LAYOUTS, ("adamw", "adafactor", "muon"), ("there", "cut", "body"))
    return [case for case in every if case[1] != "both" or "x" in case[0]]


def pair(name: str, specs: Any) -> tuple[Optimizer, Any]:
    """An optimizer, and torch's."""
    if name == "adamw":
        return adamw(0.1, (0.8, 0.95), 1e-6, 0.2, specs=specs), lambda ps: torch.optim.AdamW(
            ps, 0.1, (0.8, 0.95), 1e-6, 0.2
        )
    if name == "adafactor":
        return adafactor(0.1, -0.7, (None, 1e-2), 1.5, 0.2, specs=specs), lambda ps: torch.optim.Adafactor(
            ps, 0.1, -0.7, (None, 1e-2), 1.5, 0.2
        )
    return muon(0.1, 0.9, 0.2, dtype=None, specs=specs), _muon


def _muon(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, 0.1, 0.2, 0.9)


def torch_steps(make: Any, params: dict[str, Tensor], grads: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Parameters after steps of torch's optimizer. Its Muon iterates in bfloat16; here it stays in float64."""

    def parts(x: Tensor) -> list[Tensor]:
        """torch's Muon takes single matrices."""
        return [part.clone() for part in (x.view(-1, *x.shape[-2:]) if make is _muon and x.dim() > 2 else x[None])]

    leaves = {name: [part.requires_grad_() for part in parts(x)] for name, x in params.items()}
    optimizer = make(list(itertools.chain(*leaves.values())))
    for step in grads:
        for name, own in leaves.items():
            for x, grad in zip(own, parts(step[name]), strict=True):
                x.grad = grad
        with patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
            optimizer.step()
    return {name: torch.stack(own).detach().view_as(params[name]) for name, own in leaves.items()}


def compute(case: Case, transport: str = "simulation", jitted: bool = False) -> list[tuple[Tensor, Tensor]]:
    """The parameters after three steps, and torch's."""
    mesh_name, layout, name, where = case
    torch.manual_seed(sum(map(ord, "".join(case))))
    sizes, names = MESHES[mesh_name]
    mesh = make_mesh(sizes, names, transport=transport, device="cpu")
    shapes = {**SHAPES, **(STACKS if name == "muon" else OTHERS)}
    values = {key: torch.randn(shape, dtype=F64) for key, shape in shapes.items()}
    grads = [{key: torch.randn_like(x) * 3**i for key, x in values.items()} for i in range(3)]
    specs = {key: STACKED[layout] if len(shapes[key]) == 4 else LAYOUTS[layout][key in OTHERS] for key in values}
    (init, update), make = pair(name, P(names) if where == "cut" else None)
    params = device_put(values, specs, mesh=mesh)
    state = init(params)
    if where == "body":
        known = {key: x.spec for key, x in params.items()}
        (init, update), whole = pair(name, known)[0], state
        slots = optree.tree_map(lambda x: x.spec.partition if is_sharded(x) else P(), state, is_leaf=is_sharded)
        state = shard_map(init, mesh=mesh, in_specs=(specs,), out_specs=slots)(params)
        assert all(
            torch.equal(device_get(state[slot][key]), device_get(x))
            for slot in slots
            if slot != "step"
            for key, x in whole[slot].items()
        )
        update = shard_map(update, mesh=mesh, in_specs=(specs, slots, specs), out_specs=(specs, slots))
    lies = {slot: {key: x.spec for key, x in tree.items()} for slot, tree in state.items() if slot != "step"}
    update = jit(update) if jitted else update
    for step in grads:
        params, state = update(device_put(step, specs, mesh=mesh), state, params)
    assert {key: x.spec for key, x in params.items()} == {
        key: x.spec for key, x in device_put(values, specs, mesh=mesh).items()
    }
    assert lies == {slot: {key: x.spec for key, x in tree.items()} for slot, tree in state.items() if slot != "step"}
    right = torch_steps(make, values, grads)
    return [(device_get(params[key]), right[key]) for key in values]


def worst(cases: list[Case], jitted: bool) -> list[tuple[Case, float]]:
    """The largest error of each case on the processes of this world."""
    return [
        (case, max(float((x - y).abs().max()) for x, y in compute(case, "process_group", jitted))) for case in cases
    ]
