"""The client's stage and commit calls: each is repeated until it is answered, and applied once."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest

import millstream
from millstream.client.pipeline_write import append_numbered, commit, create_stream, stage, unstage
from millstream.client.sync.client import Client
from millstream.errors import (
    ConnectionFailed,
    JsonInvalid,
    ProducerFenced,
    StageConflict,
    StageGone,
    StreamNotFound,
)
from support.fault_proxy import Call, FaultProxy, drop
from support.server import Server


@pytest.fixture
def proxy(server: Server) -> Iterator[FaultProxy]:
    proxy = FaultProxy(server)
    yield proxy
    proxy.close()


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[Client]:
    with millstream.connect(proxy.url) as client:
        client.create("s", content_type="application/json")
        yield client


def body(*values: str) -> bytes:
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"value": list(values)})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def texts(client: Client, stream: str = "s") -> list[str]:
    return [record.text for record in client.stream(stream).read()]


def test_lost_answers_are_asked_for_again(client: Client, proxy: FaultProxy) -> None:
    proxy.at("PUT", "/v1/stage/", drop, moment="after")
    proxy.at("POST", "/v1/commit", drop, moment="after")
    proxy.at("DELETE", "/v1/stage/", drop, moment="after")
    staged = stage(client, "one", body("1", "[2]"), stream="s")
    assert (staged.rows, staged.streams) == (2, ("s",))
    assert [call.status for call in proxy.seen("PUT", "/v1/stage/")] == [201, 200]
    assert commit(client, "p", 3, [staged.ref], streams=["s"]).duplicate is True
    assert texts(client) == ["1", "[2]"]
    spare = stage(client, "two", body("3"), stream="s")
    assert unstage(client, spare.ref.id) == "gone"


def test_a_server_that_restarts_is_waited_for(
    client: Client, proxy: FaultProxy, server: Server
) -> None:
    def crash(_call: Call) -> None:
        server.crash_and_restart()

    proxy.at("PUT", "/v1/stage/", crash, moment="before")
    proxy.at("POST", "/v1/commit", crash, moment="before")
    staged = [stage(client, f"stage-{n}", body(str(n)), stream="s") for n in range(3)]
    outcome = commit(client, "p", 1, [one.ref for one in staged], streams=["s"])
    assert (outcome.duplicate, outcome.rows) == (False, 3)
    proxy.check()
    assert texts(client) == ["0", "1", "2"]


def test_the_patience_ends(client: Client, proxy: FaultProxy) -> None:
    proxy.at("POST", "/v1/commit", drop, times=1000, moment="after")
    staged = stage(client, "one", body("1"), stream="s")
    with pytest.raises(ConnectionFailed):
        commit(client, "p", 1, [staged.ref], streams=["s"], patience_seconds=0.5)
    assert len(proxy.seen("POST", "/v1/commit")) > 1
    assert unstage(client, "one") == "committed"
    assert texts(client) == ["1"]


def test_refusals_come_at_once_and_by_name(client: Client, proxy: FaultProxy) -> None:
    with pytest.raises(StreamNotFound):
        stage(client, "a", body("1"), stream="nope")
    with pytest.raises(JsonInvalid, match="Row 1"):
        stage(client, "b", body("1", "{"), stream="s")
    staged = stage(client, "c", body("1"), stream="s")
    with pytest.raises(StageConflict):
        stage(client, "c", body("2"), stream="s")
    assert unstage(client, "c") == "deleted"
    with pytest.raises(StageGone):
        commit(client, "p", 1, [staged.ref], streams=["s"])
    later = stage(client, "d", body("4"), stream="s")
    assert commit(client, "p", 5, [later.ref], streams=["s"]).rows == 1
    older = stage(client, "e", body("5"), stream="s")
    with pytest.raises(ProducerFenced):
        commit(client, "p", 4, [older.ref], streams=["s"])
    assert texts(client) == ["4"]
    assert len({call.body for call in proxy.seen("POST", "/v1/commit")}) == 3, (
        "a refusal was repeated"
    )


def test_numbered_appends_and_creation_are_repeated_safely(
    client: Client, proxy: FaultProxy
) -> None:
    proxy.at("PUT", "/v1/stream/", drop, moment="after")
    assert create_stream(client, "n", content_type="application/json", durability="disk") is False
    proxy.at("POST", "/v1/stream/", drop, moment="after")
    assert append_numbered(client, "n", "application/json", b"[1]", ("p", 0, 0)) is False
    assert append_numbered(client, "n", "application/json", b"[2]", ("p", 0, 1)) is True
    assert texts(client, "n") == ["1", "2"]
