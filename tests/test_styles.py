"""What styles act on, and what is told of those that act on nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from fspmd import (
    ColwiseParallel,
    FspmdError,
    P,
    PrepareInput,
    PrepareOutput,
    RowwiseParallel,
    Sharded,
    Style,
    VocabParallel,
    communication_log,
    device_get,
    device_put,
    functional_call,
    make_mesh,
    parallelize,
)

F64 = torch.float64
LINE = make_mesh((4,), ("tp",), transport="simulation")
GRID = make_mesh((2, 3), ("data", "tp"), transport="simulation")
IDS = torch.tensor([[1, 2, 10, 0], [0, 2, 5, 6]])


class Shared(nn.Module):
    """An embedding that two others and the head share, as in T5; the first is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(11, 6)
        self.encoder, self.decoder = (nn.ModuleDict({"embed": nn.Embedding(11, 6)}) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.mix = nn.Linear(6, 6)
        for user in (self.encoder["embed"], self.decoder["embed"], self.head):
            user.weight = self.shared.weight

    def forward(self, ids: Any) -> Any:
        x = torch.tanh(self.mix(self.encoder["embed"](ids))) + torch.sin(self.decoder["embed"](ids))
        return self.head(x)


@pytest.mark.parametrize("mesh", [LINE, GRID])
def test_a_style_on_a_tied_parameter_acts_at_each_module_that_uses_it(mesh: Any) -> None:
    torch.manual_seed(0)
    module = Shared().to(F64)
    expected = module(IDS).sin().sum()
    expected.backward()
    params, plan = parallelize(dict(module.named_parameters()), {"shared": VocabParallel()}, mesh, axis="tp")
    with communication_log() as log, warnings.catch_warnings():
        warnings.simplefilter("error")
        out = functional_call(
            module, params, device_put(IDS, P(mesh.axis_names[0]) if mesh is GRID else P(), mesh=mesh), styles=plan
        )
        assert [(c.kind, c.axes) for c in log] == [("psum_unreduced", ("tp",))] * 2
        out.sin().sum().backward()
    torch.testing.assert_close(device_get(out), module(IDS))
    for name, x in module.named_parameters():
        torch.testing.assert_close(device_get(params[name].grad), x.grad, msg=name)
    own = {"shared": VocabParallel(), "head": PrepareOutput(output="replicated")}
    params, plan = parallelize(dict(module.named_parameters()), own, mesh, axis="tp")
    assert functional_call(module, params, IDS, styles=plan).spec.partition.axes == set()  # its own is all


class Named(nn.Module):
    """Calls its part by names, or by places."""

    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.by_name, self.part = by_name, Part()

    def forward(self, x: Any) -> Any:
        return self.part(scale=x * 2, x=x) if self.by_name else self.part(x, x * 2)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, x: Any, scale: Any) -> Any:
        self.seen += [x.spec.partition, scale.spec.partition]
        return x * scale


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize(
    ("style", "seen"),
    [
        (PrepareInput(input=0), [P("tp", None), P()]),
        (PrepareInput(input=(0, 1)), [P("tp", None), P(None, "tp")]),
        (PrepareInput(kwargs={"scale": 1}), [P(), P(None, "tp")]),
    ],
)
def test_arguments_come_by_name_or_place(style: Style, seen: list[P], by_name: bool) -> None:
    module = Named(by_name)
    _, plan = parallelize({}, {"part": style}, LINE)
    x = torch.arange(12.0).view(4, 3)
    out = functional_call(module, {}, device_put(x, P(), mesh=LINE), styles=plan)
    assert isinstance(out, Sharded)
    torch.testing.assert_close(device_get(out), x * x * 2)
    assert [P(*x) for x in module.part.seen] == [P(*x, *(None,) * (2 - len(x))) for x in seen]


def said(styles: Mapping[str, Style], module: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(6, 8))) -> str:
    """What is told of styles: an error, or warnings."""
    made = module()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            params, plan = parallelize(dict(made.named_parameters()), styles, LINE)
            x = torch.ones(4, 6)
            for _ in range(2):  # told once
                functional_call(made, params, x, styles=plan)
    except FspmdError as error:
        return str(error)
    return "\n".join(str(one.message) for one in caught)


def test_what_changes_nothing_is_told() -> None:
    assert said({"0": ColwiseParallel()}) == ""
    assert said({"0": ColwiseParallel(), "0.weight": Style(weight=-1)}) == ""
    assert said({"0": Style(weight=-1, vector="replicated"), "**": ColwiseParallel()}) == (
        "parallelize: the style at '0' (Style) changes nothing, because later patterns decide all leaves that it "
        "matches; leave it out, or write it after them"
    )
    assert said({"0.weight": ColwiseParallel()}) == (
        "styles: no module at '0.weight' (ColwiseParallel) was called, so its input, kwargs and output have changed "
        "nothing; write the pattern of a module that is called, or leave them out: Style(weight=..., vector=...)"
    )
    assert said({"0": ColwiseParallel(), "*": RowwiseParallel()}) == (
        "styles: the style at '0' (ColwiseParallel) changes nothing, because later patterns decide all leaves and "
        "values that it matches; leave it out, or write it after them"
    )
    assert said({"*": RowwiseParallel(), "0": PrepareInput(input=-1)}) == ""
    assert said({"0": PrepareInput(input="replicated"), "?": PrepareInput(input=-1), "**": Style(weight=1)}) == (
        "styles: the style at '0' (PrepareInput) changes nothing, because later patterns decide all leaves and values "
        "that it matches; leave it out, or write it after them"
    )
    assert said({"0": PrepareInput()}) == (
        "parallelize: styles do not fit\n  * '0' (PrepareInput) has no layout; give it input=, output= or specs="
    )
    assert said({"0": RowwiseParallel(specs={"wieght": 0})}) == (
        "parallelize: styles do not fit\n"
        "  * '0' (RowwiseParallel): 'wieght' in specs matches nothing; near it: 'weight'"
    )
    assert said({"0": PrepareInput(kwargs={"inputs": 0})}) == (
        "functional_call of Sequential: styles do not fit the module\n"
        "  * '0': forward of Linear has no argument 'inputs', which kwargs lays out; near it: 'input'"
    )
    assert said({"1": PrepareInput(input=0)}) == (
        "functional_call of Sequential: styles do not fit the module\n  * no module at '1'; it has '0'"
    )
