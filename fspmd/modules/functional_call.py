"""`nn.Module`s as functions of their parameters: `functional_call`, `attached` and `attach`."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fspmd.errors import ArgumentError
from fspmd.messages import described
from fspmd.modules.attached import Attachment, turn_of
from fspmd.modules.plans import ParallelPlan
from fspmd.tracing import LASTING

M = TypeVar("M", bound=nn.Module)


def functional_call(
    module: nn.Module, params: Any, /, *args: Any, styles: ParallelPlan | None = None, **kwargs: Any
) -> Any:
    """``module(*args, **kwargs)`` with ``params`` in the place of its parameters and buffers.

    Args:
        module: Any module, also on the meta device. It has its own tensors again when the call ends or fails.
        params: `Sharded` values or plain tensors by qualified name: a flat dict (``{"layers.0.weight": w}``), a nested
            tree of dicts and lists (``{"layers": [{"weight": w}]}``), or a tuple of several (parameters, buffers). A
            tensor without a leaf keeps the module's own value. One leaf is enough for several tied names.
        styles: The plan of `parallelize`. Its styles lay out arguments and results of the modules at their patterns.

    Outside a body the leaves are `Sharded`, and the module's functions run on global shapes. In a body of `shard_map`
    the leaves are blocks, and so are the values in ``forward``.

    Buffers that ``forward`` writes in place (running statistics) change in ``params``. A buffer that ``forward``
    replaces by another tensor is put into the dict of ``params`` that had it. Calls of one module from several threads
    wait for each other. A checkpoint of torch in ``forward``, reentrant or not, computes again with the same leaves.

    Communication: that of the functions in ``forward``.

    Raises:
        TreeError: before the call. It names every leaf whose name is unknown, given twice, or at odds with a tied leaf;
            every parameter that is left out while the module is on the meta device; and every pattern of ``styles``
            without a module.
        ArgumentError: ``module`` is no ``nn.Module``, or was compiled by TorchScript; or a leaf is no tensor.

    >>> from fspmd import P, device_put, make_mesh
    >>> with torch.device("meta"):
    ...     module = nn.Linear(6, 8)
    >>> w = device_put(torch.ones(8, 6), P("x"), mesh=make_mesh((4,), ("x",)))
    >>> functional_call(module, {"weight": w, "bias": torch.zeros(8)}, torch.ones(3, 6))
    Sharded f32[3, 8@x] on mesh(x=4)
    """
    _check_module(module, "functional_call", "module, params, x")
    with Attachment(module, params, styles, "functional_call").called():
        out = module(*args, **kwargs)
        if styles is not None:
            styles.warn_of_unused()
    return out


@contextmanager
def attached(module: M, params: Any, /, *, styles: ParallelPlan | None = None) -> Iterator[M]:
    """Within ``with attached(module, params):`` the module has ``params`` in the place of its own tensors.

    All code that takes the module then sees them: ``module(x)``, ``module.generate(...)``, ``module.parameters()``, and
    optimizers. Leaves in the places of parameters become parameters, as ``nn.Parameter(x)`` is one, so that they can be
    tied. Arguments, errors and writes are those of `functional_call`. Other threads' calls of the module wait until the
    context ends. Backward may follow later, even if a checkpoint computes again in it.

    >>> from fspmd import P, device_put, make_mesh
    >>> module, mesh = nn.Linear(6, 8), make_mesh((4,), ("x",))
    >>> params = {name: device_put(value, P("x"), mesh=mesh) for name, value in module.state_dict().items()}
    >>> with attached(module, params):
    ...     list(module.parameters()), module(torch.ones(3, 6))
    ([Sharded f32[8@x, 6] on mesh(x=4), Sharded f32[8@x] on mesh(x=4)], Sharded f32[3, 8@x] on mesh(x=4))
    """
    _check_module(module, "attached", "module, params")
    attachment = Attachment(module, params, styles, "attached")
    attachment.mark_parameters()
    with attachment.called():
        yield module


_lasting: Final[WeakKeyDictionary[nn.Module, Attached]] = WeakKeyDictionary()


class Attached:
    """The leaves that `attach` has put into a module, until `detach`."""

    def __init__(self, module: nn.Module, attachment: Attachment) -> None:
        self._attachment = attachment
        self._stack = ExitStack()
        attachment.mark_parameters()
        attachment.enter(self._stack, attachment.values)
        LASTING.append(attachment.current)
        weakref.finalize(module, self._on_deleted_module)

    def detach(self) -> None:
        """Put the module's own tensors back. A second call, or a call after another `attach`, does nothing.

        Raises:
            ArgumentError: the module has removed a tensor, as ``torch.nn.utils.prune`` does. The module is unchanged.
        """
        if self._attachment.current in LASTING:
            self._attachment.hand_back()
            LASTING.remove(self._attachment.current)
            self._stack.close()

    def _on_deleted_module(self) -> None:
        with suppress(ArgumentError):
            self.detach()
        if self._attachment.current in LASTING:
            LASTING.remove(self._attachment.current)


def attach(module: nn.Module, params: Any, /, *, styles: ParallelPlan | None = None) -> Attached:
    """Put ``params`` into a module, as `attached` does, until ``detach()`` of the result or another `attach`.

    >>> from fspmd import P, device_put, make_mesh
    >>> module = nn.Linear(6, 8, bias=False)
    >>> leaves = attach(module, {"weight": device_put(torch.ones(8, 6), P("x"), mesh=make_mesh((4,), ("x",)))})
    >>> optimizer = torch.optim.AdamW(module.parameters())
    >>> module(torch.ones(3, 6))
    Sharded f32[3, 8@x] on mesh(x=4)
    >>> leaves.detach()
    >>> type(module.weight)
    <class 'torch.nn.parameter.Parameter'>
    """
    _check_module(module, "attach", "module, params")
    with turn_of(module).acquired():
        before = _lasting.get(module)
        if before is not None:
            before.detach()
        _lasting[module] = leaves = Attached(module, Attachment(module, params, styles, "attach"))
    return leaves


def _check_module(module: Any, what: str, given: str) -> None:
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"{what} got {described(module)} for module; give it an nn.Module: {what}({given})")
    if isinstance(module, torch.jit.ScriptModule):
        raise ArgumentError(
            f"{what} got a module compiled by TorchScript, whose tensors cannot be exchanged; "
            "give it the module before compilation"
        )
