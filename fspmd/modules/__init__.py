"""Modules, their parameters on a mesh, and parallel styles."""
