"""Partition specs: built wrongly, or not fitting their tensor or mesh."""

from __future__ import annotations

import torch

from fspmd import P, SpecError, TensorSpec, psum
from mistakes import Setting, mistake

# --- the spec itself ------------------------------------------------------------------------------------------------


@mistake(SpecError)
def entry_is_an_int(m: Setting) -> None:
    """P got the int 1 as an entry; an entry is None, an axis name such as 'x', or a tuple of axis names such as \
    ('x', 'y')
    """
    P("x", 1)


@mistake(SpecError)
def entry_is_a_spec(m: Setting) -> None:
    """P got a P as an entry; an entry is None, an axis name such as 'x', or a tuple of axis names such as ('x', 'y')"""
    P(P("x"))


@mistake(SpecError)
def entry_is_a_set(m: Setting) -> None:
    """P got the set {'x', 'y'} as an entry; an entry is None, an axis name such as 'x', or a tuple of axis names \
    such as ('x', 'y'); a set has no order, so write a tuple
    """
    P({"x", "y"})


@mistake(SpecError)
def entry_is_a_string_of_several(m: Setting) -> None:
    """shard_map(<lambda>): the arguments do not fit in_specs
    * x of shape (4,): P('x,y') names the axis 'x,y', but mesh(x=2, y=2) has only 'x', 'y'
    """
    m.map(lambda x: x, P("x,y"), P(), mesh=m.grid)(torch.zeros(4))


@mistake(SpecError)
def tuple_entry_holds_an_int(m: Setting) -> None:
    """P got the tuple ('x', 0) as an entry; an entry is None, an axis name such as 'x', or a tuple of axis names \
    such as ('x', 'y')
    """
    P(("x", 0))


@mistake(SpecError)
def axis_twice(m: Setting) -> None:
    """P('x', 'x') names the axis 'x' more than once; an axis shards one dim, or is unreduced, or is reduced"""
    P("x", "x")


@mistake(SpecError)
def axis_sharded_and_unreduced(m: Setting) -> None:
    """P('x', unreduced={'x'}) names the axis 'x' more than once; an axis shards one dim, or is unreduced, or is \
    reduced
    """
    P("x", unreduced={"x"})


@mistake(SpecError)
def unreduced_is_a_string(m: Setting) -> None:
    """P got unreduced='x'; write a set of axis names: unreduced={'x'}"""
    P(unreduced="x")


@mistake(SpecError)
def reduced_is_an_int(m: Setting) -> None:
    """P got the int 1 for reduced; write a set of axis names, such as reduced={'x'}"""
    P(reduced=1)


@mistake(SpecError)
def reduced_holds_a_list(m: Setting) -> None:
    """P got the list [['x']] for reduced; write a set of axis names, such as reduced={'x'}"""
    P(reduced=[["x"]])


@mistake(SpecError)
def tensor_spec_too_long(m: Setting) -> None:
    """a spec for a tensor of shape (8,): P('x', None) has 2 entries, but the value has 1 dim; give one entry per \
    dim, for example P('x')
    """
    TensorSpec(m.line, P("x", None), (8,), torch.float32)


# --- in_specs -------------------------------------------------------------------------------------------------------


@mistake(SpecError)
def too_long(m: Setting) -> None:
    """shard_map(f): the arguments do not fit in_specs
      * x of shape (8, 4): P('x', None, None) has 3 entries, but the value has 2 dims; give one entry per dim, for \
    example P('x', None)
    """

    def f(x: torch.Tensor) -> torch.Tensor:
        return x

    m.map(f, P("x", None, None), P("x"))(torch.zeros(8, 4))


@mistake(SpecError)
def too_long_on_the_second_call(m: Setting) -> None:
    """shard_map(f): the arguments do not fit in_specs
      * x of shape (8,): P(None, 'x') has 2 entries, but the value has 1 dim; give one entry per dim, for example \
    P('x')
    """

    def f(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return x

    g = m.map(f, (P(), P(None, "x")), P(None, "x"))
    g({"a": torch.zeros(2)}, torch.zeros(8, 4))
    g({"a": torch.zeros(2)}, torch.zeros(8))


@mistake(SpecError)
def on_a_scalar(m: Setting) -> None:
    """shard_map(f): the arguments do not fit in_specs
    * scale of shape (): P('x') has 1 entry, but the value is a scalar (no dims); write P()
    """

    def f(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x * scale

    m.map(f, P("x"), P("x"))(torch.zeros(8), torch.tensor(2.0))


@mistake(SpecError)
def unknown_axis(m: Setting) -> None:
    """shard_map(f): the arguments do not fit in_specs
    * x of shape (8,): P('z') names the axis 'z', but mesh(x=4) has only 'x'
    """

    def f(x: torch.Tensor) -> torch.Tensor:
        return x

    m.map(f, P("z"), P("x"))(torch.zeros(8))


@mistake(SpecError)
def several_leaves_fail(m: Setting) -> None:
    """shard_map(step): the arguments do not fit in_specs
      * params['b'] of shape (4,): P(None, 'tp') names the axis 'tp', but mesh(x=4) has only 'x'
      * params['w'] of shape (4, 4): P(None, 'tp') names the axis 'tp', but mesh(x=4) has only 'x'
      * batch[1] of shape (8,): P('x', None) has 2 entries, but the value has 1 dim; give one entry per dim, for \
    example P('x')
      * rate is the float 0.1, not a tensor; pass torch.tensor(0.1), or give it None in in_specs (a static argument)
    """

    def step(params: dict[str, torch.Tensor], batch: tuple[torch.Tensor, ...], rate: float) -> torch.Tensor:
        return params["w"]

    params = {"w": torch.zeros(4, 4), "b": torch.zeros(4)}
    m.map(step, (P(None, "tp"), P("x", None), P()), P())(params, (torch.zeros(8, 4), torch.zeros(8)), 0.1)


@mistake(SpecError)
def not_manual(m: Setting) -> None:
    """shard_map(f): the arguments do not fit in_specs
      * x of shape (8, 4): P('x', 'y') names the axis 'y', which is not in axis_names={'x'}: leave it out, or add it \
    to axis_names
    """

    def f(x: torch.Tensor) -> torch.Tensor:
        return x

    m.map(f, P("x", "y"), P("x"), mesh=m.grid, axis_names={"x"})(torch.zeros(8, 4))


@mistake(SpecError)
def bound_outside(m: Setting) -> None:
    """shard_map(inner): the arguments do not fit in_specs
    * x of shape (4,): P('x') names the axis 'x', along which the enclosing body has cut it; leave it out
    """

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x

    def outer(x: torch.Tensor) -> torch.Tensor:
        return m.map(inner, P("x"), P("y"), mesh=m.grid)(x)

    m.map(outer, P("x"), P("x"), mesh=m.grid, axis_names={"x"})(torch.zeros(8))


@mistake(SpecError)
def unreduced_unknown_axis(m: Setting) -> None:
    """shard_map(f): the arguments do not fit in_specs
    * x of shape (8,): P(unreduced={'w'}) names the axis 'w', but mesh(x=4) has only 'x'
    """

    def f(x: torch.Tensor) -> torch.Tensor:
        return psum(x, "x")

    m.map(f, P(unreduced={"w"}), P())(torch.zeros(8))


# --- out_specs ------------------------------------------------------------------------------------------------------


@mistake(SpecError)
def out_too_long(m: Setting) -> None:
    """shard_map(loss): the results do not fit out_specs
    * result of shape (): P('x') has 1 entry, but the value is a scalar (no dims); write P()
    """

    def loss(x: torch.Tensor) -> torch.Tensor:
        return psum(x.sum(), "x")

    m.map(loss, P("x"), P("x"))(torch.zeros(8))


@mistake(SpecError)
def out_unknown_axis(m: Setting) -> None:
    """shard_map(f): the results do not fit out_specs
    * result['a'] of shape (2,): P('z') names the axis 'z', but mesh(x=4) has only 'x'
    * result['b'] of shape (2,): P('w') names the axis 'w', but mesh(x=4) has only 'x'
    """

    def f(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"a": x, "b": x}

    m.map(f, P("x"), {"a": P("z"), "b": P("w")})(torch.zeros(8))


@mistake(SpecError)
def out_not_manual(m: Setting) -> None:
    """shard_map(f): the results do not fit out_specs
      * result of shape (4, 4): P('x', 'y') names the axis 'y', which is not in axis_names={'x'}: leave it out, or add \
    it to axis_names
    """

    def f(x: torch.Tensor) -> torch.Tensor:
        return x

    m.map(f, P("x"), P("x", "y"), mesh=m.grid, axis_names={"x"})(torch.zeros(8, 4))


@mistake(SpecError)
def out_static_but_a_tensor(m: Setting) -> None:
    """shard_map(f): the results do not fit out_specs
    * result[1] is a tensor of shape (), but its spec is None (a static result); give it a P
    """

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x.sum()

    m.map(f, P("x"), (P("x"), None))(torch.zeros(8))
