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
        module: Any module as it is, on the meta device too; its own tensors are back when the call ends or fails.
        params: `Sharded` values or plain tensors by qualified name: a flat dict (``{"layers.0.weight": w}``), a nested
            one of dicts and lists (``{"layers": [{"weight": w}]}``), or a tuple of several (parameters, buffers).
            What it leaves out keeps the module's own value. One name of several that are tied stands for all.
        styles: The plan of `parallelize`: arguments and results of the modules where its styles stand are arranged.

    Outside a body the leaves are `Sharded` and the module's functions run on global shapes; in a body of shard_map the
    leaves are blocks and so are the values in ``forward``. Buffers written in place (running statistics) change in
    ``params``; a buffer that ``forward`` replaces by another tensor is put into the dict that held it. Calls of one
    module from several threads wait for each other. A checkpoint in ``forward`` (of torch, reentrant or not) computes
    again with the same leaves. Communication: what the functions in ``forward`` need.

    Raises:
        TreeError: before the call, naming every leaf whose name is unknown, given twice, or at odds with one it is
            tied to, every parameter that was left out while the module is on the meta device, and every pattern of
            ``styles`` at which there is no module.
        ArgumentError: ``module`` is no ``nn.Module`` or has been compiled by TorchScript; a leaf is no tensor.

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
            styles.warn_of_unheard()
    return out


@contextmanager
def attached(module: M, params: Any, /, *, styles: ParallelPlan | None = None) -> Iterator[M]:
    """``with attached(module, params):``, in which the module has ``params`` in the place of its own tensors.

    What takes a module takes them from it there: ``module(x)``, ``module.generate(...)``, ``module.parameters()``, and
    so optimizers. Leaves in the places of parameters become parameters, as ``nn.Parameter(x)`` is: they can be
    tied. Arguments, errors and what is written are those of `functional_call`; other threads' calls of the
    module wait until the block ends. Backward may follow later, whatever a checkpoint computes again in it.

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
    """What `attach` has put into a module, until `detach`."""

    def __init__(self, module: nn.Module, attachment: Attachment) -> None:
        self._attachment = attachment
        self._stack = ExitStack()
        attachment.mark_parameters()
        attachment.enter(self._stack, attachment.values)
        LASTING.append(attachment.again)
        weakref.finalize(module, self._let_go)

    def detach(self) -> None:
        """The module has its own tensors back; a second time, or after another `attach`, nothing happens.

        Raises:
            ArgumentError: it has given up a tensor, as ``torch.nn.utils.prune`` has it do; it stays as it is.
        """
        if self._attachment.again in LASTING:
            self._attachment.hand_back()
            LASTING.remove(self._attachment.again)
            self._stack.close()

    def _let_go(self) -> None:
        """The module is gone."""
        with suppress(ArgumentError):
            self.detach()
        if self._attachment.again in LASTING:
            LASTING.remove(self._attachment.again)


def attach(module: nn.Module, params: Any, /, *, styles: ParallelPlan | None = None) -> Attached:
    """`attached` for good, or until ``detach()`` of the result, or until other ``params`` are attached.

    >>> from fspmd import P, device_put, make_mesh
    >>> module = nn.Linear(6, 8, bias=False)
    >>> there = attach(module, {"weight": device_put(torch.ones(8, 6), P("x"), mesh=make_mesh((4,), ("x",)))})
    >>> optimizer = torch.optim.AdamW(module.parameters())
    >>> module(torch.ones(3, 6))
    Sharded f32[3, 8@x] on mesh(x=4)
    >>> there.detach()
    >>> type(module.weight)
    <class 'torch.nn.parameter.Parameter'>
    """
    _check_module(module, "attach", "module, params")
    with turn_of(module).taken():
        before = _lasting.get(module)
        if before is not None:
            before.detach()
        _lasting[module] = there = Attached(module, Attachment(module, params, styles, "attach"))
    return there


def _check_module(module: Any, what: str, given: str) -> None:
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"{what} got {described(module)} for module; give it an nn.Module: {what}({given})")
    if isinstance(module, torch.jit.ScriptModule):
        raise ArgumentError(
            f"{what} got a module compiled by TorchScript, whose tensors cannot be exchanged; "
            "give it the module that was compiled"
        )
