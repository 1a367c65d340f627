"""First contact: is there anybody at this address?

Where it sits: beside `sync/client.py`, on its connections; the Spark connector asks once where a query begins, so that a wrong
address or a server that is not running is told soon, while a server that was there may restart for longer.

Invariants:
- I-RCH-1  Any answer counts, also a refusal: what it means is told by the request that follows.
- I-RCH-2  It ends after `patience_seconds`, also where packets vanish; a last attempt has `ATTEMPT_SECONDS_MIN` all the same.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from millstream.client.http import Request, TransportFailure
from millstream.client.steps import Call, Sleep
from millstream.client.sync.client import run

if TYPE_CHECKING:
    from millstream.client.steps import Operations, Steps
    from millstream.client.sync.client import Client

HEALTH_PATH: Final = "/-/health"
PAUSE_SECONDS_MAX: Final = 1.0
ATTEMPT_SECONDS_MIN: Final = 0.1


def reach(client: Client, patience_seconds: float) -> None:
    """Returns when the server has answered; raises the last failure when it has not by then."""
    run(_reached(client._operations, patience_seconds), client._pool)


def _reached(operations: Operations, patience_seconds: float) -> Steps[None]:
    request = Request("GET", operations.endpoint.prefix + HEALTH_PATH, (), b"")
    until = time.monotonic() + patience_seconds
    attempt = 0
    while True:
        attempt += 1
        # A pause may have lasted longer than was asked for, on a busy machine beyond the end.
        left = max(ATTEMPT_SECONDS_MIN, until - time.monotonic())
        try:
            yield Call(request, min(operations.timeout_seconds, left))
        except TransportFailure as failure:
            error = operations.failure_error(failure, may_be_applied=False)
        else:
            return
        pause = min(PAUSE_SECONDS_MAX, operations.retry.wait_seconds(attempt))
        if time.monotonic() + pause >= until:
            raise error
        yield Sleep(pause)
