"""Jobs whose driver is killed: for each one records, runs to every kind of target at once, and the fold that it must equal.

Where it sits: used by tests/spark/test_kills.py; drivers load this file by its path for `run_all`. All runs of a job share a
driver, so a kill hits each of them at another moment.

Invariants: the records come from a seed; what a target has to hold is computed in plain Python from the records and, where the
result is by batch, from the batches that the checkpoint names.
"""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq

from millstream.client.sync.client import Client
from millstream.spark import jobs
from millstream.spark.jobs.run import driver
from millstream.spark.jobs.shared.table_versions import Versions
from support import changelog, json_orders
from support.spark_jobs import JSON, Sum, checksum, records, rows

ROWS_PER_BATCH = 40
ROWS_PER_APPEND = 20


def run_all(spark: Any, *, url: str, job: str, runs: list[dict[str, Any]]) -> list[int]:
    """Runs of one job at the same time, each to the tail; returns their rows."""
    queries = [jobs.JOBS[job](spark, "in", url=url, **given) for given in runs]
    return [driver.watch(query, lambda _: None).rows for query in queries]


class Killed(ABC):
    """One job, with its source filled."""

    job: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, client: Client, folder: Path, chance: random.Random, batches: int) -> None:
        self.client = client
        self.folder = folder
        self.table = chance.choice(["parquet", "delta"])
        self.sent = self.records(batches * ROWS_PER_BATCH, chance.randrange(1 << 32))
        stream = client.create("in", content_type=JSON)
        for first in range(0, len(self.sent), ROWS_PER_APPEND):
            stream.append_many(self.sent[first : first + ROWS_PER_APPEND])

    @abstractmethod
    def records(self, count: int, seed: int) -> list[bytes]:
        """What is read."""

    @abstractmethod
    def targets(self) -> list[dict[str, Any]]:
        """Where it goes: `to`, and the options that only this run has."""

    @abstractmethod
    def check(self) -> None:
        """Every target equals the fold."""

    def runs(self) -> list[dict[str, Any]]:
        """What `run_all` is told: plain JSON, the same in every round."""
        usual = {**self.options, "max_rows": ROWS_PER_BATCH}
        return [
            {**usual, "checkpoint": str(self.checkpoint(number)), **target}
            for number, target in enumerate(self.targets())
        ]

    def checkpoint(self, number: int) -> Path:
        return self.folder / f"checkpoint-{number}"

    def batches(self, number: int) -> int:
        """How many batches of a run are planned; the last ones may be under way."""
        offsets = self.checkpoint(number) / "offsets"
        return sum(file.name.isdigit() for file in offsets.iterdir()) if offsets.is_dir() else 0

    def ends(self, number: int) -> list[int]:
        """How many records were read with each batch of a run and all before it."""
        places = (self.checkpoint(number) / "offsets").iterdir()
        files = sorted((file for file in places if file.name.isdigit()), key=lambda f: int(f.name))
        offsets = [json.loads(file.read_text().splitlines()[-1]) for file in files]
        return [offset["streams"]["in"]["n"] for offset in offsets]

    def everything(self) -> dict[str, Any]:
        """What must not change any more: streams by their content, files by name, size and time."""
        streams = {
            info.path: checksum(records(self.client, info.path)) for info in self.client.list()
        }
        files = [
            (str(path), path.stat().st_size, path.stat().st_mtime_ns)
            for path in sorted(self.folder.rglob("*.parquet"))
        ]
        return {"streams": streams, "files": files}

    def lake(self) -> list[dict[str, Any]]:
        root = self.folder / "lake"
        if self.table == "parquet":
            return rows(root)
        found = pa.table(deltalake.DeltaTable(root).to_pyarrow_table()).to_pylist()
        return sorted(found, key=lambda row: (row["stream"], row["offset"]))

    def lake_target(self, **more: Any) -> dict[str, Any]:
        return {"to": str(self.folder / "lake"), "table": self.table, **more}


class Replay(Killed):
    job = "replay"
    options: ClassVar[dict[str, Any]] = {"start_offset": 7}

    def records(self, count: int, seed: int) -> list[bytes]:
        chance = random.Random(seed)
        return [b'{"n":%d , "x":%.3f}' % (n, chance.random()) for n in range(count)]

    def targets(self) -> list[dict[str, Any]]:
        self.end = len(self.sent) - 9
        return [{"to": "stream:out", "create": True, "end_offset": self.end}]

    def check(self) -> None:
        assert checksum(records(self.client, "out")) == checksum(self.sent[7 : self.end])


class Decode(Killed):
    job = "decode"
    options: ClassVar[dict[str, Any]] = {"schema": json_orders.SCHEMA, "create": True}

    def records(self, count: int, seed: int) -> list[bytes]:
        return json_orders.orders(count, seed)

    def targets(self) -> list[dict[str, Any]]:
        return [
            {"to": "stream:out", "dead_letters": "dead-of-stream"},
            self.lake_target(dead_letters="dead-of-lake"),
        ]

    def check(self) -> None:
        wanted = json_orders.good(self.sent)
        found = [json_orders.plain(json.loads(text)) for text in records(self.client, "out")]
        assert checksum(found) == checksum(wanted)
        assert checksum(map(json_orders.plain, self.lake())) == checksum(wanted)
        for stream in ("dead-of-stream", "dead-of-lake"):
            told = json_orders.as_letters(records(self.client, stream))
            assert told == json_orders.letters(self.sent), stream


class Deduplicate(Killed):
    job = "deduplicate"
    options: ClassVar[dict[str, Any]] = {"key": "id", "within": "1h", "event_time": "at"}

    def records(self, count: int, seed: int) -> list[bytes]:
        """A third of them come again, as they are, anywhere later; all of it within the hour."""
        chance = random.Random(seed)
        begin = datetime(2026, 3, 1, 23, 30, tzinfo=UTC)
        found: list[bytes] = []
        for n in range(count):
            if found and chance.random() < 0.33:
                found.append(chance.choice(found))
                continue
            at = begin + timedelta(seconds=n * 1800 / count)
            found.append(json.dumps({"id": f"k{n}", "at": at.isoformat()}).encode())
        return found

    def targets(self) -> list[dict[str, Any]]:
        return [{"to": "stream:out", "create": True}, self.lake_target()]

    def check(self) -> None:
        wanted = checksum(sorted(set(self.sent)))
        assert checksum(sorted(records(self.client, "out"))) == wanted
        assert checksum(sorted(row["value"] for row in self.lake())) == wanted


class Materialise(Killed):
    job = "materialise"

    def records(self, count: int, seed: int) -> list[bytes]:
        return [json.dumps(change).encode() for change in changelog.changes(count, seed)]

    def targets(self) -> list[dict[str, Any]]:
        return [{"to": "stream:out", "create": True}, self.lake_target()]

    def check(self) -> None:
        of_stream, of_lake = (list(map(self.folded, self.ends(number))) for number in (0, 1))
        found = changelog.snapshots(records(self.client, "out"))
        assert list(map(changelog.as_sum, found)) == [
            changelog.as_sum(changelog.without_offsets(state)) for state in of_stream
        ]
        versions = Versions(self.folder / "lake")
        numbers = versions.numbers()
        assert numbers[-1] == len(of_lake) - 1
        for number in numbers:
            table = pq.read_table(versions.path(number), partitioning=None)
            assert self.sum(table) == changelog.as_sum(of_lake[number]), f"version {number}"
        if self.table == "delta":
            delta = deltalake.DeltaTable(versions.root)
            assert self.sum(pa.table(delta.to_pyarrow_table())) == changelog.as_sum(of_lake[-1])
            assert delta.version() == len(of_lake)

    def folded(self, count: int) -> changelog.State:
        return changelog.fold([json.loads(text) for text in self.sent[:count]])

    @staticmethod
    def sum(table: pa.Table) -> Sum:
        state = changelog.state_of(table)
        assert len(state) == table.num_rows, "a key is there twice"
        return changelog.as_sum(state)


JOBS: dict[str, type[Killed]] = {
    kind.job: kind for kind in (Replay, Decode, Deduplicate, Materialise)
}
