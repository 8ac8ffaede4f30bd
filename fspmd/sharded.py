"""`Sharded`: this rank's block of a global tensor, with the spec that says how it lies on the mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import optree
import torch
import torch.utils._pytree
from torch import Tensor

from fspmd.body import state
from fspmd.errors import ArgumentError, FspmdError, ShapeError
from fspmd.messages import described
from fspmd.spec import P, TensorSpec
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
        if type(spec) is not TensorSpec:
            raise ArgumentError(
                f"Sharded(local, spec) got {described(spec)} for spec; it takes a TensorSpec: for a P write "
                "from_local(local, P(...), mesh=mesh)"
            )
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
        """Gradients for the leaves this value was computed from; ``gradient`` lies as self, or is global and plain.

        Raises:
            ArgumentError, VarianceError: no ``gradient``, and self is no scalar equal on all ranks.
            TreeError: a ``gradient`` of another shape, dtype or layout.
        """
        above.backward(self, gradient)

    def detach(self) -> Sharded:
        """The same value, not followed by autograd."""
        return Sharded(self.local.detach(), self.spec)

    def __repr__(self) -> str:
        return f"Sharded {self.spec!r}" if isinstance(self.spec, TensorSpec) else f"Sharded({self.local!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        values = optree.tree_leaves((args, kwargs), is_leaf=is_sharded)
        _refuse(f"{getattr(func, '__name__', func)}()", next(x for x in values if isinstance(x, Sharded)))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_") or not hasattr(Tensor, name):
                raise AttributeError(f"a Sharded has no attribute {name!r}")
            _refuse(f".{name}", self, ShardedAttributeError)


class _Above:
    backward: Callable[[Sharded, Tensor | Sharded | None], None]


#: what a Sharded can do that stands on floors above this one, each set where it is written
above = _Above()


class ShardedAttributeError(ArgumentError, AttributeError):
    """A tensor's attribute asked of a Sharded; hasattr and getattr with a default take it as absent."""


def is_sharded(x: Any) -> bool:
    """For the ``is_leaf`` of tree functions."""
    return isinstance(x, Sharded)


def _refuse(operation: str, x: Sharded, error: type[FspmdError] = ArgumentError) -> NoReturn:
    if state.body is not None:
        raise error(
            f"{operation} was used on {x!r} inside {state.body.name}, whose values are this rank's blocks; pass it as "
            "an argument, with its spec in in_specs, instead of closing over it"
        )
    raise error(
        f"{operation} was used on {x!r}; write it in a function run by shard_map, whose values are this rank's blocks, "
        "or use it on the global tensor, device_get(x)"
    )


def _operator(shown: str) -> Any:
    def refuse(self: Sharded, *args: Any, **options: Any) -> NoReturn:
        _refuse(shown, self)

    return refuse


_OPERATORS = {
    **{"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "matmul": "@", "pow": "**", "mod": "%"},
    **{"neg": "-", "abs": "abs()", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "getitem": "x[...]"},
    **{"setitem": "x[...] =", "bool": "bool() or a branch", "float": "float()", "int": "int()", "index": "int()"},
    **{"len": "len()", "iter": "a loop", "contains": "in", "array": "numpy"},
}
for _name, _shown in _OPERATORS.items():
    setattr(Sharded, f"__{_name}__", _operator(_shown))
    if _name in ("add", "sub", "mul", "truediv", "floordiv", "matmul", "pow", "mod"):
        setattr(Sharded, f"__r{_name}__", _operator(_shown))


def dual(spec: TensorSpec) -> TensorSpec:
    """The layout of the gradient of a value: unreduced and reduced change places."""
    partition = spec.partition
    if not partition.unreduced and not partition.reduced:
        return spec
    return spec.with_partition(P(*partition, unreduced=partition.reduced, reduced=partition.unreduced))


def _flatten(x: Sharded) -> tuple[tuple[Tensor], TensorSpec, tuple[str]]:
    return (x.local,), x.spec, ("local",)


def _unflatten(spec: TensorSpec, children: Iterable[Any]) -> Sharded:
    """What a tree function makes of a block: of another dtype, with the spec of that; of another shape, an error."""
    (local,) = children
    if isinstance(local, Tensor):
        if local.dim() != len(spec.shape) or (spec.even and tuple(local.shape) != _even_block(spec)):
            raise ShapeError(
                f"a tree function put a tensor of shape {tuple(local.shape)} in the place of a block of shape "
                f"{_even_block(spec)} into Sharded {spec!r}; instead of torch.vmap and torch.func use fspmd.vmap, "
                "fspmd.grad ..., or return device_get(x) from the function; instead of a tree_map that changes shapes "
                "use shard_map"
            )
        if local.dtype is not spec.dtype:
            spec = TensorSpec(spec.mesh, spec.partition, spec.shape, local.dtype)
    return Sharded(local, spec)


def _even_block(spec: TensorSpec) -> tuple[int, ...]:
    return spec.local_shape((0,) * len(spec.mesh.axis_names))


optree.register_pytree_node(
    Sharded, _flatten, _unflatten, path_entry_type=optree.GetAttrEntry, namespace=optree.registry.__GLOBAL_NAMESPACE
)
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
    if not isinstance(x, (Tensor, Sharded)):
        raise ArgumentError(f"typeof takes a tensor or a Sharded, but got {described(x)}")
    return x.spec if isinstance(x, Sharded) else ValueType(x)
