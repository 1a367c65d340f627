"""Requests to the server's own control plane (`/-/api/...`), for commands that are about the server.

Where it sits: beside the client, with its connections, retries and errors; used by the command line and by job `audit`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from millstream.client import wire
from millstream.client.http import Request
from millstream.errors import MillstreamError, ServerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.client.sync.client import Client


VERIFY_PATH: Final = "/-/api/verify"
VERIFY_WAIT_MS: Final = 500


def control_call(
    client: Client, method: str, path: str, document: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Send one request and return the JSON object that answers it; refusals are exceptions."""
    operations = client._operations
    request = Request(
        method,
        operations.endpoint.prefix + path,
        (("Content-Type", "application/json"),) if document is not None else (),
        b"" if document is None else json.dumps(document).encode(),
    )
    response = client._run(operations.call(request, "", safe=method != "POST"))
    return wire.json_object(response.body, path)


def verified(
    client: Client, progress: Callable[[int, int], Any], *, or_running: bool = False
) -> dict[str, Any]:
    """Let the server verify its own directory, wait for the end and return its report; Ctrl-C ends it there too.

    `or_running`: if one is running already, its report will do.
    """
    try:
        control_call(client, "POST", VERIFY_PATH)
    except ServerError as error:
        if error.code != "verify_running" or not or_running:
            raise
    try:
        while True:
            now = control_call(client, "GET", f"{VERIFY_PATH}?wait_ms={VERIFY_WAIT_MS}")
            if now["state"] != "running":
                break
            progress(int(now["bytes_done"]), int(now["bytes_total"]))
    except KeyboardInterrupt:
        control_call(client, "DELETE", VERIFY_PATH)
        raise
    if now["report"] is None:
        cancelled = {"code": "verify_failed", "detail": "the verification was cancelled"}
        failure = now["error"] or cancelled
        raise MillstreamError(failure["detail"], code=failure["code"])
    return dict(now["report"])
