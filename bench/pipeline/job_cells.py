"""The cells of the jobs: `decode`, `deduplicate` and `materialise` from streams, beside the same job from snappy Parquet.

Both are one run of the job by `driver.start`, to the same kind of target with the same sink and the same options, in micro-batches of
the same size. Only the source differs:

- from streams, what the job asks of the connector: decoded values for `decode`, the key for `deduplicate`, raw values for
  `materialise`;
- from Parquet, Spark's own file source over the same rows, read from those streams once and written with snappy: as many files per
  micro-batch as the connector makes tasks, each a task of its own, and `from_json` or `get_json_object` where the job
  wants decoded values or a key.

The time of a run is that of all its triggers, from the look for new data to the note of the commit. After every run its target is read:
rows and checksum must be those of a fold in plain Python over the records.
"""

from __future__ import annotations

import argparse
import json
import shutil
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

import millstream
from comparison import machine
from comparison.cells import running
from comparison.servers import BenchError
from durability import session
from millstream.spark import jobs
from millstream.spark.jobs.job import Request, Target
from millstream.spark.jobs.run import driver
from millstream.spark.jobs.shared.letters import CORRUPT
from millstream.spark.jobs.shared.table_versions import Versions
from pipeline.cells import QUERY_SECONDS, SparkSide
from pipeline.json_cells import SCHEMA, Bad
from pipeline.records import RECORD_BYTES, Records, Share, fill, shares

BATCHES = 2
KEYS = 50_000
ROWS = "stream string, offset bigint, timestamp timestamp, value binary"
Sums = tuple[int, ...]


class Repeated(Records):
    """Every tenth record is there for the second time."""

    def __getitem__(self, number: int) -> bytes:
        return super().__getitem__(number - 7 if number % 10 == 9 else number)


class Changes(Records):
    """Changes of the state protocol, each of one of `KEYS` keys; every tenth deletes it."""

    def __getitem__(self, number: int) -> bytes:
        operation = "delete" if number % 10 == 9 else "upsert"
        head = (
            f'{{"type":"user","key":"u{number * 7919 % KEYS:06d}","value":{{"at":{number},"note":"'
        )
        tail = f'"}},"headers":{{"operation":"{operation}"}}}}'
        room = RECORD_BYTES - len(head) - len(tail)
        return f"{head}{self.noise(number, room)}{tail}".encode()


@dataclass(frozen=True)
class Work:
    """A job, its records, and what must come out."""

    job: str
    records: Callable[[], Records]
    options: dict[str, str]
    from_rows: Callable[[DataFrame], DataFrame]
    """From raw rows to what the connector hands to the job."""
    wanted: Callable[[Records, list[Share]], Sums]
    found: Callable[[SparkSession, Path], Sums]


def _sum(texts: Iterable[bytes]) -> Sums:
    count = total = 0
    for text in texts:
        count += 1
        total += zlib.crc32(text)
    return count, total


def _sums(rows: DataFrame, *columns: str | Column) -> Sums:
    text = F.concat_ws("|", *columns).cast("binary")
    row = rows.agg(F.count("*"), F.coalesce(F.sum(F.crc32(text)), F.lit(0))).collect()[0]
    return row[0], row[1]


def _all(records: Records, parts: list[Share]) -> Iterable[bytes]:
    return (record for part in parts for record in records.range(part.first, part.count))


# ---------------------------------------------------------------------------- decode


def _decoded(rows: DataFrame) -> DataFrame:
    parsed = F.from_json(F.col("value").cast("string"), f"{SCHEMA}, {CORRUPT} STRING", {"columnNameOfCorruptRecord": CORRUPT})  # fmt: skip
    value = F.col("value")
    text = F.lit(None).cast("string")
    why = F.struct(
        value[CORRUPT].alias("record"), text.cast("binary").alias("bytes"), F.lit("wrong_type").alias("reason"),
        text.alias("field"), text.alias("detail"),
    )  # fmt: skip
    names = [part.split()[0] for part in SCHEMA.split(", ")]
    fields = [value[name].alias(name) for name in names]
    whole = F.struct(*fields, F.when(value[CORRUPT].isNotNull(), why).alias(CORRUPT))
    return rows.withColumn("value", parsed).withColumn("value", whole)


def _decode_wanted(records: Records, parts: list[Share]) -> Sums:
    good: list[bytes] = []
    bad: list[bytes] = []
    for text in _all(records, parts):
        row = json.loads(text)
        if isinstance(row["id"], int):
            good.append(f"{row['id']}|{row['user']}|{row['at']}|{row['note']}".encode())
        else:
            bad.append(text)
    return _sum(good) + _sum(bad)


def _decode_found(spark: SparkSession, lake: Path) -> Sums:
    return _sums(spark.read.parquet(str(lake)), "id", "user", "at", "note")


# ---------------------------------------------------------------------------- deduplicate


def _keyed(rows: DataFrame) -> DataFrame:
    key = F.get_json_object(F.col("value").cast("string"), "$.id")
    return rows.withColumn("key", key.cast("binary"))


def _deduplicate_wanted(records: Records, parts: list[Share]) -> Sums:
    return _sum(dict.fromkeys(_all(records, parts)))


def _deduplicate_found(spark: SparkSession, lake: Path) -> Sums:
    return _sums(spark.read.parquet(str(lake)), F.col("value").cast("string"))


# ---------------------------------------------------------------------------- materialise


def _materialise_wanted(records: Records, parts: list[Share]) -> Sums:
    found: Sums = (0, 0)
    for part in parts:
        state: dict[str, bytes] = {}
        for offset, text in enumerate(records.range(part.first, part.count)):
            change = json.loads(text)
            state.pop(change["key"], None)
            if change["headers"]["operation"] != "delete":
                value = json.dumps(change["value"], separators=(",", ":"))
                state[change["key"]] = f"{part.stream}|{change['key']}|{value}|{offset}".encode()
        found = tuple(map(sum, zip(found, _sum(state.values()), strict=True)))
    return found


def _materialise_found(spark: SparkSession, root: Path) -> Sums:
    versions = Versions(root)
    last = versions.path(versions.numbers()[-1])
    return _sums(spark.read.parquet(str(last)), "stream", "key", "value", "offset")


WORKS: dict[str, Work] = {
    "decode": Work("decode", Records, {"schema": SCHEMA}, _decoded, _decode_wanted, _decode_found),
    "decode, 1 % bad": Work(
        "decode", lambda: Bad(100), {"schema": SCHEMA}, _decoded, _decode_wanted, _decode_found
    ),
    "deduplicate": Work(
        "deduplicate", Repeated, {"key": "id", "within": "1h"}, _keyed, _deduplicate_wanted, _deduplicate_found,
    ),
    "materialise": Work(
        "materialise", Changes, {}, lambda rows: rows, _materialise_wanted, _materialise_found
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Prepared:
    """The records of one cell, in streams and in files."""

    work: Work
    url: str
    streams: tuple[str, ...]
    rows_per_batch: int
    files: Path
    files_per_batch: int
    wanted: Sums


def measure_jobs(
    run: session.Session, spark: SparkSide, options: argparse.Namespace, root: Path
) -> None:
    count = max(1000, options.records // 4)
    with running(session.millstream(), root, "jobs") as server:
        prepared = {name: _prepare(run, spark, server.url, root, name, count) for name in WORKS}
        for repetition in range(options.repetitions + 1):
            for number, (name, data) in enumerate(prepared.items()):
                for source in ("streams", "parquet"):
                    if repetition == 1:
                        machine.wait_until_quiet(options.quiet_wait)
                    label = f"{repetition}-{number}-{source}"
                    seconds, processor = _run(
                        spark, data, root / f"target-{label}", f"bench/dead-{label}", source
                    )
                    run.say(
                        f"  {repetition or 'warm-up'} {name} from {source}: {seconds:.2f} s, processor {processor:.2f} s"
                    )
                    if repetition:
                        run.add(
                            {
                                "cell": "jobs",
                                "work": name,
                                "source": source,
                                "seconds": seconds,
                                "processor": processor,
                                "rows": count,
                            }
                        )


def _prepare(
    run: session.Session, spark: SparkSide, url: str, root: Path, name: str, count: int
) -> Prepared:
    work = WORKS[name]
    records = work.records()
    run.say(f"filling {count:,} records for {name}, and writing them as Parquet")
    number = list(WORKS).index(name)
    parts = shares(f"bench/jobs-{number}", count)
    fill(url, parts, records, 100)
    folder = root / f"jobs-{number}"
    names = [part.stream for part in parts]
    rows = (
        spark.session.read.format("millstream").options(url=url, subscribe=",".join(names)).load()
    )
    per_batch = -(-count // BATCHES)
    each = -(-max(part.count for part in parts) // BATCHES)
    files = 0
    for batch in range(BATCHES):
        here = rows.where(F.col("offset").between(batch * each, (batch + 1) * each - 1))
        here.write.option("compression", "snappy").parquet(str(folder / f"batch-{batch}"))
        made = len(list((folder / f"batch-{batch}").glob("*.parquet")))
        if files not in (0, made):
            raise BenchError(f"batches of {files} and {made} files")
        files = made
    # One task for each file, as the connector has one for each of its parts.
    spark.session.conf.set("spark.sql.files.minPartitionNum", files)
    tasks = spark.session.read.parquet(str(folder / "batch-0")).rdd.getNumPartitions()
    run.say(f"  {files} files per micro-batch, {tasks} tasks")
    wanted = work.wanted(records, parts)
    return Prepared(work, url, tuple(names), per_batch, folder, files, wanted)


def _run(
    spark: SparkSide, data: Prepared, target: Path, dead: str, source: str
) -> tuple[float, float]:
    """One run of the job; returns its seconds, and those of the processor."""
    job = jobs.JOBS[data.work.job]
    letters = {"dead-letters": dead} if data.work.job == "decode" else {}
    if letters:
        with millstream.connect(data.url) as client:
            client.create(dead, content_type="application/json")
    request = Request(
        url=data.url, streams=data.streams, target=Target.parse(str(target)),
        options={**data.work.options, **letters}, rows_per_batch=data.rows_per_batch,
    )  # fmt: skip
    rows = None if source == "streams" else _file_rows(spark.session, data)
    driver.check(job, request)
    before = machine.own_cpu_seconds()
    query = driver.start(job, request, spark.session, source=rows)
    if not query.awaitTermination(QUERY_SECONDS):
        query.stop()
        raise BenchError(f"{data.work.job} took longer than {QUERY_SECONDS} s")
    processor = machine.own_cpu_seconds() - before
    progress = [one for one in query.recentProgress if "addBatch" in one["durationMs"]]
    sizes = [one["numInputRows"] for one in progress if one["numInputRows"]]
    found = data.work.found(spark.session, target)
    if letters:
        found += _letters(spark.session, data.url, dead)
    if found != data.wanted or len(sizes) != BATCHES:
        raise BenchError(
            f"{data.work.job} from {source} made {found} instead of {data.wanted} in batches of {sizes}"
        )
    shutil.rmtree(target)
    seconds = sum(one["durationMs"]["triggerExecution"] for one in progress) / 1000
    return seconds, processor


def _file_rows(spark: SparkSession, data: Prepared) -> DataFrame:
    reader = spark.readStream.schema(ROWS).option("maxFilesPerTrigger", data.files_per_batch)
    return data.work.from_rows(reader.parquet(f"{data.files}/batch-*"))


def _letters(spark: SparkSession, url: str, dead: str) -> Sums:
    rows: Any = spark.read.format("millstream").options(url=url, subscribe=dead).load()
    return _sums(rows, F.get_json_object(F.col("value").cast("string"), "$.value"))
