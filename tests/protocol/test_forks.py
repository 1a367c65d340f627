"""Forks beyond the official suite: repeated PUTs, limits of sub-offsets, and where forks may begin."""

from __future__ import annotations

import pytest

from support.http import Api


def fork_of(
    source: str, offset: str | None = None, sub_offset: str | None = None
) -> dict[str, str]:
    headers = {"Stream-Forked-From": Api.target(source)}
    if offset is not None:
        headers["Stream-Fork-Offset"] = offset
    if sub_offset is not None:
        headers["Stream-Fork-Sub-Offset"] = sub_offset
    return headers


@pytest.mark.parametrize(
    "source_headers",
    [{}, {"Stream-TTL": "3600"}, {"Stream-Expires-At": "2999-01-01T00:00:00Z"}],
    ids=["plain", "ttl", "expiry"],
)
def test_repeated_put_of_a_fork_that_inherited_everything(
    shared: Api, path: str, source_headers: dict[str, str]
) -> None:
    source, fork = f"{path}/source", f"{path}/fork"
    shared.put(source, b"abc", headers=source_headers)
    assert shared.put(fork, b"", None, fork_of(source)).status == 201
    assert shared.put(fork, b"", None, fork_of(source)).status == 200
    shared.post(source, b"later")
    assert shared.put(fork, b"", None, fork_of(source)).status == 200
    for name in source_headers:
        assert shared.head(fork)[name.lower()] == shared.head(source)[name.lower()]
    assert shared.put(fork, b"", None, {**fork_of(source), "Stream-TTL": "7"}).status == 409
    assert shared.put(fork, b"", "text/plain").status == 409


def test_fork_has_an_identity_of_its_own(shared: Api, path: str) -> None:
    source, fork = f"{path}/source", f"{path}/fork"
    created = shared.put(source, b"abc")
    forked = shared.put(fork, b"", None, fork_of(source))
    assert forked["stream-incarnation"] != created["stream-incarnation"]
    assert forked.offset == created.offset


@pytest.mark.parametrize("offset", ["junk", "-1x", "", "9999999999999999_9999999999999999"])
def test_fork_offset_that_the_source_never_gave_out(shared: Api, path: str, offset: str) -> None:
    source = f"{path}/source"
    shared.put(source, b"abc")
    answer = shared.put(f"{path}/fork", b"", None, fork_of(source, offset))
    assert (answer.status, answer.code) == (400, "fork_offset_invalid")


def test_fork_inside_an_append_is_refused(shared: Api, path: str) -> None:
    source = f"{path}/source"
    tail = shared.put(source, b"abcdef").offset
    epoch, _, position = tail.partition("_")
    inside = f"{epoch}_{int(position) - 2:016d}"
    answer = shared.put(f"{path}/fork", b"", None, fork_of(source, inside))
    assert (answer.status, answer.code) == (400, "fork_offset_invalid")


def test_missing_and_deleted_sources(shared: Api, path: str) -> None:
    source = f"{path}/source"
    answer = shared.put(f"{path}/fork", b"", None, fork_of(source))
    assert (answer.status, answer.code) == (404, "fork_source_missing")
    shared.put(source)
    shared.put(f"{path}/holder", b"", None, fork_of(source))
    shared.delete(source)
    answer = shared.put(f"{path}/fork", b"", None, fork_of(source))
    assert (answer.status, answer.code) == (409, "fork_source_gone")


def test_fork_of_itself_is_refused(shared: Api, path: str) -> None:
    answer = shared.put(path, b"", None, fork_of(path))
    assert (answer.status, answer.code) == (404, "fork_source_missing")
    shared.put(path)
    assert shared.put(path, b"", None, fork_of(path)).status == 409


def test_forks_do_not_share_producers_or_sequence(shared: Api, path: str) -> None:
    source, fork = f"{path}/source", f"{path}/fork"
    shared.put(source)
    headers = {"Producer-Id": "p", "Producer-Epoch": "0", "Producer-Seq": "0", "Stream-Seq": "m"}
    assert shared.post(source, b"x", headers=headers).status == 200
    shared.put(fork, b"", None, fork_of(source))
    assert shared.post(fork, b"y", headers=headers).status == 200
    assert shared.get(fork).body == b"xy"


def test_appends_to_a_source_never_appear_in_its_fork(shared: Api, path: str) -> None:
    source, fork = f"{path}/source", f"{path}/fork"
    middle = shared.put(source, b"1,").offset
    shared.post(source, b"2,")
    shared.put(fork, b"", None, fork_of(source, middle))
    shared.post(source, b"3,")
    shared.post(fork, b"f,")
    shared.close_stream(source)
    assert shared.get(fork).body == b"1,f,"
    assert shared.get(fork, offset=middle).body == b"f,"
    assert shared.post(fork, b"g,").status == 204
    assert shared.get(source).body == b"1,2,3,"
