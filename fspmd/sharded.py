"""`Sharded`: this rank's block of a global tensor, with the spec that says how it lies on the mesh."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import optree
import torch
import torch.utils._pytree
from torch import Tensor

from fspmd.body import state
from fspmd.errors import FspmdError
from fspmd.spec import TensorSpec
from fspmd.variance import INVARIANT, Variance, get_variance, show


class Sharded:
    """A pair of (local tensor, spec): a pytree node whose only child is the local tensor.

    ``shape`` and ``dtype`` are those of the global tensor. In a simulation ``local`` holds the blocks of all ranks.

    >>> from fspmd import P, device_put, make_mesh
    >>> x = device_put(torch.zeros(8, 4), P("x"), mesh=make_mesh((4,), ("x",)))
    >>> x
    Sharded f32[8@x, 4] on mesh(x=4)
    >>> x.shape, x.spec.partition
    ((8, 4), P('x', None))
    """

    __slots__ = ("__weakref__", "local", "spec")
    local: Tensor
    spec: TensorSpec

    def __init__(self, local: Tensor, spec: TensorSpec) -> None:
        self.local = local
        self.spec = spec

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.spec.shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.spec.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype."""
        return self.spec.dtype

    @property
    def device(self) -> torch.device:
        """Where this rank's block is."""
        return self.local.device

    @property
    def requires_grad(self) -> bool:
        """Whether autograd follows the local tensor."""
        return self.local.requires_grad

    def requires_grad_(self, requires_grad: bool = True) -> Sharded:
        """Make the local tensor a leaf that autograd follows."""
        self.local.requires_grad_(requires_grad)
        return self

    @property
    def grad(self) -> Sharded | None:
        """The gradient that `backward` left on the local tensor: laid out as self, unreduced where self is reduced."""
        if self.local.grad is None:
            return None
        return Sharded(self.local.grad, dual(self.spec))

    def backward(self, gradient: Tensor | Sharded | None = None) -> None:
        """``local.backward()``: gradients for the leaves this value was computed from."""
        self.local.backward(gradient.local if isinstance(gradient, Sharded) else gradient)

    def detach(self) -> Sharded:
        """The same value, not followed by autograd."""
        return Sharded(self.local.detach(), self.spec)

    def __repr__(self) -> str:
        return f"Sharded {self.spec!r}" if isinstance(self.spec, TensorSpec) else f"Sharded({self.local!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _refuse(getattr(func, "__name__", str(func)))


def _refuse(operation: str) -> NoReturn:
    if state.body is not None:
        raise FspmdError(
            f"{operation} was applied to a Sharded inside {state.body.name}: a shard_map body works on this rank's "
            "blocks, so pass the Sharded as an argument of the shard_map function, with its spec in in_specs, instead "
            "of closing over it"
        )
    raise FspmdError(
        f"{operation} was applied to a Sharded; write it in a function run by shard_map, where the argument is this "
        "rank's block, or take the global tensor with device_get(x) or this rank's block with x.local"
    )


def _operator(name: str) -> Any:
    def refuse(self: Sharded, *args: Any) -> NoReturn:
        _refuse(name)

    return refuse


for _name in [
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "floordiv",
    "matmul",
    "rmatmul",
    "pow",
    "rpow",
    "mod",
    "neg",
    "abs",
    "getitem",
    "setitem",
    "bool",
    "float",
    "int",
    "index",
    "lt",
    "le",
    "gt",
    "ge",
    "len",
    "iter",
]:
    setattr(Sharded, f"__{_name}__", _operator(f"__{_name}__"))


def dual(spec: TensorSpec) -> TensorSpec:
    """The layout of the gradient of a value: unreduced and reduced change places."""
    partition = spec.partition
    if not partition.unreduced and not partition.reduced:
        return spec
    from fspmd.spec import P

    return spec.with_partition(P(*partition, unreduced=partition.reduced, reduced=partition.unreduced))


def _flatten(x: Sharded) -> tuple[tuple[Tensor], TensorSpec, tuple[str]]:
    return (x.local,), x.spec, ("local",)


def _unflatten(spec: TensorSpec, children: Iterable[Any]) -> Sharded:
    (local,) = children
    return Sharded(local, spec)


optree.register_pytree_node(Sharded, _flatten, _unflatten, namespace=optree.registry.__GLOBAL_NAMESPACE)
torch.utils._pytree.register_pytree_node(  # so that torch.func transforms take trees of Sharded
    Sharded, lambda x: ([x.local], x.spec), lambda children, spec: _unflatten(spec, children)
)


class ValueType:
    """What `typeof` tells of a tensor: dtype, shape, and its type over each mesh axis."""

    __slots__ = ("_text", "dtype", "shape", "variance")

    def __init__(self, x: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            self.dtype = x.dtype
            self.shape = tuple(x.shape)
            self.variance: Variance = get_variance(x) if isinstance(x, Tensor) else INVARIANT
            self._text = show(x)

    def __repr__(self) -> str:
        return self._text


def typeof(x: Tensor | Sharded) -> ValueType | TensorSpec:
    """The type of a value: ``f32[8,4]{V:x}`` of a block in a body, the spec of a `Sharded`.

    >>> from fspmd import P, make_mesh, shard_map
    >>> def body(x):
    ...     print(typeof(x))
    ...     return x
    >>> y = shard_map(body, mesh=make_mesh((4,), ("x",)), in_specs=P("x"), out_specs=P("x"))(torch.zeros(32, 4))
    f32[8,4]{V:x}
    >>> typeof(y)
    f32[32@x, 4] on mesh(x=4)
    """
    return x.spec if isinstance(x, Sharded) else ValueType(x)
