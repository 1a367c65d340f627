"""Offsets as people write them, and as the checkpoint keeps them."""

from __future__ import annotations

import json

import pytest

from millstream.errors import OptionInvalid, SchemaMismatch
from millstream.spark.read import offsets
from millstream.spark.read.offsets import EARLIEST, LATEST, Position, parse_bound, parse_time_ms

WIRE = "0001763000000000_0000000000004096"


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("", EARLIEST),
        ("earliest", EARLIEST),
        ("Latest", LATEST),
        ("-2", EARLIEST),
        ("-1", LATEST),
        ("23", Position("number", number=23)),
        (WIRE, Position("offset", offset=WIRE)),
    ],
)
def test_one_position_for_all_streams(text: str, position: Position) -> None:
    assert parse_bound("startingOffsets", text, EARLIEST).of("any") == position


def test_positions_by_stream() -> None:
    text = json.dumps({"a": 23, "b": {"0": 5}, "c": "latest", "d": -2, "e": WIRE, "f": "7"})
    bound = parse_bound("startingOffsets", text, LATEST)
    assert bound.of("a") == Position("number", number=23)
    assert bound.of("b") == Position("number", number=5)
    assert bound.of("c") == LATEST
    assert bound.of("d") == EARLIEST
    assert bound.of("e") == Position("offset", offset=WIRE)
    assert bound.of("f") == Position("number", number=7)
    assert bound.of("unnamed") == LATEST
    with pytest.raises(OptionInvalid, match="`f`"):
        bound.check_names("abcde")


@pytest.mark.parametrize(
    "text", ["soon", "-3", "{", '{"a":{"1":3}}', '{"a":[1]}', '{"a":true}', '{"a":null}', "1_2"]
)
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(OptionInvalid) as caught:
        parse_bound("endingOffsets", text, LATEST)
    assert "`endingOffsets`" in caught.value.message


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1763000000000", 1763000000000),
        ("2025-11-13T02:13:20Z", 1763000000000),
        ("2025-11-13T03:13:20+01:00", 1763000000000),
        ("2025-11-13 02:13:20", 1763000000000),
        ("2025-11-13T02:13:20.123456Z", 1763000000123),
    ],
)
def test_times(text: str, ms: int) -> None:
    assert parse_time_ms("startingTimestamp", text) == ms


def test_what_is_no_time_is_refused() -> None:
    with pytest.raises(OptionInvalid, match="startingTimestamp"):
        parse_time_ms("startingTimestamp", "yesterday")


def test_the_checkpoint_has_sorted_keys_at_every_level() -> None:
    found = offsets.offset({"b": offsets.entry(WIRE, "17", 23), "a": offsets.entry(WIRE, "18", 0)})
    assert json.dumps(found) == (
        f'{{"streams": {{"a": {{"at": "{WIRE}", "id": "18", "n": 0}}, '
        f'"b": {{"at": "{WIRE}", "id": "17", "n": 23}}}}, "v": 1}}'
    )
    assert json.dumps(found, sort_keys=True) == json.dumps(found)
    assert offsets.checked(json.loads(json.dumps(found))) == found


@pytest.mark.parametrize(
    "value",
    [
        {"streams": {}, "v": 2},
        {"streams": {}},
        {"v": 1},
        {"streams": [], "v": 1},
        {"streams": {"a": {"at": WIRE, "n": 1}}, "v": 1},
        {"streams": {"a": {"at": WIRE, "id": "1", "n": "1"}}, "v": 1},
        [],
        17,
    ],
)
def test_a_foreign_checkpoint_is_refused(value: object) -> None:
    with pytest.raises(SchemaMismatch):
        offsets.checked(value)


def test_bytes_of_an_offset() -> None:
    assert offsets.byte_position(WIRE) == 4096
    assert offsets.epoch_of(WIRE) == "0001763000000000"
    assert offsets.byte_position("-1") == 0
