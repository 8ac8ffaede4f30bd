"""What holds for all tests."""

import gc
import os
import sys
from collections import defaultdict
from collections.abc import Hashable, Iterator

import pytest
import torch
from full import FULL, fields, in_part, spread

# the many processes of the tests read what one has compiled
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# a new connection of torch asks for a name of this machine: a question that is lost is asked again after a second, not
# after five
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:3")

# each worker has a core: two threads that wait for each other make a call on a few elements cost milliseconds
torch.set_num_threads(1)

# imports make hundreds of thousands of objects and little garbage: no collection walks them, now or later
gc.disable()


def pytest_collection_finish() -> None:
    """Garbage is collected from now on."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked ``one_of(n)`` one case in n runs, and at least one. Of all those, the part of FSPMD_PART."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not FULL and item.get_closest_marker("one_of"):
            cases[item.nodeid.partition("[")[0]].append(item)
    left: set[pytest.Item] = set()
    for those in cases.values():
        (n,) = those[0].get_closest_marker("one_of").args  # type: ignore[union-attr]
        found = spread([item.name for item in those], [[*_values(item)] for item in those], -(-len(those) // n))
        left.update(item for i, item in enumerate(those) if i not in found)
    chosen = [item for item in items if item not in left]
    left.update(item for i, item in enumerate(chosen) if not in_part(i))
    config.hook.pytest_deselected(items=list(left))
    # those that wait for seconds to pass, on a machine that is not too busy, begin: one worker has them all
    items[:] = sorted((item for item in items if item not in left), key=lambda item: item.path.name != "test_faults.py")


def _values(item: pytest.Item) -> Iterator[Hashable]:
    """The values of the parameters of a case, by number, and of the fields of those that are tuples."""
    call = item.callspec  # type: ignore[attr-defined]
    yield from call.indices.items()
    for name, value in call.params.items():
        if isinstance(value, tuple):
            yield from ((name, *field) for field in fields(value))
