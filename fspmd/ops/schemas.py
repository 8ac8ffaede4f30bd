"""Facts about aten ops for simulations, recorders and passes, read from schemas and tags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from fspmd.torch_internals import schema_of

#: ops that give Python numbers -> what the numbers are: a value, or sizes
_ASKS = {
    "aten::_local_scalar_dense": "value",
    **dict.fromkeys(("aten::size", "aten::stride", "aten::storage_offset", "aten::numel"), "sizes"),
}
_RESIZES = ("resize_", "resize_as_", "set_", "set_data")


class OpFacts:
    """The facts about one op.

    Attributes:
        absent: It makes the zeros that stand for a missing tangent, and have no memory.
        asks: ``"value"`` or ``"sizes"``: the op gives Python such numbers of a tensor. Otherwise ``""``.
        converts: It gives its operand another dtype or device, as ``torch.as_tensor`` asks.
        dynamic_shape: The shape of the result may depend on values; `shape_of_values` answers for one call.
        elementwise: It takes lists of tensors and treats the i-th of each together, as ``torch._foreach_add`` does.
        gives_values: It gives Python values of a tensor.
        pure: Equal operands give equal results, and there are no other effects; `is_pure` answers for one call.
        random: It may draw random numbers.
        resizes: It may change the size of an operand.
        returns: For each result the argument that it is, by position and name, or None for a new value.
        switches: The arguments that are zero or False in calls that draw nothing, by position, name and default. Only
            aten ops promise it.
        view: Its result aliases its first argument.
        writes: The arguments that it writes into, by position and name.
    """

    __slots__ = (
        "absent",
        "asks",
        "converts",
        "dynamic_shape",
        "elementwise",
        "gives_values",
        "inplace_view",
        "name",
        "pure",
        "random",
        "resizes",
        "returns",
        "strided",
        "switches",
        "view",
        "writes",
    )

    def __init__(self, func: Any) -> None:
        schema = schema_of(func)
        name = schema.name.split("::")[-1]
        self.name: str = schema.name
        self.absent: bool = schema.name == "aten::_efficientzerotensor"
        self.asks: str = _ASKS.get(schema.name, "")
        self.converts: bool = {"dtype", "non_blocking"} <= {arg.name for arg in schema.arguments}
        self.random: bool = torch.Tag.nondeterministic_seeded in func.tags
        self.pure: bool = not schema.is_mutable and not self.random
        self.gives_values: bool = torch.Tag.data_dependent_output in func.tags
        self.dynamic_shape: bool = torch.Tag.dynamic_output_shape in func.tags
        self.inplace_view: bool = torch.Tag.inplace_view in func.tags
        self.strided: bool = name in ("as_strided", "as_strided_")
        self.elementwise: bool = name.startswith(("_foreach_", "_fused_", "_amp_foreach_"))
        written = [(i, arg) for i, arg in enumerate(schema.arguments) if arg.alias_info and arg.alias_info.is_write]
        self.writes: list[tuple[int, str]] = [(i, arg.name) for i, arg in written]
        places = iter(self.writes)
        returned = [r.alias_info is not None and r.alias_info.is_write for r in schema.returns]
        self.returns: list[tuple[int, str] | None] = [next(places) if is_written else None for is_written in returned]
        self.resizes: bool = name in _RESIZES or any(arg.kwarg_only for _, arg in written)
        arguments = schema.arguments if func.namespace == "aten" else ()
        switches = [(i, arg.name, arg.default_value) for i, arg in enumerate(arguments) if arg.name in _SWITCHES]
        self.switches: list[tuple[int, str, Any]] = switches
        self.view: bool = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the arguments of a call that the op writes into."""
        positional = [args[i] for i, _ in self.writes if i < len(args)]
        return positional + [kwargs[name] for _, name in self.writes if name in kwargs]

    def draws(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call draws random numbers. Attention without dropout draws none."""
        if not self.random or not self.switches:
            return self.random
        values = [args[i] if i < len(args) else kwargs.get(name, default) for i, name, default in self.switches]
        return all(value is None or bool(value) for value in values)

    def is_pure(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call only computes results from its operands."""
        return self.pure or not (self.writes or self.draws(args, kwargs))

    def shape_of_values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the shape of the result of a call depends on values of its operands."""
        by_values = _BY_VALUES.get(self.name)
        return self.dynamic_shape and (by_values is None or by_values(args, kwargs))


def _has_mask(args: Sequence[Any], _: Mapping[str, Any]) -> bool:
    return any(isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1])


#: op whose result may have a shape that depends on values -> whether it has one in a call
_BY_VALUES: dict[str, Callable[[Sequence[Any], Mapping[str, Any]], bool]] = {
    "aten::index": _has_mask,
    "aten::repeat_interleave": lambda _, kwargs: kwargs.get("output_size") is None,
}


#: arguments of random ops that are zero or false in calls that draw nothing
_SWITCHES = frozenset({"dropout_p", "train", "training"})


class _Facts(dict[Any, OpFacts]):
    """The facts about each op, read when they are first asked for. A later look-up runs no Python."""

    def __missing__(self, func: Any) -> OpFacts:
        facts = self[func] = OpFacts(func)
        return facts


FACTS: Final = _Facts()
#: returns the facts about an op
facts_of: Final[Callable[[Any], OpFacts]] = FACTS.__getitem__
