"""Stream names: percent-encoding, traversal, NUL, length, and the reserved space."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.http import Api
from support.server import Server

TEXT = {"Content-Type": "text/plain"}


@pytest.mark.parametrize(
    "name",
    ["a b".replace(" ", "%20"), "caf%C3%A9", "a%2Fb", "a;b=c", "a:b@c", "~tilde", "dots.in.name", "%E2%82%AC/x",
     "a%25b", "UPPER", "%7Bcurly%7D"],
)  # fmt: skip
def test_encoded_names_round_trip(shared: Api, path: str, name: str) -> None:
    target = Api.target(f"{path}/{name}")
    created = shared.call("PUT", target, TEXT, name.encode())
    assert created.status == 201
    assert created["location"].endswith(target)
    assert shared.call("GET", target).body == name.encode()
    assert shared.call("DELETE", target).status == 204


def test_encodings_of_one_name_are_one_stream(shared: Api, path: str) -> None:
    shared.call("PUT", Api.target(f"{path}/%41bc"), TEXT, b"x")
    assert shared.call("GET", Api.target(f"{path}/Abc")).body == b"x"
    assert shared.call("GET", Api.target(f"{path}/%41%62%63")).body == b"x"


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "a/../b",
        "..",
        ".",
        "a/./b",
        "%2e%2e/%2e%2e/x",
        "..%2f..%2fx",
        "a//b",
        "/a",
        "a/",
    ],
)
def test_traversal_never_leaves_the_root(
    shared: Api, shared_server: Server, path: str, name: str
) -> None:
    target = "/v1/stream/" + name
    answer = shared.call("PUT", target, TEXT, b"x")
    if answer.status == 201:
        assert shared.call("GET", target).body == b"x"
        assert shared.call("DELETE", target).status == 204
    else:
        assert (answer.status, answer.code) in ((400, "bad_request"), (404, "not_found"))
    outside = Path(shared_server.data_dir).parent
    assert {entry.name for entry in outside.iterdir() if entry.name.startswith("..")} == set()
    assert shared.call("GET", "/-/health").status == 200


@pytest.mark.parametrize(
    "name", ["a%00b", "a%zzb", "a%", "a%2", "%0d%0aX-Injected:%201", "a%7Fb", "%ff%fe"]
)
def test_names_that_are_no_text_are_refused(shared: Api, name: str) -> None:
    answer = shared.call("PUT", "/v1/stream/" + name, TEXT, b"x")
    assert (answer.status, answer.code) == (400, "bad_request")
    assert answer.get("x-injected") is None


def test_longest_name_and_one_more(shared: Api) -> None:
    longest = "n" * 1024
    assert shared.put(longest).status == 201
    answer = shared.put(longest + "n")
    assert answer.status in (400, 414)
    assert answer.code in ("bad_request", "uri_too_long")
    assert shared.delete(longest).status == 204


def test_very_long_targets_are_414(shared: Api) -> None:
    answer = shared.get("x" * 9000)
    assert (answer.status, answer.code) == (414, "uri_too_long")


def test_reserved_space_is_no_stream(shared: Api) -> None:
    for name in ("__ds", "__ds/anything", "__ds/subscriptions"):
        for method in ("PUT", "POST", "DELETE"):
            answer = shared.call(method, Api.target(name), TEXT, b"x")
            assert answer.status in (404, 405), (method, name, answer.status)
            assert "error" in answer.json()
    # Only the first segment is reserved.
    assert shared.put("t/__ds/mine").status == 201


def test_reserved_space_cannot_be_reached_by_encoding(shared: Api) -> None:
    for name in ("%5f%5fds/state", "%5F_ds/state", "__d%73/state"):
        answer = shared.call("PUT", "/v1/stream/" + name, TEXT, b"x")
        assert answer.status in (400, 403, 404, 405), name


def test_query_is_no_part_of_the_name(shared: Api, path: str) -> None:
    shared.call("PUT", Api.target(path) + "?whatever=1", TEXT, b"x")
    assert shared.get(path, unknown="y").body == b"x"
    assert shared.call("GET", Api.target(path) + "#fragment").status in (200, 400)


def test_absolute_form_targets_work(shared: Api, path: str) -> None:
    shared.put(path, b"x")
    answer = shared.call("GET", f"http://127.0.0.1:{shared.server.port}{Api.target(path)}")
    assert (answer.status, answer.body) == (200, b"x")
