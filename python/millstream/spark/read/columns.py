"""The columns that a read gives: the contract with Spark, and the way from the server's Arrow to it.

Where it sits: `source.py` asks for the schema, the readers turn each batch of `/v1/read` into one with
exactly Spark's Arrow schema. No column is touched row by row.

Invariants:
- I-COL-1  A batch has exactly the Arrow schema that Spark expects: names, order, types, nullability.
- I-COL-2  Columns that nobody asked for are not asked from the server, nor is the name of the stream where there is one alone.
- I-COL-3  A schema given by the user is compared before anything is read; it never converts.
- I-COL-4  Reading raw values loads no pandas, which `pa.array` and `pa.scalar` do: half a second of the first read of
           every worker, and a third more objects for the collection that Spark makes it do after each task.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from millstream.errors import OptionInvalid, SchemaMismatch
from millstream.spark.json.ddl import Field, parse_schema
from millstream.spark.json.decoder import Decoder, JsonForm
from millstream.spark.json.explain import REASONS_TYPE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql.types import StructType

    from millstream.spark.options import Options

TYPES: Final[dict[str, str]] = {
    "stream": "string",
    "offset": "bigint",
    "timestamp": "timestamp",
    "value": "binary",
    "position": "string",
    "epoch": "bigint",
    "key": "binary",
}
"""Column of the server -> type in Spark. The first four are the default."""
DEFAULT: Final = ("stream", "offset", "timestamp", "value")
LOG_APPEND_TIME: Final = 1
"""Kafka's `timestampType` of a time that the server gave to the record."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the result: its name and type in Spark, and the server's column behind it."""

    name: str
    type: str
    wire: str | None
    constant: int | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """What a read gives. Plain data: it travels to executors."""

    columns: tuple[Column, ...]
    key_path: str
    json: JsonForm | None

    @property
    def wire(self) -> tuple[str, ...]:
        """The columns to ask from the server; at least one, to count rows by."""
        wanted = tuple(dict.fromkeys(c.wire for c in self.columns if c.wire is not None))
        return wanted or ("offset",)

    def ddl(self) -> str:
        """The schema for Spark, which alone can read the DDL of the value."""
        return ", ".join(f"`{c.name}` {c.type}" for c in self.columns)


def layout(options: Options) -> Layout:
    """The layout that the options ask for."""
    key_path = options.text("keyPath")
    json_form = _json_form(options)
    kafka = options.flag("kafkaColumns")
    if kafka and options.given("columns"):
        raise OptionInvalid("both `columns` and `kafkaColumns` are given", hint="give one of them")
    columns = _kafka_columns(key_path) if kafka else _named_columns(options, key_path)
    if json_form is not None:
        if not any(column.wire == "value" for column in columns):
            raise OptionInvalid(
                "`valueFormat=json` without the column `value`",
                hint="name `value` in `columns`, or leave `valueFormat` out",
            )
        columns = tuple(
            Column(c.name, json_form.ddl, c.wire) if c.wire == "value" else c for c in columns
        )
    return Layout(columns, key_path if any(c.wire == "key" for c in columns) else "", json_form)


def _kafka_columns(key_path: str) -> tuple[Column, ...]:
    return (
        Column("key", "binary", "key" if key_path else None),
        Column("value", "binary", "value"),
        Column("topic", "string", "stream"),
        Column("partition", "int", None, 0),
        Column("offset", "bigint", "offset"),
        Column("timestamp", "timestamp", "timestamp"),
        Column("timestampType", "int", None, LOG_APPEND_TIME),
    )


def _named_columns(options: Options, key_path: str) -> tuple[Column, ...]:
    text = options.text("columns")
    names = [name.strip().lower() for name in text.split(",")] if text else list(DEFAULT)
    for name in names:
        if name not in TYPES:
            raise OptionInvalid(
                f"option `columns` names `{name}`", hint="the columns are " + ", ".join(TYPES)
            )
    if len(set(names)) != len(names):
        raise OptionInvalid("option `columns` names a column twice", hint="name each once")
    if "key" in names and not key_path:
        raise OptionInvalid(
            "column `key` without `keyPath`",
            hint="say where the key is, for example keyPath=user.id",
        )
    if key_path and "key" not in names:
        raise OptionInvalid(
            "`keyPath` without the column `key`",
            hint="add it: columns=" + ",".join([*names, "key"]),
        )
    return tuple(Column(name, TYPES[name], name) for name in names)


# ---------------------------------------------------------------------------- JSON values


def _json_form(options: Options) -> JsonForm | None:
    if options.text("valueFormat") == "raw":
        for name in ("valueSchema", "mode", "columnNameOfCorruptRecord", "timeZone"):
            if options.given(name):
                raise OptionInvalid(
                    f"option `{name}` means nothing for raw values", hint="set `valueFormat=json`"
                )
        return None
    text = options.text("valueSchema")
    if not text:
        raise OptionInvalid(
            "`valueFormat=json` without `valueSchema`",
            hint="name the fields, for example valueSchema='id BIGINT, name STRING'",
        )
    corrupt = options.text("columnNameOfCorruptRecord") or "_corrupt_record"
    mode = options.text("mode")
    fields = parse_schema(text)
    if mode == "PERMISSIVE" and corrupt not in [field.name for field in fields]:
        fields.append(Field(corrupt, "string"))
    form = JsonForm(
        ddl=f"struct<{', '.join(field.text for field in fields)}>",
        mode=mode,
        corrupt=corrupt,
        time_zone=options.text("timeZone") or "UTC",
        required=tuple(field.name for field in fields if field.required),
    )
    form.check()
    return form


# ---------------------------------------------------------------------------- Spark's schema


def check_schema(wanted: Layout, schema: StructType) -> None:
    """Refuse a schema that is not the layout's. A JSON value may have any struct."""
    names = [field.name for field in schema.fields]
    expected = [column.name for column in wanted.columns]
    if names != expected:
        raise SchemaMismatch(
            f"the schema has the columns {', '.join(names)}; the source gives {', '.join(expected)}",
            hint="leave `.schema(...)` out, and choose columns with the option `columns`",
        )
    for column, field in zip(wanted.columns, schema.fields, strict=True):
        found = field.dataType.simpleString()
        if column.wire == "value" and wanted.json is not None:
            _check_value(wanted.json, field.dataType)
        elif found != column.type:
            raise SchemaMismatch(
                f"column `{column.name}` has type {found} in the schema; the source gives {column.type}",
                hint="leave `.schema(...)` out and cast the column afterwards; "
                "`valueFormat=json` decodes values",
            )


def _check_value(form: JsonForm, found: object) -> None:
    from pyspark.sql.types import StructType

    if not isinstance(found, StructType):
        raise SchemaMismatch(
            "column `value` is not a struct in the schema, but `valueFormat` is json",
            hint="leave `.schema(...)` out, or set `valueFormat=raw`",
        )
    corrupt = [field for field in found.fields if field.name == form.corrupt]
    if corrupt and corrupt[0].dataType.simpleString() not in ("string", REASONS_TYPE):
        raise SchemaMismatch(
            f"`{form.corrupt}` has type {corrupt[0].dataType.simpleString()}",
            hint="it gets the text of a record that does not fit, so it is a string; or, to get the reason "
            f"too, a {REASONS_TYPE}",
        )
    if problem := unsupported(found, "value"):
        raise SchemaMismatch(problem, hint="read `value` raw and decode it with `from_json`")


def unsupported(found: object, where: str) -> str | None:
    """The first type in a value's schema that cannot be decoded, as a sentence."""
    from pyspark.sql import types as t

    if isinstance(found, t.StructType):
        for field in found.fields:
            inner = unsupported(field.dataType, f"{where}.{field.name}")
            if inner:
                return inner
            if not field.nullable:
                return f"`{where}.{field.name}` is NOT NULL, but a record can lack any field"
        if len({field.name for field in found.fields}) != len(found.fields):
            return f"`{where}` names a field twice"
        return None
    if isinstance(found, t.ArrayType):
        return unsupported(found.elementType, f"{where}[]")
    if isinstance(found, t.MapType):
        if not isinstance(found.keyType, t.StringType):
            return f"the keys of map `{where}` are not strings"
        return unsupported(found.valueType, f"{where}{{}}")
    plain = (
        t.BooleanType, t.ByteType, t.ShortType, t.IntegerType, t.LongType, t.FloatType,
        t.DoubleType, t.DecimalType, t.DateType, t.TimestampType, t.TimestampNTZType, t.BinaryType,
    )  # fmt: skip
    if type(found) in plain or type(found) is t.StringType:
        return None
    return f"type {getattr(found, 'simpleString', lambda: found)()} of `{where}` cannot be decoded"


def arrow_schema(schema: StructType) -> pa.Schema:
    """Exactly what Spark compares the batches with."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


class Shaper:
    """Turns batches of the server into batches for Spark; one per task, which reads these streams."""

    def __init__(self, wanted: Layout, schema: pa.Schema, streams: set[str]) -> None:
        self._columns = wanted.columns
        self._schema = schema
        self.wire = wanted.wire
        """The columns to ask from the server."""
        self._name: str | None = None
        if len(streams) == 1 and "stream" in self.wire and len(self.wire) > 1:
            (self._name,) = streams
            self.wire = tuple(column for column in self.wire if column != "stream")
        self._repeated: dict[str, pa.Array] = {}
        """Columns of one value, as long as the longest batch so far."""
        self._decoder: Decoder | None = None
        if wanted.json is not None:
            index = next(i for i, c in enumerate(wanted.columns) if c.wire == "value")
            self._decoder = Decoder(wanted.json, schema.field(index).type)

    def shape(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        values: pa.Array | None = None
        if self._decoder is not None:
            values, keep = self._decoder.decode(batch.column("value"))
            if keep is not None:
                batch = batch.filter(keep)
                values = values.filter(keep)
        arrays: Sequence[pa.Array] = [
            self._array(column, field, batch, values)
            for column, field in zip(self._columns, self._schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _array(
        self, column: Column, field: pa.Field, batch: pa.RecordBatch, values: pa.Array | None
    ) -> pa.Array:
        if column.wire is None:
            constant = column.constant
            if constant is None:
                return pa.nulls(batch.num_rows, field.type)
            return self._repeat(
                column, batch.num_rows, lambda rows: repeated_int(constant, field.type, rows)
            )
        if column.wire == "value" and values is not None:
            return values
        if column.wire == "stream" and self._name is not None:
            name = self._name
            return self._repeat(column, batch.num_rows, lambda rows: repeated_text(name, rows))
        return batch.column(column.wire)

    def _repeat(self, column: Column, rows: int, make: Callable[[int], pa.Array]) -> pa.Array:
        there = self._repeated.get(column.name)
        if there is None or len(there) < rows:
            there = self._repeated[column.name] = make(rows)
        return there[:rows]


def repeated_text(value: str, rows: int) -> pa.Array:
    """`pa.repeat(pa.scalar(value), rows)`, without pandas."""
    text = value.encode()
    ends = array("i", range(0, len(text) * rows + 1, len(text)) if text else [0] * (rows + 1))
    return pa.StringArray.from_buffers(rows, pa.py_buffer(ends), pa.py_buffer(text * rows))


def repeated_int(value: int, kind: pa.DataType, rows: int) -> pa.Array:
    """`pa.repeat(pa.scalar(value, kind), rows)`, without pandas."""
    data = value.to_bytes(kind.bit_width // 8, sys.byteorder, signed=True) * rows
    return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(data)])
