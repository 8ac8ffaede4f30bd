"""New values on a mesh: torch's values, whatever the layout; random ones the same under every layout."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from processes import Processes
from simulated import layouts
from torch import Tensor

import fspmd
from fspmd import ArgumentError, MeshError, P, Sharded, SpecError, device_get, make_mesh, set_mesh
from fspmd.random.blocks import fill
from fspmd.random.counter import Block
from fspmd.transport.frame import frame_over
from fspmd.transport.local_tensor import shards_of

MESHES = [
    make_mesh(shape, ("x", "y", "z")[: len(shape)], transport="simulation") for shape in ((1,), (4,), (2, 3), (2, 2, 2))
]
LINE = MESHES[1]
SAME: dict[str, tuple[Any, ...]] = {
    "zeros": (5, 3),
    "ones": ((5, 3),),
    "full": ((5, 3), 2.5),
    "eye": (5, 3),
}
COUNTED: list[tuple[Any, ...]] = [(7,), (2, 12), (1, 10, 3), (10, 0, -2), (0, 1, 0.1), (5.0,), (2, 2)]
RANDOM: dict[str, Callable[..., Sharded]] = {
    "rand": lambda **o: fspmd.rand(5, 6, **o),
    "rand f64": lambda **o: fspmd.rand((5, 6), dtype=torch.float64, **o),
    "randn": lambda **o: fspmd.randn(5, 3, **o),
    "randn of complex": lambda **o: fspmd.randn(5, 3, dtype=torch.complex64, **o),
    "normal": lambda **o: fspmd.normal(3.0, 0.5, (5, 3), **o),
    "randint": lambda **o: fspmd.randint(3, 100, (5, 3), **o),
    "randint of high": lambda **o: fspmd.randint(7, (5, 2, 3), dtype=torch.int32, **o),
}


def check_blocks(made: Sharded, whole: Tensor) -> None:
    """Every block is its part of the whole, and no larger in memory."""
    spec = made.spec
    assert (made.shape, made.dtype) == (tuple(whole.shape), whole.dtype)
    every = frame_over(spec.mesh, spec.mesh.axis_names)
    for coordinate, block in zip(every.coordinates(), shards_of(made.local, every), strict=True):
        where = zip(spec.offset(coordinate), spec.local_shape(coordinate), strict=True)
        expected = whole[tuple(slice(o, o + n) for o, n in where)]
        at = dict(zip(every.axes, coordinate, strict=True))
        if any(at[axis] for axis in spec.partition.unreduced):
            expected = torch.zeros_like(expected)
        assert torch.equal(block, expected)
        assert block.untyped_storage().nbytes() == block.numel() * block.element_size()


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", SAME)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_values_are_those_of_torch(name: str, mesh: fspmd.Mesh) -> None:
    for dtype in (None, torch.float64, torch.int32):
        whole = getattr(torch, name)(*SAME[name], dtype=dtype)
        for spec in layouts(mesh, 2):
            check_blocks(getattr(fspmd, name)(*SAME[name], spec=spec, mesh=mesh, dtype=dtype), whole)


@pytest.mark.one_of(4)
@pytest.mark.parametrize("bounds", COUNTED, ids=str)
def test_arange(bounds: tuple[Any, ...]) -> None:
    for mesh in MESHES:
        whole = torch.arange(*bounds)
        for spec in layouts(mesh, 1):
            made = fspmd.arange(*bounds, spec=spec, mesh=mesh)
            torch.testing.assert_close(device_get(made), whole, rtol=0 if whole.dtype == torch.int64 else 1e-6, atol=0)
            check_blocks(made, device_get(made))


def test_integers_of_fractions() -> None:
    for bounds in ((2, 9, 2.5), (0.5, 9.7, 2), (9.5, 0, -3)):
        found = fspmd.arange(*bounds, spec=P("x"), mesh=LINE, dtype=torch.int64)
        assert torch.equal(device_get(found), torch.arange(*bounds, dtype=torch.int64))


@pytest.mark.parametrize(("start", "end", "steps"), [(0, 1, 5), (-3.0, 7.5, 11), (5, -5, 4), (2, 3, 1), (0, 1, 0)])
def test_linspace(start: float, end: float, steps: int) -> None:
    for dtype in (torch.float64, torch.float32, torch.int64):
        for spec in layouts(LINE, 1):
            made = fspmd.linspace(start, end, steps, spec=spec, mesh=LINE, dtype=dtype)
            torch.testing.assert_close(device_get(made), torch.linspace(start, end, steps, dtype=dtype))


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", RANDOM)
def test_random_values_do_not_depend_on_mesh_or_spec(name: str) -> None:
    torch.manual_seed(3)
    whole = RANDOM[name](mesh=MESHES[0]).local
    after = torch.rand(())
    for mesh in MESHES:
        for spec in layouts(mesh, whole.dim()):
            torch.manual_seed(3)
            check_blocks(RANDOM[name](mesh=mesh, spec=spec), whole)
            assert torch.equal(torch.rand(()), after)  # the generator goes on alike


def test_two_draws_differ_and_a_generator_of_ones_own_is_used() -> None:
    assert not torch.equal(*(fspmd.rand(9, mesh=LINE).local for _ in range(2)))
    first, second = (fspmd.rand(9, mesh=LINE, generator=torch.Generator().manual_seed(5)).local for _ in range(2))
    assert torch.equal(first, second)


def test_empty_and_empty_blocks() -> None:
    made = fspmd.empty(5, 0, 2, spec=P("x"), mesh=LINE, dtype=torch.int8)
    assert (made.shape, made.dtype) == ((5, 0, 2), torch.int8)
    assert [
        tuple(s.shape) for s in shards_of(fspmd.rand(5, spec=P("x"), mesh=LINE).local, frame_over(LINE, ("x",)))
    ] == [
        (2,),
        (2,),
        (1,),
        (0,),
    ]


def test_a_random_permutation() -> None:
    for spec in layouts(LINE, 1):
        torch.manual_seed(1)
        made = device_get(fspmd.randperm(101, spec=spec, mesh=LINE))
        assert sorted(made.tolist()) == list(range(101))
        torch.manual_seed(1)
        assert torch.equal(made, fspmd.randperm(101, mesh=MESHES[0]).local)


def test_no_rank_makes_the_whole() -> None:
    sizes: list[int] = []

    def make(block: Block) -> Tensor:
        sizes.append(prod(block.shape))
        return torch.zeros(block.shape)

    fill(fspmd.TensorSpec(LINE, P(None, "x"), (3, 5), torch.float32), make, LINE.device)
    assert sizes == [6, 6, 3, 0]


def test_leaves_that_autograd_follows() -> None:
    w = fspmd.randn(5, 3, spec=P("x"), mesh=LINE, dtype=torch.float64, requires_grad=True)
    (w * w).sum().backward()
    assert w.grad is not None
    torch.testing.assert_close(device_get(w.grad), 2 * device_get(w.detach()))


def test_the_mesh_that_was_set() -> None:
    with set_mesh(LINE):
        assert fspmd.ones(4, spec=P("x")).spec.mesh == LINE


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: fspmd.zeros(3), MeshError, "zeros has no mesh; pass mesh"),
        (lambda: fspmd.zeros(3, spec=P("q"), mesh=LINE), SpecError, "zeros: a tensor of shape .3,.: .* names the axis"),
        (lambda: fspmd.ones(3, spec=P("x", None), mesh=LINE), SpecError, "has 2 entries"),
        (lambda: fspmd.ones(3, spec="x", mesh=LINE), SpecError, "expected a P"),
        (lambda: fspmd.zeros(-1, mesh=LINE), ArgumentError, r"zeros\(-1\) fails as torch.zeros does"),
        (lambda: fspmd.arange(1, 5, 0, mesh=LINE), ArgumentError, "arange"),
        (lambda: fspmd.randint(5, 5, (2,), mesh=LINE), ArgumentError, "randint"),
        (lambda: fspmd.rand(3, mesh=LINE, dtype=torch.int64), ArgumentError, "torch.int64"),
        (lambda: fspmd.rand(3, mesh=LINE, device="cuda"), ArgumentError, "has cpu devices; leave device out"),
        (lambda: fspmd.rand(3, mesh=LINE, out=None), ArgumentError, "rand got out="),
        (lambda: fspmd.zeros(3, mesh=LINE, generator=None), ArgumentError, "zeros got generator="),
        (lambda: fspmd.normal(0.0, -1.0, (3,), mesh=LINE), ArgumentError, "std not below 0"),
    ],
)
def test_mistakes(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def on_processes() -> list[Tensor]:
    """On every rank: the whole of each random value, under several specs."""
    mesh = make_mesh((2, 2), ("x", "y"))
    found = []
    for make in RANDOM.values():
        for spec in (P("x"), P(None, ("y", "x")), P("y", "x"), P(unreduced={"x"})):
            torch.manual_seed(3)
            found.append(device_get(make(mesh=mesh, spec=spec)))
    return [*found, device_get(fspmd.eye(5, 7, spec=P("x", "y"), mesh=mesh))]


def test_on_processes() -> None:
    with Processes(4) as pool:
        results = pool.run(on_processes)
    expected = []
    for make in RANDOM.values():
        torch.manual_seed(3)
        expected += [make(mesh=MESHES[0]).local] * 4
    for rank in results:
        assert all(torch.equal(a, b) for a, b in zip(rank, [*expected, torch.eye(5, 7)], strict=True))
