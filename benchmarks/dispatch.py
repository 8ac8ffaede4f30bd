"""What the global view costs, measured beside DTensor: ``python benchmarks/dispatch.py``, about three minutes.

    python benchmarks/dispatch.py                    # every group, as Markdown tables
    python benchmarks/dispatch.py ops misses         # some of them
    python benchmarks/dispatch.py --json times.json  # the figures as well, with quartiles

Everything runs in one process as rank 0 of 8 on torch's fake backend: what is timed is what the libraries themselves
do, not what a network does.
"""

from __future__ import annotations

from report import report

GROUPS = ("ops", "networks", "reshards", "misses", "wild", "draws", "shells")

if __name__ == "__main__":
    report(__doc__, GROUPS)
