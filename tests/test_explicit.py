"""explicit: what a torch function communicates by itself raises, with all that is needed to write it; nothing else."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from processes import Processes
from simulated import F64, layouts
from torch import Tensor
from torch.nn import functional as F

import fspmd
from fspmd import (
    ArgumentError,
    CommunicationError,
    GradientSumWarning,
    ImplicitCommunicationWarning,
    P,
    communication_log,
    device_get,
    device_put,
    explicit,
    functional_call,
    make_mesh,
    pairs,
    psum,
    reshard,
    set_default,
    set_mesh,
    shard_map,
)

LINE = make_mesh((4,), ("x",), transport="simulation")
GRID = make_mesh((2, 2), ("x", "y"), transport="simulation")


def put(*shape: int, spec: P = P(), mesh: Any = LINE, grad: bool = True) -> Any:  # noqa: B008
    generator = torch.Generator().manual_seed(sum(shape))
    return device_put(torch.randn(shape, generator=generator, dtype=F64), spec, mesh=mesh).requires_grad_(grad)


def refusal(f: Callable[[], Any]) -> str:
    """The message, without the number of the line."""
    with communication_log() as log, explicit(), pytest.raises(CommunicationError) as info:
        f()
    assert not log
    first, *others = str(info.value).splitlines()
    head, _, place = first.partition(" (test_explicit.py:")
    assert place.lstrip("0123456789")[0] in "),"
    return "\n".join([head + place.lstrip("0123456789").removesuffix(")"), *others])


# --- what is told ---------------------------------------------------------------------------------------------------


def test_a_pending_sum_that_must_be_settled() -> None:
    x, w = put(8, 4, spec=P(None, "x")), put(4, 2, spec=P("x"))
    y = x @ w
    assert refusal(lambda: torch.relu(y)) == (
        "torch.relu(y) communicates, which is not written\n"
        "  y: f64[8, 2]{U:x} → f64[8, 2] [psum_unreduced over 'x', 192 B, 16 µs]\n"
        "write y = reshard(y, P())"
    )


def test_operands_that_lie_differently() -> None:
    x, y = put(8, 4, spec=P("x")), put(8, 4, spec=P(None, "x"))
    assert refusal(lambda: x * y) == (
        "x * y communicates, which is not written\n"
        "  y: f64[8, 4@x] → f64[8@x, 4] [all_to_all over 'x', 48 B, 13 µs]\n"
        "other ways:\n"
        "  1. f64[8, 4@x], f64[8, 4@x] → f64[8, 4@x] [48 B, 13 µs]\n"
        "write y = reshard(y, P('x'))"
    )


def test_operands_that_a_function_only_compares_have_no_gradient() -> None:
    x, target = put(8, 3, spec=P("x")), put(8, 3)
    with explicit():
        losses = [F.hinge_embedding_loss(x, target, reduction=r) for r in ("mean", "sum", "none")]
    with communication_log() as log:
        losses[2].sum().backward()
    assert not log
    assert target.grad is None
    assert "in backward" in refusal(lambda: F.margin_ranking_loss(x, x, put(8, 3), reduction="none"))


def test_what_backward_will_do_is_told_forward() -> None:
    x, w = put(6, 4), put(4, 8, spec=P(None, "x"))
    assert refusal(lambda: F.linear(x, w.T)) == (
        "F.linear(x, w.T) communicates, which is not written\n"
        "  x: f64[6, 4] → f64[6, 4]{R:x} [in backward psum over 'x', 288 B, 16 µs]\n"
        "other ways:\n"
        "  1. f64[6, 4], f64[8, 4] → f64[6, 8] [192 B, 13 µs]\n"
        "write x = reshard(x, P(reduced={'x'}))"
    )
    with explicit(), torch.no_grad():
        assert (x @ w).spec.partition == P(None, "x")
    with explicit(), communication_log() as log:
        y = reshard(x, P(reduced={"x"})) @ w
        y.sum().backward()
    assert [(one.kind, one.cause.what) for one in log] == [("psum_unreduced", "reshard")]


def test_what_depends_on_values_gathers() -> None:
    x = put(4, 8, spec=P("x"))
    assert refusal(lambda: torch.nonzero(x)) == (
        "torch.nonzero(x) communicates, which is not written\n"
        "  it runs on global tensors, since its result depends on values\n"
        "  x: f64[4@x, 8] → f64[4, 8] [all_gather_invariant over 'x', 192 B, 13 µs]\n"
        "write x = reshard(x, P())"
    )
    assert refusal(lambda: x.sum().item()) == (
        "x.sum().item() communicates, which is not written\n"
        "  it runs on global tensors, since its result depends on values\n"
        "  x.sum(): f64[]{U:x} → f64[] [psum_unreduced over 'x', 12 B, 16 µs]\n"
        "write reshard(x.sum(), P()) for x.sum()"
    )
    for f in (lambda: torch.unique(x), lambda: x[x > 0], lambda: float(x.sum()), lambda: x.sum().tolist()):
        assert "it runs on global tensors" in refusal(f) or "x[x > 0]" in refusal(f)


def test_a_sharded_body_is_one_of_the_ways() -> None:
    x = put(2048, 2048, spec=P(None, "x"), grad=False)
    assert refusal(lambda: F.softmax(x, 1)) == (
        "F.softmax(x, 1) communicates, which is not written\n"
        "  a sharded body, 32.1 µs of collectives\n"
        "other ways:\n"
        "  1. f64[2048, 2048] → f64[2048, 2048] [25,165,824 B, 82.9 µs]\n"
        'write with explicit("off"): F.softmax(x, 1), or x = reshard(x, P())'
    )


def test_a_body_that_communicates_is_allowed_where_the_line_to_paste_says_so() -> None:
    x = put(2048, 2048, spec=P(None, "x"), grad=False)

    def written() -> Any:
        y = F.softmax(x, 1)
        return y

    advice = refusal(written).splitlines()[-1].removeprefix("write ")
    assert advice == 'with explicit("off"): y = F.softmax(x, 1), or x = reshard(x, P())'
    within, _, before = advice.partition(", or ")
    known: dict[str, Any] = {"x": x, "F": F, "explicit": explicit, "reshard": reshard, "P": P}
    for line in (within, f"{before}; y = F.softmax(x, 1)"):
        with explicit():
            exec(line, known)
        torch.testing.assert_close(device_get(known["y"]), device_get(x).softmax(1))


def test_parameters_of_a_module_are_named() -> None:
    layer = torch.nn.Linear(4, 4, dtype=F64)
    params = {name: device_put(p.detach(), P(), mesh=LINE).requires_grad_() for name, p in layer.named_parameters()}
    x = put(8, 4, spec=P("x"), grad=False)
    message = refusal(lambda: functional_call(layer, params, x))
    assert message.startswith("functional_call(layer, params, x) communicates, which is not written, in linear()\n")
    assert "  params['weight']: f64[4, 4] → f64[4, 4]{R:x} [in backward psum over 'x', 192 B, 16 µs]\n" in message
    assert message.endswith(
        "write params['weight'] = reshard(params['weight'], P(reduced={'x'})); "
        "params['bias'] = reshard(params['bias'], P(reduced={'x'}))"
    )


def test_the_line_to_paste_names_what_the_call_reads() -> None:
    """Not another variable with the same tensor, which can be assigned to without an effect on the call."""
    x = put(8, 4, spec=P("x"), grad=False)
    tree, pair, other = {"a": x}, (x, 1), x
    calls: dict[str, Callable[[], Any]] = {
        "tree['a'] = reshard(tree['a'], P())": lambda: (x, torch.std(tree["a"], 0))[1],
        "tree['a'] = reshard(tree['a'], P()) ": lambda: (x, torch.std(input=tree["a"], dim=0))[1],
        "reshard(pair[0], P()) for pair[0]": lambda: (x, torch.std(pair[0], 0))[1],
        "other = reshard(other, P())": lambda: (x, torch.std(other, 0))[1],
    }
    for advice, call in calls.items():
        assert refusal(call).endswith(f"write {advice.strip()}")


def test_names_are_found_beside_what_is_no_tree_of_parameters() -> None:
    tree: dict[str, Any] = {"none": None, "w": [put(8, 4, spec=P("x")), None]}
    around: list[Any] = [1]
    around.append(around)
    assert "write tree['w'][0] = reshard(tree['w'][0], P())" in refusal(lambda: around and tree["w"][0].std(0))


def test_a_part_of_a_function_is_named() -> None:
    x, y = put(8, 4, spec=P("x"), grad=False), put(8, 4, spec=P(None, "x"), grad=False)
    message = refusal(lambda: F.mse_loss(x, y))
    first = "F.mse_loss(x, y) communicates, which is not written\n  in mse_loss(), which it is made of\n"
    assert message.startswith(first)
    assert "[all_to_all over 'x', 48 B, 13 µs]" in message
    assert message.splitlines()[-1] == "write y = reshard(y, P('x'))"


# --- what the advice is worth ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", [LINE, GRID], ids=["line", "grid"])
def test_the_line_to_paste_makes_it_explicit(mesh: Any) -> None:
    """For every pair of layouts: after what the message says to write, the same call passes and gives the same."""
    refused = 0
    for left in layouts(mesh, 2)[:: 1 if mesh is LINE else 7]:
        for right in layouts(mesh, 2)[:: 1 if mesh is LINE else 11]:
            x, w = put(6, 4, spec=left, mesh=mesh), put(4, 5, spec=right, mesh=mesh)
            for f in (torch.matmul, lambda x, w: x * w.T[:1], lambda x, w: x[0] + w.T[1], lambda x, w: x.cumsum(1)):
                refused += _follow_advice(f, x, w)
    assert refused > 20


def _follow_advice(f: Callable[[Any, Any], Any], x: Any, w: Any) -> int:
    known: dict[str, Any] = {"x": x, "w": w}
    expected = device_get(f(x, w))
    for tries in range(5):
        try:
            with explicit():
                got = f(known["x"], known["w"])
        except CommunicationError as error:
            advice = str(error).splitlines()[-1].removeprefix("write ").rpartition(", or ")[2]
            if " for " in advice or advice.startswith("with"):  # a part of the expression
                return 1
            exec(advice, {"reshard": reshard, "P": P}, known)
        else:
            torch.testing.assert_close(device_get(got), expected)
            return tries
    raise AssertionError(f"{x!r} and {w!r} are refused after five times")


def test_a_plain_operand_is_laid_out_on_the_mesh_of_the_others() -> None:
    """Named by what the user calls it, or by an operand; unless `set_mesh` has set it."""
    x, b = put(6, 4, spec=P(None, "x")), torch.ones(4, dtype=F64, requires_grad=True)
    assert refusal(lambda: x * b).endswith("write b = reshard(b, P('x'), mesh=LINE)")
    with set_mesh(LINE):
        assert refusal(lambda: x * b).endswith("write b = reshard(b, P('x'))")
    y = put(6, 4, spec=P(None, "x"), mesh=make_mesh((2,), ("x",), transport="simulation"))
    message = refusal(lambda: y * b)
    assert message.endswith("write b = reshard(b, P('x'), mesh=y.spec.mesh)")
    with explicit():
        known: dict[str, Any] = {"b": b, "y": y}
        exec(message.splitlines()[-1].removeprefix("write "), {"reshard": reshard, "P": P}, known)
        device_get(reshard((y * known["b"]).sum(), P())).backward()
    torch.testing.assert_close(b.grad, device_get(y).detach().sum(0))


def test_what_has_no_name_is_not_to_be_pasted() -> None:
    w, b = put(6, 4, spec=P("x")), torch.ones(6, 4, dtype=F64, requires_grad=True)
    w.grad = put(6, 4, spec=P("x"), grad=False)
    message = refusal(lambda: torch.nn.utils.clip_grad_norm_([w], 1.0))
    assert message.endswith('\nwrite with explicit("off"): torch.nn.utils.clip_grad_norm_([w], 1.0)')
    message = refusal(lambda: torch.stack([w * 1, b * 1]))
    assert message.endswith('\nwrite with explicit("off"): torch.stack([w * 1, b * 1])')


def test_the_way_back_counts_in_other_ways_too() -> None:
    x, b = put(6, 6, spec=P("x", "y"), mesh=GRID), torch.ones(6, 6, dtype=F64, requires_grad=True)
    message = refusal(lambda: torch.stack([x * 1, b]))
    assert "  operand 1: f64[6@x, 6@y] → f64[6, 6] [reblock over 'x', 'y', 216 B, 13 µs]\n" in message
    assert "  1. f64[6@x, 6@y], f64[6@x, 6@y] → f64[2, 6@x, 6@y] [216 B, 22 µs]\n" in message


# --- what is allowed ------------------------------------------------------------------------------------------------


def test_what_the_user_writes_is_allowed() -> None:
    x = put(8, 4, spec=P("x"))
    with explicit():
        fspmd.with_spec(x, P())
        device_put(x, P(None, "x"), mesh=LINE)
        device_get(reshard(x, P()).sum()).item()
        y = shard_map(lambda a: psum(a * a.sum(), "x"), mesh=LINE, in_specs=P(None, "x"), out_specs=P())(x)
        y.sum().backward()
        assert reshard(x.sum(), P()).item() == pytest.approx(device_get(x).sum().item())


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P()])
def test_no_false_alarms(spec: P) -> None:
    x, y = put(8, 8, spec=spec), put(8, 8, spec=spec)
    with explicit(), communication_log() as log:
        z = torch.where(x > y, x * 2, y.exp()) + torch.tanh(x) / 3
        z = z.T.unsqueeze(0).transpose(1, 2).squeeze(0).reshape(8, 4, 2).flatten(1)
        z.split(2, dim=1 if spec == P("x") else 0)
        z = F.dropout(torch.stack([z, torch.zeros_like(z)]), 0.5).sum(0)
        (z.mean() + z.sum() * 2).backward()
    assert not log


def test_a_cast_that_uses_share_is_told_once() -> None:
    x, ws = put(6, 4), [put(4, 8, spec=P(None, "x")) for _ in range(3)]
    with explicit("warn") as found, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        q, k, v = (x @ w for w in ws)
        (q * k * v).sum().backward()
    assert len(found) == 1


#: functions of two operands, [6, 4] and [4, 5]
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "a product": torch.matmul,
    "a linear layer": lambda x, w: torch.relu(F.linear(x, w.T, w[0])),
    "a comparison": lambda x, w: x[:4] > w[:, :4],
    "a selection": lambda x, w: torch.where(x[:4] > 0, x[:4], w[:, :4]),
    "a loss": lambda x, w: F.mse_loss(x[:4, :2], w[:, 1:3]),
    "losses of classes": lambda x, w: F.cross_entropy(x, torch.tensor([0, 1, 2, 3, 0, 1])) + w.mean(),
    "norms": lambda x, w: F.layer_norm(x, (4,)).sum(0) + w.softmax(0).sum(1),
    "views": lambda x, w: x.reshape(2, 3, 4).transpose(0, 2).flatten() + w.T.reshape(20)[:1],
    "parts": lambda x, w: torch.cat([x, w.T]).split([5, 6]),
    "extremes": lambda x, w: (x.amax(1), w.argmax(), w.max(0).values),
    "scans": lambda x, w: (x.cumsum(0), w.sort(1).values),
    "sums": lambda x, w: x.sum(0) + w.sum(1) * 2,
}


@pytest.mark.one_of(4)
@pytest.mark.parametrize("mesh", [LINE, GRID], ids=["line", "grid"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_raises_just_where_something_is_communicated(name: str, mesh: Any) -> None:
    """Beside what runs forward and backward, for a sample of layouts."""
    f, pairs_of_layouts = FUNCTIONS[name], list(itertools.product(layouts(mesh, 2), repeat=2))
    found = set()
    for left, right in pairs_of_layouts[:: max(1, len(pairs_of_layouts) // 15)]:

        def run(left: P = left, right: P = right) -> list[Tensor]:
            out = f(put(6, 4, spec=left, mesh=mesh), put(4, 5, spec=right, mesh=mesh))
            return [one.local for one in (out if isinstance(out, (tuple, list)) else (out,))]

        with communication_log() as log:
            outs = [one for one in run() if one.requires_grad]
            torch.autograd.backward(outs, [torch.ones_like(one) for one in outs])
        try:
            with explicit():
                run()
            raised = False
        except CommunicationError:
            raised = True
        assert raised == bool(log.implicit), f"{left} {right}\n{log}"
        found.add(raised)
    assert True in found


# --- modes ----------------------------------------------------------------------------------------------------------


def test_warn_lists_each_line_once_and_goes_on() -> None:
    x = put(8, 4, spec=P("x"), grad=False)

    def f(x: Any) -> Any:
        for _ in range(3):
            y = torch.relu(x.sum(0))
        return y + torch.tanh(x.sum(0))

    with explicit("warn") as found, pytest.warns(ImplicitCommunicationWarning, match="is not written") as record:
        z = f(x)
    torch.testing.assert_close(device_get(z), device_get(x).sum(0).tanh() + device_get(x).sum(0).relu())
    assert [one.cause.what for one in found] == ["relu()", "tanh()"]
    assert str(found[0]) == str(record[0].message)
    assert (record[0].filename, record[0].lineno) == (__file__, found[0].cause.line)


def test_the_default_and_what_lifts_it() -> None:
    x = put(8, spec=P("x"))
    set_default(explicit="raise")
    try:
        with pytest.raises(CommunicationError):
            torch.relu(x.sum())
        with explicit("off"):
            torch.relu(x.sum())
        with explicit("warn"), pytest.warns(ImplicitCommunicationWarning):
            torch.relu(x.sum())
        raised = []

        def elsewhere() -> None:
            try:
                torch.relu(x.sum())
            except CommunicationError:
                raised.append(True)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert raised == [True]
    finally:
        set_default(explicit="off")
    torch.relu(x.sum())
    assert pairs._watch is None


def test_a_context_holds_for_its_thread() -> None:
    x, done = put(8, spec=P("x")), []
    with explicit():
        thread = threading.Thread(target=lambda: done.append(torch.relu(x.sum())))
        thread.start()
        thread.join()
    assert len(done) == 1


def test_wrong_modes() -> None:
    message = "explicit got the string 'yes'; expected one of 'raise', 'warn', 'off'"
    with pytest.raises(ArgumentError, match=message), explicit("yes"):  # type: ignore[arg-type]
        pass
    with pytest.raises(ArgumentError, match="set_default got the bool True"):
        set_default(explicit=True)  # type: ignore[arg-type]


def test_gathers_of_gradients_are_no_expected_sums() -> None:
    """Alone, or beside a sum. A value that is made anew from a smaller one is summed, not gathered."""
    x, w, b = put(8, 4, spec=P("x"), grad=False), put(4, 4), put(8, 4)
    large, row = put(4096, 512, spec=P("x"), grad=False), put(1, 512)
    found = []
    for f in (
        lambda: x + b,
        lambda: torch.addmm(b, x, w),
        lambda: torch.addmm(w[0], x, w),
        lambda: large + row.expand(4096, 512),
    ):
        with explicit("warn") as one, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with communication_log() as log:
                f().sum().backward()
        gathers = any("gather" in call.kind for call in log)
        found.append((gathers, one[0].of_gradients, warned[0].category is GradientSumWarning))
    assert found == [(True, False, False), (True, False, False), (False, True, True), (False, True, True)]


# --- on processes ---------------------------------------------------------------------------------------------------


def _messages(mesh: Any) -> list[str]:
    x, w, b = put(6, 5, mesh=mesh), put(5, 10, spec=P(None, "x"), mesh=mesh), put(6, 5, spec=P("x"), mesh=mesh)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: x @ w,
        lambda: torch.relu(b.sum(0)),
        lambda: torch.nonzero(b),
        lambda: b.sum().item(),
    )
    return [refusal(f) for f in calls]


def _in_process() -> list[str]:
    return _messages(make_mesh((4,), ("x",), device="cpu"))


def test_every_process_raises_what_a_simulation_does() -> None:
    expected = _messages(LINE)
    with Processes(4) as pool:
        assert pool.run(_in_process) == [expected] * 4


def test_values_within_are_those_without() -> None:
    def layer(x: Any, up: Any, down: Any) -> Any:
        h = torch.relu(reshard(x, P(reduced={"x"})) @ up)
        y = reshard(h @ down, P())
        y.square().sum().backward()
        return device_get(x.grad)

    def operands() -> tuple[Any, ...]:
        return put(6, 4), put(4, 8, spec=P(None, "x")), put(8, 4, spec=P("x"))

    with explicit():
        within = layer(*operands())
    torch.testing.assert_close(within, layer(*operands()))
    x, up, down = (device_get(one).detach().requires_grad_() for one in operands())
    (torch.relu(x @ up) @ down).square().sum().backward()
    torch.testing.assert_close(within, x.grad)


def test_expected_sums_of_gradients_are_told_apart_from_gathers() -> None:
    x, w = put(8, 4, spec=P("x"), grad=False), put(4, 4)
    with explicit("warn") as found, pytest.warns(GradientSumWarning) as warned:
        y = x @ w
    assert [one.category for one in warned] == [GradientSumWarning]
    with explicit("warn") as others, pytest.warns(ImplicitCommunicationWarning) as warned:
        torch.relu(put(8, 4, spec=P(unreduced={"x"}))) + y.sum()
    assert [one.of_gradients for one in (*found, others[0])] == [True, False]
    assert warned[0].category is ImplicitCommunicationWarning
    assert "write w = reshard(w, P(reduced={'x'}))" in found[0].text
