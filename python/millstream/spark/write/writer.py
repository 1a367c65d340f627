"""The writers of the data source: rows to streams, each exactly once.

Where it sits: returned by `DataSource.writer` and `DataSource.streamWriter`; `write` runs on executors,
`commit` and `abort` on the driver, each in a process of its own, so a commit message carries everything.

    task:    rows ─> stages on the server (staging.py) ─> message: ids, checksums, query, batch
    driver:  messages ─> one POST /v1/commit, producer = query, epoch = batch

Invariants:
- I-SPW-1  Nothing that a task does is visible in a stream; the one commit is, whole or not at all.
- I-SPW-2  A batch that runs again commits under the same producer and epoch, however its rows are
           partitioned then, so the server drops it if the first run was applied.
- I-SPW-3  `abort` may follow a commit that was applied: the server refuses to drop its stages.
- I-SPW-4  What the server drops as a repetition is told (`repetitions.py`).
- I-SPW-5  A wrong schema, mode or option is refused here, on the driver, before a row is computed.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import BinaryType, CharType, StringType, StructType, VarcharType

from millstream.client.pipeline_write import StageRef, commit, unstage, unstage_all
from millstream.errors import (
    MillstreamError,
    NotSupported,
    OptionInvalid,
    ProducerFenced,
    SchemaMismatch,
    ServerError,
)
from millstream.spark.errors import clear
from millstream.spark.write import repetitions
from millstream.spark.write.options import STREAM, VALUE, WriteOptions, log_left, parse

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from millstream.client.sync.client import Client
    from millstream.spark.access import Access
    from millstream.spark.options import Options

QUERY_PROPERTY: Final = "sql.streaming.queryId"
EXECUTION_PROPERTY: Final = "spark.sql.execution.root.id"
"""The same for everything that one call of a foreachBatch function starts, and never again in its session."""
BATCH_PROPERTY: Final = "streaming.sql.batchId"
_TEXT: Final = (StringType, VarcharType, CharType)


@dataclass(frozen=True, slots=True)
class Place:
    """Which task of which batch this is. Query and batch are None outside a streaming query."""

    query: str | None
    execution: str | None
    batch: int | None
    partition: int
    attempt: int


def task_place() -> Place:
    context = TaskContext.get()
    assert context is not None, "rows are written inside Spark tasks only"
    batch = context.getLocalProperty(BATCH_PROPERTY)
    return Place(
        query=context.getLocalProperty(QUERY_PROPERTY),
        execution=context.getLocalProperty(EXECUTION_PROPERTY),
        batch=int(batch) if batch else None,
        partition=context.partitionId(),
        attempt=context.attemptNumber(),
    )


@dataclass(slots=True)
class StagedMessage(WriterCommitMessage):
    """What a task staged: `stages` in row order, and what they hold together."""

    place: Place
    stages: tuple[StageRef, ...]
    streams: tuple[str, ...]
    rows: int
    bytes: int


@dataclass(slots=True)
class DirectMessage(WriterCommitMessage):
    """How many rows a task appended itself; `dropped` of them were there before."""

    place: Place
    streams: tuple[str, ...]
    rows: int
    dropped: int


class _Write:
    """What the batch and the streaming writer have in common."""

    def __init__(
        self, options: WriteOptions, access: Access, *, producer: str | None, batch: int | None
    ) -> None:
        self._options = options
        self._access = access
        self._producer = producer
        """None: the streaming query's id, which only its tasks know."""
        self._batch = batch
        """None: Spark numbers the batches."""

    def write_rows(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        # Here and not above: the driver's commit does without pyarrow, which takes long to import.
        from millstream.spark.write.direct import DirectAppender
        from millstream.spark.write.staging import Rows, Stager

        place = task_place()
        rows = Rows(self._options, place.partition)
        with self._access.connect() as client:
            if place.batch == 0:
                self._access.reach(client)
            if self._options.direct:
                self._claim(client, place)
                producer, epoch = self._direct_numbers(place)
                appender = DirectAppender(
                    client, self._options, rows, (producer, epoch), self._access.patience_seconds
                )
                for batch in iterator:
                    appender.add(batch)
                count = appender.finish()
                # A second attempt finds what the first one has appended.
                dropped = appender.dropped if place.attempt == 0 else 0
                return DirectMessage(place, appender.streams, count, dropped)
            stager = Stager(
                client,
                self._options,
                rows,
                self._stage_prefix(place),
                self._access.patience_seconds,
            )
            try:
                for batch in iterator:
                    stager.add(batch)
                stager.finish()
            except BaseException:
                stager.discard()
                raise
            return StagedMessage(
                place, tuple(stager.stages), tuple(stager.streams), stager.rows, stager.bytes
            )

    def commit_rows(
        self, messages: Sequence[WriterCommitMessage | None], batch: int | None
    ) -> None:
        if self._options.direct:
            self._check_partitions(len(messages))
            direct = [message for message in messages if isinstance(message, DirectMessage)]
            self._settle(direct, batch, sum(message.dropped for message in direct))
            return
        staged = [message for message in messages if isinstance(message, StagedMessage)]
        assert len(staged) == len(messages), "a commit without the rows of a task would lose them"
        stages = [stage for message in staged for stage in message.stages]
        if not stages:
            return
        producer = self._producer_of(staged[0].place)
        epoch = self._options.epoch(self._number(batch))
        with self._access.connect() as client:
            self._claim(client, staged[0].place)
            try:
                outcome = commit(
                    client,
                    producer,
                    epoch,
                    stages,
                    streams={name for message in staged for name in message.streams},
                    patience_seconds=self._access.patience_seconds,
                )
            except ServerError as error:
                raise _explain(error, self._options) from None
            dropped = _drop(client, staged) if outcome.duplicate else 0
        self._settle(staged, batch, dropped)

    def abort_rows(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Give up what the tasks staged. Direct appends cannot be taken back; a replay finds them."""
        names = [
            stage.id
            for message in messages
            if isinstance(message, StagedMessage)
            for stage in message.stages
        ]
        if names:
            with self._access.connect() as client:
                log_left(unstage_all(client, names))

    def _claim(self, client: Client, place: Place) -> None:
        """A fixed producer id serves one query. Outside of a query, who repeats what is the caller's business."""
        if self._options.producer_id is not None and place.query is not None:
            repetitions.claim(
                client,
                self._options.producer_id,
                self._options.producer_generation,
                place.query,
                patience_seconds=self._access.patience_seconds,
            )

    def _settle(
        self, messages: Sequence[StagedMessage | DirectMessage], batch: int | None, dropped: int
    ) -> None:
        place = messages[0].place
        in_query = self._batch is not None and place.query is not None
        streams = {name for message in messages for name in message.streams}
        producer = self._producer_of(place)
        call = place.execution if in_query else None
        repetitions.Write(producer, self._number(batch), call, streams).settle(dropped)

    def _number(self, batch: int | None) -> int:
        number = batch if self._batch is None else self._batch
        assert number is not None, "Spark numbers the batches of a streaming query"
        return number

    def _producer_of(self, place: Place) -> str:
        name = self._producer or place.query
        if name is None:
            raise OptionInvalid(
                "Spark did not tell the id of the streaming query",
                hint="name the writer with the option `producerId`",
            )
        return f"spark:{name}"

    def _stage_prefix(self, place: Place) -> str:
        """New for every attempt: a stage id is never used for other rows."""
        query = place.query or "batch"
        batch = place.batch if self._batch is None else self._batch
        token = uuid.uuid4().hex[:16]
        return f"{query}-{batch or 0}-{place.partition}-{place.attempt}-{token}"

    def _direct_numbers(self, place: Place) -> tuple[str, int]:
        batch = place.batch if self._batch is None else self._batch
        if batch is None:
            raise OptionInvalid("Spark did not tell the id of the batch")
        count = self._options.direct_partitions
        producer = f"{self._producer_of(place)}/{place.partition}-of-{count}"
        return producer, self._options.epoch(batch)

    def _check_partitions(self, count: int) -> None:
        expected = self._options.direct_partitions
        if count != expected:
            raise OptionInvalid(
                f"the batch had {count} partitions, but `directPartitions` is {expected}",
                hint="fix the number with `.repartition(N, key).sortWithinPartitions(...)`, or use "
                "`exactlyOnce=staged`, which takes any partitioning",
            )


class BatchWriter(_Write, DataSourceArrowWriter):
    """`df.write`: one object for the whole write, so that its random producer reaches every part."""

    @clear
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self.write_rows(iterator)

    @clear
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self.commit_rows(messages, None)

    @clear
    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self.abort_rows(messages)


class StreamWriter(_Write, DataSourceStreamArrowWriter):
    """`df.writeStream`: made anew for each micro-batch and again for its commit."""

    @clear
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self.write_rows(iterator)

    @clear
    def commit(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,  # noqa: N803 - Spark's name
    ) -> None:
        self.commit_rows(messages, batchId)

    @clear
    def abort(
        self,
        messages: list[WriterCommitMessage | None],
        batchId: int,  # noqa: N803, ARG002 - Spark's name
    ) -> None:
        self.abort_rows(messages)


@clear
def batch_writer(
    options: Options, access: Access, schema: StructType, overwrite: bool
) -> BatchWriter:
    parsed = parse(options)
    if overwrite:
        raise NotSupported(
            "a stream cannot be overwritten",
            hint="use `.mode('append')`; to start anew, remove the stream or write to another one",
        )
    check_schema(schema, parsed)
    if (parsed.producer_id is None) != (parsed.batch_id is None):
        raise OptionInvalid(
            "a batch write takes `producerId` and `batchId` together, or none of them",
            hint="in foreachBatch: `.option('producerId', NAME).option('batchId', batch_id)`",
        )
    if not parsed.batch_id:  # a later batch of foreachBatch: the server was there before
        access.connect_first().close()
    producer = parsed.producer_id or uuid.uuid4().hex
    return BatchWriter(parsed, access, producer=producer, batch=parsed.batch_id or 0)


@clear
def stream_writer(
    options: Options, access: Access, schema: StructType, overwrite: bool
) -> StreamWriter:
    parsed = parse(options)
    if overwrite:
        raise NotSupported(
            "output mode `complete` would write every result again in each batch",
            hint="use `outputMode('append')`; a stream keeps what was written",
        )
    check_schema(schema, parsed)
    if parsed.batch_id is not None:
        raise OptionInvalid(
            "`batchId` is for batch writes; a streaming query has batch ids of its own",
            hint="leave it out, or use it inside foreachBatch",
        )
    return StreamWriter(parsed, access, producer=parsed.producer_id, batch=None)


def check_schema(schema: StructType, options: WriteOptions) -> None:
    """`value` and perhaps `stream`; anything else would be dropped silently, so it is refused."""
    types = {field.name: field.dataType for field in schema.fields}
    for name in ("key", "headers"):
        if name in types:
            raise SchemaMismatch(
                f"a record has no `{name}`",
                hint=f"put it into the value, for example by `to_json(struct(...))`, and drop `{name}`",
            )
    if VALUE not in types:
        columns = ", ".join(types) or "none"
        raise SchemaMismatch(
            f"there is no column `value`; the columns are: {columns}",
            hint="for example `.selectExpr('to_json(struct(*)) AS value')`",
        )
    if not isinstance(types[VALUE], (*_TEXT, BinaryType)):
        raise SchemaMismatch(
            f"column `value` is {types[VALUE].simpleString()}, not string or binary",
            hint="convert it, for example by `to_json(value)` or `CAST(value AS STRING)`",
        )
    if STREAM in types and not isinstance(types[STREAM], _TEXT):
        raise SchemaMismatch(f"column `stream` is {types[STREAM].simpleString()}, not string")
    if STREAM not in types and not options.stream:
        hint = "set the option `stream`, or add a column `stream`"
        hint += "; Kafka's column `topic` is called `stream` here" if "topic" in types else ""
        raise SchemaMismatch("the rows have no target", hint=hint)
    others = [name for name in types if name not in (VALUE, STREAM)]
    if others:
        raise SchemaMismatch(
            f"a record is one value: the columns {', '.join(others)} would be lost",
            hint="keep what is written: `.select('value')` or `.select('stream', 'value')`",
        )


def _drop(client: Client, staged: Sequence[StagedMessage]) -> int:
    """Give up the stages of a repeated commit; returns how many rows go with them.

    None if these very stages are in the streams: then it was the answer that came twice, not the batch.
    """
    first, *others = (stage.id for message in staged for stage in message.stages)
    try:
        if unstage(client, first) == "committed":
            return 0
        log_left(unstage_all(client, others))
    except MillstreamError as error:
        log_left(error)
    return sum(message.rows for message in staged)


def _explain(error: ServerError, options: WriteOptions) -> ServerError:
    hint = error.hint
    if isinstance(error, ProducerFenced):
        hint = "a later batch of this producer is in the stream: another query runs under this name"
        if options.producer_id is not None:
            hint += (
                ", or its checkpoint was deleted; give each query its own `producerId`, and raise "
                "`producerGeneration` to start again on purpose"
            )
    elif error.code == "stage_gone":
        hint = (
            "the rows were staged longer than the server's `stage_ttl_s`; restart the query: it "
            "writes the batch again"
        )
    return error.reworded(hint=hint)
