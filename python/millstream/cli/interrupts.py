"""Ctrl-C and SIGTERM while Spark runs: noted at once, acted upon between two calls into the JVM.

Where it sits: used by `pipeline` and `demo`; `restore` takes SIGTERM in the same way. Python runs a signal's handler in the middle of whatever
it does; a call into the JVM that is cut off there, or a second one made from the handler (as pyspark's
own handler does), breaks the connection and prints tracebacks.

Invariants:
- I-INT-1  Before the session is there, a signal ends the command at once.
- I-INT-2  While it is there, the first signal is noted and `check` raises it; a second one is not noted
           but raised, so that nobody has to wait for a call that hangs.
"""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Terminated(KeyboardInterrupt):
    """SIGTERM: end like Ctrl-C, but as asked."""


_KINDS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}


class Interrupts:
    """The signals of one command."""

    def __init__(self) -> None:
        self._noted: int | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        """SIGTERM raises `Terminated`, as Ctrl-C raises `KeyboardInterrupt`."""
        before = {number: signal.signal(number, _raise) for number in _KINDS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """From here to the end of the block signals are noted; pyspark's handler is replaced."""
        for number in _KINDS:
            signal.signal(number, self._note)
        try:
            yield
        finally:
            for number in _KINDS:
                signal.signal(number, _raise)

    def check(self) -> None:
        """Raise what was noted."""
        if self._noted is not None:
            raise _KINDS[signal.Signals(self._noted)]

    def _note(self, number: int, _: object) -> None:
        if self._noted is not None:
            _raise(number, None)
        self._noted = number


def _raise(number: int, _: object) -> None:
    raise _KINDS[signal.Signals(number)]
