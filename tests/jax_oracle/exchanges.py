"""all_to_all, pswapaxes, ppermute, pshuffle, pbroadcast, ragged_all_to_all."""

from __future__ import annotations

from typing import Any

from jax_oracle.programs import M1, M2, M4, M23, M24, M222, F, I, Input, P, Program, local

XY, YX, XYZ = ("x", "y"), ("y", "x"), ("x", "y", "z")
RING4 = [(i, (i + 1) % 4) for i in range(4)]
RING6 = [(i, (i + 1) % 6) for i in range(6)]


def tiled(split: int, concat: int) -> Program:
    """all_to_all of 3-D blocks, tiled."""
    return local(
        f"all_to_all_tiled_{split}{concat}",
        M2,
        [F(8, 2, 2)],
        [P("x")],
        P("x"),
        lambda m, a: m.all_to_all(m.sin(a), "x", split, concat, tiled=True),
    )


def untiled(split: int, concat: int) -> Program:
    """all_to_all of 3-D blocks whose split dim has the size of the axis."""
    shape = [4, 3, 5]
    shape[split] = 2
    shape[0] *= 2
    return local(
        f"all_to_all_untiled_{split}{concat}",
        M2,
        [F(*shape)],
        [P("x")],
        P("x"),
        lambda m, a: m.all_to_all(m.sin(a), "x", split, concat),
    )


def halo(m: Any, a: Any) -> Any:
    """A three-point stencil on a ring of blocks."""
    left = m.ppermute(a[-1:], "x", RING4)
    right = m.ppermute(a[:1], "x", [(d, s) for s, d in RING4])
    wide = m.concat([left, a, right], 0)
    return m.sin(wide[:-2] - 2.0 * wide[1:-1] + wide[2:])


def ring_matmul(m: Any, a: Any, w: Any) -> Any:
    """Collective matmul: blocks of the rows of w travel round the ring."""
    rank, n, rows = m.axis_index("x"), m.axis_size("x"), w.shape[0]
    out = m.zeros((a.shape[0], w.shape[1]))
    for step in range(n):
        start = ((rank - step) % n) * rows
        out = out + m.dynamic_slice(a, start, rows, 1) @ w
        w = m.ppermute(w, "x", RING4)
    return out


def pipeline(m: Any, a: Any, w: Any) -> Any:
    """Four stages, one per rank; the answer leaves the last stage."""
    stage = m.axis_index("x")
    state = m.where(stage == 0, a, m.zeros_like(a))
    for _ in range(3):
        state = m.ppermute(m.tanh(state * w), "x", [(0, 1), (1, 2), (2, 3)])
    return m.psum(m.where(stage == 3, m.tanh(state * w), m.zeros_like(state)), "x")


def ragged(m: Any, a: Any, out: Any) -> Any:
    """Rank r sends one row to rank 0 and two rows to rank 1."""
    rank = m.axis_index("x")
    send = m.const([1, 2], "index")
    at = m.const([0, 1], "index")
    there = m.stack([rank * 1, rank * 2], 0)
    recv = (rank + 1) * m.const([1, 1], "index")
    return m.ragged_all_to_all(m.sin(a), out * out, at, send, there, recv, axis_name="x")


PROGRAMS = [
    *[tiled(split, concat) for split, concat in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 1))],
    *[untiled(split, concat) for split, concat in ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (2, 1), (1, 2))],
    local("all_to_all_xy", M23, [F(36, 2)], [P(XY)], P(XY), lambda m, a: m.all_to_all(a * a, XY, 0, 1, tiled=True)),
    local("all_to_all_yx", M23, [F(36, 2)], [P(XY)], P(XY), lambda m, a: m.all_to_all(a * a, YX, 0, 0, tiled=True)),
    local("all_to_all_yx_untiled", M23, [F(36, 2)], [P(XY)], P(XY), lambda m, a: m.all_to_all(a * a, YX, 0, 1)),
    local(
        "all_to_all_one_of_two", M23, [F(18)], [P(XY)], P(XY), lambda m, a: m.all_to_all(a * a, "y", 0, 0, tiled=True)
    ),
    local("all_to_all_zx", M222, [F(32)], [P(XYZ)], P(XYZ), lambda m, a: m.all_to_all(a, ("z", "x"), 0, 0, tiled=True)),
    local(
        "all_to_all_invariant_input",
        M2,
        [F(4, 2)],
        [P()],
        P("x"),
        lambda m, a: m.all_to_all(a * a, "x", 0, 1, tiled=True),
    ),
    local(
        "all_to_all_mixed_tuple",
        M23,
        [F(12, 2)],
        [P("x")],
        P(XY),
        lambda m, a: m.all_to_all(a * a, XY, 0, 0, tiled=True),
    ),
    local("all_to_all_int", M4, [I(16)], [P("x")], P("x"), lambda m, a: m.all_to_all(a, "x", 0, 0)),
    local("all_to_all_size_one", M1, [F(1, 3)], [P("x")], P("x"), lambda m, a: m.all_to_all(a * a, "x", 0, 0)),
    local(
        "all_to_all_there_and_back",
        M4,
        [F(8, 4)],
        [P("x")],
        P("x"),
        lambda m, a: m.all_to_all(m.sin(m.all_to_all(a, "x", 1, 0, tiled=True)), "x", 0, 1, tiled=True),
    ),
    local(
        "all_to_all_groups",
        M4,
        [F(8, 2)],
        [P("x")],
        P("x"),
        lambda m, a: m.all_to_all(m.sin(a), "x", 0, 1, tiled=True, axis_index_groups=[[0, 2], [3, 1]]),
    ),
    local(
        "all_to_all_tree",
        M4,
        [F(16), I(16, 2)],
        [P("x")] * 2,
        P("x"),
        lambda m, a, b: m.all_to_all({"a": m.sin(a), "b": b}, "x", 0, 0, tiled=True),
    ),
    local("pswapaxes_0", M4, [F(16, 2)], [P("x")], P("x"), lambda m, a: m.pswapaxes(m.sin(a), "x", 0)),
    local("pswapaxes_1", M4, [F(8, 4)], [P("x")], P("x"), lambda m, a: m.pswapaxes(m.sin(a), "x", 1)),
    local("pswapaxes_yx", M23, [F(36)], [P(XY)], P(XY), lambda m, a: m.pswapaxes(m.sin(a), YX, 0)),
    local(
        "pswapaxes_groups",
        M4,
        [F(8, 2)],
        [P("x")],
        P("x"),
        lambda m, a: m.pswapaxes(m.sin(a), "x", 0, axis_index_groups=[[0, 2], [3, 1]]),
    ),
    local("ppermute_ring", M4, [F(8)], [P("x")], P("x"), lambda m, a: m.ppermute(m.sin(a), "x", RING4)),
    local("ppermute_partial", M4, [F(8)], [P("x")], P("x"), lambda m, a: m.ppermute(m.sin(a), "x", [(0, 2), (3, 1)])),
    local("ppermute_nobody", M4, [F(8)], [P("x")], P("x"), lambda m, a: a + m.ppermute(m.sin(a), "x", [])),
    local("ppermute_to_self", M4, [F(8)], [P("x")], P("x"), lambda m, a: m.ppermute(m.sin(a), "x", [(2, 2), (0, 1)])),
    local("ppermute_xy", M23, [F(6)], [P(XY)], P(XY), lambda m, a: m.ppermute(m.sin(a), XY, RING6)),
    local("ppermute_yx", M23, [F(6)], [P(XY)], P(XY), lambda m, a: m.ppermute(m.sin(a), YX, RING6)),
    local("ppermute_one_of_two", M24, [F(8)], [P(XY)], P(XY), lambda m, a: m.ppermute(m.sin(a), "y", RING4)),
    local(
        "ppermute_invariant_input", M4, [F(2)], [P()], P("x"), lambda m, a: m.ppermute(m.sin(a), "x", [(0, 1), (1, 3)])
    ),
    local("ppermute_mixed_tuple", M23, [F(4)], [P("x")], P(XY), lambda m, a: m.ppermute(a * a, XY, RING6)),
    local("ppermute_int", M4, [I(8)], [P("x")], P("x"), lambda m, a: m.ppermute(a, "x", RING4)),
    local("ppermute_bool", M4, [F(8)], [P("x")], P("x"), lambda m, a: m.ppermute(a > 0, "x", RING4[:3]), grad_wrt=()),
    local("ppermute_zero_dim", M4, [F(4)], [P("x")], P("x"), lambda m, a: m.ppermute(m.sum(a * a), "x", RING4)[None]),
    local(
        "ppermute_tree",
        M4,
        [F(8), F(4, 2)],
        [P("x")] * 2,
        P("x"),
        lambda m, a, b: m.ppermute((m.sin(a), [b]), "x", RING4),
    ),
    local("pshuffle", M4, [F(8)], [P("x")], P("x"), lambda m, a: m.pshuffle(m.sin(a), "x", [2, 0, 3, 1])),
    local("pshuffle_xy", M23, [F(6)], [P(XY)], P(XY), lambda m, a: m.pshuffle(m.sin(a), XY, [5, 3, 1, 0, 2, 4])),
    local("pshuffle_yx", M23, [F(6)], [P(XY)], P(XY), lambda m, a: m.pshuffle(m.sin(a), YX, [5, 3, 1, 0, 2, 4])),
    local("pbroadcast_from_2", M4, [F(8)], [P("x")], P("x"), lambda m, a: m.pbroadcast(m.sin(a), "x", 2)),
    local("pbroadcast_one_of_two", M23, [F(6)], [P(XY)], P(XY), lambda m, a: m.pbroadcast(m.sin(a), "y", 1)),
    local("pbroadcast_yx", M23, [F(6)], [P(XY)], P(XY), lambda m, a: m.pbroadcast(m.sin(a), YX, 2)),
    local("ragged_all_to_all", M2, [F(6, 2), F(8, 2)], [P("x"), P("x")], P("x"), ragged),
    local(
        "ragged_all_to_all_from_the_documentation",
        M2,
        [
            Input((6,), values=(1.0, 2.0, 2.0, 3.0, 4.0, 0.0)),
            Input((8,), values=(0.0,) * 8),
            Input((4,), "int64", (0, 1, 0, 1)),
            Input((4,), "int64", (1, 2, 1, 1)),
            Input((4,), "int64", (0, 0, 1, 2)),
            Input((4,), "int64", (1, 1, 2, 1)),
        ],
        [P("x")] * 6,
        P("x"),
        lambda m, *args: m.ragged_all_to_all(*args, axis_name="x"),
    ),
    local("halo_exchange", M4, [F(12)], [P("x")], P("x"), halo),
    local("ring_matmul", M4, [F(8, 8), F(8, 3)], [P("x"), P("x")], P("x"), ring_matmul),
    local("pipeline", M4, [F(3), F(4)], [P(), P("x")], P(), pipeline),
]
