"""PUT and DELETE /v1/stage: what is taken, what is refused and why, and what a restart keeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from support.http import Api
from support.server import Server
from support.staging import JSON, Staging, arrow_body, rows_body, values_body

MIB = 1 << 20


@pytest.fixture
def staging(api: Api) -> Staging:
    return Staging(api)


@pytest.fixture
def shared_staging(shared: Api) -> Staging:
    return Staging(shared)


@pytest.fixture
def stage_id(path: str) -> str:
    """A name of a stage that no other test uses."""
    return path.replace("/", "-")


def packs(server: Server) -> list[Path]:
    return sorted((server.data_dir / "packs").glob("*.pack"))


def test_a_stage_is_described_and_told_again(staging: Staging, server: Server) -> None:
    for path, kind in (("a", "text/plain"), ("b/ü", JSON)):
        assert staging.api.put(path.replace("ü", "%C3%BC"), b"", kind).status == 201
    body = rows_body([("a", b"one"), ("b/ü", b'{"x": [1]}'), ("a", b"three")])
    before_ms = time.time() * 1000
    first = staging.put("task-0.attempt_1", body)
    assert first.status == 201
    assert first["content-type"] == JSON
    described = first.json()
    assert described["id"] == "task-0.attempt_1"
    assert (described["rows"], described["bytes"]) == (3, 8 + 11)
    assert before_ms + 3_500_000 < described["expires_ms"] < before_ms + 3_700_000
    streams = {entry["name"]: entry for entry in described["streams"]}
    assert (streams["a"]["rows"], streams["a"]["bytes"]) == (2, 8)
    assert (streams["b/ü"]["rows"], streams["b/ü"]["bytes"]) == (1, 11)
    assert streams["a"]["incarnation"] == staging.api.head("a")["stream-incarnation"]
    again = staging.put("task-0.attempt_1", body)
    assert again.status == 200
    assert again.json() == described
    other = staging.put("task-0.attempt_1", rows_body([("a", b"two")]))
    assert (other.status, other.code) == (409, "stage_exists")
    assert staging.api.metric("millstream_stages_waiting") == 1
    assert staging.api.read_all("a") == b""
    assert staging.delete("task-0.attempt_1").status == 204
    gone = staging.delete("task-0.attempt_1")
    assert (gone.status, gone.code) == (404, "stage_gone")
    assert packs(server) == []


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.utf8(), pa.large_utf8()])
@pytest.mark.parametrize("names", [pa.utf8(), pa.large_utf8()])
def test_every_form_of_the_columns(
    shared_staging: Staging, path: str, stage_id: str, kind: pa.DataType, names: pa.DataType
) -> None:
    staging = shared_staging
    staging.api.put(path)
    values = ["x", "grün", "line\nline"]
    raw: list[Any] = values if "string" in str(kind) else [value.encode() for value in values]
    columns = {"value": pa.array(raw, kind), "stream": pa.array([path] * 3, names)}
    described = staging.stage(stage_id, arrow_body(columns, batch_rows=2))
    assert described["rows"] == 3
    assert not staging.commit(path, 0, [described])["duplicate"]
    assert staging.api.read_all(path).decode() == "".join(values)


def test_a_stage_may_be_empty(staging: Staging) -> None:
    staging.api.put("s")
    described = staging.stage("none", values_body([]), stream="s")
    assert (described["rows"], described["bytes"], described["streams"]) == (0, 0, [])
    told = staging.commit("p", 0, [described])
    assert told == {"duplicate": False, "streams": []}
    assert staging.api.read_all("s") == b""


def dictionary() -> bytes:
    return arrow_body({"value": pa.array(["a", "a"]).dictionary_encode()})


def compressed() -> bytes:
    table = pa.table({"value": pa.array([b"a" * 1000], pa.binary())})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    body: bytes = sink.getvalue().to_pybytes()
    return body


BAD_BODIES: list[tuple[bytes, str]] = [
    (b"", "no schema"),
    (b"[1,2,3] is not Arrow", "not an Arrow IPC stream"),
    (values_body([b"x"])[:-100], "ends inside"),
    (arrow_body({"value": pa.array([1, 2])}), "Int"),
    (arrow_body({"value": pa.array(["a", None])}), "Row 1 is null"),
    (arrow_body({"other": pa.array(["a"])}), "other"),
    (arrow_body({"value": pa.array(["a"]), "stream": pa.array(["s"])}), "exclude"),
    (dictionary(), "dictionary"),
    (compressed(), "compressed"),
]


@pytest.mark.parametrize(("body", "reason"), BAD_BODIES, ids=[reason for _, reason in BAD_BODIES])
def test_a_malformed_body_is_refused_with_the_reason(
    shared_staging: Staging, path: str, stage_id: str, body: bytes, reason: str
) -> None:
    staging = shared_staging
    staging.api.put(path)
    answer = staging.put(stage_id, body, stream=path)
    assert (answer.status, answer.code) == (400, "arrow_invalid")
    assert reason.lower() in answer.json()["detail"].lower(), answer.json()
    assert staging.put(stage_id, values_body([b"good"]), stream=path).status == 201
    assert staging.delete(stage_id).status == 204


def test_rows_are_judged_one_by_one(staging: Staging, server: Server) -> None:
    staging.api.put("text")
    staging.api.put("json", b"", JSON)
    cases = [
        ([("json", b"1"), ("text", b"x"), ("json", b'{"a": }')], "json_invalid", ["Row 2", "json"]),
        ([("json", b"1 2")], "json_invalid", ["Row 0", "text after the value"]),
        ([("json", b"")], "json_invalid", ["Row 0", "empty"]),
        ([("json", b'"\xff"')], "json_invalid", ["UTF-8"]),
        ([("text", b"x"), ("text", b"")], "body_empty", ["Row 1"]),
    ]
    for number, (rows, code, said) in enumerate(cases):
        answer = staging.put(f"bad-{number}", rows_body(rows))
        assert (answer.status, answer.code) == (400, code)
        detail = answer.json()["detail"]
        assert all(piece in detail for piece in said), detail
    assert staging.api.metric("millstream_stages_waiting") == 0
    assert packs(server) == []


def test_refusals_of_the_request_itself(staging: Staging) -> None:
    staging.api.put("s")
    staging.api.put("closed")
    staging.api.close_stream("closed")
    body = values_body([b"x"])
    wrong = staging.put("a", body, stream="s", headers={"Millstream-Body-Crc32": "00000000"})
    assert (wrong.status, wrong.code) == (400, "checksum_mismatch")
    missing = staging.put("a", body, stream="nope")
    assert (missing.status, missing.code) == (404, "stream_not_found")
    assert "nope" in missing.json()["detail"]
    refused = staging.put("a", body, stream="closed")
    assert (refused.status, refused.code) == (409, "stream_closed")
    for bad in ("a%20b", "x" * 129, "a/b", ""):
        assert staging.put(bad, body, stream="s").code == "bad_request"
    nameless = staging.put("a", body)
    assert nameless.code == "arrow_invalid"
    assert "stream" in nameless.json()["detail"]
    unknown = staging.api.call("PUT", "/v1/stage/a?streams=s", {}, body)
    assert unknown.code == "bad_request"
    get = staging.api.call("GET", "/v1/stage/a")
    assert (get.status, get["allow"]) == (405, "PUT, DELETE")
    reserved = staging.put("a", body, stream="__ds/x")
    assert reserved.code == "stream_not_found"


def test_a_restart_keeps_stages_and_their_bytes(staging: Staging, server: Server) -> None:
    staging.api.put("s")
    values = [b"%d:" % number + b"v" * 100 for number in range(10_000)]
    described = staging.stage("kept", values_body(values), stream="s")
    given_up = staging.stage("given-up", values_body([b"x"]), stream="s")
    assert staging.delete(given_up["id"]).status == 204
    server.crash_and_restart()
    assert staging.api.metric("millstream_stages_waiting") == 1
    again = staging.put("kept", values_body(values), stream="s")
    assert again.status == 200
    assert again.json() == described
    assert not staging.commit("p", 1, [described])["duplicate"]
    assert staging.api.read_all("s") == b"".join(values)


def test_abandoned_stages_expire(start_server: Callable[..., Server]) -> None:
    server = start_server(settings={"stage_ttl_s": 1, "sweep_interval_ms": 50})
    staging = Staging(Api(server))
    staging.api.put("s")
    described = staging.stage("left", values_body([b"x" * 1000]), stream="s")
    staging.api.wait_for_metric("millstream_stages_waiting", 0)
    assert staging.api.metric("millstream_stages_expired_total") == 1
    assert staging.api.metric("millstream_stages_waiting_bytes") == 0
    assert packs(server) == []
    refused = staging.post("p", 0, [described])
    assert (refused.status, refused.code) == (404, "stage_gone")
    assert "left" in refused.json()["detail"]
    assert staging.api.read_all("s") == b""


def test_the_budget_is_kept(start_server: Callable[..., Server]) -> None:
    server = start_server(settings={"stage_bytes_max": 4 * MIB})
    staging = Staging(Api(server))
    staging.api.put("s")
    body = values_body([b"x" * 100_000] * 15)
    first, second = (staging.stage(name, body, stream="s") for name in ("one", "two"))
    full = staging.put("three", body, stream="s")
    assert (full.status, full.code) == (507, "stage_full")
    assert staging.api.metric("millstream_stages_waiting_bytes") > 3_000_000
    server.crash_and_restart()
    assert staging.put("three", body, stream="s").code == "stage_full"
    assert staging.delete(second["id"]).status == 204
    third = staging.stage("three", body, stream="s")
    staging.commit("p", 1, [first, third])
    assert staging.api.metric("millstream_stages_waiting_bytes") == 0
    staging.stage("four", body, stream="s")
    assert staging.api.read_all("s") == b"x" * 3_000_000


def tiny_rows(count: int) -> bytes:
    """Rows of one byte, made without a Python object for each."""
    offsets = pa.array(range(count + 1), pa.int32()).buffers()[1]
    data = pa.py_buffer(b"x" * count)
    values = pa.Array.from_buffers(pa.binary(), count, [None, offsets, data])
    return arrow_body({"value": values})


def test_a_stage_of_too_many_rows_is_refused_before_they_are_taken_in(
    start_server: Callable[..., Server],
) -> None:
    server = start_server()
    staging = Staging(Api(server))
    staging.api.put("s")
    before = server.peak_rss_bytes()
    refused = staging.put("many", tiny_rows(4_000_000), stream="s")
    assert (refused.status, refused.code) == (413, "payload_too_large")
    assert "at most 1000000 rows" in refused.json()["detail"]
    assert server.peak_rss_bytes() - before < 100 * MIB, "rows took memory"
    assert staging.stage("all", tiny_rows(1_000_000), stream="s")["rows"] == 1_000_000
    assert staging.api.metric("millstream_staging_bytes") == 0


def test_the_index_of_committed_rows_stays_within_the_bound_of_memory(
    start_server: Callable[..., Server],
) -> None:
    """Each row of a byte stream takes 32 bytes until a checkpoint has written them: 16 MiB may be taken here."""
    server = start_server(settings={"checkpoint_bytes": 4 * MIB})
    staging = Staging(Api(server))
    staging.api.put("s")
    body = tiny_rows(200_000)
    stages = [staging.stage(f"part{number}", body, stream="s") for number in range(4)]
    refused = staging.post("p", 0, stages)
    assert (refused.status, refused.code) == (413, "payload_too_large")
    assert staging.api.read_all("s") == b""
    for number, stage in enumerate(stages):
        staging.commit("p", number, [stage])
        assert staging.api.metric("millstream_hot_bytes") <= 16 * MIB
    assert staging.api.read_all("s") == b"x" * 800_000
    staging.api.wait_for_metric("millstream_hot_bytes", 0)
    assert staging.api.metric("millstream_staging_bytes") == 0
