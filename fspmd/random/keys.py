"""Random numbers of keys, as in ``jax.random``: functions of the key and the element, without a state.

A key is a 0-d int64 tensor. The same key gives the same numbers, so use each key once; `split` and `fold_in` make new
keys from it. Every rank passes the same key. The result is the same global tensor on any mesh, under any ``spec``, and
nothing moves. Without ``spec`` and ``mesh`` it is a plain tensor. In a body a varying key, such as
``fold_in(key, axis_index("x"))``, gives each rank different numbers. Under `jit` keys are arguments like any tensor, so
a replay draws the numbers of its key. Under `vmap` each element has its own key.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from fspmd.body import state, the_mesh
from fspmd.errors import ArgumentError, SpecError
from fspmd.meshes.mesh import Mesh
from fspmd.messages import described
from fspmd.random import distributions
from fspmd.random.blocks import Law, drawing, drawn
from fspmd.random.counter import Block, derived
from fspmd.redistribution.redistribute import from_blocks, to_blocks
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec, complain
from fspmd.torch_internals import (
    NO_LEVEL,
    NOT_MAPPED,
    DisableTorchFunction,
    add_batch_dim,
    batch_dim_of,
    level_of,
    wrapped_by,
)
from fspmd.tracing import outside_transforms
from fspmd.variance import get_variance, set_variance

Shape = int | tuple[int, ...] | list[int]
Key = Tensor
_SPLIT, _FOLDED = 1, 2  # the purposes of new keys


class LayoutOptions(TypedDict, total=False):
    """The keyword arguments of every function here that draws."""

    spec: P | None
    mesh: Mesh | None
    device: torch.device | str | None  # of a plain tensor; by default torch's default device


def key(seed: int) -> Key:
    """The key of a seed.

    Raises:
        ArgumentError: ``seed`` is not an int of at most 64 bits.

    >>> key(0)
    tensor(0)
    """
    if type(seed) is not int or not -(1 << 63) <= seed < 1 << 64:
        raise ArgumentError(f"key got {described(seed)} for seed; give it an int of at most 64 bits")
    seed &= (1 << 64) - 1
    return torch.tensor(seed - (1 << 64) if seed >> 63 else seed)


def split(key: Key, num: int | tuple[int, ...] = 2) -> Key:
    """``num`` new keys, int64[num], independent of each other and of the numbers of all other keys.

    Raises:
        ArgumentError: ``key`` is no key, or ``num`` is no number of keys.

    >>> first, second = split(key(0))
    >>> first == second
    tensor(False)
    >>> split(key(0), (2, 3)).shape
    torch.Size([2, 3])
    """
    sizes = (num,) if isinstance(num, int) else tuple(num)
    if not all(type(n) is int and n >= 0 for n in sizes):
        raise ArgumentError(f"split got {described(num)} for num; give it the number of keys")
    _check_key(key, "split")
    index = torch.arange(prod(sizes), device=key.device)
    return derived(key, index, _SPLIT).view(sizes)


def fold_in(key: Key, data: int | Tensor) -> Key:
    """A new key from a key and a number, such as a step, layer or rank: an int, or a 0-d integer tensor.

    Raises:
        ArgumentError: ``key`` is no key, or ``data`` is no integer.

    >>> fold_in(key(0), 1) == fold_in(key(0), 2)
    tensor(False)
    """
    _check_key(key, "fold_in")
    if isinstance(data, Tensor):
        if data.dim() or data.is_floating_point() or data.is_complex():
            raise ArgumentError(f"fold_in got {described(data)} of {data.dtype} for data; give it one integer")
        return derived(key, data.to(torch.int64), _FOLDED)
    if type(data) is not int:
        raise ArgumentError(f"fold_in got {described(data)} for data; give it one integer")
    return derived(key, data, _FOLDED)


def normal(key: Key, shape: Shape = (), dtype: torch.dtype | None = None, **options: Unpack[LayoutOptions]) -> Any:
    """Normal numbers with mean 0 and variance 1.

    Raises:
        ArgumentError: the key or shape is invalid, or the dtype is neither floating-point nor complex.
        SpecError: ``spec`` does not fit.

    >>> from fspmd import P, device_get, make_mesh
    >>> x = normal(key(0), (5, 3), spec=P("x"), mesh=make_mesh((4,), ("x",)))
    >>> torch.equal(device_get(x), normal(key(0), (5, 3)))
    True
    """
    return _numbers("normal", key, shape, dtype or torch.get_default_dtype(), distributions.normal, options)


def uniform(
    key: Key,
    shape: Shape = (),
    dtype: torch.dtype | None = None,
    minval: float | Tensor = 0.0,
    maxval: float | Tensor = 1.0,
    **options: Unpack[LayoutOptions],
) -> Any:
    """Uniform numbers on [minval, maxval). Bounds are numbers, or tensors that broadcast to the shape.

    Raises:
        ArgumentError: the key, shape or a bound is invalid, or the dtype is not floating-point.
        SpecError: ``spec`` does not fit.

    >>> bool((uniform(key(0), (100,), minval=2.0, maxval=3.0) >= 2).all())
    True
    """
    dtype = dtype or torch.get_default_dtype()
    if isinstance(minval, (int, float)) and isinstance(maxval, (int, float)):
        scale = None if (minval, maxval) == (0, 1) else lambda x: x.mul_(maxval - minval).add_(minval)
        return _numbers("uniform", key, shape, dtype, distributions.uniform, options, scale)
    for name, bound in (("minval", minval), ("maxval", maxval)):
        if not isinstance(bound, (int, float, Tensor)) or not _broadcasts(bound, _sizes("uniform", shape)):
            raise ArgumentError(
                f"uniform got {described(bound)} for {name}; give it a number, or a tensor that broadcasts to {shape!r}"
            )
    return _numbers("uniform", key, shape, dtype, distributions.uniform, options) * (maxval - minval) + minval


def randint(
    key: Key,
    shape: Shape,
    minval: int,
    maxval: int,
    dtype: torch.dtype = torch.int64,
    **options: Unpack[LayoutOptions],
) -> Any:
    """Integers on [minval, maxval).

    Raises:
        ArgumentError: the key or shape is invalid, or the range is empty or does not fit the dtype.
        SpecError: ``spec`` does not fit.

    >>> sorted(set(randint(key(0), (100,), 0, 3).tolist()))
    [0, 1, 2]
    """
    if type(minval) is not int or type(maxval) is not int or minval >= maxval:
        raise ArgumentError(
            f"randint got {described(minval)} for minval and {described(maxval)} for maxval; give it ints, minval "
            "below maxval"
        )
    if dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        raise ArgumentError(f"randint got dtype={dtype}; give it an integer dtype such as torch.int64")
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if minval < least or maxval - 1 > most:
        raise ArgumentError(f"randint got bounds {minval} and {maxval}, but {dtype} goes from {least} to {most}")
    law: Law = lambda dtype: distributions.integers(minval, maxval, dtype)  # noqa: E731
    return _numbers("randint", key, shape, dtype, law, options)


def bernoulli(key: Key, p: float | Tensor = 0.5, shape: Shape | None = None, **options: Unpack[LayoutOptions]) -> Any:
    """True with probability ``p``, a number or a tensor. For a tensor ``p`` the result has its shape and layout.

    Raises:
        ArgumentError: the key, shape or probability is invalid, or the shape differs from that of ``p``.
        SpecError: ``spec`` does not fit.

    >>> float(bernoulli(key(0), 0.25, (10_000,)).float().mean())  # doctest: +ELLIPSIS
    0.2...
    """
    if isinstance(p, Tensor):
        if shape is not None and _sizes("bernoulli", shape) != tuple(p.shape):
            raise ArgumentError(
                f"bernoulli got a p of shape {tuple(p.shape)} and the shape {shape!r}; leave out the shape, or expand p"
            )
        return uniform(key, tuple(p.shape), p.dtype, **_like(p, options)) < p
    if not isinstance(p, (int, float)) or not 0 <= p <= 1:
        raise ArgumentError(f"bernoulli got {described(p)} for p; give it a probability, from 0 to 1")
    return _numbers("bernoulli", key, shape or (), torch.bool, lambda _: distributions.bernoulli(p), options)


def categorical(key: Key, logits: Any, axis: int = -1) -> Any:
    """The index of a class for each row along ``axis``, drawn with probabilities ``softmax(logits, axis)``.

    The result has the layout of the other dims of ``logits``. If ``axis`` is cut, it communicates as argmax.

    Raises:
        ArgumentError: the key is invalid, ``logits`` is no tensor of floats, or ``axis`` has no classes.

    >>> categorical(key(0), torch.tensor([[0.0, -torch.inf], [-torch.inf, 0.0]]))
    tensor([0, 1])
    """
    if not isinstance(logits, Tensor) or not logits.dtype.is_floating_point:
        raise ArgumentError(f"categorical got {described(logits)} for logits; give it a tensor of floats")
    if type(axis) is not int or not -logits.dim() <= axis < logits.dim() or not logits.shape[axis]:
        raise ArgumentError(
            f"categorical got {described(axis)} for axis, and {described(logits)}; give it a dim that has classes"
        )
    options = _like(logits, {})
    times = _numbers("categorical", key, tuple(logits.shape), logits.dtype, distributions.exponential, options)
    return (logits - times.log()).argmax(axis)  # the first event of exponential clocks with the rates exp(logits)


def permutation(key: Key, x: int | Tensor | Sharded, **options: Unpack[LayoutOptions]) -> Any:
    """The integers below ``x`` in a random order. For a tensor ``x``, its rows (dim 0) in a random order.

    Every rank draws and sorts one key per row.

    Raises:
        ArgumentError: the key or ``x`` is invalid, ``x`` has no dims, or a tensor is passed with ``spec=``.
        SpecError: ``spec`` does not fit.

    >>> permutation(key(0), 5).sort().values
    tensor([0, 1, 2, 3, 4])
    >>> permutation(key(0), torch.tensor([7, 7]))
    tensor([7, 7])
    """
    if isinstance(x, Tensor):
        if not x.dim():
            raise ArgumentError("permutation got a tensor without dims; give it a tensor with rows, or an int")
        if options:
            raise ArgumentError(
                f"permutation got {next(iter(options))}= beside a tensor, whose layout stays as it is; lay the tensor "
                "out first: permutation(key, device_put(x, P('x')))"
            )
        rows = permutation(key, x.shape[0], device=x.device if state.body is None else None)
        return torch.index_select(x, 0, rows)
    if type(x) is not int or x < 0:
        raise ArgumentError(f"permutation got {described(x)}; give it a number of integers, or a tensor")
    law: Law = lambda _: distributions.integers(0, 1 << 64, torch.int64)  # noqa: E731
    order = _numbers("permutation", key, (x,), torch.int64, law, {"device": options.get("device")}).argsort(stable=True)
    spec = _spec("permutation", (x,), torch.int64, options)
    return order if spec is None else Sharded(to_blocks(order, spec), spec)


# --- keys -----------------------------------------------------------------------------------------------------------


def _check_key(key: Any, what: str) -> None:
    if not isinstance(key, Tensor) or key.dtype is not torch.int64:
        raise ArgumentError(f"{what} got {described(key)} for key; make one: random.key(0)")
    if key.dim():
        raise ArgumentError(
            f"{what} got {described(key)} for key, which are several keys; pass one, keys[0], or map over them: "
            f"vmap(lambda key: {what}(key, ...))(keys)"
        )


# --- draws ----------------------------------------------------------------------------------------------------------


def _numbers(
    what: str,
    key: Any,
    shape: Any,
    dtype: torch.dtype,
    law: Law,
    options: LayoutOptions,
    then: Callable[[Tensor], Tensor] | None = None,
) -> Any:
    """The random numbers of a key, plain or `Sharded`, after ``then``."""
    _check_key(key, what)
    sizes = _sizes(what, shape)
    if isinstance(key, Sharded):
        key = from_blocks(key.local, key.spec)
    spec = _spec(what, sizes, dtype, options)
    device = _device(what, options) if spec is None else spec.mesh.device

    def make(key: Tensor) -> Any:
        if spec is not None:
            return drawn(spec, law, device, then, key=key)
        with DisableTorchFunction():
            x = drawing(dtype, law, device, then)(Block(sizes, (0,) * len(sizes), sizes), key)
        return set_variance(x, get_variance(key))

    return _mapped(make, key)


def _mapped(make: Callable[[Tensor], Any], key: Tensor) -> Any:
    """The result of ``make`` for a key. For a key that `vmap` maps, it has the results of all its elements.

    ``make`` runs outside of all transforms, and the result has the levels of `vmap` that the key has. Made within a
    derivative, it would have the level of the derivative inside those of `vmap` around it, which torch cannot use.
    """
    layers: list[tuple[int, int]] = []  # of each vmap that maps the key: its level, and the mapped dim; the inner last
    while level_of(key) != NO_LEVEL:
        if batch_dim_of(key) != NOT_MAPPED:
            layers.append((level_of(key), batch_dim_of(key)))
        key = wrapped_by(key)
    if not layers:
        return make(key)
    with outside_transforms():
        results = _of_all(make, key, [dim for _, dim in reversed(layers)])
    x = results.local if isinstance(results, Sharded) else results
    for level, _ in reversed(layers):
        x = add_batch_dim(x, 0, level)
    return Sharded(x, results.spec) if isinstance(results, Sharded) else x


def _of_all(make: Callable[[Tensor], Any], keys: Tensor, dims: list[int]) -> Any:
    """The results for all elements of a tensor of keys, in new first dims. A `Sharded` has the spec of one result."""
    if not dims:
        return make(keys)
    each = keys.unbind(dims[0]) or (keys.sum(dims[0]),)  # without keys the result of some key tells the shape
    parts = [_of_all(make, part, dims[1:]) for part in each]
    joined = torch.stack([x.local if isinstance(x, Sharded) else x for x in parts])[: keys.shape[dims[0]]]
    return Sharded(joined, parts[0].spec) if isinstance(parts[0], Sharded) else joined


def _broadcasts(x: Any, sizes: tuple[int, ...]) -> bool:
    """Whether a number or a tensor broadcasts to a shape."""
    shape = tuple(x.shape) if isinstance(x, Tensor) else ()
    ends = zip(reversed(shape), reversed(sizes), strict=False)
    return len(shape) <= len(sizes) and all(n in (1, size) for n, size in ends)


def _sizes(what: str, shape: Any) -> tuple[int, ...]:
    sizes = (shape,) if type(shape) is int else shape
    if not isinstance(sizes, (tuple, list)) or not all(isinstance(n, int) and n >= 0 for n in sizes):
        raise ArgumentError(f"{what} got {described(shape)} for shape; give it the global shape, such as (8, 4)")
    return tuple(sizes)


def _spec(what: str, sizes: tuple[int, ...], dtype: torch.dtype, options: LayoutOptions) -> TensorSpec | None:
    """The layout of a result; None for a plain tensor."""
    known = LayoutOptions.__annotations__
    if unknown := sorted(options.keys() - known.keys()):
        raise ArgumentError(f"{what} got {unknown[0]}=; it takes {', '.join(known)} besides")
    partition, mesh = options.get("spec"), options.get("mesh")
    if partition is None and mesh is None:
        return None
    mesh, partition = the_mesh(mesh, what), P() if partition is None else partition
    if wrong := complain(partition, mesh, len(sizes)):
        raise SpecError(f"{what}: a tensor of shape {sizes}: {wrong}")
    return TensorSpec(mesh, partition, sizes, dtype)


def _device(what: str, options: LayoutOptions) -> torch.device:
    """The device of a plain tensor."""
    device = options.get("device")
    try:
        return _default_device() if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(
            f"{what} got {described(device)} for device; expected a device such as 'cpu' or 'cuda'"
        ) from error


def _default_device() -> torch.device:
    return torch.get_default_device() if state.body is None else state.body.mesh.device


def _like(x: Tensor | Sharded, options: LayoutOptions) -> LayoutOptions:
    """The options; where they leave something open, numbers get the layout, or the device, of ``x``."""
    if isinstance(x, Sharded):
        spec, mesh = options.get("spec") or P(*x.spec.partition), options.get("mesh") or x.spec.mesh
        return LayoutOptions(spec=spec, mesh=mesh)
    return options or LayoutOptions(device=x.device if state.body is None else None)
