"""A checkpoint of an earlier version resumes: the form of offsets is kept for ever."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.server import Server
from support.spark import available_now
from support.spark_reading import stream

GOLDEN = Path(__file__).resolve().parent / "golden" / "checkpoint-v1.tar.gz"
FORM = re.compile(
    r'\{"streams": \{("[^"]+": \{"at": "\d{16}_\d{16}", "id": "[^"]+", "n": \d+\}(, )?)+\}, "v": 1\}'
)


def test_the_golden_checkpoint_resumes(
    spark: Any, start_server: Callable[..., Server], tmp_path: Path
) -> None:
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(tmp_path, filter="data")
    kept = (tmp_path / "checkpoint" / "offsets" / "1").read_text().splitlines()[-1]
    assert FORM.fullmatch(kept), kept
    places = json.loads(kept)["streams"]
    assert {name: place["n"] for name, place in places.items()} == {
        "chat/1": 4, "chat/2": 6, "shop/orders": 30,
    }  # fmt: skip
    server = start_server(data_dir=tmp_path / "data")
    seen: list[tuple[int, list[tuple[str, int]]]] = []

    def look(part: Any, batch_id: int) -> None:
        rows = part.select("stream", "offset").collect()
        seen.append((batch_id, sorted((row.stream, row.offset) for row in rows)))

    frame = stream(spark, server.url, subscribePattern="(shop|chat)/.*")
    writer = frame.writeStream.foreachBatch(look)
    available_now(writer.option("checkpointLocation", str(tmp_path / "checkpoint")))
    expected = [("chat/3", 0), ("chat/3", 1), *(("shop/orders", n) for n in range(30, 35))]
    assert seen == [(2, expected)]
