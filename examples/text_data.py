"""Text as bytes: its source, batches of windows, and the byte-bigram model that a language model has to beat.

Nothing here knows about meshes. Every process reads the same text and draws the same batches from one seed, so the
order of the data does not depend on the mesh.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

VOCAB = 256
HELD_OUT = 10  # one part in ten is kept for validation


def load_text(path: str | None = None) -> tuple[Tensor, Tensor]:
    """The training and the validation bytes, each a uint8 tensor ``[N]``.

    With a path, the last tenth of that file is held out. Without one, the text is the source of Python's standard
    library in alphabetical order, and every tenth file is held out.
    """
    if path is not None:
        data = bytearray(Path(path).read_bytes())
        cut = len(data) - len(data) // HELD_OUT
        return as_tensor(data[:cut]), as_tensor(data[cut:])
    train, held_out = bytearray(), bytearray()
    for index, file in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
        (held_out if index % HELD_OUT == HELD_OUT - 1 else train).extend(file.read_bytes())
    return as_tensor(train), as_tensor(held_out)


def as_tensor(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8)


def windows(text: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and next-byte targets, int64 ``[B, S]`` each: the windows of the text that begin at ``starts`` ``[B]``."""
    block = text[starts[:, None] + torch.arange(length + 1)].long()
    return block[:, :-1], block[:, 1:]


def random_batches(text: Tensor, batch: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of random windows, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield windows(text, torch.randint(len(text) - length, (batch,), generator=generator), length)


def even_batches(text: Tensor, batch: int, length: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """``count`` batches whose windows lie evenly over the whole text, for a validation loss."""
    if len(text) <= length:
        raise ValueError(f"{len(text)} bytes are held out, too few for windows of {length}: give a longer text")
    starts = torch.linspace(0, len(text) - length - 1, count * batch).long()
    return [windows(text, part, length) for part in starts.split(batch)]


def bigram_loss(train: Tensor, batches: list[tuple[Tensor, Tensor]], prior: float = 0.01) -> float:
    """Nats per byte, over ``batches``, of the model that knows only how often one byte follows another."""
    pairs = train[:-1].long() * VOCAB + train[1:].long()
    counts = torch.bincount(pairs, minlength=VOCAB * VOCAB).double().view(VOCAB, VOCAB) + prior
    log_probability = (counts / counts.sum(1, keepdim=True)).log()
    losses = [-log_probability[inputs, targets].mean() for inputs, targets in batches]
    return float(torch.stack(losses).mean())


def printable(data: list[int]) -> str:
    """Bytes as text for a terminal. A larger vocabulary has tokens that are no bytes."""
    text = bytes(x if x < VOCAB else ord("?") for x in data).decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else " " for c in text)
