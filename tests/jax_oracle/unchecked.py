"""check_vma=False: JAX's conservative rules, at the map's edge and inside it."""

from __future__ import annotations

from typing import Any

from jax_oracle.programs import M4, M22, M23, B, F, I, MeshShape, P, Program, local

XY, YX = ("x", "y"), ("y", "x")
GROUPS = [[0, 2], [3, 1]]
RING4 = [(i, (i + 1) % 4) for i in range(4)]


def raw(name: str, mesh: MeshShape, inputs: Any, in_specs: Any, out: Any, body: Any, **options: Any) -> Program:
    """A program that is not type-checked."""
    return local(f"unchecked_{name}", mesh, inputs, in_specs, out, body, check_vma=False, **options)


def inner_gradients(m: Any, w: Any, a: Any) -> Any:
    """Inside, nothing is summed for the user, and psum transposes to psum."""
    local_loss = m.grad(lambda w: m.sum(m.sin(a * w)))(w)
    summed_loss = m.grad(lambda w: m.psum(m.sum(m.sin(a * w)), "x"))(w)
    mean_loss = m.grad(lambda w: m.pmean(m.sum(m.sin(a * w)), "x"))(w)
    return local_loss, summed_loss, mean_loss


def sgd_by_hand(m: Any, w: Any, a: Any) -> Any:
    """Data parallel as written before types: a psum of the gradient."""
    return w - 0.1 * m.psum(m.grad(lambda w: m.sum(m.sin(a * w)))(w), "x")


def through(name: str, apply: Any) -> Program:
    """The gradient and a tangent, inside the body, of a collective followed by a function that tells ranks apart."""

    def body(m: Any, a: Any) -> Any:
        def f(a: Any) -> Any:
            return apply(m, m.sin(a)) * (1 + m.axis_index("x"))

        gradient = m.grad(lambda a: m.sum(f(a) ** 2))(a)
        return gradient, m.jvp(f, (a,), (m.cos(a),))[1]

    return raw(f"derivatives_of_{name}", M4, [F(16, 4)], [P("x")], (P("x"), P("x")), body)


PROGRAMS = [
    through("psum", lambda m, a: m.psum(a, "x")),
    through("pmean", lambda m, a: m.pmean(a, "x")),
    through("all_gather", lambda m, a: m.all_gather(a, "x", axis=1)),
    through("psum_scatter", lambda m, a: m.psum_scatter(a, "x")),
    through("all_to_all", lambda m, a: m.all_to_all(a, "x", 1, 0, tiled=True)),
    through("ppermute", lambda m, a: m.ppermute(a, "x", RING4[:3])),
    through("pcast", lambda m, a: m.pcast(a, "x", to="varying")),
    through("psum_groups", lambda m, a: m.psum(a, "x", axis_index_groups=GROUPS)),
    raw(
        "vmap_inside", M4, [F(8, 3)], [P("x")], P(), lambda m, a: m.vmap(lambda c: m.psum(m.sin(c), "x"), in_axes=1)(a)
    ),
    raw("two_axes", M22, [F(4, 4), F(4)], [P("x", "y"), P("y")], P("x"), lambda m, a, w: m.psum(m.sin(a) @ w, "y")),
    raw("psum", M4, [F(8)], [P("x")], P(), lambda m, a: m.psum(m.sin(a), "x")),
    raw("psum_left_sharded", M4, [F(8)], [P("x")], P("x"), lambda m, a: m.psum(m.sin(a), "x")),
    raw("psum_yx", M23, [F(6)], [P(XY)], P(), lambda m, a: m.psum(m.sin(a), YX)),
    raw("psum_one_axis", M23, [F(6)], [P(XY)], P("y"), lambda m, a: m.psum(m.sin(a), "x")),
    raw("psum_of_mixed_tuple", M23, [F(4)], [P("x")], P(), lambda m, a: m.psum(m.sin(a), XY)),
    raw("psum_of_replicated", M4, [F(3)], [P()], P(), lambda m, a: m.psum(m.sin(a), "x")),
    raw("psum_scalar", M4, [F(3)], [P()], P(), lambda m, a: a * m.psum(2.0, "x")),
    raw("psum_bool", M4, [B(8)], [P("x")], P(), lambda m, a: m.psum(a, "x")),
    raw("pmean", M4, [F(8)], [P("x")], P(), lambda m, a: m.pmean(m.sin(a), "x")),
    raw("pmax", M4, [F(8)], [P("x")], P(), lambda m, a: m.pmax(a, "x"), grad_wrt=()),
    raw("replicated_through", M4, [F(3)], [P()], P(), lambda m, a: m.sin(a)),
    raw("replicated_leaves_sharded", M4, [F(3)], [P()], P("x"), lambda m, a: m.sin(a)),
    raw("unmentioned_axis", M22, [F(4)], [P("x")], P("x"), lambda m, a: m.sin(a)),
    raw("two_unmentioned_axes", M22, [F(3)], [P()], P(), lambda m, a: m.sin(a)),
    raw("weight_and_data", M4, [F(2), F(8)], [P(), P("x")], P("x"), lambda m, w, a: m.sin(a * w)),
    raw("weight_and_data_psummed", M4, [F(2), F(8)], [P(), P("x")], P(), lambda m, w, a: m.psum(m.sin(a * w), "x")),
    raw("weight_times_rank", M4, [F(2)], [P()], P("x"), lambda m, w: w * (m.axis_index("x") + 1)),
    raw("all_gather", M4, [F(8)], [P("x")], P(), lambda m, a: m.all_gather(m.sin(a), "x", tiled=True)),
    raw("all_gather_yx_untiled", M23, [F(6)], [P(XY)], P(), lambda m, a: m.all_gather(m.sin(a), YX)),
    raw("all_gather_left_sharded", M4, [F(8)], [P("x")], P("x"), lambda m, a: m.all_gather(m.sin(a), "x")),
    raw("psum_scatter", M4, [F(16)], [P("x")], P("x"), lambda m, a: m.psum_scatter(m.sin(a), "x", tiled=True)),
    raw("all_to_all", M4, [F(8, 4)], [P("x")], P("x"), lambda m, a: m.all_to_all(m.sin(a), "x", 1, 0, tiled=True)),
    raw("ppermute", M4, [F(8)], [P("x")], P("x"), lambda m, a: m.ppermute(m.sin(a), "x", RING4[:3])),
    raw("pcast_does_nothing", M4, [F(3)], [P()], P(), lambda m, a: m.pcast(m.sin(a), "x", to="varying")),
    raw("psum_groups", M4, [F(8)], [P("x")], P("x"), lambda m, a: m.psum(m.sin(a), "x", axis_index_groups=GROUPS)),
    raw(
        "psum_groups_uneven",
        M4,
        [F(8)],
        [P("x")],
        P("x"),
        lambda m, a: m.psum(m.sin(a), "x", axis_index_groups=[[2], [0, 1, 3]]),
    ),
    raw(
        "psum_groups_yx",
        M23,
        [F(6)],
        [P(XY)],
        P(XY),
        lambda m, a: m.psum(m.sin(a), YX, axis_index_groups=[[0, 1, 2], [3, 4, 5]]),
    ),
    raw("pmean_groups", M4, [F(8)], [P("x")], P("x"), lambda m, a: m.pmean(m.sin(a), "x", axis_index_groups=GROUPS)),
    raw(
        "pmax_groups", M4, [F(8)], [P("x")], P("x"), lambda m, a: m.pmax(a, "x", axis_index_groups=GROUPS), grad_wrt=()
    ),
    raw("pmin_groups", M4, [I(8)], [P("x")], P("x"), lambda m, a: m.pmin(a, "x", axis_index_groups=GROUPS)),
    raw("psum_scalar_groups", M4, [F(3)], [P()], P(), lambda m, a: a * m.psum(1, "x", axis_index_groups=GROUPS)),
    raw(
        "all_gather_groups",
        M4,
        [F(8)],
        [P("x")],
        P("x"),
        lambda m, a: m.all_gather(m.sin(a), "x", axis_index_groups=GROUPS),
    ),
    raw(
        "psum_scatter_groups",
        M4,
        [F(16)],
        [P("x")],
        P("x"),
        lambda m, a: m.psum_scatter(m.sin(a), "x", tiled=True, axis_index_groups=GROUPS),
    ),
    raw(
        "all_to_all_groups",
        M4,
        [F(8)],
        [P("x")],
        P("x"),
        lambda m, a: m.all_to_all(m.sin(a), "x", 0, 0, axis_index_groups=GROUPS),
    ),
    raw(
        "pswapaxes_groups",
        M4,
        [F(8)],
        [P("x")],
        P("x"),
        lambda m, a: m.pswapaxes(m.sin(a), "x", 0, axis_index_groups=GROUPS),
    ),
    raw("inner_gradients", M4, [F(2), F(8)], [P(), P("x")], P("x"), inner_gradients),
    raw("sgd_by_hand", M4, [F(2), F(8)], [P(), P("x")], P(), sgd_by_hand),
    raw("checkpoint", M4, [F(8)], [P("x")], P(), lambda m, a: m.checkpoint(lambda t: m.sin(m.psum(t * t, "x")))(a)),
    raw("jvp", M4, [F(8), F(8)], [P("x")] * 2, P(), lambda m, a, t: m.jvp(lambda a: m.psum(m.sin(a), "x"), (a,), (t,))),
    raw(
        "scan_with_unchecked_carry",
        M4,
        [F(8, 3)],
        [P("x")],
        P("x"),
        lambda m, a: m.scan(lambda c, row: m.sin(c + row), m.zeros((3,)), a)[None],
    ),
]
