"""Columns and schemas: what is asked from the server, what Spark gets, what is refused."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from millstream.errors import OptionInvalid, SchemaMismatch
from millstream.spark.json.ddl import Field, split_fields
from millstream.spark.options import Options
from millstream.spark.read.columns import Shaper, arrow_schema, check_schema, layout

FOUR = StructType(
    [
        StructField("stream", StringType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("value", BinaryType()),
    ]
)


def test_the_default() -> None:
    chosen = layout(Options({}))
    assert chosen.ddl() == "`stream` string, `offset` bigint, `timestamp` timestamp, `value` binary"
    assert chosen.wire == ("stream", "offset", "timestamp", "value")
    check_schema(chosen, FOUR)


def test_only_what_is_needed_is_asked_for() -> None:
    assert layout(Options({"columns": "offset"})).wire == ("offset",)
    kafka = layout(Options({"kafkaColumns": "true"}))
    assert "key" not in kafka.wire
    assert kafka.key_path == ""
    keyed = layout(Options({"kafkaColumns": "true", "keyPath": "a.b"}))
    assert "key" in keyed.wire
    assert keyed.key_path == "a.b"


@pytest.mark.parametrize(
    "options",
    [
        {"columns": "offset,nope"},
        {"columns": "offset,offset"},
        {"columns": "key"},
        {"keyPath": "a"},
        {"columns": "offset", "kafkaColumns": "true"},
        {"valueFormat": "json"},
        {"valueSchema": "a int"},
        {"mode": "FAILFAST"},
        {"valueFormat": "json", "valueSchema": "a int", "columns": "offset"},
        {"valueFormat": "json", "valueSchema": "a"},
        {"valueFormat": "json", "valueSchema": "a array<int"},
        {"valueFormat": "json", "valueSchema": "a int> , b int"},
        {"valueFormat": "json", "valueSchema": "{}"},
        *(
            {"valueFormat": "json", "valueSchema": f"a {kind}"}
            for kind in (
                "bignt",
                "int int",
                "decimal(39,2)",
                "decimal(5,6)",
                "int(3)",
                "array<>",
                "array<int,int>",
                "map<string>",
                "struct<x int, y>",
                "struct<x:strin>",
                "map<string,array<struct<x:nope>>>",
                "variant",
                "int NOT NUL",
            )
        ),
        {"valueFormat": "json", "valueSchema": "a int", "timeZone": "Mars"},
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(OptionInvalid) as caught:
        layout(Options(options))
    assert caught.value.hint


def test_the_corrupt_field_is_added_once() -> None:
    def value_type(**options: str) -> str:
        chosen = layout(Options({"valueFormat": "json", **options}))
        return next(column.type for column in chosen.columns if column.name == "value")

    assert value_type(valueSchema="a int") == "struct<`a` int, `_corrupt_record` string>"
    assert value_type(valueSchema="_corrupt_record string, a int") == (
        "struct<`_corrupt_record` string, `a` int>"
    )
    assert value_type(valueSchema="struct<a:int>", columnNameOfCorruptRecord="bad") == (
        "struct<`a` int, `bad` string>"
    )
    assert value_type(valueSchema="a int", mode="FAILFAST") == "struct<`a` int>"
    json_text = StructType([StructField("a b", IntegerType())]).json()
    assert value_type(valueSchema=json_text, mode="FAILFAST") == "struct<`a b` int>"


def test_every_type_that_can_be_decoded_is_taken() -> None:
    kinds = [
        "boolean",
        "BYTE",
        "tinyint",
        "short",
        "smallint",
        "int",
        "INTEGER",
        "bigint",
        "long",
        "float",
        "real",
        "double",
        "date",
        "timestamp",
        "timestamp_ltz",
        "timestamp_ntz",
        "string",
        "binary",
        "decimal",
        "dec",
        "numeric",
        "decimal(5)",
        "DECIMAL(38,18)",
        "array<int>",
        "map<string,array<int>>",
        "struct<x:int>",
        "struct<x:struct<`y,z`:decimal(10,2)>,q:string>",
    ]
    for kind in [
        *kinds,
        "decimal( 10 , 2 )",
        "ARRAY < STRUCT < x : INT, y INT > >",
        "struct<x int, y: string>",
    ]:
        for end in ("", " NOT NULL", " COMMENT 'a, b'", " not null comment 'it\\'s'"):
            found = split_fields(f"a {kind}{end}, b int")
            assert found == [Field("a", kind, required="null" in end.lower()), Field("b", "int")]


def test_fields_of_ddl() -> None:
    ddl = "a int, `b,c` array<struct<x:int,y:map<string,int>>> COMMENT 'q, r', d decimal(10,2)"
    assert [field.name for field in split_fields(ddl)] == ["a", "b,c", "d"]
    nested = split_fields("a struct<x: int, `y,z`: struct<q decimal(3,1)>>")[0]
    assert [field.text for field in nested.inner] == ["`x` int", "`y,z` struct<q decimal(3,1)>"]
    assert nested.inner[0].inner == []


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (StructType([StructField("value", StringType())]), "the source gives stream, offset"),
        (StructType([*FOUR.fields[:3], StructField("value", StringType())]), "`value` has type string"),
        (StructType([FOUR.fields[1], FOUR.fields[0], *FOUR.fields[2:]]), "the columns offset, stream"),
    ],
)  # fmt: skip
def test_another_schema_is_refused(schema: StructType, said: str) -> None:
    with pytest.raises(SchemaMismatch, match=said):
        check_schema(layout(Options({})), schema)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (BinaryType(), "not a struct"),
        (StructType([StructField("a", IntegerType(), nullable=False)]), "NOT NULL"),
        (StructType([StructField("a", MapType(IntegerType(), IntegerType()))]), "not strings"),
        (StructType([StructField("a", ArrayType(StructType().add("x", "interval day")))]), "interval"),
        (StructType([StructField("_corrupt_record", IntegerType())]), "_corrupt_record"),
    ],
)  # fmt: skip
def test_another_json_schema_is_refused(kind: object, said: str) -> None:
    chosen = layout(Options({"valueFormat": "json", "valueSchema": "a int"}))
    schema = StructType([*FOUR.fields[:3], StructField("value", kind)])  # type: ignore[arg-type]
    with pytest.raises(SchemaMismatch, match=said):
        check_schema(chosen, schema)


def test_batches_get_exactly_the_schema_of_spark() -> None:
    chosen = layout(Options({"kafkaColumns": "true"}))
    schema = StructType(
        [
            StructField("key", BinaryType()),
            StructField("value", BinaryType()),
            StructField("topic", StringType()),
            StructField("partition", IntegerType()),
            StructField("offset", LongType()),
            StructField("timestamp", TimestampType()),
            StructField("timestampType", IntegerType()),
        ]
    )
    wire = pa.RecordBatch.from_arrays(
        [
            pa.array([b"x", b"y"]),
            pa.array(["s", "s"]),
            pa.array([4, 5]),
            pa.array([1, 2], pa.timestamp("us", tz="UTC")),
        ],
        schema=pa.schema(
            [
                pa.field("value", pa.binary(), nullable=False),
                pa.field("stream", pa.string(), nullable=False),
                pa.field("offset", pa.int64(), nullable=False),
                pa.field("timestamp", pa.timestamp("us", tz="UTC"), nullable=False),
            ]
        ),
    )
    target = arrow_schema(schema)
    several = Shaper(chosen, target, {"s", "t"})
    found = several.shape(wire)
    assert several.wire == ("value", "stream", "offset", "timestamp")
    assert found.schema.equals(target)
    # The name of one stream is known: it is not sent with every record.
    alone = Shaper(chosen, target, {"s"})
    assert alone.wire == ("value", "offset", "timestamp")
    unnamed = wire.drop_columns(["stream"])
    for rows in (unnamed[:1], unnamed, unnamed[:0], unnamed[1:]):
        batch = alone.shape(rows)
        assert batch.schema.equals(target)
        assert batch.column("topic").to_pylist() == ["s"] * rows.num_rows
    assert alone.shape(unnamed).equals(found)
    assert found.to_pylist()[1]["key"] is None
    assert [row["partition"] for row in found.to_pylist()] == [0, 0]
    assert [row["timestampType"] for row in found.to_pylist()] == [1, 1]
