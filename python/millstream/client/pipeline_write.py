"""Writing many records at once: stage them, commit what was staged, or append with own numbers.

Where it sits: beside the client, over its connections; used by the Spark writer on executors (stage)
and on the driver (commit), open to any program. The paths are those of docs/reference/pipeline-http.md.

Invariants:
- I-PWR-1  Every call here may be repeated: a stage by its id and bytes, a commit and a numbered
           append by producer and epoch. So a lost answer, a broken connection and a restarting
           server are repeated until an answer comes or the patience is over.
- I-PWR-2  A refusal is never repeated: it says that nothing was applied and why.
- I-PWR-3  `duplicate` is success: an earlier try, perhaps of an earlier process, was applied.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from millstream import errors
from millstream.client import wire
from millstream.client.http import Request, Response
from millstream.client.steps import Policy, may_repeat

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from millstream.client.sync.client import Client

STAGE_PATH: Final = "/v1/stage/"
COMMIT_PATH: Final = "/v1/commit"
ARROW_STREAM: Final = "application/vnd.apache.arrow.stream"
PATIENCE_SECONDS: Final = 120.0
"""How long a call is repeated while no answer comes: longer than a server takes to restart."""
UNSTAGE_PATIENCE_SECONDS: Final = 5.0
"""Short: what is left behind expires on the server."""


@dataclass(frozen=True, slots=True)
class StageRef:
    """What a commit names: these bytes under this id."""

    id: str
    checksum: str


@dataclass(frozen=True, slots=True)
class Stage:
    """What the server holds under one stage id."""

    ref: StageRef
    rows: int
    bytes: int
    streams: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """What a commit did; `rows` is 0 where an earlier try had done it."""

    duplicate: bool
    rows: int


def stage(
    client: Client,
    stage_id: str,
    body: bytes,
    *,
    stream: str | None = None,
    patience_seconds: float = PATIENCE_SECONDS,
) -> Stage:
    """Hand over the rows of an Arrow IPC stream; a repetition with the same bytes changes nothing.

    Without `stream` the rows need a column `stream`.
    """
    operations = client._operations
    query = () if stream is None else (("stream", wire.check_path(stream)),)
    request = Request(
        "PUT",
        operations.endpoint.prefix + STAGE_PATH + stage_id + wire.encode_query(query),
        (
            ("Content-Type", ARROW_STREAM),
            ("Millstream-Body-Crc32", f"{zlib.crc32(body):08x}"),
        ),
        body,
    )
    response = _answered(client, request, stream or "", patience_seconds)
    document = wire.json_object(response.body, STAGE_PATH)
    try:
        return Stage(
            ref=StageRef(stage_id, str(document["checksum"])),
            rows=int(document["rows"]),
            bytes=int(document["bytes"]),
            streams=tuple(str(entry["name"]) for entry in document["streams"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise errors.ProtocolError(
            f"the server sent an unknown description of a stage: {error!r}"
        ) from error


def unstage(client: Client, stage_id: str) -> Literal["deleted", "gone", "committed"]:
    """Give up staged rows. What a commit has taken stays: the answer is then `committed`."""
    operations = client._operations
    request = Request("DELETE", operations.endpoint.prefix + STAGE_PATH + stage_id)
    try:
        _answered(client, request, "", UNSTAGE_PATIENCE_SECONDS)
    except errors.ServerError as error:
        if error.code == "stage_gone":
            return "gone"
        if error.code == "stage_committed":
            return "committed"
        raise
    return "deleted"


def unstage_all(client: Client, stage_ids: Iterable[str]) -> errors.MillstreamError | None:
    """Give up stages as far as the server answers; returns what ended it, if something did.

    Never raises for what expires by itself: it runs beside an error that the caller must see, or
    after a commit that is done.
    """
    for stage_id in stage_ids:
        try:
            unstage(client, stage_id)
        except errors.MillstreamError as error:
            return error
    return None


def commit(
    client: Client,
    producer: str,
    epoch: int,
    stages: Sequence[StageRef],
    *,
    streams: Iterable[str],
    patience_seconds: float = PATIENCE_SECONDS,
) -> Committed:
    """Append what was staged, in this order, to all its streams or to none, exactly once.

    `streams` are the targets: by them a repetition is told even when its stages are gone.
    """
    operations = client._operations
    document = {
        "producer": producer,
        "epoch": epoch,
        "streams": sorted(set(streams)),
        "stages": [{"id": entry.id, "checksum": entry.checksum} for entry in stages],
    }
    request = Request(
        "POST",
        operations.endpoint.prefix + COMMIT_PATH,
        (("Content-Type", "application/json"),),
        json.dumps(document, separators=(",", ":")).encode(),
    )
    response = _answered(client, request, "", patience_seconds)
    answer = wire.json_object(response.body, COMMIT_PATH)
    try:
        if answer["duplicate"] is True:
            return Committed(duplicate=True, rows=0)
        return Committed(
            duplicate=False, rows=sum(int(entry["rows"]) for entry in answer["streams"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise errors.ProtocolError(
            f"the server sent an unknown answer to a commit: {error!r}"
        ) from error


def create_stream(
    client: Client,
    path: str,
    *,
    content_type: str,
    durability: str | None,
    closed: bool = False,
    patience_seconds: float = PATIENCE_SECONDS,
) -> bool:
    """Create a stream, or find it with this configuration; True if this call made it."""
    operations = client._operations
    path = wire.check_path(path)
    options = wire.CreateOptions(content_type=content_type, durability=durability, closed=closed)
    request = wire.create_request(operations.endpoint, path, options)
    response = _answered(client, request, path, patience_seconds)
    return response.status == 201


def content_type_of(
    client: Client, path: str, *, patience_seconds: float = PATIENCE_SECONDS
) -> str:
    operations = client._operations
    request = Request("HEAD", wire.stream_target(operations.endpoint, wire.check_path(path)))
    response = _answered(client, request, path, patience_seconds)
    return wire.info_from_head(path, response).content_type


def append_numbered(
    client: Client,
    path: str,
    content_type: str,
    body: bytes,
    producer: tuple[str, int, int],
    *,
    patience_seconds: float = PATIENCE_SECONDS,
) -> bool:
    """An ordinary append under (producer id, epoch, sequence number); False if it was there before."""
    operations = client._operations
    options = wire.AppendOptions(producer=producer)
    request = wire.append_request(operations.endpoint, path, content_type, body, options)
    response = _answered(client, request, path, patience_seconds)
    return response.status != 204


def _answered(client: Client, request: Request, path: str, patience_seconds: float) -> Response:
    """One request, repeated until it is answered (I-PWR-1, I-PWR-2)."""
    policy = Policy(patience_seconds=patience_seconds, again=_unanswered)
    return client._run(client._operations.repeat(request, path, policy))


def _unanswered(error: errors.MillstreamError) -> bool:
    """Busy, starting, stopping, not sure, or damaged on its way: ask again. Full is an answer."""
    if isinstance(error, errors.InsufficientStorage):
        return False
    if isinstance(error, errors.OutcomeUnknown) or error.code == "checksum_mismatch":
        return True
    return may_repeat(error, safe=True)
