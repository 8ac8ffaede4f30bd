"""Specs, casts between the four types, mixed operands, loops, values that carry the rank."""

from __future__ import annotations

from typing import Any

from jax_oracle.programs import M1, M2, M4, M12, M21, M22, M23, M222, F, I, P, local, whole

XY, YX = ("x", "y"), ("y", "x")


def unreduced_sum(m: Any, a: Any, b: Any) -> Any:
    """Two pending sums added, reshaped, then summed over ranks once."""
    pending = m.pcast(m.sin(a), "x", to="unreduced") + m.pcast(a * b, "x", to="unreduced")
    return m.psum(m.tap("pending", m.reshape(m.sum(pending, 0), (-1, 1))), "x")


def partial_psum_of_unreduced(m: Any, a: Any) -> Any:
    """Unreduced over two axes, completed one axis at a time by different collectives."""
    pending = m.tap("both", m.pcast(m.sin(a), XY, to="unreduced"))
    pending = m.tap("one", m.psum(pending, "x"))
    return m.psum_scatter(pending, "y", tiled=True)


def unreduced_parts(m: Any, a: Any) -> Any:
    """A pending sum indexed and joined again."""
    pending = m.pcast(m.sin(a), "x", to="unreduced")
    return m.psum(m.concat([pending[1:], pending[:1]], 0), "x")


def loose_weights(m: Any, w: Any, a: Any) -> Any:
    """A reduced weight beside constants, an invariant value and another reduced one."""
    held = m.loosely_reduced(w, "x")
    scale = held * 2.0 + 1.0 + w * held
    return m.psum(m.sum(m.sin(a * scale) + m.max(m.reshape(m.sin(held), (1, -1)), 0)), "x")


def loose_matmul(m: Any, w: Any, b: Any, a: Any) -> Any:
    """Products of reduced and invariant matrices stay reduced."""
    held = m.loosely_reduced(w, "x")
    return m.psum(m.sum(m.tanh(a @ (held @ held) + a @ (b @ held))), "x")


def loose_axes(m: Any, w: Any, a: Any) -> Any:
    """Reduced over both axes, meeting values that vary over one."""
    held = m.loosely_reduced(w, XY)
    rows = m.sin(held * m.psum(a, "y")) * a + m.loosely_reduced(w, "x") * m.psum(a, "x")
    return m.psum(rows, XY)


def loose_sums(m: Any, a: Any, w: Any) -> Any:
    """Linear ops on a pending sum: scaled, negated, subtracted, multiplied by an invariant value."""
    pending = m.loosely_unreduced(m.sin(a), "x")
    other = m.loosely_unreduced(a * a, "x")
    return m.sin(m.psum((-pending / 2.0 - other * 3.0) * w, "x"))


def loose_products(m: Any, a: Any, w: Any, b: Any) -> Any:
    """Matrix products of a pending sum with reduced and invariant matrices."""
    pending = m.loosely_unreduced(m.sin(a), "x")
    return m.psum(pending @ m.loosely_reduced(w, "x") + pending @ b, "x")


def reduced_meets_varying(m: Any, w: Any, a: Any) -> Any:
    """A reduced weight used twice: its gradient stays pending until one psum."""
    w = m.tap("weight", m.exp(m.pcast(w, "x", to="reduced")))
    return m.psum(m.sum(m.tanh(a @ w) + m.tap("mixed", a[:, :2] * w[0])), "x")


def explicit_reduced_to_varying(m: Any, w: Any, a: Any) -> Any:
    """reduced, then cast to varying by hand."""
    w = m.pcast(m.pcast(w, "x", to="reduced"), "x", to="varying")
    return m.psum(m.sum(m.sin(a * w), 0), "x")


def reduced_times_unreduced(m: Any, w: Any, a: Any) -> Any:
    """A factor typed reduced may multiply a pending sum."""
    pending = m.pcast(m.sin(a), "x", to="unreduced")
    return m.psum(m.tap("product", pending * m.pcast(w, "x", to="reduced")), "x")


def rows_by_rank(m: Any, table: Any) -> Any:
    """Every rank takes its own row of an invariant table."""
    rank = m.axis_index("x")
    return m.take(m.sin(table), rank)[None] * (rank + 1)


def newton(m: Any, a: Any) -> Any:
    """A while loop on an invariant condition: square root of the sum of squares."""
    total = m.psum(m.sum(a * a), "x")
    guess = m.while_loop(lambda g: m.sum((g * g - total) ** 2) > 1e-24, lambda g: 0.5 * (g + total / g), total)
    return guess


def scan_carry(m: Any, a: Any) -> Any:
    """A carry that must start varying because the loop makes it vary."""
    start = m.pcast(m.zeros((a.shape[1],)), "x", to="varying")
    return m.scan(lambda carry, row: m.sin(carry + row), start, a)[None]


def scan_with_collective(m: Any, a: Any, w: Any) -> Any:
    """The loop psums, so the carry stays invariant."""
    return m.scan(lambda carry, row: m.tanh(w * carry + m.psum(row, "x")), m.zeros((a.shape[1],)), a)


def invariant_cond(m: Any, a: Any) -> Any:
    """Branching on an invariant predicate."""
    big = m.psum(m.sum(a * a), "x") > 1.0
    return m.cond(big, m.sin, lambda t: t * 3.0, a)


def unreduced_between(m: Any, a: Any) -> Any:
    """A pending sum leaves one shard_map and is completed by the next."""
    pending = m.shard_map(
        lambda t: m.pcast(m.sin(t), "x", to="unreduced"), (P("x", None),), P(None, None, unreduced={"x"})
    )
    done = m.shard_map(lambda u: m.psum(m.tap("pending", u), "x"), (P(None, None, unreduced={"x"}),), P(None, None))
    return done(pending(a))


def varying_leaves_as_unreduced(m: Any, a: Any) -> Any:
    """A varying output with an unreduced spec is cast on the way out."""
    pending = m.shard_map(m.sin, (P("x", None),), P(None, None, unreduced={"x"}))
    done = m.shard_map(lambda u: m.psum_scatter(u, "x", tiled=True), (P(None, None, unreduced={"x"}),), P("x", None))
    return done(pending(a))


def reduced_in(m: Any, w: Any, a: Any) -> Any:
    """A parameter that enters typed reduced."""
    step = m.shard_map(
        lambda w, a: m.psum(m.sum(m.sin(m.tap("weight", w) * a)), "x"), (P(None, reduced={"x"}), P("x", None)), P()
    )
    return step(w, a)


def reduced_out(m: Any, w: Any, a: Any) -> Any:
    """Gathered to reduced in one shard_map, used in the next."""
    gather = m.shard_map(lambda w: m.all_gather(w, "x", tiled=True, to="reduced"), (P("x"),), P(None, reduced={"x"}))
    use = m.shard_map(lambda w, a: m.psum(m.sum(m.sin(w * a)), "x"), (P(None, reduced={"x"}), P("x", None)), P())
    return use(gather(w), a)


PROGRAMS = [
    local("identity", M4, [F(8, 2)], [P("x")], P("x"), lambda m, a: a),
    local("in_xy_out_yx", M23, [F(6, 2)], [P(XY)], P(YX), lambda m, a: a * a),
    local("in_yx_out_xy", M23, [F(6, 2)], [P(YX)], P(XY), lambda m, a: m.sin(a)),
    local("in_yx_out_yx", M23, [F(6, 2)], [P(YX)], P(YX), lambda m, a: a * (m.axis_index("x") + 1)),
    local("in_x_y_out_y_x", M22, [F(4, 4)], [P("x", "y")], P("y", "x"), lambda m, a: m.sin(a)),
    local("three_axes_in_any_order", M222, [F(8, 4)], [P(("z", "x"), "y")], P("y", ("x", "z")), lambda m, a: m.sin(a)),
    local("size_one_axes", M12, [F(4, 2)], [P("x", "y")], P("y", "x"), lambda m, a: m.sin(a)),
    local("size_one_mesh", M1, [F(4)], [P("x")], P("x"), lambda m, a: a * a + m.axis_index("x")),
    local("invariant_leaves_sharded", M4, [F(3)], [P()], P("x"), lambda m, a: m.sin(a)),
    local("invariant_leaves_sharded_yx", M23, [F(2, 2)], [P()], P(None, YX), lambda m, a: m.sin(a)),
    local("varying_over_x_leaves_over_xy", M23, [F(4, 2)], [P("x")], P(XY), lambda m, a: m.sin(a)),
    local("invariant_through", M4, [F(3)], [P()], P(), lambda m, a: m.sin(a)),
    local("zero_dim_through", M4, [F()], [P()], P(), lambda m, a: a * a),
    local("empty_block", M4, [F(0, 2)], [P("x")], P("x"), lambda m, a: m.sin(a)),
    local(
        "tree_in_and_out",
        M4,
        [F(8), F(3), I(4)],
        [P("x"), P(), P("x")],
        {"s": P("x"), "t": (P(), P("x"))},
        lambda m, a, b, c: {"s": m.sin(a), "t": (m.sin(b), c)},
    ),
    local(
        "spec_prefix_for_outputs",
        M4,
        [F(8), F(4)],
        [P("x")] * 2,
        P("x"),
        lambda m, a, b: {"k": [m.sin(a), b], "j": a * a},
    ),
    local(
        "spec_prefix_mixed",
        M4,
        [F(8), F(4)],
        [P("x")] * 2,
        (P("x"), P()),
        lambda m, a, b: ([a * a, m.sin(b)], m.psum(a, "x")),
    ),
    local("no_inputs", M23, [], [], P(XY), lambda m: m.axis_index(YX)[None]),
    local("constant_output", M4, [F(4)], [P("x")], P(), lambda m, a: m.const([1.0, 2.0]), grad_wrt=()),
    local("unused_input", M4, [F(8), F(4)], [P("x"), P()], P("x"), lambda m, a, b: m.sin(a)),
    local("axis_index", M4, [F(8)], [P("x")], P("x"), lambda m, a: a * m.axis_index("x")),
    local("axis_index_xy", M23, [F(6)], [P(XY)], P(XY), lambda m, a: a * m.axis_index(XY)),
    local("axis_index_yx", M23, [F(6)], [P(XY)], P(XY), lambda m, a: a * m.axis_index(YX)),
    local(
        "axis_index_three",
        M222,
        [F(8)],
        [P(("x", "y", "z"))],
        P(("x", "y", "z")),
        lambda m, a: a * m.axis_index(("y", "z", "x")),
    ),
    local("axis_size", M23, [F(3)], [P()], P(), lambda m, a: a * m.axis_size("y") + m.axis_size(XY)),
    local("axis_index_where", M4, [F(3)], [P()], P("x"), lambda m, a: m.where(m.axis_index("x") == 2, m.sin(a), -a)),
    local("index_by_rank", M4, [F(4, 3)], [P()], P("x"), rows_by_rank),
    local("bracket_by_rank", M4, [F(4, 3)], [P()], P("x"), lambda m, a: m.sin(a)[m.axis_index("x")][None]),
    local("slice_by_rank", M4, [F(8)], [P()], P("x"), lambda m, a: m.dynamic_slice(m.sin(a), m.axis_index("x") * 2, 2)),
    local("write_constant", M4, [F(8)], [P("x")], P("x"), lambda m, a: m.set(m.sin(a), 0, 2.0)),
    local(
        "write_varying_into_invariant",
        M4,
        [F(3), F(4)],
        [P(), P("x")],
        P("x"),
        lambda m, a, b: m.set(m.sin(a), 1, b[0]),
    ),
    local("mixed_add", M4, [F(8, 3), F(3)], [P("x"), P()], P("x"), lambda m, a, w: m.sin(a + w)),
    local(
        "mixed_multiply_then_psum", M4, [F(8, 3), F(3)], [P("x"), P()], P(), lambda m, a, w: m.psum(m.sin(a * w), "x")
    ),
    local("mixed_matmul", M4, [F(8, 3), F(3, 2)], [P("x"), P()], P("x"), lambda m, a, w: m.tanh(a @ w)),
    local("mixed_two_axes", M23, [F(4), F(6)], [P("x"), P("y")], P(XY), lambda m, a, b: m.sin(a * b)),
    local(
        "mixed_three_kinds",
        M23,
        [F(4), F(6), F(2)],
        [P("x"), P("y"), P()],
        P(XY),
        lambda m, a, b, c: m.sin(a * c) + b * c,
    ),
    local("mixed_where", M4, [F(8), F(2)], [P("x"), P()], P("x"), lambda m, a, w: m.where(a > 0, w * w, a)),
    local("mixed_concat", M4, [F(8), F(2)], [P("x"), P()], P("x"), lambda m, a, w: m.sin(m.concat([a, w], 0))),
    local("mixed_stack", M4, [F(8), F(2)], [P("x"), P()], P("x"), lambda m, a, w: m.sin(m.stack([a, w], 0))),
    local(
        "invariant_used_three_times",
        M4,
        [F(3), F(12)],
        [P(), P("x")],
        P("x"),
        lambda m, w, a: m.sin(a * w) + w * m.cos(a) + a / (2 + w),
    ),
    local("zeros_like_varying", M4, [F(8)], [P("x")], P("x"), lambda m, a: m.zeros_like(a) + a * a),
    local(
        "pcast_to_varying", M4, [F(3)], [P()], P("x"), lambda m, a: m.tap("cast", m.pcast(m.sin(a), "x", to="varying"))
    ),
    local("pcast_two_axes", M23, [F(3)], [P()], P(YX), lambda m, a: m.pcast(m.sin(a), XY, to="varying")),
    local("pcast_second_axis", M23, [F(4)], [P("x")], P(XY), lambda m, a: m.pcast(m.sin(a), "y", to="varying")),
    local("pcast_no_axes", M4, [F(8)], [P("x")], P("x"), lambda m, a: m.pcast(a * a, (), to="varying")),
    local("pcast_then_psum", M4, [F(3)], [P()], P(), lambda m, a: m.psum(m.pcast(m.sin(a), "x", to="varying"), "x")),
    local(
        "pcast_tree",
        M4,
        [F(3), F(2)],
        [P(), P()],
        P("x"),
        lambda m, a, b: m.pcast({"a": m.sin(a), "b": b}, "x", to="varying"),
    ),
    local(
        "unreduced_then_psum",
        M4,
        [F(8, 2)],
        [P("x")],
        P(),
        lambda m, a: m.psum(m.pcast(m.sin(a), "x", to="unreduced"), "x"),
    ),
    local(
        "unreduced_pmean",
        M4,
        [F(8, 2)],
        [P("x")],
        P(),
        lambda m, a: m.pmean(m.pcast(m.sin(a), "x", to="unreduced"), "x"),
    ),
    local("unreduced_linear_ops", M4, [F(8, 2), F(2)], [P("x"), P()], P(), unreduced_sum),
    local("unreduced_one_axis_at_a_time", M22, [F(8, 2)], [P(XY)], P("y"), partial_psum_of_unreduced),
    local(
        "unreduced_over_x_psum_over_y",
        M23,
        [F(6)],
        [P(XY)],
        P(),
        lambda m, a: m.psum(m.psum(m.pcast(m.sin(a), "x", to="unreduced"), "y"), "x"),
    ),
    local("unreduced_indexed_and_joined", M2, [F(6, 2)], [P("x")], P(), unreduced_parts),
    local(
        "unreduced_size_one",
        M21,
        [F(4)],
        [P(XY)],
        P("x"),
        lambda m, a: m.psum(m.pcast(a * a, "y", to="unreduced"), "y"),
    ),
    local("reduced_weight", M4, [F(3, 2), F(8, 3)], [P(), P("x")], P(), reduced_meets_varying),
    local("reduced_to_varying", M4, [F(3), F(8, 3)], [P(), P("x")], P(), explicit_reduced_to_varying),
    local("reduced_times_unreduced", M4, [F(3), F(8, 3)], [P(), P("x")], P(), reduced_times_unreduced),
    local("reduced_beside_invariant", M4, [F(2), F(8, 2)], [P(), P("x")], P(), loose_weights),
    local("reduced_matrix_products", M4, [F(2, 2), F(2, 2), F(8, 2)], [P(), P(), P("x")], P(), loose_matmul),
    local("reduced_over_more_axes", M23, [F(2), F(6, 2)], [P(), P(XY)], P(), loose_axes),
    local("unreduced_scaled", M4, [F(8, 2), F(2)], [P("x"), P()], P(), loose_sums),
    local("unreduced_matrix_products", M4, [F(8, 2), F(2, 2), F(2, 2)], [P("x"), P(), P()], P(), loose_products),
    local("argmax_of_varying", M4, [F(8, 3)], [P("x")], P("x"), lambda m, a: m.argmax(a, 1), grad_wrt=()),
    local("while_on_invariant", M4, [F(8)], [P("x")], P(), newton, grad_wrt=()),
    local("scan_with_varying_carry", M4, [F(8, 3)], [P("x")], P("x"), scan_carry),
    local("scan_with_psum", M4, [F(8, 3), F(3)], [P("x"), P()], P(), scan_with_collective),
    local("cond_on_invariant", M4, [F(8)], [P("x")], P("x"), invariant_cond),
    whole("unreduced_between_two_maps", M22, [F(4, 2)], unreduced_between),
    whole("varying_leaves_as_unreduced", M22, [F(8, 2)], varying_leaves_as_unreduced),
    whole("reduced_input", M22, [F(2), F(4, 2)], reduced_in),
    whole("reduced_output", M22, [F(4), F(4, 4)], reduced_out),
]
