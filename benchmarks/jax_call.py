"""JAX's jitted shard_map beside its body, on 8 CPU devices: ``python benchmarks/jax_call.py``.

It needs JAX, which nothing else here does, and is measured in a process of its own; the call is that of `replays`.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

REPEATS = 25


def median(statement: Callable[[], Any], number: int = 300) -> float:
    """µs of a call, of which each is waited for."""
    samples = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        for _ in itertools.repeat(None, number):
            statement()
        samples.append((time.perf_counter() - begun) / number * 1e6)
    return statistics.median(samples)


def main() -> None:
    """Two leaves of [16, 16] over 8 devices, and the same on one."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((8,), ("x",))
    spec = PartitionSpec("x")
    x, y = (jax.device_put(jnp.ones((16, 16)), NamedSharding(mesh, spec)) for _ in range(2))
    a, b = (jax.device_put(jnp.ones((2, 16)), jax.devices()[0]) for _ in range(2))

    def body(a: Any, b: Any) -> tuple[Any, Any]:
        return a + b, a * b

    mapped = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))
    alone = jax.jit(body)
    jax.block_until_ready((mapped(x, y), alone(a, b)))
    print(f"jax {jax.__version__}")
    begun, ended = median(lambda: mapped(x, y)), median(lambda: jax.block_until_ready(mapped(x, y)))
    print(f"jitted shard_map, 2 leaves, 8 devices: {begun:.1f} µs until it is begun, {ended:.1f} µs until it has ended")
    print(f"its body, jitted, on one device: {median(lambda: jax.block_until_ready(alone(a, b))):.1f} µs")


if __name__ == "__main__":
    main()
