"""The output of a training program: a progress bar of one line, and the loss curve as a picture."""

from __future__ import annotations

import sys
from pathlib import Path


def progress(done: int, steps: int, text: str) -> str:
    """A bar and a text. A terminal shows one line that changes; a file gets ten lines in all."""
    line = f"[{'#' * (30 * done // steps):<30}] step {done}/{steps}  {text}"
    if sys.stdout.isatty():
        return f"\r{line}" + ("\n" if done == steps else "")
    return f"{line}\n" if done == steps or done % max(1, steps // 10) == 0 else ""


def picture(path: Path, losses: list[float], validation: float, bigram: float) -> str:
    """Draw the loss curve into a PNG file, and return a line that says where it is."""
    try:
        import matplotlib
    except ImportError:
        return "no picture of the loss curve: pip install matplotlib"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), losses, lw=1, label="training loss")
    axes.axhline(bigram, color="gray", ls="--", label=f"byte bigram, validation: {bigram:.3f}")
    axes.plot(len(losses), validation, "o", label=f"transformer, validation: {validation:.3f}")
    axes.set(xlabel="step", ylabel="nats per byte")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"the loss curve is in {path}"
