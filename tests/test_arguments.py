"""Wrong arguments of `fspmd.nn`: each is an error of the family, which names what was given."""

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fspmd import FspmdError, P, TensorSpec, device_put, jit, make_mesh, nn, random, shard_map
from fspmd.errors import ArgumentError, VarianceError
from fspmd.nn import Action, Causal, Costs, KVCache, LossScale, contiguous, zigzag
from fspmd.nn.arguments import checked

MESH = make_mesh((2, 2), ("a", "b"), transport="simulation")
ABSTRACT = make_mesh((2, 4), ("a", "b"), transport="abstract")
Q, X, LOGITS = torch.randn(1, 4, 8, 4), torch.randn(6, 4), torch.randn(6, 4)
CACHE, K = KVCache.zeros(1, 2, 2, 8, 4), torch.randn(2, 2, 1, 4)
PARAMS = {"w": torch.ones(4, 4)}
TABLE = nn.gpipe(2, 2)
KEYS, AT = random.split(random.key(0), 6), torch.zeros(6, dtype=torch.int64)


def within(f: Callable[..., Any], *xs: Tensor) -> Any:
    """Run a body on whole values."""
    return shard_map(f, mesh=MESH, in_specs=P(), out_specs=P())(*xs)


def spec(*shape: int, partition: P = P(None, ("a", "b"))) -> TensorSpec:  # noqa: B008
    return TensorSpec(ABSTRACT, partition, shape, torch.float32)


def updated(optimizer: Any, grads: Any = PARAMS, state: Any = (), params: Any = PARAMS) -> Any:
    return optimizer.update(grads, optimizer.init(params) if state == () else state, params)


def piped(**options: Any) -> Any:
    return nn.pipeline(lambda w, x: x * w, TABLE, loss=lambda y, t: y.sum(), mesh=MESH, **{"axis": "a", **options})


def of_another_routing(x: Tensor, logits: Tensor) -> Tensor:
    sent = nn.dispatch(x, nn.route(logits, 1), "a")
    return nn.combine(sent.rows, sent, nn.route(logits, 2), "a")


def over_another_axis(x: Tensor, logits: Tensor) -> Tensor:
    routing = nn.route(logits, 1)
    sent = nn.dispatch(x, routing, "a", capacity=2)
    return nn.combine(sent.rows, sent, routing, "b")


WRONG: dict[str, Callable[[], Any]] = {
    # sequences
    "give it the dim of the sequence": lambda: zigzag(8, 2).store(torch.ones(2, 8), 5),
    "for x; give it a tensor": lambda: zigzag(8, 2).restore([1], 0),  # type: ignore[arg-type]
    "positions was called outside": lambda: zigzag(8, 2).positions("a"),
    r"list \[2, 2\] for ranks": lambda: contiguous(8, [2, 2]),  # type: ignore[arg-type]
    "None for mask; give it a mask, such as": lambda: nn.balanced(16, 2, None),  # type: ignore[arg-type]
    "for a; give it a part, such as attend_block": lambda: nn.merge(Q, Q),  # type: ignore[arg-type]
    "two parts of the same queries": lambda: nn.merge(*(nn.attend_block(Q[:, :, :n], Q, Q) for n in (3, 8))),
    "a Causal for allowed": lambda: nn.attend_block(Q, Q, Q, Causal()),  # type: ignore[arg-type]
    "ring_attention was called outside": lambda: nn.ring_attention(Q, Q, Q, "a"),
    "None for axis; give it the name of a mesh axis": lambda: within(lambda x: nn.ring_attention(x, x, x, None), Q),  # type: ignore[arg-type]
    "the float 1.0 for sinks": lambda: within(lambda x: nn.ring_attention(x, x, x, "a", sinks=1.0), Q),  # type: ignore[arg-type]
    "give it a TensorSpec": lambda: nn.attention_costs(Q, Q, Q, "a"),  # type: ignore[arg-type]
    "heads a multiple of kv_heads": lambda: nn.attention_costs(
        spec(4, 16, 8), spec(3, 16, 8), spec(3, 16, 8), ("a", "b")
    ),
    "got a layout of 3": lambda: nn.attention_costs(*[spec(4, 24, 8)] * 3, ("a", "b"), layout=zigzag(24, 3)),
    "empty_part got .* the width -1": lambda: nn.empty_part(Q, -1),
    "the float 1.5 for width": lambda: nn.empty_part(Q, 1.5),  # type: ignore[arg-type]
    "empty_part got a tensor .*bool": lambda: nn.empty_part(Q > 0, 2),
    "the int 3 for axis; give it the name of a mesh axis": lambda: nn.attention_costs(*[spec(4, 16, 8)] * 3, 3),  # type: ignore[arg-type]
    # experts
    "route got the int 0 for axes": lambda: nn.route(LOGITS, 1, axes=0),  # type: ignore[arg-type]
    "a bias of shape .* of torch.complex64": lambda: nn.route(LOGITS, 1, bias=torch.zeros(4, dtype=torch.complex64)),
    "list .* for bias": lambda: nn.route(LOGITS, 1, bias=[0]),  # type: ignore[arg-type]
    "list .* for counts": lambda: nn.balance(torch.zeros(1), [1], 0.1),  # type: ignore[arg-type]
    "the string 'x' for rate": lambda: nn.balance(torch.zeros(1), torch.zeros(1), "x"),  # type: ignore[arg-type]
    "None for sent; give it the result of dispatch": lambda: nn.combine(X, None, nn.route(LOGITS, 1), "a"),  # type: ignore[arg-type]
    "the dispatch of 6 choices and a routing of 12": lambda: within(of_another_routing, X, LOGITS),
    "axis='b' for a dispatch over 'a'; give it the axis of dispatch": lambda: within(over_another_axis, X, LOGITS),
    "None for y": lambda: within(
        lambda x, y: nn.experts(x, nn.route(y, 1), lambda rows, counts: None, axis="a"),  # type: ignore[arg-type,return-value]
        X,
        LOGITS,
    ),
    "the int 3 for f; give it a function": lambda: within(
        lambda x, y: nn.experts(x, nn.route(y, 1), 3, axis="a"),  # type: ignore[arg-type]
        X,
        LOGITS,
    ),
    "counts of torch.float32; give it ints": lambda: nn.grouped_matmul(X, torch.ones(1, 4, 4), torch.ones(1)),
    "got a sparse_coo tensor for logits; give it a dense one": lambda: nn.route(LOGITS.to_sparse(), 1),
    r"counts \[5, 3\], 8 together, for 6 rows": lambda: nn.grouped_matmul(X, torch.ones(2, 4, 4), torch.tensor([5, 3])),
    r"counts \[7, -1\], 6 together, for 6 rows": lambda: nn.grouped_matmul(
        X, torch.ones(2, 4, 4), torch.tensor([7, -1])
    ),
    r"counts \[0, 4\], 4 together, for 3 rows": lambda: shard_map(  # of the second rank
        lambda x, counts: nn.grouped_matmul(x, torch.ones(2, 4, 4), counts),
        mesh=MESH,
        in_specs=P("a"),
        out_specs=P("a"),
    )(X, torch.tensor([1, 2, 0, 4])),
    r"counts \[9\], 9 together, for 6 rows": lambda: nn.grouped_matmul(
        *device_put((X, torch.ones(1, 4, 4), torch.tensor([9])), (P("a"), P(), P()), mesh=MESH)
    ),
    "the float nan for rate; give it a finite number": lambda: nn.balance(torch.zeros(1), torch.zeros(1), math.nan),
    "the float inf for scale; give it a finite number": lambda: nn.attend_block(Q, Q, Q, scale=math.inf),
    # schedules
    "gpipe got the int 0 for ranks": lambda: nn.gpipe(0, 2),
    "zbv got the int -1 for microbatches": lambda: nn.zbv(2, -1),
    "interleaved got the int 0 for chunks": lambda: nn.interleaved(2, 2, 0),
    "zero_bubble got the string '4' for ranks": lambda: nn.zero_bubble("4", 2),  # type: ignore[arg-type]
    "no action takes time": lambda: TABLE.bubble(Costs(0, 0, 0)),
    "the int 3 for costs": lambda: TABLE.bubble(3),  # type: ignore[arg-type]
    "tick 0 of rank 0 is the int 1": lambda: dataclasses.replace(TABLE, ticks=((1, None),)).validate(),  # type: ignore[arg-type]
    "has 0 limits for 2 ranks": lambda: dataclasses.replace(TABLE, limits=()).validate(),
    "ranks_of_stages": lambda: dataclasses.replace(TABLE, ranks_of_stages=()).validate(),
    "give it an action": lambda: dataclasses.replace(TABLE, ticks=((Action("F", 0.0, 0), None),)).validate(),  # type: ignore[arg-type]
    "the int 3 for precision; give it a Precision": lambda: piped(precision=3),
    "the int 3 for count; give it a function": lambda: piped(count=3),
    "the int 3 for over; give it the name": lambda: piped(over=3),
    r"the list \[1\] for axis": lambda: piped(axis=[1]),
    # state
    "gathered got the int 3 for axis": lambda: nn.gathered(PARAMS, 3),  # type: ignore[arg-type]
    "the int 3 for loss": lambda: nn.accumulate(3),  # type: ignore[arg-type]
    "None for microbatches": lambda: nn.accumulate(lambda p, x: (p["w"].sum(), 1))(PARAMS, None),  # type: ignore[arg-type]
    "give it a Precision": lambda: nn.accumulate(lambda p, x: (p, 1), precision=torch.bfloat16),  # type: ignore[arg-type]
    "adamw got the float -1.0 for rate": lambda: nn.adamw(-1.0),
    "adamw got the string 'x' for rate": lambda: nn.adamw("x"),  # type: ignore[arg-type]
    r"the float 1.5 for betas\[0\]": lambda: nn.adamw(betas=(1.5, 0.9)),
    r"for betas; give it two numbers": lambda: nn.adamw(betas=(0.9, 0.9, 0.9)),
    "for beta2_decay; give it a number up to 0": lambda: nn.adafactor(beta2_decay=0.5),
    "adafactor got the float 0.0 for clip": lambda: nn.adafactor(clip=0.0),
    "for coefficients": lambda: nn.muon(coefficients=(1.0,)),
    "the int -1 for steps": lambda: nn.muon(steps=-1),
    "the float -1.0 for decay": lambda: updated(nn.adamw(decay=-1.0)),
    "None as a leaf of grads": lambda: updated(nn.adafactor(), grads={"w": None}),
    "a dict of 'step', 'mean'": lambda: updated(nn.muon(), state={}),
    "a dict of 'step', 'foo' for state": lambda: updated(nn.adamw(), state={"step": torch.zeros(()), "foo": PARAMS}),
    "give it an optimizer": lambda: nn.with_master(None),  # type: ignore[arg-type]
    r"a gradient of shape \(4, 1\) for params\['w'\] of shape \(4, 4\)": lambda: updated(
        nn.adamw(), grads={"w": torch.ones(4, 1)}
    ),
    "the count is a tensor": lambda: nn.accumulate(lambda p, x: (p.sum(), x))(torch.ones(2), [torch.ones(2)]),
    "the total is a tensor": lambda: nn.accumulate(lambda p, x: (p, 1))(torch.ones(2), [torch.ones(2)]),
    "give it what init.params. of with_master": lambda: updated(nn.with_master(nn.adamw()), state={}),
    "None as a leaf of grads; give": lambda: updated(nn.with_master(nn.adamw()), grads={"w": None}),
    "a parameter that is the string": lambda: nn.with_master(nn.adamw()).init({"w": "x"}),
    "None for rate; give it a number, a 0-d": lambda: updated(nn.adamw(lambda step: None)),  # type: ignore[arg-type,return-value]
    "the float nan for beta2_decay": lambda: nn.adafactor(beta2_decay=math.nan),
    "the int 0 for scale; give it a number above 0": lambda: LossScale.of(0),
    "growth=0.5": lambda: LossScale.of(1.0).after(torch.tensor(True), growth=0.5),
    "for finite; give it a 0-d bool": lambda: LossScale.of(1.0).after(torch.ones(())),
    "for condition; give it a 0-d bool": lambda: nn.selected(torch.ones(2) > 0, PARAMS, PARAMS),
    "'nope' for device; give it a device that this process has": lambda: LossScale.of(1.0, "nope"),
    "True for device": lambda: LossScale.of(1.0, True),
    "a sparse_coo tensor as a leaf; give it a tree of tensors": lambda: nn.all_finite(torch.eye(2).to_sparse()),
    "a sparse_coo tensor as a leaf of grads": lambda: updated(nn.adamw(), grads={"w": torch.eye(4).to_sparse()}),
    r"a tensor of shape \(\) for microbatches": lambda: nn.accumulate(lambda p, x: (p, 1))(
        torch.ones(()), torch.ones(())
    ),
    "for eps; give it a number": lambda: nn.adamw(eps=torch.ones(2)),  # type: ignore[arg-type]
    "for coefficients; give it three numbers": lambda: nn.muon(coefficients="abc"),  # type: ignore[arg-type]
    "muon got the dtype torch.int64 for dtype": lambda: nn.muon(dtype=torch.int64),
    "with_master got the dtype torch.int64": lambda: nn.with_master(nn.adamw(), torch.int64),
    "the list .* for device": lambda: LossScale.of(1.0, [1]),  # type: ignore[arg-type]
    "the string 'x' for scale": lambda: LossScale.of("x"),  # type: ignore[arg-type]
    "None for loss": lambda: LossScale.of(1.0).scaled(None),  # type: ignore[arg-type]
    "True for finite": lambda: LossScale.of(1.0).after(True),  # type: ignore[arg-type]
    "as a leaf; give it a tree of tensors": lambda: nn.all_finite({"w": "x"}),
    "two trees that differ": lambda: nn.selected(torch.tensor(True), PARAMS, {"v": torch.ones(4, 4)}),
    r"for new\['w'\]": lambda: nn.selected(torch.tensor(True), PARAMS, {"w": torch.ones(3)}),
    # decoding
    "the int 0 for value_width": lambda: KVCache.zeros(1, 2, 2, 8, 4, value_width=0),
    "append got the string '' for axis": lambda: CACHE.append(K, K, axis=""),
    "cached_attention got a tensor .* for axis": lambda: nn.cached_attention(K, CACHE, axis=K),  # type: ignore[arg-type]
    "names the axis 'zz'": lambda: KVCache.zeros(1, 2, 2, 8, 4, spec=P(None, "zz"), mesh=MESH),
    "the string 'x' for value_width": lambda: KVCache.zeros(1, 2, 2, 8, 4, value_width="x"),  # type: ignore[arg-type]
    "layers of 2, 3 slots": lambda: KVCache.of([KVCache.zeros(1, n, 1, 4, 4) for n in (2, 3)]),
    "own_heads got 0 KV heads": lambda: within(lambda x: nn.own_heads(x, "a"), torch.ones(0, 3, 2)),
    "KVCache.of got no layers": lambda: KVCache.of(torch.ones(())),  # type: ignore[arg-type]
    "give it the axes of slots, heads and positions alone": lambda: KVCache.zeros(
        1, 2, 2, 8, 4, spec=P(unreduced={"a"}), mesh=MESH
    ),
    "KVCache.of got the int 1": lambda: KVCache.of([1]),  # type: ignore[list-item]
    "list .* for key": lambda: CACHE.append([1], K),  # type: ignore[arg-type]
    r"slots \[1, 2\] of a cache of 2 slots, of which 2 is out of": lambda: CACHE.append(
        K, K, slots=torch.tensor([1, 2])
    ),
    r"slots \[-1, 0\] of a cache of 2": lambda: nn.cached_attention(K, CACHE, slots=torch.tensor([-1, 0])),
    r"slots \[1, 1\] of a cache of 2": lambda: jit(lambda at: CACHE.append(K, K, slots=at))(torch.tensor([1, 1])),
    r"the counts \[0, 2\] of 1 positions": lambda: CACHE.append(K, K, counts=torch.tensor([0, 2])),
    r"the counts \[-1, 1\] of 1 positions": lambda: nn.cached_attention(K, CACHE, counts=torch.tensor([-1, 1])),
    "give it a KVCache": lambda: nn.cached_attention(K, None),  # type: ignore[arg-type]
    "give it keys or values": lambda: within(lambda x: nn.own_heads(x, "a"), X),
    "greedy was called outside": lambda: nn.greedy(LOGITS, "a"),
    "vocabulary=9": lambda: nn.greedy(LOGITS, vocabulary=9),
    "0 tokens": lambda: nn.sample(LOGITS[:, :0], KEYS, AT),
    "the string 'x' for temperature": lambda: nn.sample(LOGITS, KEYS, AT, temperature="x"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("told", WRONG)
def test_wrong_arguments_are_refused_by_name(told: str) -> None:
    with pytest.raises(FspmdError, match=told):
        WRONG[told]()


def merged_twice(q: Tensor) -> Tensor:
    return nn.merge_over(nn.merge_over(nn.attend_block(q, q, q), "a"), "a").lse


#: programs with one reduction too many: ranks of "a" have the same, and would count it once each
DOUBLED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "merge_over got a part": (merged_twice, (Q,)),
    "route got logits": (lambda x: nn.route(x, 1, axes=("a", "b")).counts, (LOGITS,)),
    "ring_attention got a query, key and value": (lambda x: nn.ring_attention(x, x, x, "a"), (Q,)),
    "gathered_attention got a query, key and value": (lambda x: nn.gathered_attention(x, x, x, ("a", "b")), (Q,)),
    "ulysses_attention got a query, key and value": (lambda x: nn.ulysses_attention(x, x, x, "b", ring="a"), (Q,)),
    "greedy got logits": (lambda x: nn.greedy(x, "a"), (LOGITS,)),
    "sample got logits": (lambda x: nn.sample(x, KEYS, AT, "a"), (LOGITS,)),
    "append got a cache": (lambda x: CACHE.append(x, x, axis="a").lengths, (K,)),
    "cached_attention got a cache": (lambda x: nn.cached_attention(x, CACHE, axis="a"), (K,)),
}


@pytest.mark.parametrize("told", DOUBLED)
def test_what_is_equal_on_all_ranks_is_not_counted_by_each(told: str) -> None:
    """In bodies without types nothing says so, and nothing is checked."""
    body, values = DOUBLED[told]
    specs = P(None, None, "a") if body is merged_twice else P()  # its first merge is right
    call = shard_map(body, mesh=MESH, in_specs=specs, out_specs=P())
    with pytest.raises(VarianceError, match=f"{told} .*equal on all ranks of 'a'(, 'b')?, .*leave the axis out"):
        call(*values)


def test_heads_that_are_cut_already_are_not_cut_again() -> None:
    call = shard_map(lambda x: nn.own_heads(x, "a"), mesh=MESH, in_specs=P(None, "a"), out_specs=P(None, "a"))
    with pytest.raises(VarianceError, match=r"own_heads got heads of type .*, which differ from rank to rank of 'a'"):
        call(Q)


def test_ranks_that_share_a_sequence_draw_with_one_key() -> None:
    """They agreed on a token, but not on that of another mesh."""
    logits, keys = torch.randn(3, 8), random.split(random.key(0), 6)
    call = shard_map(
        lambda x, keys: nn.sample(x, keys, AT[:3], "a"), mesh=MESH, in_specs=(P(None, "a"), P("a")), out_specs=P()
    )
    with pytest.raises(VarianceError, match=r"sample got keys of type .*, which differ from rank to rank of 'a'"):
        call(logits, keys)


@checked
def example(x: Tensor, n: int = 1, *, at: str | tuple[str, ...] | None = None, rest: Any = None) -> int:
    """An example."""
    return n


def test_annotations_say_what_is_refused() -> None:
    assert example(torch.ones(1), 2, at=("a",), rest=object()) == example(x=torch.ones(1), n=2) == 2
    for words, call in (
        ("example got the string 'x' for x; give it a tensor", lambda: example("x")),  # type: ignore[arg-type]
        ("example got the float 1.5 for n; give it an int", lambda: example(torch.ones(1), 1.5)),  # type: ignore[arg-type]
        ("the int 3 for at; give it a string or a tuple or None", lambda: example(torch.ones(1), at=3)),  # type: ignore[arg-type]
    ):
        with pytest.raises(ArgumentError, match=words):
            call()
    for missing in ((), (torch.ones(1), 1, 2)):
        with pytest.raises(TypeError):
            example(*missing)  # type: ignore[arg-type]
    assert (example.__doc__, [*inspect.signature(example).parameters]) == ("An example.", ["x", "n", "at", "rest"])


def test_functions_that_check_arguments_compile_as_one_graph() -> None:
    parts = [nn.attend_block(Q, Q[:, :, at], Q[:, :, at]) for at in (slice(4), slice(4, 8))]

    def f(a: Any, b: Any, counts: Tensor) -> Any:
        return nn.merge(nn.PartialAttention(*a), nn.PartialAttention(*b)).out, nn.balance(counts * 0.1, counts, 0.1)

    given = *map(tuple, parts), torch.arange(4.0)
    torch.testing.assert_close(torch.compile(f, backend="eager", fullgraph=True)(*given), f(*given))


def test_a_mesh_that_costs_are_of_may_have_two_axes() -> None:
    """The combination of a ring and an exchange of heads moves less than a ring, and needs fewer heads."""
    wide = spec(4, 4096, 64)
    found = nn.attention_costs(wide, wide, wide, ("a", "b"), mask=Causal(), layout=zigzag)
    assert sorted(found) == ["gathered", "ring", "ulysses in a ring"]  # 4 heads are too few for 8 ranks
    assert found["ulysses in a ring"].moved < found["ring"].moved
    assert [cost.time for cost in found.values()] == sorted(cost.time for cost in found.values())


def test_numbers_may_be_in_a_list() -> None:
    """As those of a file of settings are."""
    grads = {"w": torch.ones(4, 4)}
    for one, other in (
        (nn.adamw(betas=[0.8, 0.9]), nn.adamw(betas=(0.8, 0.9))),
        (nn.muon(coefficients=[3.0, -4.0, 2.0]), nn.muon(coefficients=(3.0, -4.0, 2.0))),
        (nn.adafactor(eps=[None, 1e-2]), nn.adafactor(eps=(None, 1e-2))),
    ):
        after, again = (made.update(grads, made.init(PARAMS), PARAMS)[0]["w"] for made in (one, other))
        assert torch.equal(after, again)
