"""What passes leave alone, and why: the program's text tells it."""

from __future__ import annotations

from torch import fx

from fspmd.programs.program import Left, Program

UNLIKE = "ranks may have other steps"  # of one step; the program tells why


def leave_all(program: Program, name: str, what: str, even: bool = False) -> bool:
    """Whether a pass must leave ``what`` alone in all of a program, which is noted: ranks might choose differently.

    ``even``: it takes blocks of one shape on all ranks, too.
    """
    why = f"{UNLIKE}: {program.unlike}" if program.unlike else ""
    if not why and even and program.uneven:
        why = f"ranks may have blocks of other shapes: {program.uneven}"
    if why:
        program.left[name] = f"{what}; {why}"
    return bool(why)


def leave(node: fx.Node, name: str, why: str, other: fx.Node | None = None) -> None:
    """Note that a pass leaves a step alone; ``other``: the step that ``why`` speaks of, whose name follows it."""
    node.meta["left"] = {**node.meta.get("left", {}), name: Left(why, other)}


def forget(program: Program, name: str) -> None:
    """What a pass has noted of steps; it looks again."""
    for node in program.graph.nodes:
        if name in node.meta.get("left", ()):
            node.meta["left"] = {key: left for key, left in node.meta["left"].items() if key != name}
