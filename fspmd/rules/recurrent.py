"""Recurrent layers, ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``: each rank runs the sequences of its part of the batch."""

from __future__ import annotations

from typing import Any, Final

import optree
import torch

from fspmd.rules.bodies import Bodied, Site
from fspmd.rules.factors import Dims, Factors
from fspmd.rules.global_call import NO_RULE, Whole
from fspmd.rules.windows import still


def sequences(whole: Whole) -> Factors:
    """The rule of a recurrent layer: only the batch may be sharded.

    Arguments are ``(input, hx, weights, biases, layers, dropout, train, bidirectional, batch_first)``. Dropout between
    layers, which draws random numbers, has no rule.
    """
    if len(whole.args) != 9 or not isinstance(whole.args[1], (tuple, list, type(None))) or whole.ndim != 3:
        return NO_RULE
    if whole.args[4] > 1 and whole.args[5] and whole.args[6]:
        return NO_RULE
    batch = 0 if whole.args[8] else 1
    values: Dims = tuple(0 if d == batch else None for d in range(3))
    states: Dims = (None, 0, None)
    count = len(whole.results) - 1  # states: all results but the sequence of outputs
    weights = tuple((None,) * len(shape) for shape in whole.shapes[1 + count :])
    operands = (values, *(states,) * count, *weights)
    return Factors(operands, (values, *(states,) * count), whole=frozenset({0}), names={"batch": 0})


def _layer(name: str) -> Bodied:
    def body(site: Site, *args: Any) -> Any:
        states = optree.tree_map(torch.Tensor.contiguous, args[1])  # cuDNN takes no parts of a batch, which are views
        return getattr(torch, name)(args[0], states, *args[2:])

    return still(body)


def is_packed(args: tuple[Any, ...]) -> bool:
    """Whether a layer takes packed sequences. Values then say how many sequences run at each step."""
    return len(args) > 3 and isinstance(args[3], (tuple, list))  # the weights follow ``batch_sizes``


LAYERS: Final = {name: _layer(name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
