"""Request bodies: chunked, large, announced with Expect, and in odd shapes of the closing header."""

from __future__ import annotations

import hashlib

import pytest

from support.http import Api, chunked_bytes, request_bytes


def test_chunked_put_and_post(shared: Api, path: str) -> None:
    target = Api.target(path)
    text = {"Content-Type": "text/plain"}
    assert shared.call("PUT", target, text, b"one,", chunked=True).status == 201
    assert shared.call("POST", target, text, b"two," * 5000, chunked=True).status == 204
    assert shared.read_all(path) == b"one," + b"two," * 5000


def test_chunk_extensions_and_trailers_are_passed_over(shared: Api, path: str) -> None:
    shared.put(path)
    head = request_bytes("POST", Api.target(path), {"Content-Type": "text/plain"}, chunked=True)
    head = head[: head.index(b"\r\n\r\n") + 4]
    body = b'3;name=value\r\nabc\r\n2;x="y"\r\nde\r\n0\r\nX-Trailer: 1\r\n\r\n'
    with shared.connect() as connection:
        connection.send(head + body + request_bytes("HEAD", Api.target(path)))
        assert connection.read_response().status == 204
        assert connection.read_response(head_only=True).status == 200
    assert shared.get(path).body == b"abcde"


def test_a_body_split_into_single_bytes_arrives_whole(shared: Api, path: str) -> None:
    shared.put(path)
    raw = request_bytes(
        "POST", Api.target(path), {"Content-Type": "text/plain"}, b"slowly", chunked=True
    )
    with shared.connect() as connection:
        for index in range(len(raw)):
            connection.send(raw[index : index + 1])
        assert connection.read_response().status == 204
    assert shared.get(path).body == b"slowly"


@pytest.mark.parametrize("chunked", [False, True])
def test_ten_megabyte_append_round_trips(shared: Api, path: str, chunked: bool) -> None:
    body = b"".join(hashlib.sha256(b"%d" % n).digest() for n in range(10 * 1024 * 1024 // 32))
    kind = {"Content-Type": "application/octet-stream"}
    shared.put(path, content_type="application/octet-stream")
    answer = shared.call("POST", Api.target(path), kind, body, chunked=chunked)
    assert answer.status == 204
    assert shared.read_all(path) == body


def test_ten_megabyte_json_append_is_split_into_records(shared: Api, path: str) -> None:
    record = b'{"k":"' + b"v" * 1000 + b'"}'
    body = b"[" + b",".join([record] * 10_000) + b"]"
    assert shared.put(path, b"[]", "application/json").status == 201
    assert shared.post(path, body, "application/json").status == 204
    seen, offset = 0, "-1"
    while True:
        answer = shared.get(path, offset=offset)
        seen += len(answer.json())
        offset = answer.offset
        if answer.get("stream-up-to-date"):
            break
    assert seen == 10_000


def test_expect_continue_is_answered_before_the_body(shared: Api, path: str) -> None:
    shared.put(path)
    headers = {"Content-Type": "text/plain", "Content-Length": "5", "Expect": "100-continue"}
    with shared.connect() as connection:
        connection.send(request_bytes("POST", Api.target(path), headers))
        first = connection.socket.recv(4096)
        assert first.startswith(b"HTTP/1.1 100 "), first
        connection.send(b"hello")
        assert connection.read_response().status == 204
    assert shared.get(path).body == b"hello"


def test_unknown_expectation_is_refused(shared: Api, path: str) -> None:
    shared.put(path)
    headers = {"Content-Type": "text/plain", "Expect": "the-unexpected"}
    answer = shared.call("POST", Api.target(path), headers, b"x")
    assert (answer.status, answer.code) == (417, "expectation_failed")


@pytest.mark.parametrize("value", ["true", "True", "TRUE", "tRuE"])
def test_stream_closed_is_true_in_any_case(shared: Api, path: str, value: str) -> None:
    shared.put(path)
    answer = shared.post(path, b"", None, {"Stream-Closed": value})
    assert (answer.status, answer["stream-closed"]) == (204, "true")
    created = shared.put(f"{path}/2", headers={"Stream-Closed": value})
    assert (created.status, created["stream-closed"]) == (201, "true")


@pytest.mark.parametrize("value", ["false", "1", "yes", "", "true, true", "truee"])
def test_any_other_stream_closed_is_as_if_absent(shared: Api, path: str, value: str) -> None:
    shared.put(path, headers={"Stream-Closed": value})
    assert shared.head(path).get("stream-closed") is None
    assert shared.post(path, b"data", headers={"Stream-Closed": value}).status == 204
    assert shared.post(path, b"", None, {"Stream-Closed": value}).status == 400
    assert shared.head(path).get("stream-closed") is None


def test_json_keeps_the_text_of_every_value(shared: Api, path: str) -> None:
    big = b"123456789012345678901234567890"
    shared.put(path, b"[]", "application/json")
    shared.post(path, b' { "n" : ' + big + b' , "n" : 1 } ', "application/json")
    shared.post(path, b'[ [1, 2] , "a,]b\\"" ,\n null ]', "application/json; charset=utf-8")
    body = shared.get(path).body
    assert big in body
    assert shared.get(path).json() == [{"n": 1}, [1, 2], 'a,]b"', None]


@pytest.mark.parametrize(
    "body",
    [b"{", b"[1,]", b"[1 2]", b"01", b"1.", b'"\x01"', b"nul", b"[1]x", b'{"a":1,}', b"\xef\xbb\xbf1",
     b'"\xff"', b'"\\x"', b"[" * 100_000, b"'a'", b"NaN", b"--1", b"+1", b"1e", b'"\\ud800'],
)  # fmt: skip
def test_what_is_not_json_is_refused(shared: Api, path: str, body: bytes) -> None:
    shared.put(path, b"[]", "application/json")
    answer = shared.post(path, body, "application/json")
    assert (answer.status, answer.code) == (400, "json_invalid")
    assert shared.get(path).body == b"[]"


def test_invalid_json_creates_nothing(shared: Api, path: str) -> None:
    answer = shared.put(path, b"{", "application/json")
    assert (answer.status, answer.code) == (400, "json_invalid")
    assert shared.head(path).status == 404
    assert chunked_bytes(b"") == b"0\r\n\r\n"
