"""The check of the server: it answers, and it is ready.

Where it sits: one theme of `millstream doctor`; uses the client, as any program would.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from millstream.doctor.finding import Finding, fail, ok, warn
from millstream.errors import ConnectionFailed, MillstreamError

if TYPE_CHECKING:
    from collections.abc import Iterator

ANSWER_DEADLINE_S: Final = 5.0
REMEDIES: Final = {
    "log_failed": "a write to the disk failed: check the disk and the server's log, then restart it",
    "log_stalled": "a write to the disk takes too long: find out why the device is slow",
    "unauthorized": "give the credentials that the server or the proxy before it asks for",
}


def reachable(url: str | None) -> Iterator[Finding]:
    """`url`, else the one of the settings. A server that nobody named may be absent."""
    from millstream.client.control import control_call
    from millstream.client.retry import Retry
    from millstream.client.sync.client import Client
    from millstream.settings import client_url

    named = url is not None or bool(os.environ.get("MILLSTREAM_URL"))
    address = client_url(url)
    try:
        with Client(address, timeout_seconds=ANSWER_DEADLINE_S, retry=Retry(attempts=1)) as client:
            control_call(client, "GET", "/-/health")
            ready = control_call(client, "GET", "/-/ready")
    except ConnectionFailed as error:
        kind = fail if named else warn
        yield kind("server", error.message, error.hint or "start one with `millstream serve`")
        return
    except MillstreamError as error:
        remedy = REMEDIES.get(error.code) or error.hint or "is this the address of Millstream?"
        yield fail("server", f"{address}: {error.message} ({error.code})", remedy)
        return
    status = str(ready.get("status", "unknown"))
    if status == "ok":
        yield ok("server", f"{address} is ready")
    else:
        yield warn(
            "server",
            f"{address} answers, but says `{status}`",
            "some bytes at rest are damaged: `millstream verify --url` names them",
        )
