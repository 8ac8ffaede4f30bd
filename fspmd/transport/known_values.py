"""Values that must be the same on all processes of a mesh: arguments that are no `Sharded`, what functions close over,
and seeds; and the layouts of arguments.

Nobody compares them, unless `hear` is set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fspmd.cache import cached
from fspmd.meshes.mesh import Mesh
from fspmd.spec import P, TensorSpec


class ArgumentRow(NamedTuple):
    """What a leaf tells of itself: a name, words, and whether they are a layout."""

    label: str
    text: str
    is_layout: bool


#: called with the mesh, the name of a value, and the value
hear: Callable[[Mesh, str, Any], None] | None = None
#: called with the mesh, the name of a function, and rows of its arguments; set together with `hear`
hear_layouts: Callable[[Mesh, str, tuple[ArgumentRow, ...]], None]


def hear_with(
    function: Callable[[Mesh, str, Any], None] | None,
    of_layouts: Callable[[Mesh, str, tuple[ArgumentRow, ...]], None] | None = None,
) -> None:
    """Let ``function`` hear of each value, and ``of_layouts`` of the layouts of arguments; with None, nobody."""
    global hear, hear_layouts
    if of_layouts is not None:
        hear_layouts = of_layouts
    hear = function


@cached
def layout_row(label: str, to: str, layout: TensorSpec | None, partition: P | None = None) -> ArgumentRow:
    """The row of an argument: its layout if it has one, and the spec under which a function takes it."""
    given = "" if layout is None else f", {layout!r}"
    return ArgumentRow(f"{label} of {to}", given if partition is None else f"{given} as {partition!r}", True)
