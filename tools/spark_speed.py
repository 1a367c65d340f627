"""What the Spark benchmark has measured, for docs/guides/spark.md: of each of its cells the newest run in bench/results.

To take in a new run, keep the folder that it wrote and write the document:

    .venv/bin/python bench/spark.py --only read,json,jobs,client && python tools/gen_docs.py

Invariants: every figure is one of a kept run, with its date, command and commit; a run that was quick or cut off is none;
a bound that did not hold is shown like one that did.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

from comparison.servers import BENCH
from durability.session import heading
from pipeline.tables import report

RESULTS = BENCH / "results"


def spark_speed(results: Path = RESULTS) -> str:
    """Date and tables of each run that is the newest one of a cell, with these cells only."""
    runs = [json.loads(file.read_text()) for file in results.glob("*/results.json")]
    runs = [run for run in runs if run.get("benchmark") == "spark" and run["complete"]]
    runs = sorted((run for run in runs if not run["quick"]), key=lambda run: run["started"])
    newest = {record["cell"]: run["started"] for run in runs for record in run["records"]}
    parts = [_part(run, newest) for run in reversed(runs)]
    return "\n\n".join(part for part in parts if part)


def _part(run: dict[str, Any], newest: dict[str, str]) -> str:
    records = [one for one in run["records"] if newest[one["cell"]] == run["started"]]
    if not records:
        return ""
    lines, _ = report({**run, "records": records})
    return "\n".join([*heading(run), "", *lines])
