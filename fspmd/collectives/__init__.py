"""The collectives of the local view, with JAX's names, argument order and semantics.

Each takes a pytree and one mesh axis or a tuple of axes. The order of the tuple is the rank order. Each is
differentiable any number of times: the table `fspmd.pairs.PAIRS` holds the communication forward and backward.
``wait=False`` returns a handle whose ``.wait()`` gives the result. Backward overlaps communication in the same way.
"""

from fspmd.collectives.casts import axis_index, axis_size, pcast
from fspmd.collectives.exchanges import all_to_all, pbroadcast, ppermute, pshuffle, pswapaxes
from fspmd.collectives.gathers import all_gather, all_gather_into, psum_scatter, psum_scatter_into
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
