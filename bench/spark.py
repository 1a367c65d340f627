#!/usr/bin/env python3
"""Measures the Spark connector beside Spark's own sources, in one session on the same cores.

    .venv/bin/python bench/spark.py            # 1 GiB of 200-byte records, 3 repetitions
    .venv/bin/python bench/spark.py --quick    # a tenth, 1 repetition
    .venv/bin/python bench/spark.py --only read,json,jobs,client

read   Batch read of JSON records, the four default columns, count and sum(length(value)), warm: from the server
       (one record per append, and 100 per POST), from local pre-encoded Arrow files through the same API, and from
       snappy Parquet. Interleaved; the best of each counts; every run must see every record and every byte.
json   Batch read of a tenth of the records with `valueFormat=json` and with `from_json` over raw values, into the noop sink,
       warm: clean records, records with a decimal, 1 % and 10 % of records with a value of the wrong type, 1 % with one inside
       an object, 1 % with a number out of range. Interleaved; the best of each counts; both must give the same sums and the
       same number of corrupt records.
jobs   `decode` (clean records, and 1 % of them with a value of the wrong type), `deduplicate` and `materialise` of a quarter of the
       records, in 2 micro-batches: from streams, and the same job from snappy Parquet (`pipeline/job_cells.py` says how they are
       made equal), warm, the best of each counts. After every run rows and checksum of the target are those of a fold
       in plain Python.
write  Streaming write of 200-byte values, AvailableNow, class fsync: rows over the addBatch time; afterwards the
       stream is read back and its checksum compared with that of the rows.
floor  Micro-batches of 10 rows with the checkpoint on tmpfs: median trigger time of 50, connector and
       `rate-micro-batch`, both into the noop sink.
client `read` against `read_arrow` of the Python client (`client.py`), without Spark.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from durability import session
from pipeline import cells, client_cells, job_cells, json_cells, tables

RECORDS = (1 << 30) // 200
CELLS = ("read", "json", "jobs", "write", "floor", "client")


def main(arguments: list[str]) -> int:
    parser = session.parser(__doc__, repetitions=3)
    parser.add_argument(
        "--records", type=int, help=f"records to read ({RECORDS:,}, quick: a tenth)"
    )
    parser.add_argument("--only", default=",".join(CELLS), help=", ".join(CELLS))
    parser.add_argument("--master", default="local[2]", help="where Spark runs (local[2])")
    parser.add_argument(
        "--conf", action="append", default=[], help="further Spark settings: key=value"
    )
    options = session.finish(parser, arguments)
    if options.records is None:
        options.records = RECORDS // 10 if options.quick else RECORDS
    options.only = options.only.split(",")
    unknown = set(options.only) - set(CELLS)
    if unknown or options.records < 1000:
        parser.error(
            f"--only does not know {sorted(unknown)}" if unknown else "--records is too small"
        )
    return session.run("spark", options, arguments, measure, tables.report)


def measure(run: session.Session, options: argparse.Namespace, root: Path) -> None:
    if "client" in options.only:
        client_cells.measure_client(run, options, root, options.records // 5)
    if options.only == ["client"]:
        return
    with cells.SparkSide(options, root) as spark:
        if "read" in options.only:
            cells.measure_read(run, spark, options, root)
        if "json" in options.only:
            json_cells.measure_json(run, spark, options, root)
        if "jobs" in options.only:
            job_cells.measure_jobs(run, spark, options, root)
        if "write" in options.only:
            cells.measure_write(run, spark, options, root)
        if "floor" in options.only:
            cells.measure_floor(run, spark, options, root)


if __name__ == "__main__":
    session.main("spark", main)
