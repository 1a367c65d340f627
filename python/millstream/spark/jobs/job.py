"""What a job is, and what one run of it is asked for.

Where it sits: below the jobs and the driver; imports pyspark for types only.

A job turns a streaming DataFrame of records into a writer. It does not know its trigger: `--once` and
`--every` run the same code, and the driver sets the trigger, the checkpoint and the name of the query.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from millstream.errors import InvalidArgument
from millstream.spark.options import ALL, TABLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql import DataFrame, SparkSession

STREAM_PREFIX: Final = "stream:"
_META: Final = re.compile(r"([\\.+?()|\[\]{}^$])")


@dataclass(frozen=True, slots=True)
class JobOption:
    """An option of one job: a flag of `pipeline run` with the same name."""

    name: str
    help: str
    default: str
    choices: tuple[str, ...] = ()
    fixed: bool = False
    """It may change only with a new checkpoint."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where the records go: a directory, or a stream."""

    path: str | None = None
    stream: str | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        """`stream:NAME` is a stream, everything else a directory."""
        if text.startswith(STREAM_PREFIX):
            name = text[len(STREAM_PREFIX) :]
            if not name:
                raise InvalidArgument("`stream:` needs a name", hint="write stream:NAME")
            return cls(stream=name)
        if not text:
            raise InvalidArgument("the target is empty", hint="name a directory, or stream:NAME")
        return cls(path=text)

    def __str__(self) -> str:
        return f"{STREAM_PREFIX}{self.stream}" if self.stream is not None else str(self.path)


@dataclass(frozen=True, slots=True)
class Request:
    """One run: from where, to where, how."""

    url: str
    streams: tuple[str, ...]
    """Names of streams, or globs."""
    target: Target
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the job; what is missing has the job's default."""
    source_options: Mapping[str, str] = field(default_factory=dict)
    """Options of the source, as in `spark.readStream.option`."""
    rows_per_batch: int | None = None
    checkpoint: str | None = None
    """Where the run remembers what it has done; a lake has a place of its own for it."""

    def connection(self) -> dict[str, str]:
        """The options that say how to reach the server: the same for the source and for a sink."""
        given = {name.lower(): value for name, value in self.source_options.items()}
        names = [option.name for option in TABLE if option.use == ALL]
        return {
            "url": self.url,
            **{name: given[name.lower()] for name in names if name.lower() in given},
        }

    def option(self, job: Job, name: str) -> str:
        for known in job.options:
            if known.name == name:
                return self.options.get(name, known.default)
        raise KeyError(name)


class Job(Protocol):
    """Something that `millstream pipeline run` can run."""

    @property
    def name(self) -> str: ...

    @property
    def summary(self) -> str:
        """One line for `millstream pipeline list`."""

    @property
    def options(self) -> tuple[JobOption, ...]: ...

    def check(self, request: Request, query_id: str | None) -> None:
        """Refuse what cannot work, before a session is started for it.

        `query_id` is the query that the checkpoint belongs to, `None` if it is a new one.
        """

    def write(self, source: DataFrame, request: Request) -> Any:
        """The `DataStreamWriter` that does the job; the driver starts it."""


def check_options(job: Job, request: Request) -> None:
    """Every option is known and has an allowed value."""
    known = {option.name: option for option in job.options}
    for name, value in request.options.items():
        option = known.get(name)
        if option is None:
            raise InvalidArgument(
                f"job `{job.name}` has no option `{name}`",
                hint="it has " + (", ".join(known) if known else "none"),
            )
        if option.choices and value not in option.choices:
            raise InvalidArgument(
                f"`{value}` is not a value of `{name}`", hint="choose " + ", ".join(option.choices)
            )


def read_streams(session: SparkSession, request: Request) -> DataFrame:
    """The streaming DataFrame of all records of the streams, from the first record on."""
    return session.readStream.format("millstream").options(**source_options(request)).load()


def source_options(request: Request) -> dict[str, str]:
    options = {
        "url": request.url,
        "startingOffsets": "earliest",
        **selection(request.streams),
        **request.source_options,
    }
    if request.rows_per_batch is not None:
        options["maxOffsetsPerTrigger"] = str(request.rows_per_batch)
    return options


def selection(streams: Iterable[str]) -> dict[str, str]:
    """The source's option for names (`subscribe`) or, if one is a glob, `subscribePattern`."""
    names = list(dict.fromkeys(streams))
    if not names or not all(names):
        raise InvalidArgument("no stream was named", hint="name a stream or a glob: --from 'a/*'")
    if not any("*" in name for name in names):
        return {"subscribe": ",".join(names)}
    return {"subscribePattern": "|".join(f"(?:{glob_pattern(name)})" for name in names)}


def glob_pattern(glob: str) -> str:
    """`*` stands for text within a segment, `**` for any number of segments, none included."""
    pattern = ""
    written = glob.split("/")
    # Two `**` in a row say no more than one.
    segments = [
        segment
        for segment, before in zip(written, [None, *written], strict=False)
        if not segment == before == "**"
    ]
    for index, segment in enumerate(segments):
        last = index == len(segments) - 1
        if segment == "**":
            if not last:
                pattern += "(?:.*/)?"
            elif index == 0:
                pattern += ".*"
            else:
                pattern = pattern.removesuffix("/") + "(?:/.*)?"
            continue
        if segment == "*":
            pattern += "[^/]+"
        else:
            pattern += "[^/]*".join(_META.sub(r"\\\1", part) for part in segment.split("*"))
        pattern += "" if last else "/"
    return pattern
