"""Every kind of state, before and after a restart: in an orderly way and by kill -9."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from support.classes import set_class
from support.http import Api, producer
from support.server import Server

pytestmark = pytest.mark.one_server

ENDINGS = ["stop", "kill"]


@pytest.fixture(params=ENDINGS)
def restart(request: pytest.FixtureRequest, server: Server) -> Callable[[], None]:
    """Ends the server in one of the two ways and starts it over the same directory."""

    def end_and_start() -> None:
        getattr(server, request.param)()
        server.restart()

    return end_and_start


def described(api: Api, path: str) -> dict[str, str | None]:
    head = api.head(path)
    names = ["content-type", "stream-next-offset", "stream-closed", "stream-ttl"]
    names += ["stream-expires-at", "stream-incarnation", "stream-durability"]
    return {"status": str(head.status), **{name: head.get(name) for name in names}}


def test_open_stream_keeps_bytes_offsets_and_identity(
    api: Api, path: str, restart: Callable[[], None]
) -> None:
    api.put(path, b"first,")
    middle = api.post(path, b"second,").offset
    api.post(path, b"third")
    before = described(api, path)
    restart()
    assert described(api, path) == before
    assert api.get(path).body == b"first,second,third"
    assert api.get(path, offset=middle).body == b"third"
    assert api.post(path, b",fourth").status == 204
    assert api.get(path, offset=middle).body == b"third,fourth"


def test_json_stream_keeps_its_records_as_sent(
    api: Api, path: str, restart: Callable[[], None]
) -> None:
    api.put(path, b'[{"a": 1.0, "a": 2}]', "application/json")
    api.post(path, b'[1e2, [ ], "\\u00e9"]', "application/json")
    restart()
    assert api.get(path).body == b'[{"a": 1.0, "a": 2},1e2,[ ],"\\u00e9"]'


def test_closed_stream_stays_closed(api: Api, path: str, restart: Callable[[], None]) -> None:
    api.put(path, b"data")
    api.post(path, b"last", headers={"Stream-Closed": "true"})
    before = described(api, path)
    restart()
    assert described(api, path) == before
    refused = api.post(path, b"more")
    assert (refused.status, refused.code) == (409, "stream_closed")
    assert refused["stream-closed"] == "true"
    read = api.get(path)
    assert (read.body, read["stream-closed"]) == (b"datalast", "true")


def test_stream_created_closed_with_content_is_whole(
    api: Api, path: str, restart: Callable[[], None]
) -> None:
    api.put(path, b"everything", headers={"Stream-Closed": "true"})
    restart()
    read = api.get(path)
    assert (read.body, read["stream-closed"]) == (b"everything", "true")


def test_closing_producer_is_still_recognised(
    api: Api, path: str, restart: Callable[[], None]
) -> None:
    api.put(path)
    closing = {**producer("p", 3, 0), "Stream-Closed": "true"}
    assert api.post(path, b"bye", headers=closing).status == 200
    restart()
    again = api.post(path, b"other bytes", headers=closing)
    assert (again.status, again["stream-closed"]) == (204, "true")
    other = api.post(path, b"x", headers={**producer("p", 3, 1), "Stream-Closed": "true"})
    assert (other.status, other.code) == (409, "stream_closed")


def test_deleted_stream_stays_deleted(api: Api, path: str, restart: Callable[[], None]) -> None:
    api.put(path, b"data")
    assert api.delete(path).status == 204
    restart()
    assert api.get(path).status == 404
    assert api.put(path, b"new").status == 201
    restart()
    assert api.get(path).body == b"new"


def test_forks_read_through_a_soft_deleted_source(
    api: Api, path: str, restart: Callable[[], None]
) -> None:
    source, fork, deep = f"{path}/source", f"{path}/fork", f"{path}/deep"
    api.put(source, b"abc")
    at = api.post(source, b"def").offset
    root = Api.target("")
    api.put(fork, content_type=None, headers={"Stream-Forked-From": root + source})
    api.post(fork, b"-fork")
    api.put(
        deep,
        content_type=None,
        headers={"Stream-Forked-From": root + fork, "Stream-Fork-Offset": at},
    )
    api.post(deep, b"-deep")
    api.post(source, b"ghi")
    assert api.delete(source).status == 204
    restart()
    assert api.get(source).status == 410
    assert api.put(source).status == 409
    assert api.get(fork).body == b"abcdef-fork"
    assert api.get(deep).body == b"abcdef-deep"
    assert api.delete(fork).status == 204
    restart()
    assert api.get(deep).body == b"abcdef-deep"
    assert api.delete(deep).status == 204
    restart()
    # The last fork is gone, so nothing holds the source any more, and its path is free again.
    assert api.put(source, b"fresh").status == 201
    assert api.get(source).body == b"fresh"


def test_fork_with_a_sub_offset_keeps_its_partial_record(
    api: Api, path: str, restart: Callable[[], None]
) -> None:
    source, fork = f"{path}/source", f"{path}/fork"
    start = api.put(source).offset
    api.post(source, b"hello")
    forked = {
        "Stream-Forked-From": Api.target(source),
        "Stream-Fork-Offset": start,
        "Stream-Fork-Sub-Offset": "3",
    }
    assert api.put(fork, b"XY", None, forked).status == 201
    restart()
    assert api.get(fork).body == b"helXY"
    assert api.put(fork, b"XY", None, forked).status == 200


def test_producers_continue_where_they_were(
    api: Api, path: str, restart: Callable[[], None]
) -> None:
    api.put(path)
    for seq in range(3):
        assert api.post(path, b"r%d," % seq, headers=producer("p", 1, seq)).status == 200
    restart()
    duplicate = api.post(path, b"r2,", headers=producer("p", 1, 2))
    assert (duplicate.status, duplicate["producer-seq"]) == (204, "2")
    assert api.post(path, b"r3,", headers=producer("p", 1, 3)).status == 200
    gap = api.post(path, b"r9,", headers=producer("p", 1, 9))
    assert (gap.status, gap.code) == (409, "producer_gap")
    assert (gap["producer-expected-seq"], gap["producer-received-seq"]) == ("4", "9")
    fenced = api.post(path, b"old", headers=producer("p", 0, 0))
    assert (fenced.status, fenced.code, fenced["producer-epoch"]) == (403, "producer_fenced", "1")
    assert api.get(path).body == b"r0,r1,r2,r3,"


def test_stream_seq_is_remembered(api: Api, path: str, restart: Callable[[], None]) -> None:
    api.put(path)
    assert api.post(path, b"a", headers={"Stream-Seq": "0005"}).status == 204
    restart()
    refused = api.post(path, b"b", headers={"Stream-Seq": "0005"})
    assert (refused.status, refused.code) == (409, "sequence_conflict")
    assert api.post(path, b"c", headers={"Stream-Seq": "0006"}).status == 204
    assert api.get(path).body == b"ac"


@pytest.mark.parametrize("lost", [{}, {"Stream-Seq": "0007"}], ids=["without", "with its own"])
def test_stream_seq_lasts_as_long_as_the_record_that_it_came_with(
    api: Api, path: str, restart: Callable[[], None], lost: dict[str, str]
) -> None:
    api.put(path)
    assert api.post(path, b"a", headers={"Stream-Seq": "0005"}).status == 204
    set_class(api, path, "ephemeral")
    assert api.post(path, b"b", headers=lost).status == 204
    restart()
    refused = api.post(path, b"c", headers={"Stream-Seq": "0005"})
    assert (refused.status, refused.code) == (409, "sequence_conflict")
    # What was lost may be sent again.
    assert api.post(path, b"d", headers={"Stream-Seq": "0007"}).status == 204
    again = api.post(path, b"e", headers={"Stream-Seq": "0006"})
    assert (again.status, again.code) == (409, "sequence_conflict")
    set_class(api, path, "fsync")
    restart()
    kept = api.post(path, b"f", headers={"Stream-Seq": "0007"})
    assert (kept.status, kept.code) == (409, "sequence_conflict")


def test_a_ttl_is_given_its_slack_once(
    server: Server, api: Api, path: str, restart: Callable[[], None]
) -> None:
    """Renewals are logged once a second here, so a second is added to what an earlier process knew: whether it is
    replayed or written to the catalog again, without an access in between, and however often."""
    accessed = time.monotonic()
    api.put(path, headers={"Stream-TTL": "4"})
    server.stop()
    server.restart()
    set_class(api, path, "disk")
    restart()
    time.sleep(max(0.0, accessed + 5.5 - time.monotonic()))
    assert api.head(path).status == 404


def test_ttl_and_expiry_are_kept(api: Api, path: str, restart: Callable[[], None]) -> None:
    sliding, fixed = f"{path}/sliding", f"{path}/fixed"
    api.put(sliding, headers={"Stream-TTL": "3600"})
    api.put(fixed, headers={"Stream-Expires-At": "2999-01-01T00:00:00Z"})
    before = described(api, sliding), described(api, fixed)
    restart()
    assert (described(api, sliding), described(api, fixed)) == before
    assert before[0]["stream-ttl"] == "3600"
    assert api.put(sliding, headers={"Stream-TTL": "3600"}).status == 200
    same_instant = {"Stream-Expires-At": "2999-01-01T01:00:00+01:00"}
    assert api.put(fixed, headers=same_instant).status == 200
    assert api.put(fixed, headers={"Stream-Expires-At": "2999-01-01T00:00:01Z"}).status == 409


def test_memory_class_survives_an_orderly_stop(server: Server, api: Api, path: str) -> None:
    created = api.put(path, b"kept", headers={"Stream-Durability": "memory"})
    assert created["stream-durability"] == "memory"
    server.stop()
    server.restart()
    read = api.get(path)
    assert (read.body, read["stream-durability"]) == (b"kept", "memory")
    assert read.get("stream-gap") is None


def test_memory_class_after_a_crash_says_what_may_be_missing(
    server: Server, api: Api, path: str
) -> None:
    created = api.put(path, headers={"Stream-Durability": "memory"})
    tail = api.post(path, b"maybe").offset
    server.crash_and_restart()
    head = api.head(path)
    assert (head.status, head["stream-durability"]) == (200, "memory")
    assert head["stream-incarnation"] == created["stream-incarnation"]
    # Old offsets never name other bytes: whatever is appended now stands in a newer epoch.
    newer = api.post(path, b"after").offset
    assert newer > tail
    read = api.get(path, offset=tail)
    if read.status == 200:
        assert read.body == b"after"
    else:
        assert (read.status, read.code) == (400, "offset_beyond_tail")
    assert b"after" in api.read_all(path)


def test_many_restarts_in_a_row_lose_nothing(server: Server, api: Api, path: str) -> None:
    api.put(path)
    expected = b""
    for turn in range(6):
        record = b"turn-%d;" % turn
        assert api.post(path, record).status == 204
        expected += record
        (server.kill if turn % 2 else server.stop)()
        server.restart()
        assert api.get(path).body == expected
