"""`format("millstream")`: what Spark makes of the options, and the readers and writers it gets for them.

Where it sits: the entrance. Spark builds it in a worker on the driver for every `load()`, `save()` and
`start()`, then asks for a schema, a reader or a writer, by keyword.

Invariants:
- I-SRC-1  Options are checked here, before any request; so a typo fails at `load()` and `start()`.
- I-SRC-2  A schema is checked when the reader or writer is made, before any row.
- I-SRC-3  What it hands out is plain data that pickles; connections are opened where they are used.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)

from millstream.errors import OptionInvalid
from millstream.spark.access import access
from millstream.spark.errors import clear
from millstream.spark.options import Options
from millstream.spark.read import columns, offsets
from millstream.spark.read.batch_limits import Limits
from millstream.spark.read.batch_reader import BatchPlan, BatchReader, ReadTask, Sizes
from millstream.spark.read.data_loss import Losses
from millstream.spark.read.offsets import EARLIEST, LATEST, Bound
from millstream.spark.read.selection import selection
from millstream.spark.read.stream_reader import StreamPlan, StreamReader

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class MillstreamDataSource(DataSource):
    """Streams of a Millstream server as rows."""

    @clear
    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._options = Options(options)
        self._access = access(self._options)

    @classmethod
    def name(cls) -> str:
        return "millstream"

    @clear
    def schema(self) -> str:
        return columns.layout(self._options).ddl()

    @clear
    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._options.for_use("batch")
        batch = BatchPlan(
            task=self._task(schema),
            selection=selection(options),
            starts=_starts(options, EARLIEST),
            ends=_ends(options),
            sizes=_sizes(options),
        )
        if batch.starts.everywhere == LATEST:
            raise OptionInvalid(
                "option `startingOffsets` is `latest`: a batch read would have nothing to read",
                hint="use `earliest`, a record number, or `startingTimestamp`",
            )
        if options.flag("filterPushdown"):
            from millstream.spark.read.pushed_filters import FilteringReader

            return FilteringReader(batch)
        return BatchReader(batch)

    @clear
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        options = self._options.for_use("stream")
        return StreamReader(
            StreamPlan(
                task=self._task(schema),
                selection=selection(options),
                starts=_starts(options, LATEST),
                ends=_ends(options),
                sizes=_sizes(options),
                limits=Limits(
                    max_records=options.number("maxOffsetsPerTrigger"),
                    max_bytes=options.number("maxBytesPerTrigger"),
                    min_records=options.number("minOffsetsPerTrigger"),
                    max_delay_ms=options.required_number("maxTriggerDelay"),
                ),
            )
        )

    @clear
    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from millstream.spark.write.writer import batch_writer

        return batch_writer(self._options, self._access, schema, overwrite)

    @clear
    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        from millstream.spark.write.writer import stream_writer

        return stream_writer(self._options, self._access, schema, overwrite)

    def _task(self, schema: StructType) -> ReadTask:
        layout = columns.layout(self._options)
        columns.check_schema(layout, schema)
        return ReadTask(
            access=self._access,
            layout=layout,
            schema=columns.arrow_schema(schema),
            losses=Losses(fail=self._options.flag("failOnDataLoss")),
        )


def _starts(options: Options, default: offsets.Position) -> Bound:
    if options.given("startingTimestamp"):
        return offsets.parse_time_bound("startingTimestamp", options.text("startingTimestamp"))
    return offsets.parse_bound("startingOffsets", options.text("startingOffsets"), default)


def _ends(options: Options) -> Bound:
    if options.given("endingTimestamp"):
        return offsets.parse_time_bound("endingTimestamp", options.text("endingTimestamp"))
    bound = offsets.parse_bound("endingOffsets", options.text("endingOffsets"), LATEST)
    if EARLIEST in (bound.everywhere, *(position for _, position in bound.by_stream)):
        raise OptionInvalid(
            "option `endingOffsets` is `earliest`: there would be nothing to read",
            hint="use `latest`, a record number, or `endingTimestamp`",
        )
    return bound


def _sizes(options: Options) -> Sizes:
    return Sizes(
        min_partitions=options.number("minPartitions") or 1,
        max_bytes_per_partition=options.required_number("maxBytesPerPartition"),
    )
