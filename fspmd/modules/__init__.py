"""Modules as functions of their parameters, parameters on a mesh, parallel styles, optimizers."""
