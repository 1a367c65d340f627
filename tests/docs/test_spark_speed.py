"""What the guide says of speed is what kept runs have measured: the newest of each cell, with the bounds that failed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.server import ROOT


def keep(folder: Path, started: str, *cells: dict[str, Any], **changed: Any) -> None:
    where = {"processor": "p", "cores": "2", "memory": "m", "data directories": "d"}
    run = {
        "benchmark": "spark",
        "started": started,
        "command": "c",
        "source": "abc",
        "machine": where,
    }
    run |= {"quick": False, "complete": True, "records": list(cells), **changed}  # fmt: skip
    (folder / started).mkdir()
    (folder / started / "results.json").write_text(json.dumps(run))


def job(work: str, source: str, seconds: float) -> dict[str, Any]:
    more = {"processor": seconds, "rows": 1000}
    return {"cell": "jobs", "work": work, "source": source, "seconds": seconds, **more}


def shown(results: Path) -> str:
    program = (
        f"import pathlib, sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); import spark_speed\n"
        f"print(spark_speed.spark_speed(pathlib.Path({str(results)!r})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout


def test_of_each_cell_the_newest_whole_run_is_shown_and_its_failures_too(tmp_path: Path) -> None:
    write = {"cell": "write", "rows": 900_000, "seconds": 1.0}
    old = [job("materialise", "streams", 1.0), job("materialise", "parquet", 1.0)]
    keep(tmp_path, "2026-01-01", write, *old)
    new = [job("materialise", "streams", 2.0), job("materialise", "parquet", 1.0)]
    keep(tmp_path, "2026-01-02", *new)
    keep(tmp_path, "2026-01-03", *old, quick=True)
    keep(tmp_path, "2026-01-04", *old, complete=False)
    keep(tmp_path, "2026-01-05", *old, benchmark="classes")
    text = shown(tmp_path)
    jobs, writes = text.split("2026-01-01, `c`, source abc.")
    assert jobs.startswith("2026-01-02, `c`, source abc.")
    assert "| materialise, times Parquet | ≥ 0.6 | 0.50 | FAIL |" in jobs
    assert "materialise" not in writes
    assert "| streaming write, rows/s | ≥ 500,000 | 900,000 (900,000 to 900,000) | pass |" in writes
