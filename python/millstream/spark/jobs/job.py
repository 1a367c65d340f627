"""What a job is, and what one run of it is asked for.

Where it sits: below the jobs and the driver; imports pyspark for types only.

A job turns a streaming DataFrame of records into a writer. It does not know its trigger: `--once` and
`--every` run the same code, and the driver sets the trigger, the checkpoint and the name of the query.
Called like a function it is a query of a program; the commands and their flags are made from the same `options`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final

from millstream.errors import InvalidArgument
from millstream.spark.options import ALL, BY_NAME, TABLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from millstream.client.pipeline_read import StreamTail

STREAM_PREFIX: Final = "stream:"
_DURATION: Final = re.compile(r"([0-9]{1,9})(s|m|h|d)?")
_UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
YES_NO: Final = ("yes", "no")
_NOT_IN_NAMES: Final = frozenset("'[]*$")
"""What means something else in the paths of Spark."""
_META: Final = re.compile(r"([\\.+?()|\[\]{}^$])")


@dataclass(frozen=True, slots=True)
class JobOption:
    """An option of one job: a flag of `pipeline run` with the same name."""

    name: str
    help: str
    default: str = ""
    choices: tuple[str, ...] = ()
    fixed: bool = False
    """It may change only with a new checkpoint."""
    required: bool = False
    is_field: bool = False
    """It is the place of a field in records: names joined by dots."""

    @property
    def is_flag(self) -> bool:
        return self.choices == YES_NO


def flag(name: str, text: str) -> JobOption:
    """Yes or no: as a flag it has no value."""
    return JobOption(name, text, "no", YES_NO)


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

    def flag(self, job: Job, name: str) -> bool:
        return self.option(job, name) == "yes"


class Job(ABC):
    """Something that `millstream pipeline run` can run, and a program by calling it."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for `millstream pipeline list`."""
    options: ClassVar[tuple[JobOption, ...]] = ()
    stateful: ClassVar[bool] = False
    """Whether it remembers records from batch to batch."""
    remembers: ClassVar[str] = "keys"
    """What the rows of its state are, for people."""
    runs_once: ClassVar[bool] = False
    """Whether it is a batch job: one answer, no trigger and no checkpoint of its own (`batch`)."""

    @abstractmethod
    def begin(self, request: Request, session: SparkSession, every_seconds: float | None) -> Any:
        """Start it: the query of a job that is one, the report of one that is done at once. Checks come before."""

    def check(self, request: Request, query_id: str | None) -> None:  # noqa: B027
        """Refuse what cannot work, before a session is started for it.

        `query_id` is the query that the checkpoint belongs to, `None` if it is a new one.
        """

    def check_tails(self, request: Request, tails: Mapping[str, StreamTail]) -> None:  # noqa: B027
        """Refuse what does not fit the streams as they are; not when a checkpoint says where to go on."""

    def source(self, request: Request) -> dict[str, str]:  # noqa: ARG002
        """Options of the source that follow from those of the job."""
        return {}

    def target(self, streams: tuple[str, ...], text: str | None) -> Target:  # noqa: ARG002
        """Where it writes, as the caller says it."""
        if text is None:
            raise InvalidArgument(
                f"job `{self.name}` needs a target", hint="name a directory, or stream:NAME"
            )
        return Target.parse(text)

    def targets(self, request: Request) -> tuple[str, ...]:
        """The streams that it writes."""
        return () if request.target.stream is None else (request.target.stream,)

    def __call__(
        self,
        spark: SparkSession,
        streams: str | Iterable[str],
        to: str | Path | None = None,
        *,
        url: str | None = None,
        checkpoint: str | Path | None = None,
        every: float | None = None,
        max_rows: int | None = None,
        **options: Any,
    ) -> Any:
        """Start the job and return its query: to the tail of the streams, or a batch `every` so many seconds.

        A batch job is done when this returns, with its report.

        `options` are those of the job (`partition_by="date"`, `create=True`) and of the source (`tokenEnv="..."`).
        """
        from millstream.client.wire import default_url
        from millstream.spark.jobs.run import driver

        own, of_source = _sorted_options(self, options)
        names = (streams,) if isinstance(streams, str) else tuple(str(name) for name in streams)
        request = Request(
            url=url or default_url(),
            streams=names,
            target=self.target(names, None if to is None else str(to)),
            options=own,
            source_options=of_source,
            rows_per_batch=max_rows,
            checkpoint=None if checkpoint is None else driver.absolute(str(checkpoint)),
        )
        driver.check(self, request, every_seconds=every)
        if not driver.is_connect(spark):  # there it is the Connect server that reaches it
            driver.reach(self, request)
        return self.begin(request, spark, every)


class QueryJob(Job):
    """A job that is a query: it goes on with new records, and after a crash where its checkpoint says."""

    @abstractmethod
    def write(self, source: DataFrame, request: Request) -> Any:
        """The `DataStreamWriter` that does the job; the driver starts it."""

    def begin(self, request: Request, session: SparkSession, every_seconds: float | None) -> Any:
        from millstream.spark.jobs.run import driver

        return driver.start(self, request, session, every_seconds=every_seconds)


def _sorted_options(job: Job, given: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Options of the job, and of its source, as the command line would have them."""
    own: dict[str, str] = {}
    of_source: dict[str, str] = {}
    names = {option.name for option in job.options}
    for key, value in given.items():
        name = key.replace("_", "-")
        if name in names or key.lower() not in BY_NAME:
            own[name] = YES_NO[not value] if isinstance(value, bool) else str(value)
        else:
            of_source[key] = str(value).lower() if isinstance(value, bool) else str(value)
    return own, of_source


def check_options(job: Job, request: Request) -> None:
    """Every option is known and has an allowed value, and none is missing."""
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
    for option in job.options:
        if option.is_field:
            check_path(option.name, request.option(job, option.name))
        if option.required and not request.options.get(option.name):
            raise InvalidArgument(
                f"job `{job.name}` needs the option `{option.name}`", hint=option.help
            )
    taken = {name.lower() for name in job.source(request)}
    for name in request.source_options:
        if name.lower() in taken:
            raise InvalidArgument(
                f"job `{job.name}` sets the option `{name}` of the source itself",
                hint="leave it out; the job's own options say what it does",
            )


def check_path(option: str, path: str) -> None:
    """Refuse what cannot be the place of a field; nothing at all is left to `required`."""
    if path and not all(name and not set(name) & _NOT_IN_NAMES for name in path.split(".")):
        raise InvalidArgument(
            f"option `{option}` is `{path}`, which is not the place of a field",
            hint="write names of fields joined by dots: user.id",
        )


def check_no_loop(job: Job, request: Request) -> None:
    """What a job writes must not come back to it."""
    patterns = [glob_pattern(name) for name in request.streams]
    for target in job.targets(request):
        if any(re.fullmatch(pattern, target) for pattern in patterns):
            raise InvalidArgument(
                f"stream `{target}` would be read and written by the same job",
                hint="name a target that --from does not name",
            )


def read_streams(session: SparkSession, job: Job, request: Request) -> DataFrame:
    """The streaming DataFrame of all records of the streams, from the first record on."""
    return session.readStream.format("millstream").options(**source_options(job, request)).load()


def source_options(job: Job, request: Request) -> dict[str, str]:
    options = {
        "url": request.url,
        "startingOffsets": "earliest",
        **selection(request.streams),
        **job.source(request),
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


def seconds_of(text: str) -> int:
    """`10s`, `5m`, `1h`, `2d` in seconds."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise InvalidArgument(f"`{text}` is not a duration", hint="write it like 10s, 5m or 1h")
    return int(match[1]) * _UNIT_SECONDS[match[2] or "s"]


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
