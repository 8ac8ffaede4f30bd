"""How much is tested: samples of programs, layouts and meshes, or with FSPMD_FULL=1 all of them."""

from __future__ import annotations

import os
from typing import Final

FULL: Final = os.environ.get("FSPMD_FULL") == "1"
