"""What work in threads of its own needs to speak with the control plane's event loop.

Used by backups and verification, whose threads outlive the request that began them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


def call_on(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Runs `call` on the loop, or here if there is no loop any more."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:  # the loop is closed: the server has stopped, nobody asks any more
        call()


def now_ms() -> int:
    return time.time_ns() // 1_000_000
