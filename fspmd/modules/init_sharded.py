"""`init_sharded`: the parameters and buffers of a module. Each rank makes only its own blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, nn

from fspmd.body import the_mesh
from fspmd.errors import ArgumentError
from fspmd.meshes.mesh import Mesh
from fspmd.messages import described
from fspmd.modules.constructor_record import InitRecorder, Ref, ref_of
from fspmd.modules.constructor_replay import Replay
from fspmd.modules.plans import make_plan
from fspmd.modules.styles import Style
from fspmd.placement.device_put import device_get, device_put
from fspmd.sharded import Sharded
from fspmd.spec import P

Specs = P | Mapping[str, P | Style] | Callable[[str, tuple[int, ...]], P]
Named = dict[str, Sharded]


def init_sharded(
    module_fn: Callable[[], nn.Module], specs: Specs, *, mesh: Mesh | None = None, axis: str | None = None
) -> tuple[nn.Module, Named, Named]:
    """A module, its parameters and its buffers, each made in its layout: ``(module, params, buffers)``.

    ``module_fn`` runs once on the meta device, where tensors have no memory. The tensors pretend to be on the device of
    the mesh, because libraries initialise nothing on the meta device. Calls on them (``torch.empty`` and the like,
    ``nn.init``, ``reset_parameters``, a library's own ``init_weights``, arithmetic) are recorded. Then they run on
    `Sharded` values, for the tensors that became a parameter or a buffer.

    No rank holds the whole of a cut parameter, except for a moment one that ``orthogonal_``, ``dirac_`` or ``sparse_``
    fills. Nothing moves if the constructor fills its tensors without reading their values, as the modules of torch do.

    Random numbers are the same global values on any mesh and under any specs, after one ``torch.manual_seed`` on every
    rank. They are not the numbers that the module would draw itself.

    Args:
        module_fn: Makes the module and all its tensors: ``lambda: Transformer(config)``.
        specs: A P for all tensors of one dim and more. Or a dict from globs on names to a P or a style, as in
            `parallelize`: the last match decides, and a tensor without a match is replicated. Or a function of name and
            shape that returns a P.
        mesh: By default the current mesh.
        axis: The axis of styles that name none.

    Returns:
        The module on the meta device, for `functional_call`, and two flat dicts by qualified name. A parameter requires
        grad if it does in the module. `parallelize` of them with the same styles moves nothing, and returns the plan.

    Raises:
        ArgumentError: ``module_fn`` returns no module; the module has tensors on the meta device that ``module_fn`` did
            not make, or put there itself; or ``module_fn`` asks for the values of random tensors.
        TreeError, SpecError: a pattern matches nothing, or a spec does not fit.

    >>> import torch
    >>> from fspmd import functional_call, make_mesh
    >>> module, params, buffers = init_sharded(lambda: nn.Linear(6, 8), P("x"), mesh=make_mesh((4,), ("x",)))
    >>> params
    {'weight': Sharded f32[8@x, 6] on mesh(x=4), 'bias': Sharded f32[8@x] on mesh(x=4)}
    >>> functional_call(module, (params, buffers), torch.ones(3, 6))
    Sharded f32[3, 8@x] on mesh(x=4)
    """
    mesh = the_mesh(mesh, "init_sharded")
    if not callable(module_fn) or isinstance(module_fn, nn.Module):
        raise ArgumentError(
            f"init_sharded got {described(module_fn)} for module_fn; give it a function that makes the module: "
            "lambda: Transformer(config)"
        )
    tape = InitRecorder(mesh.device)
    tape.value_of = lambda ref: _known_value(tape, ref, mesh)
    with tape:
        module = module_fn()
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"init_sharded: module_fn returned {described(module)}; return the module")
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    shapes = {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()}
    layouts = make_plan(shapes, _as_styles(specs, shapes), mesh, axis or mesh.axis_names[-1], "init_sharded").specs
    refs = {name: ref_of(x) for name, x in tensors.items() if x.is_meta}
    replay = Replay(tape, {ref: layouts[name] for name, ref in refs.items()}, mesh)
    _check_made(tape, refs)
    replay.run()
    placed: Named = {}
    for name, x in tensors.items():
        value = replay.value(refs[name]) if name in refs else x.detach()
        placed[name] = device_put(value, layouts[name], mesh=mesh).requires_grad_(x.requires_grad)
    parameters = dict(module.named_parameters())
    tape.give_back()
    module.to("meta")
    return module, {k: placed[k] for k in parameters}, {k: x for k, x in placed.items() if k not in parameters}


def _check_made(tape: InitRecorder, refs: Mapping[str, Ref]) -> None:
    """Check that the tape has the making of each tensor."""
    for name, ref in refs.items():
        if not tape.has(ref):
            raise ArgumentError(
                f"init_sharded: {name!r} is on the meta device, but module_fn did not make it; make all tensors of the "
                "module in module_fn"
            )
        if ref.storage in tape.meta_on_purpose:
            raise ArgumentError(
                f"init_sharded: module_fn itself puts {name!r} on the meta device, where libraries initialise nothing; "
                "leave torch.device('meta') out: init_sharded gives no tensor memory before it is laid out"
            )


def _known_value(tape: InitRecorder, ref: Ref, mesh: Mesh) -> Tensor | None:
    """The value of a tensor that Python reads; None if it is random or unknown."""
    replay = Replay(tape, {ref: P()}, mesh)
    return None if replay.draws or not tape.has(ref) else cast(Tensor, device_get(replay.run().value(ref)))


def _as_styles(specs: Any, shapes: Mapping[str, Any]) -> dict[str, Style]:
    """``specs`` in any of its forms, as styles by pattern."""
    if isinstance(specs, P):
        return {} if not shapes else {"": Style(weight=specs, vector=specs)}
    if isinstance(specs, Mapping):
        return {key: Style(weight=x, vector=x) if isinstance(x, P) else x for key, x in specs.items()}
    if not callable(specs):
        raise ArgumentError(
            f"init_sharded got {described(specs)} for specs; write P('x'), {{'layers.*.wq': P('x')}}, or a function of "
            "a name and a shape"
        )
    return {name: Style(specs={"": specs(name, shape)}) for name, (shape, _) in shapes.items()}
