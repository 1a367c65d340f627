"""First contact: is there anybody at this address?

Where it sits: beside the client, on its connections; the Spark connector asks once where a query begins, so that a wrong
address or a server that is not running is told soon, while a server that was there may restart for longer.

Invariants:
- I-RCH-1  Any answer counts, also a refusal: what it means is told by the request that follows.
- I-RCH-2  It ends after `patience_seconds`, also where packets vanish; a last attempt has a moment all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from millstream.client.http import Request
from millstream.client.steps import Policy

if TYPE_CHECKING:
    from millstream.client.http import Response
    from millstream.client.steps import Operations, Steps
    from millstream.client.sync.client import Client

HEALTH_PATH: Final = "/-/health"
PAUSE_SECONDS_MAX: Final = 1.0


def reach(client: Client, patience_seconds: float) -> None:
    """Returns when the server has answered; raises the last failure when it has not by then."""
    client._run(reach_steps(client._operations, patience_seconds))


def reach_steps(operations: Operations, patience_seconds: float) -> Steps[Response]:
    policy = Policy(
        patience_seconds=patience_seconds,
        pause_seconds_max=PAUSE_SECONDS_MAX,
        within_patience=True,
        any_answer=True,
    )
    return operations.repeat(Request("GET", operations.endpoint.prefix + HEALTH_PATH), "", policy)
