"""POST /v1/commit: all streams or none, once, in order, through crashes, and readable like any append."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.http import Api, producer
from support.server import Server
from support.sse import EventStream
from support.staging import JSON, Staging, read_json, rows_body, values_body

CLASSES = ["ephemeral", "memory", "disk", "fsync"]
SMALL, LARGE = 20, 3_000
"""Rows: a commit that goes into the log, and one whose files are adopted."""


@pytest.fixture
def staging(api: Api) -> Staging:
    return Staging(api)


@pytest.fixture
def shared_staging(shared: Api) -> Staging:
    return Staging(shared)


def packs(server: Server) -> list[Path]:
    return sorted((server.data_dir / "packs").glob("*.pack"))


def row(number: int) -> bytes:
    return b"<%06d>" % number + b"r" * 192


def json_row(number: int) -> bytes:
    return json.dumps({"n": number, "pad": "ü" * 90}, ensure_ascii=False).encode()


@pytest.mark.parametrize("count", [SMALL, LARGE])
@pytest.mark.parametrize("name", CLASSES)
def test_every_class_takes_commits_of_every_size(staging: Staging, name: str, count: int) -> None:
    api = staging.api
    api.put("bytes", b"", "application/octet-stream", {"Stream-Durability": name})
    api.put("json", b"", JSON, {"Stream-Durability": name})
    api.post("bytes", b"before", "application/octet-stream")
    rows = [("bytes" if n % 2 else "json", row(n) if n % 2 else json_row(n)) for n in range(count)]
    stages = [staging.stage("one", rows_body(rows[: count // 3], batch_rows=7))]
    stages.append(staging.stage("two", rows_body(rows[count // 3 :])))
    told = staging.commit("p", 1, stages)
    streams = {entry["name"]: entry for entry in told["streams"]}
    assert {entry["rows"] for entry in told["streams"]} == {count // 2}
    assert streams["bytes"]["incarnation"] == api.head("bytes")["stream-incarnation"]
    assert streams["bytes"]["to"] == api.head("bytes").offset
    api.post("bytes", b"behind", "application/octet-stream")
    api.post("json", b'["behind", "too"]', JSON)
    wanted = [value for stream, value in rows if stream == "bytes"]
    assert api.read_all("bytes") == b"before" + b"".join(wanted) + b"behind"
    assert api.read_all("bytes", streams["bytes"]["from"]) == b"".join(wanted) + b"behind"
    assert api.get("json", offset=streams["json"]["to"]).json() == ["behind", "too"]
    messages = read_json(api, "json")
    assert messages == [json.loads(value) for stream, value in rows if stream == "json"] + [
        "behind",
        "too",
    ]
    assert api.metric("millstream_committed_rows_total") == count
    assert api.metric("millstream_commits_total") == 1


def test_a_json_array_is_one_record(staging: Staging) -> None:
    staging.api.put("json", b"", JSON)
    values = [b"[1,2]", b" [] ", '{"ä": "\\u00e4 😀"}'.encode(), b"null", b'  "x" \n', b"-0.5e3"]
    told = staging.commit("p", 1, [staging.stage("one", values_body(values), stream="json")])
    assert told["streams"][0]["rows"] == len(values)
    answer = staging.api.get("json", offset="-1")
    assert answer.json() == [[1, 2], [], {"ä": "ä 😀"}, None, "x", -500.0]
    assert answer.body == b"[[1,2],[]," + values[2] + b',null,"x",-0.5e3]'
    tail = staging.api.get("json", tail=4)
    assert tail.json() == [{"ä": "ä 😀"}, None, "x", -500.0]


def test_the_order_of_stages_is_the_order_of_records(staging: Staging) -> None:
    for path in ("a", "b"):
        staging.api.put(path)
    staged = {
        name: staging.stage(
            name, rows_body([("a", f"{name}1,".encode()), ("b", f"{name},".encode())])
        )
        for name in ("x", "y", "z")
    }
    staging.commit("p", 1, [staged["z"], staged["x"]])
    staging.commit("p", 2, [staged["y"]])
    assert staging.api.read_all("a") == b"z1,x1,y1,"
    assert staging.api.read_all("b") == b"z,x,y,"


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_a_commit_is_applied_once(staging: Staging, server: Server, count: int) -> None:
    api = staging.api
    for path in ("a", "b", "weak"):
        api.put(
            path, b"", "text/plain", {"Stream-Durability": "memory" if path == "weak" else "fsync"}
        )
    rows = [(path, row(n)) for n in range(count) for path in ("a", "weak")]
    described = staging.stage("one", rows_body(rows))
    assert staging.commit("query-1", 7, [described])["duplicate"] is False
    for _ in range(2):
        assert staging.commit("query-1", 7, [described]) == {"duplicate": True, "streams": []}
        removed = staging.delete("one")
        assert (removed.status, removed.code) == (409, "stage_committed")
        taken = staging.put("one", rows_body(rows))
        assert (taken.status, taken.code) == (409, "stage_committed")
    used = staging.post("query-2", 7, [described])
    assert (used.status, used.code) == (404, "stage_gone")
    fresh = staging.stage("two", rows_body([("b", b"x"), ("a", b"y")]))
    fenced = staging.post("query-1", 6, [fresh])
    assert (fenced.status, fenced.code) == (403, "producer_fenced")
    assert fenced["producer-epoch"] == "7"
    for crash in (True, False):
        server.crash_and_restart() if crash else server.restart()
        for streams in (["a"], ["weak", "b"], ["a", "gone", "weak"]):
            told = staging.commit("query-1", 7, [described], streams=streams)
            assert told == {"duplicate": True, "streams": []}
        missing = staging.post("query-1", 8, [described], streams=["a"])
        assert (missing.status, missing.code) == (404, "stage_gone")
    assert staging.commit("query-1", 8, [fresh])["duplicate"] is False
    wanted = b"".join(row(n) for n in range(count))
    assert api.read_all("a") == wanted + b"y"
    assert api.read_all("b") == b"x"


def test_producers_of_commits_and_of_appends_do_not_meet(staging: Staging) -> None:
    staging.api.put("s")
    assert staging.api.post("s", b"1", headers=producer("same", 5, 0)).status == 200
    described = staging.stage("one", values_body([b"2"]), stream="s")
    assert not staging.commit("same", 1, [described])["duplicate"]
    assert staging.api.post("s", b"3", headers=producer("same", 5, 1)).status == 200
    assert staging.commit("same", 1, [described])["duplicate"]
    assert staging.api.read_all("s") == b"123"


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_all_streams_or_none(staging: Staging, count: int) -> None:
    api = staging.api
    for path in ("a", "closed", "gone", "new"):
        api.put(path)
    api.put("json", b"", JSON)
    rows = [("a", row(n)) for n in range(count)]
    staged = {
        path: staging.stage(f"for-{path}", rows_body([*rows, (path, b"x")]))
        for path in ("closed", "gone", "new")
    }
    api.close_stream("closed")
    api.delete("gone")
    api.delete("new")
    api.put("new")
    for path, status, code in (
        ("closed", 409, "stream_closed"),
        ("gone", 404, "stream_not_found"),
        ("new", 409, "stream_recreated"),
    ):
        refused = staging.post("p", 1, [staged[path]])
        assert (refused.status, refused.code) == (status, code)
        assert path in refused.json()["detail"]
    mismatch = staging.post("p", 1, [{"id": "for-gone", "checksum": "00000000"}])
    assert (mismatch.status, mismatch.code) == (409, "stage_mismatch")
    good = staging.stage("good", rows_body(rows))
    partly = staging.post("p", 1, [good, {"id": "never", "checksum": "00000000"}])
    assert (partly.status, partly.code) == (404, "stage_gone")
    assert api.read_all("a") == b""
    assert api.read_all("new") == b""
    assert staging.commit("p", 1, [good])["streams"][0]["rows"] == count
    assert api.read_all("a") == b"".join(value for _, value in rows)


BAD_COMMITS: list[Any] = [
    b"",
    b"[]",
    {"producer": "p", "epoch": 1},
    {"producer": "p", "epoch": -1, "stages": []},
    {"producer": "p", "epoch": 1, "stages": []},
    {"producer": "p", "epoch": 1, "stages": [{"id": "a", "checksum": "xyz"}]},
    {"producer": "p", "epoch": 1, "stages": [{"id": "a"}]},
    {"producer": "p", "epoch": 1, "stages": [{"id": "a", "checksum": "0" * 8}] * 2},
    {"producer": "p", "epoch": 1, "stages": [], "surprise": 1},
]


@pytest.mark.parametrize("document", BAD_COMMITS, ids=range(len(BAD_COMMITS)))
def test_a_commit_that_is_none(shared_staging: Staging, document: Any) -> None:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    answer = shared_staging.api.call("POST", "/v1/commit", {"Content-Type": JSON}, body)
    assert (answer.status, answer.code) == (400, "bad_request")


@pytest.mark.parametrize("name", ["", "x" * 201])
def test_a_producer_has_a_name(shared_staging: Staging, name: str) -> None:
    answer = shared_staging.post(name, 1, [{"id": "a", "checksum": "0" * 8}])
    assert (answer.status, answer.code) == (400, "producer_invalid")


def test_many_streams_at_once(staging: Staging, server: Server) -> None:
    api = staging.api
    names = [f"many/{number}" for number in range(300)]
    with api.connect() as connection:
        for name in names:
            answer = connection.request("PUT", api.target(name), {"Content-Type": JSON}, b"")
            assert answer.status == 201
    order = [(name, n) for n in range(40) for name in names]
    random.Random(7).shuffle(order)
    stages = []
    for part in range(4):
        rows = [(name, json_row(n)) for name, n in order[part::4]]
        stages.append(staging.stage(f"part-{part}", rows_body(rows)))
    told = staging.commit("p", 1, stages)
    assert sum(entry["rows"] for entry in told["streams"]) == len(order)
    placed = [entry for part in range(4) for entry in order[part::4]]
    wanted = {name: [n for other, n in placed if other == name] for name in names}
    for _ in range(2):
        for name in names[::17]:
            assert [message["n"] for message in read_json(api, name)] == wanted[name]
        server.crash_and_restart()


def test_a_hundred_megabytes_are_read_back_byte_exact(
    start_server: Callable[..., Server],
) -> None:
    server = start_server(settings={"long_poll_timeout_ms": 2000})
    api = Api(server, deadline_s=60.0)
    staging = Staging(api)
    api.put("big", b"", "application/octet-stream")
    api.put("json", b"", JSON)
    noise = random.Random(3)
    block = noise.randbytes(1 << 20)
    pieces, stages, messages = [], [], 0
    for part in range(4):
        values = [block[n % 777 : n % 777 + 20_000] for n in range(part, 1250 + part)]
        pieces += values
        rows = [("big", value) for value in values]
        rows += [("json", json_row(messages + n)) for n in range(5_000)]
        messages += 5_000
        stages.append(staging.stage(f"part-{part}", rows_body(rows)))
    resident = server.rss_bytes()
    staging.commit("p", 1, stages)
    assert server.rss_bytes() - resident < 30 << 20, "adopted bytes do not go through memory"
    whole = b"".join(pieces)
    assert len(whole) == 100_000_000
    assert api.read_all("big") == whole
    assert [message["n"] for message in read_json(api, "json")] == list(range(messages))
    # Events of the first megabytes only: taking base64 apart is slow here, not there.
    with EventStream.open(api, "big") as events:
        received = b""
        while len(received) < 8_000_000:
            event = events.next()
            received += event.decoded() if event.kind == "data" else b""
        assert received == whole[: len(received)]
    api.post("big", b"behind", "application/octet-stream")
    server.crash_and_restart()
    assert api.read_all("big") == whole + b"behind"
    # A restart makes a checkpoint of a clean stop: what was adopted is in the catalog then.
    server.restart()
    assert api.read_all("big") == whole + b"behind"
    assert api.delete("big").status == 204
    assert api.delete("json").status == 204
    server.restart()
    api.wait_for_metric("millstream_stages_waiting", 0)
    left = sum(file.stat().st_size for file in packs(server))
    assert left < 1 << 20, packs(server)


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_live_readers_get_a_commit(staging: Staging, count: int) -> None:
    api = staging.api
    api.put("live", b"first", "application/octet-stream")
    with EventStream.open(api, "live") as events:
        events.until_up_to_date()
        waiting: list[bytes] = []
        offset = api.head("live").offset

        def poll() -> None:
            waiting.append(api.get("live", offset=offset, live="long-poll").body)

        poller = threading.Thread(target=poll)
        poller.start()
        api.wait_for_metric("millstream_long_polls", 1)
        values = [row(n) for n in range(count)]
        staging.commit("p", 1, [staging.stage("one", values_body(values), stream="live")])
        poller.join(10)
        received = b""
        while len(received) < 200 * count:
            event = events.next()
            if event.kind == "data":
                received += event.decoded()
    assert received == b"".join(values)
    assert waiting
    assert waiting[0]
    assert b"".join(values).startswith(waiting[0])


@pytest.mark.parametrize("count", [SMALL, LARGE])
def test_a_kill_right_after_the_answer_loses_nothing(
    start_server: Callable[..., Server], count: int
) -> None:
    server = start_server(settings={"long_poll_timeout_ms": 2000, "checkpoint_bytes": "256KiB"})
    staging = Staging(Api(server))
    for path, name in (("a", "fsync"), ("b", "memory"), ("c", "disk")):
        staging.api.put(path, b"", "text/plain", {"Stream-Durability": name})
    wanted: dict[str, bytes] = {"a": b"", "b": b"", "c": b""}
    for batch in range(4):
        values = [b"%d-" % batch + row(n) for n in range(count)]
        rows = [(path, value) for value in values for path in wanted]
        described = staging.stage(f"batch-{batch}", rows_body(rows))
        if batch % 2:
            server.crash_and_restart()
        staging.commit("p", batch, [described])
        server.crash_and_restart()
        for path in wanted:
            wanted[path] += b"".join(values)
            assert staging.api.read_all(path) == wanted[path], (batch, path)
        assert staging.commit("p", batch, [described], streams=["b"])["duplicate"]


def test_a_fork_keeps_adopted_bytes(staging: Staging, server: Server) -> None:
    api = staging.api
    api.put("source", b"head,", "text/plain")
    values = [row(n) for n in range(LARGE)]
    told = staging.commit("p", 1, [staging.stage("one", values_body(values), stream="source")])
    cut = told["streams"][0]["to"]
    api.post("source", b"tail")
    forked = api.put(
        "fork", b"", None, {"Stream-Forked-From": "/v1/stream/source", "Stream-Fork-Offset": cut}
    )
    assert forked.status == 201, forked.body
    api.post("fork", b"own")
    whole = b"head," + b"".join(values)
    assert api.read_all("fork") == whole + b"own"
    assert api.delete("source").status == 204
    server.crash_and_restart()
    assert api.read_all("fork") == whole + b"own"
    more = staging.stage("two", values_body(values), stream="fork")
    staging.commit("p", 2, [more])
    server.restart()
    assert api.read_all("fork") == whole + b"own" + b"".join(values)


def test_concurrent_repetitions_are_one(staging: Staging) -> None:
    for path in ("a", "b"):
        staging.api.put(path)
    rows = [(path, row(n)) for n in range(LARGE) for path in ("a", "b")]
    described = staging.stage("one", rows_body(rows))
    answers: list[dict[str, Any]] = []
    threads = [
        threading.Thread(target=lambda: answers.append(staging.commit("p", 1, [described])))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(answer["duplicate"] for answer in answers) == [False] + [True] * 7
    assert staging.api.read_all("a") == b"".join(row(n) for n in range(LARGE))


def test_a_window_of_many_small_stages_is_read_without_going_round(staging: Staging) -> None:
    """Each stage is a file. All that a reactor's look needs must be open together, and some can be at all."""
    api = staging.api
    names, stages = ["a", "b", "c", "d", "e", "f"], 300
    for name in names:
        assert api.put(name, b"", "text/plain").status == 201
    value = b"%04d" + b"v" * 176
    described = [
        staging.stage(f"s{number}", rows_body([(name, value % number) for name in names]))
        for number in range(stages)
    ]
    staging.commit("p", 1, described)
    wanted = b"".join(value % number for number in range(stages))
    fork = {"Stream-Forked-From": "/v1/stream/a"}
    assert api.put("fork", b"", None, fork).status == 201
    before = api.metric("millstream_cold_loads_total")
    for name in ("a", "fork", "b"):
        assert api.read_all(name) == wanted
    assert api.metric("millstream_cold_loads_total") - before <= 4 * stages
