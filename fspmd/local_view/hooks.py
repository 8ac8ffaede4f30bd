"""Wrappers of places where torch hides a call, or drops an argument or the type of a tensor.

* A TorchFunctionMode does not see ``autograd.Function.apply``, so its operands would not be cast.
* The backward of a custom Function runs outside the body, where no axes are bound for its collectives.
* Tensors that a custom Function has saved come back as new ones, if a checkpoint or another hook kept them.
* ``vmap`` unwraps its result to a new tensor without the type.
* ``torch.func`` differentiates with respect to a value that in a mapped function belongs to one element.
* ``torch.utils.checkpoint`` runs a function again in backward, outside the body, on new tensors.
* TorchScript calls torch below Python, and its tracer writes down a graph without collectives.
* ``nn.Parameter``, ``as_subclass``, ``set_`` and a few others make a tensor of another one, and no mode sees them.
* Storages are read and written, and no mode sees it (`storages.py`).
* ``MaskedTensor`` calls torch below autograd, so a `Sharded` within would lose its gradients.
* ``torch.cond``, ``flex_attention`` and their kin compile a function, which on a `Sharded` fails in Dynamo's words.
* ``F.l1_loss`` drops its argument ``weight`` under a mode, so a weighted loss would be an unweighted one.

Outside a body the wrappers call torch directly. Only ``apply`` of a `Sharded` goes to `autodiff.custom_functions`,
since torch would cut it off from autograd.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from sys import modules
from types import FunctionType
from typing import Any

import optree
import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function_variadic

from fspmd.body import Body, state
from fspmd.errors import ArgumentError, VarianceError
from fspmd.local_view.modes import be_eager_in_bodies, is_active, run_in
from fspmd.local_view.storages import OF_TENSORS, check_storages, wrap_storages
from fspmd.local_view.tracking import Tracker, mode_for, own
from fspmd.local_view.type_rules import first_seen
from fspmd.ops.traits import tensors_in
from fspmd.remembered import forgetting
from fspmd.sharded import Sharded, is_plain, upper
from fspmd.torch_internals import (
    DYNAMO,
    ENTERS_DERIVATIVE,
    JIT_TRACERS,
    LEAVES_VMAP,
    MODULES_THAT_COMPILE,
    NO_LEVEL,
    RECOMPUTES,
    UNSEEN,
    ScriptMethod,
    level_of,
    make_subclass,
    pop_transform,
    transforms_active,
    wrap_script_module,
    wrapped_by,
)
from fspmd.tracing import has_recompute_context, jit_trace, recompute_context, recomputing, recorder, untraceable
from fspmd.transport.local_tensor import blocks_of, held_frame, local_tensor
from fspmd.transport.randomness import go_on, kept_states
from fspmd.variance import ATTRIBUTE, INVARIANT, OUTPUT_TYPES, get_variance, join, set_variance, show
from fspmd.wrappers import replace_everywhere

_BODY = "_fspmd_body"
_SAVED = "_fspmd_saved"  # on the backward of a Function: the types of the tensors that it saves
_ZEROS = (
    "_fspmd_zeros"  # on the backward of a Function: for each argument with a gradient the function that makes zeros
)
_Reentrant: Any = torch.utils.checkpoint.CheckpointFunction


def install() -> None:
    """Install the wrappers."""
    _wrap_apply()
    _wrap_backward()
    _wrap_saved()
    _wrap_vmap_exit()
    _wrap_derivatives()
    _wrap_recomputation()
    _wrap_script()
    _wrap_unseen()
    wrap_storages()
    _wrap_tracers()
    _wrap_masked()
    _wrap_compile()
    _hand_on_weight()


def _wrap_apply() -> None:
    method = inspect.getattr_static(torch.autograd.Function, "apply")
    original: Callable[..., Any] = getattr(method, "__func__", method)  # it may be a function in C

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is _Reentrant and (Sharded in map(type, args) or has_recompute_context()):
            return _checkpointed(*args)
        body = state.body
        tracker = state.tracker
        if body is None and torch.is_grad_enabled() and Sharded in map(type, args) and _is_followed(args, kwargs):
            _check_transforms(cls, args)
            return upper().apply_function(cls, args, kwargs)
        if body is None and state.completes:
            return _bind_zeros(original(cls, *args, **kwargs), args)
        if body is None or _types_itself(cls) or not (tracker is None or is_active(tracker)):
            return original(cls, *args, **kwargs)  # inside a torch function the tracker has cast the operands already
        result = INVARIANT
        if tracker is not None:
            tensors = [x for x in (*args, *kwargs.values()) if is_plain(x)]
            for x in tensors:
                result = join(result, getattr(x, ATTRIBUTE, None) or first_seen(x))
            if result is not INVARIANT:
                args = tracker.cast_all(args, result)
        if result is INVARIANT:
            return _bind_body(original(cls, *args, **kwargs), args, body, tracker)
        before, tracker.marks_invariant = tracker.marks_invariant, True
        try:
            out = original(cls, *args, **kwargs)
        finally:
            tracker.marks_invariant = before
        for y in out if isinstance(out, tuple) else (out,):
            if isinstance(y, torch.Tensor) and getattr(y, ATTRIBUTE, None) is None:
                set_variance(y, result)  # made unseen by the tracker, or an argument that is returned
        return _bind_body(out, args, body, tracker)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]


def _types_itself(cls: Any) -> bool:
    """Return whether a Function belongs to the machinery. `fspmd.nn` is written as users write.

    So does the Function by which torch before 2.13 keeps the arguments of a checkpoint. It runs again on them as given.
    """
    if cls.__module__ == _Reentrant.__module__:
        return cls is not _Reentrant
    return cls.__module__.startswith("fspmd.") and not cls.__module__.startswith("fspmd.nn.")


def _checkpointed(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
    """Run ``use_reentrant=True`` as False. The former has gradients only for tensors among its arguments."""
    checkpoint = torch.utils.checkpoint.checkpoint
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def _is_followed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in (*args, *kwargs.values()))


def _check_transforms(cls: Any, args: tuple[Any, ...]) -> None:
    """Raise `ArgumentError` for a Sharded in a transform of ``torch.func``, which would silently lose its gradient."""
    if transforms_active():
        x, name = next(x for x in args if type(x) is Sharded), f"{cls.__name__}.apply"
        raise ArgumentError(
            f"{name}, an autograd.Function of tensors, got {x!r} in a transform such as vmap or torch.func.grad; call "
            "it in a function run by shard_map, or give it a rule for all who call it: "
            f"{name} = fspmd.rule({name}, 'm n -> m n')"
        )


def completing(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function. In backward its custom Functions return zeros for None, which one rank alone may return."""
    before, state.completes = state.completes, True
    try:
        return function(*args, **kwargs)
    finally:
        state.completes = before


def _bind_zeros(out: Any, args: tuple[Any, ...]) -> Any:
    """Let the backward of a Function with outputs ``out`` return zeros for None."""
    zeros = [zeros_later(x) if is_plain(x) and x.requires_grad else None for x in args]
    for y in out if isinstance(out, tuple) else (out,):
        if isinstance(y, torch.Tensor) and isinstance(y.grad_fn, BackwardCFunction):
            setattr(y.grad_fn, _ZEROS, zeros)
    return out


def zeros_later(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function that makes zeros like ``x``, and does not keep ``x`` alive."""
    shapes, dtype, device = [block.shape for block in blocks_of(x)], x.dtype, x.device
    frame = held_frame(x)

    def make() -> torch.Tensor:
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        return zeros[0] if frame is None else local_tensor(zeros, frame)

    return make


def _completed(gradients: Any, zeros: list[Callable[[], torch.Tensor] | None]) -> Any:
    """Return the gradients of a Function with zeros in place of None, for arguments that have a gradient."""
    row = gradients if isinstance(gradients, tuple) else (gradients,)
    if len(zeros) != len(row):
        return gradients
    return tuple(make() if g is None and make is not None else g for g, make in zip(row, zeros, strict=True))


def _bind_body(out: Any, args: tuple[Any, ...], body: Body, tracker: Tracker | None) -> Any:
    """Let the backward of a Function with outputs ``out`` run in the body, with their types, and zeros for None."""
    _bind_zeros(out, args)
    outs = [y for y in (out if isinstance(out, tuple) else (out,)) if isinstance(y, torch.Tensor)]
    bodies = body, None if tracker is None else tracker.body
    while outs:
        types = {y.output_nr: get_variance(y) for y in outs}
        for y in outs:
            node = y.grad_fn
            if isinstance(node, BackwardCFunction):
                setattr(node, _BODY, bodies)
                setattr(node, OUTPUT_TYPES, types)
                if not hasattr(node, _ZEROS):
                    setattr(node, _ZEROS, [])
        outs = [wrapped_by(y) for y in outs if level_of(y) != NO_LEVEL]  # each transform has a graph of its own
    return out


def _wrap_backward() -> None:
    original = BackwardCFunction.apply

    def apply(self: Any, *args: Any) -> Any:
        zeros = getattr(self, _ZEROS, None)
        if zeros is None:  # made outside of bodies and of `completing`
            return original(self, *args)
        bodies: tuple[Body, Body | None] | None = getattr(self, _BODY, None)
        if bodies is None:
            return _completed(original(self, *args), zeros)

        def completed(*args: Any) -> Any:
            return _completed(original(self, *args), zeros)

        if bodies[1] is None:
            return run_in(bodies[0], mode_for(*bodies), completed, *args)
        types = getattr(self, OUTPUT_TYPES)
        for i, gradient in enumerate(args):
            if gradient is not None:
                set_variance(gradient, types.get(i, INVARIANT).dual)
        return run_in(bodies[0], mode_for(*bodies), completed, *args)

    BackwardCFunction.apply = apply  # type: ignore[method-assign]


def _wrap_saved() -> None:
    save: Any = FunctionCtx.save_for_backward
    saved: Any = inspect.getattr_static(BackwardCFunction, "saved_tensors")

    def save_for_backward(self: Any, *tensors: Any) -> None:
        if state.tracker is not None:
            setattr(self, _SAVED, [getattr(x, ATTRIBUTE, None) for x in tensors])
        save(self, *tensors)

    def saved_tensors(self: Any) -> Any:
        tensors = saved.__get__(self)
        for x, variance in zip(tensors, getattr(self, _SAVED, ()), strict=False):
            if variance is not None and x is not None and getattr(x, ATTRIBUTE, None) is None:
                set_variance(x, variance)
        return tensors

    FunctionCtx.save_for_backward = save_for_backward  # type: ignore[method-assign]
    BackwardCFunction.saved_tensors = property(saved_tensors)  # type: ignore[assignment]


def _wrap_vmap_exit() -> None:
    original = getattr(*LEAVES_VMAP)

    def remove_batch_dim(batched: torch.Tensor, *args: Any) -> torch.Tensor:
        out: torch.Tensor = original(batched, *args)
        return out if state.tracker is None else set_variance(out, get_variance(batched))

    replace_everywhere(*LEAVES_VMAP, remove_batch_dim)


def _wrap_derivatives() -> None:
    original = getattr(*ENTERS_DERIVATIVE)

    def wrap(x: Any, level: int) -> Any:
        if state.body is not None and state.body.mapped:
            with pop_transform():  # the transform does not see the cast
                x = own(x)
        return original(x, level)

    setattr(*ENTERS_DERIVATIVE, wrap)


def _wrap_recomputation() -> None:
    original = getattr(*RECOMPUTES)

    def generator(fn: Any, *args_before: Any, **kwargs: Any) -> Any:
        if transforms_active() and (has_recompute_context() or Sharded in map(type, _inputs(args_before))):
            return iter((None,))  # torch.func keeps the tensors that it needs itself, as in `fspmd.checkpoint`
        body, tracker = state.body, state.tracker  # `run_in` also runs without a body, for bodies within the function
        types = [get_variance(x) if isinstance(x, torch.Tensor) else None for x in _inputs(args_before)]
        later = recompute_context()

        def again_in_body(*args: Any, **kw: Any) -> Any:
            if tracker is not None:
                for x, variance in zip(args, types[len(types) - len(args) :], strict=True):
                    if variance is not None:
                        set_variance(x, variance)
            mode = mode_for(body, None if tracker is None else tracker.body)

            def recomputed() -> Any:
                with later(), recomputing(), forgetting(casts=False):
                    return fn(*(x.value if type(x) is _KeptArgument else x for x in args), **kw)

            return run_in(body, mode, recomputed)

        run = again_in_body if recorder() is None else _drawing_alike(again_in_body)
        return _forgetting(original(run, *_keep_sharded(args_before), **kwargs))

    setattr(*RECOMPUTES, generator)


class _KeptArgument:
    """A `Sharded` argument of a recomputation. Torch would save its shell, without the block."""

    __slots__ = ("value",)

    def __init__(self, value: Sharded) -> None:
        self.value = value


def _keep_sharded(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        _KeptArgument(x) if type(x) is Sharded else _keep_sharded(x) if type(x) is tuple and i == 0 else x
        for i, x in enumerate(args)
    )


def _forgetting(steps: Iterator[None]) -> Iterator[None]:
    """Run torch's steps around a checkpointed function. Forward and recomputation must find the same moves."""
    with forgetting(casts=False):
        yield from steps


def _inputs(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of a checkpointed function. Some versions of torch pass them as a tuple."""
    return args[0] if type(args[0]) is tuple else args


def _drawing_alike(f: Any) -> Any:
    """Return ``f`` with the random numbers that would be drawn now. A recording does not see how torch ensures this."""
    drawn = kept_states()

    def run(*args: Any, **kwargs: Any) -> Any:
        now = kept_states()
        go_on(drawn)
        try:
            return f(*args, **kwargs)
        finally:
            go_on(now)

    return run


def _wrap_script() -> None:
    """Let a tracker see a TorchScript function as one torch call, without the parameters of its module as operands."""

    def wrap(kind: Any) -> None:
        original = kind.__call__

        def script(self: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, *args, **kwargs)

        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            tracker = state.tracker
            if tracker is None or not is_active(tracker):
                return original(self, *args, **kwargs)
            if isinstance(self, ScriptMethod) and torch.is_grad_enabled():
                _check_frozen(self, (*args, *kwargs.values()))
            return tracker.__torch_function__(script, (), (self, *args), kwargs)

        kind.__call__ = run

    wrap(torch.jit.ScriptFunction)
    wrap(ScriptMethod)


def _wrap_unseen() -> None:
    """Let a tracker see functions that torch shows to no mode."""

    def wrap(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            tracker = state.tracker
            is_seen = tracker is not None and is_active(tracker)
            if name in _TAKE_NO_SHARDED:
                _check_not_sharded(name, args)
            if name in OF_TENSORS:
                check_storages(name, (*args, *kwargs.values()), is_seen)
            return tracker.__torch_function__(original, (), args, kwargs) if is_seen else original(*args, **kwargs)

        name = original.__name__

        functools.update_wrapper(run, original)
        if getattr(original, "__module__", None) is None:  # of methods in C
            run.__module__ = "torch"
        return run

    wrap = functools.cache(wrap)  # one function may have several owners
    for owner, name in UNSEEN:
        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        wrapper = wrap(getattr(owner, name))
        setattr(owner, name, staticmethod(wrapper) if is_static else wrapper)


_TAKE_NO_SHARDED = {
    make_subclass.__name__: "a subclass of torch.Tensor, such as the ExpandedWeight of per-sample gradients; write "
    "fspmd.vmap(fspmd.grad(loss), in_dims=(None, 0))(params, batch) for gradients of each sample, or give it",
    **dict.fromkeys(
        ("nested_tensor", "as_nested_tensor"),
        "a nested tensor, which has no layout on a mesh; pad the tensors, torch.nn.utils.rnn.pad_sequence([x, y]), or "
        "give it",
    ),
}


def _check_not_sharded(name: str, args: tuple[Any, ...]) -> None:
    """Raise `ArgumentError` for a Sharded of which torch would make a tensor of another kind, of its shell."""
    given = [x for arg in args for x in (arg if type(arg) in (list, tuple) else (arg,))]
    if (x := next((x for x in given if type(x) is Sharded), None)) is not None:
        raise ArgumentError(f"{name}() of {x!r} would make {_TAKE_NO_SHARDED[name]} device_get(x)")


def _check_frozen(method: Any, operands: Any) -> None:
    module: Any = wrap_script_module(method.owner)
    varying = next((x for x in tensors_in(operands) if get_variance(x) is not INVARIANT), None)
    if varying is not None and any(p.requires_grad for p in module.parameters()):
        raise VarianceError(
            f"a TorchScript module was called with {show(varying)}: its parameters would get the gradient of one "
            "rank alone, since types are not tracked in TorchScript; call the Python module, or freeze its parameters"
        )


def _wrap_tracers() -> None:
    """Refuse a Sharded in torch's tracers. They would trace its shell, and its blocks would become constants."""

    def wrap(original: Any) -> Any:
        def trace(*args: Any, **kwargs: Any) -> Any:
            leaves: Any = optree.tree_leaves((args, kwargs), none_is_leaf=True)
            if (x := next((x for x in leaves if type(x) is Sharded), None)) is not None:
                raise untraceable(x)
            with jit_trace():
                return original(*args, **kwargs)

        return trace

    for owner, name in JIT_TRACERS:
        setattr(owner, name, wrap(getattr(owner, name)))


def _wrap_masked() -> None:
    """Refuse a Sharded in a MaskedTensor, which calls torch below autograd: functions of it would lose gradients."""
    original = torch.masked.MaskedTensor.__new__

    def new(cls: Any, data: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        if Sharded in (type(data), type(mask)):
            raise ArgumentError(
                f"MaskedTensor got {data!r} with the mask {mask!r}; write torch.where(mask, x, 0.0), or the functions "
                "of torch.masked that take a mask: torch.masked.sum(x, mask=mask), torch.masked.softmax(x, -1, "
                "mask=mask)"
            )
        return original(cls, data, mask, *args, **kwargs)

    setattr(torch.masked.MaskedTensor, "__new__", staticmethod(new))  # noqa: B010 (its class is typed as it was)


def _wrap_compile() -> None:
    """A function of torch's own that it compiles to call it at once runs as it is on a `Sharded`, and is refused."""
    original = torch.compile

    @functools.wraps(original)
    def compile(model: Any = None, **options: Any) -> Any:
        compiled = original(model, **options)
        if state.mode is not None and DYNAMO in modules:  # the body may have begun before its import
            be_eager_in_bodies()
        if not getattr(model, "__module__", "").startswith(MODULES_THAT_COMPILE):
            return compiled

        def run(*args: Any, **kwargs: Any) -> Any:
            leaves: Any = optree.tree_leaves((args, kwargs), none_is_leaf=True)
            return (model if Sharded in map(type, leaves) else compiled)(*args, **kwargs)

        return run

    replace_everywhere(torch, "compile", compile)


def _hand_on_weight() -> None:
    """Replace the code of ``F.l1_loss``. The function stays the same object, with the source that TorchScript reads."""
    names, code = vars(F), F.l1_loss.__code__
    if "_fspmd_l1_loss" in names:  # another copy of this module has done it
        return
    names["_fspmd_l1_loss"] = FunctionType(code, names, "l1_loss", F.l1_loss.__defaults__)
    F.l1_loss.__code__ = _l1_loss.__code__.replace(co_filename=code.co_filename, co_firstlineno=code.co_firstlineno)


def _l1_loss(
    input: Any,
    target: Any,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    weight: Any = None,
) -> Any:
    """Pass ``weight`` to a mode, too. The code runs with the globals of ``torch.nn.functional``."""
    if weight is not None and has_torch_function_variadic(input, target, weight):
        options = {"size_average": size_average, "reduce": reduce, "reduction": reduction, "weight": weight}
        operands = input, target, weight
        return handle_torch_function(torch.nn.functional.l1_loss, operands, input, target, **options)
    plain = globals()["_fspmd_l1_loss"]
    return plain(input, target, size_average, reduce, reduction, weight)
