"""Transports: simulated ranks in this process, c10d process groups, or shapes alone. Nothing above knows which runs."""

from __future__ import annotations

from fspmd.cache import cached
from fspmd.transport.call import Options, Transport
from fspmd.transport.pending import Pending, Result, arrived, as_pending

__all__ = ["Options", "Pending", "Result", "Transport", "arrived", "as_pending", "transport_named"]


@cached
def transport_named(name: str) -> Transport:
    """Return the transport of meshes whose ``mesh.transport`` is ``name``."""
    if name == "simulation":
        from fspmd.transport.simulation import SimulationTransport

        return SimulationTransport()
    if name == "abstract":
        from fspmd.transport.abstract import AbstractTransport

        return AbstractTransport()
    from fspmd.transport.process_group import ProcessGroupTransport

    return ProcessGroupTransport()
