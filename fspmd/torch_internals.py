"""All private names of torch that fspmd uses: functions, classes, modules and attributes.

The line above a name says what it gives, and what could replace it if something can. All names exist in torch 2.11, the
lowest version that fspmd takes, unless the line says since when. A private function that fspmd replaces stands here as
its owner and its name. Names that take long to import are functions, at the end, or names of modules. The first section
has undocumented classes and blocks of torch that are found by public names.

Other modules read and set the attributes in `ATTRIBUTES` by their names, since calls do so many times, and a function
in between would cost as much again. They use no other private name of torch (`tests/test_structure.py`). The names of
aten functions in the tables of rules are no names of Python: they are in torch's schemas.
"""

from __future__ import annotations

import datetime
import functools
import operator
import sys
import threading
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch._decomp
import torch._functorch.eager_transforms
import torch._functorch.pyfunctorch
import torch._functorch.vmap
import torch._meta_registrations
import torch._subclasses.fake_tensor
import torch.fx.experimental.proxy_tensor
import torch.jit._recursive
import torch.overrides
import torch.utils._python_dispatch
import torch.utils._pytree
import torch.utils.checkpoint
import torch.utils.hooks


def exceptions_of(module: str) -> tuple[type[Exception], ...]:
    """The classes of exceptions that a module defines."""
    classes = [kind for kind in vars(sys.modules[module]).values() if isinstance(kind, type)]
    return tuple(kind for kind in classes if issubclass(kind, Exception) and kind.__module__ == module)


#: private attributes that other modules read or set, by their owner, each with what it gives
ATTRIBUTES: Final = {
    "torch.autograd.forward_ad": {
        "_current_level": "-1 while no forward derivative is taken; instead: none",
    },
    "torch.autograd.profiler": {
        "_is_profiler_enabled": "true while a profiler runs; instead: none",
    },
    "torch.Tensor": {
        "_version": "how often the memory of a tensor has been written; instead: none",
        "_base": "the tensor of which a tensor is a view, or None; instead: none",
        "_is_view": "whether a tensor is a view; instead: none",
        "_backward_hooks": "the hooks on the gradient of a tensor, by number; instead: `register_hook`, more slowly",
    },
    "torch.autograd.graph.Node": {
        "_register_hook_dict": "takes over the `_backward_hooks` of a tensor; instead: `register_hook`, more slowly",
        "_sequence_nr": "the number of a node in its thread: later nodes have higher ones; instead: none",
    },
    "torch.nn.Module": {
        "_parameters": "the parameters of a module itself; instead: `named_parameters(recurse=False)`, to read alone",
        "_buffers": "the buffers of a module itself; instead: `named_buffers(recurse=False)`, to read alone",
        "_modules": "the submodules of a module; instead: `named_children()`, which leaves out None",
    },
    "torch.distributed.ProcessGroup": {
        "_allgather_base": "gathers into one tensor; instead: `all_gather_single` of torch 2.13",
        "_reduce_scatter_base": "sums, and gives each rank a part; instead: `reduce_scatter_single` of torch 2.13",
    },
}

# Shown by public names

#: the class of one aten function, such as `aten.add.Tensor`
OpOverload: Any = type(torch.ops.aten.add.Tensor)
#: the class of all aten functions of a name, such as `aten.add`
OpOverloadPacket: Any = type(torch.ops.aten.add)
#: how a transform runs a custom `Function`
custom_function_call: Any = torch.ops.higher_order.custom_function_call
#: the class of `cond`, `while_loop`, `flex_attention` and their kin
HigherOrderOperator: Any = type(custom_function_call).__base__
#: the class in C below `torch.Tensor`
TensorBase: Any = torch.Tensor.__base__
#: the class of methods of scripted modules
ScriptMethod: Any = torch.ScriptMethod
#: the names of torch's dispatch keys
DispatchKey: Any = torch.DispatchKey
#: a block in which no mode and no subclass sees calls
DisableTorchFunction = torch.DisableTorchFunction
#: a block in which no subclass sees calls
DisableTorchFunctionSubclass = torch.DisableTorchFunctionSubclass
#: the `__torch_function__` of a class that sees no calls
disabled_torch_function: Any = torch.nn.Parameter.__torch_function__
#: the tensor within the wrapper of a transform
wrapped_by: Any = functools.partial(torch.func.debug_unwrap, recurse=False)
#: whether a `TorchFunctionMode` is entered and sees calls
function_mode_is_on: Any = functools.partial(torch.overrides.has_torch_function_unary, None)
#: enters a mode, without what its class adds
push_function_mode: Any = torch.overrides.TorchFunctionMode.__enter__
#: as `TorchFunctionMode` itself leaves a mode
_exit: Any = torch.overrides.TorchFunctionMode.__exit__
#: leaves the mode that was entered last, without what its class adds
pop_function_mode: Any = functools.partial(_exit, None, None, None, None)
#: the functions of `torch.nn.functional` in C
nn_functions: Any = getattr(torch.nn.functional.gelu, "__self__")  # noqa: B009
#: the class of the node of a leaf
AccumulateGrad: Any = type(torch.autograd.graph.get_gradient_edge(torch.empty((), requires_grad=True)).node)
#: the exceptions of torch's checkpoints: an error, and a signal to itself that it has recomputed enough
CHECKPOINT_EXCEPTIONS: Any = exceptions_of(torch.utils.checkpoint.__name__)

# Kinds of functions

#: torch's functions in C, without their Python wrappers; instead: the functions of `torch`, at a little cost
VariableFunctions: Any = torch._C._VariableFunctions
#: all decompositions of aten functions, and those that users register; instead: `torch.export.default_decompositions`
decomposition_table: Any = torch._decomp.decomposition_table
#: the module of a scripted method
wrap_script_module: Any = torch.jit._recursive.wrap_cpp_module
#: the function that `nn.utils.rnn.pad_packed_sequence` calls
pad_packed_sequence: Any = VariableFunctions._pad_packed_sequence

# Functions that have no public name

#: an assertion that does not wait for the device
assert_async: Any = torch.ops.aten._assert_async.msg
#: a copy, also in another dtype, as dispatch sees it
aten_to_copy: Any = torch.ops.aten._to_copy.default
#: a view whose operand nothing else reads, as dispatch sees it
aten_unsafe_view: Any = torch.ops.aten._unsafe_view.default
#: products of groups of rows, as dispatch sees them
aten_grouped_mm: Any = torch.ops.aten._grouped_mm.default
#: attention on the CPU with the logarithm of the sums; instead: products and sums, at twice the time
aten_cpu_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
#: the gradients of that attention; instead: products and sums
aten_cpu_attention_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
#: attention on a GPU by cuDNN, with the logarithm of the sums; instead: `aten_flash_attention`
aten_cudnn_attention: Any = torch.ops.aten._scaled_dot_product_cudnn_attention.default
#: the gradients of that attention; instead: those of `aten_flash_attention`
aten_cudnn_attention_backward: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
#: attention on a GPU in 16 bits, with the logarithm of the sums; instead: products and sums, many times slower
aten_flash_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention.default
#: the gradients of that attention; instead: products and sums
aten_flash_attention_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
#: attention on a GPU with a mask or in 32 bits, with the logarithm of the sums; instead: products and sums
aten_efficient_attention: Any = torch.ops.aten._scaled_dot_product_efficient_attention.default
#: the gradients of that attention; instead: products and sums
aten_efficient_attention_backward: Any = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
#: a kernel for GPUs, of C++ that is compiled when it is first called; instead: several functions of torch
elementwise_kernel: Any = torch.cuda.jiterator._create_jit_fn
#: copies a list of tensors at once; instead: `copy_` of each
foreach_copy_: Any = torch._foreach_copy_

# Python that sees calls: functions and modes

#: a block in which modes and subclasses see calls again
EnableTorchFunction: Any = torch._C._EnableTorchFunction
#: whether modes and subclasses see calls; instead: `has_torch_function_unary` of an object, at four times the time
is_torch_function_enabled: Any = torch._C._is_torch_function_enabled
#: the entered `TorchFunctionMode`s, the innermost last
function_modes: Any = torch.overrides._get_current_function_mode_stack
with torch.device("cpu"):
    #: the class of the mode of `with torch.device(...)`
    DeviceContext: Any = type(function_modes()[-1])
#: a mode that sees aten functions, below autograd
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode
#: how many `TorchDispatchMode`s are entered
count_dispatch_modes: Any = torch._C._len_torch_dispatch_stack
#: the entered `TorchDispatchMode`s
dispatch_mode_stack: Any = torch.utils._python_dispatch._get_current_dispatch_mode_stack
#: enters a mode, also one of torch's own; instead: `with mode:`
push_dispatch_mode: Any = torch.utils._python_dispatch._push_mode
#: leaves the mode that was entered last; instead: `with mode:`
pop_dispatch_mode: Any = torch.utils._python_dispatch._pop_mode
#: where `torch.jit.trace` and the ONNX exporter of old begin: the owners of functions in C, and their names
JIT_TRACERS: Any = (
    (torch._C, "_create_function_from_trace"),
    (torch._C, "_create_function_from_trace_with_dict"),
    (torch._C, "_create_graph_by_tracing"),
    (torch.ScriptModule, "_create_method_from_trace"),
    (torch.ScriptModule, "_create_method_from_trace_with_dict"),
)
#: prefixes of the modules that read strides of arguments: of `make_fx`, and of the fake tensors of export
MODULES_THAT_TRACE: Any = (torch.fx.experimental.proxy_tensor.__name__, "torch._subclasses.")
#: prefixes of the modules whose functions compile a function and call it at once: `cond`, `flex_attention` and kin
MODULES_THAT_COMPILE: Any = ("torch._higher_order_ops.", "torch.nn.attention.")

# torch.func

#: whether a transform of `torch.func` runs
transforms_active: Any = torch._C._are_functorch_transforms_active
#: the level of the transform that wraps a tensor, or one of the two numbers below
level_of: Any = torch._C._functorch.maybe_get_level
#: the level of a tensor that no transform wraps
NO_LEVEL: Final = -1
#: the level of a tensor that a transform wraps which has ended
ENDED: Final = -2
#: the dim that `vmap` maps, or `NOT_MAPPED`
batch_dim_of: Any = torch._C._functorch.maybe_get_bdim
#: the dim of a tensor that `vmap` does not wrap
NOT_MAPPED: Final = -1
#: wraps a tensor as `vmap` does
add_batch_dim: Any = torch._C._functorch._add_batch_dim
#: a block outside the innermost transform
pop_transform: Any = torch._functorch.pyfunctorch.temporarily_pop_interpreter_stack
#: the transforms that run, each of a class by its kind, with its `level()`; the innermost is the last
running_transforms: Any = torch._functorch.pyfunctorch.retrieve_all_functorch_interpreters
#: where a tensor enters a derivative, which wraps it: the module, and the name of the function
ENTERS_DERIVATIVE: Final = (torch._functorch.eager_transforms, "_wrap_tensor_for_grad")
#: where a tensor leaves a derivative
LEAVES_DERIVATIVE: Final = (torch._functorch.eager_transforms, "_unwrap_for_grad")
#: where a tensor enters a `vmap`, which wraps it
ENTERS_VMAP: Final = (torch._functorch.vmap, "_add_batch_dim")
#: where a tensor leaves a `vmap`
LEAVES_VMAP: Final = (torch._functorch.vmap, "_remove_batch_dim")
#: where `vmap` asks whether a result is mapped
ASKS_IF_MAPPED: Final = (torch._functorch.vmap, "is_batchedtensor")
#: makes the dual tensor of forward mode, as dispatch sees it; instead: `torch.autograd.forward_ad.make_dual`
make_dual: Any = VariableFunctions._make_dual
#: the parts of a dual tensor; instead: `torch.autograd.forward_ad.unpack_dual`
unpack_dual: Any = VariableFunctions._unpack_dual

# autograd

#: the node of a graph that runs now, in backward
current_autograd_node: Any = torch._C._current_autograd_node
#: the number of the next node of a graph, in this thread
next_sequence: Any = torch._C._autograd._get_sequence_nr
#: the innermost `saved_tensors_hooks`
top_saved_tensors_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks
#: a public module, of which an attribute in `ATTRIBUTES` is read
profiler = torch.autograd.profiler
#: a public module, of which an attribute in `ATTRIBUTES` is read
forward_ad = torch.autograd.forward_ad
#: what puts a module's hooks on the gradients of its arguments or results: the class, and the name of the method
PUTS_MODULE_HOOKS: Final = (torch.utils.hooks.BackwardHook, "_apply_on_tensors")
#: the name of the function that waits for autograd; instead: none
RUNS_BACKWARD: Final[str] = torch.autograd.graph._engine_run_backward.__name__
#: what begins the attributes of a node that are values which it saves; instead: none
SAVED: Final = "_saved_"
#: names of the generator by which backward recomputes a checkpoint: since torch 2.15, and before; instead: none
_GENERATORS: Final = "_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator"
#: the module of the generator of a checkpoint, and its name
RECOMPUTES: Final = next(
    (torch.utils.checkpoint, name) for name in _GENERATORS if hasattr(torch.utils.checkpoint, name)
)
#: runs backward without the checks of `torch.autograd.grad`, and takes a function that it calls at its end
execution_engine: Any = torch.autograd.Variable._execution_engine

# Fake tensors

#: a tensor of a device, without values
FakeTensor = torch._subclasses.fake_tensor.FakeTensor
#: what tells the functions that give the strides of kernels' results the kind of device, and tells "cuda" for the meta
#: device: the module, and the name of the function
DEVICE_HINT: Final = (torch._meta_registrations, "device_hint")
#: the mode that makes fake tensors
FakeTensorMode = torch._subclasses.fake_tensor.FakeTensorMode
#: whether the tensors of such a mode give 0 for `data_ptr()`, and raise no error; instead: none
tells_addresses: Any = operator.attrgetter("_allow_unsafe_data_ptr_access")
#: the errors of functions that do not run without values, or not on such tensors
FAKE_TENSOR_ERRORS: Any = exceptions_of(FakeTensorMode.__module__)

# Memory

#: makes a tensor of a subclass, without memory
make_wrapper_subclass: Any = torch.Tensor._make_wrapper_subclass
#: makes a tensor of a subclass, with the memory of another tensor
make_subclass: Any = torch.Tensor._make_subclass
#: a view whose bit of negation is the other one
neg_view: Any = torch._neg_view
#: functions of tensors that no mode sees: ``torch.Tensor(x)``, the maker of an ``nn.Parameter``, …; instead: none
UNSEEN: tuple[tuple[Any, str], ...] = (
    *((torch.Tensor, name) for name in ("__new__", "_make_subclass", "as_subclass", "set_")),
    *((torch.nested, name) for name in ("nested_tensor", "as_nested_tensor")),
    *((owner, "to_dlpack") for owner in (torch, torch.utils.dlpack)),
)
#: what takes the memory of a capsule of DLPack: the module, and the name of the function
FROM_CAPSULE: Final = (torch._C, "_from_dlpack")
#: swaps two tensors and their views; instead: `torch.utils.swap_tensors`, which refuses tensors that have views
swap_memory: Any = torch._C._swap_tensor_impl
#: whether oneDNN multiplies matrices of bfloat16 on this CPU
has_bfloat16_products: Any = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
#: how many tensors have a storage
storage_uses: Any = torch._C._storage_Use_Count
#: how often a tensor is referred to in C
tensor_uses: Any = torch.Tensor._use_count  # type: ignore[attr-defined]
#: the address of a storage or a generator in C, by which it is known while it lives
address_of: Any = operator.attrgetter("_cdata")
#: whether a tensor is a tangent of zeros, without memory
is_zero_tangent: Any = torch.Tensor._is_zerotensor

# Modules and optimizers

#: the attributes of a module that have hooks by their numbers
HOOKS_OF_MODULES: Final = frozenset(name for name in vars(torch.nn.Module()) if name.endswith("_hooks"))
#: the attributes of a recurrent layer that list its weights once more, and weak references to them
FLAT_WEIGHTS, FLAT_WEIGHT_REFS = "_flat_weights", "_flat_weight_refs"
#: the name of the function of `torch.nn.init` that draws normal numbers between two bounds
TRUNCATED_NORMAL: Final[str] = torch.nn.init._no_grad_trunc_normal_.__name__
#: what sorts tensors by device and dtype: a module that has the function, and its name there and elsewhere
GROUPS_TENSORS: Final = (torch.nn.utils.clip_grad, "_group_tensors_by_device_and_dtype")
#: where `get_total_norm` stands
TOTAL_NORMS: Final = ((torch.nn.utils, "get_total_norm"), (torch.nn.utils.clip_grad, "_get_total_norm"))

# torch.compile

#: the module of Dynamo that takes seconds to import; before its import no function is compiled
DYNAMO: Final = "torch._dynamo.eval_frame"
#: where it keeps the stance of `torch.compiler.set_stance`
STANCE: Final = (DYNAMO, "_stance")
#: what sets the stance: the name of the module, and of the function
SETS_STANCE: Final = ("torch._dynamo.decorators", "_set_stance")
#: the name of the module of Dynamo's errors
DYNAMO_ERRORS: Final = "torch._dynamo.exc"
#: Dynamo's callback of this thread, None outside of compiled functions; instead: none
frame_callback: Any = torch._C._dynamo.eval_frame.get_eval_frame_callback
#: sets this callback; instead: `torch.compiler.set_stance`, for all threads
set_frame_callback: Any = torch._C._dynamo.eval_frame.set_eval_frame
#: tells in C whether tensors have the properties that they had before
TensorGuards: Any = torch._C._dynamo.guards.TensorGuards

# Trees

#: the nodes of torch's own pytrees by their classes, which are registered with optree
torch_nodes: Any = torch.utils._pytree.SUPPORTED_NODES


def schema_of(function: Any) -> Any:
    """The schema of an aten function, or None for another function; instead: none."""
    return getattr(function, "_schema", None)


def op_of(function: Any) -> Any:
    """The `OpOverload` behind an object of `torch.library.custom_op`; other functions as they are; instead: none."""
    return getattr(function, "_opoverload", function)


def kernel_of(overload: Any, key: Any) -> Any:
    """What an aten function runs for a dispatch key, also for one of several devices; instead: none."""
    return functools.partial(overload._op_dk, key)


def method_of_symbols(function: Any) -> str:
    """The name of the method by which a symbolic number computes a function of `math`; instead: none."""
    return f"_sym_{function.__name__}"


def untyped_storage(storage: Any) -> Any:
    """The bytes of a storage that may have a type; instead: `TypedStorage.untyped`, which warns."""
    return getattr(storage, "_untyped_storage", storage)


def plain_apply(function: Any) -> Any:
    """What `Function.apply` calls when no transform is active, after it has read the signature of `forward`."""
    return super(torch.autograd.Function, function).apply


def make_parameter(x: Any) -> None:
    """Make a tensor of another class an instance of `nn.Parameter`; instead: none."""
    x._is_param = True


def hooks_of_loading(optimizer: Any) -> Any:
    """The hooks after the loading of an optimizer's state. None if it wraps another; instead: none."""
    return getattr(optimizer, "_optimizer_load_state_dict_post_hooks", None)


def never_compile(function: Any, message: str, *, all_within: bool) -> None:
    """Make Dynamo leave a function to Python, or raise ``message`` where it must compile the whole.

    ``all_within``: also the functions that it calls. Instead: `torch.compiler.disable`, which makes a wrapper.
    """
    frames = torch._C._dynamo.eval_frame
    skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    strategy = frames._FrameExecStrategy(skip, skip if all_within else default)
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, message
    frames.set_code_exec_strategy(function.__code__, strategy)


def constant_source(name: str) -> Any:
    """The source of a symbol of `ShapeEnv`; instead: none."""
    from torch._dynamo.source import ConstantSource

    return ConstantSource(name)


def strided_shard(dim: int, pieces: int) -> Any:
    """DTensor's placement of a dim that is cut in another order than the order of the mesh; instead: none."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=pieces)


def is_cut(placement: Any) -> bool:
    """Whether a placement of DTensor cuts a dim: a `Shard`, or one of those above; instead: none."""
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    return type(placement) in (Shard, _StridedShard)


def spec_of_dtensor(x: Any) -> Any:
    """What a DTensor knows of its layout beside the placements: the orders of cuts; instead: none."""
    return x._spec


def has_groups(device_mesh: Any) -> bool:
    """Whether a DeviceMesh has process groups; instead: `get_group`, whose error depends on the version."""
    return bool(getattr(device_mesh, "_dim_group_names", None))


def silent_device_mesh(kind: str, ranks: torch.Tensor, names: Sequence[str], rank: int) -> Any:
    """A DeviceMesh without process groups, as the process of a rank sees it; instead: none."""
    from torch.distributed.device_mesh import DeviceMesh

    device_mesh: Any = DeviceMesh(kind, ranks, mesh_dim_names=tuple(names), _init_backend=False, _rank=rank)
    device_mesh._dim_group_names = []
    return device_mesh


def inductor() -> Any:
    """The module of torch's compiler. Its `compile` takes an FX graph; instead: `torch.compile`."""
    import torch._inductor.exc

    return torch._inductor


def store_of_ranks(prefix: str) -> Any:
    """The key-value store that all ranks share, under keys with a prefix; instead: none."""
    c10d: Any = torch.distributed.distributed_c10d
    return c10d.PrefixStore(prefix, c10d._get_default_store())


def storage_info_class() -> Any:
    """The class of the place of a block in the files of torch.distributed.checkpoint; instead: none."""
    import torch.distributed.checkpoint.filesystem

    return torch.distributed.checkpoint.filesystem._StorageInfo


class _Stores(threading.local):
    """The store of the ranks as a thread other than the main one uses it, and the store that it is a clone of."""

    clone: Any = None
    cloned: Any = None


#: the store of each thread
_stores = _Stores()


def make_group(default: Any, ranks: Sequence[int], name: str) -> Any:
    """A process group of ranks of the default group, made by its members alone.

    Instead: `new_group(use_local_synchronization=True)`. Members must agree on the name, the prefix of their keys in
    the store. Torch hashes into it how many groups the process has, which differs where some members have more groups
    than others, and then they wait for ever (https://github.com/pytorch/pytorch/pull/189073). And one wait for a key
    holds up all other threads of a store, so each thread has its own.
    """
    c10d: Any = torch.distributed.distributed_c10d
    backend, store = c10d._world.pg_map[default]
    if threading.current_thread() is not threading.main_thread():
        if _stores.cloned is not store:
            _stores.clone, _stores.cloned = store.clone(), store
        store = _stores.clone
    limit = time_limit(default) or c10d._get_default_timeout(backend)
    place = ranks.index(default.rank())
    group, _ = c10d._new_process_group_helper(
        len(ranks), place, list(ranks), backend, store, c10d.GroupName(name), timeout=limit, group_desc="fspmd"
    )
    c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
    return group


def time_limit(group: Any) -> datetime.timedelta | None:
    """The time limit of a group's collectives, or None if its backend tells none; instead: none."""
    for device in group._device_types:
        limit: datetime.timedelta | None = getattr(_options(group._get_backend(device)), "_timeout", None)
        if limit is not None:
            return limit
    return None


def _options(backend: Any) -> Any:
    try:
        return backend.options
    except (AttributeError, RuntimeError):  # a backend without
        return None
