"""Run every program under JAX and record what it answers.

    python tests/jax_oracle/generate.py            # rewrites tests/jax_oracle/golden.json
    python tests/jax_oracle/generate.py NAME ...   # prints the answers of these programs

This is the only file of the project that imports JAX (0.10 or later is needed); the tests read the recorded answers.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jax_oracle.programs import Program, Spec, all_programs, canonical_type, leaves, map_specs, weights

jax.config.update("jax_enable_x64", True)

GOLDEN = Path(__file__).with_name("golden.json")
DTYPES = {"index": "int32"}


def to_jax(spec: Spec) -> jax.P:
    """The same spec in JAX's words."""
    return jax.P(*spec.parts, unreduced=set(spec.unreduced), reduced=set(spec.reduced))


class JaxBackend:
    """The argument ``m`` of a program, made of JAX."""

    psum = staticmethod(lax.psum)
    pmean = staticmethod(lax.pmean)
    pmax = staticmethod(lax.pmax)
    pmin = staticmethod(lax.pmin)
    all_gather = staticmethod(lax.all_gather)
    pswapaxes = staticmethod(lax.pswapaxes)
    pcast = staticmethod(lax.pcast)
    axis_index = staticmethod(lax.axis_index)
    axis_size = staticmethod(lax.axis_size)
    stop_gradient = staticmethod(lax.stop_gradient)
    grad = staticmethod(jax.grad)
    value_and_grad = staticmethod(jax.value_and_grad)
    vjp = staticmethod(jax.vjp)
    jvp = staticmethod(jax.jvp)
    vmap = staticmethod(jax.vmap)
    checkpoint = staticmethod(jax.checkpoint)
    sin, cos, exp, log, tanh, sqrt = map(staticmethod, (jnp.sin, jnp.cos, jnp.exp, jnp.log, jnp.tanh, jnp.sqrt))
    abs, argmax = map(staticmethod, (jnp.abs, jnp.argmax))
    matmul, where, reshape, transpose = map(staticmethod, (jnp.matmul, jnp.where, jnp.reshape, jnp.transpose))
    zeros, zeros_like, arange = map(staticmethod, (jnp.zeros, jnp.zeros_like, jnp.arange))
    concat, stack, take = map(staticmethod, (jnp.concatenate, jnp.stack, lambda x, i: jnp.take(x, i, axis=0)))
    sum, max = map(staticmethod, (jnp.sum, jnp.max))

    def __init__(self, program: Program, mesh: jax.sharding.Mesh, *, explicit: bool) -> None:
        self.program, self.mesh, self.explicit = program, mesh, explicit
        self.types: dict[str, str] = {}

    def tap(self, label: str, x: Any) -> Any:
        """Record the type of a value on the way."""
        self.types[label] = canonical_type(str(jax.typeof(x)))
        return x

    def const(self, values: Any, dtype: str | None = None) -> jax.Array:
        return jnp.array(values, DTYPES.get(dtype or "", dtype))

    def astype(self, x: jax.Array, dtype: str) -> jax.Array:
        return x.astype(dtype)

    def set(self, x: jax.Array, index: int, value: Any) -> jax.Array:
        return x.at[index].set(value)

    def dynamic_slice(self, x: jax.Array, start: Any, size: int, axis: int = 0) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, start, size, axis)

    def scan(self, step: Callable[..., Any], init: Any, rows: Any) -> Any:
        return lax.scan(lambda carry, row: (step(carry, row), None), init, rows)[0]

    def while_loop(self, condition: Callable[..., Any], step: Callable[..., Any], init: Any) -> Any:
        return lax.while_loop(condition, step, init)

    def cond(self, predicate: Any, yes: Callable[..., Any], no: Callable[..., Any], *args: Any) -> Any:
        return lax.cond(predicate, yes, no, *args)

    def custom_vjp(self, f: Callable[..., Any], forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
        wrapped = jax.custom_vjp(f)
        wrapped.defvjp(forward, backward)
        return wrapped

    # JAX accepts a negative dim here and fails later.
    def psum_scatter(self, x: Any, axis_name: Any, *, scatter_dimension: int = 0, **options: Any) -> Any:
        dim = scatter_dimension % x.ndim if scatter_dimension < 0 else scatter_dimension
        return lax.psum_scatter(x, axis_name, scatter_dimension=dim, **options)

    # JAX's transpose of the untiled form fails unless split_axis == concat_axis.
    def all_to_all(self, x: Any, axis_name: Any, split_axis: int, concat_axis: int, **options: Any) -> Any:
        if options.get("tiled") or split_axis == concat_axis:
            return lax.all_to_all(x, axis_name, split_axis, concat_axis, **options)
        exchanged = lax.all_to_all(jnp.moveaxis(x, split_axis, 0), axis_name, 0, 0, **options)
        return jnp.moveaxis(exchanged, 0, concat_axis)

    # In JAX the rule of a custom function sums the cotangent of an invariant operand itself.
    def custom_cotangent(self, g: jax.Array, axis_name: Any) -> jax.Array:
        return lax.psum(g, axis_name)

    # JAX has no gradient for pmax; the maximum over a gathered copy has the one to expect.
    def pmax_with_gradient(self, x: jax.Array, axis_name: Any) -> jax.Array:
        return jnp.max(lax.all_gather(x, axis_name, to="invarying"), 0)

    def pmin_with_gradient(self, x: jax.Array, axis_name: Any) -> jax.Array:
        return jnp.min(lax.all_gather(x, axis_name, to="invarying"), 0)

    # Reductions in groups are not implemented in JAX's checked bodies, or typed wrongly (pmax).
    def grouped(self, what: str, x: jax.Array, axis_name: Any, groups: Any) -> jax.Array:
        reduce = {"psum": jnp.sum, "pmean": jnp.mean, "pmax": jnp.max, "pmin": jnp.min}[what]
        return reduce(lax.all_gather(x, axis_name, axis_index_groups=groups), 0)

    # What JAX refuses of reduced and unreduced values it accepts of invariant and varying ones, with equal results.
    def loosely_reduced(self, x: jax.Array, axis_name: Any) -> jax.Array:
        return x

    def loosely_unreduced(self, x: jax.Array, axis_name: Any) -> jax.Array:
        return x

    # JAX's ppermute numbers ranks in mesh order whatever the order of the tuple, unlike its other collectives;
    # the permutation is restated in that order, so that the answer is that of tuple order.
    def ppermute(self, x: Any, axis_name: Any, perm: Sequence[tuple[int, int]]) -> Any:
        if isinstance(axis_name, tuple):
            perm = [(self._mesh_rank(axis_name, s), self._mesh_rank(axis_name, d)) for s, d in perm]
        return lax.ppermute(x, axis_name, perm)

    def pshuffle(self, x: Any, axis_name: Any, perm: Sequence[int]) -> Any:
        if isinstance(axis_name, tuple):
            return self.ppermute(x, axis_name, [(source, target) for target, source in enumerate(perm)])
        return lax.pshuffle(x, axis_name, perm)

    def _mesh_rank(self, axis_name: tuple[str, ...], rank: int) -> int:
        sizes = [self.mesh.shape[name] for name in axis_name]
        at = dict(zip(axis_name, np.unravel_index(rank, sizes), strict=True))
        ordered = [name for name in self.mesh.axis_names if name in axis_name]
        return int(np.ravel_multi_index([at[n] for n in ordered], [self.mesh.shape[n] for n in ordered]))

    # The next two have no CPU kernel in JAX: they are spelled out by their definitions in JAX's documentation.
    def pbroadcast(self, x: jax.Array, axis_name: Any, source: int) -> jax.Array:
        chosen = jnp.where(lax.axis_index(axis_name) == source, x, jnp.zeros_like(x))
        return lax.pcast(lax.psum(chosen, axis_name), axis_name, to="varying")

    def ragged_all_to_all(self, x: Any, out: Any, at: Any, send: Any, there: Any, recv: Any, *, axis_name: str) -> Any:
        rank, per = lax.axis_index(axis_name), at.shape[0] // lax.axis_size(axis_name)
        everyone = [lax.all_gather(part + 0 * rank, axis_name) for part in (x, at, send, there)]
        for source in range(lax.axis_size(axis_name)):
            data, starts, sizes, targets = (part[source] for part in everyone)
            for k in range(per):
                slot = rank * per + k
                row = jnp.arange(out.shape[0]) - targets[slot]
                inside = (row >= 0) & (row < sizes[slot])
                moved = data[jnp.clip(row + starts[slot], 0, data.shape[0] - 1)]
                out = jnp.where(inside.reshape(-1, *[1] * (out.ndim - 1)), moved, out)
        return out

    def shard_map(
        self,
        f: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        axis_names: set[str] | None = None,
        *,
        check_vma: bool = True,
    ) -> Callable[..., Any]:
        specs = map_specs(to_jax, in_specs)
        mapped = jax.shard_map(
            f,
            in_specs=specs,
            out_specs=map_specs(to_jax, out_specs),
            axis_names=axis_names or set(self.mesh.axis_names),
            check_vma=check_vma,
        )
        if not self.explicit:
            return mapped

        def placed(*args: Any) -> Any:
            moved = [
                a if s.unreduced or (s.reduced and jax.typeof(a).sharding.spec == s) else jax.reshard(a, s)
                for a, s in zip(args, specs, strict=True)
            ]
            return mapped(*moved)

        return placed


def build(program: Program, *, explicit: bool) -> tuple[JaxBackend, Callable[..., list[jax.Array]], list[jax.Array]]:
    """The program as a function from global arrays to a flat list of global arrays, and its inputs."""
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    devices = jax.devices()[: math.prod(program.mesh_shape)]
    names = program.axis_names
    mesh = jax.make_mesh(program.mesh_shape, names, devices=devices, axis_types=(kind,) * len(names))
    m = JaxBackend(program, mesh, explicit=explicit)

    def body(*blocks: Any) -> Any:
        out = program.body(m, *blocks)
        if program.expect == "values":
            for i, leaf in enumerate(leaves(out)):
                m.tap(f"out{i}", leaf)
        return out

    def run(*args: jax.Array) -> list[jax.Array]:
        if program.scope == "global":
            out = program.body(m, *args)
        else:
            out = m.shard_map(body, program.in_specs, program.out_specs, check_vma=program.check_vma)(*args)
        flat = [jnp.asarray(leaf) for leaf in leaves(out)]
        return [jax.reshard(leaf, jax.P()) for leaf in flat] if explicit else flat

    inputs = [
        jnp.array(np.array(given.flat(k)).reshape(given.shape), given.dtype) for k, given in enumerate(program.inputs)
    ]
    return m, run, inputs


def is_float(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def scalar(outputs: Sequence[jax.Array]) -> jax.Array:
    """The number whose gradients are recorded."""
    total = jnp.zeros(())
    for salt, out in enumerate(outputs):
        if is_float(out):
            total += jnp.sum(jnp.array(weights(out.size, salt)).reshape(out.shape) * (out + out * out / 4))
    return total


def dump(x: jax.Array) -> dict[str, Any]:
    kind = "float" if is_float(x) else "bool" if x.dtype == bool else "int"
    return {"shape": list(x.shape), "kind": kind, "data": [float(f"{float(v):.15g}") for v in np.asarray(x).ravel()]}


def answer(program: Program) -> dict[str, Any]:
    """What JAX says to one program, on a mesh of the axis type that can say it."""
    try:
        return evaluate(program, explicit=False)
    except ValueError as error:
        if "of type `Explicit`" not in str(error):
            raise
        return evaluate(program, explicit=True)


def evaluate(program: Program, *, explicit: bool) -> dict[str, Any]:
    """Run one program and, where asked, its first and second derivatives."""
    m, run, inputs = build(program, explicit=explicit)
    with jax.set_mesh(m.mesh):
        if program.expect == "verdict":
            try:
                jax.block_until_ready(jax.jit(run)(*inputs))
            except Exception as error:
                return {"accepted": False, "because": type(error).__name__}
            return {"accepted": True, "types": m.types}
        outputs = jax.jit(run)(*inputs)
        result: dict[str, Any] = {"types": dict(m.types), "outputs": [dump(out) for out in outputs]}
        wrt = program.differentiated()
        if not wrt:
            return result
        for derivative in (jax.grad, jax.jacfwd):  # reverse through nested maps fails in JAX 0.10; forward does not
            try:
                return result | gradients(derivative, run, inputs, wrt, second=program.second)
            except ValueError as error:
                if derivative is jax.jacfwd or "verifier" not in str(error):
                    raise
                print(f"{program.name}: differentiated forward", file=sys.stderr)
    raise RuntimeError("not reached")


def gradients(
    derivative: Callable[..., Any],
    run: Callable[..., Any],
    inputs: Sequence[jax.Array],
    wrt: tuple[int, ...],
    *,
    second: bool,
) -> dict[str, Any]:
    """The gradient of the scalar, and the gradient of that gradient along fixed weights."""
    first = derivative(lambda *args: scalar(run(*args)), wrt)

    def along(*args: jax.Array) -> jax.Array:
        pairs = enumerate(first(*args))
        terms = (jnp.sum(g * jnp.array(weights(g.size, k + 5)).reshape(g.shape)) for k, g in pairs)
        return sum(terms, start=jnp.zeros(()))

    found = {"grads": [dump(g) for g in jax.jit(first)(*inputs)]}
    if second:
        found["second"] = [dump(g) for g in jax.jit(derivative(along, wrt))(*inputs)]
    return found


def main(names: list[str]) -> None:
    programs = all_programs()
    answers: dict[str, Any] = {}
    failures = 0
    for name in names or programs:
        try:
            answers[name] = answer(programs[name])
        except Exception as error:
            failures += 1
            print(
                f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", file=sys.stderr
            )
    if names:
        print(json.dumps(answers, indent=1))
    elif failures:
        sys.exit(f"{failures} programs did not run; nothing was written")
    else:
        rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(answers[name], separators=(',', ':'))}" for name in answers)
        GOLDEN.write_text(f'{{"jax": "{jax.__version__}",\n"programs": {{\n{rows}\n}}}}\n')
        print(f"{len(answers)} programs, {GOLDEN.stat().st_size / 2**20:.2f} MiB")


if __name__ == "__main__":
    main(sys.argv[1:])
