"""Donated arguments: their tensors give their memory away, and are of no more use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.errors import ArgumentError, DonationError
from fspmd.programs.arguments import Chosen
from fspmd.programs.reuse import own
from fspmd.torch_internals import DisableTorchFunctionSubclass, make_wrapper_subclass, swap_memory
from fspmd.transport.local_tensor import LocalTensor
from fspmd.trees import flatten, flatten_in_order, leaf_paths, parameter_names

_T: Any = Tensor
#: what may still be asked of a tensor without memory
_FACTS: Final = frozenset(
    [
        *(getattr(_T, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_leaf", "grad")),
        *(getattr(_T, name).__get__ for name in ("requires_grad", "grad_fn")),
        *(_T.dim, _T.size, _T.numel),
    ]
)


class Donated(Tensor):
    """A tensor that gave its memory away: it has a shape and a dtype, and refuses all else."""

    donated_as: str

    @staticmethod
    def __new__(cls, like: Tensor, name: str) -> Donated:
        x: Any = make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)
        x.donated_as = name
        return x  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FACTS:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise _refusal((args, kwargs))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise _refusal((args, kwargs))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<a tensor of shape {tuple(self.shape)}, donated as {self.donated_as}>"


def _refusal(arguments: Any) -> DonationError:
    found = next((x for x in flatten(arguments)[0] if isinstance(x, Donated)), "a donated tensor")
    return DonationError(
        f"{found!r} was used: its memory is gone. Use the results of the jitted function in its place; or leave it out "
        "of donate_argnums, or donate x.clone()"
    )


@dataclass(frozen=True, slots=True)
class Donation:
    """Which of the tensors among the leaves of the arguments of a call are donated, and what they are called."""

    places: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    written: frozenset[int] = frozenset()  # those that a replay writes results into

    def __bool__(self) -> bool:
        return bool(self.places)

    def given(self, values: Sequence[Tensor]) -> list[Any]:
        """The values, with lists of new tensors, which alone have the memory, in the place of donated ones.

        Raises:
            ArgumentError: one of them is given twice.
        """
        found: list[Any] = list(values)
        ids = list(map(id, values))
        for place, name in zip(self.places, self.names, strict=True):
            if ids.count(ids[place]) > 1:
                raise ArgumentError(
                    f"jit was given the tensor donated as {name} as another argument, too; pass x.clone()"
                )
        for place, name in zip(self.places, self.names, strict=True):
            kept = give_away(values[place], name)
            found[place] = [own(kept) if place in self.written else kept]  # a list, so that nobody else holds it
        return found


NOTHING: Final = Donation()


def give_away(x: Tensor, name: str) -> Tensor:
    """A tensor with the memory of ``x``, which has none from here on."""
    if isinstance(x, LocalTensor):
        kept = LocalTensor(x.shards, x.frame, x.borrowed, x.storage_offset())
        x.shards = [Donated(shard, name) for shard in x.shards]
        return kept
    other: Any = Donated(x, name)
    one: Any = x
    swap_memory(one, other)
    one.__class__, other.__class__, one.donated_as = Donated, Tensor, name
    return other  # type: ignore[no-any-return]


def donation(f: Any, which: Chosen, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Donation:
    """What a call donates.

    Raises:
        ArgumentError: a donated tensor has a gradient, for which autograd would keep it.
    """
    parameters = parameter_names(f, len(args))
    called = getattr(f, "__name__", None) or type(f).__name__
    trees = [(name, arg, i in which.numbers) for i, (name, arg) in enumerate(zip(parameters, args, strict=True))]
    trees += [(name, kwargs[name], name in which.names) for name in kwargs]
    places, names, place = [], [], 0
    for name, tree, given in trees:
        leaves = flatten_in_order(tree)[0]
        for path, leaf in zip(leaf_paths(tree, name, in_order=True), leaves, strict=True):
            if not isinstance(leaf, Tensor):
                continue
            if given and leaf.requires_grad and torch.is_grad_enabled():
                raise ArgumentError(
                    f"{path} of {called} is donated, but has a gradient, for which autograd would keep it; call it in "
                    "torch.no_grad(), pass tensors without a gradient, or leave it out of donate_argnums"
                )
            if given:
                places.append(place)
                names.append(f"{path.removesuffix('.local')} of {called}")
            place += 1
    return Donation(tuple(places), tuple(names))
