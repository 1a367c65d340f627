"""What a write was asked to do: the writer's options, parsed and checked once.

Where it sits: made by `writer.py` from the options of the data source, used on executors and driver.
Which names exist is in `options.py`; this is what their values mean together.

Invariants:
- I-WOP-1  Values are checked on the driver, before any row is computed.
- I-WOP-2  It holds no secret and no connection, so it travels in the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol, get_args

from millstream.errors import InvalidArgument
from millstream.types import Durability

if TYPE_CHECKING:
    from collections.abc import Mapping

    from millstream.client._sync import Client

DEFAULT_CONTENT_TYPE: Final = "application/json"
"""Only a JSON stream shows to every reader where one record ends and the next begins."""
STAGE_BYTES: Final = 8 * 1024 * 1024
STAGE_BYTES_RANGE: Final = (64 * 1024, 256 * 1024 * 1024)
DIRECT_RECORDS: Final = 5000
BATCH_BITS: Final = 40
GENERATION_MAX: Final = 2**13 - 1
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


def parse(options: Mapping[str, str]) -> WriteOptions:
    """`options` has its keys in lower case, as Spark hands them over."""
    given = {name.lower(): value for name, value in options.items()}
    parsed = WriteOptions(
        stream=given.get("stream") or None,
        create_streams=_boolean(given, "createStreams"),
        content_type=given.get("contenttype") or None,
        durability=_word(given, "durability", get_args(Durability)),
        mode="direct"
        if _word(given, "exactlyOnce", ("staged", "direct")) == "direct"
        else "staged",
        producer_id=_producer_id(given),
        producer_generation=_integer(given, "producerGeneration", 0, GENERATION_MAX) or 0,
        batch_id=_integer(given, "batchId", 0, (1 << BATCH_BITS) - 1),
        stage_bytes=_integer(given, "stageBytes", *STAGE_BYTES_RANGE) or STAGE_BYTES,
        direct_partitions=_integer(given, "directPartitions", 1, 1_000_000),
        direct_records=_integer(given, "directRecords", 1, 1_000_000) or DIRECT_RECORDS,
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


def _boolean(given: Mapping[str, str], name: str) -> bool:
    return _word(given, name, ("true", "false")) == "true"


def _word(given: Mapping[str, str], name: str, words: tuple[str, ...]) -> str | None:
    value = given.get(name.lower())
    if value is None:
        return None
    if value.strip().lower() not in words:
        listed = ", ".join(words)
        raise InvalidArgument(f"option `{name}` is `{value}`", hint=f"it is one of {listed}")
    return value.strip().lower()


def _integer(given: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    value = given.get(name.lower())
    if value is None:
        return None
    text = value.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and low <= int(text) <= high):
        raise InvalidArgument(
            f"option `{name}` is `{value}`", hint=f"it is a whole number from {low} to {high}"
        )
    return int(text)


def _producer_id(given: Mapping[str, str]) -> str | None:
    value = given.get("producerid")
    if value is None:
        return None
    if not value.strip() or not value.isprintable() or len(value.encode()) > PRODUCER_ID_BYTES_MAX:
        raise InvalidArgument(
            f"option `producerId` is {value!r}",
            hint=f"it is 1 to {PRODUCER_ID_BYTES_MAX} bytes of printable text, the same in every run",
        )
    return value
