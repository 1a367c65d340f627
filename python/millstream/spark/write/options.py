"""What a write was asked to do: the writer's options, parsed and checked once.

Where it sits: made by `writer.py` from the options of the data source, used on executors and driver.
Which options exist and what each may be is in `spark/options.py`; this is what they mean together.

Invariants:
- I-WOP-1  Values are checked on the driver, before any row is computed.
- I-WOP-2  It holds no secret and no connection, so it travels in the plan.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from millstream.errors import OptionInvalid

if TYPE_CHECKING:
    from millstream.errors import MillstreamError
    from millstream.spark.options import Options

LOGGER: Final = logging.getLogger("millstream.spark")
VALUE: Final = "value"
STREAM: Final = "stream"
DEFAULT_CONTENT_TYPE: Final = "application/json"
"""Only a JSON stream shows to every reader where one record ends and the next begins."""
BATCH_BITS: Final = 40
"""A producer epoch is below 2^53: 13 bits of generation, then the batch id."""
PRODUCER_ID_BYTES_MAX: Final = 128


@dataclass(frozen=True, slots=True)
class WriteOptions:
    stream: str | None
    create_streams: bool
    content_type: str | None
    durability: str | None
    direct: bool
    producer_id: str | None
    producer_generation: int
    batch_id: int | None
    stage_bytes: int
    direct_partitions: int | None
    direct_records: int

    @property
    def content_type_or_default(self) -> str:
        return self.content_type or DEFAULT_CONTENT_TYPE

    def epoch(self, batch_id: int) -> int:
        """The producer epoch of a micro-batch: later batches and generations fence earlier ones."""
        if not 0 <= batch_id < 1 << BATCH_BITS:
            raise OptionInvalid(f"batch id {batch_id} is not between 0 and 2^{BATCH_BITS}")
        return self.producer_generation << BATCH_BITS | batch_id


def parse(options: Options) -> WriteOptions:
    options.for_use("write")
    parsed = WriteOptions(
        stream=options.text("stream") or None,
        create_streams=options.flag("createStreams"),
        content_type=options.text("contentType") or None,
        durability=options.text("durability") if options.given("durability") else None,
        direct=options.text("exactlyOnce") == "direct",
        producer_id=_producer_id(options.text("producerId")),
        producer_generation=options.required_number("producerGeneration"),
        batch_id=options.number("batchId"),
        stage_bytes=options.required_number("stageBytes"),
        direct_partitions=options.number("directPartitions"),
        direct_records=options.required_number("directRecords"),
    )
    if not parsed.create_streams and (parsed.content_type or parsed.durability):
        raise OptionInvalid(
            "`contentType` and `durability` count only for streams that are created",
            hint="set `createStreams` to true, or leave them out",
        )
    if parsed.direct and parsed.direct_partitions is None:
        raise OptionInvalid(
            "`exactlyOnce=direct` needs `directPartitions`, the number of partitions of every batch",
            hint="fix it with `.repartition(N, key).sortWithinPartitions(...)`, or leave the mode staged",
        )
    return parsed


def _producer_id(value: str) -> str | None:
    if not value:
        return None
    if not value.isprintable() or len(value.encode()) > PRODUCER_ID_BYTES_MAX:
        raise OptionInvalid(
            f"option `producerId` is {value!r}",
            hint=f"it is at most {PRODUCER_ID_BYTES_MAX} bytes of printable text, the same in every run",
        )
    return value


def log_left(error: MillstreamError | None) -> None:
    """Say why stages were not given up. They cost the server space until they expire, nothing else."""
    if error is not None:
        LOGGER.warning("stages were not deleted and will expire: %s: %s", error.code, error.message)
