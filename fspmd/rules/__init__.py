"""How torch functions act on dims: rows in factor notation."""

from __future__ import annotations

from fspmd.rules.bodies import Bodied, Site
from fspmd.rules.factors import Factors
from fspmd.rules.handlers import handler_of
from fspmd.rules.table import Row, composite_of, is_ragged, row_of, writes
from fspmd.rules.whole import Whole

__all__ = ["Bodied", "Factors", "Row", "Site", "Whole", "composite_of", "handler_of", "is_ragged", "row_of", "writes"]
