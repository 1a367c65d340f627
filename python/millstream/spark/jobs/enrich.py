"""Job `enrich`: records and what a table says about them, to a stream or a lake.

Where it sits: found through `jobs`, run by `driver`; the key is found by the source (`keyPath`), the table by `lookup`.

Invariants:
- I-ENR-1  All records of a batch are looked up in one version of the table: the newest when the batch began. It is read again only when it
           is another one.
- I-ENR-2  A batch is written once. One that runs again before it was committed may see a newer version; one that was committed
           is recognised and dropped, whatever the table says by then.
- I-ENR-3  Of a record no byte is changed: fields are added behind its own.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from millstream.errors import InvalidArgument, NotSupported, PipelineError
from millstream.spark.jobs.job import JobOption, QueryJob, Request, check_no_loop, flag
from millstream.spark.jobs.lake import target
from millstream.spark.jobs.run import left_out
from millstream.spark.jobs.shared import streams
from millstream.spark.jobs.shared.refusal import refused
from millstream.spark.jobs.shared.state import needed

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession

    from millstream.spark.jobs.shared.lookup import Added, Lookup

COLUMNS: Final = ("stream", "offset", "timestamp", "value")
TAKEN: Final = frozenset({*COLUMNS, "date"})
QUERY: Final = "sql.streaming.queryId"
MATCHED_ONLY: Final = "matched-only"
TABLE_MISSING: Final = "table_missing"


class Enrich(QueryJob):
    """Streams and a table to a stream or a lake."""

    name = "enrich"
    summary = "records with columns of a table added by key, in a stream or a lake"
    options = (
        JobOption("lookup", "Table: Parquet, Delta, Iceberg, or what `materialise` makes.", required=True),
        JobOption("key", "Field of the record, names joined by dots.", fixed=True, required=True, is_field=True),
        JobOption("lookup-key", "Column of the table that it is looked up in.", required=True),
        JobOption("add", "Columns to add: COLUMN, FIELD=COLUMN, FIELD=COLUMN:json.", fixed=True, required=True),
        JobOption("where", "Rows of the table to use: COLUMN=VALUE, several with commas."),
        flag(MATCHED_ONLY, "Leave out records whose key is not in the table; they are counted."),
        streams.CREATE,
        *target.OPTIONS,
    )  # fmt: skip

    def check(self, request: Request, query_id: str | None) -> None:
        check_no_loop(self, request)
        lookup = self.lookup(request)
        check_fields(lookup.added, TAKEN if request.target.path is not None else frozenset())
        target.check_either(self, request, query_id)
        try:
            lookup.load(lookup.snapshot())
        except PipelineError as error:
            if error.code != TABLE_MISSING:
                raise
            raise InvalidArgument(error.message, code=error.code, hint=error.hint) from None

    def lookup(self, request: Request) -> Lookup:
        # It loads pyarrow, which a list of jobs does without.
        from millstream.spark.jobs.shared.lookup import Lookup, parse_added, parse_where

        return Lookup(
            request.option(self, "lookup"),
            request.option(self, "lookup-key"),
            parse_added(request.option(self, "add")),
            parse_where(request.option(self, "where")),
        )

    def source(self, request: Request) -> dict[str, str]:
        return {"columns": ",".join((*COLUMNS, "key")), "keyPath": request.option(self, "key")}

    def write(self, source: DataFrame, request: Request) -> Any:
        if type(source.sparkSession).__module__.startswith("pyspark.sql.connect"):
            raise NotSupported(
                "job `enrich` does not run on a Connect server", hint="leave --remote out"
            )
        table = CurrentTable(self.lookup(request))

        def take(batch: DataFrame, number: int) -> None:
            query = str(batch.sparkSession.sparkContext.getLocalProperty(QUERY))
            self.take(batch, table, request, query, number)

        return source.writeStream.foreachBatch(take)

    def take(
        self, batch: DataFrame, table: CurrentTable, request: Request, query: str, number: int
    ) -> None:
        """One batch, with what the table says now."""
        from pyspark.sql import Observation
        from pyspark.sql import functions as f

        key = needed(f.col("key").cast("string"), request.option(self, "key"))
        to_lake = request.target.path is not None
        found = table.frame(batch.sparkSession, as_text=not to_lake)
        # Broadcast: the records stay in their tasks and in their order.
        rows = batch.join(f.broadcast(found), key == f.col("known_key"), "left")
        counted = Observation()
        if request.flag(self, MATCHED_ONLY):
            is_left_out = f.col("row").isNull()
            rows = rows.observe(counted, f.count(f.when(is_left_out, 1)).alias("left_out"))
            rows = rows.where(~is_left_out)
        if to_lake:
            added = enumerate(table.lookup.added)
            fields = [f.col("row")[f"c{index}"].alias(one.field) for index, one in added]
            target.write_batch(rows.select(*COLUMNS, *fields), target.layout_of(self, request))
        else:
            options = streams.sink_options(self, request, stream=request.target.stream)
            options |= {"producerId": query, "batchId": str(number)}
            text = with_fields(f.col("value").cast("string"), f.col("row"), table.lookup.added)
            rows = rows.select(text.alias("value"))
            rows.write.format("millstream").mode("append").options(**options).save()
        if request.flag(self, MATCHED_ONLY):
            left_out.add(query, int(counted.get["left_out"]))


class CurrentTable:
    """The newest version of a table, read again when there is another one."""

    def __init__(self, lookup: Lookup) -> None:
        self.lookup = lookup
        self._version: str | None = None
        self._rows: pa.Table | None = None

    def frame(self, session: SparkSession, *, as_text: bool) -> DataFrame:
        """`known_key`, and `row`: the fields that are added as they stand in a record, or a struct of them (`c0`, `c1`, ...)."""
        from pyspark.sql import functions as f

        snapshot = self.lookup.snapshot()
        if self._rows is None or snapshot.version != self._version:
            self._rows, self._version = self.lookup.load(snapshot), snapshot.version
        names = [f"c{index}" for index in range(len(self.lookup.added))]
        rows = session.createDataFrame(self._rows.rename_columns(["known_key", *names]))
        if not as_text:
            return rows.select("known_key", f.struct(*names).alias("row"))
        parts = [field_text(one, name) for one, name in zip(self.lookup.added, names, strict=True)]
        return rows.select("known_key", f.concat_ws(",", *parts).alias("row"))


def field_text(added: Added, column: str) -> Column:
    """`"field":value`, as it stands in an object."""
    from pyspark.sql import functions as f

    from millstream.spark.jobs.shared.letters import TEXT_OPTIONS

    if not added.is_json:
        options = {**TEXT_OPTIONS, "ignoreNullFields": "false"}
        text = f.to_json(f.struct(f.col(column).alias(added.field)), options)
        return f.substr(text, f.lit(2), f.length(text) - 2)
    text = f.col(column).cast("string")
    wrong = f.raise_error(
        f.concat(
            f.lit(f"not_json: column `{added.column}` of the table is not JSON text at key `"),
            f.col("known_key"),
            f.lit(f"`. Hint: leave `:json` of `{added.field}` out."),
        )
    ).cast("string")
    value = f.when(text.isNull(), "null").when(f.try_parse_json(text).isNotNull(), text)
    return f.concat(
        f.lit(json.dumps(added.field, ensure_ascii=False) + ":"), value.otherwise(wrong)
    )


def with_fields(text: Column, row: Column, added: tuple[Added, ...]) -> Column:
    """A record with fields behind its own; `row` is null if the table does not know it."""
    from pyspark.sql import functions as f

    nulls = ",".join(json.dumps(one.field, ensure_ascii=False) + ":null" for one in added)
    fields = f.array(*(f.lit(one.field) for one in added))
    own = f.json_object_keys(text)
    taken = refused(
        "field_taken",
        "has a field of its own by a name that --add gives",
        hint="add the column under another name: --add FIELD=COLUMN",
    )
    no_object = refused("not_an_object", "is not a JSON object", hint="use job `decode` first")
    begun = f.regexp_replace(text, r"\s*\}\s*\z", "")
    comma = f.when(f.size(own) > 0, ",").otherwise("")
    spliced = f.concat(begun, comma, f.coalesce(row, f.lit(nulls)), f.lit("}"))
    return (
        f.when(own.isNull(), no_object)
        .when(f.arrays_overlap(own, fields), taken)
        .otherwise(spliced)
    )


def check_fields(added: tuple[Added, ...], taken: frozenset[str]) -> None:
    """A name once; a lake, as Spark, does not tell `Id` from `id`, and has columns of its own."""
    seen = set(taken)
    for one in added:
        name = one.field.lower() if taken else one.field
        if name in seen:
            what = "the lake has one of its own" if name in taken else "it is named twice"
            raise InvalidArgument(
                f"--add gives a field `{one.field}`, but {what}", hint="write FIELD=COLUMN"
            )
        seen.add(name)
