"""vmap and jvp, of shard_map and inside it; nested and partially manual maps."""

from __future__ import annotations

from typing import Any

from jax_oracle.programs import M4, M22, M23, M222, F, I, P, local, whole

XY, YX = ("x", "y"), ("y", "x")
RING4 = [(i, (i + 1) % 4) for i in range(4)]


def psum_map(m: Any) -> Any:
    """A map that sums over x, shared by several programs."""
    return m.shard_map(lambda a: m.psum(m.sin(a), "x"), (P("x"),), P())


def mixed_map(m: Any) -> Any:
    """A map of a sharded and an invariant argument with a sharded result."""
    return m.shard_map(lambda a, w: m.sin(a) * m.psum(m.sum(a), "x") * w, (P("x"), P()), P("x"))


def inner(name: str, apply: Any, shape: tuple[int, ...] = (8, 4), out: Any = None) -> Any:
    """vmap inside the body, over the last dim, of a collective."""
    return local(
        f"vmap_inside_{name}",
        M4,
        [F(*shape)],
        [P("x")],
        P("x") if out is None else out,
        lambda m, a: m.vmap(lambda col: apply(m, m.sin(col)), in_axes=a.ndim - 1, out_axes=-1)(a),
    )


def vmap_two_arguments(m: Any, a: Any, w: Any) -> Any:
    """One argument mapped, the other not."""
    return m.vmap(lambda row, w: m.psum(m.sum(m.sin(row * w)), "x"), in_axes=(0, None))(a, w)


def vmap_twice(m: Any, a: Any) -> Any:
    """vmap of vmap with a collective at the bottom."""
    return m.vmap(m.vmap(lambda t: m.psum(m.sin(t), "x") * t))(a)


def per_example_gradients(m: Any, w: Any, a: Any) -> Any:
    """vmap of grad with a cast weight: one gradient per row."""
    w = m.pcast(w, "x", to="varying")
    return m.vmap(lambda row: m.grad(lambda w: m.sum(m.sin(w * row)))(w))(a)


def vmap_of_invariant(m: Any, w: Any) -> Any:
    """vmap over an invariant argument of a collective that makes it vary."""
    return m.vmap(lambda row: row * (m.axis_index("x") + 1))(w)


def nested(m: Any, a: Any) -> Any:
    """Manual over x, then over y inside."""

    def outer(a: Any) -> Any:
        total = m.shard_map(lambda b: m.psum(m.sin(m.tap("inner", b)), "y"), (P("y"),), P(), axis_names={"y"})(a)
        return m.tap("outer", total) * (m.axis_index("x") + 1)

    return m.shard_map(outer, (P("x"),), P("x"), axis_names={"x"})(a)


def nested_psum_over_both(m: Any, a: Any) -> Any:
    """The inner map may use the outer axis too."""

    def outer(a: Any) -> Any:
        return m.shard_map(lambda b: m.psum(m.sin(b), XY), (P("y"),), P(), axis_names={"y"})(a)

    return m.shard_map(outer, (P("x"),), P(), axis_names={"x"})(a)


def nested_invariant_argument(m: Any, a: Any, w: Any) -> Any:
    """An argument invariant over both goes down with P()."""

    def outer(a: Any, w: Any) -> Any:
        inner = m.shard_map(lambda b, w: m.sin(b * w), (P("y"), P()), P("y"), axis_names={"y"})
        return inner(a, w)

    return m.shard_map(outer, (P("x"), P()), P("x"), axis_names={"x"})(a, w)


def nested_gather(m: Any, a: Any) -> Any:
    """all_gather inside over the inner axis, outside over the outer."""

    def outer(a: Any) -> Any:
        gathered = m.shard_map(
            lambda b: m.all_gather(m.sin(b), "y", tiled=True, to="invarying"), (P("y"),), P(), axis_names={"y"}
        )(a)
        return m.all_gather(gathered, "x", tiled=True)

    return m.shard_map(outer, (P("x"),), P("x"), axis_names={"x"})(a)


def partial_manual(m: Any, a: Any) -> Any:
    """Manual over one axis of two."""
    return m.shard_map(lambda a: m.sin(m.psum(a, "x")), (P("x"),), P(), axis_names={"x"})(a)


def partial_manual_gradient(m: Any, w: Any, a: Any) -> Any:
    """A gradient taken inside a partially manual map."""
    step = m.shard_map(lambda w, a: m.grad(lambda w: m.sum(m.sin(a * w)))(w), (P(), P("y")), P(), axis_names={"y"})
    return step(w, a)


def partial_manual_two_of_three(m: Any, a: Any) -> Any:
    """Manual over two axes of three, their order in tuples free."""
    return m.shard_map(
        lambda a: m.all_gather(m.sin(a), ("z", "x"), tiled=True, to="invarying"),
        (P(("x", "z")),),
        P(),
        axis_names={"x", "z"},
    )(a)


PROGRAMS = [
    whole("vmap_outside", M4, [F(8, 3)], lambda m, a: m.vmap(psum_map(m), in_axes=1, out_axes=1)(a)),
    whole("vmap_outside_leading", M4, [F(3, 8)], lambda m, a: m.vmap(psum_map(m))(a)),
    whole("vmap_outside_moved", M4, [F(8, 3)], lambda m, a: m.vmap(psum_map(m), in_axes=1, out_axes=0)(a)),
    whole(
        "vmap_outside_two_arguments", M4, [F(3, 8), F(2)], lambda m, a, w: m.vmap(mixed_map(m), in_axes=(0, None))(a, w)
    ),
    whole(
        "vmap_outside_both_mapped",
        M4,
        [F(3, 8), F(2, 3)],
        lambda m, a, w: m.vmap(mixed_map(m), in_axes=(0, 1), out_axes=1)(a, w),
    ),
    whole("vmap_spmd_axis_name", M22, [F(4, 8)], lambda m, a: m.vmap(psum_map(m), spmd_axis_name="y")(a)),
    whole(
        "vmap_spmd_axis_name_moved",
        M22,
        [F(8, 4)],
        lambda m, a: m.vmap(psum_map(m), in_axes=1, out_axes=1, spmd_axis_name="y")(a),
    ),
    whole(
        "vmap_spmd_axis_name_unmapped_argument",
        M22,
        [F(4, 8), F(4)],
        lambda m, a, w: m.vmap(mixed_map(m), in_axes=(0, None), spmd_axis_name="y")(a, w),
    ),
    whole("vmap_of_vmap_outside", M4, [F(2, 3, 8)], lambda m, a: m.vmap(m.vmap(psum_map(m)))(a)),
    inner("psum", lambda m, a: m.psum(a, "x"), out=P()),
    inner("pmean", lambda m, a: m.pmean(a, "x"), out=P()),
    inner("all_gather", lambda m, a: m.all_gather(a, "x")),
    inner("all_gather_tiled", lambda m, a: m.all_gather(a, "x", tiled=True)),
    inner("all_gather_last_dim", lambda m, a: m.all_gather(a, "x", axis=-1)),
    inner("all_gather_to_invarying", lambda m, a: m.all_gather(a, "x", tiled=True, to="invarying"), out=P()),
    local(
        "vmap_inside_psum_scatter",
        M4,
        [F(3, 16)],
        [P(None, "x")],
        P("x"),
        lambda m, a: m.vmap(lambda row: m.psum_scatter(m.sin(row), "x"))(a),
    ),
    inner("psum_scatter_tiled", lambda m, a: m.psum_scatter(a, "x", tiled=True), shape=(16, 3)),
    inner("all_to_all", lambda m, a: m.all_to_all(a, "x", 1, 0, tiled=True), shape=(8, 4, 3)),
    inner("all_to_all_untiled", lambda m, a: m.all_to_all(a, "x", 1, 0), shape=(8, 4, 3)),
    inner("ppermute", lambda m, a: m.ppermute(a, "x", RING4)),
    inner("pcast", lambda m, a: m.pcast(m.psum(a, "x"), "x", to="varying")),
    inner("axis_index", lambda m, a: a * m.axis_index("x")),
    local("vmap_inside_two_arguments", M4, [F(8, 3), F(3)], [P("x"), P()], P(), vmap_two_arguments),
    local(
        "vmap_inside_collective_of_unmapped",
        M4,
        [F(8, 3), F(8)],
        [P("x"), P("x")],
        P("x"),
        lambda m, a, b: m.vmap(lambda row, b: row * m.psum(m.sum(m.sin(b)), "x"), in_axes=(0, None))(a, b),
    ),
    local("vmap_inside_twice", M4, [F(8, 3)], [P("x")], P("x"), vmap_twice),
    local("vmap_inside_of_grad", M4, [F(3), F(8, 3)], [P(), P("x")], P("x"), per_example_gradients),
    local("vmap_inside_of_invariant", M4, [F(2, 3)], [P()], P("x"), vmap_of_invariant),
    whole("jvp_outside", M4, [F(8), F(8)], lambda m, a, t: m.jvp(psum_map(m), (a,), (t,))),
    whole(
        "jvp_outside_two_arguments",
        M4,
        [F(8), F(2), F(8), F(2)],
        lambda m, a, w, s, t: m.jvp(mixed_map(m), (a, w), (s, t)),
    ),
    whole("jvp_of_vmap", M4, [F(3, 8), F(3, 8)], lambda m, a, t: m.jvp(m.vmap(psum_map(m)), (a,), (t,))),
    whole("nested", M22, [F(8)], nested),
    whole("nested_psum_over_both", M23, [F(12)], nested_psum_over_both),
    whole("nested_invariant_argument", M22, [F(8), F(2)], nested_invariant_argument),
    whole("nested_gather", M22, [F(8)], nested_gather),
    whole("partial_manual", M22, [F(8)], partial_manual),
    whole("partial_manual_gradient", M22, [F(3), F(4, 3)], partial_manual_gradient),
    whole("partial_manual_two_of_three", M222, [F(8, 2)], partial_manual_two_of_three),
    local("vmap_inside_int", M4, [I(8, 3)], [P("x")], P(), lambda m, a: m.vmap(lambda c: m.psum(c, "x"), in_axes=1)(a)),
]
