"""What work in threads of its own needs to speak with the control plane's event loop.

Used by backups and verification, whose threads outlive the request that began them, and by work that may never end: it
asks a disk or a name server that need not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def aside(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Begins work in a thread that nobody waits for at the end of the process, unlike those of an executor.

    The future is done when the work has ended, whoever waits for it: who may give up before that shields it. How many
    there are at once is the caller's to bound.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()
    outcome.add_done_callback(_seen)

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - raised again where it is awaited
            end(partial(outcome.set_exception, error))
        else:
            end(partial(outcome.set_result, result))

    def end(settle: Callable[[], None]) -> None:
        def unless_given_up() -> None:
            if not outcome.done():
                settle()

        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(unless_given_up)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


def _seen(outcome: asyncio.Future[T]) -> None:
    """Marks a failure as seen: who has given up does not look."""
    if not outcome.cancelled():
        outcome.exception()


def call_on(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Runs `call` on the loop, or here if there is no loop any more."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:  # the loop is closed: the server has stopped, nobody asks any more
        call()


def now_ms() -> int:
    return time.time_ns() // 1_000_000
