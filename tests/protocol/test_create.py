"""Creating streams: what counts as the same configuration, lifetimes at the edges, and Location."""

from __future__ import annotations

import time

import pytest

from support.http import Api

CLOSED = {"Stream-Closed": "true"}


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [({}, {}, 200), ({}, CLOSED, 409), (CLOSED, {}, 409), (CLOSED, CLOSED, 200)],
)
def test_closed_is_part_of_the_configuration(
    shared: Api, path: str, first: dict[str, str], second: dict[str, str], status: int
) -> None:
    created = shared.put(path, b"x", headers=first)
    assert created.status == 201
    again = shared.put(path, b"x", headers=second)
    assert again.status == status
    if status == 409:
        assert again.code == "stream_conflict"
    else:
        assert again.get("stream-closed") == created.get("stream-closed")
        assert again.get("location") is None
        assert again.offset == created.offset


def test_stream_closed_later_is_not_the_one_that_put_asks_for(shared: Api, path: str) -> None:
    shared.put(path)
    shared.close_stream(path)
    assert shared.put(path).status == 409
    assert shared.put(path, headers=CLOSED).status == 200


def test_body_of_a_repeated_put_is_ignored(shared: Api, path: str) -> None:
    shared.put(path, b"first")
    assert shared.put(path, b"second").status == 200
    assert shared.get(path).body == b"first"


def test_durability_is_part_of_the_configuration(shared: Api, path: str) -> None:
    assert shared.put(path)["stream-durability"] == "fsync"
    assert shared.put(path, headers={"Stream-Durability": "fsync"}).status == 200
    refused = shared.put(path, headers={"Stream-Durability": "memory"})
    assert (refused.status, refused.code) == (409, "stream_conflict")


@pytest.mark.parametrize(
    ("value", "status", "code"),
    [
        ("forever", 400, "durability_unknown"),
        ("FSYNC ", 201, ""),
        ("quorum", 501, "durability_unavailable"),
        ("object", 501, "durability_unavailable"),
    ],
)
def test_classes_that_cannot_be_had_are_refused(
    shared: Api, path: str, value: str, status: int, code: str
) -> None:
    answer = shared.put(path, headers={"Stream-Durability": value})
    if code:
        assert (answer.status, answer.code) == (status, code)
        assert shared.head(path).status == 404
    else:
        assert answer.status in (201, 400)


def test_expiry_is_compared_as_an_instant(shared: Api, path: str) -> None:
    shared.put(path, headers={"Stream-Expires-At": "2990-06-01T12:00:00Z"})
    for same in ("2990-06-01T12:00:00.000Z", "2990-06-01T14:00:00+02:00", "2990-06-01t12:00:00z"):
        assert shared.put(path, headers={"Stream-Expires-At": same}).status == 200, same
    other = shared.put(path, headers={"Stream-Expires-At": "2990-06-01T12:00:00.001Z"})
    assert other.status == 409


@pytest.mark.parametrize(
    "headers",
    [{"Stream-TTL": "0"}, {"Stream-Expires-At": "2001-01-01T00:00:00Z"}],
    ids=["ttl-0", "past"],
)
def test_stream_that_is_over_at_birth(shared: Api, path: str, headers: dict[str, str]) -> None:
    created = shared.put(path, b"x", headers=headers)
    assert created.status == 201
    assert shared.get(path).status == 404
    assert shared.head(path).status == 404
    assert shared.put(path, content_type="application/json").status == 201


@pytest.mark.parametrize(
    "value",
    [
        "18446744073709551615",
        "18446744073709551616",
        "9223372036854775807",
        "99999999999999999999999999999999",
    ],
)
def test_absurd_ttl_is_refused_or_works_but_never_breaks(
    shared: Api, path: str, value: str
) -> None:
    answer = shared.put(path, b"x", headers={"Stream-TTL": value})
    if answer.status == 400:
        assert answer.code == "bad_request"
        assert shared.head(path).status == 404
    else:
        assert answer.status == 201
        assert shared.get(path).body == b"x"
        assert shared.delete(path).status == 204


@pytest.mark.parametrize(
    "value",
    [
        "2999-02-30T00:00:00Z",
        "2999-13-01T00:00:00Z",
        "2999-01-01",
        "2999-01-01T00:00:00",
        "99999-01-01T00:00:00Z",
        "2999-01-01T25:00:00Z",
        "tomorrow",
        "",
    ],
)
def test_expiry_that_is_no_instant_is_refused(shared: Api, path: str, value: str) -> None:
    answer = shared.put(path, headers={"Stream-Expires-At": value})
    assert (answer.status, answer.code) == (400, "bad_request")


def test_head_does_not_renew_a_sliding_lifetime_and_reading_does(shared: Api, path: str) -> None:
    looked_at, read = f"{path}/looked-at", f"{path}/read"
    for name in (looked_at, read):
        shared.put(name, b"x", headers={"Stream-TTL": "2"})
    until = time.monotonic() + 3.2
    while time.monotonic() < until:
        shared.head(looked_at)
        assert shared.get(read, offset="now").status == 200
        time.sleep(0.2)
    assert shared.head(looked_at).status == 404
    assert shared.head(read).status == 200


def test_location_names_the_host_and_scheme_the_client_used(shared: Api, path: str) -> None:
    target = Api.target(path)
    headers = {"Content-Type": "text/plain", "Host": "streams.example:8443"}
    created = shared.call("PUT", target, headers, b"")
    assert created["location"] == f"http://streams.example:8443{target}"
    headers["X-Forwarded-Proto"] = "https"
    secure = shared.call("PUT", f"{target}-2", headers, b"")
    assert secure["location"] == f"https://streams.example:8443{target}-2"


def test_location_is_never_made_of_junk(shared: Api, path: str) -> None:
    headers = {"Content-Type": "text/plain", "X-Forwarded-Proto": "javascript"}
    created = shared.call("PUT", Api.target(path), headers, b"")
    assert created["location"].startswith(("http://", "https://"))


def test_content_type_is_given_back_as_it_was_sent(shared: Api, path: str) -> None:
    shared.put(path, content_type='text/plain; Charset="UTF-8"')
    assert shared.head(path)["content-type"] == 'text/plain; Charset="UTF-8"'
    assert shared.post(path, b"x", "TEXT/PLAIN").status == 204


def test_put_without_a_type_is_octets(shared: Api, path: str) -> None:
    assert shared.put(path, content_type=None)["content-type"] == "application/octet-stream"
