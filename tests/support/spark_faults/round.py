"""One round of a fault: a source stream, an empty target, a fault proxy before the server, and the comparison at the end."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from millstream.client.sync.client import Client
from support.fault_proxy import Call, FaultProxy
from support.server import Server
from support.spark_faults.jobs import STAGE_BYTES, stage_mark

ROWS_PER_BATCH = 2_000
ROWS_PER_BATCH_FOR_TROUBLE = 6_000
"""Enough that a task has staged rows before the trouble begins (`jobs.ROWS_BEFORE_TROUBLE`)."""
ROWS_PER_APPEND = 100
BATCHES = 3 if os.environ.get("MILLSTREAM_TEST_FULL") else 2
"""The trouble of some faults is in the second; at the full counts another one comes behind it."""
STAGE = "/v1/stage/"
COMMIT = "/v1/commit"
STAGE_ID = re.compile(r"-(?P<batch>\d+)-(?P<partition>\d+)-(?P<attempt>\d+)-[0-9a-f]{16}-\d+$")


class Round:
    """`arguments` are what `jobs.copy` needs; `check` compares the target with the source."""

    def __init__(
        self,
        server: Server,
        client: Client,
        proxy: FaultProxy,
        folder: Path,
        seed: int,
        rows_per_batch: int,
    ) -> None:
        self.server = server
        self.client = client
        self.proxy = proxy
        self.folder = folder
        self.random = random.Random(seed)
        self.rows_per_batch = rows_per_batch
        self.source = f"source-{seed}"
        self.target = f"target-{seed}"
        self.checkpoint = folder / f"checkpoint-{seed}"
        self.records = [
            json.dumps({"n": n, "text": f"{self.random.getrandbits(640):0160x}"}).encode()
            for n in range(BATCHES * rows_per_batch)
        ]
        stream = client.create(self.source, content_type="application/json")
        for first in range(0, len(self.records), ROWS_PER_APPEND):
            stream.append_many(self.records[first : first + ROWS_PER_APPEND])
        client.create(self.target, content_type="application/json")
        proxy.clear()

    def arguments(self, **changes: Any) -> dict[str, Any]:
        return {
            "url": self.proxy.url,
            "source": self.source,
            "target": self.target,
            "checkpoint": str(self.checkpoint),
            "rows_per_batch": self.rows_per_batch,
            "partitions": 2,
            "folder": str(self.folder),
            **changes,
        }

    def some_stage(self) -> int:
        """The number of a request that stages rows: any but the first, in any of the batches."""
        per_task = self.rows_per_batch // 2 // (STAGE_BYTES // 215)
        return self.random.randrange(2, 2 * per_task * BATCHES)

    def mark_stages(self) -> None:
        """Tell the tasks which attempts have staged something, by files (`jobs.stage_mark`)."""

        def mark(call: Call) -> None:
            found = stage_place(call)
            stage_mark(
                str(self.folder), found["batch"], int(found["partition"]), int(found["attempt"])
            ).touch()

        self.proxy.at("PUT", STAGE, mark, times=1_000_000, moment="after")

    def attempts(self, batch: int) -> set[tuple[int, int]]:
        """(partition, attempt) of every task that staged rows of this batch."""
        places = [
            stage_place(call) for call in self.proxy.seen("PUT", STAGE) if call.status in (200, 201)
        ]
        return {
            (int(place["partition"]), int(place["attempt"]))
            for place in places
            if int(place["batch"]) == batch
        }

    def commits(self) -> Iterator[dict[str, Any]]:
        """What the server answered to the commits that it got, lost answers too."""
        for call in self.proxy.seen("POST", COMMIT):
            if call.status == 200:
                yield {**json.loads(call.body), **json.loads(call.answer)}

    def written(self) -> list[bytes]:
        return [record.data for record in self.client.stream(self.target).read()]

    def check(self, *, ordered: bool = True) -> None:
        """Count, checksum and, where the plan keeps it, order of the target equal the source."""
        self.proxy.check()
        written = self.written()
        assert len(written) == len(self.records), (
            f"{len(written)} records, {len(set(written))} different, of {len(self.records)}"
        )
        assert checksum(sorted(written)) == checksum(sorted(self.records))
        if ordered:
            assert written == self.records, "the order differs"


def stage_place(call: Call) -> re.Match[str]:
    found = STAGE_ID.search(call.path)
    assert found is not None, call.path
    return found


def checksum(records: list[bytes]) -> str:
    digest = hashlib.sha256()
    for record in records:
        digest.update(len(record).to_bytes(4, "big") + record)
    return digest.hexdigest()
