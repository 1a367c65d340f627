"""Makes `checkpoint-v1.tar.gz`: a data directory and the checkpoint of a query that has read half of it.

Run once per version of the checkpoint's form, by hand: `python tests/spark/golden/make.py OUTPUT`. The archive is kept for
ever; test_golden.py resumes the checkpoint over the data directory and must get the other half.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import millstream
from millstream.spark.session import build_session
from support.server import Server
from support.spark import SMALL, available_now
from support.spark_reading import filled, more, stream


def make(output: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = Server(folder / "data")
        with millstream.connect(server.url) as client:
            orders = filled(client, "shop/orders", 30, per_append=10)
            filled(client, "chat/1", 4)
            filled(client, "chat/2", 6, per_append=6)
            session = build_session("golden", master="local[2]", conf=SMALL)
            frame = stream(
                session, server.url, subscribePattern="(shop|chat)/.*",
                startingOffsets="earliest", maxOffsetsPerTrigger=25,
            )  # fmt: skip
            writer = frame.writeStream.format("noop")
            available_now(writer.option("checkpointLocation", str(folder / "checkpoint")))
            session.stop()
            more(orders, 5, first=30)
            filled(client, "chat/3", 2)
        server.stop()
        with tarfile.open(output, "w:gz", compresslevel=9) as archive:
            for part in ("data", "checkpoint"):
                archive.add(folder / part, part)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
