"""Item 43: every shape that two HTTP parsers could read differently is refused, and the connection ends.

Each case carries a second request behind the trick. It must never be answered: answering it means that
the server saw a boundary where a proxy in front of it may have seen none.
"""

from __future__ import annotations

import pytest

from support.http import Api, Closed

HOST = b"Host: 127.0.0.1\r\n"
TYPE = b"Content-Type: text/plain\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
POST = b"POST /v1/stream/smuggled HTTP/1.1\r\n"

BROKEN = {
    "length-with-plus": POST + HOST + TYPE + b"Content-Length: +5\r\n\r\nhello",
    "length-negative": POST + HOST + TYPE + b"Content-Length: -5\r\n\r\nhello",
    "length-hex": POST + HOST + TYPE + b"Content-Length: 0x5\r\n\r\nhello",
    "length-blank-inside": POST + HOST + TYPE + b"Content-Length: 1 2\r\n\r\nhello",
    "length-empty": POST + HOST + TYPE + b"Content-Length: \r\n\r\nhello",
    "length-list-differs": POST + HOST + TYPE + b"Content-Length: 5, 6\r\n\r\nhello",
    "length-overflows": POST + HOST + TYPE + b"Content-Length: 18446744073709551621\r\n\r\nhello",
    "length-twice-differs": POST + HOST + TYPE + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    "length-and-chunked": POST + HOST + TYPE + b"Content-Length: 5\r\n" + CHUNKED + b"\r\n0\r\n\r\n",
    "coding-unknown": POST + HOST + TYPE + b"Transfer-Encoding: gzip\r\n\r\n0\r\n\r\n",
    "coding-list": POST + HOST + TYPE + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "coding-chunked-not-last": POST + HOST + TYPE + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "coding-twice": POST + HOST + TYPE + CHUNKED + b"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "coding-chunked-twice": POST + HOST + TYPE + CHUNKED + CHUNKED + b"\r\n0\r\n\r\n",
    "coding-odd-name": POST + HOST + TYPE + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "coding-blank-before-colon": POST + HOST + TYPE + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "coding-with-tab": POST + HOST + TYPE + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    "chunk-size-plus": POST + HOST + TYPE + CHUNKED + b"\r\n+5\r\nhello\r\n0\r\n\r\n",
    "chunk-size-0x": POST + HOST + TYPE + CHUNKED + b"\r\n0x5\r\nhello\r\n0\r\n\r\n",
    "chunk-size-blank": POST + HOST + TYPE + CHUNKED + b"\r\n 5\r\nhello\r\n0\r\n\r\n",
    "chunk-size-empty": POST + HOST + TYPE + CHUNKED + b"\r\n\r\nhello\r\n0\r\n\r\n",
    "chunk-size-overflows": POST + HOST + TYPE + CHUNKED + b"\r\n10000000000000005\r\nhello\r\n0\r\n\r\n",
    "chunk-size-bare-lf": POST + HOST + TYPE + CHUNKED + b"\r\n5\nhello\r\n0\r\n\r\n",
    "chunk-end-missing": POST + HOST + TYPE + CHUNKED + b"\r\n5\r\nhelloXX0\r\n\r\n",
    "chunk-end-lf": POST + HOST + TYPE + CHUNKED + b"\r\n5\r\nhello\n0\r\n\r\n",
    "chunk-extension-bare-cr": POST + HOST + TYPE + CHUNKED + b"\r\n5;a=\rb\r\nhello\r\n0\r\n\r\n",
    "header-folded": POST + HOST + TYPE + b"Content-Length: 5\r\nX: a\r\n b\r\n\r\nhello",
    "header-bare-lf": POST + HOST + TYPE + b"Content-Length: 5\nX: a\r\n\r\nhello",
    "header-bare-cr": POST + HOST + TYPE + b"Content-Length: 5\r\nX: a\rb\r\n\r\nhello",
    "header-nul": POST + HOST + TYPE + b"Content-Length: 5\r\nX: a\x00b\r\n\r\nhello",
    "header-without-name": POST + HOST + TYPE + b": x\r\nContent-Length: 5\r\n\r\nhello",
    "header-blank-in-name": POST + HOST + TYPE + b"X Y: x\r\nContent-Length: 5\r\n\r\nhello",
    "host-missing": POST + TYPE + b"Content-Length: 5\r\n\r\nhello",
    "host-twice": POST + HOST + b"Host: other\r\n" + TYPE + b"Content-Length: 5\r\n\r\nhello",
    "host-with-path": POST + b"Host: a/b\r\n" + TYPE + b"Content-Length: 5\r\n\r\nhello",
    "line-three-blanks": b"POST  /v1/stream/smuggled HTTP/1.1\r\n" + HOST + TYPE + b"Content-Length: 5\r\n\r\nhello",
    "line-nul": b"POST /v1/stream/a\x00b HTTP/1.1\r\n" + HOST + TYPE + b"Content-Length: 5\r\n\r\nhello",
    "line-no-version": b"POST /v1/stream/smuggled\r\n" + HOST + TYPE + b"Content-Length: 5\r\n\r\nhello",
}  # fmt: skip

SECOND = b"GET /-/health HTTP/1.1\r\n" + HOST + b"\r\n"


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_item_43_smuggling_shape_is_refused_and_the_connection_ends(shared: Api, name: str) -> None:
    shared.put("smuggled")
    with shared.connect() as connection:
        connection.send(BROKEN[name] + SECOND)
        answer = connection.read_response()
        assert answer.status in (400, 501), answer
        assert answer.code in ("bad_request", "not_implemented")
        assert answer["connection"].lower() == "close"
        with pytest.raises(Closed):
            connection.read_response()
    assert shared.get("smuggled").body == b""
    assert shared.delete("smuggled").status == 204


def test_item_43_equal_repeated_lengths_are_one_reading_or_none(shared: Api, path: str) -> None:
    shared.put(path)
    head = f"POST {Api.target(path)} HTTP/1.1\r\n".encode() + HOST + TYPE
    with shared.connect() as connection:
        connection.send(head + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello")
        assert connection.read_response().status in (204, 400)


def test_item_43_early_end_of_a_body_is_not_an_append(shared: Api, path: str) -> None:
    shared.put(path)
    head = f"POST {Api.target(path)} HTTP/1.1\r\n".encode() + HOST + TYPE
    for rest in (b"Content-Length: 10\r\n\r\nhello", CHUNKED + b"\r\n5\r\nhello\r\n"):
        connection = shared.connect()
        connection.send(head + rest)
        connection.socket.shutdown(1)
        raw = connection.read_to_end()
        assert raw == b"" or raw.startswith(b"HTTP/1.1 400 "), raw
        connection.close()
    assert shared.get(path).body == b""


def test_item_43_endless_trailers_are_refused(shared: Api, path: str) -> None:
    shared.put(path)
    head = f"POST {Api.target(path)} HTTP/1.1\r\n".encode() + HOST + TYPE + CHUNKED
    with shared.connect() as connection:
        connection.send_what_it_takes(head + b"\r\n1\r\nx\r\n0\r\n" + b"X-Trailer: y\r\n" * 20_000)
        answer = connection.read_response()
        assert answer.status in (400, 431)
        assert shared.get(path).body == b""


def test_versions_other_than_1_are_refused(shared: Api) -> None:
    for version, statuses in (("HTTP/2.0", (400, 505)), ("HTTP/0.9", (400, 505)), ("HTTP/1.9", (200, 400, 505)), ("HTPP/1.1", (400,))):  # fmt: skip
        with shared.connect() as connection:
            connection.send(f"GET /-/health {version}\r\n".encode() + HOST + b"\r\n")
            assert connection.read_response().status in statuses


def test_leading_blank_lines_are_forgiven_but_not_without_end(shared: Api) -> None:
    with shared.connect() as connection:
        connection.send(b"\r\n\r\n" + SECOND)
        assert connection.read_response().status in (200, 400)
    with shared.connect() as connection:
        connection.send_what_it_takes(b"\r\n" * 200_000)
        with pytest.raises((Closed, AssertionError)):
            while True:
                assert connection.read_response().status < 400
