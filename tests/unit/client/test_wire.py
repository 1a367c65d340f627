"""Requests as they leave, and answers as they are understood."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.client import wire
from millstream.client.http import Response
from millstream.errors import InvalidArgument, ProtocolError
from millstream.types import Gap

ENDPOINT = wire.parse_url("http://127.0.0.1:4437")
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("url", "authority", "prefix"),
    [
        ("http://127.0.0.1:4437", "127.0.0.1:4437", ""),
        ("localhost:4437", "localhost:4437", ""),
        ("https://example.test/", "example.test", ""),
        ("https://example.test:8443/a/b/", "example.test:8443", "/a/b"),
        ("http://[::1]:80/v1/stream/", "[::1]", ""),
    ],
)
def test_a_server_url_is_taken_apart(url: str, authority: str, prefix: str) -> None:
    endpoint = wire.parse_url(url)
    assert (endpoint.authority, endpoint.prefix) == (authority, prefix)


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "http://x:99999", "http://x?a=b", "http://u@x"]
)
def test_a_bad_server_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument):
        wire.parse_url(url)


@pytest.mark.parametrize("path", ["", "/", "a/../b", "./a", "..", "a\0b"])
def test_a_bad_stream_path_is_refused(path: str) -> None:
    with pytest.raises(InvalidArgument):
        wire.check_path(path)


def test_a_stream_path_is_quoted_once() -> None:
    assert wire.stream_target(ENDPOINT, "a b/ü?#%/c:@d") == "/v1/stream/a%20b/%C3%BC%3F%23%25/c:@d"


@given(st.lists(JSON, max_size=8))
def test_json_records_come_back_as_sent(values: list[Any]) -> None:
    texts = [wire.encode_record(value, as_json=True) for value in values]
    records = wire.decode_body(wire.join_json(texts), "application/json; charset=utf-8", "9")
    assert [record.value for record in records] == values
    assert [record.data for record in records] == texts
    assert [record.final for record in records] == [False] * (len(values) - 1) + [True] * bool(
        values
    )


@given(JSON, st.sampled_from(["", " ", "\n\t"]))
def test_an_array_is_split_with_any_spacing(value: Any, space: str) -> None:
    text = json.dumps(value)
    body = f"{space}[{space}{text}{space},{space}1.10{space}]{space}"
    assert wire.split_json_array(body) == [(value, text), (1.1, "1.10")]


@pytest.mark.parametrize("body", ["", "{}", "[", "[1", "[1,", "[1 2]", "[1,]", "[]x", "[1]]"])
def test_a_body_that_is_no_array_is_a_protocol_error(body: str) -> None:
    with pytest.raises(ProtocolError):
        wire.decode_body(body.encode(), "application/json", "9")


@pytest.mark.parametrize("value", [b"1,2", b"", b"NaN", b"{", b"1] [", b"\xff"])
def test_bytes_for_a_json_stream_must_be_one_json_text(value: bytes) -> None:
    with pytest.raises(InvalidArgument):
        wire.encode_record(value, as_json=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}])
def test_what_json_cannot_say_is_refused(value: object) -> None:
    with pytest.raises(InvalidArgument):
        wire.encode_record(value, as_json=True)


def test_a_byte_stream_takes_bytes_and_text_only() -> None:
    assert wire.encode_record("ü", as_json=False) == b"\xc3\xbc"
    assert wire.encode_record(memoryview(b"ab"), as_json=False) == b"ab"
    with pytest.raises(InvalidArgument, match="dict"):
        wire.encode_record({}, as_json=False)


def test_create_says_everything_that_was_asked_for() -> None:
    options = wire.CreateOptions(
        content_type="text/plain",
        expires_at=datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC),
        durability="memory",
        closed=True,
        forked_from="a b",
        fork_offset="1_2",
        fork_sub_offset=3,
        body=b"x",
    )
    request = wire.create_request(ENDPOINT, "p", options)
    assert dict(request.headers) == {
        "Content-Type": "text/plain",
        "Stream-Expires-At": "2030-01-02T03:04:05.000Z",
        "Stream-Durability": "memory",
        "Stream-Closed": "true",
        "Stream-Forked-From": "/v1/stream/a%20b",
        "Stream-Fork-Offset": "1_2",
        "Stream-Fork-Sub-Offset": "3",
    }


def test_ttl_and_expiry_together_are_refused() -> None:
    with pytest.raises(InvalidArgument):
        wire.create_request(ENDPOINT, "p", wire.CreateOptions(ttl_seconds=1, expires_at="x"))


def test_append_says_everything_that_was_asked_for() -> None:
    options = wire.AppendOptions(if_match="1_2", seq="s", close=True, producer=("id", 4, 5))
    request = wire.append_request(ENDPOINT, "p", "text/plain", b"x", options)
    assert dict(request.headers) == {
        "Content-Type": "text/plain",
        "If-Match": '"1_2"',
        "Stream-Seq": "s",
        "Stream-Closed": "true",
        "Producer-Id": "id",
        "Producer-Epoch": "4",
        "Producer-Seq": "5",
    }


@pytest.mark.parametrize(
    ("start", "query"),
    [
        (wire.Start(), [("offset", "-1")]),
        (wire.Start(offset="now"), [("offset", "now")]),
        (wire.Start(tail=3), [("tail", "3")]),
        (wire.Start(since=1700), [("since", "1700")]),
    ],
)
def test_a_read_says_where_it_starts(start: wire.Start, query: list[tuple[str, str]]) -> None:
    assert start.query() == query


@pytest.mark.parametrize("given_", [{"offset": "1", "tail": 2}, {"offset": ""}, {"tail": -1}])
def test_a_contradictory_start_is_refused(given_: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        wire.Start(**given_)


def test_a_gap_is_understood() -> None:
    assert wire.parse_gap("from=1_2; to=3_4; reason=crash; certain=0") == Gap(
        "1_2", "3_4", "crash", certain=False
    )
    assert wire.parse_gap(None) is None
    with pytest.raises(ProtocolError):
        wire.parse_gap("nonsense")


def test_an_answer_without_offset_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        wire.page_of(Response(200, {"content-type": "text/html"}), "-1")


def test_a_listing_is_understood() -> None:
    row = {
        "path": "a",
        "content_type": "text/plain",
        "tail": "1_2",
        "closed": True,
        "durability": "fsync",
        "incarnation": 7,
        "records": 3,
        "bytes": 4,
        "created_at": 5,
        "something_new": 1,
    }
    body = json.dumps({"streams": [row], "next": "a"}).encode()
    [info], after = wire.parse_listing(Response(200, {}, body))
    assert (info.path, info.records, info.created_at_ms, info.incarnation) == ("a", 3, 5, "7")
    assert after == "a"
    with pytest.raises(ProtocolError):
        wire.parse_listing(Response(200, {}, b'{"streams":[{}]}'))
