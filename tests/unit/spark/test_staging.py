"""Rows into stages without a server: cutting keeps every row and its order, bad rows are named."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType

from millstream.errors import MillstreamError, OptionInvalid, SchemaMismatch
from millstream.spark.errors import ConnectorError
from millstream.spark.options import Options
from millstream.spark.write.options import parse
from millstream.spark.write.staging import STAGE_ROWS_MAX, Rows, encode, pieces
from millstream.spark.write.writer import check_schema, stream_writer


def options(**given_options: str) -> Any:
    return parse(Options(given_options))


@settings(deadline=None)
@given(
    values=st.lists(st.binary(max_size=300), max_size=60),
    bytes_max=st.integers(min_value=1, max_value=2000),
    skipped=st.integers(min_value=0, max_value=5),
)
def test_pieces_keep_rows_and_order(values: list[bytes], bytes_max: int, skipped: int) -> None:
    batch = pa.record_batch({"value": pa.array(values, pa.binary())}).slice(skipped)
    cut = list(pieces(batch, bytes_max))
    assert [value for piece in cut for value in piece.column(0).to_pylist()] == values[skipped:]
    assert all(piece.nbytes <= bytes_max or piece.num_rows == 1 for piece in cut)
    if cut:
        table = pa.ipc.open_stream(io.BytesIO(encode(cut))).read_all()
        assert table.column("value").to_pylist() == values[skipped:]


def test_pieces_have_no_more_rows_than_a_stage_may_have() -> None:
    offsets = pa.array(range(2_500_001), pa.int32()).buffers()[1]
    values = pa.Array.from_buffers(
        pa.binary(), 2_500_000, [None, offsets, pa.py_buffer(b"x" * 2_500_000)]
    )
    cut = list(pieces(pa.record_batch({"value": values}), 1 << 30))
    assert sum(piece.num_rows for piece in cut) == 2_500_000
    assert max(piece.num_rows for piece in cut) <= STAGE_ROWS_MAX


def test_a_slice_sends_only_its_own_bytes() -> None:
    batch = pa.record_batch({"value": pa.array([b"x" * 1000] * 1000)})
    assert len(encode([batch.slice(10, 1)])) < 5000


def test_only_the_columns_that_are_sent_are_kept() -> None:
    batch = pa.record_batch({"stream": ["a", "b"], "value": ["1", "2"]})
    assert Rows(options(stream="x"), 0).take(batch).schema.names == ["value"]
    assert Rows(options(), 0).take(batch).schema.names == ["value", "stream"]


@pytest.mark.parametrize("column", ["value", "stream"])
def test_a_null_is_refused_with_its_row(column: str) -> None:
    rows = Rows(options(), 7)
    columns = {"value": ["1", "2", "3"], "stream": ["a", "b", "c"]}
    rows.take(pa.record_batch(columns))
    columns[column] = ["x", None, None]  # type: ignore[list-item]
    with pytest.raises(MillstreamError, match=f"`{column}` is null in row 4 of partition 7"):
        rows.take(pa.record_batch(columns))


def test_each_stream_is_new_once() -> None:
    rows = Rows(options(), 0)
    assert rows.new_streams(pa.record_batch({"value": ["1"] * 3, "stream": ["a", "b", "a"]})) == [
        "a",
        "b",
    ]
    assert rows.new_streams(pa.record_batch({"value": ["1"] * 2, "stream": ["c", "b"]})) == ["c"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"value": StringType()}, None),
        ({"value": BinaryType(), "stream": StringType()}, None),
        ({"value": StringType(), "key": StringType()}, "a record has no `key`"),
        ({"value": StringType(), "headers": StringType()}, "a record has no `headers`"),
        ({"value": IntegerType()}, "column `value` is int, not string or binary"),
        ({"val": StringType()}, "there is no column `value`; the columns are: val"),
        ({"value": StringType(), "stream": LongType()}, "column `stream` is bigint, not string"),
        ({"value": StringType(), "n": LongType()}, "the columns n would be lost"),
    ],
)
def test_the_schema_is_checked(fields: dict[str, Any], expected: str | None) -> None:
    schema = StructType([StructField(name, kind) for name, kind in fields.items()])
    if expected is None:
        check_schema(schema, options(stream="s"))
        return
    with pytest.raises(SchemaMismatch, match=expected) as caught:
        check_schema(schema, options(stream="s"))
    assert caught.value.hint or "not string" in expected


def test_rows_need_a_target() -> None:
    schema = StructType([StructField("value", StringType()), StructField("topic", StringType())])
    with pytest.raises(SchemaMismatch, match="no target") as caught:
        check_schema(schema, options())
    assert "`topic` is called `stream`" in str(caught.value.hint)


def test_errors_carry_code_and_hint_in_their_text() -> None:
    schema = StructType([StructField("value", StringType())])
    with pytest.raises(ConnectorError, match=r"^not_supported: output mode `complete`.* Hint: "):
        stream_writer(Options({"stream": "s"}), None, schema, overwrite=True)  # type: ignore[arg-type]


def test_the_epoch_orders_generations_then_batches() -> None:
    early, late = options(producergeneration="1"), options(producergeneration="2")
    assert early.epoch(0) < early.epoch(1) < early.epoch(2**40 - 1) < late.epoch(0) < 2**53
    assert options(producergeneration="8191").epoch(2**40 - 1) < 2**53
    with pytest.raises(OptionInvalid, match="batch id"):
        early.epoch(2**40)


@pytest.mark.parametrize(
    ("given_options", "expected"),
    [
        ({"contenttype": "text/plain"}, "count only for streams that are created"),
        ({"durability": "fsync"}, "count only for streams that are created"),
        ({"exactlyonce": "direct"}, "needs `directPartitions`"),
        ({"exactlyonce": "maybe"}, "option `exactlyOnce` is `maybe`"),
        ({"producerid": "x" * 129}, "option `producerId`"),
        ({"stagebytes": "1"}, "option `stageBytes`"),
        ({"subscribe": "x"}, "option `subscribe` means nothing for a write"),
    ],
)
def test_options_that_cannot_work_are_refused(given_options: dict[str, str], expected: str) -> None:
    with pytest.raises(OptionInvalid, match=expected) as caught:
        options(**given_options)
    assert caught.value.hint
