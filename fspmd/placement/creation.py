"""New `Sharded` values of a global shape. Each rank makes only its own block, and nothing moves.

The functions take torch's arguments, and ``spec``, by default P(), and ``mesh``, by default that of `set_mesh`. The
values are on the device of the mesh. Random values are the same global tensor on any mesh, under any spec. They advance
torch's default generator (or ``generator``) by one draw. Its state must be equal on all ranks: call
``torch.manual_seed(0)`` on each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypedDict, Unpack

import torch
from torch import Tensor

from fspmd.body import the_mesh
from fspmd.cache import cached
from fspmd.errors import ArgumentError, SpecError
from fspmd.meshes.mesh import Mesh
from fspmd.messages import described
from fspmd.random import distributions
from fspmd.random.blocks import Law, drawn, fill, shared_seed, shuffled
from fspmd.random.counter import Block
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec, complain
from fspmd.torch_internals import DisableTorchFunction
from fspmd.tracing import hidden

Size = int | tuple[int, ...] | list[int]


class CreationOptions(TypedDict, total=False):
    """The keyword arguments of every function here."""

    spec: P
    mesh: Mesh | None
    dtype: torch.dtype | None
    device: torch.device | str | None  # of the type of the mesh's devices
    requires_grad: bool


class RandomOptions(CreationOptions, total=False):
    """The keyword arguments of functions that draw random numbers."""

    generator: torch.Generator | None


def zeros(*size: Size, **options: Unpack[CreationOptions]) -> Sharded:
    """Zeros.

    >>> from fspmd import make_mesh, zeros
    >>> zeros(8, 4, spec=P("x"), mesh=make_mesh((4,), ("x",)))
    Sharded f32[8@x, 4] on mesh(x=4)
    """
    return _filled(torch.zeros, _spec(torch.zeros, size, options), options)


def ones(*size: Size, **options: Unpack[CreationOptions]) -> Sharded:
    """Ones.

    >>> from fspmd import device_get, make_mesh, ones
    >>> device_get(ones(3, spec=P("x"), mesh=make_mesh((4,), ("x",))))
    tensor([1., 1., 1.])
    """
    return _filled(torch.ones, _spec(torch.ones, size, options), options)


def empty(*size: Size, **options: Unpack[CreationOptions]) -> Sharded:
    """Uninitialised values.

    >>> from fspmd import empty, make_mesh
    >>> empty((5, 2), spec=P("x"), mesh=make_mesh((4,), ("x",)))
    Sharded f32[5@x, 2] on mesh(x=4)
    """
    return _filled(torch.empty, _spec(torch.empty, size, options), options)


def full(size: Size, fill_value: complex, **options: Unpack[CreationOptions]) -> Sharded:
    """One number in all elements. By default its type gives the dtype, as in torch.

    >>> from fspmd import full, make_mesh
    >>> full((2, 3), 7, spec=P("x"), mesh=make_mesh((2,), ("x",)))
    Sharded i64[2@x, 3] on mesh(x=2)
    """
    shape = (size,) if isinstance(size, int) else size
    return _filled(torch.full, _spec(torch.full, (shape, fill_value), options), options, fill_value)


def arange(*bounds: float, **options: Unpack[CreationOptions]) -> Sharded:
    """``arange(end)``, ``arange(start, end)`` or ``arange(start, end, step)``.

    Integers are those of torch. Floats are ``start + i * step``, rounded once; torch's may differ by a rounding error.

    >>> from fspmd import arange, device_get, make_mesh
    >>> device_get(arange(1, 10, 2, spec=P("x"), mesh=make_mesh((4,), ("x",))))
    tensor([1, 3, 5, 7, 9])
    """
    spec = _spec(torch.arange, bounds, options)
    start, step = (0, 1) if len(bounds) == 1 else (bounds[0], bounds[2] if len(bounds) > 2 else 1)
    if not spec.dtype.is_floating_point and not spec.dtype.is_complex:
        start, step = int(start), int(step)  # torch truncates fractions, too
    exact = torch.int64 if isinstance(start + step, int) else torch.float64
    return _numbered(lambda index: index.to(exact).mul_(step).add_(start), spec, options)


def linspace(start: float, end: float, steps: int, **options: Unpack[CreationOptions]) -> Sharded:
    """``steps`` numbers from ``start`` to ``end``, both included.

    Numbers are rounded once; torch's may differ by a rounding error.

    >>> from fspmd import device_get, linspace, make_mesh
    >>> device_get(linspace(0, 1, 5, spec=P("x"), mesh=make_mesh((4,), ("x",))))
    tensor([0.0000, 0.2500, 0.5000, 0.7500, 1.0000])
    """
    spec = _spec(torch.linspace, (start, end, steps), options)
    if not spec.dtype.is_floating_point and not spec.dtype.is_complex:
        start, end = int(start), int(end)
    step = (end - start) / max(1, steps - 1)

    def number(index: Tensor) -> Tensor:
        i = index.to(torch.float64)
        return torch.where(index < (steps + 1) // 2, start + i * step, end - (steps - 1 - i) * step)

    return _numbered(number, spec, options)


def eye(n: int, m: int | None = None, **options: Unpack[CreationOptions]) -> Sharded:
    """A matrix [n, m] with ones on the diagonal and zeros elsewhere.

    >>> from fspmd import device_get, eye, make_mesh
    >>> device_get(eye(2, 3, spec=P(None, "x"), mesh=make_mesh((2,), ("x",))))
    tensor([[1., 0., 0.],
            [0., 1., 0.]])
    """
    spec = _spec(torch.eye, (n, n if m is None else m), options)

    def make(block: Block) -> Tensor:
        x_block = torch.zeros(block.shape, dtype=spec.dtype, device=spec.mesh.device)
        diagonal = block.offset[0] - block.offset[1]
        if -block.shape[0] < diagonal < block.shape[1]:
            x_block.diagonal(diagonal).fill_(1)
        return x_block

    return _with_grad(fill(spec, make, spec.mesh.device), options)


def rand(*size: Size, **options: Unpack[RandomOptions]) -> Sharded:
    """Uniform on [0, 1).

    >>> from fspmd import device_get, make_mesh, rand
    >>> def whole(ranks):
    ...     _ = torch.manual_seed(0)
    ...     return device_get(rand(5, 3, spec=P("x"), mesh=make_mesh((ranks,), ("x",))))
    >>> torch.equal(whole(4), whole(1))
    True
    """
    return _drawn(distributions.uniform, _spec(torch.rand, size, options), options)


def randn(*size: Size, **options: Unpack[RandomOptions]) -> Sharded:
    """Normal with mean 0 and variance 1.

    >>> from fspmd import make_mesh, randn
    >>> randn(8, 6, spec=P(None, "x"), mesh=make_mesh((4,), ("x",)))
    Sharded f32[8, 6@x] on mesh(x=4)
    """
    return _drawn(distributions.normal, _spec(torch.randn, size, options), options)


def normal(mean: float, std: float, size: Size, **options: Unpack[RandomOptions]) -> Sharded:
    """Normal with a mean and a standard deviation. For a `Sharded` mean or deviation call `torch.normal`.

    Raises:
        ArgumentError: ``mean`` or ``std`` is no number, or ``std`` is below 0.

    >>> from fspmd import make_mesh, normal
    >>> normal(1.0, 0.02, (4, 3), spec=P("x"), mesh=make_mesh((2,), ("x",)))
    Sharded f32[4@x, 3] on mesh(x=2)
    """
    if not isinstance(mean, (int, float)) or not isinstance(std, (int, float)) or std < 0:
        raise ArgumentError(
            f"normal got {described(mean)} for mean and {described(std)} for std; give it numbers, std not below 0; "
            "torch.normal takes Sharded values"
        )
    shape = (size,) if isinstance(size, int) else size
    spec = _spec(torch.randn, (shape,), options, "normal")
    return _drawn(distributions.normal, spec, options, lambda x: x.mul_(std).add_(mean))


def randint(*bounds_and_size: Any, **options: Unpack[RandomOptions]) -> Sharded:
    """``randint(high, size)`` or ``randint(low, high, size)``: integers from ``low`` to ``high - 1``.

    >>> from fspmd import make_mesh, randint
    >>> randint(0, 10, (5,), spec=P("x"), mesh=make_mesh((4,), ("x",)))
    Sharded i64[5@x] on mesh(x=4)
    """
    spec = _spec(torch.randint, bounds_and_size, options)
    low, high = (0, *bounds_and_size)[-3:-1]
    return _drawn(lambda dtype: distributions.integers(low, high, dtype), spec, options)


def randperm(n: int, **options: Unpack[RandomOptions]) -> Sharded:
    """The integers below ``n`` in a random order. Every rank draws and sorts n keys.

    >>> from fspmd import device_get, make_mesh, randperm
    >>> device_get(randperm(5, spec=P("x"), mesh=make_mesh((4,), ("x",)))).sort().values
    tensor([0, 1, 2, 3, 4])
    """
    spec = _spec(torch.randperm, (n,), options)
    device = spec.mesh.device
    order = shuffled(n, shared_seed(options.get("generator"), spec.mesh), device)

    def make(block: Block) -> Tensor:
        return order[block.offset[0] : block.offset[0] + block.shape[0]].to(spec.dtype, copy=True)

    return _with_grad(fill(spec, make, device), options)


# --- checks and helpers ---------------------------------------------------------------------------------------------


_OPTIONS: Final = frozenset(CreationOptions.__annotations__)
_RANDOM_OPTIONS: Final = frozenset(RandomOptions.__annotations__)
_RANDOM: Final = frozenset((torch.rand, torch.randn, torch.randint, torch.randperm))


def _spec(
    function: Callable[..., Tensor], args: tuple[Any, ...], options: CreationOptions, name: str = ""
) -> TensorSpec:
    """The layout of a new value. Its shape and dtype are those of the result of torch's function."""
    name = name or function.__name__
    known = _RANDOM_OPTIONS if function in _RANDOM else _OPTIONS
    if not options.keys() <= known:
        listed = ", ".join(key for key in RandomOptions.__annotations__ if key in known)
        raise ArgumentError(f"{name} got {min(options.keys() - known)}=; beside torch's arguments it takes {listed}")
    mesh = the_mesh(options.get("mesh"), name)
    partition, device = options.get("spec", _WHOLE), options.get("device")
    key = (function, name, mesh, partition, device, options.get("dtype"), torch.get_default_dtype(), *args)
    if all(type(arg) is not tuple or all(type(n) is int for n in arg) for arg in args):
        try:
            return _cached_spec(*key)
        except TypeError:  # an argument has no hash
            pass
    return _new_spec(*key)


def _new_spec(
    function: Callable[..., Tensor],
    name: str,
    mesh: Mesh,
    partition: P,
    device: Any,
    dtype: torch.dtype | None,
    _: torch.dtype,
    *args: Any,
) -> TensorSpec:
    meta = _meta(function, *args, dtype=dtype)
    if device is not None and torch.device(device).type != mesh.device.type:
        raise ArgumentError(
            f"{name} got device={device!r}, but {mesh!r} has {mesh.device.type} devices; leave device out, or make a "
            "mesh of other devices"
        )
    if wrong := complain(partition, mesh, meta.dim()):
        raise SpecError(f"{name}: a tensor of shape {tuple(meta.shape)}: {wrong}")
    return TensorSpec(mesh, partition, tuple(meta.shape), meta.dtype)


_cached_spec: Final = cached(maxsize=1024, typed=True)(_new_spec)
_WHOLE: Final = P()


@hidden
def _meta(function: Callable[..., Tensor], *args: Any, dtype: torch.dtype | None) -> Tensor:
    """The result of torch's function without data. Its error becomes an `ArgumentError`."""
    try:
        with DisableTorchFunction():
            return function(*args, dtype=dtype, device="meta")
    except (TypeError, RuntimeError, ValueError) as error:
        given = ", ".join(map(repr, args))
        message = str(error).splitlines()[0]
        raise ArgumentError(
            f"{function.__name__}({given}) fails as torch.{function.__name__} does: {message}"
        ) from error


def _filled(function: Callable[..., Tensor], spec: TensorSpec, options: CreationOptions, *args: Any) -> Sharded:
    """A value whose blocks torch's function makes, each of its own shape."""
    device = spec.mesh.device
    x = fill(spec, lambda block: function(block.shape, *args, dtype=spec.dtype, device=device), device)
    return _with_grad(x, options)


def _numbered(number: Callable[[Tensor], Tensor], spec: TensorSpec, options: CreationOptions) -> Sharded:
    """A vector. Each element is a function of its index."""
    device = spec.mesh.device

    def make(block: Block) -> Tensor:
        index = torch.arange(block.offset[0], block.offset[0] + block.shape[0], device=device)
        return number(index).to(spec.dtype)

    return _with_grad(fill(spec, make, device), options)


def _drawn(
    law: Law, spec: TensorSpec, options: RandomOptions, then: Callable[[Tensor], Tensor] | None = None
) -> Sharded:
    return _with_grad(drawn(spec, law, spec.mesh.device, then, options.get("generator")), options)


def _with_grad(x: Sharded, options: CreationOptions) -> Sharded:
    return x.requires_grad_() if options.get("requires_grad") else x
