"""Parts of models over typed values, as pure functions: attention over sequences that are cut over ranks,
experts on ranks, and training state that is cut over ranks.

They are written in the public words of fspmd, and stand above everything else.
"""

from fspmd.nn.accumulation import LossScale, accumulate, all_finite, selected
from fspmd.nn.attention import attend_block
from fspmd.nn.context import gathered_attention, ring_attention, ulysses_attention
from fspmd.nn.costs import attention_costs
from fspmd.nn.decoding import KVCache, cached_attention, own_heads
from fspmd.nn.experts import Dispatched, Routing, balance, combine, dispatch, experts, grouped_matmul, route
from fspmd.nn.masks import Causal, Documents, Full, Mask, Prefix, SlidingWindow
from fspmd.nn.muon import muon
from fspmd.nn.optimizers import Optimizer, adafactor, adamw, with_master
from fspmd.nn.parameters import Precision, gathered
from fspmd.nn.parts import PartialAttention, empty_part, merge, merge_over
from fspmd.nn.pipelines import pipeline
from fspmd.nn.sampling import greedy, sample
from fspmd.nn.schedules import (
    Action,
    Costs,
    Schedule,
    dual_pipe_v,
    gpipe,
    interleaved,
    one_f_one_b,
    zbv,
    zero_bubble,
)
from fspmd.nn.sequences import SequenceLayout, balanced, contiguous, striped, zigzag

__all__ = [
    "Action",
    "Causal",
    "Costs",
    "Dispatched",
    "Documents",
    "Full",
    "KVCache",
    "LossScale",
    "Mask",
    "Optimizer",
    "PartialAttention",
    "Precision",
    "Prefix",
    "Routing",
    "Schedule",
    "SequenceLayout",
    "SlidingWindow",
    "accumulate",
    "adafactor",
    "adamw",
    "all_finite",
    "attend_block",
    "attention_costs",
    "balance",
    "balanced",
    "cached_attention",
    "combine",
    "contiguous",
    "dispatch",
    "dual_pipe_v",
    "empty_part",
    "experts",
    "gathered",
    "gathered_attention",
    "gpipe",
    "greedy",
    "grouped_matmul",
    "interleaved",
    "merge",
    "merge_over",
    "muon",
    "one_f_one_b",
    "own_heads",
    "pipeline",
    "ring_attention",
    "route",
    "sample",
    "selected",
    "striped",
    "ulysses_attention",
    "with_master",
    "zbv",
    "zero_bubble",
    "zigzag",
]
