"""`generate.py` needs JAX, which the tests do not."""

collect_ignore = ["generate.py"]
