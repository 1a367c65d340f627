"""Requests to the server's own control plane (`/-/api/...`), for commands that are about the server.

Where it sits: beside the client, with its connections, retries and errors; used by the command line.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from millstream.client.http import Request
from millstream.client.sync.client import run
from millstream.errors import ProtocolError

if TYPE_CHECKING:
    from millstream.client.sync.client import Client


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
    response = run(operations.call(request, "", safe=method != "POST"), client._pool)
    try:
        answer = json.loads(response.body)
    except ValueError as error:
        raise ProtocolError(f"{path} was answered by something that is not JSON") from error
    if not isinstance(answer, dict):
        raise ProtocolError(f"{path} was answered by something that is not a JSON object")
    return answer
