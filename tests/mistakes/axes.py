"""Mesh axes: collectives outside a body, axes that are not bound, and axis names of a wrong kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fspmd
from fspmd import AxisError, P, axis_index, pmax, psum, rank_map
from mistakes import Setting, mistake

CALLS: dict[str, Callable[[Any, str], Any]] = {
    "psum": fspmd.psum,
    "pmean": fspmd.pmean,
    "pmax": fspmd.pmax,
    "pmin": fspmd.pmin,
    "all_gather": fspmd.all_gather,
    "psum_scatter": fspmd.psum_scatter,
    "all_to_all": lambda x, axis: fspmd.all_to_all(x, axis, 0, 0),
    "ppermute": lambda x, axis: fspmd.ppermute(x, axis, [(0, 1)]),
    "pshuffle": lambda x, axis: fspmd.pshuffle(x, axis, [0, 1, 2, 3]),
    "pswapaxes": lambda x, axis: fspmd.pswapaxes(x, axis, 0),
    "pbroadcast": lambda x, axis: fspmd.pbroadcast(x, axis, 0),
    "pcast": lambda x, axis: fspmd.pcast(x, axis, to="varying"),
    "axis_index": lambda x, axis: fspmd.axis_index(axis),
    "axis_size": lambda x, axis: fspmd.axis_size(axis),
}
#: the call that each message shows, and the spec of its result
SHOWN = {
    "psum": ("psum(x, 'x')", "P()"),
    "pmean": ("pmean(x, 'x')", "P()"),
    "pmax": ("pmax(x, 'x')", "P()"),
    "pmin": ("pmin(x, 'x')", "P()"),
    "all_gather": ("all_gather(x, 'x', tiled=True, to='invarying')", "P()"),
    "psum_scatter": ("psum_scatter(x, 'x', tiled=True)", "P('x')"),
    "all_to_all": ("all_to_all(x, 'x', 1, 0, tiled=True)", "P(None, 'x')"),
    "ppermute": ("ppermute(x, 'x', [(0, 1), (1, 0)])", "P('x')"),
    "pshuffle": ("pshuffle(x, 'x', range(axis_size('x')))", "P('x')"),
    "pswapaxes": ("pswapaxes(x, 'x', 0)", "P('x')"),
    "pbroadcast": ("pbroadcast(x, 'x', 0)", "P('x')"),
    "pcast": ("pcast(x, 'x', to='unreduced')", "P(unreduced={'x'})"),
    "axis_index": ("x * axis_index('x')", "P('x')"),
    "axis_size": ("x / axis_size('x')", "P('x')"),
}
OUTSIDE = """{name} was called outside a shard_map body, where no mesh axis is bound; call it in a function run by \
shard_map: shard_map(lambda x: {call}, mesh=mesh, in_specs=P('x'), out_specs={spec})(x)"""
NOT_BOUND = "{name} got the axis 'z', but shard_map(f) has bound only 'x'"


def _register(name: str, collective: Callable[[Any, str], Any]) -> None:
    def outside(m: Setting) -> None:
        collective(torch.ones(8, 4), "x")

    def not_bound(m: Setting) -> None:
        def f(x: Tensor) -> Any:
            return collective(x, "z")

        m.map(f, P("x"), P("x"))(torch.ones(8, 4))

    call, spec = SHOWN[name]
    outside.__name__ = f"{name}_outside"
    outside.__doc__ = OUTSIDE.format(name=name, call=call, spec=spec)
    not_bound.__name__ = f"{name}_not_bound"
    not_bound.__doc__ = NOT_BOUND.format(name=name)
    mistake(AxisError, checked=(True,))(outside)
    mistake(AxisError)(not_bound)


for _name, _collective in CALLS.items():
    _register(_name, _collective)


@mistake(AxisError, checked=(True,))
def rank_map_outside(m: Setting) -> None:
    """rank_map was called outside a shard_map body, where no mesh axis is bound; call it in a function run by \
    shard_map: shard_map(lambda x: rank_map(torch.sin, x), mesh=mesh, in_specs=P('x'), out_specs=P('x'))(x)
    """
    rank_map(lambda x: x, torch.ones(2))


@mistake(AxisError)
def collective_inside_rank_map(m: Setting) -> None:
    """psum was called inside rank_map, which runs rank by rank and has no mesh axes; call it in the shard_map body, \
    before or after rank_map
    """
    m.inside(lambda x: rank_map(lambda block: psum(block, "x"), x))


@mistake(AxisError)
def collective_after_the_body(m: Setting) -> None:
    """psum was called outside a shard_map body, where no mesh axis is bound; call it in a function run by \
    shard_map: shard_map(lambda x: psum(x, 'x'), mesh=mesh, in_specs=P('x'), out_specs=P())(x)
    """
    kept = []

    def f(x: Tensor) -> Tensor:
        kept.append(lambda: psum(x, "x"))
        return x

    m.map(f, P("x"), P("x"))(torch.ones(8, 4))
    kept[0]()


@mistake(AxisError)
def axis_not_manual(m: Setting) -> None:
    """psum got the axis 'y', but shard_map(f) has bound only 'x'; 'y' is an axis of mesh(x=2, y=2): to use it, add \
    it to axis_names of shard_map
    """

    def f(x: Tensor) -> Tensor:
        total: Tensor = psum(x, "y")
        return total

    m.map(f, P("x"), P("x"), mesh=m.grid, axis_names={"x"})(torch.ones(8, 4))


@mistake(AxisError)
def one_of_two_axes_not_bound(m: Setting) -> None:
    """psum got the axis 'dp', but shard_map(<lambda>) has bound only 'x'"""
    m.inside(lambda x: psum(x, ("x", "dp")))


@mistake(AxisError)
def axis_repeated(m: Setting) -> None:
    """psum got the axes ('x', 'x'), which repeat an axis; name each axis once"""
    m.inside(lambda x: psum(x, ("x", "x")))


@mistake(AxisError)
def axis_is_an_int(m: Setting) -> None:
    """psum got the int 0 for axis_name; expected the name of a mesh axis, such as 'x', or a tuple of names in rank \
    order
    """
    m.inside(lambda x: psum(x, 0))


@mistake(AxisError)
def axis_is_none(m: Setting) -> None:
    """pmax got None for axis_name; expected the name of a mesh axis, such as 'x', or a tuple of names in rank order"""
    m.inside(lambda x: pmax(x, None))


@mistake(AxisError)
def axis_is_a_generator(m: Setting) -> None:
    """psum got a generator for axis_name; expected the name of a mesh axis, such as 'x', or a tuple of names in \
    rank order
    """
    m.inside(lambda x: psum(x, (name for name in "x")))


@mistake(AxisError)
def axis_is_a_set(m: Setting) -> None:
    """psum got the set {'x'} for axis_name; expected the name of a mesh axis, such as 'x', or a tuple of names in \
    rank order; a set has no order, so write a tuple
    """
    m.inside(lambda x: psum(x, {"x"}))


@mistake(AxisError)
def axis_is_a_mesh(m: Setting) -> None:
    """psum got a Mesh for axis_name; expected the name of a mesh axis, such as 'x', or a tuple of names in rank \
    order
    """
    m.inside(lambda x: psum(x, m.line["x"]))


@mistake(AxisError)
def axes_hold_an_int(m: Setting) -> None:
    """axis_index got the int 1 in axis_name; name an axis by a string"""
    m.inside(lambda x: axis_index(("x", 1)))


@mistake(AxisError)
def axes_hold_a_list(m: Setting) -> None:
    """psum got the list ['y'] in axis_name; name an axis by a string"""
    m.inside(lambda x: psum(x, ("x", ["y"])))


@mistake(AxisError)
def arguments_swapped(m: Setting) -> None:
    """psum got a tensor of shape (2, 4) for axis_name; expected the name of a mesh axis, such as 'x', or a tuple of \
    names in rank order
    """
    m.inside(lambda x: psum("x", x))
