"""Stage and commit over plain HTTP, with bodies made by pyarrow: what any client would send.

Where it sits: beside `support.http`, for tests of the write side of the pipeline paths.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlencode

import pyarrow as pa

from support.http import Api, Headers, Response

ARROW = "application/vnd.apache.arrow.stream"
JSON = "application/json"


def arrow_body(columns: dict[str, pa.Array], *, batch_rows: int | None = None) -> bytes:
    """An Arrow IPC stream of these columns, in batches of at most `batch_rows`."""
    table = pa.table(columns)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    body: bytes = sink.getvalue().to_pybytes()
    return body


def rows_body(rows: Iterable[tuple[str, bytes]], *, batch_rows: int | None = None) -> bytes:
    """Rows of (stream, value)."""
    rows = list(rows)
    return arrow_body(
        {
            "stream": pa.array([stream for stream, _ in rows], pa.utf8()),
            "value": pa.array([value for _, value in rows], pa.binary()),
        },
        batch_rows=batch_rows,
    )


def values_body(values: Sequence[bytes]) -> bytes:
    return arrow_body({"value": pa.array(values, pa.binary())})


class Staging:
    """The write side of the pipeline paths."""

    def __init__(self, api: Api) -> None:
        self.api = api

    def put(
        self,
        stage_id: str,
        body: bytes,
        *,
        stream: str | None = None,
        headers: Headers | None = None,
    ) -> Response:
        query = "" if stream is None else "?" + urlencode({"stream": stream})
        sent = {"Content-Type": ARROW, "Millstream-Body-Crc32": f"{zlib.crc32(body):08x}"}
        return self.api.call(
            "PUT", f"/v1/stage/{stage_id}{query}", {**sent, **(headers or {})}, body
        )

    def stage(self, stage_id: str, body: bytes, *, stream: str | None = None) -> dict[str, Any]:
        answer = self.put(stage_id, body, stream=stream)
        assert answer.status == 201, (answer.status, answer.body)
        document = answer.json()
        assert isinstance(document, dict)
        return document

    def delete(self, stage_id: str) -> Response:
        return self.api.call("DELETE", f"/v1/stage/{stage_id}")

    def post(
        self,
        producer: str,
        epoch: int,
        stages: Iterable[dict[str, Any]],
        *,
        streams: Sequence[str] = (),
    ) -> Response:
        named = [{"id": entry["id"], "checksum": entry["checksum"]} for entry in stages]
        document = {"producer": producer, "epoch": epoch, "streams": list(streams), "stages": named}
        return self.api.call(
            "POST", "/v1/commit", {"Content-Type": JSON}, json.dumps(document).encode()
        )

    def commit(
        self,
        producer: str,
        epoch: int,
        stages: Iterable[dict[str, Any]],
        *,
        streams: Sequence[str] = (),
    ) -> dict[str, Any]:
        answer = self.post(producer, epoch, stages, streams=streams)
        assert answer.status == 200, (answer.status, answer.body)
        document = answer.json()
        assert isinstance(document, dict)
        return document


def read_json(api: Api, path: str) -> list[Any]:
    """Every message of a JSON stream, window by window."""
    messages: list[Any] = []
    offset = "-1"
    for _ in range(100_000):
        answer = api.get(path, offset=offset)
        assert answer.status == 200, (answer.status, answer.body)
        messages += answer.json()
        offset = answer.offset
        if answer.get("stream-up-to-date") == "true":
            return messages
    raise AssertionError("the tail was never reached")
