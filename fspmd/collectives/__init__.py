"""The collectives of the local view, with JAX's names, argument order and semantics.

Each takes a pytree and one mesh axis or a tuple of axes, whose order is the rank order. Each is differentiable any
number of times; `fspmd.pairs.PAIRS` is the table of what forward and backward communicate. ``wait=False`` returns a
handle whose ``.wait()`` gives the result; in backward, too, communication starts early and is waited for late.
"""

from fspmd.collectives.all_to_all import all_to_all, pswapaxes
from fspmd.collectives.casts import axis_index, axis_size, pcast
from fspmd.collectives.gathers import all_gather, psum_scatter
from fspmd.collectives.in_place import all_gather_into, psum_scatter_into
from fspmd.collectives.permutations import pbroadcast, ppermute, pshuffle
from fspmd.collectives.ragged import ragged_all_to_all
from fspmd.collectives.reductions import pmax, pmean, pmin, psum
from fspmd.collectives.steps import Handle

__all__ = [
    "Handle",
    "all_gather",
    "all_gather_into",
    "all_to_all",
    "axis_index",
    "axis_size",
    "pbroadcast",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "psum_scatter_into",
    "pswapaxes",
    "ragged_all_to_all",
]
