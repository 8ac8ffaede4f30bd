"""JAX-style functional SPMD for PyTorch."""

__version__ = "0.1.0"

from fspmd import nn, random
from fspmd.autodiff import checkpoint, grad, jvp, stop_gradient, value_and_grad, vjp, vmap
from fspmd.autodiff.engine import install as _install_module_hooks
from fspmd.autodiff.transforms import install as _install_transforms
from fspmd.checkpoints.folders import latest_step
from fspmd.checkpoints.load import load
from fspmd.checkpoints.load_huggingface import load_huggingface
from fspmd.checkpoints.save import SaveHandle, save
from fspmd.checkpoints.save_huggingface import save_huggingface
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
    ragged_all_to_all,
)
from fspmd.entries import Flat
from fspmd.errors import (
    ArgumentError,
    AxisError,
    CheckpointError,
    CommunicationError,
    DeadlineError,
    DonationError,
    FspmdError,
    LockstepError,
    MeshError,
    PeerError,
    RecordError,
    ReplicaError,
    ShapeError,
    SpecError,
    TreeError,
    VarianceError,
)
from fspmd.fake_mode import install as _install_meta
from fspmd.global_view.dispatch import propagation_cache_clear, propagation_cache_info, propagation_cache_resize
from fspmd.global_view.methods import install as _install_methods
from fspmd.global_view.refusals import NoRuleError
from fspmd.global_view.rule import rule
from fspmd.inspection.communication_log import CommunicationLog, communication_log
from fspmd.inspection.deadlines import deadline, debug
from fspmd.inspection.deadlines import install as _install_debug
from fspmd.inspection.explain_rule import explain_rule
from fspmd.inspection.explicit import GradientSumWarning, ImplicitCommunicationWarning, explicit, set_default
from fspmd.inspection.implicit import Implicit
from fspmd.inspection.lockstep import lockstep
from fspmd.inspection.long_waits import install as _install_lives
from fspmd.inspection.watch import Communication
from fspmd.layout_search.apply import Layouts
from fspmd.layout_search.auto_spec import auto_spec
from fspmd.local_view.hooks import install as _install_hooks
from fspmd.local_view.rank_map import rank_map
from fspmd.local_view.shard_map import shard_map
from fspmd.meshes.mesh import Mesh, current_mesh, make_mesh, set_mesh
from fspmd.modules.functional_call import Attached, attach, attached, functional_call
from fspmd.modules.init_sharded import init_sharded
from fspmd.modules.optim import clip_by_global_norm, global_norm
from fspmd.modules.optim import install as _install_optim
from fspmd.modules.parallel import parallelize
from fspmd.modules.plans import ParallelPlan
from fspmd.modules.styles import (
    ColwiseParallel,
    OnBlocks,
    PrepareInput,
    PrepareOutput,
    Replicated,
    RowwiseParallel,
    SequenceParallel,
    Style,
    VocabParallel,
)
from fspmd.placement.broadcast import broadcast, pad_to_blocks, unpad
from fspmd.placement.checkpoint_chunks import install as _install_chunks
from fspmd.placement.creation import (
    arange,
    empty,
    eye,
    full,
    linspace,
    normal,
    ones,
    rand,
    randint,
    randn,
    randperm,
    zeros,
)
from fspmd.placement.device_put import device_get, device_put, from_callback, from_local, scatter
from fspmd.placement.dtensors import from_dtensor, to_dtensor
from fspmd.placement.measure import measure_topology
from fspmd.placement.pictures import visualize_sharding
from fspmd.placement.processes import assert_equal, barrier, from_process_local, process_allgather
from fspmd.placement.replicas import check_replicas
from fspmd.placement.reshard import Explanation, explain, reshard, with_spec
from fspmd.programs.cache_misses import CacheMiss, explain_cache_misses
from fspmd.programs.checked import replay_check
from fspmd.programs.debug_print import debug_print
from fspmd.programs.jit import Jitted, jit
from fspmd.programs.lower import Cost, Lowered
from fspmd.programs.passes.chunked import Chunked
from fspmd.programs.passes.coalesce import Coalesce
from fspmd.programs.passes.overlap import Overlap
from fspmd.programs.passes.recompute import Recompute
from fspmd.redistribution.cost import ETHERNET, INFINIBAND, NVLINK, PCIE, Link, Price, Topology, set_topology, topology
from fspmd.rules import BodyLayout, Site
from fspmd.sharded import Sharded
from fspmd.spec import P, TensorSpec
from fspmd.upper import install as _install_upper
from fspmd.value_types import typeof
from fspmd.wrappers import at_first_use as _at_first_use

_install_methods()
_install_upper()
_install_chunks()
_install_lives()
_install_debug()
_at_first_use(_install_meta, _install_hooks, _install_transforms, _install_module_hooks, _install_optim)

__all__ = [
    "ETHERNET",
    "INFINIBAND",
    "NVLINK",
    "PCIE",
    "ArgumentError",
    "Attached",
    "AxisError",
    "BodyLayout",
    "CacheMiss",
    "CheckpointError",
    "Chunked",
    "Coalesce",
    "ColwiseParallel",
    "Communication",
    "CommunicationError",
    "CommunicationLog",
    "Cost",
    "DeadlineError",
    "DonationError",
    "Explanation",
    "Flat",
    "FspmdError",
    "GradientSumWarning",
    "Handle",
    "Implicit",
    "ImplicitCommunicationWarning",
    "Jitted",
    "Layouts",
    "Link",
    "LockstepError",
    "Lowered",
    "Mesh",
    "MeshError",
    "NoRuleError",
    "OnBlocks",
    "Overlap",
    "P",
    "ParallelPlan",
    "PeerError",
    "PrepareInput",
    "PrepareOutput",
    "Price",
    "Recompute",
    "RecordError",
    "ReplicaError",
    "Replicated",
    "RowwiseParallel",
    "SaveHandle",
    "SequenceParallel",
    "ShapeError",
    "Sharded",
    "Site",
    "SpecError",
    "Style",
    "TensorSpec",
    "Topology",
    "TreeError",
    "VarianceError",
    "VocabParallel",
    "all_gather",
    "all_gather_into",
    "all_to_all",
    "arange",
    "assert_equal",
    "attach",
    "attached",
    "auto_spec",
    "axis_index",
    "axis_size",
    "barrier",
    "broadcast",
    "check_replicas",
    "checkpoint",
    "clip_by_global_norm",
    "communication_log",
    "current_mesh",
    "deadline",
    "debug",
    "debug_print",
    "device_get",
    "device_put",
    "empty",
    "explain",
    "explain_cache_misses",
    "explain_rule",
    "explicit",
    "eye",
    "from_callback",
    "from_dtensor",
    "from_local",
    "from_process_local",
    "full",
    "functional_call",
    "global_norm",
    "grad",
    "init_sharded",
    "jit",
    "jvp",
    "latest_step",
    "linspace",
    "load",
    "load_huggingface",
    "lockstep",
    "make_mesh",
    "measure_topology",
    "nn",
    "normal",
    "ones",
    "pad_to_blocks",
    "parallelize",
    "pbroadcast",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "process_allgather",
    "propagation_cache_clear",
    "propagation_cache_info",
    "propagation_cache_resize",
    "pshuffle",
    "psum",
    "psum_scatter",
    "psum_scatter_into",
    "pswapaxes",
    "ragged_all_to_all",
    "rand",
    "randint",
    "randn",
    "random",
    "randperm",
    "rank_map",
    "replay_check",
    "reshard",
    "rule",
    "save",
    "save_huggingface",
    "scatter",
    "set_default",
    "set_mesh",
    "set_topology",
    "shard_map",
    "stop_gradient",
    "to_dtensor",
    "topology",
    "typeof",
    "unpad",
    "value_and_grad",
    "visualize_sharding",
    "vjp",
    "vmap",
    "with_spec",
    "zeros",
]


def __dir__() -> list[str]:
    """The public names; the folders that they come from are not among them."""
    return [*__all__, "__all__", "__doc__", "__file__", "__name__", "__path__", "__version__"]
