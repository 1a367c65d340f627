"""What a write was asked to do: the writer's options, parsed and checked once.

Where it sits: made by `writer.py` from the options of the data source, used on executors and driver.
Which names exist is in `options.py`; this is what their values mean together.

Invariants:
- I-WOP-1  Values are checked on the driver, before any row is computed.
- I-WOP-2  It holds no secret and no connection, so it travels in the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol

from millstream.errors import InvalidArgument

if TYPE_CHECKING:
    from millstream.client._sync import Client
    from millstream.spark.options import Options

DEFAULT_CONTENT_TYPE: Final = "application/json"
"""Only a JSON stream shows to every reader where one record ends and the next begins."""
BATCH_BITS: Final = 40
"""Generation and batch id share a producer epoch, which is below 2^53."""
PRODUCER_ID_BYTES_MAX: Final = 128

Mode = Literal["staged", "direct"]


class Access(Protocol):
    """How to reach the server; it travels to executors, and secrets are read where it is used."""

    def connect(self) -> Client: ...


@dataclass(frozen=True, slots=True)
class WriteOptions:
    stream: str | None
    create_streams: bool
    content_type: str | None
    durability: str | None
    mode: Mode
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
            raise InvalidArgument(f"batch id {batch_id} is not between 0 and 2^{BATCH_BITS}")
        return self.producer_generation << BATCH_BITS | batch_id


def parse(options: Options) -> WriteOptions:
    """What the checked options mean together."""
    parsed = WriteOptions(
        stream=options.text("stream") or None,
        create_streams=options.flag("createStreams"),
        content_type=options.text("contentType") or None,
        durability=options.text("durability") if options.given("durability") else None,
        mode="direct" if options.text("exactlyOnce") == "direct" else "staged",
        producer_id=_producer_id(options.text("producerId")),
        producer_generation=options.required_number("producerGeneration"),
        batch_id=options.number("batchId"),
        stage_bytes=options.required_number("stageBytes"),
        direct_partitions=options.number("directPartitions"),
        direct_records=options.required_number("directRecords"),
    )
    _check(parsed)
    return parsed


def _check(options: WriteOptions) -> None:
    if not options.create_streams and (options.content_type or options.durability):
        raise InvalidArgument(
            "`contentType` and `durability` count only for streams that are created",
            hint="set `createStreams` to true, or leave them out",
        )
    if options.mode == "direct" and options.direct_partitions is None:
        raise InvalidArgument(
            "`exactlyOnce=direct` needs `directPartitions`, the number of partitions of every batch",
            hint="fix it with `.repartition(N, key).sortWithinPartitions(...)`, or leave the mode staged",
        )


def _producer_id(value: str) -> str | None:
    if not value:
        return None
    if not value.isprintable() or len(value.encode()) > PRODUCER_ID_BYTES_MAX:
        raise InvalidArgument(
            f"option `producerId` is {value!r}",
            hint=f"it is 1 to {PRODUCER_ID_BYTES_MAX} bytes of printable text, the same in every run",
        )
    return value
