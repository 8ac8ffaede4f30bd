"""Programs put together from a seed: ten steps on blocks of 4 x 4, each step's type recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax_oracle.programs import M22, F, P, Program, local

AXES: tuple[str | tuple[str, ...], ...] = ("x", "y", ("x", "y"), ("y", "x"))
Step = tuple[str, int, int, Any]
Type = frozenset[str]


class Draw:
    """A small congruential generator, the same everywhere."""

    def __init__(self, seed: int) -> None:
        self.state = seed * 7919 + 12345

    def __call__(self, bound: int) -> int:
        """An integer below ``bound``."""
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % bound


def names(axes: Any) -> Type:
    """The axes of one name or a tuple."""
    return frozenset((axes,) if isinstance(axes, str) else axes)


def count(m: Any, axes: Any) -> int:
    """The number of ranks along the axes."""
    return int(m.axis_size(axes))


def squared(a: Any) -> Any:
    """What JAX can differentiate twice of a reduced value."""
    return a * a


ACTIONS: dict[str, Callable[..., Any]] = {
    "sin": lambda m, a, b, ax: m.sin(a),
    "add": lambda m, a, b, ax: a + m.cos(b),
    "multiply": lambda m, a, b, ax: m.tanh(a * b),
    "matmul": lambda m, a, b, ax: m.tanh(a @ b),
    "transpose": lambda m, a, b, ax: m.transpose(a, (1, 0)) * 1.5,
    "where": lambda m, a, b, ax: m.where(a > 0.1, a, b),
    "by_rank": lambda m, a, b, ax: a * m.cos(m.astype(m.axis_index(ax), "float64")),
    "row_of_rank": lambda m, a, b, ax: a + m.dynamic_slice(b, m.axis_index(ax), 1),
    "psum": lambda m, a, b, ax: m.tanh(m.psum(a, ax)),
    "pmean": lambda m, a, b, ax: m.pmean(m.sin(a), ax),
    "pmax": lambda m, a, b, ax: m.pmax_with_gradient(a, ax),
    "ppermute": lambda m, a, b, ax: m.ppermute(a, ax, [(i, i + 1) for i in range(count(m, ax) - 1)]) + 0.1,
    "pshuffle": lambda m, a, b, ax: m.pshuffle(a, ax, list(range(count(m, ax)))[::-1]),
    "all_gather": lambda m, a, b, ax: m.tanh(m.sum(m.all_gather(a, ax) * 0.5, 0)),
    "all_gather_tiled": lambda m, a, b, ax: m.all_gather(a, ax, axis=1, tiled=True)[:, -4:],
    "all_gather_to_invarying": lambda m, a, b, ax: m.all_gather(a, ax, tiled=True, to="invarying")[-5:-1],
    "psum_scatter": lambda m, a, b, ax: m.tanh(
        m.psum_scatter(m.concat([a, b] * (count(m, ax) // 2), 0), ax, tiled=True)
    ),
    "all_to_all": lambda m, a, b, ax: m.reshape(m.all_to_all(a, ax, 0, 1, tiled=True), (4, 4)),
    "pswapaxes": lambda m, a, b, ax: m.all_to_all(a, ax, 1, 1, tiled=True),
    "to_varying": lambda m, a, b, ax: m.pcast(m.sin(a), ax, to="varying"),
    "through_reduced": lambda m, a, b, ax: m.tanh(m.pcast(squared(m.pcast(a, ax, to="reduced")), ax, to="varying")),
    "through_unreduced": lambda m, a, b, ax: m.tanh(m.psum(m.pcast(a, ax, to="unreduced"), ax)),
    "scatter_unreduced": lambda m, a, b, ax: (
        m.sum(m.psum_scatter(m.pcast(a, ax, to="unreduced"), ax, tiled=True), 0) + b
    ),
    "stop_gradient": lambda m, a, b, ax: m.stop_gradient(a) * b,
    "grad": lambda m, a, b, ax: m.grad(lambda t: m.sum(m.sin(t * b)))(a),
    "grad_of_psum": lambda m, a, b, ax: m.grad(lambda t: m.sum(m.sin(m.psum(t, ax)) * b))(a),
    "checkpoint": lambda m, a, b, ax: m.checkpoint(lambda t, s: m.tanh(m.pmean(t, ax) * s))(a, b),
    "vmap": lambda m, a, b, ax: m.vmap(lambda row: m.psum(m.sin(row), ax) / 2)(a),
}
UNARY = {
    "sin",
    "transpose",
    "by_rank",
    "psum",
    "pmean",
    "pmax",
    "ppermute",
    "pshuffle",
    "all_gather",
    "all_gather_tiled",
}
UNARY |= {
    "all_gather_to_invarying",
    "all_to_all",
    "pswapaxes",
    "to_varying",
    "through_reduced",
    "through_unreduced",
    "vmap",
}
SUMMED = {"psum", "pmean", "vmap", "checkpoint", "grad_of_psum", "psum_scatter"}


def result(action: str, a: Type, b: Type, axes: Any) -> Type | None:
    """The axes that the step's result varies over; None when the step would be refused."""
    over = names(axes)
    both = a if action in UNARY else a | b
    if action == "psum_scatter":
        return both | over if over <= both or not over & both else None
    if action in SUMMED and not (over <= a or not over & a):
        return None
    if action in {"through_unreduced", "scatter_unreduced"} and not over <= a:
        return None
    if action in {"to_varying", "through_reduced"} and over & a:
        return None
    if action in {"psum", "pmean", "vmap", "pmax", "all_gather_to_invarying", "through_unreduced"}:
        return a - over
    if action == "checkpoint":
        return (a - over) | b
    if action in {"grad", "grad_of_psum"}:
        return a
    if action in {"sin", "add", "multiply", "matmul", "transpose", "where", "stop_gradient"}:
        return both
    return both | over


def program(seed: int) -> Program:
    """Ten well-typed steps; the last three values leave together."""
    draw = Draw(seed)
    types: list[Type] = [frozenset("x"), frozenset("xy"), frozenset(), frozenset("y")]
    steps: list[Step] = []
    while len(steps) < 10:
        action = sorted(ACTIONS)[draw(len(ACTIONS))]
        i, j, axes = draw(len(types)), draw(len(types)), AXES[draw(len(AXES))]
        if (found := result(action, types[i], types[j], axes)) is not None:
            steps.append((action, i, j, axes))
            types.append(found)

    def body(m: Any, *given: Any) -> Any:
        pool = list(given)
        for k, (action, i, j, axes) in enumerate(steps):
            pool.append(m.tap(f"{k} {action}", ACTIONS[action](m, pool[i], pool[j], axes)))
        return pool[-1] + pool[-2] * 0.5, pool[-3]

    def spec(of: Type) -> Any:
        return P(tuple(sorted(of))) if of else P()

    shapes = [F(4 * 2 ** len(t), 4) for t in types[:4]]
    out = (spec(types[-1] | types[-2]), spec(types[-3]))
    return local(f"generated_{seed:02d}", M22, shapes, [spec(t) for t in types[:4]], out, body)


PROGRAMS = [program(seed) for seed in range(64)]
