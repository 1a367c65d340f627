"""The sums of an audit, in Spark: checksums per stream and range of records, and where they differ, record by record.

Where it sits: below `audit`. Both sides of a comparison are rows with `stream`, `offset` and what is compared; what comes to the driver
is a row per range, or per run of records that differ.

Invariants:
- I-CMP-1  Both sides are hashed by the same function of Spark over the same columns, and summed: order does not matter.
- I-CMP-2  Sums only raise a suspicion. What is reported has been compared record by record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from millstream.spark.jobs.audits.audit_report import FINDINGS_MAX, Finding
from millstream.spark.jobs.lake.contents import BROKEN

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyspark.sql import Column, DataFrame

LOW: Final = 0xFFFF_FFFF
UNBACKED: Final = "unbacked"
BACKED: Final = "backed"
AHEAD: Final = "ahead"
BEYOND: Final = "beyond"


@dataclass(frozen=True, slots=True)
class Bound:
    """Which records of a stream are compared."""

    stream: str
    first: int
    """The oldest one that the stream still has."""
    upto: int
    """Where the target has come to."""
    tail: int


@dataclass(frozen=True, slots=True)
class Suspect:
    """A range to be looked at record by record."""

    stream: str
    bucket: int
    first: int
    upto: int
    begin: int
    """Rows that are older, in microseconds, are of an earlier stream of the same name."""


@dataclass(frozen=True, slots=True)
class Sum:
    """One range of one stream, summed up."""

    stream: str
    part: str
    bucket: int
    rows: int
    low: int
    high: int
    first: int
    last: int
    inner: int
    """The sum of the numbers, each less the first one of the range."""
    begin: int | None
    """The earliest time, in microseconds."""

    @property
    def checksum(self) -> tuple[int, int, int]:
        return self.rows, self.low, self.high

    def is_contiguous(self, size: int) -> bool:
        """Each number from the first to the last is there once, as far as count and sum tell."""
        wanted = self.last - self.first + 1
        ends = self.first + self.last - 2 * self.bucket * size
        return self.rows == wanted and 2 * self.inner == wanted * ends


def hashed(rows: DataFrame, columns: Sequence[str]) -> DataFrame:
    """The rows with `hash`, over these columns."""
    from pyspark.sql import functions as f

    return rows.withColumn("hash", f.xxhash64(*(f.col(f"`{name}`") for name in columns)))


def parts(rows: DataFrame, bounds: Iterable[Bound]) -> DataFrame:
    """The rows of a lake with `part`: what becomes of them in the comparison."""
    from pyspark.sql import functions as f

    found = [(bound.stream, bound.first, bound.upto, bound.tail) for bound in bounds]
    limits = rows.sparkSession.createDataFrame(
        found, "stream string, first bigint, upto bigint, tail bigint"
    )
    number = f.col("offset")
    part = (
        f.when(f.col("first").isNull() | (number < f.col("first")), UNBACKED)
        .when(number < f.col("upto"), BACKED)
        .when(number < f.col("tail"), AHEAD)
        .otherwise(BEYOND)
    )
    joined = rows.join(f.broadcast(limits), "stream", "left").withColumn("part", part)
    return joined.drop("first", "upto", "tail")


def sums(rows: DataFrame, size: int) -> tuple[list[Sum], set[str]]:
    """A sum for each stream, part and range of `size` records; and the files that could not be read."""
    from pyspark.sql import functions as f

    found = rows
    for name, column in (("part", f.lit(BACKED)), (BROKEN, f.lit(None).cast("string"))):
        if name not in rows.columns:
            found = found.withColumn(name, column)
    time: Column = f.unix_micros(f.min("timestamp")) if "timestamp" in rows.columns else f.lit(None)
    collected = (
        found.withColumn("bucket", _bucket(size))
        .groupBy("stream", "part", "bucket")
        .agg(
            f.count("offset").alias("rows"),
            f.sum(f.col("hash").bitwiseAND(f.lit(LOW))).alias("low"),
            f.sum(f.shiftrightunsigned("hash", 32)).alias("high"),
            f.min("offset").alias("first"),
            f.max("offset").alias("last"),
            f.sum(f.col("offset") - f.col("bucket") * size).alias("inner"),
            time.cast("bigint").alias("begin"),
            f.collect_set(BROKEN).alias("broken"),
        )
        .collect()
    )
    broken = {path for row in collected for path in row["broken"]}
    names = Sum.__slots__
    found_sums = [
        Sum(**{name: row[name] for name in names}) for row in collected if row["stream"] is not None
    ]
    return sorted(found_sums, key=lambda one: (one.stream, one.part, one.bucket)), broken


def records(
    stream: DataFrame, lake: DataFrame, suspects: Sequence[Suspect], size: int
) -> tuple[list[Finding], dict[tuple[str, str], int]]:
    """The records of suspicious ranges that differ, in runs; and how many they are, by kind and stream."""
    from pyspark.sql import functions as f

    wanted = _within(stream, suspects, size).select(
        "stream", "offset", f.col("hash").alias("wanted")
    )
    found = _within(lake, suspects, size).select("stream", "offset", f.col("hash").alias("found"))
    same = (f.col("found") == f.col("wanted")) & f.col("found").isNotNull()
    other = f.col("found").isNotNull() & (
        f.col("wanted").isNull() | (f.col("found") != f.col("wanted"))
    )
    counted = (
        wanted.join(found, ["stream", "offset"], "full")
        .groupBy("stream", "offset")
        .agg(
            f.max("wanted").alias("wanted"),
            f.count_if(same).alias("same"),
            f.count_if(other).alias("other"),
        )
    )
    kind = (
        f.when(f.col("wanted").isNull(), "extra")
        .when((f.col("same") == 0) & (f.col("other") == 0), "missing")
        .when(f.col("same") == 0, "altered")
        .when(f.col("same") > 1, "doubled")
        .when(f.col("other") > 0, "extra")
    )
    return runs(counted.withColumn("kind", kind).where(f.col("kind").isNotNull()))


def runs(differing: DataFrame) -> tuple[list[Finding], dict[tuple[str, str], int]]:
    """Records with a `kind`, neighbours put together."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    order = Window.partitionBy("stream", "kind").orderBy("offset")
    found = (
        differing.withColumn("island", f.col("offset") - f.row_number().over(order))
        .groupBy("kind", "stream", "island")
        .agg(
            f.min("offset").alias("first"),
            f.max("offset").alias("last"),
            f.count("*").alias("records"),
        )
        .cache()
    )
    try:
        totals = found.groupBy("kind", "stream").agg(f.sum("records").alias("records")).collect()
        listed = found.orderBy("stream", "first").limit(FINDINGS_MAX).collect() if totals else []
    finally:
        found.unpersist()
    names = Finding.__slots__
    return (
        [Finding(**{name: row[name] for name in names}) for row in listed],
        {(row["kind"], row["stream"]): row["records"] for row in totals},
    )


def repetitions(lake: DataFrame, suspects: Sequence[Suspect], size: int) -> list[Any]:
    """Of ranges that no stream backs: rows, numbers, and rows that differ, each by range."""
    from pyspark.sql import functions as f

    rows = _within(lake, suspects, size)
    return (
        rows.groupBy("stream", "bucket")
        .agg(
            f.count("*").alias("rows"),
            f.countDistinct("offset").alias("numbers"),
            f.countDistinct("offset", "hash").alias("distinct"),
            f.min("offset").alias("first"),
            f.max("offset").alias("last"),
        )
        .collect()
    )


def _within(rows: DataFrame, suspects: Sequence[Suspect], size: int) -> DataFrame:
    from pyspark.sql import functions as f

    listed = [(one.stream, one.bucket, one.first, one.upto, one.begin) for one in suspects]
    ranges = rows.sparkSession.createDataFrame(
        listed, "stream string, bucket bigint, first bigint, upto bigint, begin bigint"
    )
    number = f.col("offset")
    kept = rows.withColumn("bucket", _bucket(size)).join(f.broadcast(ranges), ["stream", "bucket"])
    kept = kept.where((number >= f.col("first")) & (number < f.col("upto")))
    if "timestamp" in rows.columns:
        kept = kept.where(f.unix_micros("timestamp") >= f.col("begin"))
    return kept


def _bucket(size: int) -> Column:
    from pyspark.sql import functions as f

    return f.expr(f"offset div {size}")
