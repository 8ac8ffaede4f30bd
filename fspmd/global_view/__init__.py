"""Torch functions on `Sharded` values: the cached plan of a call, and how a call without one is planned."""
