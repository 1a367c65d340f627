"""Requests to the server's own control plane (`/-/api/...`), for commands that are about the server.

Where it sits: beside the client, with its connections, retries and errors; used by the command line.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from millstream.client import wire
from millstream.client.http import Request

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
    response = client._run(operations.call(request, "", safe=method != "POST"))
    return wire.json_object(response.body, path)
