"""psum, pmean, pmax, pmin."""

from __future__ import annotations

from typing import Any

from jax_oracle.programs import M1, M4, M12, M23, M222, B, F, I, P, local

XY, YX = ("x", "y"), ("y", "x")
GROUPS, HALVES = [[0, 2], [3, 1]], [[0, 1, 2], [3, 4, 5]]


def layer_norm(m: Any, a: Any) -> Any:
    """Normalise rows whose features are sharded."""
    n = m.axis_size("x") * a.shape[1]
    mean = m.psum(m.sum(a, 1), "x") / n
    centred = a - m.reshape(mean, (-1, 1))
    var = m.psum(m.sum(centred * centred, 1), "x") / n
    return centred / m.sqrt(m.reshape(var, (-1, 1)) + 1e-3)


def softmax(m: Any, a: Any) -> Any:
    """Softmax over a sharded last dim."""
    top = m.pmax(m.max(m.stop_gradient(a), 1), "x")
    e = m.exp(a - m.reshape(top, (-1, 1)))
    return e / m.reshape(m.psum(m.sum(e, 1), "x"), (-1, 1))


def cross_entropy(m: Any, logits: Any, labels: Any) -> Any:
    """Cross-entropy with the vocabulary sharded over x."""
    width = logits.shape[1]
    top = m.pmax(m.max(m.stop_gradient(logits), 1), "x")
    total = m.psum(m.sum(m.exp(logits - m.reshape(top, (-1, 1))), 1), "x")
    column = m.reshape(m.arange(width) + m.axis_index("x") * width, (1, -1))
    mine = m.where(column == m.reshape(labels, (-1, 1)), logits, m.zeros_like(logits))
    return m.log(total) + top - m.psum(m.sum(mine, 1), "x")


def power_iteration(m: Any, a: Any, v: Any) -> Any:
    """Three steps of a power iteration, rows of the matrix sharded."""
    for _ in range(3):
        u = a @ v
        v = m.psum(m.matmul(m.transpose(a, (1, 0)), u), "x")
        v = v / m.sqrt(m.sum(v * v))
    return v


PROGRAMS = [
    local("psum", M4, [F(8, 3)], [P("x")], P(), lambda m, a: m.psum(a, "x")),
    local("psum_of_sin", M4, [F(8, 3)], [P("x")], P(), lambda m, a: m.psum(m.sin(a), "x")),
    local("sin_of_psum", M4, [F(8, 3)], [P("x")], P(), lambda m, a: m.sin(m.psum(a, "x"))),
    local("psum_second_dim", M4, [F(3, 8)], [P(None, "x")], P(), lambda m, a: m.psum(a * a, "x")),
    local("psum_xy", M23, [F(6, 2)], [P(XY)], P(), lambda m, a: m.psum(m.sin(a), XY)),
    local("psum_yx", M23, [F(6, 2)], [P(XY)], P(), lambda m, a: m.psum(m.sin(a), YX)),
    local("psum_list_of_axes", M23, [F(6, 2)], [P(XY)], P(), lambda m, a: m.psum(m.sin(a), ["x", "y"])),
    local("psum_two_dims", M23, [F(4, 6)], [P("x", "y")], P(), lambda m, a: m.psum(m.sin(a), XY)),
    local(
        "psum_of_three_axes", M222, [F(8, 2)], [P(("x", "y", "z"))], P(), lambda m, a: m.psum(a * a, ("z", "x", "y"))
    ),
    local("psum_two_of_three", M222, [F(8, 2)], [P(("x", "y", "z"))], P("y"), lambda m, a: m.psum(a * a, ("x", "z"))),
    local("psum_leaves_other_axis", M23, [F(6, 2)], [P(XY)], P("y"), lambda m, a: m.psum(m.sin(a), "x")),
    local("psum_stepwise", M23, [F(6, 2)], [P(XY)], P(), lambda m, a: m.psum(m.sin(m.psum(a, "x")), "y")),
    local("psum_no_axes", M4, [F(8)], [P("x")], P("x"), lambda m, a: m.psum(a * a, ())),
    local("psum_invariant_counts_ranks", M4, [F(3)], [P()], P(), lambda m, a: m.psum(m.sin(a), "x")),
    local("psum_invariant_two_axes", M23, [F(3)], [P()], P(), lambda m, a: m.psum(a, XY)),
    local("psum_over_the_axis_it_does_not_vary_on", M23, [F(4, 2)], [P("x")], P("x"), lambda m, a: m.psum(a * a, "y")),
    local("psum_of_psum", M4, [F(8)], [P("x")], P(), lambda m, a: m.psum(m.psum(m.sin(a), "x"), "x")),
    local("psum_then_varying", M4, [F(8)], [P("x")], P("x"), lambda m, a: a * m.psum(m.sin(a), "x")),
    local("psum_after_pcast", M23, [F(4)], [P("x")], P(), lambda m, a: m.psum(m.pcast(a, "y", to="varying"), XY)),
    local("psum_scaled_by_index", M4, [F(3)], [P()], P(), lambda m, a: m.psum(a * (m.axis_index("x") + 1), "x")),
    local("psum_scalar_one", M23, [F(3)], [P()], P(), lambda m, a: a * m.psum(1, "x")),
    local("psum_scalar_two_axes", M23, [F(3)], [P()], P(), lambda m, a: a * m.psum(2.5, XY)),
    local("psum_constant_array", M4, [F(3)], [P()], P(), lambda m, a: a + m.psum(m.const([1.0, 2.0, 3.0]), "x")),
    local("psum_bool", M4, [B(8, 3)], [P("x")], P(), lambda m, a: m.psum(a, "x")),
    local("psum_int", M23, [I(6, 2)], [P(XY)], P(), lambda m, a: m.psum(a, XY)),
    local("psum_comparison", M4, [F(8)], [P("x")], P(), lambda m, a: m.psum(m.astype(a > 0, "float64"), "x")),
    local("psum_zero_dim", M4, [F(8)], [P("x")], P(), lambda m, a: m.psum(m.sum(a * a), "x")),
    local("psum_zero_dim_input", M4, [F()], [P()], P(), lambda m, a: m.psum(a * a, "x")),
    local("psum_empty", M4, [F(0, 3)], [P("x")], P(), lambda m, a: m.psum(a, "x")),
    local(
        "psum_tree_of_mixed_types",
        M4,
        [F(8, 2), F(3)],
        [P("x"), P()],
        P(),
        lambda m, a, w: m.psum({"varying": m.sin(a), "invariant": (m.sin(w), None)}, "x"),
    ),
    local("psum_size_one_axis", M1, [F(4, 2)], [P("x")], P(), lambda m, a: m.psum(m.sin(a), "x")),
    local("psum_size_one_of_two", M12, [F(4, 2)], [P(XY)], P("y"), lambda m, a: m.psum(m.sin(a), "x")),
    local("pmean", M4, [F(8, 3)], [P("x")], P(), lambda m, a: m.pmean(a * a, "x")),
    local("pmean_yx", M23, [F(6, 2)], [P(XY)], P(), lambda m, a: m.pmean(m.sin(a), YX)),
    local("pmean_leaves_other_axis", M23, [F(6, 2)], [P(XY)], P("x"), lambda m, a: m.pmean(m.sin(a), "y")),
    local("pmean_invariant", M4, [F(3)], [P()], P(), lambda m, a: m.pmean(a * a, "x")),
    local("pmean_int", M4, [I(8)], [P("x")], P(), lambda m, a: m.pmean(a, "x")),
    local("pmean_scalar", M4, [F(3)], [P()], P(), lambda m, a: a * m.pmean(2.5, "x")),
    local("pmean_tree", M4, [F(8), F(4)], [P("x")] * 2, P(), lambda m, a, b: m.pmean([a * a, m.sin(b)], "x")),
    local("pmax", M4, [F(8, 3)], [P("x")], P(), lambda m, a: m.pmax(a, "x"), grad_wrt=()),
    local("pmax_yx", M23, [F(6, 2)], [P(XY)], P(), lambda m, a: m.pmax(a, YX), grad_wrt=()),
    local("pmax_mixed_tuple", M23, [F(6, 2)], [P("x")], P(), lambda m, a: m.pmax(a, XY), grad_wrt=()),
    local("pmax_invariant", M4, [F(3)], [P()], P(), lambda m, a: m.pmax(a, "x"), grad_wrt=()),
    local("pmax_int", M4, [I(8)], [P("x")], P(), lambda m, a: m.pmax(a, "x")),
    local("pmax_bool", M4, [B(8)], [P("x")], P(), lambda m, a: m.pmax(a, "x")),
    local("pmin", M4, [F(8, 3)], [P("x")], P(), lambda m, a: m.pmin(a, "x"), grad_wrt=()),
    local("pmin_leaves_other_axis", M23, [F(6, 2)], [P(XY)], P("y"), lambda m, a: m.pmin(a, "x"), grad_wrt=()),
    local("pmax_of_axis_index", M23, [], [], P(), lambda m: m.pmax(m.axis_index(YX), XY)),
    local("pmax_gradient", M4, [F(8, 3)], [P("x")], P(), lambda m, a: m.pmax_with_gradient(a * a, "x")),
    local("pmin_gradient_yx", M23, [F(6, 2)], [P(XY)], P(), lambda m, a: m.pmin_with_gradient(m.sin(a), YX)),
    local("pmax_gradient_one_axis", M23, [F(6)], [P(XY)], P("y"), lambda m, a: m.pmax_with_gradient(m.sin(a), "x")),
    local("psum_groups", M4, [F(8)], [P("x")], P("x"), lambda m, a: m.grouped("psum", m.sin(a), "x", GROUPS)),
    local("pmean_groups", M4, [F(8)], [P("x")], P("x"), lambda m, a: m.grouped("pmean", m.sin(a), "x", GROUPS)),
    local("pmax_groups", M4, [F(8)], [P("x")], P("x"), lambda m, a: m.grouped("pmax", m.sin(a), "x", GROUPS)),
    local("pmin_groups_yx", M23, [F(6)], [P(XY)], P(XY), lambda m, a: m.grouped("pmin", m.sin(a), YX, HALVES)),
    local(
        "psum_complex", M4, [F(8)], [P("x")], P(), lambda m, a: m.abs(m.psum(m.astype(a, "complex128") * 1j + 2, "x"))
    ),
    local("sharded_layer_norm", M4, [F(3, 8)], [P(None, "x")], P(None, "x"), layer_norm),
    local("sharded_softmax", M4, [F(3, 8)], [P(None, "x")], P(None, "x"), softmax),
    local("vocabulary_parallel_loss", M4, [F(3, 8), I(3)], [P(None, "x"), P()], P(), cross_entropy),
    local("power_iteration", M4, [F(8, 3), F(3)], [P("x"), P()], P(), power_iteration),
]
