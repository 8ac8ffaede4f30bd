"""`typeof`: the type of a value, for users and messages."""

from __future__ import annotations

from torch import Tensor

from fspmd.errors import ArgumentError
from fspmd.foreign import refuse_foreign
from fspmd.messages import described
from fspmd.sharded import Sharded
from fspmd.spec import TensorSpec
from fspmd.torch_internals import DisableTorchFunction
from fspmd.variance import INVARIANT, Variance, get_variance, show


class ValueType:
    """The result of `typeof` for a tensor: dtype, shape, and its type over each mesh axis."""

    __slots__ = ("_text", "dtype", "shape", "variance")

    def __init__(self, x: Tensor) -> None:
        with DisableTorchFunction():
            self.dtype = x.dtype
            self.shape = tuple(x.shape)
            self.variance: Variance = get_variance(x) if isinstance(x, Tensor) else INVARIANT
        self._text = show(x)

    def __repr__(self) -> str:
        return self._text


def typeof(x: Tensor | Sharded) -> ValueType | TensorSpec:
    """Return the type of a value: ``f32[8,4]{V:x}`` for a block in a body, the layout for a `Sharded`.

    >>> import torch
    >>> from fspmd import P, make_mesh, shard_map
    >>> def body(x):
    ...     print(typeof(x))
    ...     return x
    >>> y = shard_map(body, mesh=make_mesh((4,), ("x",)), in_specs=P("x"), out_specs=P("x"))(torch.zeros(32, 4))
    f32[8,4]{V:x}
    >>> typeof(y)
    f32[32@x, 4] on mesh(x=4)
    """
    if not isinstance(x, Tensor):
        raise ArgumentError(f"typeof takes a tensor or a Sharded, but got {described(x)}")
    refuse_foreign(x, "typeof got")
    return x.spec if isinstance(x, Sharded) else ValueType(x)
