"""`load_huggingface` and `save_huggingface`, beside ``save_pretrained`` and ``from_pretrained``."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers as hf
from huggingface_programs import (
    LAYOUTS,
    MODELS,
    MOST,
    OTHERS,
    boxes,
    bytes_of_blocks,
    check_written,
    counted_bytes,
    difference,
    errors,
    files_of,
    rows,
    save_models,
    specs_of,
    styled,
    unsharded,
    vision_of_experts,
    whole,
    written,
)
from model_cases import CASES
from safetensors.torch import load_file, save_file
from torch import Tensor

import fspmd
from fspmd import (
    ArgumentError,
    Flat,
    FspmdError,
    Mesh,
    P,
    TensorSpec,
    device_get,
    device_put,
    load_huggingface,
    make_mesh,
    save_huggingface,
)

CLOSE = 2e-6  # the models compute their norms in float32


ONE = "model.safetensors"


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return make_mesh((2, 4), ("dp", "tp"), transport="simulation")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each model, as the library writes it, in several files."""
    path = tmp_path_factory.mktemp("folders")
    save_models(MODELS, path)
    return path


@pytest.fixture
def llama(folders: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folders / "Llama", tmp_path / "Llama"))


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_files_and_logits_those_of_the_model(name: str, folders: Path, mesh: Mesh) -> None:
    different, error = errors(name, str(folders / name), mesh)
    assert different == []
    assert error < CLOSE


@pytest.mark.parametrize("name", MODELS)
def test_a_written_folder_is_that_of_save_pretrained(name: str, folders: Path, tmp_path: Path, mesh: Mesh) -> None:
    for most in (MOST, 10**9):
        folder = tmp_path / str(most)
        written(name, str(folder), mesh, most)
        check_written(name, folder, folders / name)
        sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
        assert (len(sizes) > 5, max(sizes) < 2 * most) == (most == MOST, True)
    assert len([*tmp_path.iterdir()]) == 2


# --- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.one_of(4)
@pytest.mark.parametrize("layout", [*LAYOUTS, "styles"])
@pytest.mark.parametrize("name", ["Llama", "Mixtral", "GPT2"])
def test_a_rank_reads_no_more_than_its_blocks(name: str, layout: str, folders: Path, mesh: Mesh) -> None:
    specs, _ = styled(name, mesh)
    if layout != "styles":
        specs = specs_of(specs, mesh, LAYOUTS[layout])
    with counted_bytes() as read:
        load_huggingface(folders / name, specs)
    assert sum(read) == bytes_of_blocks(specs, next(iter(specs.values())).dtype.itemsize)


@pytest.mark.parametrize("sizes", [(1,), (3,), (8,), (2, 3), (2, 2, 2)])
def test_slices_of_any_layout(sizes: tuple[int, ...], tmp_path: Path) -> None:
    """Every spec of one dim, and of two, among them blocks of a dim that is flat in odd ways."""
    names = tuple("xyz"[: len(sizes)])
    mesh = make_mesh(sizes, names, transport="simulation")
    x = torch.arange(5 * 12.0).view(5, 12)
    save_file({"x": x, "scalar": torch.tensor(3), "empty": torch.zeros(0, 3)}, tmp_path / "model.safetensors")
    flats = [Flat((a, first), (b, second), (12 // a // b, third)) for a, b in ((2, 3), (3, 4), (4, 1), (6, 2))
             for first, second, third in set(itertools.permutations((*names, None, None), 3))]  # fmt: skip
    entries = [None, *names, names, names[::-1]]
    specs = [P(row, column) for row, column in itertools.product(entries, [*entries, *flats])
             if not _axes(row) & _axes(column)]  # fmt: skip
    specs += [P(unreduced={"x"}), P(None, reduced={"x"})]
    for spec in specs:
        like = {"x": TensorSpec(mesh, spec, (5, 12), torch.float64)}
        found = load_huggingface(tmp_path, like, strict=False)["x"]
        placed = device_put(x.double(), spec, mesh=mesh)
        assert found.spec is placed.spec
        assert all(map(torch.equal, *(getattr(v.local, "shards", [v.local]) for v in (found, placed))))
    like = {"scalar": TensorSpec(mesh, P(), (), torch.int64), "empty": TensorSpec(mesh, P("x"), (0, 3), torch.float32)}
    found = device_get(load_huggingface(tmp_path, like, strict=False))
    assert (int(found["scalar"]), found["empty"].shape) == (3, (0, 3))


def _axes(entry: Any) -> set[str]:
    return set(entry.axes if isinstance(entry, Flat) else [entry] if isinstance(entry, str) else entry or ())


# --- dtypes, modules, other classes ----------------------------------------------------------------------------------


def test_bfloat16_files_into_float32_and_back(tmp_path: Path, mesh: Mesh) -> None:
    model = unsharded("Llama", torch.bfloat16)
    model.save_pretrained(tmp_path / "first")
    specs = specs_of(dict(model.named_parameters()), mesh, rows, torch.float32)
    params = load_huggingface(tmp_path / "first", specs)
    wanted = dict(model.named_parameters())
    assert [key for key, x in device_get(params).items() if not torch.equal(x, wanted[key].float())] == []
    for dtype in (torch.bfloat16, torch.float32):
        save_huggingface(tmp_path / str(dtype), {key: x.to(dtype) for key, x in params.items()}, model)
        again = type(model).from_pretrained(tmp_path / str(dtype))
        assert [key for key, x in again.named_parameters() if not torch.equal(x, wanted[key].to(dtype))] == []


def test_a_module_with_sharded_parameters_and_buffers(tmp_path: Path, mesh: Mesh) -> None:
    model = CASES["ResNet"].make()
    with torch.no_grad():
        for i, buffer in enumerate(model.buffers()):
            buffer.add_(i + 1)
    model.save_pretrained(tmp_path / "first")
    zeros = {
        name: (x * 0).detach().requires_grad_(x.requires_grad) for name, x in model.state_dict(keep_vars=True).items()
    }
    zeros = device_put(zeros, P(), mesh=mesh)
    with fspmd.attached(model, zeros):
        state = load_huggingface(tmp_path / "first", model)
    assert [x.requires_grad for x in state.values()] == [
        x.requires_grad for x in model.state_dict(keep_vars=True).values()
    ]
    assert all(map(torch.equal, device_get(state).values(), model.state_dict().values()))
    save_huggingface(tmp_path / "second", state, model)
    again = type(model).from_pretrained(tmp_path / "second").state_dict()
    assert all(map(torch.equal, again.values(), model.state_dict().values()))


def test_the_body_of_a_model_and_a_model_of_a_body(folders: Path, tmp_path: Path, mesh: Mesh) -> None:
    model = unsharded("GPT2")
    body = specs_of(dict(model.base_model.named_parameters()), mesh, rows)
    params = load_huggingface(folders / "GPT2", body)
    assert difference(params, model.base_model) == []
    save_huggingface(tmp_path / "body", params, model.base_model)
    head = specs_of(dict(model.named_parameters()), mesh, rows)
    assert difference(load_huggingface(tmp_path / "body", head, model=model), model) == []


def test_a_module_without_memory(folders: Path, mesh: Mesh) -> None:
    """As the page in docs says: parameters have no memory until they are loaded, buffers have their values."""
    case, folder = CASES["Llama"], folders / "Llama"
    with accelerate.init_empty_weights(include_buffers=False):
        model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.from_pretrained(folder)).eval()
    assert all(p.is_meta for p in model.parameters())
    specs = specs_of(dict(model.named_parameters()), mesh, whole, torch.float64)
    specs, plan = fspmd.parallelize(specs, case.styles, mesh, axis="tp")
    params = load_huggingface(folder, specs)
    buffers = device_put(dict(model.named_buffers()), P(), mesh=mesh)
    batch = case.batch()["input_ids"]
    logits = fspmd.functional_call(model, (params, buffers), device_put(batch, P("dp"), mesh=mesh), styles=plan).logits
    assert float((device_get(logits) - unsharded("Llama")(batch).logits).detach().abs().max()) < CLOSE


@pytest.mark.parametrize("name", OTHERS)
def test_models_whose_files_have_other_names_and_parts(name: str, tmp_path: Path, mesh: Mesh) -> None:
    model = OTHERS[name]()
    model.save_pretrained(tmp_path / "first")
    specs = specs_of(dict(model.named_parameters()), mesh, boxes)
    stored = files_of(tmp_path / "first")
    assert {key: x.shape for key, x in stored.items()} != {key: x.shape for key, x in model.named_parameters()}
    with counted_bytes() as read:
        params = load_huggingface(tmp_path / "first", specs)
    assert difference(params, model) == []
    assert sum(read) == bytes_of_blocks(specs, 4)
    save_huggingface(tmp_path / "second", params, model, max_shard_size=MOST)
    again = type(model).from_pretrained(tmp_path / "second")
    assert difference(dict(again.named_parameters()), model) == []
    save_huggingface(tmp_path / "third", params, again)
    for folder in ("second", "third"):
        found = files_of(tmp_path / folder)
        assert found.keys() == stored.keys()
        assert all(torch.equal(x, stored[key]) for key, x in found.items())


def _without_prefix(name: str, x: Tensor) -> tuple[str, Tensor]:
    return name.removeprefix("transformer."), x


def _of_tensorflow(name: str, x: Tensor) -> tuple[str, Tensor]:
    return re.sub(
        "LayerNorm.(weight|bias)", lambda m: "LayerNorm." + {"weight": "gamma", "bias": "beta"}[m[1]], name
    ), x


def _experts_transposed(name: str, x: Tensor) -> tuple[str, Tensor]:
    return name, x.transpose(1, 2).contiguous() if ".experts." in name else x


@pytest.mark.parametrize("change", [_without_prefix, _of_tensorflow, _experts_transposed])
def test_old_files(change: Callable[[str, Tensor], tuple[str, Tensor]], tmp_path: Path, mesh: Mesh) -> None:
    """Names without the prefix, with masks among them; LayerNorms as TensorFlow names them; transposed experts."""
    name = {_without_prefix: "GPT2", _of_tensorflow: "Bert"}.get(change)
    model = unsharded(name) if name else vision_of_experts()
    model.save_pretrained(tmp_path)
    before = files_of(tmp_path)
    tensors = dict(change(name, x) for name, x in before.items())
    assert {name: x.shape for name, x in tensors.items()} != {name: x.shape for name, x in before.items()}
    masks = {"h.0.attn.bias": torch.ones(1, 1, 4, 4)} if change is _without_prefix else {}
    save_file(tensors | masks, tmp_path / ONE, metadata={"format": "pt"})
    assert difference(dict(type(model).from_pretrained(tmp_path).named_parameters()), model) == []
    for layout in (rows, boxes):
        specs = specs_of(dict(model.named_parameters()), mesh, layout)
        assert difference(load_huggingface(tmp_path, specs), model) == []


@pytest.mark.parametrize("equal", [True, False])
def test_files_that_have_both_tied_weights(equal: bool, tmp_path: Path, mesh: Mesh) -> None:
    model = unsharded("tied Llama")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = files_of(tmp_path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (0 if equal else torch.eye(96, 32))
    save_file(tensors, path, metadata={"format": "pt"})
    specs = specs_of(dict(model.named_parameters()), mesh, rows)
    both = specs | {"lm_head.weight": specs["model.embed_tokens.weight"]}
    assert torch.equal(device_get(load_huggingface(tmp_path, both))["lm_head.weight"], tensors["lm_head.weight"])
    if equal:
        assert difference(load_huggingface(tmp_path, specs), model) == []
    else:
        with pytest.raises(
            FspmdError, match=r"'model.embed_tokens.weight' and 'lm_head.weight' are tied .* but differ"
        ):
            load_huggingface(tmp_path, specs)


# --- mistakes --------------------------------------------------------------------------------------------------------


def test_all_wrong_names_and_shapes_are_in_one_error_before_values_are_read(llama: Path, mesh: Mesh) -> None:
    specs, _ = styled("Llama", mesh)
    norm = specs.pop("model.norm.weight")
    specs["model.norms.weight"] = norm
    specs["lm_head.weight"] = TensorSpec(mesh, P("tp"), (97, 32), torch.float64)
    specs["model.layers.0.mlp.up_proj.weight"] = TensorSpec(mesh, P("tp"), (64, 32), torch.int32)
    with counted_bytes() as read, pytest.raises(FspmdError) as raised:
        load_huggingface(llama, specs)
    assert read == []
    for text in (
        "'model.norms.weight' is not in the files",
        "'model.norm.weight' is in the files alone",
        "'lm_head.weight' has the shape (96, 32) in the files, but like has f64[97@tp, 32]",
        "'model.layers.0.mlp.up_proj.weight' has torch.float64 in the files, but like has i32[64@tp, 32]",
        "strict=False",
    ):
        assert text in str(raised.value)
    specs, _ = styled("Llama", mesh)
    del specs["model.norm.weight"]
    assert load_huggingface(llama, specs, strict=False).keys() == specs.keys()


def _third(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[2]


def _index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def _name_twice(folder: Path) -> None:
    shutil.copy(_third(folder), folder / "x.safetensors")
    _index(folder, lambda index: index.update(x="x.safetensors"))


def _config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda f: _third(f).write_bytes(_third(f).read_bytes()[:-7]), r"model-00003-of-.* is damaged"),
    "empty": (lambda f: _third(f).write_bytes(b""), r"model-00003-of-.* is damaged"),
    "no head": (lambda f: _third(f).write_bytes(b"\xff" * 64), r"model-00003-of-.* is damaged"),
    "no file": (lambda f: _third(f).unlink(), r"model-00003-of-.* is missing"),
    "index is no json": (lambda f: (f / "model.safetensors.index.json").write_text("{"), r"index.json is damaged"),
    "index is another": (lambda f: (f / "model.safetensors.index.json").write_text("[]"), r"index.json is damaged"),
    "name that no file has": (
        lambda f: _index(f, lambda index: index.update(lost=_third(f).name)), r"model-00003-.* lacks 'lost', which",
    ),
    "file elsewhere": (lambda f: _index(f, lambda index: index.update(lost="../x")), r"'../x', which is not a file of"),
    "name twice": (_name_twice, r"both have 'model"),
    "no index": (lambda f: (f / "model.safetensors.index.json").unlink(), r"has neither model.safetensors nor"),
    "no class": (lambda f: _config(f, architectures=None), r"configuration names no class"),
    "other class": (lambda f: _config(f, architectures=["Mine"]), r"names the class 'Mine', which"),
    "code of its own": (lambda f: _config(f, model_type="mine", auto_map={"AutoConfig": "x.Y"}), r"cannot read"),
    "config is no json": (lambda f: (f / "config.json").write_text("{"), r"transformers cannot read .*config.json"),
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_damaged_folders_are_refused(broken: str, llama: Path, mesh: Mesh) -> None:
    change, text = BROKEN[broken]
    change(llama)
    with counted_bytes() as read, pytest.raises(FspmdError, match=text):
        load_huggingface(llama, styled("Llama", mesh)[0])
    assert read == []


def test_experts_that_do_not_fit_are_refused(folders: Path, tmp_path: Path, mesh: Mesh) -> None:
    specs, _ = styled("Mixtral", mesh)
    tensors = files_of(folders / "Mixtral")
    shutil.copy(folders / "Mixtral" / "config.json", tmp_path)
    expert = "model.layers.1.block_sparse_moe.experts"
    wrong = tensors | {f"{expert}.2.w1.weight": torch.zeros(3, 32)}
    other = {name.replace("experts.3.", "experts.5."): x for name, x in tensors.items()}
    fewer = {name: x for name, x in tensors.items() if not name.startswith(f"{expert}.3.")}
    for given, text in (
        (wrong, r"gate_up_proj' of .*: '.*experts.0.w1.weight' makes \(64, 32\) .* '.*2.w1.weight' makes \(3, 32\)"),
        (other, r"gate_up_proj' of .*: they have the numbers 0, 1, 2, 5, not those from 0 to 3"),
        (fewer, r"gate_up_proj' has the shape \(3, 128, 32\) in the files, but like has f32\[4, "),
    ):
        save_file(given, tmp_path / "model.safetensors")
        with pytest.raises(FspmdError, match=text):
            load_huggingface(tmp_path, specs)


def test_arguments_of_a_wrong_kind(llama: Path, tmp_path: Path, mesh: Mesh) -> None:
    specs, _ = styled("Llama", mesh)
    model = unsharded("Llama")
    params, _ = fspmd.parallelize(dict(model.named_parameters()), {}, mesh)
    norm = params["model.norm.weight"]
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: load_huggingface(3, specs), "got the int 3 for folder"),  # type: ignore[arg-type]
        (lambda: load_huggingface(llama, [1]), "for like; give it a dict"),  # type: ignore[arg-type]
        (lambda: load_huggingface(llama, {"a": 1}), "'a' is the int 1"),
        (lambda: load_huggingface(llama, model), "is a Parameter|is a tensor of shape"),
        (lambda: load_huggingface(tmp_path / "none", specs), "has neither"),
        (lambda: save_huggingface(tmp_path / "x", [], model), "for params; give it a dict"),  # type: ignore[arg-type]
        (lambda: save_huggingface(tmp_path / "x", {}, model), "no Sharded values"),
        (lambda: save_huggingface(tmp_path / "x", {"a": norm}, model), "the model has no 'a'"),
        (lambda: save_huggingface(tmp_path / "x", {"a": norm}, model), "'lm_head.weight' is not in params"),
        (lambda: save_huggingface(tmp_path / "x", params | {"lm_head.weight": norm}, model), r"shape \(32,\), but the"),
        (lambda: save_huggingface(tmp_path / "x", params | {"lm_head.weight": 3}, model), "is the int 3, not a tensor"),
        (lambda: save_huggingface(tmp_path / "x", params, model, max_shard_size=0), "give it a number of bytes"),
        (lambda: save_huggingface(tmp_path / "x", params, hf.LlamaConfig()), "names no class"),
        (lambda: save_huggingface(llama, params, model), "exists and is not empty"),
        (lambda: fspmd.jit(lambda x: load_huggingface(llama, specs))(norm), "load_huggingface was called within jit"),
        (lambda: save_huggingface("/dev/null/x", params, model), "could not write /dev/null/x"),
    ]
    for call, text in calls:
        with pytest.raises(FspmdError, match=text):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["Llama"]


@pytest.mark.parametrize("size", [5_000_000_000, 100])
def test_tensors_of_no_model(size: int, tmp_path: Path, mesh: Mesh) -> None:
    """The library reads what was written, and we read what the library wrote."""
    shapes = {"state.0/exp_avg": (5, 7), "a.b": (6,), "n": (), "e": (0, 3), "half": (9, 2)}
    wholes = {name: torch.rand(shape, generator=torch.Generator().manual_seed(0)) for name, shape in shapes.items()}
    wholes["half"] = wholes["half"].to(torch.float8_e5m2)
    first = mesh.axis_names[0]
    params = {k: device_put(x, P(first) if x.ndim else P(), mesh=mesh) for k, x in wholes.items()}
    save_huggingface(tmp_path / "new", {**params, "plain": torch.arange(3)}, max_shard_size=size)
    wholes["plain"] = torch.arange(3)
    found = {}
    for file in (tmp_path / "new").glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == wholes.keys()
    for name, x in wholes.items():
        assert found[name].dtype is x.dtype
        assert found[name].shape == x.shape
        assert torch.equal(found[name].view(torch.uint8), x.view(torch.uint8)) if x.ndim else found[name] == x
    assert (tmp_path / "new" / "model.safetensors.index.json").exists() == (size == 100)
    assert not (tmp_path / "new" / "config.json").exists()
    back = load_huggingface(tmp_path / "new", params, strict=False)
    assert {k: x.spec for k, x in back.items()} == {k: x.spec for k, x in params.items()}
    assert all(device_get(back[k]).tolist() == x.tolist() for k, x in wholes.items() if k != "plain")
    with pytest.raises(FspmdError, match=r"'rate' is the float 0\.5"):
        save_huggingface(tmp_path / "wrong", {**params, "rate": 0.5})


@pytest.mark.parametrize("package", ["safetensors", "transformers"])
def test_a_package_that_is_not_installed(
    package: str, llama: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs, _ = styled("Llama", mesh)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ArgumentError, match=f"load_huggingface needs the package '{package}': pip install {package}"):
        load_huggingface(llama, specs)


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every write, flush and rename fails once; then what a call that was killed has left is in the way."""
    model = unsharded("Llama")
    params, _ = fspmd.parallelize(dict(model.named_parameters()), {}, mesh)
    folder, at, text = tmp_path / "new", 0, "disk full"
    while text:
        shutil.rmtree(folder, ignore_errors=True)
        with monkeypatch.context() as patch:
            _fail_at(at, patch)
            text = _complaint(lambda: save_huggingface(folder, params, model, max_shard_size=100_000))
        assert [*tmp_path.iterdir()] == ([] if "no folder was made" in text else [folder])
        assert ("disk full" in text) == bool(text)
        at += 1
    assert at > 10
    shutil.rmtree(folder)
    (tmp_path / ".new.partial").mkdir()
    (tmp_path / ".new.partial" / "model-00009-of-00009.safetensors").write_bytes(b"half")
    save_huggingface(folder, params, model)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def _complaint(call: Callable[[], Any]) -> str:
    try:
        call()
    except FspmdError as error:
        return str(error)
    return ""


def _fail_at(number: int, patch: pytest.MonkeyPatch) -> None:
    """The call of this number, among those that change the disk, fails."""
    import safetensors.torch

    counter = iter(range(10**6))
    for owner, name in ((safetensors.torch, "save_file"), (os, "fsync"), (os, "rename"), (Path, "write_text")):
        call = getattr(owner, name)

        def failing(*args: Any, call: Any = call, **kwargs: Any) -> Any:
            if next(counter) == number:
                raise OSError("disk full")
            return call(*args, **kwargs)

        patch.setattr(owner, name, failing)
