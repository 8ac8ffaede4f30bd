"""What `import fspmd` gives, and what `jit` makes of a function."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import fspmd
from fspmd import Jitted, NoRuleError, P, device_put, jit, make_mesh, shard_map

LINE = make_mesh((4,), ("x",), transport="simulation")


def test_names() -> None:
    public = [name for name in dir(fspmd) if not name.startswith("_")]
    assert sorted(public) == sorted(fspmd.__all__)
    assert [name for name in public if isinstance(getattr(fspmd, name), ModuleType)] == ["nn", "random"]
    with pytest.raises(NoRuleError, match="has no rule"):
        device_put(torch.ones(5, 3), P("x"), mesh=LINE).to_sparse()


_NAMES_OF_TORCH = """
import sys
import torch.distributed.checkpoint, torch.optim, torch.utils.checkpoint, torch._functorch.apis, torch.nn.parallel

def is_function(x):
    method = isinstance(x, (classmethod, staticmethod))
    return method or (callable(x) and not isinstance(x, type) and not hasattr(type(x), "__getattr__"))

def names():
    modules = [x for name, x in list(sys.modules.items()) if name.split(".")[0] == "torch" and x is not None]
    owners = {x for module in modules for x in list(vars(module).values()) if isinstance(x, type)} | set(modules)
    found = [(one, name, x) for one in owners for name, x in list(vars(one).items()) if is_function(x)]
    return {(one, name): (id(x), id(getattr(x, "__code__", None))) for one, name, x in found}

def replaced():
    after = names()
    by_name = sorted(before.items(), key=lambda item: item[0][1])  # of one function the name without underscore is last
    # of methods in C, which stand one class below, the class gets its own
    new = {x[0]: k[1] for k, x in after.items() if k[0] in (torch.Tensor, torch.UntypedStorage) and k not in before}
    return sorted(({after[k][0]: k[1] for k, x in by_name if after.get(k, x) != x} | new).values())

before = names()
import fspmd
print(replaced())
fspmd.make_mesh((2,), ("x",), transport="simulation")
print(*replaced())
"""


def test_import_replaces_nothing_in_torch() -> None:
    done = subprocess.run([sys.executable, "-c", _NAMES_OF_TORCH], capture_output=True, text=True, check=True)
    at_import, at_first_mesh = done.stdout.splitlines()
    assert at_import == "[]"
    assert {"apply", "as_subclass", "get_total_norm", "l1_loss"} <= set(at_first_mesh.split())
    told = re.search(r"wraps (\d+) functions", (Path(__file__).parents[1] / "README.md").read_text())
    assert told is not None
    assert len(at_first_mesh.split()) == int(told[1])


def test_wrapped_functions_are_found_by_their_names() -> None:
    """Dynamo and pickle look functions up by their module."""
    fspmd.make_mesh((2,), ("x",), transport="simulation")
    for function in (torch.nested.nested_tensor, torch.nested.as_nested_tensor):
        assert getattr(sys.modules[function.__module__], function.__name__) is function


def test_one_version() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "fspmd.__version__"}
    assert all(part.isdecimal() for part in fspmd.__version__.split("."))


@jit
def power(x: Tensor, n: int = 2) -> Tensor:
    """x to the n."""
    return x**n


class Layer:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    @jit
    def scaled(self, x: Tensor) -> Tensor:
        return self.scale * x


def test_a_jitted_function_is_one() -> None:
    assert isinstance(power, Jitted)
    assert (power.__name__, power.__doc__) == ("power", "x to the n.")
    assert inspect.signature(power) == inspect.signature(inspect.unwrap(power))
    power.clear_cache()
    assert [power(torch.tensor(3.0)).item() for _ in range(3)] == [9.0] * 3
    assert repr(power) == "Jitted(power, hits=2, misses=1, currsize=1)"
    assert copy.deepcopy(power) is copy.copy(power) is pickle.loads(pickle.dumps(power)) is power
    assert isinstance(jit(static_argnums=1)(lambda x, n: x * n), Jitted)


def test_a_jitted_method_binds() -> None:
    assert [Layer(s).scaled(torch.ones(())).item() for s in (2.0, 3.0)] == [2.0, 3.0]
    assert isinstance(Layer.scaled, Jitted)


def test_an_unchecked_body_that_is_jitted_closes_over_tensors() -> None:
    """Their gradients are summed over ranks, whether the body is a function or was given to `jit` before."""
    found = []
    for wrapped in (lambda f: f, jit):
        w = torch.tensor(2.0, requires_grad=True)
        body = shard_map(wrapped(lambda x: x * w), mesh=LINE, in_specs=P("x"), out_specs=P("x"), check_vma=False)  # noqa: B023
        body(torch.arange(4.0)).sum().backward()
        found.append(w.grad)
    assert found == [torch.tensor(6.0)] * 2
