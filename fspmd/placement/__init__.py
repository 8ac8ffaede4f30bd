"""Values put on a mesh, moved between layouts and taken off; new values; helpers for processes."""
