"""The peak that a program predicts, beside the peak that torch's profiler measures on processes."""

from typing import Any

import torch
from full import FULL
from memory_programs import compare, of_decoding, of_experts
from processes import Processes

STEPS: list[tuple[str, str, Any, bool, int]] = [
    ("transformer", "gathers", None, False, 2),
    ("mlp", "waits", None, True, 3),
    ("mlp", "gathers", None, True, 2),
    ("transformer", "waits", None, True, 2),
    ("transformer", "gathers", None, True, 1),
]


def test_predicted_peaks_are_those_measured() -> None:
    """A thread of Gloo frees the operand of a collective some time after it. So the least of several peaks counts."""
    with Processes(4) as pool:
        for step in STEPS if FULL else STEPS[:2]:
            found = pool.run(compare, *step)
            (predicted,), measured = {row[0] for row in found}, min(row[1] for row in found)
            assert abs(predicted / measured - 1) < 0.05, (step, predicted, measured)


PARTS: list[tuple[Any, ...]] = [
    (of_experts, 64, 32, torch.float32),
    (of_decoding, 4, 511, torch.bfloat16),
    (of_experts, 512, 128, torch.float32),
    (of_experts, 256, 64, torch.bfloat16),
    (of_experts, 256, 64, torch.float64),
    (of_decoding, 4, 511, torch.float32),
    (of_decoding, 2, 2047, torch.float64),
]


def test_predicted_peaks_of_experts_and_of_decoding_are_those_measured() -> None:
    with Processes(4) as pool:
        for part, *sizes in PARTS if FULL else PARTS[:2]:
            found = pool.run(part, *sizes)
            (predicted,), measured = {row[0] for row in found}, min(row[1] for row in found)
            assert abs(predicted / measured - 1) < 0.05, (part, sizes, predicted, measured)
