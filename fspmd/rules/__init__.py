"""The rules of torch functions: how they act on dims, as rows in factor notation."""

from __future__ import annotations

from fspmd.ops.signatures import FLOATS, NONE, Free
from fspmd.rules.bodies import Bodied, BodyLayout, Site, reducing
from fspmd.rules.composites import composite_of
from fspmd.rules.factors import Factors, Rule, ShapedCall, match, parse
from fspmd.rules.handlers import ENGINE, handler_of
from fspmd.rules.table import (
    IN_C,
    Row,
    free_numbers,
    is_gathered,
    is_registered,
    is_ruled,
    register,
    row_of,
    without_write,
)

__all__ = [
    "ENGINE",
    "FLOATS",
    "IN_C",
    "NONE",
    "Bodied",
    "BodyLayout",
    "Factors",
    "Free",
    "Row",
    "Rule",
    "ShapedCall",
    "Site",
    "composite_of",
    "free_numbers",
    "handler_of",
    "is_gathered",
    "is_registered",
    "is_ruled",
    "match",
    "parse",
    "reducing",
    "register",
    "row_of",
    "without_write",
]
