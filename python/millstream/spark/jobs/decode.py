"""Job `decode`: JSON records as flat typed columns; what does not fit goes to a stream of dead letters.

Where it sits: found through `jobs`, run by `driver`. The source decodes (`valueFormat=json`) and says why a record does not fit; this
makes one row of each record, a good one or a letter, and hands both to the sink of the target.

Invariants:
- I-DCO-1  Every record is in the target or is a letter, never both, never neither.
- I-DCO-2  To a stream both are one commit; to a lake the letters are committed under query and batch, then the batch is published.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from millstream.errors import InvalidArgument
from millstream.spark.jobs.job import JobOption, QueryJob, Request, check_no_loop
from millstream.spark.jobs.lake import target
from millstream.spark.jobs.shared import streams

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import Column, DataFrame

    from millstream.spark.json.ddl import Field

SCHEMA: Final = JobOption(
    "schema",
    "Fields of the records, as DDL: `id BIGINT NOT NULL, user STRUCT<name: STRING>`.",
    fixed=True,
    required=True,
)
DEAD_LETTERS: Final = JobOption(
    "dead-letters", "Stream for the records that do not fit.", fixed=True, required=True
)
OF_RECORD: Final = ("stream", "offset", "timestamp")
"""Columns of a lake beside the fields of the schema."""
TAKEN: Final = frozenset({*OF_RECORD, "date", "letter"})


class Decode(QueryJob):
    """Streams of JSON to a stream or a lake of flat columns, and to dead letters."""

    name = "decode"
    summary = "JSON records to flat typed columns, in a stream or a lake; bad ones to dead letters"
    options: ClassVar[tuple[JobOption, ...]] = (
        SCHEMA,
        DEAD_LETTERS,
        streams.CREATE,
        *target.OPTIONS,
    )
    shares: ClassVar[bool] = False
    """Whether the lake may be that of another checkpoint."""

    def check(self, request: Request, query_id: str | None) -> None:
        check_no_loop(self, request)
        if len(set(self.targets(request))) < len(self.targets(request)):
            raise InvalidArgument(
                "good records and dead letters would be in one stream", hint="name two streams"
            )
        to_lake = request.target.path is not None
        names = [name for _, name in flat_paths(self.fields(request))]
        check_names(names, TAKEN if to_lake else frozenset())
        target.check_either(self, request, query_id, shared=self.shares)

    def targets(self, request: Request) -> tuple[str, ...]:
        return (*super().targets(request), request.option(self, DEAD_LETTERS.name))

    def source(self, request: Request) -> dict[str, str]:
        return value_options(self.fields(request))

    def fields(self, request: Request) -> list[Field]:
        from millstream.spark.json.ddl import parse_schema

        return parse_schema(request.option(self, SCHEMA.name), SCHEMA.name)

    def write(self, source: DataFrame, request: Request) -> Any:
        from pyspark.sql import functions as f

        from millstream.spark.jobs.shared import letters

        rows, attempts = self.decoded(source, request)
        letter = letters.letter(attempts)
        columns = list(flat_columns(flat_paths(self.fields(request))))
        dead = request.option(self, DEAD_LETTERS.name)
        if request.target.path is not None:
            kept = rows.select(*OF_RECORD, *columns, letter.alias("letter"))
            given = streams.sink_options(self, request, stream=dead)
            options = {f"letters.{name}": value for name, value in given.items()}
            return target.write(kept, target.layout_of(self, request), options)
        text = f.to_json(f.struct(*columns), {**letters.TEXT_OPTIONS, "ignoreNullFields": "false"})
        stream = f.when(f.col("letter").isNull(), f.lit(request.target.stream)).otherwise(dead)
        both = rows.select(letter.alias("letter"), text.alias("text"))
        return streams.write(
            both.select(stream.alias("stream"), f.coalesce("letter", "text").alias("value")),
            self,
            request,
        )

    def decoded(self, source: DataFrame, request: Request) -> tuple[DataFrame, Column]:  # noqa: ARG002
        """Rows with a decoded `value`, and how often each was tried before."""
        from pyspark.sql import functions as f

        return source, f.lit(0)


def value_options(fields: Iterable[Field]) -> dict[str, str]:
    """Options of the source that decode values, with the reason where one does not fit."""
    from millstream.spark.jobs.shared.letters import CORRUPT
    from millstream.spark.json.explain import REASONS_TYPE

    parts = [field.text + (" NOT NULL" if field.required else "") for field in fields]
    return {
        "columns": ",".join((*OF_RECORD, "value")),
        "valueFormat": "json",
        "valueSchema": ", ".join([*parts, f"`{CORRUPT}` {REASONS_TYPE}"]),
        "mode": "PERMISSIVE",
        "columnNameOfCorruptRecord": CORRUPT,
    }


def flat_paths(
    fields: Iterable[Field], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Where each column is in a record, and its name: fields of objects joined by `_`."""
    for field in fields:
        path = (*above, field.name)
        if field.inner:
            yield from flat_paths(field.inner, path)
        else:
            yield path, "_".join(path)


def flat_columns(paths: Iterable[tuple[tuple[str, ...], str]]) -> Iterator[Column]:
    from pyspark.sql import functions as f

    for path, name in paths:
        column = f.col("value")
        for part in path:
            column = column.getField(part)
        yield column.alias(name)


def check_names(names: Iterable[str], taken: frozenset[str]) -> None:
    """Spark and most tables do not tell `Id` from `id`."""
    seen = set(taken)
    for name in names:
        if name.lower() in seen:
            what = (
                "the lake has one of its own" if name.lower() in taken else "there are two of them"
            )
            raise InvalidArgument(
                f"the schema gives a column `{name}`, but {what}",
                hint="leave one out; fields of an object are joined with its name by `_`",
            )
        seen.add(name.lower())
