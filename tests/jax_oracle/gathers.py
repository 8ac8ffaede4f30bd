"""all_gather in its three forms, psum_scatter."""

from __future__ import annotations

from typing import Any

from jax_oracle.programs import M1, M4, M12, M21, M23, M222, B, F, I, P, local

XY, YX, XYZ = ("x", "y"), ("y", "x"), ("x", "y", "z")


def fsdp(m: Any, w: Any, a: Any) -> Any:
    """Parameters gathered on use, typed reduced, so that their gradient is one reduce-scatter."""
    full = m.all_gather(w, "x", tiled=True, to="reduced")
    return m.psum(m.sum(m.tanh(a @ full)), "x")


def gather_then_own(m: Any, a: Any) -> Any:
    """Gather, then take this rank's part again."""
    full = m.all_gather(a, "x", tiled=True)
    return m.dynamic_slice(full * full, m.axis_index("x") * a.shape[0], a.shape[0])


def row_parallel(m: Any, a: Any, w: Any) -> Any:
    """A matmul with the contracted dim sharded, its result scattered."""
    return m.psum_scatter(a @ w, "x", scatter_dimension=1, tiled=True)


def sequence_parallel(m: Any, a: Any, w1: Any, w2: Any) -> Any:
    """all_gather, column-parallel, row-parallel, psum_scatter: a block of a sharded MLP."""
    full = m.all_gather(a, "x", tiled=True)
    return m.psum_scatter(m.tanh(full @ w1) @ w2, "x", tiled=True)


def reduced_on_both_axes(m: Any, w: Any, a: Any) -> Any:
    """A weight reduced over both axes meets data that varies over both."""
    full = m.all_gather(w, XY, tiled=True, to="reduced")
    return m.psum(m.sum(m.sin(a @ full)), XY)


PROGRAMS = [
    local("all_gather", M4, [F(8, 3)], [P("x")], P("x"), lambda m, a: m.all_gather(m.sin(a), "x")),
    local("all_gather_dim_1", M4, [F(8, 3)], [P("x")], P("x"), lambda m, a: m.all_gather(a, "x", axis=1)),
    local("all_gather_dim_2", M4, [F(8, 3)], [P("x")], P("x"), lambda m, a: m.all_gather(a, "x", axis=2)),
    local("all_gather_last_dim", M4, [F(8, 3)], [P("x")], P("x"), lambda m, a: m.all_gather(a, "x", axis=-1)),
    local("all_gather_tiled", M4, [F(8, 3)], [P("x")], P("x"), lambda m, a: m.all_gather(a, "x", tiled=True)),
    local(
        "all_gather_tiled_dim_1", M4, [F(8, 3)], [P("x")], P("x"), lambda m, a: m.all_gather(a, "x", axis=1, tiled=True)
    ),
    local(
        "all_gather_tiled_dim_-2",
        M4,
        [F(8, 3)],
        [P("x")],
        P("x"),
        lambda m, a: m.all_gather(a, "x", axis=-2, tiled=True),
    ),
    local("all_gather_xy", M23, [F(6, 2)], [P(XY)], P(XY), lambda m, a: m.all_gather(a * a, XY, tiled=True)),
    local("all_gather_yx", M23, [F(6, 2)], [P(XY)], P(XY), lambda m, a: m.all_gather(a * a, YX, tiled=True)),
    local("all_gather_yx_untiled", M23, [F(6, 2)], [P(XY)], P(XY), lambda m, a: m.all_gather(a * a, YX, axis=1)),
    local("all_gather_zx", M222, [F(8)], [P(XYZ)], P(XYZ), lambda m, a: m.all_gather(a, ("z", "x"), tiled=True)),
    local(
        "all_gather_one_of_two", M23, [F(6, 2)], [P(XY)], P(XY), lambda m, a: m.all_gather(m.sin(a), "y", tiled=True)
    ),
    local("all_gather_invariant_input", M4, [F(2)], [P()], P("x"), lambda m, a: m.all_gather(m.sin(a), "x")),
    local(
        "all_gather_mixed_tuple", M23, [F(4, 2)], [P("x")], P(XY), lambda m, a: m.all_gather(m.sin(a), XY, tiled=True)
    ),
    local("all_gather_zero_dim", M4, [F()], [P()], P("x"), lambda m, a: m.all_gather(a * (m.axis_index("x") + 1), "x")),
    local("all_gather_int", M4, [I(8)], [P("x")], P("x"), lambda m, a: m.all_gather(a, "x", tiled=True)),
    local("all_gather_bool", M4, [B(8)], [P("x")], P(), lambda m, a: m.all_gather(a, "x", tiled=True, to="invarying")),
    local("all_gather_no_axes", M4, [F(8)], [P("x")], P("x"), lambda m, a: m.all_gather(a * a, ())),
    local("all_gather_size_one_axis", M1, [F(4, 2)], [P("x")], P("x"), lambda m, a: m.all_gather(a * a, "x")),
    local(
        "all_gather_tree",
        M4,
        [F(8, 2), I(4)],
        [P("x"), P("x")],
        P("x"),
        lambda m, a, b: m.all_gather({"a": m.sin(a), "b": [b]}, "x"),
    ),
    local(
        "all_gather_to_invarying",
        M4,
        [F(8, 3)],
        [P("x")],
        P(),
        lambda m, a: m.all_gather(m.sin(a), "x", to="invarying"),
    ),
    local(
        "all_gather_to_invarying_tiled",
        M4,
        [F(8, 3)],
        [P("x")],
        P(),
        lambda m, a: m.all_gather(m.sin(a), "x", axis=1, tiled=True, to="invarying"),
    ),
    local(
        "all_gather_to_invarying_xy",
        M23,
        [F(6, 2)],
        [P(XY)],
        P(),
        lambda m, a: m.all_gather(a * a, XY, tiled=True, to="invarying"),
    ),
    local(
        "all_gather_to_invarying_yx",
        M23,
        [F(6, 2)],
        [P(XY)],
        P(),
        lambda m, a: m.all_gather(a * a, YX, axis=-1, to="invarying"),
    ),
    local(
        "all_gather_to_invarying_mixed",
        M23,
        [F(4, 2)],
        [P("x")],
        P(),
        lambda m, a: m.all_gather(m.sin(a), YX, tiled=True, to="invarying"),
    ),
    local(
        "all_gather_to_invarying_of_invariant",
        M4,
        [F(2)],
        [P()],
        P(),
        lambda m, a: m.all_gather(a * a, "x", to="invarying"),
    ),
    local(
        "all_gather_to_invarying_one_of_two",
        M23,
        [F(6, 2)],
        [P(XY)],
        P("x"),
        lambda m, a: m.all_gather(a * a, "y", tiled=True, to="invarying"),
    ),
    local(
        "all_gather_to_invarying_size_one",
        M21,
        [F(4)],
        [P(XY)],
        P("x"),
        lambda m, a: m.all_gather(a * a, "y", to="invarying"),
    ),
    local(
        "gathered_invariant_meets_varying",
        M4,
        [F(8)],
        [P("x")],
        P("x"),
        lambda m, a: a[0] * m.all_gather(a, "x", to="invarying"),
    ),
    local("all_gather_to_reduced", M4, [F(8, 3), F(4, 8)], [P("x"), P("x")], P(), fsdp),
    local("all_gather_to_reduced_xy", M23, [F(6, 2), F(6, 6)], [P(XY), P(XY)], P(), reduced_on_both_axes),
    local(
        "all_gather_to_reduced_untiled",
        M4,
        [F(8), F(4, 2)],
        [P("x"), P("x")],
        P(),
        lambda m, w, a: m.psum(m.sin(m.all_gather(w, "x", to="reduced") * a), "x"),
    ),
    local("gather_then_own_slice", M4, [F(8, 3)], [P("x")], P("x"), gather_then_own),
    local("psum_scatter", M4, [F(16, 3)], [P("x")], P("x"), lambda m, a: m.psum_scatter(m.sin(a), "x")),
    local(
        "psum_scatter_dim_1",
        M4,
        [F(8, 4)],
        [P("x")],
        P("x"),
        lambda m, a: m.psum_scatter(m.sin(a), "x", scatter_dimension=1),
    ),
    local(
        "psum_scatter_last_dim",
        M4,
        [F(8, 4)],
        [P("x")],
        P("x"),
        lambda m, a: m.psum_scatter(a, "x", scatter_dimension=-1),
    ),
    local("psum_scatter_tiled", M4, [F(32, 2)], [P("x")], P("x"), lambda m, a: m.psum_scatter(a * a, "x", tiled=True)),
    local(
        "psum_scatter_tiled_dim_1",
        M4,
        [F(8, 8)],
        [P("x")],
        P(None, "x"),
        lambda m, a: m.psum_scatter(m.sin(a), "x", scatter_dimension=1, tiled=True),
    ),
    local(
        "psum_scatter_tiled_last_dim",
        M4,
        [F(4, 2, 8)],
        [P("x")],
        P("x"),
        lambda m, a: m.psum_scatter(m.sin(a), "x", scatter_dimension=-1, tiled=True),
    ),
    local("psum_scatter_xy", M23, [F(36)], [P(XY)], P(XY), lambda m, a: m.psum_scatter(m.sin(a), XY, tiled=True)),
    local("psum_scatter_yx", M23, [F(36)], [P(XY)], P(XY), lambda m, a: m.psum_scatter(m.sin(a), YX, tiled=True)),
    local("psum_scatter_yx_untiled", M23, [F(36, 2)], [P(XY)], P(XY), lambda m, a: m.psum_scatter(m.sin(a), YX)),
    local(
        "psum_scatter_one_of_two", M23, [F(18, 2)], [P(XY)], P(XY), lambda m, a: m.psum_scatter(a * a, "y", tiled=True)
    ),
    local(
        "psum_scatter_invariant_input",
        M4,
        [F(4, 2)],
        [P()],
        P("x"),
        lambda m, a: m.psum_scatter(m.sin(a), "x", tiled=True),
    ),
    local("psum_scatter_int", M4, [I(16)], [P("x")], P("x"), lambda m, a: m.psum_scatter(a, "x", tiled=True)),
    local(
        "psum_scatter_size_one_axis",
        M12,
        [F(4, 2)],
        [P(XY)],
        P(XY),
        lambda m, a: m.psum_scatter(a * a, "x", tiled=True),
    ),
    local("psum_scatter_no_axes", M4, [F(8)], [P("x")], P("x"), lambda m, a: m.psum_scatter(a * a, ())),
    local(
        "psum_scatter_of_unreduced",
        M4,
        [F(16, 2)],
        [P("x")],
        P("x"),
        lambda m, a: m.psum_scatter(m.pcast(m.sin(a), "x", to="unreduced"), "x", tiled=True),
    ),
    local(
        "psum_scatter_of_unreduced_yx",
        M23,
        [F(36)],
        [P(XY)],
        P(XY),
        lambda m, a: m.psum_scatter(m.pcast(m.sin(a), XY, to="unreduced"), YX, tiled=True),
    ),
    local(
        "scatter_then_gather_is_psum",
        M4,
        [F(16, 2)],
        [P("x")],
        P(),
        lambda m, a: m.all_gather(m.psum_scatter(m.sin(a), "x", tiled=True), "x", tiled=True, to="invarying"),
    ),
    local("row_parallel_matmul", M4, [F(3, 8), F(8, 4)], [P(None, "x"), P("x")], P(None, "x"), row_parallel),
    local(
        "sequence_parallel_mlp",
        M4,
        [F(8, 3), F(3, 8), F(8, 3)],
        [P("x"), P(None, "x"), P("x")],
        P("x"),
        sequence_parallel,
    ),
    local(
        "all_gather_groups",
        M4,
        [F(8)],
        [P("x")],
        P("x"),
        lambda m, a: m.all_gather(m.sin(a), "x", tiled=True, axis_index_groups=[[0, 2], [3, 1]]),
    ),
    local(
        "all_gather_groups_yx",
        M23,
        [F(6)],
        [P(XY)],
        P(XY),
        lambda m, a: m.all_gather(m.sin(a), YX, axis_index_groups=[[0, 1, 2], [3, 4, 5]]),
    ),
    local(
        "psum_scatter_groups",
        M4,
        [F(16)],
        [P("x")],
        P("x"),
        lambda m, a: m.psum_scatter(m.sin(a), "x", tiled=True, axis_index_groups=[[0, 2], [3, 1]]),
    ),
]
