"""What the local view costs, measured beside its peers: ``python benchmarks/local.py``, under three minutes.

python benchmarks/local.py                      # every group, as Markdown tables
python benchmarks/local.py psum_call simulated  # some of them
python benchmarks/local.py --json times.json    # the figures as well, with quartiles
"""

from __future__ import annotations

from report import report

GROUPS = ("psum_call", "map_call", "type_checks", "simulated", "gloo", "mesh_sizes", "import_cost")

if __name__ == "__main__":
    report(__doc__, GROUPS)
