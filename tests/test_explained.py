"""What `explain_rule` says of torch's op database, beside what calls do."""

from __future__ import annotations

import zlib
from typing import Any

import optree
import pytest
import torch
from full import FULL
from opinfo.sweep import REFUSED, dtype_of, function_of, ops, samples
from torch import Tensor

import fspmd
from fspmd import ArgumentError, P, Sharded, communication_log, device_put, make_mesh

CHOSEN = [name for name in ops() if name not in REFUSED and (FULL or zlib.crc32(name.encode()) % 12 == 0)]


def _is_even(x: Any) -> bool:
    return not isinstance(x, Tensor) or (x.numel() > 0 and all(n % 2 == 0 for n in x.shape))


@pytest.mark.one_of(4)
@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_explained_is_what_happens(name: str) -> None:
    """Each line without a body: so operands stay where they are, and the results lie as it says."""
    op, mesh = ops()[name], make_mesh((2,), ("x",), transport="simulation", device="cpu")
    dtype = dtype_of(op)
    for sample in samples(op, dtype, "even", 2) if dtype is not None else ():
        tree: Any = (sample.input, *sample.args), dict(sample.kwargs)
        leaves, treedef = optree.tree_flatten(tree, none_is_leaf=True)
        leaves = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        args, kwargs = treedef.unflatten(leaves)
        try:
            lines = fspmd.explain_rule(op.op, *args, **kwargs).splitlines() if all(map(_is_even, leaves)) else []
        except ArgumentError:  # it has no rule
            continue
        for line in lines[1:] if lines and "is made of" not in lines[0] else ():
            text, _, moved = line.removesuffix(" by a body").partition(" [")  # what calls of no rule were seen to move
            before, _, after = text[text.index("P(") :].partition(" -> ")
            after = after.replace("the same on all ranks", "")
            given, results = (eval(f"[{side}]", {"P": P}) for side in (before, after))
            laid = list(leaves)
            for i, spec in zip(places, given, strict=True):
                laid[i] = device_put(leaves[i], spec, mesh=mesh)
            args, kwargs = treedef.unflatten(laid)
            if line.endswith("by a body"):
                continue
            with communication_log() as log:
                out = function_of(op)(*args, **kwargs)
            found = [
                x for x in optree.tree_leaves(out, is_leaf=lambda x: isinstance(x, Sharded)) if isinstance(x, Sharded)
            ]
            expected = [x.spec.with_partition(spec) for x, spec in zip(found, results, strict=True)]
            assert [x.spec for x in found] == expected, line
            assert ", ".join(dict.fromkeys(entry.kind for entry in log)) == moved.rstrip("]"), (line, log)


def test_functions_that_only_some_calls_of_are_made_of_others() -> None:
    x = torch.ones(4, 4)
    assert fspmd.explain_rule(torch.nn.functional.pad, x, (1, 1)).startswith(
        "pad(f32[4, 4]) is made of\nconstant_pad_nd"
    )
    assert fspmd.explain_rule(Tensor.__getitem__, x, 1).startswith("x[...](f32[4, 4]): [a] b -> b")
    assert "\nindex(" in fspmd.explain_rule(Tensor.__getitem__, x, torch.tensor([1]))
