"""Repetitions that are none: whose a producer id is, and what a call of foreachBatch has written already.

Where it sits: below `writer.py`. The server drops what comes again under one producer and epoch, which is right for a
batch that runs again and wrong for other rows under the same name. It cannot tell them apart; this can.

    spark/producers/<id>-<generation>    a stream without records, closed; its content type names the query that owns
                                         the id: creating it is the claim, creating it again is the question
    <session's files>/millstream/<hash>  on the driver, as long as the session: what the last call of a foreachBatch
                                         function has committed

Invariants:
- I-REP-1  A producer id and generation belong to the first query that commits under them, for good.
- I-REP-2  A write is noted after its commit was answered, so that one that failed may be tried again in the same call.
- I-REP-3  Rows are never dropped in silence: it is a warning, or an error where this call has written others.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from pyspark import SparkFiles

from millstream.client.pipeline_write import content_type_of, create_stream
from millstream.errors import OptionInvalid, ProducerFenced, StreamConflict
from millstream.spark.write.options import LOGGER

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from millstream.client.sync.client import Client

CLAIMS: Final = "spark/producers/"
OWNER_TYPE: Final = "application/vnd.millstream.spark-query."
SHOWN_STREAMS: Final = 3


def claim(
    client: Client, producer_id: str, generation: int, query: str, *, patience_seconds: float
) -> None:
    """Make sure that this query owns the producer id."""
    path = f"{CLAIMS}{quote(producer_id, safe='')}-{generation}"
    ours = OWNER_TYPE + query
    try:
        create_stream(
            client,
            path,
            content_type=ours,
            durability="fsync",
            closed=True,
            patience_seconds=patience_seconds,
        )
    except StreamConflict:
        owner = content_type_of(client, path, patience_seconds=patience_seconds)
        if owner == ours:
            return
        raise ProducerFenced(
            f"`producerId` `{producer_id}` belongs to another query ({owner.removeprefix(OWNER_TYPE)})",
            status=403,
            hint="give each query a `producerId` of its own, or leave it out; if the checkpoint of that "
            "query is gone and this one takes its place, raise `producerGeneration`: everything that "
            "this one reads is written again then",
        ) from None


class Write:
    """One committed write of a batch. `call` names the call of a foreachBatch function; None outside of one."""

    def __init__(
        self, producer: str, batch: int, call: str | None, streams: AbstractSet[str]
    ) -> None:
        self._producer = producer
        self._batch = batch
        self._call = call
        self._streams = streams

    def settle(self, dropped: int) -> None:
        """Note the write; `dropped` rows of it were taken for a repetition."""
        before = self._streams_before() if self._call is not None else set()
        if dropped:
            self._tell(dropped, before & self._streams)
        if self._call is not None:
            self._note(before | self._streams)

    def _tell(self, rows: int, twice: AbstractSet[str]) -> None:
        if twice:
            raise OptionInvalid(
                f"batch {self._batch} was written to {_names(twice)} before in this call of foreachBatch, "
                f"under the same `producerId`: {rows} rows would be dropped",
                hint="give each write of a batch a `producerId` of its own; or write the union of the "
                "frames at once",
            )
        LOGGER.warning(
            "%d rows of batch %d for %s were dropped: producer `%s` has committed this batch before",
            rows, self._batch, _names(self._streams), self._producer,
        )  # fmt: skip

    def _streams_before(self) -> set[str]:
        try:
            noted = json.loads(self._file().read_bytes())
        except FileNotFoundError:
            return set()
        same = (noted["call"], noted["batch"]) == (self._call, self._batch)
        return set(noted["streams"]) if same else set()

    def _note(self, streams: AbstractSet[str]) -> None:
        document = {"call": self._call, "batch": self._batch, "streams": sorted(streams)}
        file = self._file()
        file.parent.mkdir(exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(document))
        new.replace(file)

    def _file(self) -> Path:
        name = hashlib.sha256(self._producer.encode()).hexdigest()[:32]
        return Path(SparkFiles.getRootDirectory(), "millstream", name)


def _names(streams: AbstractSet[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in sorted(streams)[:SHOWN_STREAMS])
    more = len(streams) - SHOWN_STREAMS
    return f"{shown} and {more} more streams" if more > 0 else shown
