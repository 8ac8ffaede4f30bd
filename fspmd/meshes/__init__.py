"""Meshes: layouts of ranks by name, one shared rank map, and the launcher they came from."""
