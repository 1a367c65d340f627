"""When to try again, and how long to wait before.

Where it sits: asked by `steps.py`, `follow.py` and the producers; holds no state of its own.
Invariant I-RET-1: a wait is never shorter than the server's `Retry-After` nor longer than a bound.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

RETRY_AFTER_SECONDS_MAX: Final = 60.0


@dataclass(frozen=True, slots=True)
class Retry:
    """How a client retries what is safe to retry.

    `Retry(attempts=1)` never retries. Delays double from `delay_seconds` to `delay_seconds_max`,
    each drawn at random from the upper half, so that many clients do not come back at once.
    """

    attempts: int = 5
    delay_seconds: float = 0.1
    delay_seconds_max: float = 5.0

    def wait_seconds(self, attempt: int, retry_after_seconds: float | None = None) -> float:
        """The pause after failed attempt number `attempt` (counted from 1)."""
        ceiling = min(self.delay_seconds_max, self.delay_seconds * 2.0 ** min(attempt - 1, 30))
        wait = ceiling * (0.5 + random.random() / 2)
        if retry_after_seconds is not None:
            wait = max(wait, min(retry_after_seconds, RETRY_AFTER_SECONDS_MAX))
        return wait
