"""How values come to lie on a mesh, are moved on it by their owner, and are measured there."""
