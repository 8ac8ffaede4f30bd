"""`stride`, `is_contiguous` and `storage_offset` tell what torch tells of the global tensor after the same calls."""

from __future__ import annotations

import copy
import itertools
import operator
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from full import FULL
from torch import Tensor

from fspmd import FspmdError, P, device_get, device_put, jit, make_mesh, reshard, stop_gradient, vjp

MESH = make_mesh((2, 2), ("x", "y"))
CHAINS = 400 if FULL else 24
LAST = torch.channels_last
CALLS: list[Callable[..., Any]] = [
    lambda x: x.transpose(0, -1),
    lambda x: x.permute(*reversed(range(x.dim()))),
    lambda x: x.movedim(0, -1),
    lambda x: x.mT,
    lambda x: x.unsqueeze(0),
    lambda x: x.unsqueeze(-1),
    lambda x: x.unsqueeze(1).expand(-1, 3, *x.shape[1:]),
    lambda x: x[1:],
    lambda x: x[0],
    lambda x: x[..., ::2],
    lambda x: x[..., -1],
    lambda x: x[None, 1:, None],
    lambda x: x.narrow(0, 1, 1),
    lambda x: x.chunk(2, -1)[1],
    lambda x: x.unbind(0)[-1],
    lambda x: x.split(1)[1],
    lambda x: x.diagonal(0, 0, -1),
    lambda x: x.unfold(0, 2, 1),
    lambda x: x.squeeze(),
    lambda x: x.view(-1),
    lambda x: x.view(1, *x.shape),
    lambda x: x.view(torch.int32),
    lambda x: x.reshape(-1),
    lambda x: x.reshape(x.shape[0], -1),
    lambda x: x.flatten(0, 1),
    lambda x: x.unflatten(-1, (x.shape[-1], 1)),
    lambda x: x.contiguous(),
    lambda x: x.contiguous(memory_format=LAST),
    lambda x: x.to(memory_format=LAST),
    lambda x: x.clone(),
    lambda x: x.clone(memory_format=torch.contiguous_format),
    lambda x: x.detach(),
    lambda x: x.double(),
    torch.zeros_like,
    torch.rand_like,
    lambda x: x.new_zeros(3, 2),
    lambda x: x.new_empty_strided((2, 3), (1, 2)),
    lambda x: x * 2.5,
    torch.relu,
    lambda x: torch.where(x > 0, x, 0.0),
    lambda x: x.masked_fill(x > 0, 1.0),
    F.dropout,
    lambda x: x.softmax(-1),
    lambda x: x.sum(0),
    lambda x: x.mean(-1, keepdim=True),
    lambda x: x.max(-1).values,
    lambda x: x.std(0),
    lambda x: x.cumsum(0),
    lambda x: x.sort(-1).indices,
    lambda x: x.topk(1, 0).values,
    lambda x: x.flip(0),
    lambda x: x.roll(1, 0),
    lambda x: x.repeat(*[2] * x.dim()),
    lambda x: F.pad(x, (1, 1)),
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: F.normalize(x, dim=-1),
    lambda x: x[torch.tensor([0, 1])],
    lambda x: x.index_select(0, torch.tensor([0, 0])),
    lambda x: x[torch.ones_like(x).bool()],
    lambda x: torch.ones_like(x).nonzero(),
    lambda x: torch.stack([x, x], -1),
    lambda x: x @ x.mT,
    lambda x: F.linear(x, torch.ones(x.shape[-1], 5).t()),
    lambda x: torch.outer(x, x),
    lambda x: F.conv2d(x, torch.ones(2, x.shape[1], 1, 1)),
    lambda x: x.dim_order(),
]
PAIRS: list[Callable[..., Any]] = [
    lambda x, y: x + y,
    torch.maximum,
    lambda x, y: torch.addcmul(x, y, y),
    lambda x, y: x - y.transpose(0, -1),
    lambda x, y: x @ y.mT,
    lambda x, y: torch.cat([x, y]),
]


def _lies(x: Any) -> Any:
    """What a tensor tells; the stride of a dim of one element is anything, and of an empty tensor all are."""
    if not isinstance(x, Tensor):
        return x
    formats = [torch.contiguous_format] + [LAST] * (x.dim() == 4 and 1 not in x.shape)
    strides = [0 if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True)] if x.numel() else []
    return tuple(x.shape), strides, x.storage_offset(), [x.is_contiguous(memory_format=one) for one in formats]


#: of which torch lays results out otherwise on a GPU, or without data
BY_DEVICE: list[Callable[..., Any]] = [
    lambda x: torch.linalg.svd(x).Vh,
    lambda x: torch.svd_lowrank(x, 2)[2],
    lambda x: torch.linalg.eig(x[:4, :4, :4]).eigenvectors,
    lambda x: torch.nonzero_static(x, size=3),
    lambda x: F.pixel_shuffle(x[None, :4].to(memory_format=LAST), 2),
    *(getattr(torch.fft, f"{name}fft{n}") for name in ("", "i", "r", "ir", "h", "ih") for n in ("", "2", "n")),
    lambda x: torch.fft.irfft2(x, dim=(0, 2)),
    lambda x: F.pad(x[None].to(memory_format=LAST), (1, 1, 1, 1), mode="reflect"),
    lambda x: F.batch_norm(x, torch.zeros(x.shape[1]), torch.ones(x.shape[1])),
    lambda x: F.batch_norm(x[None], None, None, torch.ones(x.shape[0]), training=True),
    lambda x: F.group_norm(x[None].to(memory_format=LAST), 1),
    *(lambda x, n=n: F.channel_shuffle(x[None].to(memory_format=LAST), x.shape[0] ** n) for n in (0, 1)),
    lambda x: F.channel_shuffle(x[None, :3].to(memory_format=LAST), 3),
    lambda x: torch.fft.fftshift(x[None].to(memory_format=LAST)),
    *(lambda x, n=n: F.one_hot(x.long().abs(), n) for n in (7, 8)),  # a key does not hold the number of classes
    lambda x: F.batch_norm(x[None].to(memory_format=LAST)[:, 1:], None, None, training=True),
    lambda x: F.group_norm(x[None].to(memory_format=LAST)[..., ::2], 1),
    lambda x: F.group_norm(x[:2, :2, :1].unsqueeze(2), 1),
    lambda x: x[..., :1] + torch.ones(1, x.shape[1], 1).permute(2, 1, 0),
    lambda x: torch.normal(x, x.abs()),
    lambda x: torch.normal(x.contiguous(), x.abs()),
    lambda x: torch.normal(x, 1.0),
    lambda x: F.one_hot(x.long().abs(), 9),
    lambda x: torch.poisson(x.abs()),
    lambda x: F.rrelu(x, training=True),
]
if torch.__version__ >= "2.13":  # before, the kernels choose by sizes
    BY_DEVICE.append(lambda x: torch.fft.fftn(x, dim=(2, 0, 1)))


def _partition(draw: random.Random, ndim: int) -> P:
    entries: list[str | None] = [None] * ndim
    for axis in ("x", "y"):
        free = [d for d in range(ndim) if entries[d] is None]
        if free and draw.random() < 0.6:
            entries[draw.choice(free)] = axis
    return P(*entries)


@pytest.mark.parametrize("seed", range(CHAINS))
def test_chains_of_calls(seed: int) -> None:
    """Of calls on a Sharded, and on the plain tensor; views that torch refuses are refused."""
    draw = random.Random(seed)
    shape = [draw.choice((1, 2, 3, 4)) for _ in range(draw.randint(1, 4))]
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    pool: list[tuple[Tensor, Tensor]] = [(whole, device_put(whole, _partition(draw, len(shape)), mesh=MESH))]
    compared = 0
    while compared < 8:
        pairs = draw.random() < 0.25
        call = draw.choice(PAIRS if pairs else CALLS)
        operands = [draw.choice(pool[-3:]) for _ in range(1 + pairs)]
        try:
            expected = call(*[x for x, _ in operands])
        except (RuntimeError, IndexError, ValueError):
            expected = None
        if expected is None or (isinstance(expected, Tensor) and not 0 < expected.numel() < 3000):
            if "incompatible" in str(expected):
                with pytest.raises(FspmdError):
                    call(*[x for _, x in operands])
            continue
        found = call(*[x for _, x in operands])
        compared += 1
        assert _lies(found) == _lies(expected)
        if isinstance(found, Tensor) and found.dtype is torch.float32:
            pool.append((_as_new(expected), found))


def _as_new(x: Tensor) -> Tensor:
    """With the strides of a new tensor, if only those of dims of one element are others, which nobody follows."""
    new = torch.empty(x.shape, device="meta").stride()
    alike = all(n == 1 or step == other for n, step, other in zip(x.shape, x.stride(), new, strict=True))
    return x.as_strided(x.shape, new) if alike else x


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads_first", [True, False])
def test_attention_lies_as_the_kernel_of_the_device_lays_it(heads_first: bool, dtype: torch.dtype) -> None:
    """The meta device has another kernel. A reshape of heads that torch views is a view, and copies nothing."""
    whole = torch.randn((2, 4, 3, 8) if heads_first else (2, 3, 4, 8)).to(dtype)
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    for given, follows in itertools.product(({}, {"is_causal": True}, {"attn_mask": mask}), (False, True)):
        outs = []
        for x in (whole.clone(), device_put(whole, P("x"), mesh=MESH)):
            leaf = x.requires_grad_(follows)
            heads = leaf if heads_first else leaf.transpose(1, 2)
            out = F.scaled_dot_product_attention(heads, heads, heads, **given)
            outs.append((_lies(out), _lies(out.transpose(1, 2).flatten(2))))
        assert outs[0] == outs[1], (given, follows)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_calls_that_depend_on_the_device(order: tuple[int, ...]) -> None:
    whole = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))
    x = device_put(whole, P("x", None, "y"), mesh=MESH)
    for call in BY_DEVICE:
        assert _lies(call(x.permute(order))) == _lies(call(whole.permute(order)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("size", [1, 3])
def test_convolutions_take_the_format_of_images_or_weights(groups: int, size: int, dtype: torch.dtype) -> None:
    """Also where one channel or one pixel makes the strides of two formats those of contiguous memory."""
    images, weights = torch.randn(3, 4, 5, 5).to(dtype), torch.randn(4, 4 // groups, size, size).to(dtype)
    x = device_put(images, P("x"), mesh=MESH)
    for lie_x, lie_w in itertools.product((torch.contiguous_format, LAST), repeat=2):
        whole, w = images.to(memory_format=lie_x), weights.to(memory_format=lie_w)
        laid = device_put(weights, P(), mesh=MESH).to(memory_format=lie_w)
        for call in (F.conv2d, F.conv_transpose2d, F.conv1d):
            expected, *found = [
                call(a, b, groups=groups) if call is not F.conv1d else call(a[..., 0], b[..., 0], groups=groups)
                for a, b in ((whole, w), (x.to(memory_format=lie_x), w), (x.to(memory_format=lie_x), laid))
            ]
            for one in found:
                assert _lies(one) == _lies(expected), (call, lie_x, lie_w)


@pytest.mark.parametrize("shape", [(4, 4, 1, 1), (4, 1, 4, 4)])
def test_convolutions_after_functions_of_elements(shape: tuple[int, ...]) -> None:
    """Where only the strides of dims of size 1 tell the format of images, functions of elements keep these strides."""
    whole, w = torch.randn(shape), torch.randn(2, *shape[1:])
    for lie in (torch.contiguous_format, LAST):
        x, y = device_put(whole, P(), mesh=MESH).to(memory_format=lie), whole.to(memory_format=lie)
        for call in (torch.clone, torch.exp, lambda x: x + x, lambda x: x + x.mT.mT.clone()):
            assert call(x).stride() == call(y).stride()
            assert _lies(F.conv2d(call(x), w, padding=1)) == _lies(F.conv2d(call(y), w, padding=1))


def test_results_whose_shape_depends_on_values() -> None:
    """Views of a new tensor too, and of operands that repeat elements."""
    whole = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0))
    x = device_put(whole, P("x"), mesh=MESH)
    mask = torch.tensor([True, False, True])
    for call in (
        lambda x: torch.where(x > 0)[1],
        lambda x: (x > 0).nonzero(as_tuple=True)[2],
        lambda x: x[:1].expand(3, 2, 3).nonzero(),
        *(lambda x, at=at: x[at].nonzero() for at in (slice(1, 4), slice(None, None, 2), (..., slice(2)))),
        lambda x: x[:, :, 1:].mT[:, ::2].argwhere(),
        lambda x: x.mT[:, ::2][:, mask[:2]],
        lambda x: x[:, 1:].unique(dim=0),
        lambda x: x[:1].expand(3, 2, 3)[mask],
        lambda x: x.mT[:, mask],
        lambda x: x.unique(return_counts=True)[1],
    ):
        assert _lies(call(x)) == _lies(call(whole))


def test_functions_whose_kernels_without_data_lay_results_out_otherwise() -> None:
    pairs: list[Callable[..., Any]] = [
        *(torch.copysign, torch.floor_divide, torch.xlogy, torch.special.xlog1py, torch.logaddexp, torch.logical_and),
        *(torch.heaviside, torch.logical_xor, torch.rsub, torch.ldexp, torch.fmod),
        lambda x, y: torch.addcmul(x, y, y),
        lambda x, y: torch.where(y > 0, x, y),
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
    ]
    whole = torch.rand(4, 5, 6, generator=torch.Generator().manual_seed(0)) + 1
    x = device_put(whole, P("x", None, "y"), mesh=MESH)
    others = [torch.ones(6, 5, 4), torch.ones(5, 6, 4).transpose(0, 1), torch.ones(4), torch.ones(1, 5, 1)]
    for call, other, swapped in itertools.product(pairs, others, (False, True)):
        operands = [(one.permute(2, 1, 0), other)[:: -1 if swapped else 1] for one in (x, whole)]
        found, expected = [call(*each) for each in operands]
        assert _lies(found) == _lies(expected), (call, tuple(other.shape), swapped)


def _value() -> tuple[Tensor, Any]:
    whole = torch.arange(24.0).view(4, 6)
    return whole, device_put(whole, P("x", "y"), mesh=MESH)


def test_views_of_what_is_not_contiguous() -> None:
    whole, x = _value()
    with pytest.raises(FspmdError, match=r"view\(\) .* Use .reshape"):
        x.t().view(-1)
    assert torch.equal(device_get(x.t().contiguous().view(-1)), whole.t().reshape(-1))
    part = x.t().as_strided((2, 3), (2, 5))
    assert torch.equal(device_get(part), whole.t().as_strided((2, 3), (2, 5)))
    with pytest.raises(FspmdError, match="reaches beyond its 6 elements"):
        x[1:2].as_strided((2, 2), (1, 6))
    with pytest.raises(FspmdError, match="a part of a larger memory"):
        x[:, ::2].as_strided((2,), (1,))


def test_values_that_are_kept_or_moved() -> None:
    """Copies, pickles, other layouts, attributes and writes that change the shape."""
    whole, x = _value()
    for make in (copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: x.data, lambda x: +x):
        assert _lies(make(x.t())) == _lies(make(whole.t()))
    assert _lies(reshard(x[1:].t(), P("y"))) == _lies(whole[1:].t())
    assert _lies(x.clone().t_()) == _lies(whole.t())
    one, other = x.clone(), whole.clone()
    one.data, other.data = x.t().contiguous().t(), whole.t().contiguous().t()
    assert _lies(one) == _lies(other)


def test_gradients() -> None:
    """That of a leaf lies as the leaf; of others only the formulas know, which are not followed."""
    whole, x = _value()
    for like in (lambda x: x, lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[:1].expand(4, 6)):
        leaves = [like(one).detach().requires_grad_() for one in (whole, x)]
        for leaf in leaves:
            (leaf.t() * 2).sum().backward()
        assert _lies(leaves[1].grad) == _lies(leaves[0].grad)
    (gradient,) = torch.autograd.grad((leaves[1] ** 2).sum(), leaves[1])
    with pytest.raises(FspmdError, match=r"stride\(\) of Sharded .* write x = x.contiguous\(\)"):
        (gradient * 2).stride()
    assert (gradient * 2).contiguous().stride() == (6, 1)


def test_jit() -> None:
    """Records know how arguments lie, and results."""
    whole, x = _value()

    @jit
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 2 if x.is_contiguous() else x * 3), x.t()[1:]

    for _ in range(2):
        for like in (lambda x: x, lambda x: x.t()):
            for found, expected in zip(f(like(x)), f(like(whole)), strict=True):
                assert _lies(found) == _lies(expected)
                assert torch.equal(device_get(found), expected)
    with pytest.raises(FspmdError, match="storage_offset"):
        f(x[1:])[1].storage_offset()


@pytest.mark.parametrize("partition", [P(), P("x"), P(None, "x")], ids=repr)
def test_what_torch_copies_is_no_view_of_a_block(partition: P) -> None:
    """A block that was moved lies otherwise than the global tensor, and could be viewed."""
    calls: list[Callable[[Any], Any]] = [
        lambda x: x.contiguous(),
        lambda x: x.reshape(-1),
        lambda x: x.flatten(),
        lambda x: x.reshape(2, 12),
        lambda x: x.contiguous().view(-1),
        lambda x: x.reshape(x.shape),
        lambda x: x.clone(memory_format=torch.contiguous_format),
    ]
    for call in calls:
        whole, x = _value()
        whole, x = whole.t(), reshard(x.t(), partition)
        expected, found = call(whole), call(x)
        expected.add_(1)
        found.add_(1)
        assert torch.equal(device_get(found), expected)
        assert torch.equal(device_get(x), whole)


def test_contiguous_gives_its_operand_where_blocks_do_not_lie_so() -> None:
    plain = torch.arange(64.0).view(8, 8)
    x = reshard(device_put(plain, P(), mesh=MESH), P(None, "x"))
    for make in (lambda x: x.contiguous(), lambda x: x.contiguous().t()):
        mine, theirs = make(x), make(plain)
        x.add_(1)
        plain.add_(1)
        torch.testing.assert_close(device_get(mine), theirs)
        mine[0] = theirs[0] = 7
        torch.testing.assert_close(device_get(x), plain)


@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow])
def test_a_plain_operand_comes_first_where_it_stands(op: Callable[[Any, Any], Any]) -> None:
    plain, other = torch.rand(4, 4).t(), torch.rand(4, 4)
    found = op(plain, device_put(other, P("x"), mesh=MESH))
    torch.testing.assert_close(device_get(found), op(plain, other))
    assert found.stride() == op(plain, other).stride()


def test_values_of_a_derivative_keep_their_strides() -> None:
    """What vjp, value_and_grad and stop_gradient give lies as torch's does."""
    x = torch.randn(4, 6)
    given = device_put(x, P("x"), mesh=make_mesh((2,), ("x",)))
    told = vjp(lambda x: x.t() * 2, given)[0], stop_gradient(given.t())
    assert [one.stride() for one in told] == [(x.t() * 2).stride(), x.t().stride()]
