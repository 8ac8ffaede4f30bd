"""A pool of real processes with Gloo on loopback, for tests of what several ranks do together.

    with Processes(4) as pool:
        results = pool.run(function, *args)   # one per rank; function is a module's own, so that it can be pickled

They are forks of one process that has imported what tests need and done nothing, since imports take each seconds. They
have the environment that torchrun gives (RANK, WORLD_SIZE, MASTER_ADDR ...) and nothing initialised, and stay for many
calls. Every call has a time limit, past which the pool is ended.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import secrets
import signal
import socket
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Final, Self

#: torch imports the last three when it first needs them
_IMPORTED: Final = [
    *("fspmd", "pytest", "hypothesis", "torch.distributed"),
    *("sympy", "torch._dynamo.symbolic_convert", "torch.distributed.checkpoint"),
]


def free_port() -> int:
    """A port of the loopback interface that nobody uses now.

    It is none of those that the system gives to connections, one of which would take it before a server listens there.
    """
    for port in secrets.SystemRandom().sample(range(10_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port of a hundred is free")


def forks() -> Any:
    """The context of multiprocessing whose processes are forks of the one that has imported what tests need."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def _serve(rank: int, size: int, port: int, calls: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets jobs in the background ignore it
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # no collection walks what was imported, which would also copy its pages
    while (call := calls.recv()) is not None:
        function, args = call
        try:
            calls.send((True, function(*args)))
        except BaseException:
            calls.send((False, traceback.format_exc()))


class Processes:
    """``size`` processes that run functions, one call at a time."""

    def __init__(self, size: int) -> None:
        context = forks()
        port = free_port()
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, there), daemon=True)
            process.start()
            there.close()
            self.connections.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: object, seconds: float = 300) -> list[Any]:
        """What the function returns on each rank; an AssertionError with the tracebacks of the ranks that fail."""
        for connection in self.connections:
            connection.send((function, args))
        answers: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + seconds
        while len(answers) < len(self.connections):
            left = {c: rank for rank, c in enumerate(self.connections) if rank not in answers}
            ready = wait(list(left), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                self.end()
                failed = "".join(f"\nrank {r}: {text}" for r, (ok, text) in answers.items() if not ok)
                raise AssertionError(f"no answer within {seconds} s from ranks {sorted(left.values())}{failed}")
            for connection in ready:
                try:
                    answers[left[connection]] = connection.recv()  # type: ignore[index]
                except EOFError:
                    answers[left[connection]] = (False, "the process ended")  # type: ignore[index]
        failed = "".join(f"\nrank {r}: {text}" for r, (ok, text) in sorted(answers.items()) if not ok)
        if failed:
            raise AssertionError(failed)
        return [answers[rank][1] for rank in range(len(self.connections))]

    def end(self) -> None:
        """End the processes."""
        for connection in self.connections:
            try:
                connection.send(None)
            except OSError:
                continue
        end = time.monotonic() + 5
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()
