"""Models of transformers as they are: small random configurations, their styles, and what an expert would communicate.

    B  batch 4    S  sequence 6    D  width 32    V  vocabulary 96    H  heads 4, each of width 8    L  layers 2

`ideal` counts the collectives of one training step on a mesh of "dp" (the batch) and "tp" (tensor parallel, as
Megatron-LM cuts a transformer: columns then rows, heads and vocabulary over "tp"):

* a block of columns then rows (attention, MLP) is one sum forward, of its output, and one backward, of the gradient of
  its input; attention over another sequence has two inputs, and so two sums backward;
* an embedding cut by the vocabulary is one sum forward; a head cut by the vocabulary is one sum backward;
* the loss of logits cut by the vocabulary is three sums of [B, S] forward (maximum, exponentials, the label's logit);
* a mean over the batch is one sum over "dp" forward, of the losses together with their number;
* the gradient of a parameter is one sum over "dp" backward, over "tp" too where ranks of it have parts of that.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor, nn

from fspmd import ColwiseParallel, Flat, OnBlocks, P, PrepareInput, RowwiseParallel, Style, VocabParallel

B, S, D, V, H, L = 4, 6, 32, 96, 4, 2
_ROWS = P("dp")


class Collectives(NamedTuple):
    """Of a training step: those over "tp" alone, forward and backward, and those that "dp" takes part in."""

    forward: int
    backward: int
    data: int = 1
    gradients: int = 0

    def __add__(self, other: object) -> Collectives:
        assert isinstance(other, Collectives)
        return Collectives(*(x + y for x, y in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Case:
    """A model, its batch and its styles."""

    model: type[nn.Module]
    config: Any
    batch: Callable[[], dict[str, Tensor]]
    styles: Mapping[str, Style]
    ends: Collectives  # what an expert communicates, but for the gradients of parameters
    spec: P = _ROWS  # how the batch lies
    generate: Mapping[str, Any] | None = None  # what `generate` takes beside the batch; None: no such method
    prompt: tuple[str, ...] = ()  # what of the batch `generate` takes
    checkpoints: bool = True
    dtype: torch.dtype = torch.float64

    @property
    def ideal(self) -> Collectives:
        """What an expert communicates."""
        with torch.device("meta"):
            return self.ends + Collectives(0, 0, 0, sum(p.requires_grad for p in self.make().parameters()))

    def make(self, dtype: torch.dtype | None = None) -> nn.Module:
        """The model with random parameters, alike in each call, in training mode without dropout."""
        torch.manual_seed(0)
        return self.model(copy.deepcopy(self.config)).to(dtype or self.dtype).train()


def tokens(*names: str, padded: bool = False) -> Callable[[], dict[str, Tensor]]:
    """Token ids [B, S] for each name; ``attention_mask`` leaves out the end of some rows, ``labels`` some tokens."""

    def make() -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        batch = {name: torch.randint(3, V, (B, S), generator=generator) for name in names}
        if "labels" in batch:
            batch["labels"][1, 2] = -100
        if padded:
            batch["attention_mask"] = (torch.arange(S) < torch.tensor([6, 4, 5, 6])[:, None]).long()
        return batch

    return make


def normal(name: str, *shape: int, labels: tuple[int, ...], classes: int) -> Callable[[], dict[str, Tensor]]:
    """Random numbers under a name, and labels."""

    def make() -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return {name: x, "labels": torch.randint(3, classes, labels, generator=generator)}

    return make


# --- styles ----------------------------------------------------------------------------------------------------------


def columns_then_rows(prefix: str, columns: tuple[str, ...], rows: tuple[str, ...]) -> dict[str, Style]:
    """Layers below a prefix cut by their outputs, and those that follow by their inputs."""
    cut: dict[str, Style] = {f"{prefix}.{name}": ColwiseParallel() for name in columns}
    return cut | {f"{prefix}.{name}": RowwiseParallel() for name in rows}


QKV = ("q_proj", "k_proj", "v_proj")
LLAMA = {
    "model.embed_tokens": VocabParallel(),
    **columns_then_rows("model.layers.*.self_attn", QKV, ("o_proj",)),
    **columns_then_rows("model.layers.*.mlp", ("gate_proj", "up_proj"), ("down_proj",)),
    "lm_head": ColwiseParallel(),
}
FUSED = Flat((3, None), (D, "tp"))  # the columns of q, k and v, each cut
GPT2 = {
    "transformer.wte": VocabParallel(),
    "transformer.h.*.attn.c_attn": ColwiseParallel(specs={"weight": P(None, FUSED), "bias": P(FUSED)}, output=None),
    "transformer.h.*.attn.c_proj": RowwiseParallel(weight=-2),
    "transformer.h.*.mlp.c_fc": ColwiseParallel(weight=-1),
    "transformer.h.*.mlp.c_proj": RowwiseParallel(weight=-2),
    "lm_head": PrepareInput(input="replicated"),
}
BERT = {
    "bert.embeddings.word_embeddings": VocabParallel(),
    **columns_then_rows("bert.encoder.layer.*.attention", ("self.query", "self.key", "self.value"), ("output.dense",)),
    **columns_then_rows("bert.encoder.layer.*", ("intermediate.dense",), ("output.dense",)),
    "cls.predictions.decoder": PrepareInput(input="replicated"),
    "cls.predictions": PrepareInput(specs={"bias": 0}),
}
VIT = {
    **columns_then_rows("vit.layers.*.attention", QKV, ("o_proj",)),
    **columns_then_rows("vit.layers.*.mlp", ("fc1",), ("fc2",)),
}
T5 = {
    "shared": VocabParallel(),
    **columns_then_rows("*.block.*.layer.*.SelfAttention", ("q", "k", "v"), ("o",)),
    "*.block.0.layer.0.SelfAttention.relative_attention_bias": ColwiseParallel(weight=-1),
    **columns_then_rows("decoder.block.*.layer.*.EncDecAttention", ("q", "k", "v"), ("o",)),
    **columns_then_rows("*.block.*.layer.*.DenseReluDense", ("wi",), ("wo",)),
    "lm_head": PrepareInput(input="replicated"),
}
WHISPER = {
    "model.decoder.embed_tokens": VocabParallel(),
    **columns_then_rows("model.*.layers.*.*_attn", QKV, ("out_proj",)),
    **columns_then_rows("model.*.layers.*", ("fc1",), ("fc2",)),
    "proj_out": PrepareInput(input="replicated"),
}
MIXTRAL = {
    "model.embed_tokens": VocabParallel(),
    **columns_then_rows("model.layers.*.self_attn", QKV, ("o_proj",)),
    # each expert's gate and up, cut by columns; its down by rows; each rank sorts its own tokens by expert
    "model.layers.*.mlp.experts": OnBlocks(
        specs={"gate_up_proj": P(None, Flat((2, None), (2 * D, "tp")), None), "down_proj": -1}
    ),
    "lm_head": ColwiseParallel(),
}
WIDE = Flat((2, None), (2 * D, "tp"))  # the columns of the hidden states and of the gate, each cut
MAMBA = {
    "backbone.embeddings": VocabParallel(),
    "backbone.layers.*.mixer": PrepareInput(specs={"A_log": 0, "D": 0}),
    "backbone.layers.*.mixer.in_proj": ColwiseParallel(specs={"weight": P(WIDE, None)}, output=None),
    "backbone.layers.*.mixer.conv1d": Style(weight=0, vector=0),  # of which only the tensors are used, as of dt_proj
    "backbone.layers.*.mixer.x_proj": RowwiseParallel(),
    "backbone.layers.*.mixer.dt_proj": Style(weight=0, vector=0),
    "backbone.layers.*.mixer.out_proj": RowwiseParallel(),
    "lm_head": PrepareInput(input="replicated"),
}

# --- the ideal -------------------------------------------------------------------------------------------------------

#: embedding and loss forward, head backward
LANGUAGE = Collectives(forward=1 + 3, backward=1)
CLASSES = Collectives(0, 0)


def blocks(n: int, inputs: int | None = None, ends: Collectives = LANGUAGE) -> Collectives:
    """``n`` blocks of columns then rows, which have so many inputs together (by default ``n``), between these ends."""
    return ends._replace(forward=ends.forward + n, backward=ends.backward + (n if inputs is None else inputs))


# --- the table -------------------------------------------------------------------------------------------------------

_SIZES = {
    "vocab_size": V, "hidden_size": D, "intermediate_size": 2 * D, "num_hidden_layers": L, "num_attention_heads": H,
    "max_position_embeddings": 32,
}  # fmt: skip
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_CAUSAL = {**_SIZES, **_SPECIAL, "num_key_value_heads": H, "head_dim": D // H}
_NORMS = 6  # of the ResNet
_SAMPLE = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}


def _causal(
    model: type[nn.Module], config: Any, styles: Mapping[str, Style], ends: Collectives, **options: Any
) -> Case:
    given = {"generate": _SAMPLE, "prompt": ("input_ids",)} | options
    return Case(model, config, tokens("input_ids", "labels"), styles, ends, **given)


CASES: dict[str, Case] = {
    "GPT2": _causal(
        hf.GPT2LMHeadModel,
        hf.GPT2Config(
            vocab_size=V, n_positions=32, n_embd=D, n_layer=L, n_head=H, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, **_SPECIAL,
        ),
        GPT2,
        blocks(2 * L),
    ),
    "Llama": _causal(hf.LlamaForCausalLM, hf.LlamaConfig(**_CAUSAL), LLAMA, blocks(2 * L)),
    "Qwen2": _causal(hf.Qwen2ForCausalLM, hf.Qwen2Config(**_CAUSAL), LLAMA, blocks(2 * L)),
    # the norms of each head's queries and keys are replicated, and ranks have parts of their gradients
    "Qwen3": _causal(hf.Qwen3ForCausalLM, hf.Qwen3Config(**_CAUSAL), LLAMA, blocks(2 * L)),
    "Gemma2": _causal(
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config(**_CAUSAL, sliding_window=4),
        {name: style for name, style in LLAMA.items() if name != "lm_head"}
        | {"lm_head": PrepareInput(input="replicated")},
        blocks(2 * L),
    ),
    # what a rank's parts of all experts give is summed once; backward the gradients of the tokens, and of their weights
    "Mixtral": _causal(
        hf.MixtralForCausalLM, hf.MixtralConfig(**_CAUSAL, num_local_experts=4), MIXTRAL, blocks(2 * L, 3 * L),
        dtype=torch.float32,  # torch's grouped_mm, which it takes by default, has no float64
    ),
    "Mixtral, a loop": _causal(
        hf.MixtralForCausalLM,
        hf.MixtralConfig(**_CAUSAL, num_local_experts=4, experts_implementation="eager"),
        MIXTRAL,
        blocks(2 * L, 3 * L),
    ),
    "Bert": Case(
        hf.BertForMaskedLM,
        hf.BertConfig(**_SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
        tokens("input_ids", "labels", padded=True),
        BERT,
        blocks(2 * L),
    ),
    # patches, classes and loss are of every rank
    "ViT": Case(
        hf.ViTForImageClassification,
        hf.ViTConfig(
            hidden_size=D, intermediate_size=2 * D, num_hidden_layers=L, num_attention_heads=H, image_size=8,
            patch_size=4, num_labels=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        ),
        normal("pixel_values", B, 3, 8, 8, labels=(B,), classes=8),
        VIT,
        blocks(2 * L, ends=CLASSES),
    ),
    # encoder: 2 blocks a layer; decoder: 3, whose attention to the encoder has two inputs. Two embeddings, one head.
    # The keys and values of all decoder layers have one input, the encoder's result: its gradient is one sum.
    "T5": Case(
        hf.T5ForConditionalGeneration,
        hf.T5Config(vocab_size=V, d_model=D, d_kv=D // H, d_ff=2 * D, num_layers=L, num_heads=H, dropout_rate=0.0,
                    decoder_start_token_id=0),
        tokens("input_ids", "labels", padded=True),
        T5,
        blocks(5 * L, 5 * L + 1, ends=Collectives(2 + 3, 1)),
        generate=_SAMPLE,
        prompt=("input_ids", "attention_mask"),
    ),
    "Whisper": Case(
        hf.WhisperForConditionalGeneration,
        hf.WhisperConfig(
            vocab_size=V, d_model=D, encoder_layers=L, decoder_layers=L, encoder_attention_heads=H,
            decoder_attention_heads=H, encoder_ffn_dim=2 * D, decoder_ffn_dim=2 * D, num_mel_bins=8,
            max_source_positions=16, max_target_positions=16, dropout=0.0, attention_dropout=0.0,
            activation_dropout=0.0, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
            **_SPECIAL,
        ),
        normal("input_features", B, 8, 32, labels=(B, S), classes=V),
        WHISPER,
        blocks(5 * L, 5 * L + 1),
        generate=_SAMPLE,
        prompt=("input_features",),
    ),
    # a layer: what x_proj and out_proj give is summed, backward the gradients of what in_proj and dt_proj take, the
    # latter with those of B and C, which x_proj gives with it
    "Mamba": _causal(
        hf.MambaForCausalLM,
        hf.MambaConfig(vocab_size=V, hidden_size=D, state_size=4, num_hidden_layers=L, time_step_rank=2, **_SPECIAL),
        MAMBA,
        blocks(2 * L),
    ),
    # all ranks cut the batch: each norm has a sum of its moments; backward it is that of its parameters' gradients
    "ResNet": Case(
        hf.ResNetForImageClassification,
        hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=8),
        normal("pixel_values", 2 * B, 3, 16, 16, labels=(2 * B,), classes=8),
        {},
        Collectives(0, 0, 1 + _NORMS),
        spec=P(("dp", "tp")),
        checkpoints=False,
    ),
}  # fmt: skip
