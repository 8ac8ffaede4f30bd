"""Refusal of torch's own data parallelism around modules with `Sharded` parameters. It would move their shells."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fspmd.errors import ArgumentError
from fspmd.sharded import Sharded


def install() -> None:
    """Make ``DistributedDataParallel`` and ``fully_shard`` refuse `Sharded` parameters."""
    wrapper: Any = DistributedDataParallel
    wrapper.__init__ = _checked(wrapper.__init__)
    setattr(Sharded, "fsdp_pre_all_gather", property(_refuse_fsdp))  # noqa: B010 (fully_shard asks each parameter for it)


def _checked(original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        parameters: Any = module.parameters() if isinstance(module, nn.Module) else ()
        for x in parameters:
            if type(x) is Sharded:
                _refuse("DistributedDataParallel", x)
        original(self, module, *args, **kwargs)

    return init


def _refuse_fsdp(x: Any) -> NoReturn:
    _refuse("fully_shard", x)


def _refuse(what: str, x: Sharded) -> NoReturn:
    raise ArgumentError(
        f"{what} got a module with the parameter {x!r}, whose gradient is already summed over the ranks; call the "
        "module as it is: leave it out of accelerator.prepare, or write accelerator.prepare_model(m, "
        "evaluation_mode=True); rows that differ from process to process become one batch by "
        "from_process_local(batch, spec)"
    )
