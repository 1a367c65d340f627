"""`GET /-/api/streams`: by prefix, in pages, in order."""

from __future__ import annotations

from typing import Any

import pytest

from support.http import Api


def listed(api: Api, **query: str | int) -> dict[str, Any]:
    text = "&".join(f"{name}={value}" for name, value in query.items())
    answer = api.call("GET", f"/-/api/streams?{text}")
    assert answer.status == 200, (answer.status, answer.body)
    page = answer.json()
    assert isinstance(page, dict)
    return page


def paths(page: dict[str, Any]) -> list[str]:
    return [entry["path"] for entry in page["streams"]]


@pytest.fixture
def family(shared: Api, path: str) -> str:
    for name in ("b", "a", "c/1", "c/2", "d"):
        shared.put(f"{path}/{name}", b"xy")
    return path


def test_prefix_and_order(shared: Api, family: str) -> None:
    assert paths(listed(shared, prefix=f"{family}/")) == [
        f"{family}/{name}" for name in ("a", "b", "c/1", "c/2", "d")
    ]
    assert paths(listed(shared, prefix=f"{family}/c/")) == [f"{family}/c/1", f"{family}/c/2"]
    assert paths(listed(shared, prefix=f"{family}/nothing")) == []


def test_pages_join_to_the_whole(shared: Api, family: str) -> None:
    whole = paths(listed(shared, prefix=f"{family}/"))
    seen: list[str] = []
    after = ""
    for _ in range(10):
        page = paths(listed(shared, prefix=f"{family}/", after=after, limit=2))
        if not page:
            break
        assert len(page) <= 2
        seen += page
        after = page[-1]
    assert seen == whole


def test_entries_say_what_head_says(shared: Api, family: str) -> None:
    name = f"{family}/a"
    shared.post(name, b"more", headers={"Stream-Closed": "true"})
    head = shared.head(name)
    entry = listed(shared, prefix=name)["streams"][0]
    assert entry["path"] == name
    assert entry["content_type"] == head["content-type"]
    assert entry["tail"] == head.offset
    assert entry["closed"] is True
    assert entry["durability"] == "fsync"
    assert str(entry["incarnation"]) == head["stream-incarnation"]
    assert (entry["records"], entry["bytes"]) == (2, 6)


def test_deleted_streams_leave_the_list(shared: Api, family: str) -> None:
    shared.delete(f"{family}/b")
    assert f"{family}/b" not in paths(listed(shared, prefix=f"{family}/"))


def test_reserved_streams_are_not_listed(shared: Api) -> None:
    assert not any(name.startswith("__ds") for name in paths(listed(shared)))


@pytest.mark.parametrize("limit", ["0", "-1", "x", "1000000000"])
def test_limits_that_make_no_sense_are_refused(shared: Api, limit: str) -> None:
    answer = shared.call("GET", f"/-/api/streams?limit={limit}")
    assert (answer.status, answer.code) == (400, "bad_request")


def test_listing_survives_a_restart(api: Api, path: str) -> None:
    for number in range(30):
        api.put(f"{path}/{number:03}")
    before = paths(listed(api, prefix=f"{path}/"))
    api.server.kill()  # type: ignore[attr-defined]
    api.server.restart()  # type: ignore[attr-defined]
    assert paths(listed(api, prefix=f"{path}/")) == before
    assert len(before) == 30
