"""ETags, conditional reads and what a cache may keep."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.classes import as_class
from support.http import Api
from support.server import Server


def test_etag_changes_with_every_append_and_on_close(shared: Api, path: str) -> None:
    shared.put(path, b"a")
    tags = [shared.get(path)["etag"]]
    shared.post(path, b"b")
    tags.append(shared.get(path)["etag"])
    shared.close_stream(path)
    tags.append(shared.get(path)["etag"])
    assert len(set(tags)) == 3
    assert all(tag.startswith('"') and tag.endswith('"') for tag in tags)


def test_etag_differs_by_start_and_by_incarnation(shared: Api, path: str) -> None:
    middle = shared.put(path, b"a").offset
    shared.post(path, b"b")
    whole, part = shared.get(path)["etag"], shared.get(path, offset=middle)["etag"]
    assert whole != part
    shared.delete(path)
    shared.put(path, b"a")
    shared.post(path, b"b")
    assert shared.get(path)["etag"] != whole


def test_delete_and_create_again_is_never_not_modified(shared: Api, path: str) -> None:
    shared.put(path, b"old")
    tag = shared.get(path)["etag"]
    shared.delete(path)
    shared.put(path, b"new")
    answer = shared.get(path, {"If-None-Match": tag})
    assert (answer.status, answer.body) == (200, b"new")


@pytest.mark.parametrize("ending", ["stop", "kill"])
@pytest.mark.parametrize("name", ["ephemeral", "memory"])
def test_bytes_that_took_the_place_of_lost_ones_are_never_not_modified(
    server: Server, api: Api, path: str, name: str, ending: str
) -> None:
    api.put(path, headers=as_class(name))
    api.post(path, b"old")
    tags = [api.get(path)["etag"], api.head(path)["etag"]]
    getattr(server, ending)()
    server.restart()
    if api.head(path).offset[17:] != f"{0:016}":
        # Nothing was lost: the same bytes have the same tag.
        assert api.get(path, {"If-None-Match": tags[0]}).status in (200, 304)
        return
    api.post(path, b"new")
    for tag in tags:
        answer = api.get(path, {"If-None-Match": tag}, offset="-1")
        assert (answer.status, answer.body) == (200, b"new")
    assert api.get(path, {"If-None-Match": api.get(path)["etag"]}).status == 304


@pytest.mark.parametrize(
    "shape", ["{tag}", "W/{tag}", '"x", {tag}', '{tag},"y"', '"x" ,  W/{tag} , "z"', "*"]
)
def test_if_none_match_in_every_shape(shared: Api, path: str, shape: str) -> None:
    shared.put(path, b"abc")
    fresh = shared.get(path)
    tag = fresh["etag"]
    answer = shared.get(path, {"If-None-Match": shape.format(tag=tag)})
    assert (answer.status, answer.body) == (304, b"")
    assert answer["etag"] == tag
    assert answer.offset == fresh.offset


@pytest.mark.parametrize("shape", ['"x"', 'W/"x", "y"', "x", '"', "", "{tag}x", 'W/"{bare'])
def test_other_tags_get_the_bytes(shared: Api, path: str, shape: str) -> None:
    shared.put(path, b"abc")
    tag = shared.get(path)["etag"]
    value = shape.replace("{tag}", tag.strip('"')).replace("{bare", tag.strip('"'))
    answer = shared.get(path, {"If-None-Match": value})
    assert (answer.status, answer.body) == (200, b"abc")


def test_not_modified_ends_when_the_stream_closes(shared: Api, path: str) -> None:
    shared.put(path, b"abc")
    tag = shared.get(path)["etag"]
    shared.close_stream(path)
    answer = shared.get(path, {"If-None-Match": tag})
    assert (answer.status, answer["stream-closed"]) == (200, "true")


def test_tails_are_never_kept_by_a_cache(shared: Api, path: str) -> None:
    tail = shared.put(path, b"abc").offset
    answers = [
        shared.get(path),
        shared.get(path, offset=tail),
        shared.get(path, offset="now"),
        shared.get(path, offset=tail, live="long-poll"),
        shared.head(path),
        shared.get(f"{path}/missing"),
    ]
    for answer in answers:
        policy = answer.get("cache-control") or ""
        assert "immutable" not in policy
        assert "max-age" not in policy or "max-age=0" in policy
        assert "no-store" in policy or "no-cache" in policy, (answer.status, policy)
    assert "no-store" in answers[2]["cache-control"]
    assert answers[2].get("etag") is None


def test_full_windows_below_the_tail_are_immutable(shared: Api, path: str) -> None:
    record = b"r" * (1 << 20)
    first = shared.put(path, record).offset
    for _ in range(9):
        shared.post(path, record)
    window = shared.get(path, offset=first)
    assert window.get("stream-up-to-date") is None
    assert "immutable" in window["cache-control"]
    assert "immutable" not in (shared.get(path, offset="-1").get("cache-control") or "")
    again = shared.get(path, {"If-None-Match": window["etag"]}, offset=first)
    assert again.status == 304


def test_what_was_up_to_date_is_not_confirmed_behind_the_tail(
    start_server: Callable[..., Server],
) -> None:
    """A cache would go on saying that there is nothing more."""
    api = Api(start_server(settings={"read_window_bytes": 4096}))
    api.put("s")
    api.post("s", b"x" * 4096)
    first = api.get("s")
    assert first.get("stream-up-to-date") == "true"
    api.post("s", b"more")
    again = api.get("s", {"If-None-Match": first["etag"]})
    assert (again.status, again.body, again.get("stream-up-to-date")) == (200, first.body, None)


def test_what_a_cache_may_keep_serves_pages_too(shared: Api, path: str) -> None:
    """A shared cache may fill itself by a plain request and answer a browser page from it later."""
    record = b"r" * (1 << 20)
    first = shared.put(path, record).offset
    for _ in range(9):
        shared.post(path, record)
    kept = shared.get(path, offset=first)
    assert "immutable" in kept["cache-control"]
    varies = "origin" in (kept.get("vary") or "").lower()
    assert varies or kept.get("access-control-allow-origin") == "*"


def test_preflight_and_exposed_headers(shared: Api, path: str) -> None:
    answer = shared.call(
        "OPTIONS",
        Api.target(path),
        {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"},
    )
    assert answer.status in (200, 204)
    assert answer["access-control-allow-origin"] == "*"
    allowed = answer["access-control-allow-headers"].lower()
    for name in ("content-type", "if-none-match", "if-match", "stream-seq", "producer-id",
                 "stream-closed", "stream-forked-from", "stream-durability"):  # fmt: skip
        assert name in allowed
    shared.put(path, b"x")
    exposed = shared.get(path, {"Origin": "https://page.example"})["access-control-expose-headers"]
    for name in ("stream-next-offset", "stream-cursor", "stream-up-to-date", "stream-closed",
                 "stream-ttl", "stream-expires-at", "stream-sse-data-encoding", "etag", "location",
                 "producer-epoch", "producer-seq", "producer-expected-seq", "producer-received-seq",
                 "retry-after", "stream-incarnation", "stream-durability", "stream-gap"):  # fmt: skip
        assert name in exposed.lower(), name
