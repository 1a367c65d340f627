"""JSON values without Spark: both ways agree, bad records stay alone, and cost no more than themselves.

That they agree with Spark's `from_json` is tested in tests/spark/test_json.py.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import RecordMalformed
from millstream.spark.json.blocks import Blocks
from millstream.spark.json.convert import RecordConverter, java_double
from millstream.spark.json.decoder import Decoder, JsonForm
from support.json_cases import CASES
from support.json_rows import comparable

KIND = pa.struct(
    [
        pa.field("i", pa.int32()),
        pa.field("l", pa.int64()),
        pa.field("d", pa.float64()),
        pa.field("o", pa.bool_()),
        pa.field("t", pa.string()),
        pa.field("z", pa.timestamp("us", tz="UTC")),
        pa.field("a", pa.date32()),
        pa.field("r", pa.list_(pa.field("element", pa.int64()))),
        pa.field("s", pa.struct([pa.field("x", pa.int16()), pa.field("y", pa.string())])),
        pa.field("_corrupt_record", pa.string()),
    ]
)


def decoder(mode: str = "PERMISSIVE", kind: pa.StructType = KIND) -> Decoder:
    return Decoder(JsonForm("", mode, "_corrupt_record", "UTC"), kind)


def careful(values: list[bytes], kind: pa.StructType = KIND) -> list[Any]:
    alone = decoder(kind=kind)
    alone._blocks.decode = lambda _: None  # type: ignore[method-assign]
    return comparable(alone.decode(pa.array(values, pa.binary()))[0])


def decoded(values: list[bytes], kind: pa.StructType = KIND) -> list[Any]:
    return comparable(decoder(kind=kind).decode(pa.array(values, pa.binary()))[0])


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(-40000, 40000),
    st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=8),
    st.sampled_from(["2026-11-16T02:03:04Z", "2026-11-16", "2026-02-30", "", "1", "NaN"]),
)  # fmt: skip
anything = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyab"), inner, max_size=3)
    ),
    max_leaves=5,
)
records = st.dictionaries(st.sampled_from([field.name for field in KIND] + ["other"]), anything)


@settings(max_examples=60, deadline=None)
@given(st.lists(records, min_size=1, max_size=12))
def test_both_paths_give_the_same(rows: list[dict[str, Any]]) -> None:
    values = [json.dumps(row, ensure_ascii=len(row) % 2 == 0).encode() for row in rows]
    assert decoded(values) == careful(values)


WIDE = pa.struct(
    [
        *list(KIND)[:-1],
        pa.field("p", pa.decimal128(10, 2)),
        pa.field("f", pa.float32()),
        pa.field("b", pa.int8()),
        pa.field("n", pa.timestamp("us")),
        pa.field("m", pa.map_(pa.string(), pa.int32())),
        pa.field("y", pa.list_(pa.field("element", pa.timestamp("us", tz="UTC")))),
        pa.field("_corrupt_record", pa.string()),
    ]
)
TRICKY = pa.struct(
    [
        pa.field("b", pa.int8()), pa.field("s", pa.int16()), pa.field("i", pa.int32()), pa.field("l", pa.int64()),
        pa.field("f", pa.float32()), pa.field("d", pa.float64()), pa.field("t", pa.string()),
        pa.field("o", pa.bool_()), pa.field("n", pa.binary()), pa.field("a", pa.date32()),
        pa.field("z", pa.timestamp("us", tz="UTC")), pa.field("w", pa.timestamp("us")),
        pa.field("p", pa.decimal128(10, 2)), pa.field("q", pa.decimal128(38, 18)), pa.field("r", pa.decimal128(5, 0)),
        pa.field("k", pa.int32()), pa.field("st", pa.struct([("x", pa.int32()), ("y", pa.string()), ("z", pa.struct([("q", pa.float64())]))])),
        pa.field("ar", pa.list_(pa.field("element", pa.int32()))), pa.field("m", pa.map_(pa.string(), pa.int32())),
        pa.field("v", pa.string()), pa.field("other", pa.int32()), pa.field("_corrupt_record", pa.string()),
    ]
)  # fmt: skip
FLAT = pa.struct(
    [field for field in TRICKY if not pa.types.is_map(field.type) and field.name not in "bfnw"]
)
"""Types that the block parser is trusted with."""
wide_records = st.dictionaries(st.sampled_from([field.name for field in WIDE]), anything)


@settings(max_examples=60, deadline=None)
@given(st.lists(wide_records, min_size=1, max_size=12))
def test_good_records_of_other_types_are_the_same(rows: list[dict[str, Any]]) -> None:
    values = [json.dumps(row, ensure_ascii=len(row) % 2 == 0).encode() for row in rows]
    assert decoded(values, WIDE) == careful(values, WIDE)


@pytest.mark.parametrize("name", CASES)
def test_tricky_values_of_both_paths(name: str) -> None:
    values = [text.encode() for text in CASES[name][1]]
    assert decoded(values, WIDE) == careful(values, WIDE)
    assert decoded(values, TRICKY) == careful(values, TRICKY)
    # A record that stands alone is a block of its own.
    for kind in (FLAT, TRICKY):
        alone = [decoded([value], kind)[0] for value in values]
        assert alone == careful(values, kind)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=20), min_size=1, max_size=50))
def test_no_bytes_make_it_fail(values: list[bytes]) -> None:
    assert decoded(values) == careful(values)


def test_the_block_path_is_used_for_good_records() -> None:
    good = b'{"i":1,"l":2,"d":3.5,"o":true,"t":"x","z":"2026-11-16T02:03:04.5Z","a":"2026-11-16","r":[1],"s":{"x":1}}'
    prices = b'{"p":12.34,"q":"0.5","r":7,"k":1}'
    for kind, record in ((KIND, good), (FLAT, prices)):
        values = pa.array([record] * 100, pa.binary())
        assert decoder(kind=kind)._blocks.decode(values) is not None
        assert decoded([record] * 100, kind) == careful([record] * 100, kind)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[bytes]]:
    """How many records each block had that was parsed, and which ones were looked at one by one."""
    blocks: list[int] = []
    alone: list[bytes] = []
    block, row = Blocks.decode, RecordConverter.row
    monkeypatch.setattr(
        Blocks, "decode", lambda self, found: blocks.append(len(found)) or block(self, found)
    )
    monkeypatch.setattr(
        RecordConverter, "row", lambda self, data: alone.append(data) or row(self, data)
    )
    return blocks, alone


def test_a_block_with_bad_records_is_parsed_twice_more_and_each_record_once_with_care(
    work: tuple[list[int], list[bytes]],
) -> None:
    good = b'{"i":%d,"t":"x","z":"2026-11-16T02:03:04Z"}'
    # Nobody looks so closely into fields that are not wanted.
    odd = {3: b'{"i":"no"}', 5: b'{"other":{"deep":[1}}}', 7: b'{"t":[3]}'}
    values = [odd.get(index % 10) or good % index for index in range(2000)]
    decoder().decode(pa.array(values, pa.binary()))
    # All of them, and those that do not look odd, before and after the names that come twice are known.
    assert work == ([2000, 1600, 1600], values)


@pytest.mark.parametrize(
    "odd",
    [
        b'{"i":"no"}', b'{"t":"a","l" : true}', b'{"s":[1]}', b'{"i":7', b"[]", b" null", b"", b'{"s":{"x":"no"}}', b'{"r":[1,"no"]}',
        b'{"i":2147483648000}', b'{"i":2147483648}', b'{"l":9223372036854775808}', b'{"s":{"x":32768}}', b'{"i":1.5}', b'{"i":1,\n"t":"a"}',
        b'{"i":1 "t":"a"}', b'{"i":1,"t":"a"', b'{"i":1,"t":"a}', b'{"i":1,,"t":"a"}', b'{"i":tru}', b'{"i":1,"t":"\xff"}', b'{"t":"\\q"}',
        b'{"t":"\\ud83d"}', b'{"d":-0}',
        b'{"i":1,"i":2}', b'{"s":{"x":1,"x":2}}', b'{"t":{"a":1}}',
    ],
)  # fmt: skip
def test_records_that_look_odd_cost_no_more_than_themselves(
    work: tuple[list[int], list[bytes]], odd: bytes
) -> None:
    good = [b'{"i":%d,"t":"x"}' % index for index in range(1000)]
    values = [odd if index % 100 == 50 else text for index, text in enumerate(good)]
    made = decoder().decode(pa.array(values, pa.binary()))[0].to_pylist()
    assert work == ([1000, 990], [odd] * 10)
    assert [row and row["i"] for row in made if row != made[50]] == [
        index for index in range(1000) if index % 100 != 50
    ]
    assert comparable(pa.array([made[50]], KIND)) == careful([odd])


@pytest.mark.parametrize(
    "odd", [b'{"z":"2026-02-30T00:00:00Z"}', b'{"z":"2026-11-16T24:00:00Z"}', b'{"a":"2025-02-29"}']
)
def test_days_and_times_that_do_not_exist_are_found_at_once(
    work: tuple[list[int], list[bytes]], odd: bytes
) -> None:
    good = b'{"z":"2026-11-16T02:03:04Z","a":"2024-02-29"}'
    values = [odd if index % 100 == 50 else good for index in range(1000)]
    made = decoder().decode(pa.array(values, pa.binary()))[0]
    assert work == ([1000], [odd] * 10)
    assert comparable(made) == careful(values)


def test_records_of_any_form_that_fit_are_decoded_at_once(
    work: tuple[list[int], list[bytes]],
) -> None:
    kind = pa.struct([*KIND, pa.field("b", pa.int8()), pa.field("f", pa.float32()), pa.field("p", pa.decimal128(10, 2))])  # fmt: skip
    fits = [
        b'{"i":-2147483647,"l":9223372036854775807,"s":{"x":-32767,"y":null},"r":[ 1 , null ],"other":[{"i":"x"}]}',
        b'{ "i" : 2147483647 , "ii":"x", "o" : true, "t" : "\\u00e9\\ud83d\\ude00\\n\xc3\xa9", "":{"deep":[[{"i":1.5}]]} } \r\n',
        b'{"z":"2024-02-29T23:59:59.123456+01:00","a":"2000-02-29","d":-1.5e-7}', b"{}", b'{"d":-0.5,"f":0.1,"b":-127}',
        b'{"t":7,"s":{"y":true}}', b'{"p":"-12345678.90","l":null}', b'{"p":7,"a":"1999-12-31","r":[]}',
    ]  # fmt: skip
    bad = b'{"i":"no"}'
    decoder(kind=kind).decode(pa.array([*fits[:5], *fits[6:], bad], pa.binary()))
    texts = decoder(kind=kind).decode(pa.array([*fits, bad], pa.binary()))[0]
    assert work == ([len(fits), len(fits) - 1, len(fits) + 1, len(fits)], [bad, bad])
    assert comparable(texts) == careful([*fits, bad], kind)


def test_nothing_at_all_among_records_that_look_odd() -> None:
    values = pa.array([b'{"i":1}', None, b'{"i":"no"}', b'{"i":2}'] * 2, pa.binary())
    rows = decoder().decode(values)[0].to_pylist()
    assert [row and row["i"] for row in rows] == [1, None, None, 2] * 2
    assert [row is None for row in rows] == [False, True, False, False] * 2


@pytest.mark.parametrize("count", [300, 1200, 5000])
def test_a_bad_record_of_many_fields(count: int) -> None:
    fields = [pa.field(f"field {n} (ü*)", pa.int64()) for n in range(count)]
    kind = pa.struct([*fields, pa.field("_corrupt_record", pa.string())])
    good = {field.name: 1 for field in fields}
    values = [json.dumps(good | ({fields[7].name: "x"} if n == 2 else {})) for n in range(5)]
    rows = decoder(kind=kind).decode(pa.array([text.encode() for text in values], pa.binary()))[0]
    assert [row["_corrupt_record"] is not None for row in rows.to_pylist()] == [n == 2 for n in range(5)]  # fmt: skip


@pytest.mark.parametrize(
    "bad", [b'{"i":"no","t":"kept"}', b"nonsense", b'{"i":1', b"[]", b"\xff", b"null", b" null"]
)
@pytest.mark.parametrize("place", [0, 1234, 3000])
def test_one_bad_record_among_many_stays_alone(bad: bytes, place: int) -> None:
    good = [b'{"i":%d,"t":"%d"}' % (index, index) for index in range(3000)]
    values = [*good[:place], bad, *good[place:]]
    rows = decoder().decode(pa.array(values, pa.binary()))[0].to_pylist()
    corrupt = [index for index, row in enumerate(rows) if row["_corrupt_record"] is not None]
    assert corrupt == [place]
    assert [row["i"] for row in rows[:place] + rows[place + 1 :]] == list(range(3000))


def test_modes() -> None:
    values = pa.array([b'{"i":1}', b'{"i":"x"}', b'{"i":3}'], pa.binary())
    array, keep = decoder("DROPMALFORMED").decode(values)
    assert keep is not None
    assert [row["i"] for row in array.filter(keep).to_pylist()] == [1, 3]
    with pytest.raises(RecordMalformed, match=r'\{"i":"x"\}'):
        decoder("FAILFAST").decode(values)
    array, keep = decoder().decode(values)
    assert keep is None
    assert [row["_corrupt_record"] for row in array.to_pylist()] == [None, '{"i":"x"}', None]


def test_a_record_with_a_line_break_is_one_record() -> None:
    rows = decoder().decode(pa.array([b'{"i":1,\n"t":"a"}', b'{"i":2}'], pa.binary()))[0]
    assert [(row["i"], row["t"]) for row in rows.to_pylist()] == [(1, "a"), (2, None)]


def test_a_schema_of_the_corrupt_record_alone() -> None:
    kind = pa.struct([pa.field("_corrupt_record", pa.string())])
    rows = decoder(kind=kind).decode(pa.array([b'{"i":1}', b"nonsense"], pa.binary()))[0]
    assert rows.to_pylist() == [{"_corrupt_record": None}, {"_corrupt_record": "nonsense"}]


def test_no_rows() -> None:
    array, keep = decoder().decode(pa.array([], pa.binary()))
    assert (len(array), keep) == (0, None)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1.0"), (1.1, "1.1"), (100.0, "100.0"), (1e7, "1.0E7"), (12345678.5, "1.23456785E7"),
        (0.001, "0.001"), (0.00012, "1.2E-4"), (-0.0, "-0.0"), (1e-5, "1.0E-5"), (1234567.0, "1234567.0"),
    ],
)  # fmt: skip
def test_doubles_as_java_writes_them(value: float, text: str) -> None:
    assert java_double(value) == text
