"""Derivatives, vmap, checkpoint and rank_map."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fspmd import (
    ArgumentError,
    AxisError,
    P,
    ShapeError,
    TreeError,
    VarianceError,
    checkpoint,
    device_put,
    grad,
    jvp,
    psum,
    rank_map,
    value_and_grad,
    vjp,
    vmap,
)
from mistakes import Setting, mistake

ONES = torch.ones(4)
COUNTS = torch.arange(4)


def total(x: Any, *rest: Any) -> Any:
    return (x * x).sum()


def doubled(x: Any) -> Any:
    return {"y": x * 2}


# --- grad -----------------------------------------------------------------------------------------------------------


@mistake(ArgumentError, checked=(True,))
def grad_of_no_function(m: Setting) -> None:
    """grad takes a function, but got a tensor of shape (); write grad(f), not grad(f(x))"""
    grad(total(ONES))(ONES)


@mistake(ArgumentError, checked=(True,))
def argnums_is_a_string(m: Setting) -> None:
    """grad got argnums='x'; expected an int or a tuple of ints, such as 0 or (0, 1)"""
    grad(total, argnums="x")(ONES)


@mistake(ArgumentError, checked=(True,))
def argnums_is_a_bool(m: Setting) -> None:
    """grad got argnums=True; expected an int or a tuple of ints, such as 0 or (0, 1)"""
    grad(total, argnums=True)(ONES, ONES)


@mistake(ArgumentError, checked=(True,))
def arguments_given_with_the_function(m: Setting) -> None:
    """grad got a tensor of shape (4,) for argnums; write grad(f)(x), not grad(f, x)"""
    wrong: Any = ONES
    grad(total, wrong)


@mistake(ArgumentError, checked=(True,))
def argnums_empty(m: Setting) -> None:
    """grad got argnums=(); expected an int or a tuple of ints, such as 0 or (0, 1)"""
    grad(total, argnums=())(ONES)


@mistake(ArgumentError, checked=(True,))
def argnums_out_of_range(m: Setting) -> None:
    """value_and_grad got argnums=(0, 2), but the function was called with 2 positional arguments: there is no \
    argument 2
    """
    value_and_grad(total, argnums=(0, 2))(ONES, ONES)


@mistake(ArgumentError, checked=(True,))
def argnums_twice(m: Setting) -> None:
    """grad got argnums=(0, -2), which names an argument twice; name each once"""
    grad(total, argnums=(0, -2))(ONES, ONES)


@mistake(ArgumentError, checked=(True,))
def argument_by_keyword_only(m: Setting) -> None:
    """grad got argnums=0, but the function was called with 0 positional arguments (keyword arguments are not \
    differentiated): there is no argument 0
    """
    grad(total)(x=ONES)


@mistake(ArgumentError, checked=(True,))
def grad_of_integers(m: Setting) -> None:
    """grad: values that have no derivative
      * x is i64[4]
    differentiate floating-point tensors only: give the others as another argument, or convert them: x.float()
    """
    grad(total)(COUNTS)


@mistake(ArgumentError, checked=(True,))
def grad_of_several_wrong_leaves(m: Setting) -> None:
    """grad: values that have no derivative
      * p['step'] is the int 3
      * p['table'] is i64[4]
    differentiate floating-point tensors only: give the others as another argument, or convert them: x.float()
    """
    grad(lambda p, x: p["w"].sum())({"w": ONES, "step": 3, "table": COUNTS, "name": None}, ONES)


@mistake(ArgumentError, checked=(True,))
def grad_of_a_vector(m: Setting) -> None:
    """grad needs a real scalar, a 0-d floating-point tensor, but the result is f32[4]; reduce it with .sum() or \
    .mean(), return (scalar, aux) with has_aux=True, or use vjp
    """
    grad(lambda x: x * 2)(ONES)


@mistake(ArgumentError, checked=(True,))
def grad_of_a_tuple(m: Setting) -> None:
    """grad needs a real scalar, a 0-d floating-point tensor, but the result is a tuple; reduce it with .sum() or \
    .mean(), return (scalar, aux) with has_aux=True, or use vjp
    """
    grad(lambda x: (x.sum(), x))(ONES)


@mistake(ArgumentError, checked=(True,))
def grad_of_a_number(m: Setting) -> None:
    """grad needs a real scalar, a 0-d floating-point tensor, but the result is the float 4.0; reduce it with .sum() \
    or .mean(), return (scalar, aux) with has_aux=True, or use vjp
    """
    grad(lambda x: x.sum().item())(ONES)


@mistake(ArgumentError, checked=(True,))
def grad_of_an_integer_result(m: Setting) -> None:
    """grad needs a real scalar, a 0-d floating-point tensor, but the result is i64[]; reduce it with .sum() or \
    .mean(), return (scalar, aux) with has_aux=True, or use vjp
    """
    grad(lambda x: x.sum().long())(ONES)


@mistake(TreeError, checked=(True,))
def no_aux(m: Setting) -> None:
    """with has_aux=True the function returns a pair, (out, aux), but it returned f32[]"""
    grad(total, has_aux=True)(ONES)


@mistake(TreeError, checked=(True,))
def aux_of_three(m: Setting) -> None:
    """with has_aux=True the function returns a pair, (out, aux), but it returned a tuple of 3"""
    value_and_grad(lambda x: (x.sum(), x, x), has_aux=True)(ONES)


@mistake(ArgumentError)
def grad_of_a_sharded_vector(m: Setting) -> None:
    """grad needs a real scalar, a 0-d floating-point tensor, but the result is Sharded f32[4@x] on mesh(x=4); \
    reduce it with .sum() or .mean(), return (scalar, aux) with has_aux=True, or use vjp
    """
    grad(m.map(lambda x: x * 2, P("x"), P("x")))(ONES)


@mistake(ArgumentError)
def grad_in_a_body_of_a_vector(m: Setting) -> None:
    """grad needs a real scalar, a 0-d floating-point tensor, but the result is f32[2,4]{V:x}; reduce it with .sum() \
    or .mean(), return (scalar, aux) with has_aux=True, or use vjp
    """
    m.inside(grad(lambda y: y * 2))


# --- vjp and jvp ----------------------------------------------------------------------------------------------------


@mistake(ArgumentError, checked=(True,))
def vjp_of_integers(m: Setting) -> None:
    """vjp: values that have no derivative
      * primals[0] is i64[4]
    differentiate floating-point tensors only: close over the others, or convert them: x.float()
    """
    vjp(doubled, COUNTS)


@mistake(ArgumentError, checked=(True,))
def vjp_of_no_function(m: Setting) -> None:
    """vjp takes a function, but got a tensor of shape (4,); write vjp(f, x), not vjp(f(x))"""
    vjp(ONES, ONES)


@mistake(TreeError, checked=(True,))
def cotangent_of_a_wrong_tree(m: Setting) -> None:
    """vjp got a cotangent with the tree *, but the result has the tree {'y': *}; give one tensor per leaf of the \
    result
    """
    vjp(doubled, ONES)[1](ONES)


@mistake(TreeError, checked=(True,))
def cotangent_of_a_wrong_key(m: Setting) -> None:
    """vjp got a cotangent with the tree {'z': *}, but the result has the tree {'y': *}; give one tensor per leaf of \
    the result
    """
    vjp(doubled, ONES)[1]({"z": ONES})


@mistake(TreeError, checked=(True,))
def cotangents_of_wrong_shapes(m: Setting) -> None:
    """vjp: cotangents that do not fit
    * cotangent['a'] is f32[3]; result['a'] takes f32[4]
    * cotangent['b'] is the float 1.0; result['b'] takes f32[]
    * cotangent['c'] is f64[4]; result['c'] takes f32[4]
    """

    def f(x: Tensor) -> dict[str, Tensor]:
        return {"a": x, "b": x.sum(), "c": x}

    vjp(f, ONES)[1]({"a": torch.ones(3), "b": 1.0, "c": ONES.double()})


@mistake(TreeError)
def cotangent_of_a_wrong_global_shape(m: Setting) -> None:
    """vjp: cotangents that do not fit
    * cotangent is f32[2]; result takes Sharded f32[8@x] on mesh(x=4), or a global tensor f32[8]
    """
    vjp(m.map(lambda x: x * 2, P("x"), P("x")), torch.ones(8))[1](torch.ones(2))


@mistake(TreeError)
def cotangent_of_a_wrong_size(m: Setting) -> None:
    """vjp: cotangents that do not fit
    * cotangent is Sharded f32[4] on mesh(x=4); result takes Sharded f32[8@x] on mesh(x=4), or a global tensor f32[8]
    """
    wrong = device_put(torch.ones(4), P(), mesh=m.line)
    vjp(m.map(lambda x: x * 2, P("x"), P("x")), torch.ones(8))[1](wrong)


@mistake(VarianceError, checked=(True,))
def cotangent_that_varies(m: Setting) -> None:
    """vjp: cotangents that do not fit
      * cotangent is f32[2]{V:x}; result takes f32[2], equal on all ranks of 'x'
    psum it first, or pcast the value it belongs to with to='varying'
    """
    m.map(lambda w, x: vjp(lambda v: v * 2, w)[1](x)[0], (P(), P("x")), P())(torch.ones(2), torch.ones(8))


@mistake(VarianceError, checked=(True,))
def autograd_cotangent_that_varies(m: Setting) -> None:
    """a cotangent f32[2]{V:x} was given for an output f32[2]: it varies over 'x', the output does not; psum it first"""

    def f(w: Tensor, x: Tensor) -> Tensor:
        w = w.requires_grad_()
        return torch.autograd.grad(w * 2, w, x)[0]

    m.map(f, (P(), P("x")), P())(torch.ones(2), torch.ones(8))


@mistake(TreeError, checked=(True,))
def tangents_too_few(m: Setting) -> None:
    """jvp got tangents with the tree (*,), but the primals have the tree (*, *); give one tangent per leaf of the \
    primals
    """
    jvp(total, (ONES, ONES), (ONES,))


@mistake(ArgumentError, checked=(True,))
def tangents_not_a_tuple(m: Setting) -> None:
    """jvp got a tensor of shape (4,) as primals; give a tuple with one entry per argument: jvp(f, (x,), (t,))"""
    jvp(total, ONES, ONES)


@mistake(TreeError, checked=(True,))
def tangent_of_a_wrong_shape(m: Setting) -> None:
    """jvp: tangents that do not fit
    * tangents[0] is f32[3]; primals[0] takes f32[4]
    * tangents[1] is the float 1.0; primals[1] takes f32[4]
    """
    jvp(total, (ONES, ONES), (torch.ones(3), 1.0))


@mistake(TreeError)
def tangent_of_a_wrong_size(m: Setting) -> None:
    """jvp: tangents that do not fit
      * tangents[0] is Sharded f32[4] on mesh(x=4); primals[0] takes Sharded f32[8@x] on mesh(x=4), or a global tensor \
    f32[8]
    """
    f = m.map(lambda x: x * 2, P("x"), P("x"))
    jvp(f, (device_put(torch.ones(8), P("x"), mesh=m.line),), (device_put(torch.ones(4), P(), mesh=m.line),))


@mistake(VarianceError, checked=(True,))
def tangent_that_varies(m: Setting) -> None:
    """jvp: tangents that do not fit
      * tangents[0] is f32[2]{V:x}; primals[0] takes f32[2], equal on all ranks of 'x'
    psum it first, or pcast the value it belongs to with to='varying'
    """
    m.map(lambda w, x: jvp(lambda v: v * 2, (w,), (x,))[1], (P(), P("x")), P())(torch.ones(2), torch.ones(8))


@mistake(ArgumentError)
def backward_of_a_sharded_vector(m: Setting) -> None:
    """backward() needs a real scalar, a 0-d floating-point tensor, but the result is Sharded f32[8@x] on mesh(x=4); \
    reduce it with .sum() or .mean()
    """
    x = device_put(torch.ones(8), P("x"), mesh=m.line).requires_grad_()
    m.map(lambda x: x * 2, P("x"), P("x"))(x).backward()


@mistake(ArgumentError)
def backward_of_no_leaf(m: Setting) -> None:
    """backward() of Sharded f32[] on mesh(x=4), which was computed from no tensor that requires grad, or under \
    no_grad; write w.requires_grad_() before w is used, or take the gradient with grad(f)(w)
    """
    m.map(lambda x: psum(x.sum(), "x"), P("x"), P())(torch.ones(8)).backward()


@mistake(TreeError)
def backward_with_a_wrong_size(m: Setting) -> None:
    """backward(): a gradient that does not fit
      * the gradient is Sharded f32[4] on mesh(x=4); the tensor takes Sharded f32[8@x] on mesh(x=4), or a global \
    tensor f32[8]
    """
    x = device_put(torch.ones(8), P("x"), mesh=m.line).requires_grad_()
    m.map(lambda x: x * 2, P("x"), P("x"))(x).backward(device_put(torch.ones(4), P(), mesh=m.line))


# --- vmap, checkpoint, stop_gradient --------------------------------------------------------------------------------


@mistake(ArgumentError, checked=(True,))
def vmap_over_a_sharded_dim_of_a_function_that_closes_over_a_sharded(m: Setting) -> None:
    """@ was used on Sharded f32[4, 4@x] on mesh(x=4) inside vmap(<lambda>), whose values are this rank's blocks; pass \
    it as an argument, with None for it in in_dims, instead of closing over it
    """
    rows, w = device_put(torch.ones(8, 4), P("x"), mesh=m.line), device_put(torch.ones(4, 4), P(None, "x"), mesh=m.line)
    vmap(lambda row: row @ w)(rows)


@mistake(ArgumentError, checked=(True,))
def vmap_of_no_function(m: Setting) -> None:
    """vmap takes a function, but got a tensor of shape (4,); write vmap(f), not vmap(f(x))"""
    vmap(ONES)(ONES)


@mistake(TreeError, checked=(True,))
def in_dims_of_a_wrong_tree(m: Setting) -> None:
    """vmap was called with 2 arguments, but in_dims has 3 entries; write one dim per argument, or one int for all"""
    vmap(total, in_dims=(0, 0, None))(ONES, ONES)


@mistake(ShapeError, checked=(True,))
def in_dims_out_of_range(m: Setting) -> None:
    """vmap: in_dims does not fit the arguments
    * args[1] of shape (4,) has no dim 1; give it an int from -1 to 0, or None
    """
    vmap(total, in_dims=(0, 1))(torch.ones(4, 4), ONES)


@mistake(TreeError, checked=(True,))
def in_dims_is_a_string(m: Setting) -> None:
    """vmap: in_dims does not match the arguments
    * in_dims is the string 'batch'; expected an int, or None where not mapped
    """
    vmap(total, in_dims="batch")(ONES)


@mistake(ShapeError, checked=(True,))
def mapped_over_a_number(m: Setting) -> None:
    """vmap: in_dims does not fit the arguments
    * args[1] is the float 2.0, which has no dim 0; give it None
    """
    vmap(total)(ONES, 2.0)


@mistake(ArgumentError, checked=(True,))
def nothing_mapped(m: Setting) -> None:
    """vmap got in_dims=None, but at least one argument must be mapped: give it an int"""
    vmap(total, in_dims=None)(ONES)


@mistake(ShapeError, checked=(True,))
def mapped_sizes_differ(m: Setting) -> None:
    """vmap: mapped dims must all have one size
    * dim 0 of x['a'] has size 4
    * dim 0 of x['b'] has size 3
    * dim 0 of args[1] has size 4
    """
    vmap(total)({"a": torch.ones(4, 2), "b": torch.ones(3, 2)}, torch.ones(4))


@mistake(ShapeError, checked=(True,))
def out_dims_out_of_range(m: Setting) -> None:
    """vmap: out_dims does not fit the results
    * result cannot have its mapped dim at 1: with the mapped dim it has 1 dim
    """
    vmap(total, out_dims=1)(torch.ones(4, 2))


@mistake(TreeError, checked=(True,))
def out_dims_of_a_wrong_tree(m: Setting) -> None:
    """vmap: out_dims does not match the results
    * out_dims is a tuple, but result is a tensor of shape (): write one dim there
    """
    vmap(total, out_dims=(0, 0))(torch.ones(4, 2))


@mistake(ArgumentError, checked=(True,))
def vmap_by_keyword(m: Setting) -> None:
    """vmap maps positional arguments only; pass 'x' by position"""
    vmap(total)(x=torch.ones(4, 2))


@mistake(ArgumentError, checked=(True,))
def vmapped_string(m: Setting) -> None:
    """vmap: result is the string 'text'; a mapped function returns tensors and numbers"""
    vmap(lambda x: "text")(torch.ones(4, 2))


@mistake(AxisError, checked=(True,))
def spmd_axis_without_a_mesh(m: Setting) -> None:
    """vmap got spmd_axis_name='x', but there is no mesh; set one with set_mesh(mesh), give a Sharded argument, or use \
    shard_map in f
    """
    vmap(total, spmd_axis_name="x")(torch.ones(4, 2))


@mistake(AxisError)
def spmd_axis_unknown(m: Setting) -> None:
    """vmap got spmd_axis_name='z', but mesh(x=4) has only 'x'"""
    vmap(total, spmd_axis_name="z")(device_put(torch.ones(4, 2), P("x"), mesh=m.line))


@mistake(ShapeError)
def mapped_over_two_axes(m: Setting) -> None:
    """vmap over dim 0 of f32[4@x] on mesh(x=2, y=2), which is sharded over 'x'; pass spmd_axis_name='x' to map each \
    rank's own part, or gather it first: device_put(x, P())
    """
    x, y = (device_put(torch.ones(4), P(axis), mesh=m.grid) for axis in "xy")
    vmap(torch.add)(x, y)


@mistake(AxisError, checked=(True,))
def spmd_axis_name_is_no_name(m: Setting) -> None:
    """vmap got the int 0 as spmd_axis_name; give the name of a mesh axis, or a tuple of them"""
    vmap(total, spmd_axis_name=0)(torch.ones(4, 2))  # type: ignore[arg-type]


@mistake(AxisError)
def mapped_over_a_sharded_dim(m: Setting) -> None:
    """shard_map(<lambda>): all axes of mesh(x=4) are bound by the enclosing body; call the function without \
    shard_map
    """
    vmap(m.map(lambda x: psum(x, "x"), P(), P()))(device_put(torch.ones(4, 2), P("x"), mesh=m.line))


@mistake(ArgumentError, checked=(True,))
def unknown_randomness(m: Setting) -> None:
    """vmap got randomness='yes'; expected one of 'error', 'different', 'same'"""
    vmap(total, randomness="yes")(ONES)


@mistake(ArgumentError)
def checkpoint_of_no_function(m: Setting) -> None:
    """checkpoint takes a function, but got the int 3; write checkpoint(f), not checkpoint(f(x))"""
    checkpoint(3)


# --- rank_map -------------------------------------------------------------------------------------------------------


@mistake(ArgumentError)
def rank_map_of_no_function(m: Setting) -> None:
    """rank_map got a tensor of shape (2, 4) for fn; give it a function: rank_map(fn, x)"""
    m.inside(lambda x: rank_map(x, x))


@mistake(ArgumentError)
def rank_map_result_is_a_string(m: Setting) -> None:
    """shard_map(<lambda>): the results do not fit out_specs
    * result is the string 'text', not a tensor; give it None in out_specs (a static result)
    """
    m.inside(lambda x: rank_map(lambda block: "text", x))


@mistake(TreeError, transports=("simulation",))
def rank_map_results_of_different_trees(m: Setting) -> None:
    """rank_map: the function returned the tree {'b': *} on the first rank, but {'a': *} on rank 1; return the same \
    structure on all ranks
    """

    def f(i: Tensor) -> Any:
        return {"a": i} if int(i) else {"b": i}

    m.map(lambda i: rank_map(f, i), P("x"), P("x"))(torch.arange(4))


@mistake(VarianceError, checked=(True,))
def rank_map_result_as_invariant(m: Setting) -> None:
    """shard_map(<lambda>): the results do not fit out_specs
      * result, f32[]{V:x}, varies over 'x', but its spec P() does not say so
    make it equal on all ranks first: psum(value, 'x') or pmean(value, 'x'); or return value[None] with the spec P('x')
    """
    m.map(lambda x: rank_map(torch.sum, x), P(), P())(torch.ones(4))
