"""Why a record does not fit: the reason, the field and what is there, for every way in which a block is decoded."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from millstream.spark.json.decoder import Decoder, JsonForm

REASONS = pa.struct(
    [
        pa.field("record", pa.string()),
        pa.field("bytes", pa.binary()),
        pa.field("reason", pa.string()),
        pa.field("field", pa.string()),
        pa.field("detail", pa.string()),
    ]
)
INNER = pa.struct([pa.field("age", pa.int32()), pa.field("name", pa.string())])
KIND = pa.struct(
    [
        pa.field("id", pa.int64()),
        pa.field("price", pa.decimal128(10, 2)),
        pa.field("user", pa.struct([pa.field("home", INNER), pa.field("tags", pa.list_(pa.int8()))])),
        pa.field("why", REASONS),
    ]
)  # fmt: skip
GOOD = b'{"id":1,"price":1.25,"user":{"home":{"age":3}}}'


def decode(values: list[bytes], mode: str = "PERMISSIVE") -> tuple[list[Any], Any]:
    decoder = Decoder(JsonForm("", mode, "why", "UTC", required=("id",)), KIND)
    made, keep = decoder.decode(pa.array(values, pa.binary()))
    return made.to_pylist(), keep


@pytest.mark.parametrize(
    ("record", "reason", "field", "detail"),
    [
        (b'{"id":"7"}', "wrong_type", "id", '"7" is not bigint'),
        (b'{"id":1,"price":"x"}', "wrong_type", "price", '"x" is not decimal(10,2)'),
        (b'{"id":1,"user":{"home":{"age":"old"}}}', "wrong_type", "user.home.age", '"old" is not int'),
        (b'{"id":1,"user":{"home":5}}', "wrong_type", "user.home", "5 is not struct<age:int,name:string>"),
        (b'{"id":1,"user":{"tags":[1,"a"]}}', "wrong_type", "user.tags", '[1, "a"] is not array<tinyint>'),
        (b'{"price":1}', "missing", "id", "`id` is null or not there"),
        (b'{"id":null}', "missing", "id", "`id` is null or not there"),
        (b"[1]", "not_an_object", None, "[1] is not a JSON object"),
        (b"  ", "not_json", None, "Expecting value"),
        (b'{"id":1', "not_json", None, "Expecting"),
        (b'{"id":1,"user":{', "not_json", None, "Expecting"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("neighbours", [0, 3])
def test_the_reason_is_told(
    record: bytes, reason: str, field: str | None, detail: str, neighbours: int
) -> None:
    values = [GOOD] * neighbours + [record] + [GOOD] * neighbours
    rows, keep = decode(values)
    assert keep is None
    found = rows.pop(neighbours)["why"]
    assert (found["record"], found["bytes"]) == (record.decode(), None)
    assert (found["reason"], found["field"]) == (reason, field)
    assert detail in found["detail"]
    assert all(row["why"] is None and row["id"] == 1 for row in rows)


def test_what_is_no_text_is_kept_as_bytes() -> None:
    rows, _ = decode([b'{"id":"\xff"}'])
    assert rows[0]["why"]["bytes"] == b'{"id":"\xff"}'
    assert rows[0]["why"]["record"] is None


def test_a_required_field_counts_in_every_mode() -> None:
    keep = decode([GOOD, b'{"price":1}'], "DROPMALFORMED")[1]
    assert keep.to_pylist() == [True, False]
    with pytest.raises(Exception, match="does not fit"):
        decode([GOOD, b'{"price":1}'], "FAILFAST")
