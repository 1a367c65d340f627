"""Every option of `format("millstream")`, once: the table behind checking, defaults and docs.

Where it sits: read by `source.py` before anything else, by the readers and writers for their values,
and by the docs generator (`TABLE`). Pure: no pyspark, no pyarrow, no I/O.

Invariants:
- I-OPT-1  An option exists exactly once, as a row of `TABLE`.
- I-OPT-2  Spark hands names over in lower case; messages use the documented spelling.
- I-OPT-3  An unknown name and a wrong value are errors with a way out, never ignored. Spark's own
           options pass.
- I-OPT-4  No option carries a secret: options are shown in plans and logs.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

from millstream.errors import OptionInvalid

Use = Literal["batch", "stream", "write"]
Change = Literal["yes", "new"]

READS: Final[tuple[Use, ...]] = ("batch", "stream")
ALL: Final[tuple[Use, ...]] = ("batch", "stream", "write")
STREAM: Final[tuple[Use, ...]] = ("stream",)
BATCH: Final[tuple[Use, ...]] = ("batch",)
WRITE: Final[tuple[Use, ...]] = ("write",)
USE_TEXT: Final[dict[Use, str]] = {
    "batch": "a batch read",
    "stream": "a streaming read",
    "write": "a write",
}


class Kind(Enum):
    """What a value looks like when a person types it."""

    TEXT = "text"
    FLAG = "true or false"
    INTEGER = "a whole number"
    SIZE = "a size such as 128MiB"
    DURATION = "a duration such as 30s"
    CHOICE = "one of a list"


@dataclass(frozen=True, slots=True)
class Option:
    """One row of the table."""

    name: str
    kind: Kind
    default: str
    meaning: str
    use: tuple[Use, ...]
    change: Change = "yes"
    """`yes`: may change between runs of one checkpoint. `new`: only with a new checkpoint."""
    minimum: int = 0
    maximum: int = 2**62
    choices: tuple[str, ...] = ()


TABLE: Final[tuple[Option, ...]] = (
    # --- the server
    Option("url", Kind.TEXT, "MILLSTREAM_URL of the driver, else http://127.0.0.1:4437", "address of the server", ALL),
    Option("tokenEnv", Kind.TEXT, "", "name of the environment variable, on driver and executors, that holds the bearer token", ALL),
    Option("tokenFile", Kind.TEXT, "", "file, on driver and executors, that holds the bearer token; read anew for each task", ALL),
    Option("connectTimeout", Kind.DURATION, "10s", "how long the first contact of a query may take: a batch read or write, the start of a stream, batch 0 of a streaming write; then it fails with `unreachable`", ALL, minimum=1_000, maximum=86_400_000),
    Option("readTimeout", Kind.DURATION, "120s", "how long a running query tries a server again that has become unreachable or restarts; shorter than `connectTimeout`, it counts for the first contact, too", ALL, minimum=1_000, maximum=86_400_000),
    # --- what to read
    Option("subscribe", Kind.TEXT, "", "names of streams, separated by commas", READS),
    Option("subscribePattern", Kind.TEXT, "", "regular expression that the whole name must match; a stream that appears later is read from its first record", READS),
    Option("startingOffsets", Kind.TEXT, "batch: earliest, stream: latest", "`earliest`, `latest`, a record number, an offset of the server, or JSON by stream: `{\"orders\":23}`; a checkpoint wins over it", READS),
    Option("endingOffsets", Kind.TEXT, "latest", "where to stop (not included), in the forms of `startingOffsets`; a streaming read never goes beyond it", READS),
    Option("startingTimestamp", Kind.TEXT, "", "first record accepted at or after this time (milliseconds or ISO 8601); wins over `startingOffsets`", READS),
    Option("endingTimestamp", Kind.TEXT, "", "stop at the first record accepted at or after this time; wins over `endingOffsets`", READS),
    Option("failOnDataLoss", Kind.FLAG, "true", "fail when records that were to be read are gone; `false` warns and goes on", READS),
    # --- how much at once
    Option("maxOffsetsPerTrigger", Kind.INTEGER, "", "most records of a micro-batch, shared in proportion to what waits in each stream", STREAM, minimum=1),
    Option("maxBytesPerTrigger", Kind.SIZE, "", "most bytes of a micro-batch, shared likewise; cut between appends, at least one append", STREAM, minimum=1),
    Option("minOffsetsPerTrigger", Kind.INTEGER, "", "wait until this many records have arrived, at most `maxTriggerDelay`", STREAM, minimum=1),
    Option("maxTriggerDelay", Kind.DURATION, "15m", "longest wait for `minOffsetsPerTrigger`", STREAM, minimum=1),
    Option("minPartitions", Kind.INTEGER, "", "at least this many tasks, if there are enough records; on a cluster set it to twice the cores of the executors", READS, minimum=1, maximum=100_000),
    Option("maxBytesPerPartition", Kind.SIZE, "512MiB", "a task reads at most about this much; larger ranges are split between appends", READS, minimum=64 * 1024),
    # --- what comes out
    Option("columns", Kind.TEXT, "stream,offset,timestamp,value", "columns and their order; also `position`, `epoch` and `key`", READS, change="new"),
    Option("kafkaColumns", Kind.FLAG, "false", "Kafka's seven columns and types instead", READS, change="new"),
    Option("keyPath", Kind.TEXT, "", "names joined by dots: where in a JSON record its `key` is", READS, change="new"),
    Option("valueFormat", Kind.CHOICE, "raw", "`raw`: `value` is binary; `json`: it is a struct by `valueSchema`", READS, change="new", choices=("raw", "json")),
    Option("valueSchema", Kind.TEXT, "", "fields of a JSON record, as DDL: `id BIGINT NOT NULL, name STRING`; a record without a field that is `NOT NULL` does not fit", READS, change="new"),
    Option("mode", Kind.CHOICE, "PERMISSIVE", "what a record that does not fit does: `PERMISSIVE` gives nulls and its text in `_corrupt_record`, `DROPMALFORMED` leaves it out, `FAILFAST` fails", READS, choices=("PERMISSIVE", "DROPMALFORMED", "FAILFAST")),
    Option("columnNameOfCorruptRecord", Kind.TEXT, "_corrupt_record", "the field of `value` that gets the text of a record that does not fit; named in `valueSchema` as `STRUCT<record: STRING, bytes: BINARY, reason: STRING, field: STRING, detail: STRING>` it says why, too", READS, change="new"),
    Option("timeZone", Kind.TEXT, "UTC", "zone of times in JSON records that name none", READS),
    Option("filterPushdown", Kind.FLAG, "false", "conditions on `stream`, `offset` and `timestamp` choose what is read; needs `spark.sql.python.filterPushdown.enabled=true`", BATCH),
    # --- writing
    Option("stream", Kind.TEXT, "", "the stream to write to; without it the column `stream` says so row by row", WRITE),
    Option("createStreams", Kind.FLAG, "false", "create streams that are missing", WRITE),
    Option("contentType", Kind.TEXT, "application/json", "content type of created streams", WRITE),
    Option("durability", Kind.CHOICE, "the server's", "durability class of created streams", WRITE, choices=("ephemeral", "memory", "disk", "fsync", "quorum", "object")),
    Option("exactlyOnce", Kind.CHOICE, "staged", "`staged`: one atomic commit per micro-batch; `direct`: tasks append by themselves, under conditions", WRITE, choices=("staged", "direct")),
    Option("producerId", Kind.TEXT, "the query's id", "identity under which repetitions are recognised; it belongs to the first query that uses it", WRITE, change="new"),
    Option("producerGeneration", Kind.INTEGER, "0", "raise it to let another query have a `producerId`, for example after a checkpoint was deleted", WRITE, maximum=2**13 - 1),
    Option("batchId", Kind.INTEGER, "", "in `foreachBatch`: the batch id, so that a repeated batch is recognised; with a `producerId` for each write", WRITE, maximum=2**40 - 1),
    Option("stageBytes", Kind.SIZE, "8MiB", "a task uploads rows in requests of about this size", WRITE, minimum=64 * 1024, maximum=32 * 1024 * 1024),
    Option("directPartitions", Kind.INTEGER, "", "with `direct`: the fixed number of partitions of every batch", WRITE, change="new", minimum=1, maximum=1_000_000),
    Option("directRecords", Kind.INTEGER, "5000", "with `direct`: records per request", WRITE, change="new", minimum=1, maximum=1_000_000),
)  # fmt: skip

BY_NAME: Final[dict[str, Option]] = {option.name.lower(): option for option in TABLE}

SPARK_OPTIONS: Final = frozenset(
    {
        "path",
        "paths",
        "checkpointlocation",
        "queryname",
        "outputmode",
        "asyncprogresstrackingenabled",
        "asyncprogresstrackingcheckpointintervalms",
        "serialization.format",
        "provider",
        "owner",
        "location",
    }
)
"""What Spark itself adds to the options of a source or sink."""
_OF_A_TABLE: Final = "option."
"""Spark repeats the options of CREATE TABLE with this before them."""

_ELSEWHERE: Final[dict[str, str]] = {
    "kafka.bootstrap.servers": "use `url`, for example http://127.0.0.1:4437",
    "bootstrap.servers": "use `url`, for example http://127.0.0.1:4437",
    "server": "use `url`",
    "host": "use `url`",
    "topic": "use `subscribe` to read, `stream` to write",
    "topics": "use `subscribe`",
    "streams": "use `subscribe`",
    "assign": "use `subscribe`: a stream has one partition",
    "token": "use `tokenEnv` or `tokenFile`: an option would show in plans and logs",
    "password": "use `tokenEnv` or `tokenFile`: an option would show in plans and logs",
    "authorization": "use `tokenEnv` or `tokenFile`: an option would show in plans and logs",
    "includeheaders": "records have no headers; `columns` says what is read",
    "includevalue": "leave `value` out of `columns`",
    "group.id": "there are no groups: the checkpoint keeps the position",
    "groupidprefix": "there are no groups: the checkpoint keeps the position",
    "kafka.group.id": "there are no groups: the checkpoint keeps the position",
    "startingoffsetsbytimestamp": "use `startingTimestamp`",
    "endingoffsetsbytimestamp": "use `endingTimestamp`",
    "schema": "use `valueSchema` for the fields of JSON records",
    "timestampformat": "times in JSON records are ISO 8601; read `value` raw for others",
    "dateformat": "dates in JSON records are ISO 8601; read `value` raw for others",
}


class Options:
    """The checked options of one read or write. Plain data: it travels to executors."""

    __slots__ = ("_given",)

    def __init__(self, given: Mapping[str, str]) -> None:
        kept: dict[str, str] = {}
        for key, value in given.items():
            name = key.lower()
            if name in SPARK_OPTIONS or name.startswith("spark."):
                continue
            option = BY_NAME.get(name)
            if option is None:
                raise unknown(key)
            check(option, value)
            kept[name] = value
        self._given = kept

    def for_use(self, use: Use) -> Options:
        """The same options, refused if one of them means nothing for this use."""
        for name in self._given:
            option = BY_NAME[name]
            if use not in option.use:
                others = " or ".join(USE_TEXT[other] for other in option.use)
                sql = (
                    "; INSERT INTO needs a view of its own: CREATE TEMPORARY VIEW name (value STRING) "
                    "USING millstream OPTIONS (url '...', stream '...')"
                )
                raise OptionInvalid(
                    f"option `{option.name}` means nothing for {USE_TEXT[use]}",
                    hint=f"it is for {others}; leave it out here" + (sql if use == "write" else ""),
                )
        return self

    def given(self, name: str) -> bool:
        """Whether the caller set it to something."""
        return bool(self._given.get(name.lower(), "").strip())

    def raw(self) -> dict[str, str]:
        """What the caller set, with names in lower case."""
        return dict(self._given)

    def text(self, name: str) -> str:
        option = BY_NAME[name.lower()]
        value = self._given.get(name.lower(), "").strip()
        if option.kind is Kind.CHOICE:
            return _choice(option, value or option.default)
        return value

    def flag(self, name: str) -> bool:
        option = BY_NAME[name.lower()]
        return _flag(option, self._given.get(name.lower()) or option.default)

    def number(self, name: str) -> int | None:
        """Integers, sizes in bytes, durations in milliseconds; None if neither set nor defaulted."""
        option = BY_NAME[name.lower()]
        value = self._given.get(name.lower(), "").strip() or option.default
        return _number(option, value) if value else None

    def plain(self, option: Option) -> str:
        """What an option is, given or not, spelled in one way: to be compared with another run's."""
        if option.kind is Kind.FLAG:
            return str(self.flag(option.name)).lower()
        if option.kind in (Kind.INTEGER, Kind.SIZE, Kind.DURATION):
            return str(self.number(option.name))
        return " ".join(self.text(option.name).split()) or option.default

    def required_number(self, name: str) -> int:
        value = self.number(name)
        assert value is not None, name
        return value


def unknown(key: str) -> OptionInvalid:
    """The refusal of a name that is not in the table, with the nearest one that is."""
    name = key.lower()
    if name.startswith(_OF_A_TABLE):
        return OptionInvalid(
            "a table of Spark's catalog cannot be of streams: Spark forgets its options when it reads it",
            hint="CREATE TEMPORARY VIEW name USING millstream OPTIONS (url '...', subscribe '...')",
        )
    hint = _ELSEWHERE.get(name)
    if hint is None:
        near = difflib.get_close_matches(name, BY_NAME, n=1, cutoff=0.6)
        if near:
            hint = f"did you mean `{BY_NAME[near[0]].name}`?"
        elif name.startswith("kafka."):
            hint = "settings of Kafka's client have no meaning here; the server is named by `url`"
        else:
            hint = "the options are listed in docs/reference/spark-options.md"
    return OptionInvalid(f"there is no option `{key}`", hint=hint)


def check(option: Option, value: str) -> None:
    """Refuse a value that the option cannot have. An empty one counts as not given."""
    if not value.strip():
        return
    if option.kind is Kind.FLAG:
        _flag(option, value)
    elif option.kind is Kind.CHOICE:
        _choice(option, value)
    elif option.kind in (Kind.INTEGER, Kind.SIZE, Kind.DURATION):
        _number(option, value)


def invalid(option: Option, value: str, hint: str) -> OptionInvalid:
    return OptionInvalid(f"option `{option.name}` is `{value}`", hint=hint)


def _flag(option: Option, value: str) -> bool:
    word = value.strip().lower()
    if word not in ("true", "false"):
        raise invalid(option, value, "it is true or false")
    return word == "true"


def _choice(option: Option, value: str) -> str:
    for choice in option.choices:
        if choice.lower() == value.strip().lower():
            return choice
    if value == option.default:
        return value
    raise invalid(option, value, "it is one of " + ", ".join(option.choices))


_SIZE: Final = re.compile(r"(\d{1,15})\s*([a-z]*)")
_SIZE_UNITS: Final = {
    "": 1, "b": 1,
    "k": 1024, "kib": 1024, "kb": 1000,
    "m": 1024**2, "mib": 1024**2, "mb": 1000**2,
    "g": 1024**3, "gib": 1024**3, "gb": 1000**3,
}  # fmt: skip
_DURATION: Final = re.compile(r"(\d{1,15})\s*([a-z]*)")
_DURATION_UNITS: Final = {
    "": 1, "ms": 1, "millisecond": 1, "milliseconds": 1,
    "s": 1_000, "second": 1_000, "seconds": 1_000,
    "m": 60_000, "min": 60_000, "minute": 60_000, "minutes": 60_000,
    "h": 3_600_000, "hour": 3_600_000, "hours": 3_600_000,
}  # fmt: skip


def _number(option: Option, value: str) -> int:
    text = value.strip().lower()
    found: int | None = None
    if option.kind is Kind.INTEGER:
        if text.isascii() and text.isdigit() and len(text) <= 18:
            found = int(text)
    elif option.kind is Kind.SIZE:
        if (match := _SIZE.fullmatch(text)) and match[2] in _SIZE_UNITS:
            found = int(match[1]) * _SIZE_UNITS[match[2]]
    elif (match := _DURATION.fullmatch(text)) and match[2] in _DURATION_UNITS:
        found = int(match[1]) * _DURATION_UNITS[match[2]]
    if found is None:
        raise invalid(option, value, f"it is {option.kind.value}")
    if not option.minimum <= found <= option.maximum:
        shown = f"at least {option.minimum}"
        if option.maximum < 2**62:
            shown = f"between {option.minimum} and {option.maximum}"
        if option.kind is Kind.DURATION:
            shown += " milliseconds"
        raise invalid(option, value, f"it is {shown}")
    return found
