"""The floats of a traced function as symbols, which record whether the function reads their values."""

from __future__ import annotations

from torch import SymFloat
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fspmd.torch_internals import constant_source


class Symbols:
    """The symbols of one trace."""

    def __init__(self) -> None:
        self.env = ShapeEnv()
        self._numbers: dict[object, int] = {}  # symbol -> number of its operand

    def of(self, x: float, number: int) -> float | SymFloat:
        """Return a symbol for the operand of this number."""
        source = constant_source(f"operand_{number}")
        symbol = self.env.create_symbol(x, source, DimDynamic.DYNAMIC, None, None, do_not_specialize_zero_one=True)
        self._numbers[symbol] = number
        return self.env.create_symfloatnode(symbol, hint=x, source=source)

    def looked_at(self) -> frozenset[int]:
        """Return the numbers of the operands whose values the function has read or compared."""
        known = {*self.env.replacements}.union(*(guard.expr.free_symbols for guard in self.env.guards))
        return frozenset(number for symbol, number in self._numbers.items() if symbol in known)
