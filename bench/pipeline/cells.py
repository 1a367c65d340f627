"""The cells of the Spark benchmark: each prepares its data, runs, verifies, and records what it saw."""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from comparison import machine
from comparison.cells import running
from comparison.servers import BenchError
from durability import session
from pipeline.arrow_source import ArrowFileSource
from pipeline.records import RECORD_BYTES, Records, Share, fill, shares

BATCH_ROWS = 40_000
WRITE_STREAM = "bench/written"
WRITE_BATCHES, WRITE_FILES = 4, 8
FLOOR_BATCHES, FLOOR_ROWS = 50, 10
FLOOR_WARM_UP = 10
QUERY_SECONDS = 600


class SparkSide:
    """One session for all cells, so that all are equally warm."""

    def __init__(self, options: argparse.Namespace, root: Path) -> None:
        # Workers need this interpreter, which has the connector, and the source of the Arrow files.
        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)
        builder = (
            SparkSession.builder.master(options.master)
            .appName("millstream-bench")
            .config("spark.ui.enabled", "false")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.memory", "4g")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.local.dir", str(root / "spark"))
            .config("spark.sql.warehouse.dir", str(root / "warehouse"))
        )
        for setting in options.conf:
            key, _, value = setting.partition("=")
            builder = builder.config(key, value)
        self.session = builder.getOrCreate()
        self.session.sparkContext.setLogLevel("ERROR")
        self.session.dataSource.register(ArrowFileSource)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.session.stop()


def aggregate(frame: DataFrame) -> tuple[int, int, float]:
    """Rows, bytes of values, seconds."""
    started = time.perf_counter()
    row = frame.agg(F.count("*"), F.sum(F.length("value"))).collect()[0]
    return row[0], row[1], time.perf_counter() - started


def measure_read(
    run: session.Session, spark: SparkSide, options: argparse.Namespace, root: Path
) -> None:
    records = Records()
    with running(session.millstream(), root, "read") as server:
        sources: dict[str, Callable[[], DataFrame]] = {}
        for name, per_post in (("single", 1), ("hundred", 100)):
            parts = shares(f"bench/{name}", options.records)
            run.say(f"filling {options.records:,} records, {per_post} per POST")
            fill(server.url, parts, records, per_post)
            sources[name] = _reader(spark, server.url, parts)
        run.say("writing the Arrow and Parquet files")
        _write_files(root, shares("bench/files", options.records), records)
        session_of = spark.session
        sources["arrow"] = lambda: session_of.read.format("arrowfile").load(str(root / "arrow"))
        sources["parquet"] = lambda: session_of.read.parquet(str(root / "parquet"))
        sums = {name: _checksum(source()) for name, source in sources.items()}
        if len(set(sums.values())) != 1:
            raise BenchError(f"not the same values everywhere: {sums}")
        for repetition in range(options.repetitions + 1):
            for name, source in sources.items():
                if repetition == 1:
                    machine.wait_until_quiet(options.quiet_wait)
                before = machine.own_cpu_seconds()
                rows, size, seconds = aggregate(source())
                processor = machine.own_cpu_seconds() - before
                fine = (rows, size) == (options.records, options.records * RECORD_BYTES)
                run.say(
                    f"  {repetition or 'warm-up'} {name}: {seconds:.2f} s, processor {processor:.2f} s"
                )
                if not fine:
                    raise BenchError(f"{name} saw {rows:,} rows and {size:,} bytes")
                if repetition:
                    run.add(
                        {
                            "cell": "read",
                            "source": name,
                            "seconds": seconds,
                            "processor": processor,
                            "rows": rows,
                            "bytes": size,
                        }
                    )


def _reader(spark: SparkSide, url: str, parts: list[Share]) -> Callable[[], DataFrame]:
    names = ",".join(part.stream for part in parts)
    return lambda: (
        spark.session.read.format("millstream").option("url", url).option("subscribe", names).load()
    )


def _write_files(root: Path, parts: list[Share], records: Records) -> None:
    schema = pa.schema(
        [
            pa.field("stream", pa.string()),
            pa.field("offset", pa.int64()),
            pa.field("timestamp", pa.timestamp("us", tz="UTC")),
            pa.field("value", pa.binary()),
        ]
    )
    (root / "arrow").mkdir()
    (root / "parquet").mkdir()
    for number, part in enumerate(parts):
        with (
            pa.OSFile(str(root / "arrow" / f"{number}.arrow"), "wb") as file,
            pa.ipc.new_stream(file, schema) as arrow,
            pq.ParquetWriter(
                root / "parquet" / f"{number}.parquet", schema, compression="snappy"
            ) as parquet,
        ):
            for first in range(0, part.count, BATCH_ROWS):
                batch = _batch(schema, part, first, min(BATCH_ROWS, part.count - first), records)
                arrow.write_batch(batch)
                parquet.write_batch(batch)


def _batch(
    schema: pa.Schema, part: Share, first: int, count: int, records: Records
) -> pa.RecordBatch:
    now = 1_763_000_000_000_000
    columns = [
        pa.array([part.stream] * count, pa.string()),
        pa.array(range(first, first + count), pa.int64()),
        pa.array(range(now + first, now + first + count), pa.int64()).cast(
            pa.timestamp("us", tz="UTC")
        ),
        pa.array(list(records.range(part.first + first, count)), pa.binary()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def measure_write(
    run: session.Session, spark: SparkSide, options: argparse.Namespace, root: Path
) -> None:
    values = root / "values"
    ids = spark.session.range(0, options.records, 1, WRITE_FILES)
    _values(ids).write.parquet(str(values))
    made = _checksum(spark.session.read.parquet(str(values)))
    for repetition in range(options.repetitions + 1):
        with running(session.millstream(), root, f"write-{repetition}") as server:
            _create(server.url, WRITE_STREAM)
            checkpoint = root / f"write-checkpoint-{repetition}"
            query = (
                spark.session.readStream.schema("value string")
                .option("maxFilesPerTrigger", WRITE_FILES // WRITE_BATCHES)
                .parquet(str(values))
                .writeStream.format("millstream")
                .option("url", server.url)
                .option("stream", WRITE_STREAM)
                .option("checkpointLocation", str(checkpoint))
                .trigger(availableNow=True)
                .start()
            )
            if not query.awaitTermination(QUERY_SECONDS):
                query.stop()
                raise BenchError(f"the write took longer than {QUERY_SECONDS} s")
            progress = [one for one in query.recentProgress if one["numInputRows"]]
            written = sum(one["numInputRows"] for one in progress)
            seconds = sum(one["durationMs"]["addBatch"] for one in progress) / 1000
            there = _checksum(_reader(spark, server.url, [Share(WRITE_STREAM, 0, written)])())
            if there != made or written != options.records:
                raise BenchError(f"read back {there}, made {made}, counted {written}")
            run.say(
                f"  {repetition or 'warm-up'} write: {written / seconds:,.0f} rows/s in {len(progress)} batches"
            )
            if repetition:
                run.add({"cell": "write", "rows": written, "seconds": seconds})
            shutil.rmtree(checkpoint)


def _create(url: str, stream: str) -> None:
    import millstream

    with millstream.connect(url) as client:
        client.create(stream, content_type="text/plain")


def _values(ids: DataFrame) -> DataFrame:
    """200 bytes per row that follow from its id alone."""
    digest = F.sha2(F.col("id").cast("string"), 256)
    text = F.rpad(F.concat(digest, digest, digest), RECORD_BYTES, "x")
    return ids.select(text.alias("value"))


def _first_batches(query: Any, count: int) -> list[dict[str, Any]]:
    deadline = time.monotonic() + QUERY_SECONDS
    while time.monotonic() < deadline:
        done = [one for one in query.recentProgress if one["numInputRows"]]
        if len(done) >= count:
            return done
        if query.exception() is not None:
            raise BenchError(f"the query failed: {query.exception()}")
        time.sleep(0.05)
    raise BenchError(f"{count} batches took longer than {QUERY_SECONDS} s")


def _checksum(frame: DataFrame) -> tuple[int, int]:
    row = frame.agg(F.count("*"), F.sum(F.crc32(F.col("value").cast("binary")))).collect()[0]
    return row[0], row[1]


def measure_floor(
    run: session.Session, spark: SparkSide, options: argparse.Namespace, root: Path
) -> None:
    batches = FLOOR_BATCHES + FLOOR_WARM_UP
    with (
        running(session.millstream(), root, "floor") as server,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        parts = [Share("bench/floor", 0, batches * FLOOR_ROWS)]
        fill(server.url, parts, Records(), 1)
        sources = {
            "rate-micro-batch": spark.session.readStream.format("rate-micro-batch").option(
                "rowsPerBatch", FLOOR_ROWS
            ),
            "millstream": spark.session.readStream.format("millstream")
            .option("url", server.url)
            .option("subscribe", parts[0].stream)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", FLOOR_ROWS),
        }
        for repetition in range(options.repetitions):
            for name, reader in sources.items():
                checkpoint = Path(memory) / f"{name}-{repetition}"
                query = (
                    reader.load()
                    .writeStream.format("noop")
                    .option("checkpointLocation", str(checkpoint))
                    .trigger(processingTime="0 seconds")
                    .start()
                )
                try:
                    progress = _first_batches(query, batches)[FLOOR_WARM_UP:batches]
                finally:
                    query.stop()
                times = [one["durationMs"]["triggerExecution"] for one in progress]
                middle = statistics.median(times)
                run.say(f"  {repetition + 1} {name}: median {middle:.0f} ms of {len(times)}")
                run.add(
                    {"cell": "floor", "source": name, "median_ms": middle, "batches": len(times)}
                )
