"""Derivatives of functions of pytrees with plain and `Sharded` leaves, outside and inside a body.

A gradient has the layout of its primal.
"""

from fspmd.autodiff import engine as engine
from fspmd.autodiff.batching import vmap
from fspmd.autodiff.forward import jvp
from fspmd.autodiff.leaves import stop_gradient
from fspmd.autodiff.recompute import checkpoint
from fspmd.autodiff.reverse import grad, value_and_grad, vjp

__all__ = ["checkpoint", "grad", "jvp", "stop_gradient", "value_and_grad", "vjp", "vmap"]
