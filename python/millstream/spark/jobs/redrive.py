"""Job `redrive`: dead letters through a repaired schema.

Where it sits: it is `decode` for the records inside letters. A stream does not shrink, so what is drained is told by the lag: at
lag 0 each letter is in the target, or again a letter with one attempt more, in another stream.
Invariant I-RDR-1: a row that a letter gives is the row that `decode` would have given for its record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.errors import InvalidArgument
from millstream.spark.jobs.decode import DEAD_LETTERS, SCHEMA, Decode, value_options
from millstream.spark.jobs.lake import target
from millstream.spark.jobs.shared import streams

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from millstream.spark.jobs.job import Request


class Redrive(Decode):
    """Dead letters to a stream or a lake, and to dead letters again."""

    name = "redrive"
    summary = "dead letters of `decode` through a repaired schema"
    options = (SCHEMA, DEAD_LETTERS, streams.CREATE, *target.FORM)
    shares = True  # the lake of `decode` has its checkpoint, and none of these records

    def check(self, request: Request, query_id: str | None) -> None:
        if not request.checkpoint:
            raise InvalidArgument(
                "job `redrive` needs a checkpoint of its own", hint="add --checkpoint DIR"
            )
        super().check(request, query_id)

    def source(self, request: Request) -> dict[str, str]:  # noqa: ARG002
        from millstream.spark.jobs.shared.letters import SCHEMA as LETTERS
        from millstream.spark.json.ddl import parse_schema

        return value_options(parse_schema(LETTERS))

    def decoded(self, source: DataFrame, request: Request) -> tuple[DataFrame, Column]:
        from pyspark.sql import functions as f
        from pyspark.sql.types import DataType, IntegerType, StructType

        from millstream.spark.jobs.shared.letters import Reopened
        from millstream.spark.options import Options
        from millstream.spark.read.columns import arrow_schema, layout

        options = Options({**request.source_options, **value_options(self.fields(request))})
        form = layout(options).json
        assert form is not None, "the values are JSON"
        schema = StructType([field for field in source.schema if field.name != "value"])
        schema = schema.add("attempt", IntegerType()).add("value", DataType.fromDDL(form.ddl))
        rows = source.mapInArrow(Reopened(form, arrow_schema(schema)), schema)
        return rows, f.col("attempt")
