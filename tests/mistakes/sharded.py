"""Values out of their place: a Sharded in the hands of what knows only tensors, a block outside its body."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

from fspmd import (
    ArgumentError,
    MeshError,
    OnBlocks,
    P,
    RecordError,
    Sharded,
    device_put,
    parallelize,
    random,
    set_default,
    vmap,
)
from mistakes import Setting, mistake


def rows(m: Setting) -> Sharded:
    """Blocks of two along x."""
    x: Sharded = device_put(torch.arange(8.0), P("x"), mesh=m.line)
    return x


@mistake(ArgumentError)
def torch_tensor_within_a_transform(m: Setting) -> None:
    """aten.detach.default got Sharded f32[8@x] on mesh(x=4) below the level of torch functions, within a transform \
    such as grad or vmap; write x itself in place of torch.as_tensor(x), x.to(dtype) in place of torch.as_tensor(x, \
    dtype=dtype), x.clone() in place of torch.tensor(x); or return device_get(x) from the function
    """
    torch.func.grad(lambda x: torch.tensor(x).sum())(rows(m))


@mistake(ArgumentError)
def masked_tensors(m: Setting) -> None:
    """MaskedTensor got Sharded f32[8@x] on mesh(x=4) with the mask Sharded bool[8@x] on mesh(x=4); write \
    torch.where(mask, x, 0.0), or the functions of torch.masked that take a mask: torch.masked.sum(x, mask=mask), \
    torch.masked.softmax(x, -1, mask=mask)
    """
    torch.masked.as_masked_tensor(rows(m), rows(m) > 3)


@mistake(ArgumentError)
def nested_tensors(m: Setting) -> None:
    """as_nested_tensor() of Sharded f32[8@x] on mesh(x=4) would make a nested tensor, which has no layout on a mesh; \
    pad the tensors, torch.nn.utils.rnn.pad_sequence([x, y]), or give it device_get(x)
    """
    torch.nested.as_nested_tensor([rows(m), torch.ones(3)])


@mistake(ArgumentError)
def expanded_weights(m: Setting) -> None:
    """_make_subclass() of Sharded f32[8, 8@x] on mesh(x=4) would make a subclass of torch.Tensor, such as the \
    ExpandedWeight of per-sample gradients; write fspmd.vmap(fspmd.grad(loss), in_dims=(None, 0))(params, batch) for \
    gradients of each sample, or give it device_get(x)
    """
    module = torch.nn.Linear(8, 8)
    module.weight = torch.nn.Parameter(device_put(torch.ones(8, 8), P(None, "x"), mesh=m.line))
    call_for_per_sample_grads(module)(torch.ones(2, 8))


@mistake(RecordError)
def torch_linearize(m: Setting) -> None:
    """torch.export, make_fx or torch.jit.trace got Sharded f32[8] on mesh(x=4), whose collectives no graph of torch \
    has; write fspmd.jit(f).lower(*args), whose program has them; instead of torch.func.linearize write \
    fspmd.jvp(f, (x,), (tangent,)) for each tangent
    """
    torch.func.linearize(torch.sin, rows(m))


@mistake(ArgumentError)
def numbers_of_each_element(m: Setting) -> None:
    """vmap with randomness='different' maps a function that draws a Sharded, whose numbers all elements share; write \
    randomness="same", or draw outside of the function, with one dim more, and map over that
    """
    x = device_put(torch.ones(3, 8), P(None, "x"), mesh=m.line)
    vmap(torch.randn_like, randomness="different")(x)


@mistake(MeshError, transports=("simulation",))
def block_of_another_body(m: Setting) -> None:
    """blocks of a body on mesh(x=2, y=2) were used together with blocks on mesh(x=4); return them from their own \
    body, and pass the result to the other as an argument
    """
    kept: list[torch.Tensor] = []
    m.inside(lambda x: (kept.append(x), x)[1])
    m.map(lambda x: x + kept[0], P("x"), P("x"), mesh=m.grid)(torch.ones(8, 4))


@mistake(ArgumentError, checked=(True,))
def format_of_a_vector(m: Setting) -> None:
    """the format '.2f' was given for Sharded f32[8@x] on mesh(x=4); it takes a scalar: reduce the value, or format \
    its repr
    """
    f"{rows(m):.2f}"


@mistake(ArgumentError, checked=(True,), transports=("gloo",))
def format_of_a_pending_sum(m: Setting) -> None:
    """the format '.2f' was given for Sharded f32[]{U:x} on mesh(x=4), whose number takes a collective of all ranks, \
    while often one rank alone prints: write number = x.item() on all ranks, and format the number
    """
    f"{rows(m).sum():.2f}"


@mistake(ArgumentError, checked=(True,))
def call_under_a_fake_tensor_mode(m: Setting) -> None:
    """+ of Sharded f32[8@x] on mesh(x=4) was called under torch's FakeTensorMode, but its blocks are not fake \
    tensors; call it outside of the mode, or for shapes without values write fspmd.jit(f).lower(spec)
    """
    x = rows(m)
    with FakeTensorMode():
        x + 1


@mistake(ArgumentError, checked=(True,))
def call_under_functionalize(m: Setting) -> None:
    """slice over ('x',) was called under torch.func.functionalize, which does not know collectives; leave \
    functionalize out: writes into values are followed without it
    """
    x = rows(m)
    torch.func.functionalize(lambda y: x + y)(torch.ones(8))


@mistake(ArgumentError, checked=(True,))
def draws_in_vmap(m: Setting) -> None:
    """vmap: the function draws random numbers; write vmap(f, randomness="different") for others in each element, \
    randomness="same" for the same in all, or draw outside of it
    """
    vmap(torch.rand_like)(rows(m))


@mistake(ArgumentError, checked=(True,))
def numbers_on_no_device(m: Setting) -> None:
    """normal got the string 'foo' for device; expected a device such as 'cpu' or 'cuda'"""
    random.normal(random.key(0), (4,), device="foo")


@mistake(ArgumentError, checked=(True,))
def default_of_another_name(m: Setting) -> None:
    """set_default got 'log'; it sets explicit= alone: set_default(explicit="raise")"""
    set_default(explicit="raise", log=True)


@mistake(ArgumentError, checked=(True,))
def source_that_is_a_truth(m: Setting) -> None:
    """parallelize got src=True of type bool; expected a global rank"""
    parallelize({"w": torch.ones(4, 4)}, {}, mesh=m.line, src_data_rank=True)


@mistake(ArgumentError, checked=(True,))
def style_over_a_number(m: Setting) -> None:
    """OnBlocks got the int 3 for axis; expected the name of a mesh axis, or None for the axis of parallelize"""
    OnBlocks(axis=3)  # type: ignore[arg-type]


@mistake(ArgumentError, checked=(True,))
def strides_of_a_gradient(m: Setting) -> None:
    """stride() of Sharded f32[8@x] on mesh(x=4) is unknown: fspmd does not know how torch would keep a gradient other \
    than x.grad, an argument of jit that is a part of a larger memory, or a value made of these; write \
    x = x.contiguous() before
    """
    x = rows(m).requires_grad_()
    torch.autograd.grad(x.sum(), x)[0].stride()
