"""What recording, passes and replays ask of functions, tensors and modules."""

from __future__ import annotations

import operator
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.foreign import foreign_name
from fspmd.torch_internals import DisableTorchFunction
from fspmd.transport.local_tensor import LocalTensor, blocks_of
from fspmd.transport.op_facts import facts_of
from fspmd.variance import unwrapped

aten: Final = torch.ops.aten


def state_of(module: torch.nn.Module) -> tuple[Any, ...]:
    """What of a module is a constant of a record: its mode, and which are its parameters, buffers and submodules."""
    return module.training, *module._parameters.values(), *module._buffers.values(), *module._modules.values()


def is_as(module: torch.nn.Module, was: tuple[Any, ...]) -> bool:
    """Whether a module is as it was."""
    now = state_of(module)
    return len(now) == len(was) and all(map(operator.is_, now, was))


def is_pure(func: Any) -> bool:
    """Whether an aten function gives the same of the same, and does nothing else."""
    return facts_of(func).pure


def is_dense(x: Tensor) -> bool:
    """Whether a tensor lies in memory of this process by strides."""
    return x.layout is torch.strided and not x.is_nested and not foreign_name(x)


def draws(func: Any) -> bool:
    """Whether an aten function draws from a generator."""
    return facts_of(func).random


def memory_of(x: Tensor) -> int:
    """What tells the memory of a tensor, and of its views, from that of others."""
    with DisableTorchFunction():
        return int(blocks_of(unwrapped(x))[0].untyped_storage()._cdata)


def shard_of(x: LocalTensor, i: int) -> Tensor:
    """The block of one simulated rank."""
    return x.shards[i]
