"""What the faults happen to: a query that copies a stream, run in the test's session or in a driver of its own.

The rows that a task reads are passed on unchanged, so the target must equal the source. The parts that fail on purpose sit
between source and sink, in the task: the first attempt fails in the middle, or waits until a second one has begun.
Everything here can be imported alone: drivers load this file by its path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support.spark import available_now

STAGE_BYTES = 64 * 1024
"""The smallest: a task makes several stages, so that there is a middle to fail in."""
ROWS_SETTING = "spark.sql.execution.arrow.maxRecordsPerBatch"
ROWS_AT_ONCE = "100"
ROWS_BEFORE_TROUBLE = 2000
"""400 kB: more than the buffers between two Python workers hold, so that the sink has staged some of them."""
WAIT_S = 120.0


def copy(
    spark: Any,
    *,
    url: str,
    source: str,
    target: str,
    checkpoint: str,
    rows_per_batch: int,
    partitions: int,
    trouble: str = "",
    folder: str = "",
    shuffle: int = 0,
    patience_s: int = 60,
    write_options: dict[str, str] | None = None,
    deadline_s: float = 240.0,
) -> list[int]:
    """Copy what is there now, batch by batch. Returns the ids of the batches that ran."""
    frame = (
        spark.readStream.format("millstream")
        .option("url", url)
        .option("subscribe", source)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", rows_per_batch)
        .option("minPartitions", partitions)
        .option("columns", "value")
        .load()
    )
    if trouble:
        frame = frame.mapInArrow(TROUBLE[trouble](folder), "value binary")
    if shuffle:
        frame = frame.repartition(shuffle, "value")
    writer = (
        frame.writeStream.format("millstream")
        .option("url", url)
        .option("stream", target)
        .option("stageBytes", STAGE_BYTES)
        .option("readTimeout", f"{patience_s}s")
        .option("checkpointLocation", checkpoint)
    )
    for name, value in (write_options or {}).items():
        writer = writer.option(name, value)
    usual = spark.conf.get(ROWS_SETTING)
    spark.conf.set(ROWS_SETTING, ROWS_AT_ONCE)
    try:
        return [progress["batchId"] for progress in available_now(writer, deadline_s=deadline_s)]
    finally:
        spark.conf.set(ROWS_SETTING, usual)


def stage_mark(folder: str, batch: str, partition: int, attempt: int) -> Path:
    """The file by which the test says that this attempt has staged something."""
    return Path(folder, f"staged-{batch}-{partition}-{attempt}")


def wait_until_exists(file: Path) -> None:
    until = time.monotonic() + WAIT_S
    while not file.exists():
        if time.monotonic() > until:
            raise AssertionError(f"{file.name} did not come")
        time.sleep(0.02)


def fail_once(folder: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Every task of the second batch fails in its first attempt, after it has staged some of its rows."""

    def rows(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        batch_id = context.getLocalProperty("streaming.sql.batchId")
        fails = context.attemptNumber() == 0 and batch_id == "1"
        passed = 0
        for batch in batches:
            if fails and passed >= ROWS_BEFORE_TROUBLE:
                wait_until_exists(stage_mark(folder, batch_id, context.partitionId(), 0))
                raise RuntimeError("this attempt fails on purpose")
            yield batch
            passed += batch.num_rows

    return rows


def wait_for_twin(folder: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Partition 1 goes on only when both of its attempts, the first and the speculative one, have staged rows."""

    def rows(batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        batch_id = context.getLocalProperty("streaming.sql.batchId")
        twin = 1 if context.attemptNumber() == 0 else 0
        passed = 0
        for batch in batches:
            if context.partitionId() == 1 and passed >= ROWS_BEFORE_TROUBLE:
                wait_until_exists(stage_mark(folder, batch_id, 1, twin))
            yield batch
            passed += batch.num_rows

    return rows


TROUBLE: dict[str, Callable[[str], Callable[[Iterator[Any]], Iterator[Any]]]] = {
    "fail once": fail_once,
    "wait for twin": wait_for_twin,
}
