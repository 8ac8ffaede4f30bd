"""JAX-style functional SPMD for PyTorch."""

from fspmd.autodiff import checkpoint, grad, jvp, stop_gradient, value_and_grad, vjp
from fspmd.batching import vmap
from fspmd.collectives import (
    Handle,
    all_gather,
    all_gather_into,
    all_to_all,
    axis_index,
    axis_size,
    pbroadcast,
    pcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    pshuffle,
    psum,
    psum_scatter,
    psum_scatter_into,
    pswapaxes,
)
from fspmd.errors import (
    ArgumentError,
    AxisError,
    FspmdError,
    MeshError,
    ShapeError,
    SpecError,
    TreeError,
    VarianceError,
)
from fspmd.mesh import Mesh, current_mesh, make_mesh, set_mesh
from fspmd.placement import device_get, device_put, from_callback, from_local
from fspmd.rank_map import rank_map
from fspmd.shard_map import shard_map
from fspmd.sharded import Sharded, typeof
from fspmd.spec import P, TensorSpec

__all__ = [
    "ArgumentError",
    "AxisError",
    "FspmdError",
    "Mesh",
    "MeshError",
    "P",
    "ShapeError",
    "Sharded",
    "SpecError",
    "TensorSpec",
    "TreeError",
    "VarianceError",
    "all_gather",
    "all_gather_into",
    "all_to_all",
    "axis_index",
    "axis_size",
    "checkpoint",
    "current_mesh",
    "device_get",
    "device_put",
    "from_callback",
    "from_local",
    "grad",
    "jvp",
    "make_mesh",
    "pbroadcast",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "psum_scatter_into",
    "pswapaxes",
    "rank_map",
    "set_mesh",
    "shard_map",
    "stop_gradient",
    "typeof",
    "value_and_grad",
    "vjp",
    "vmap",
]
