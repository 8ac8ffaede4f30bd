"""What recorded programs cost: ``python benchmarks/jit.py``.

python benchmarks/jit.py                    # every group, as Markdown tables
python benchmarks/jit.py replays            # some of them
python benchmarks/jit.py --json times.json  # the figures as well, with quartiles
"""

from __future__ import annotations

from report import report

GROUPS = ("replays", "recordings", "predictions")

if __name__ == "__main__":
    report(__doc__, GROUPS)
