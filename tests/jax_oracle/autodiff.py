"""Gradients taken inside the body, and what survives around them."""

from __future__ import annotations

from typing import Any

from jax_oracle.programs import M4, M22, M23, M222, F, I, P, local, whole

XY, YX = ("x", "y"), ("y", "x")


def squared_error(m: Any, w: Any, a: Any) -> Any:
    """A loss of this rank's data."""
    return m.sum(m.tanh(a @ w) ** 2)


def sgd(m: Any, w: Any, a: Any) -> Any:
    """Three data-parallel steps; the gradient of an invariant weight is summed already."""
    for _ in range(3):
        w = w - 0.1 * m.grad(lambda w: squared_error(m, w, a))(w) / m.axis_size("x")
    return w


def sgd_by_hand(m: Any, w: Any, a: Any) -> Any:
    """The same with a local gradient and a pmean of one's own."""
    for _ in range(3):
        local_grad = m.grad(lambda w: squared_error(m, w, a))(m.pcast(w, "x", to="varying"))
        w = w - 0.1 * m.pmean(local_grad, "x")
    return w


def sgd_accumulating(m: Any, w: Any, a: Any) -> Any:
    """Micro-batches add pending gradients; one psum at the end."""
    held = m.pcast(w, "x", to="reduced")
    first = m.tap("gradient", m.grad(lambda w: squared_error(m, w, a[:1]))(held))
    second = m.grad(lambda w: squared_error(m, w, a[1:]))(held)
    return w - 0.1 * m.psum(first + second, "x")


def fsdp_step(m: Any, w: Any, a: Any) -> Any:
    """Sharded weights: the gradient comes back reduce-scattered."""

    def loss(w: Any) -> Any:
        full = m.all_gather(w, "x", tiled=True, to="reduced")
        return squared_error(m, full, a)

    return w - 0.1 * m.grad(loss)(w)


def tensor_parallel(m: Any, a: Any, w1: Any, w2: Any) -> Any:
    """A two-layer block with heads over y and batch over x; gradients of everything, inside."""

    def loss(a: Any, w1: Any, w2: Any) -> Any:
        return m.sum(m.sin(m.psum(m.tanh(a @ w1) @ w2, "y")))

    return m.grad(loss, argnums=(0, 1, 2))(a, w1, w2)


def value_and_grad_types(m: Any, w: Any, a: Any) -> Any:
    """The value stays varying, the gradient is invariant."""
    (value, aux), grad = m.value_and_grad(lambda w: (squared_error(m, w, a), m.sin(a)), has_aux=True)(w)
    return value[None], aux, grad


def hessian_vector(m: Any, w: Any, a: Any, v: Any) -> Any:
    """grad of the inner product of a gradient with v."""

    def directional(w: Any) -> Any:
        return m.sum(m.grad(lambda w: m.psum(m.sum(m.sin(a * w)), "x"))(w) * v)

    return m.grad(directional)(w)


def forward_over_reverse(m: Any, w: Any, a: Any, v: Any) -> Any:
    """jvp of a gradient."""
    gradient = m.grad(lambda w: m.psum(m.sum(m.sin(a * w)), "x"))
    return m.jvp(gradient, (w,), (v,))[1]


def jvp_inside(m: Any, a: Any, t: Any) -> Any:
    """jvp through a collective with a varying tangent."""
    return m.jvp(lambda a: m.psum(m.sin(a), "x"), (a,), (t,))


def vjp_varying(m: Any, a: Any, w: Any, ct: Any) -> Any:
    """The pull-back of a varying output."""
    _, pull = m.vjp(lambda a, w: m.sin(a * w), a, w)
    return pull(ct)


def vjp_invariant(m: Any, a: Any, ct: Any) -> Any:
    """The pull-back of an invariant output takes an invariant cotangent."""
    _, pull = m.vjp(lambda a: m.psum(m.sin(a), "x"), a)
    return pull(ct)[0]


def custom_scale(m: Any, w: Any, a: Any) -> Any:
    """A custom rule of an invariant and a varying operand."""

    def forward(w: Any, a: Any) -> Any:
        return m.sin(a) * w, (w, a)

    def backward(residuals: Any, g: Any) -> Any:
        w, a = residuals
        return m.custom_cotangent(m.sum(g * m.sin(a), 0), "x"), g * w * m.cos(a)

    scale = m.custom_vjp(lambda w, a: m.sin(a) * w, forward, backward)
    return scale(w, a)


def custom_straight_through(m: Any, a: Any) -> Any:
    """A custom rule of one varying argument."""
    sign = m.custom_vjp(
        lambda a: m.where(a > 0, 1.0, -1.0) + a * 0,
        lambda a: (m.where(a > 0, 1.0, -1.0) + a * 0, a),
        lambda a, g: (g * m.cos(a),),
    )
    return m.psum(sign(a) * a, "x")


def custom_psum(m: Any, a: Any) -> Any:
    """Megatron's g: psum forward, a cast backward, by a custom rule."""
    reduce = m.custom_vjp(
        lambda a: m.psum(a, "x"), lambda a: (m.psum(a, "x"), ()), lambda _, g: (m.pcast(g, "x", to="varying"),)
    )
    return m.sin(reduce(a * a))


def checkpointed(m: Any, a: Any, w: Any) -> Any:
    """Two checkpointed layers with collectives inside."""

    def layer(a: Any, w: Any) -> Any:
        full = m.all_gather(a, "x", tiled=True)
        return m.psum_scatter(m.tanh(full @ w), "x", tiled=True)

    return m.checkpoint(layer)(m.checkpoint(layer)(a, w), w)


def checkpoint_in_grad(m: Any, w: Any, a: Any) -> Any:
    """A gradient inside the body, through checkpoint."""
    return m.grad(lambda w: m.sum(m.checkpoint(lambda w: m.sin(m.psum(a * w, "x")))(w)))(w)


def loops(m: Any, w: Any, a: Any) -> Any:
    """Gradient through a scan with a collective."""

    def loss(w: Any) -> Any:
        last = m.scan(lambda c, row: m.tanh(c * w + m.psum(row, "x")), m.zeros((3,)), a)
        return m.sum(last * last)

    return m.grad(loss)(w)


def ring_gradient(m: Any, a: Any) -> Any:
    """Gradient inside the body through a ring of permutes."""

    def loss(a: Any) -> Any:
        out = a
        for _ in range(2):
            out = m.sin(m.ppermute(out, "x", [(i, (i + 1) % 4) for i in range(4)])) * a
        return m.sum(out)

    return m.grad(loss)(a)


def closure(m: Any, w: Any, a: Any) -> Any:
    """The weight is closed over: invariant and differentiable."""
    return m.shard_map(lambda a: m.psum(m.sin(a * w), "x"), (P("x"),), P())(a)


def composed(m: Any, a: Any, w: Any) -> Any:
    """Two maps with different layouts in between."""
    first = m.shard_map(lambda a, w: m.tanh(a @ w), (P("x"), P()), P("x"))
    second = m.shard_map(lambda h: m.sin(m.psum(h, "x")), (P(None, "x"),), P())
    return second(first(a, w))


def gradient_outside_and_inside(m: Any, w: Any, a: Any) -> Any:
    """A gradient inside; the test takes another one outside, and a third."""
    return m.grad(lambda w: m.pmean(squared_error(m, w, a), "x"))(w)


def pending_gradient(m: Any, w: Any, a: Any) -> Any:
    """A weight typed reduced gets its gradient pending."""
    gradient = m.grad(lambda w: m.sum(m.sin(a * w)))(m.pcast(w, "x", to="reduced"))
    return m.psum_scatter(m.tap("gradient", gradient), "x", tiled=True)


def through(name: str, apply: Any, **options: Any) -> Any:
    """The gradient, inside the body, of a collective followed by a function that tells ranks apart."""

    def body(m: Any, a: Any) -> Any:
        def loss(a: Any) -> Any:
            out = apply(m, m.sin(a))
            return m.sum(out * out * (1 + m.axis_index("x")))

        return m.tap("gradient", m.grad(loss)(a))

    spec = options.pop("spec", P("x"))
    return local(f"inner_grad_of_{name}", M4, [F(16, 4)], [spec], spec, body, **options)


def forward(name: str, apply: Any, *, spec: Any = None) -> Any:
    """The tangent, inside the body, of a collective; the test differentiates it in reverse."""
    spec = P("x") if spec is None else spec

    def body(m: Any, a: Any, t: Any) -> Any:
        return m.jvp(lambda a: apply(m, m.sin(a)) * (1 + m.axis_index("x")), (a,), (t,))

    return local(f"inner_jvp_of_{name}", M4, [F(16, 4), F(16, 4)], [spec, spec], P("x"), body)


GROUPS = [[0, 2], [3, 1]]

PROGRAMS = [
    through("psum", lambda m, a: m.psum(a, "x")),
    through("pmean", lambda m, a: m.pmean(a, "x")),
    through("psum_of_invariant", lambda m, a: m.psum(a, "x"), spec=P()),
    through("all_gather", lambda m, a: m.all_gather(a, "x", axis=1)),
    through("all_gather_to_invarying", lambda m, a: m.all_gather(a, "x", tiled=True, to="invarying")),
    through("all_gather_to_reduced", lambda m, a: m.all_gather(a, "x", tiled=True, to="reduced")),
    through("all_gather_of_invariant", lambda m, a: m.all_gather(a, "x", axis=1), spec=P()),
    through("psum_scatter", lambda m, a: m.psum_scatter(a, "x")),
    through("all_to_all", lambda m, a: m.all_to_all(a, "x", 1, 0, tiled=True)),
    through("ppermute", lambda m, a: m.ppermute(a, "x", [(0, 3), (3, 1)])),
    through("pbroadcast", lambda m, a: m.pbroadcast(a, "x", 1)),
    through("pcast_to_varying", lambda m, a: m.pcast(a, "x", to="varying"), spec=P()),
    through("all_gather_groups", lambda m, a: m.all_gather(a, "x", axis_index_groups=GROUPS)),
    through("pmax", lambda m, a: m.pmax_with_gradient(a, "x")),
    forward("psum", lambda m, a: m.psum(a, "x")),
    forward("pmean", lambda m, a: m.pmean(a, "x")),
    forward("psum_of_invariant", lambda m, a: m.psum(a, "x"), spec=P()),
    forward("all_gather", lambda m, a: m.all_gather(a, "x", axis=1)),
    forward("all_gather_to_invarying", lambda m, a: m.all_gather(a, "x", tiled=True, to="invarying")),
    forward("all_gather_to_reduced", lambda m, a: m.all_gather(a, "x", tiled=True, to="reduced")),
    forward("psum_scatter", lambda m, a: m.psum_scatter(a, "x")),
    forward("all_to_all", lambda m, a: m.all_to_all(a, "x", 1, 0, tiled=True)),
    forward("ppermute", lambda m, a: m.ppermute(a, "x", [(0, 3), (3, 1)])),
    forward("pbroadcast", lambda m, a: m.pbroadcast(a, "x", 1)),
    forward("pcast_to_varying", lambda m, a: m.pcast(a, "x", to="varying"), spec=P()),
    forward("pcast_to_unreduced", lambda m, a: m.psum(m.pcast(a, "x", to="unreduced"), "x")),
    forward("pmax", lambda m, a: m.pmax_with_gradient(a, "x")),
    local(
        "inner_grad_of_varying_loss",
        M4,
        [F(3, 2), F(8, 3)],
        [P(), P("x")],
        P(),
        lambda m, w, a: m.tap("g", m.grad(lambda w: squared_error(m, w, a))(w)),
    ),
    local(
        "inner_grad_of_psummed_loss",
        M4,
        [F(3, 2), F(8, 3)],
        [P(), P("x")],
        P(),
        lambda m, w, a: m.grad(lambda w: m.psum(squared_error(m, w, a), "x"))(w),
    ),
    local("inner_grad_of_pmeaned_loss", M4, [F(3, 2), F(8, 3)], [P(), P("x")], P(), gradient_outside_and_inside),
    local(
        "inner_grad_of_cast_weight",
        M4,
        [F(3, 2), F(8, 3)],
        [P(), P("x")],
        P("x"),
        lambda m, w, a: m.tap(
            "g", m.grad(lambda w: m.psum(squared_error(m, w, a), "x"))(m.pcast(w, "x", to="varying"))
        ),
    ),
    local(
        "inner_grad_cast_inside_the_loss",
        M4,
        [F(3, 2), F(8, 3)],
        [P(), P("x")],
        P(),
        lambda m, w, a: m.grad(lambda w: squared_error(m, m.pcast(w, "x", to="varying"), a))(w),
    ),
    local(
        "inner_grad_of_varying_input",
        M4,
        [F(8, 3)],
        [P("x")],
        P("x"),
        lambda m, a: m.grad(lambda a: m.psum(m.sum(m.sin(a) ** 2), "x"))(a),
    ),
    local("inner_grad_of_invariant_loss", M4, [F(3)], [P()], P(), lambda m, w: m.grad(lambda w: m.sum(w * w * w))(w)),
    local(
        "inner_grad_of_unused_weight",
        M4,
        [F(3), F(8)],
        [P(), P("x")],
        P(),
        lambda m, w, a: m.grad(lambda w: m.sum(a) + 0 * m.sum(w))(w),
    ),
    local("inner_grad_pending", M4, [F(4), F(8, 4)], [P(), P("x")], P("x"), pending_gradient),
    local(
        "inner_grad_one_axis_of_two",
        M23,
        [F(3, 2), F(6, 3)],
        [P("y"), P(XY)],
        P("y"),
        lambda m, w, a: m.grad(lambda w: m.sum(m.sin(a[:, :1] * w)))(w),
    ),
    local(
        "inner_grad_scaled_by_rank",
        M4,
        [F(3)],
        [P()],
        P(),
        lambda m, w: m.grad(lambda w: m.sum(m.sin(w) * (m.axis_index("x") + 1)))(w),
    ),
    local(
        "inner_value_grad_and_aux", M4, [F(3, 2), F(8, 3)], [P(), P("x")], (P("x"), P("x"), P()), value_and_grad_types
    ),
    local(
        "inner_grad_tensor_parallel",
        M22,
        [F(4, 3), F(3, 4), F(4, 3)],
        [P("x"), P(None, "y"), P("y")],
        (P("x"), P(None, "y"), P("y")),
        tensor_parallel,
    ),
    local("inner_hessian_vector", M4, [F(3), F(8, 3), F(3)], [P(), P("x"), P()], P(), hessian_vector),
    local("inner_forward_over_reverse", M4, [F(3), F(8, 3), F(3)], [P(), P("x"), P()], P(), forward_over_reverse),
    local("inner_jvp", M4, [F(8), F(8)], [P("x"), P("x")], (P(), P()), jvp_inside),
    local(
        "inner_jvp_invariant_tangent_of_varying",
        M4,
        [F(8), F(2)],
        [P("x"), P()],
        (P("x"), P("x")),
        lambda m, a, t: m.jvp(m.sin, (a,), (t,)),
        grad_wrt=(),
    ),
    local("inner_vjp_varying", M4, [F(8), F(2), F(8)], [P("x"), P(), P("x")], (P("x"), P()), vjp_varying),
    local("inner_vjp_invariant", M4, [F(8), F(2)], [P("x"), P()], P("x"), vjp_invariant),
    local(
        "stop_gradient",
        M4,
        [F(8), F(2)],
        [P("x"), P()],
        P("x"),
        lambda m, a, w: m.stop_gradient(a * w) * a + m.stop_gradient(w),
    ),
    local(
        "stop_gradient_of_psum",
        M4,
        [F(8)],
        [P("x")],
        P("x"),
        lambda m, a: a / m.stop_gradient(m.psum(m.sum(a * a), "x")),
    ),
    local(
        "custom_vjp_of_invariant_and_varying", M4, [F(3), F(8, 3)], [P(), P("x")], P("x"), custom_scale, second=False
    ),
    local("custom_vjp_varying", M4, [F(8)], [P("x")], P(), custom_straight_through, second=False),
    local("custom_vjp_psum", M4, [F(8)], [P("x")], P(), custom_psum),
    local("checkpoint", M4, [F(8, 3), F(3, 3)], [P("x"), P()], P("x"), checkpointed),
    local("checkpoint_inside_grad", M4, [F(2), F(8)], [P(), P("x")], P(), checkpoint_in_grad),
    local("data_parallel_sgd", M4, [F(3, 2), F(8, 3)], [P(), P("x")], P(), sgd),
    local("data_parallel_sgd_by_hand", M4, [F(3, 2), F(8, 3)], [P(), P("x")], P(), sgd_by_hand),
    local("data_parallel_sgd_accumulating", M4, [F(3, 2), F(8, 3)], [P(), P("x")], P(), sgd_accumulating),
    local("fully_sharded_step", M4, [F(4, 2), F(8, 4)], [P("x"), P("x")], P("x"), fsdp_step),
    local("inner_grad_through_scan", M4, [F(3), F(8, 3)], [P(), P("x")], P(), loops),
    local("inner_grad_through_ring", M4, [F(8)], [P("x")], P("x"), ring_gradient),
    whole("closed_over_weight", M4, [F(2), F(8)], closure),
    whole("two_maps", M4, [F(8, 3), F(3, 4)], composed),
    local(
        "three_axis_gradient",
        M222,
        [F(2, 4), F(4, 2)],
        [P("x", "y"), P("y", "z")],
        P("x", "z"),
        lambda m, a, w: m.tanh(m.psum(a @ w, "y")),
    ),
    local(
        "integers_ride_along",
        M4,
        [F(8), I(8)],
        [P("x")] * 2,
        P("x"),
        lambda m, a, i: m.grad(lambda a: m.sum(m.sin(a) * i))(a),
    ),
]
