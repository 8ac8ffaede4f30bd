"""Small SPMD programs written once and run by two backends.

A program's body is plain Python over an argument ``m``, which offers the collectives, a few array functions and the
transforms under one spelling. `generate.py` passes an ``m`` made of JAX and records what JAX answers in `golden.json`;
`tests/test_jax_oracle.py` passes one made of fspmd and compares. Nothing here imports either of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Body = Callable[..., Any]
MeshShape = tuple[tuple[int, ...], tuple[str, ...]]

M1: MeshShape = ((1,), ("x",))
M2: MeshShape = ((2,), ("x",))
M4: MeshShape = ((4,), ("x",))
M8: MeshShape = ((8,), ("x",))
M12: MeshShape = ((1, 2), ("x", "y"))
M21: MeshShape = ((2, 1), ("x", "y"))
M22: MeshShape = ((2, 2), ("x", "y"))
M23: MeshShape = ((2, 3), ("x", "y"))
M24: MeshShape = ((2, 4), ("x", "y"))
M222: MeshShape = ((2, 2, 2), ("x", "y", "z"))


@dataclass(frozen=True)
class Spec:
    """A partition spec that belongs to neither backend."""

    parts: tuple[str | tuple[str, ...] | None, ...] = ()
    unreduced: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()


def P(*parts: str | tuple[str, ...] | None, unreduced: Iterable[str] = (), reduced: Iterable[str] = ()) -> Spec:
    """Spell a `Spec` the way both backends spell theirs."""
    return Spec(parts, tuple(unreduced), tuple(reduced))


@dataclass(frozen=True)
class Input:
    """An input array given by shape, dtype and a closed formula, so that no random generator is shared."""

    shape: tuple[int, ...]
    dtype: Literal["float64", "int64", "bool"] = "float64"
    values: tuple[float, ...] | None = None

    def flat(self, position: int) -> list[Any]:
        """The elements in row-major order of the input at this position of the program's arguments."""
        if self.values is not None:
            return list(self.values)
        count = math.prod(self.shape)
        if self.dtype == "float64":
            return [math.sin(0.7 * i + position + 0.5) + 0.1 * position for i in range(count)]
        if self.dtype == "int64":
            return [(3 * i + position) % 7 - 2 for i in range(count)]
        return [(i * i + position) % 3 == 0 for i in range(count)]


def F(*shape: int) -> Input:
    """A float64 input of this shape."""
    return Input(shape)


def I(*shape: int) -> Input:  # noqa: E743
    """An int64 input of this shape."""
    return Input(shape, "int64")


def B(*shape: int) -> Input:
    """A boolean input of this shape."""
    return Input(shape, "bool")


@dataclass(frozen=True)
class Program:
    """One program.

    ``scope="local"``: ``body(m, *blocks)`` is what shard_map maps. ``scope="global"``: ``body(m, *arrays)`` gets global
    arrays and calls ``m.shard_map`` itself. Gradients are those of ``sum(w * (out + out**2 / 4))`` over the float
    outputs, with respect to the inputs ``grad_wrt`` (all float inputs unless given). ``expect="verdict"`` asks only
    whether the program is accepted. ``deviation`` is fspmd's answer where it differs on purpose, and why it does.
    """

    name: str
    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    inputs: tuple[Input, ...]
    in_specs: Any
    out_specs: Any
    body: Body = field(repr=False)
    check_vma: bool = True
    grad_wrt: tuple[int, ...] | None = None
    second: bool = True
    scope: Literal["local", "global"] = "local"
    expect: Literal["values", "verdict"] = "values"
    deviation: tuple[str, str] | None = None

    def differentiated(self) -> tuple[int, ...]:
        """Positions of the inputs whose gradients are compared."""
        if self.grad_wrt is not None:
            return self.grad_wrt
        return tuple(i for i, given in enumerate(self.inputs) if given.dtype == "float64")


def local(
    name: str, mesh: MeshShape, inputs: Iterable[Input], in_specs: Iterable[Any], out: Any, body: Body, **options: Any
) -> Program:
    """A program whose body runs inside one shard_map."""
    return Program(name, *mesh, tuple(inputs), tuple(in_specs), out, body, **options)


def whole(name: str, mesh: MeshShape, inputs: Iterable[Input], body: Body, **options: Any) -> Program:
    """A program of global arrays that calls ``m.shard_map`` itself."""
    return Program(name, *mesh, tuple(inputs), None, None, body, scope="global", **options)


def verdict(
    name: str, expression: Body, mesh: MeshShape = M22, *, inputs: Iterable[Input] = (F(8, 4), F(4, 4)), **options: Any
) -> Program:
    """The type of one expression of ``a`` (varying over x) and ``b`` (invariant), or its rejection."""

    def body(m: Any, a: Any, b: Any) -> Any:
        m.tap("result", expression(m, a, b))
        return a

    specs = (P("x"), P())
    return Program(name, *mesh, tuple(inputs), specs, P("x"), body, expect="verdict", grad_wrt=(), **options)


def judged(
    name: str, mesh: MeshShape, inputs: Iterable[Input], in_specs: Iterable[Any], out: Any, body: Body, **options: Any
) -> Program:
    """A whole shard_map call of which only acceptance is asked."""
    return Program(name, *mesh, tuple(inputs), tuple(in_specs), out, body, expect="verdict", grad_wrt=(), **options)


def leaves(tree: Any) -> Iterator[Any]:
    """Leaves of nested tuples, lists and dicts, keys sorted, None left out: the order both backends share."""
    if tree is None:
        return
    if isinstance(tree, tuple | list):
        for child in tree:
            yield from leaves(child)
    elif isinstance(tree, dict):
        for key in sorted(tree):
            yield from leaves(tree[key])
    else:
        yield tree


def map_specs(convert: Callable[[Spec], Any], tree: Any) -> Any:
    """Replace every `Spec` in a tree of tuples, lists and dicts."""
    if isinstance(tree, Spec):
        return convert(tree)
    if isinstance(tree, tuple | list):
        return type(tree)(map_specs(convert, child) for child in tree)
    if isinstance(tree, dict):
        return {key: map_specs(convert, child) for key, child in tree.items()}
    return tree


def weights(count: int, salt: int) -> list[float]:
    """Fixed weights, none alike, for the scalar that gradients are taken of."""
    return [math.cos(0.9 * i + 0.4 + salt) for i in range(count)]


def canonical_type(text: str) -> str:
    """``float64[2,2]{V:(x,y), R:z}`` of either backend to ``V:x,y R:z``; an invariant value gives an empty string."""
    if "{" not in text:
        return ""
    inside = text[text.index("{") + 1 : text.rindex("}")]
    found: dict[str, list[str]] = {}
    kind = ""
    for word in inside.replace("(", "").replace(")", "").replace(",", " ").split():
        head, colon, axis = word.rpartition(":")
        kind = head if colon else kind
        if axis:
            found.setdefault(kind, []).append(axis)
    return " ".join(f"{kind}:{','.join(sorted(found[kind]))}" for kind in sorted(found))


def all_programs() -> dict[str, Program]:
    """Every program by its name."""
    from jax_oracle import (
        autodiff,
        exchanges,
        gathers,
        generated,
        layouts,
        reductions,
        transforms,
        types_table,
        unchecked,
    )

    modules = (reductions, gathers, exchanges, layouts, autodiff, transforms, unchecked, generated, types_table)
    programs = [program for module in modules for program in module.PROGRAMS]
    by_name = {program.name: program for program in programs}
    if len(by_name) != len(programs):
        repeated = sorted({p.name for p in programs if sum(q.name == p.name for q in programs) > 1})
        raise ValueError(f"program names must differ, repeated: {repeated}")
    return by_name
