"""Values that must be the same on all processes of a mesh: arguments that are no `Sharded`, what functions close over,
and seeds.

Nobody compares them, unless `hear` is set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fspmd.meshes.mesh import Mesh

#: called with the mesh, the name of a value, and the value
hear: Callable[[Mesh, str, Any], None] | None = None


def hear_with(function: Callable[[Mesh, str, Any], None] | None) -> None:
    """Let ``function`` hear of each value; with None, nobody."""
    global hear
    hear = function
