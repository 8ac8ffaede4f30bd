"""The Trainer of transformers, on a Llama whose weights are cut over the ranks of tp and whose batch is cut over all.

python examples/huggingface_trainer.py                         # 4 simulated ranks
torchrun --nproc-per-node 4 examples/huggingface_trainer.py    # 4 processes

It needs transformers and accelerate. Optimizers, schedules, clipping, accumulation and `gradient_checkpointing` are the
Trainer's own. Save with `save_huggingface` or `fspmd.save`, not with the Trainer: it lets one process save alone.
"""

from __future__ import annotations

import tempfile
from typing import Any

import optree
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fspmd
from fspmd import ColwiseParallel, P, RowwiseParallel

BATCH, LENGTH = 16, 12
mesh = fspmd.make_mesh((2, 2), ("dp", "tp"), device="cpu")
first = not any(mesh.coordinate() or ())
STYLES = {
    "model.embed_tokens": fspmd.VocabParallel(),
    **{f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "model.layers.*.self_attn.o_proj": RowwiseParallel(),
    **{f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "model.layers.*.mlp.down_proj": RowwiseParallel(),
    "lm_head": ColwiseParallel(),
}


class ShardedTrainer(Trainer):
    """A Trainer of a model with `Sharded` parameters. Each process loads its rows of a batch, as always."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False  # the loss of the model is the mean over the rows of all processes
        prepare = self.accelerator.prepare_model
        self.accelerator.prepare_model = lambda model, **_: prepare(model, evaluation_mode=True)  # without DDP

    def _prepare_inputs(self, inputs: dict[str, Any]) -> Any:
        """The rows of all processes as one batch, of which each rank has its rows."""
        return fspmd.from_process_local(dict(super()._prepare_inputs(inputs)), P(mesh.axis_names), mesh=mesh)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """What evaluation gathers from all processes: the loss, and the rows of this process."""
        results: Any = super().prediction_step(*args, **kwargs)
        return optree.tree_map(_rows, results)


def _rows(x: Any) -> Any:
    if mesh.transport == "simulation":  # the only process has loaded all rows
        return fspmd.device_get(x)
    return fspmd.reshard(x, P(mesh.axis_names) if x.ndim else P()).local


def sentences(count: int) -> list[dict[str, Tensor]]:
    """Numbers that grow by a step of each sentence's own, modulo 29. Padding has the label -100."""
    rows = [(torch.arange(LENGTH) * (1 + i % 7) + i) % 29 for i in range(count)]
    is_padding = [torch.arange(LENGTH) >= LENGTH - i % 4 for i in range(count)]
    return [{"input_ids": x, "labels": x.masked_fill(pad, -100)} for x, pad in zip(rows, is_padding, strict=True)]


def main(epochs: int = 6) -> tuple[float, float]:
    """The losses before and after."""
    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=30, hidden_size=32, intermediate_size=64, **heads)).double()
    params, plan = fspmd.parallelize(dict(model.named_parameters()), STYLES, mesh, axis="tp")
    fspmd.attach(model, (params, fspmd.device_put(dict(model.named_buffers()), P(), mesh=mesh)), styles=plan)
    rows = BATCH if mesh.transport == "simulation" else BATCH // mesh.size  # of one process
    options: dict[str, Any] = {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows, "seed": 0}
    options |= {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, use_cpu=True, num_train_epochs=epochs, learning_rate=5e-3, **options)
        trainer = ShardedTrainer(model, arguments, train_dataset=sentences(64), eval_dataset=sentences(32))
        before: float = trainer.evaluate()["eval_loss"]
        trainer.train()
        after: float = trainer.evaluate()["eval_loss"]
    if first:
        print(f"q_proj: {model.model.layers[0].self_attn.q_proj.weight!r}")
        print(f"loss: {before:.4f} before, {after:.4f} after {trainer.state.global_step} steps")
    return before, after


if __name__ == "__main__":
    main()
