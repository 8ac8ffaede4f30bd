"""Models of `model_cases` through folders of Hugging Face, in a simulation and on processes; judged by the library."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors
import torch
import transformers as hf
from model_cases import CASES, Case
from model_programs import batch_of
from safetensors.torch import load_file
from torch import Tensor, nn

import fspmd
from fspmd import Mesh, P, ParallelPlan, TensorSpec, device_get, device_put, functional_call

hf.logging.set_verbosity_error()
hf.logging.disable_progress_bar()
MODELS = ("Llama", "Qwen2", "Qwen3", "Mixtral", "GPT2", "Bert", "tied Llama")
MOST = 20_000  # bytes of a file, so that a model has several
Layout = Callable[[str, tuple[int, ...]], P]


def case_of(name: str) -> Case:
    """The case; "tied" before a name ties its embedding to its head."""
    tied = name.startswith("tied ")
    case = copy.deepcopy(CASES[name.removeprefix("tied ")])
    if tied:
        case.config.tie_word_embeddings = True
        styles = {key: style for key, style in case.styles.items() if key != "lm_head"}
        object.__setattr__(case, "styles", styles | {"lm_head": fspmd.PrepareInput(input="replicated")})
    return case


@functools.cache
def unsharded(name: str, dtype: torch.dtype | None = None) -> Any:
    """A model whose every parameter is random, alike in each process."""
    model = case_of(name).make(dtype).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.2)
    return model


def rows(_: str, shape: tuple[int, ...]) -> P:
    """Both axes cut the first dim: blocks are uneven, and some empty."""
    return P(("tp", "dp")) if shape else P()


def boxes(_: str, shape: tuple[int, ...]) -> P:
    return P(*[None] * (len(shape) - 2), "tp", "dp") if len(shape) > 1 else P(*["dp"] * len(shape))


def flat(_: str, shape: tuple[int, ...]) -> P:
    """The last dim as two, both cut."""
    return P(*[None] * (len(shape) - 1), fspmd.Flat((2, "dp"), (shape[-1] // 2, "tp"))) if shape[-1] % 2 == 0 else P()


def whole(_: str, shape: tuple[int, ...]) -> P:
    return P()


LAYOUTS: dict[str, Layout] = {f.__name__: f for f in (rows, boxes, flat, whole)}


def specs_of(
    tensors: Mapping[str, Any], mesh: Mesh, layout: Layout, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Specs of named tensors; integers keep their dtype."""
    return {
        name: TensorSpec(mesh, layout(name, tuple(x.shape)), tuple(x.shape), dtype or x.dtype)
        for name, x in tensors.items()
    }


def styled(name: str, mesh: Mesh) -> tuple[dict[str, Any], ParallelPlan]:
    """Specs by the styles of a model."""
    case = case_of(name)
    specs = specs_of(dict(case.make().named_parameters()), mesh, whole)
    laid, plan = fspmd.parallelize(specs, case.styles, mesh, axis="tp")
    return laid, plan


def difference(params: Mapping[str, Any], model: nn.Module) -> list[str]:
    """The names of parameters that are not those of the model to the bit."""
    wanted = dict(model.named_parameters())
    assert params.keys() == wanted.keys()
    found = device_get({name: x.detach() for name, x in params.items()})
    return [name for name, x in found.items() if x.dtype != wanted[name].dtype or not torch.equal(x, wanted[name])]


def logits(name: str, params: Any, mesh: Mesh, plan: ParallelPlan | None) -> Tensor:
    """What a module gives with parameters of a folder; its own are others."""
    case = case_of(name)
    module = case.make().eval()
    buffers = device_put({key: x.clone() for key, x in module.named_buffers()}, P(), mesh=mesh)
    batch = device_put(batch_of(case), case.spec, mesh=mesh)
    return device_get(functional_call(module, (params, buffers), **batch, styles=plan).logits.detach())  # type: ignore


def errors(name: str, folder: str, mesh: Mesh, layouts: tuple[str, ...] = tuple(LAYOUTS)) -> tuple[list[str], float]:
    """Parameters that differ under any layout, and the largest error of logits, under styles and without."""
    model = unsharded(name)
    exact = model(**batch_of(case_of(name))).logits.detach()
    specs, plan = styled(name, mesh)
    params = fspmd.load_huggingface(folder, specs)
    assert {key: x.spec for key, x in params.items()} == specs
    found = difference(params, model)
    wrong = [float((logits(name, params, mesh, styles) - exact).abs().max()) for styles in (plan, None)]
    for layout in layouts:
        found += difference(fspmd.load_huggingface(folder, specs_of(specs, mesh, LAYOUTS[layout])), model)
    return found, max(wrong)


def written(name: str, folder: str, mesh: Mesh, most: int) -> None:
    """Write a folder of parameters that lie by the model's styles."""
    model = unsharded(name)
    params, _ = fspmd.parallelize(dict(model.named_parameters()), case_of(name).styles, mesh, axis="tp")
    with torch.device("meta"):
        module = case_of(name).make()
    fspmd.save_huggingface(folder, params, module, max_shard_size=most)


def files_of(folder: Path) -> dict[str, Tensor]:
    """The tensors of all files."""
    return {name: x for path in sorted(folder.glob("*.safetensors")) for name, x in load_file(path).items()}


def check_written(name: str, folder: Path, wanted: Path) -> None:
    """The tensors of the files are those of ``save_pretrained``, and ``from_pretrained`` opens them."""
    found, tensors, model = files_of(folder), files_of(wanted), unsharded(name)
    assert found.keys() == tensors.keys()
    assert [key for key, x in found.items() if not torch.equal(x, tensors[key]) or x.dtype != tensors[key].dtype] == []
    assert difference(dict(type(model).from_pretrained(folder).named_parameters()), model) == []
    body, of_body = hf.AutoModel.from_pretrained(folder), dict(model.base_model.named_parameters())
    assert [key for key, x in body.named_parameters() if key in of_body and not torch.equal(x, of_body[key])] == []


def save_models(names: tuple[str, ...], folder: Path) -> None:
    """A folder for each model, as the library writes it, in several files."""
    for name in names:
        unsharded(name).save_pretrained(folder / name, max_shard_size=MOST)


_SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "num_experts": 12, "num_experts_per_tok": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
#: models of other names: experts of two kinds, qkv and gates that are one tensor in files
OTHERS: dict[str, Callable[[], Any]] = {
    "Qwen2Moe": lambda: hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**_SIZES, shared_expert_intermediate_size=40)),
    "Jamba": lambda: hf.JambaForCausalLM(hf.JambaConfig(**_SIZES, use_mamba_kernels=False)),
    "NomicBert": lambda: hf.NomicBertForMaskedLM(hf.NomicBertConfig(**_SIZES)),
    "Dinov2": lambda: hf.Dinov2Model(
        hf.Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, use_swiglu_ffn=True, image_size=28)
    ),
}  # fmt: skip


def vision_of_experts() -> Any:
    """A model whose files may have its experts transposed."""
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 4, "out_hidden_size": 32,
              "deepstack_visual_indexes": [0], "num_position_embeddings": 16}  # fmt: skip
    return hf.Qwen3VLMoeForConditionalGeneration(hf.Qwen3VLMoeConfig(text_config=_SIZES, vision_config=vision)).eval()


# --- on processes ----------------------------------------------------------------------------------------------------


def on_processes(names: tuple[str, ...], folder: str) -> dict[str, tuple[list[str], float]]:
    """`errors` of folders of each model, and a folder of each, written. A rank reads the bytes of its own blocks."""
    mesh = fspmd.make_mesh((2, 2), ("dp", "tp"), device="cpu")
    at = mesh.coordinate() or ()
    found = {}
    for name in names:
        found[name] = errors(name, f"{folder}/{name}", mesh, ("rows",))
        written(name, f"{folder}/{name}, written", mesh, MOST)
        specs, _ = styled(name, mesh)
        with counted_bytes() as read:
            fspmd.load_huggingface(f"{folder}/{name}", specs)
        assert sum(read) == sum(math.prod(spec.local_shape(at)) * spec.dtype.itemsize for spec in specs.values())
    return found


def complaints(folder: str) -> list[str]:
    """What each rank raises where one rank has a damaged folder, other names, or a folder that it cannot write."""
    mesh = fspmd.make_mesh((2, 2), ("dp", "tp"), device="cpu")
    mine = mesh.coordinate() == (1, 0)
    specs, _ = styled("Llama", mesh)
    params, _ = fspmd.parallelize(dict(unsharded("Llama").named_parameters()), {}, mesh)
    fewer = {key: x for key, x in params.items() if not mine or key != "lm_head.weight"}
    moved = params | ({"lm_head.weight": fspmd.reshard(params["lm_head.weight"], P("tp"))} if mine else {})
    missing = {key: x for key, x in specs.items() if not mine or key != "lm_head.weight"}
    calls: list[Callable[[], Any]] = [
        lambda: fspmd.load_huggingface(f"{folder}/none" if mine else f"{folder}/Llama", specs),
        lambda: fspmd.load_huggingface(f"{folder}/Llama", missing),
        lambda: fspmd.save_huggingface(f"{folder}/Llama", params, unsharded("Llama")),
        lambda: fspmd.save_huggingface(f"{folder}/new", fewer, unsharded("Llama")),
        lambda: fspmd.save_huggingface(f"{folder}/new", moved, unsharded("Llama")),
        lambda: fspmd.save_huggingface("/dev/null/new", params, unsharded("Llama")),
    ]
    texts = []
    for call in calls:
        try:
            call()
        except fspmd.FspmdError as error:
            texts.append(str(error))
    return texts


# --- bytes -----------------------------------------------------------------------------------------------------------


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """The bytes of each slice of a file that is read."""
    read: list[int] = []
    safe_open = safetensors.safe_open

    class Counted:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = safe_open(*args, **kwargs)

        def __enter__(self) -> Any:
            self.file.__enter__()
            return self

        def __exit__(self, *error: object) -> Any:
            return self.file.__exit__(*error)

        def keys(self) -> Any:
            return self.file.keys()

        def get_tensor(self, name: str) -> Tensor:
            return count(self.file.get_tensor(name))

        def get_slice(self, name: str) -> Any:
            part = self.file.get_slice(name)
            made = mock.MagicMock(wraps=part)
            made.__getitem__.side_effect = lambda index: count(part[index])
            return made

    def count(x: Tensor) -> Tensor:
        read.append(x.nbytes)
        return x

    with mock.patch.object(safetensors, "safe_open", Counted):
        yield read


def bytes_of_blocks(specs: Mapping[str, TensorSpec], itemsize: int) -> int:
    """The bytes that the different blocks of all ranks have, counted coordinate by coordinate."""
    total = 0
    for spec in specs.values():
        axes = spec.partition.axes
        spans = [range(n) if axis in axes else range(1) for axis, n in spec.mesh.shape.items()]
        total += sum(math.prod(spec.local_shape(at)) for at in itertools.product(*spans))
    return total * itemsize
