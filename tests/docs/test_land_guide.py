"""The SQL that docs/guides/land.md gives to DuckDB, over a lake as the job writes it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from support.guides import blocks_of
from support.lakes import Lake
from support.server import ROOT

LAND = ROOT / "docs" / "guides" / "land.md"


def test_the_query_counts_what_is_in_the_lake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC)
    batch = pa.record_batch(
        {
            "stream": ["a", "b", "b"],
            "offset": pa.array([0, 0, 1]),
            "timestamp": [now] * 3,
            "value": [b"1", b"2", b"3"],
        }
    )
    Lake(tmp_path / "lake").add([batch])
    monkeypatch.chdir(tmp_path)
    (query,) = blocks_of(LAND, "sql")
    assert sorted(duckdb.sql(query).fetchall()) == [("a", 1), ("b", 2)]
