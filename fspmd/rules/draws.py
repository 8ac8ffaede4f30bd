"""Random numbers written into a `Sharded`, or drawn with its elements as parameters. They are equal in all layouts.

The number of an element depends on its place in the global tensor and on one draw of torch's generator. Nothing moves,
except to settle pending sums of parameters, and in `multinomial`, which sorts.

Dropout and its relatives are written in functions that have rules. Their noise lies as the operand does, and they add
no communication of their own. Backward multiplies by the same noise. A recomputation that restores torch's generator
draws it again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import log1p, pi
from typing import Any, Final

import torch
from torch import Tensor

from fspmd.copies import refuse_copy
from fspmd.errors import ArgumentError, ShapeError
from fspmd.forms import as_made, is_made
from fspmd.random.blocks import Law, drawn, fill, shared_seed
from fspmd.random.counter import Block
from fspmd.random.distributions import FRACTIONS, bernoulli, exponential, integers, normal, poisson, uniform
from fspmd.remembered import wrote
from fspmd.rules.like_functions import Handler, Value, drawn_like, settle, settled
from fspmd.rules.value_checks import check_values
from fspmd.sharded import Sharded, call_torch, is_sharded, pair
from fspmd.spec import P, TensorSpec
from fspmd.torch_internals import transforms_active
from fspmd.tracing import step
from fspmd.transport.frame import frame_over
from fspmd.transport.local_tensor import per_block, shards_of

Then = Callable[[Tensor], Tensor]


def _wide(law: Law) -> Law:
    """Return a law that draws float64 for float64 and integers, and float32 for all other dtypes."""
    return lambda dtype: law(torch.float32 if dtype.is_floating_point and dtype is not torch.float64 else torch.float64)


def _normal(x: Sharded, mean: float = 0.0, std: float = 1.0) -> tuple[Law, Then]:
    _check("normal_", "std", std, std >= 0, "0 or more")
    return normal, lambda z: z.mul_(std).add_(mean)


def _uniform(x: Sharded, low: float = 0.0, high: float = 1.0) -> tuple[Law, Then]:
    _check("uniform_", "to", high, low <= high, f"from={low} or more")
    return uniform, lambda u: u.mul_(high - low).add_(low)


def _exponential(x: Sharded, lambd: float = 1.0) -> tuple[Law, Then]:
    _check("exponential_", "lambd", lambd, lambd > 0, "above 0")
    return exponential, lambda e: e.div_(lambd)


def _cauchy(x: Sharded, median: float = 0.0, sigma: float = 1.0) -> tuple[Law, Then]:
    _check("cauchy_", "sigma", sigma, sigma > 0, "above 0")
    return _wide(uniform), lambda u: u.sub_(0.5).mul_(pi).tan_().mul_(sigma).add_(median)


def _log_normal(x: Sharded, mean: float = 1.0, std: float = 2.0) -> tuple[Law, Then]:
    _check("log_normal_", "std", std, std > 0, "above 0")
    return normal, lambda z: z.mul_(std).add_(mean).exp_()


def _geometric(x: Sharded, p: float) -> tuple[Law, Then]:
    _check("geometric_", "p", p, 0 < p < 1, "between 0 and 1")
    return _wide(exponential), lambda e: e.div_(-log1p(-p)).ceil_()


def _random(x: Sharded, *bounds: int | None) -> tuple[Law, Then]:
    """``random_()``, ``random_(to)``, ``random_(from, to)``. Defaults: 0, and the largest exact integer of a dtype."""
    low = bounds[0] if len(bounds) == 2 and bounds[0] is not None else 0
    high = bounds[-1] if bounds and bounds[-1] is not None else _beyond(x.dtype)
    _check("random_", "to", high, low < high, f"above from={low}")
    return lambda dtype: integers(low, high, torch.int64), lambda n: n


def _beyond(dtype: torch.dtype) -> int:
    """Return the number after the largest integer up to which a dtype holds all integers."""
    if dtype is torch.bool:
        return 2
    return int(2 / torch.finfo(dtype).eps) + 1 if dtype.is_floating_point else torch.iinfo(dtype).max + 1


def _bernoulli(x: Sharded, p: float = 0.5) -> tuple[Law, Then]:
    _check("bernoulli_", "p", p, 0 <= p <= 1, "between 0 and 1")
    return lambda dtype: bernoulli(p, dtype), lambda hit: hit


def _check(name: str, parameter: str, value: float, fits: bool, bounds: str) -> None:
    if not fits:
        raise ArgumentError(f"{name} got {parameter}={value!r}; give it a number that is {bounds}")


def _check_each(name: str, parameter: str, values: Any, fits: Callable[[Any], Any], bounds: str) -> None:
    check_values(
        values, fits, f"{name} got numbers for {parameter} that are out of bounds; give it numbers that are {bounds}"
    )


_LAWS: Final[dict[str, Callable[..., tuple[Law, Then]]]] = {
    "normal": _normal,
    "uniform": _uniform,
    "exponential": _exponential,
    "cauchy": _cauchy,
    "log_normal": _log_normal,
    "geometric": _geometric,
    "random": _random,
    "bernoulli": _bernoulli,
}
_FROM: Final = {"from": "low", "to": "high"}  # torch's names of bounds -> ours, since ``from`` is a keyword of Python


def _write(name: str, x: Any, *args: Any, generator: torch.Generator | None = None, **named: Any) -> Value:
    """Run ``x.normal_()``, or another draw into x."""
    if not is_sharded(x):
        raise ArgumentError(f"{name}_() would write a value on a mesh into a plain tensor; make that a Sharded first")
    refuse_copy(x.local, f"{name}_()")
    if name == "random":
        args, named = (*args, *(named[key] for key in ("from", "to") if key in named)), {}
    parameters = [*args, *named.values()]
    if name == "bernoulli" and any(isinstance(p, Tensor) for p in parameters):
        return x.copy_(_below(x, parameters[0], generator))
    law, then = _LAWS[name](x, *args, **{_FROM.get(key, key): value for key, value in named.items()})
    x.local.copy_(drawn(x.spec, law, x.device, then, generator).local)
    wrote(x.local)
    return x


def _new(name: str, x: Value, *args: Any, **options: Any) -> Value:
    return _write(name, x.new_empty(x.shape), *args, **options)


def _below(x: Value, p: Any, generator: torch.Generator | None) -> Value:
    """Draw ones with the probabilities ``p``, in the shape and dtype of ``x``."""
    p = settle(p.detach()) if is_sharded(p) else p
    _check_each("bernoulli", "p", p, lambda p: p == p.clamp(0, 1), "between 0 and 1")
    with torch.no_grad():
        fractions = drawn_like(x, lambda dtype: FRACTIONS, None, torch.float64, generator)
        spec = settled(x.spec)
        if not is_sharded(p) or settled(p.spec, spec.dtype) is not spec or spec.flat or transforms_active():
            return (fractions < p).to(x.dtype)
        return pair(_hits(fractions.local, p.local, spec.dtype), spec)


@step
def _hits(fractions: Tensor, p: Tensor, dtype: torch.dtype) -> Tensor:
    """Compare fractions with probabilities, block by block."""
    return per_block(lambda x, q: _hits_of_block(x, q, dtype), fractions, p)


def _hits_of_block(fractions: Tensor, p: Tensor, dtype: torch.dtype) -> Tensor:
    hits = torch.empty_like(fractions, dtype=dtype)
    if fractions.device.type != "cpu" or fractions.numel() <= _PART:
        return torch.lt(fractions, p, out=hits)
    parts = (x.reshape(-1).split(_PART) for x in (hits, fractions, p))
    for to, fraction, q in zip(*parts, strict=True):
        torch.lt(fraction, q, out=to)
    return hits


_PART: Final = 1 << 15  # elements that fit into the cache of a core


def _bernoulli_of(x: Value, p: Any = None, *, generator: torch.Generator | None = None, inplace: bool = False) -> Value:
    drawn = _below(x, x, generator) if p is None else _new("bernoulli", x, p, generator=generator)
    return _followed(drawn, x)


def _followed(value: Value, *operands: Any) -> Value:
    """Return a drawn value that requires grad if an operand does, as in torch. The gradient is zero."""
    for x in operands:
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            always = torch.ones((), dtype=torch.bool, device=x.device)
            value = call_torch(torch.where, (always, value, settle(x) if isinstance(x, Sharded) else x))
    return value


def _normal_of(mean: Any, std: Any = 1.0, *, generator: torch.Generator | None = None) -> Value:
    """``torch.normal``, in the layout of an operand that has the shape of the result."""
    operands = [x for x in (mean, std) if isinstance(x, Tensor)]
    _check_each("normal", "std", std, lambda std: std >= 0, "0 or more")
    shape = torch.broadcast_shapes(*(tuple(x.shape) for x in operands))
    sharded = [x for x in operands if isinstance(x, Sharded)]
    lead = next((x for x in sharded if x.shape == tuple(shape)), None)
    partition = P(*lead.spec.partition) if lead is not None else P()
    spec = TensorSpec(sharded[0].spec.mesh, partition, tuple(shape), operands[0].dtype)
    with torch.no_grad():
        value = drawn(spec, normal, sharded[0].device, generator=generator) * std + mean
    return _followed(value, mean, std)


def _multinomial(
    x: Value, num_samples: int, replacement: bool = False, *, generator: torch.Generator | None = None
) -> Value:
    """``torch.multinomial``: the largest of the weights divided by exponential numbers.

    Without replacement these are the ``num_samples`` largest. With replacement each sample has its own numbers.
    """
    if not 0 < num_samples <= (num_samples if replacement else x.shape[-1]):
        raise ArgumentError(
            f"multinomial got num_samples={num_samples} of {x.shape[-1]} categories; without replacement give it from "
            f"1 to {x.shape[-1]}"
        )
    with torch.no_grad():
        weights = settle(x.detach())
        if weights.spec.partition[-1] is None:
            _check_weights(weights, lambda w: ((w >= 0) & w.isfinite()).all(-1) & (w > 0).any(-1))
        else:  # an invalid weight becomes nan. It counts as the greatest element, so all ranks of a row see it
            weights = call_torch(torch.where, ((weights >= 0) & weights.isfinite(), weights, torch.nan))
        if replacement:
            weights = weights.unsqueeze(-2).expand(*weights.shape[:-1], num_samples, weights.shape[-1])
        scaled = weights / drawn_like(weights, exponential, generator=generator)
        largest = scaled.max(-1) if replacement else scaled.topk(num_samples, -1)
        if weights.spec.partition[-1] is not None:
            greatest = largest.values if replacement else largest.values.select(-1, 0)
            _check_weights(greatest, lambda value: value > 0)
        return largest.indices


def _check_weights(values: Value, fits: Callable[[Any], Any]) -> None:
    _check_each("multinomial", "weights", values, fits, "finite and 0 or more, with one above 0 in each row")


def _poisson(x: Value, generator: torch.Generator | None = None) -> Value:
    """``torch.poisson``: draws a count for each rate."""
    if x.spec.flat:
        return _poisson(x.reshape(x.spec.unflattened.shape), generator).reshape(x.shape)
    rates = settle(x.detach())
    _check_each("poisson", "rates", rates, lambda rate: rate >= 0, "0 or more")
    seed = shared_seed(generator, rates.spec.mesh)
    return _followed(pair(_Counted.apply(rates.local, rates.spec, seed), rates.spec), x)


class _Counted(torch.autograd.Function):
    """The counts of a block of rates. Dims mapped by `vmap` come first, and all their elements share the numbers."""

    @staticmethod
    def forward(rates: Tensor, spec: TensorSpec, seed: int) -> Tensor:
        simulated = spec.mesh.transport == "simulation"
        each = iter(shards_of(rates, frame_over(spec.mesh, spec.partition.axes)) if simulated else [rates])
        return fill(spec, lambda block: poisson(block, next(each).double(), seed).to(spec.dtype), rates.device).local

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None, None], rates: Tensor, *others: Any) -> tuple[Tensor, int]:
        return _Counted.apply(rates.movedim(in_dims[0], 0), *others), 0


DRAWS: Final[dict[str, Handler]] = {
    **{f"{name}_": functools.partial(_write, name) for name in _LAWS},
    **{name: functools.partial(_new, name) for name in _LAWS if name not in ("normal", "bernoulli")},
    "normal_functional": functools.partial(_new, "normal"),
    "bernoulli": _bernoulli_of,
    "normal": _normal_of,
    "multinomial": _multinomial,
    "poisson": _poisson,
}


_ALPHA: Final = 1.7580993408473766  # SELU's alpha times its scale; alpha dropout sets dropped elements to -_ALPHA


def _kept(x: Value, p: float, features: bool, scale: float = 1.0) -> Value:
    """Return ``scale`` where an element is kept, and 0 where it is dropped.

    ``features``: whole channels are dropped, so the mask has size 1 along all dims from the third on.
    """
    p = float(p)
    if not 0 <= p <= 1:
        raise ArgumentError(f"dropout got p={p!r}; give it a probability, between 0 and 1")
    spec = settled(x.spec)
    if features:
        if x.ndim < 2:
            raise ShapeError(f"feature dropout got {x!r}; give it a batch of channels: two dims or more")
        shape = (*x.shape[:2], *(1,) * (x.ndim - 2))
        spec = TensorSpec(spec.mesh, P(*spec.partition.entries[:2]), shape, spec.dtype)
    numbers = spec.dtype.is_floating_point or spec.dtype.is_complex  # `mul_` refuses others, as torch does
    then = None if scale == 1 and numbers else lambda kept: kept.to(spec.dtype).mul_(scale)
    noise = drawn(spec, lambda dtype: bernoulli(1 - p, dtype), x.device, then)
    if is_made(x.form):  # without a gradient, noise is cut as easily
        noise.form = as_made(noise.form)
    return noise


def _keeps_all(p: float, training: bool) -> bool:
    """Whether a dropout returns its operand and, as in torch, draws nothing."""
    return not training or p == 0


def _dropout(features: bool, x: Value, p: float = 0.5, training: bool = True, inplace: bool = False) -> Value:
    if _keeps_all(p, training):
        return x
    noise = _kept(x, p, features, 1 / (1 - p) if p < 1 else 0.0)
    return x.mul_(noise) if inplace else x * noise


def _alpha_dropout(features: bool, x: Value, p: float = 0.5, training: bool = False, inplace: bool = False) -> Value:
    """Alpha dropout: dropped elements become SELU's lower limit. The result keeps the mean and variance of ``x``."""
    if _keeps_all(p, training):
        return x
    kept = _kept(x, p, features)
    scale = ((1 - p) * (1 + p * _ALPHA**2)) ** -0.5 if p < 1 else 0.0
    shift = (kept - 1) * (_ALPHA * scale) + _ALPHA * scale * p
    return x.mul_(kept * scale).add_(shift) if inplace else x * (kept * scale) + shift


def _of_channels(batched: int, x: Value, p: float = 0.5, training: bool = True, inplace: bool = False) -> Value:
    """``dropout1d`` and ``dropout3d``, which also take [C, ...] without a batch."""
    if x.ndim not in (batched - 1, batched):
        raise ShapeError(f"dropout{batched - 2}d got {x!r}; give it {batched} dims, or {batched - 1} without a batch")
    if x.ndim == batched:
        return _dropout(True, x, p, training, inplace)
    out = _dropout(True, x.unsqueeze(0), p, training, False).squeeze(0)
    return x.copy_(out) if inplace else out


def _native_dropout(x: Value, p: float, train: bool | None) -> tuple[Value, Value]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    noise = _kept(x, p, False, 1 / (1 - p) if p < 1 else 0.0)
    return x * noise, noise != 0


def _rrelu(
    x: Value, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False, **_: Any
) -> Value:
    if not 0 <= lower <= upper:
        raise ArgumentError(f"rrelu got lower={lower!r} and upper={upper!r}; give it 0 <= lower <= upper")
    if training:
        slopes: Any = drawn_like(x, uniform, lambda u: u.mul_(upper - lower).add_(lower))
    else:
        slopes = (lower + upper) / 2
    value = settle(x)
    out = torch.where(value > 0, value, value * slopes)
    return x.copy_(out) if inplace else out


def _gumbel_softmax(logits: Value, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Value:
    logits = settle(logits)
    gumbels = drawn_like(logits, exponential, lambda e: e.log_().neg_())
    soft = ((logits + gumbels) / tau).softmax(dim)
    if not hard:
        return soft
    best = soft.detach().argmax(dim, keepdim=True)
    return (_places(logits, dim % logits.ndim) == best).to(soft.dtype) - soft.detach() + soft


def _places(x: Value, dim: int) -> Value:
    """Return the indices along a dim, in a shape that broadcasts with ``x``, cut as ``x`` is."""
    shape = tuple(n if d == dim else 1 for d, n in enumerate(x.shape))
    partition = P(*(entry if d == dim else None for d, entry in enumerate(x.spec.partition)))

    def make(block: Block) -> Tensor:
        start = block.offset[dim]
        return torch.arange(start, start + block.shape[dim], device=x.device).view(block.shape)

    return fill(TensorSpec(x.spec.mesh, partition, shape, torch.int64), make, x.device)


def _in_place(function: Handler, *args: Any, **options: Any) -> Value:
    return function(*args, **options, inplace=True)


_BOTH: Final[dict[str, Handler]] = {
    "dropout": functools.partial(_dropout, False),
    "feature_dropout": functools.partial(_dropout, True),
    "alpha_dropout": functools.partial(_alpha_dropout, False),
    "feature_alpha_dropout": functools.partial(_alpha_dropout, True),
    "rrelu": _rrelu,
}
DROPOUTS: Final[dict[str, Handler]] = {
    **_BOTH,
    **{f"{name}_": functools.partial(_in_place, function) for name, function in _BOTH.items()},
    "dropout1d": functools.partial(_of_channels, 3),
    "dropout2d": functools.partial(_dropout, True),
    "dropout3d": functools.partial(_of_channels, 5),
    "native_dropout": _native_dropout,
    "gumbel_softmax": _gumbel_softmax,
}
