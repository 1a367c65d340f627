"""The models that docs/guides/scheduling.md gives to dbt, run by DuckDB over a lake and a table in versions as the jobs write them."""

from __future__ import annotations

import datetime
import json
import re
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from millstream.cli.context import EXIT_CODES
from millstream.spark.jobs.lake.files import write_files
from millstream.spark.jobs.lake.layout import Layout, TaskPlace
from millstream.spark.jobs.lake.publish import Publisher
from millstream.spark.jobs.shared.table_versions import Versions
from support.server import ROOT

GUIDE = (ROOT / "docs" / "guides" / "scheduling.md").read_text()
SOURCE = re.compile(r"\{\{ source\('lake', '(\w+)'\) \}\}")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


def answer(model: str, data: Path) -> list[tuple[Any, ...]]:
    """What dbt would make a view of: each source is the text that `external_location` holds."""
    (sources,) = blocks("yaml")
    places = dict(re.findall(r'- name: (\w+)\n +config:\n +external_location: "(.*)"', sources))
    text = SOURCE.sub(lambda found: places[found[1]].replace("/data", str(data)), model)
    return duckdb.sql(text).order("1").fetchall()


def day(number: int) -> datetime.datetime:
    return datetime.datetime(2026, 3, number, tzinfo=datetime.UTC)


def test_the_models_read_what_the_jobs_write(tmp_path: Path) -> None:
    of_orders, of_users = blocks("sql")
    layout = Layout(tmp_path / "lake")
    records = pa.record_batch(
        {
            "stream": ["orders", "orders", "orders", "other"],
            "offset": pa.array(range(4)),
            "timestamp": pa.array([day(1), day(1), day(2), day(2)]),
            "value": [b'{"total":1.5}', b'{"total":2}', b'{"total":4}', b"not JSON"],
        }
    )
    files = write_files([records], layout, TaskPlace("q", 0, 0))
    Publisher(layout, None).publish("q", 0, files)
    assert answer(of_orders, tmp_path) == [
        (datetime.date(2026, 3, 1), 2, 3.5),
        (datetime.date(2026, 3, 2), 1, 4.0),
    ]

    versions = Versions(tmp_path / "users")
    for number, keys in enumerate((["a", "b"], ["b", "c"])):
        versions.path(number).mkdir(parents=True)
        values = [json.dumps({"n": number}) for _ in keys]
        pq.write_table(
            pa.table({"key": keys, "value": values}), versions.path(number) / "p.parquet"
        )
    assert answer(of_users, tmp_path) == [("b", '{"n": 1}'), ("c", '{"n": 1}')]


def test_every_exit_code_is_told() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \|", GUIDE, re.MULTILINE)
    assert {int(code) for row in rows for code in row.split(",")} == EXIT_CODES.keys()
