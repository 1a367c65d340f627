"""The HTTP parser gives the same responses however the bytes are cut, and only whole ones."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.client.http import (
    Data,
    Head,
    MalformedResponse,
    Request,
    ResponseAssembler,
    ResponseParser,
    Truncated,
)
from millstream.errors import InvalidArgument

WIRE = (
    b"HTTP/1.1 100 Continue\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nStream-Next-Offset: 7\r\n\r\nhello"
    b"HTTP/1.1 204 No Content\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3;x=y\r\nabc\r\nA\r\n0123456789\r\n0\r\nTrailer: 1\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n"
    b"HTTP/1.1 409 Conflict\r\nContent-Length: 0\r\nVary: a\r\nvary: b\r\n\r\n"
)
METHODS = ["POST", "POST", "GET", "HEAD", "POST"]
BODIES = [(200, b"hello"), (204, b""), (200, b"abc0123456789"), (200, b""), (409, b"")]


def parse(pieces: list[bytes], methods: list[str]) -> list[tuple[Head, bytes]]:
    parser = ResponseParser()
    for method in methods:
        parser.expect(method)
    assembler = ResponseAssembler(parser)
    found = []
    for piece in pieces:
        parser.feed(piece)
        while (response := assembler.next()) is not None:
            found.append(response)
    return found


@given(st.lists(st.integers(0, len(WIRE)), max_size=12))
def test_pipelined_responses_do_not_depend_on_the_cuts(cuts: list[int]) -> None:
    marks = [0, *sorted(cuts), len(WIRE)]
    pieces = [WIRE[a:b] for a, b in itertools.pairwise(marks) if a < b]
    found = parse(pieces, METHODS)
    assert [(head.status, body) for head, body in found] == BODIES
    assert found[0][0].headers["stream-next-offset"] == "7"
    assert found[4][0].headers["vary"] == "a, b"


@pytest.mark.parametrize("end", range(1, len(WIRE)))
def test_a_connection_that_ends_early_never_gives_the_last_response(end: int) -> None:
    parser = ResponseParser()
    for method in METHODS:
        parser.expect(method)
    assembler = ResponseAssembler(parser)
    parser.feed(WIRE[:end])
    parser.feed(b"")
    statuses = []
    with pytest.raises(Truncated):
        while (response := assembler.next()) is not None:
            statuses.append((response[0].status, response[1]))
    assert statuses == BODIES[: len(statuses)]
    assert len(statuses) < len(BODIES)


def test_a_body_without_framing_ends_with_the_connection_and_is_not_kept() -> None:
    parser = ResponseParser()
    parser.expect("GET")
    parser.feed(b"HTTP/1.1 200 OK\r\n\r\nab")
    head = parser.next()
    assert isinstance(head, Head)
    assert not head.keep
    data = parser.next()
    assert isinstance(data, Data)
    assert parser.next() is None
    parser.feed(b"")
    assert parser.next() is not None
    assert parser.clean


@pytest.mark.parametrize(
    "wire",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1, 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\n folded: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000,
    ],
)
def test_what_is_not_http_is_refused(wire: bytes) -> None:
    with pytest.raises(MalformedResponse):
        parse([wire], ["GET"])


def test_bytes_without_a_request_are_refused() -> None:
    parser = ResponseParser()
    parser.feed(b"HTTP/1.1 200 OK\r\n\r\n")
    with pytest.raises(MalformedResponse):
        parser.next()


@pytest.mark.parametrize("value", ["a\r\nX: y", "a\nb", "a\0b", "\N{SNOWMAN}"])
def test_a_header_value_cannot_carry_another_header(value: str) -> None:
    request = Request("POST", "/x", (("Producer-Id", value),), b"body")
    with pytest.raises(InvalidArgument):
        request.encode(b"")


def test_connection_close_is_heard() -> None:
    [(head, _)] = parse(
        [b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 0\r\n\r\n"], ["GET"]
    )
    assert not head.keep
