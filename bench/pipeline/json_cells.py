"""The cell of JSON values: `valueFormat=json` beside `from_json`, over records that fit and records that do not."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from comparison import machine
from comparison.cells import running
from comparison.servers import BenchError
from durability import session
from pipeline.cells import SparkSide
from pipeline.records import Records, fill, shares

SCHEMA = "id BIGINT, user STRING, at BIGINT, note STRING"
CORRUPT = ", _corrupt_record STRING"


class Prices(Records):
    """The records with a decimal each."""

    def __getitem__(self, number: int) -> bytes:
        price = b'{"price":%d.%02d,' % (number % 9973, number % 100)
        return price + super().__getitem__(number)[1:]


class Bad(Records):
    """Every so many records have another id: a text where a number belongs, or what is told."""

    def __init__(self, every: int, bad: bytes = b'"no","_":') -> None:
        super().__init__()
        self._every, self._bad = every, bad

    def __getitem__(self, number: int) -> bytes:
        record = super().__getitem__(number)
        return record.replace(b'"id":', b'"id":' + self._bad, 1) if self.is_bad(number) else record

    def is_bad(self, number: int) -> bool:
        return number % self._every == self._every // 2


class BadInside(Bad):
    """The records with an object each, in which the text is."""

    def __getitem__(self, number: int) -> bytes:
        x = b'"no"' if self.is_bad(number) else b"%d" % (number % 9973)
        return b'{"place":{"x":%s},' % x + Records.__getitem__(self, number)[1:]


VARIANTS: dict[str, tuple[Callable[[], Records], str]] = {
    "clean": (Records, SCHEMA),
    "decimals": (Prices, SCHEMA + ", price DECIMAL(10,2)"),
    "1 % bad": (lambda: Bad(100), SCHEMA),
    "1 % bad, nested": (lambda: BadInside(100), SCHEMA + ", place STRUCT<x: INT>"),
    "1 % bad, out of range": (lambda: Bad(100, b"9" * 19), SCHEMA),
    "10 % bad": (lambda: Bad(10), SCHEMA),
}


def measure_json(
    run: session.Session, spark: SparkSide, options: argparse.Namespace, root: Path
) -> None:
    count = max(1000, options.records // 10)
    with running(session.millstream(), root, "json") as server:
        frames: dict[tuple[str, str], Callable[[], DataFrame]] = {}
        for number, (name, (records, schema)) in enumerate(VARIANTS.items()):
            run.say(f"filling {count:,} records: {name}")
            parts = shares(f"bench/json-{number}", count)
            fill(server.url, parts, records(), 100)
            reader = spark.session.read.format("millstream").option("url", server.url)
            reader = reader.option("subscribe", ",".join(part.stream for part in parts))
            frames[name, "from_json"] = lambda raw=reader, schema=schema: raw.load().select(
                "offset",
                F.from_json(F.col("value").cast("string"), schema + CORRUPT).alias("value"),
            )
            typed = spark.session.read.format("millstream").options(
                url=server.url, subscribe=",".join(part.stream for part in parts),
                valueFormat="json", valueSchema=schema,
            )  # fmt: skip
            frames[name, "valueFormat"] = lambda typed=typed: typed.load().select("offset", "value")
            sums = [_sums(frames[name, by]()) for by in ("from_json", "valueFormat")]
            if sums[0] != sums[1] or sums[0][0] != count:
                raise BenchError(f"{name}: from_json gives {sums[0]}, valueFormat=json {sums[1]}")
            run.say(f"  {name}: rows, corrupt, sums {sums[0]}")
        for repetition in range(options.repetitions + 1):
            for (name, by), frame in frames.items():
                if repetition == 1:
                    machine.wait_until_quiet(options.quiet_wait)
                before, started = machine.own_cpu_seconds(), time.perf_counter()
                frame().write.format("noop").mode("overwrite").save()
                seconds = time.perf_counter() - started
                processor = machine.own_cpu_seconds() - before
                run.say(
                    f"  {repetition or 'warm-up'} {name}, {by}: {seconds:.2f} s, processor {processor:.2f} s"
                )
                if repetition:
                    run.add(
                        {
                            "cell": "json",
                            "records": name,
                            "by": by,
                            "seconds": seconds,
                            "processor": processor,
                            "rows": count,
                        }
                    )


def _sums(frame: DataFrame) -> tuple[int, ...]:
    flat = frame.select("value.*")
    row = flat.agg(
        F.count("*"), F.count("_corrupt_record"), F.sum("id"), F.sum("at"), F.sum(F.length("note")),
        F.sum(F.crc32(F.to_json(F.struct("*")).cast("binary"))),
    ).collect()[0]  # fmt: skip
    return tuple(row)
