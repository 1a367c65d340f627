#!/usr/bin/env python3
"""Measures reading with the Python client: `read` record by record against `read_arrow`.

    .venv/bin/python bench/client.py            # a million 200-byte records, 3 repetitions
    .venv/bin/python bench/client.py --quick    # 100,000, 1 repetition

One stream of JSON records, 100 per POST, read from start to tail in one process: `read` (decoded values), `read_arrow` (the
four default columns), both blocking and async, and `read(numbered=True)`. Interleaved; the best of each counts; every
run must see every record and every byte. `bench/spark.py --only client` measures the same.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from durability import session
from pipeline import tables
from pipeline.client_cells import RECORDS, measure_client


def measure(run: session.Session, options: argparse.Namespace, root: Path) -> None:
    measure_client(run, options, root, options.records)


def main(arguments: list[str]) -> int:
    parser = session.parser(__doc__, repetitions=3)
    parser.add_argument("--records", type=int, help=f"records ({RECORDS:,}, quick: a tenth)")
    options = session.finish(parser, arguments)
    if options.records is None:
        options.records = RECORDS // 10 if options.quick else RECORDS
    return session.run("client", options, arguments, measure, tables.report)


if __name__ == "__main__":
    session.main("client.py", main)
