"""Random numbers that depend only on a seed or key and the element, and not on the layout.

The public functions here take keys, as in ``jax.random``.

>>> from fspmd import P, make_mesh, random
>>> first, second = random.split(random.key(0))
>>> random.normal(first, (8, 4), spec=P("x"), mesh=make_mesh((4,), ("x",)))
Sharded f32[8@x, 4] on mesh(x=4)
"""

from fspmd.random.keys import bernoulli, categorical, fold_in, key, normal, permutation, randint, split, uniform

__all__ = ["bernoulli", "categorical", "fold_in", "key", "normal", "permutation", "randint", "split", "uniform"]
