"""Lands batches in processes that die by SIGKILL at a chosen step, and reads the lake as other programs do.

Run as a script: `lake_steps.py FOLDER SCENARIOS` with scenarios as JSON; prints a JSON list of results. Every landing and
every reading is a process of its own, forked from this one, which has imported everything and done nothing (neither
pyarrow nor deltalake may be used before a fork). A landing that was told to die and did not is an error.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.dataset as dataset
import pyarrow.parquet as pq
import pyiceberg.catalog.sql  # noqa: F401 - imported once, before the forks

from millstream.spark.jobs.lake.files import WrittenFile, write_files
from millstream.spark.jobs.lake.iceberg import open_catalog
from millstream.spark.jobs.lake.layout import IDENTIFIER, Layout, TaskPlace
from millstream.spark.jobs.lake.publish import Manifest, Publisher
from millstream.spark.jobs.lake.tables import table_of
from millstream.spark.jobs.lake.target import table_at

QUERY = "0c3a9d52-6a1f-4a37-9d1c-3b2f7c6e8a10"
ROWS = 600
BATCHES = 3
MIDNIGHT = datetime.datetime(2026, 11, 16, tzinfo=datetime.UTC)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Dying(Publisher):
    """Ends the process by SIGKILL right after the step named `point`."""

    point = ""
    renames = 0

    def _after(self, step: str) -> None:
        if step == self.point:
            die()

    def link(self, draft: Path, manifest: Path) -> None:
        self._after("drafted")
        super().link(draft, manifest)

    def decide(self, query_id: str, batch_id: int, files: Any) -> Manifest:
        self._after("written")
        manifest = super().decide(query_id, batch_id, files)
        self._after("decided")
        return manifest

    def rename(self, temporary: Path, final: Path) -> None:
        super().rename(temporary, final)
        self.renames += 1
        self._after(f"renamed-{self.renames}")

    def place(self, manifest: Manifest) -> None:
        super().place(manifest)
        self._after("placed")

    def enter(self, manifest: Manifest) -> None:
        super().enter(manifest)
        self._after("entered")

    def clean(self, manifest: Manifest) -> None:
        super().clean(manifest)
        self._after("cleaned")


def records(first: int, count: int) -> Iterator[pa.RecordBatch]:
    """Records around midnight, of three streams: each task has files in several partitions."""
    numbers = list(range(first, first + count))
    spread = [number * 7919 % ROWS - ROWS // 2 for number in numbers]
    times = [MIDNIGHT + datetime.timedelta(milliseconds=away) for away in spread]
    yield pa.record_batch(
        {
            "stream": [f"chat/{number % 3}" for number in numbers],
            "offset": pa.array(numbers, pa.int64()),
            "timestamp": pa.array(times, pa.timestamp("us", "UTC")),
            "value": [f'{{"n":{number}}}'.encode() for number in numbers],
        }
    )


def land(layout: Layout, batch_id: int, tasks: int, point: str) -> None:
    files: list[WrittenFile] = []
    size = ROWS // tasks
    for task in range(tasks):
        place = TaskPlace(QUERY, batch_id, task)
        files += write_files(records(batch_id * ROWS + task * size, size), layout, place)
    publisher = Dying(layout, table_of(layout))
    publisher.point = point
    publisher.publish(QUERY, batch_id, files)


def read(layout: Layout) -> dict[str, list[int]]:
    """The record numbers that each kind of reader sees, sorted."""
    seen: dict[str, list[int]] = {}
    if layout.table == "parquet":
        table = dataset.dataset(layout.root, format="parquet", partitioning="hive").to_table()
        seen["pyarrow"] = table.column("offset").to_pylist() if table.num_rows else []
        found: list[int] = []
        for path in sorted(layout.root.rglob("*.parquet")):  # hidden directories too
            found += pq.ParquetFile(path).read(["offset"]).column("offset").to_pylist()
        seen["glob"] = found
    elif layout.table == "delta" and deltalake.DeltaTable.is_deltatable(str(layout.root)):
        table = pa.table(deltalake.DeltaTable(layout.root).to_pyarrow_table())
        seen["deltalake"] = table.column("offset").to_pylist()
    elif layout.table == "iceberg" and (layout.root / "metadata").exists():
        catalog = open_catalog(layout)
        seen["pyiceberg"] = catalog.load_table(IDENTIFIER).scan().to_arrow()["offset"].to_pylist()
        catalog.close()
    return {name: sorted(numbers) for name, numbers in seen.items()}


def forked(function: Callable[[], Any]) -> tuple[int, Any]:
    """Run in a process of its own; returns the signal that ended it, or 0, and the result."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        code = 1
        try:
            result = json.dumps(function()).encode()
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(result)
            code = 0
        except BaseException:  # noqa: BLE001 - whatever it was, this process ends here
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status), None
    if os.WEXITSTATUS(status) != 0:
        raise RuntimeError("a forked process failed")
    return 0, json.loads(data)


def play(folder: Path, scenario: dict[str, Any]) -> dict[str, Any]:
    """Whole batches up to `batch`, that one with each of `kills` and then to its end, whole batches up to the last."""
    layout = Layout(folder, scenario["table"], tuple(scenario["partition_by"]))
    dying = scenario["batch"]
    for batch in range(dying):
        forked(lambda batch=batch: land(layout, batch, 2, ""))
    between, kinds = [], []
    for tasks, point in scenario["kills"]:
        ended_by, _ = forked(lambda tasks=tasks, point=point: land(layout, dying, tasks, point))
        if ended_by != signal.SIGKILL:
            raise RuntimeError(f"the landing was to die at {point} and did not")
        between.append(forked(lambda: read(layout))[1])
        kinds.append(table_at(layout))
    forked(lambda: land(layout, dying, scenario["tasks"], ""))
    for batch in range(dying + 1, BATCHES):
        forked(lambda batch=batch: land(layout, batch, 2, ""))
    left = [path.name for path in (folder / "_millstream" / "tmp").rglob("*") if path.is_file()]
    after = forked(lambda: read(layout))[1]
    return {"between": between, "kinds": kinds, "after": after, "left": left}


def used_modules(folder: Path) -> list[str]:
    """Everything that landing and reading import."""
    for table in ("parquet", "delta", "iceberg"):
        layout = Layout(folder / table, table, ("date", "stream"))
        land(layout, 0, 1, "")
        read(layout)
    return sorted(sys.modules)


def main() -> None:
    folder, scenarios = Path(sys.argv[1]), json.loads(sys.argv[2])
    # Imported here once instead of in every process that lands.
    for name in forked(lambda: used_modules(folder / "warm"))[1]:
        if name not in sys.modules and name != "__mp_main__":
            importlib.import_module(name)
    results = [play(folder / f"lake-{number}", one) for number, one in enumerate(scenarios)]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
