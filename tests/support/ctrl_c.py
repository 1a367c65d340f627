"""What SIGINT means to a process that a test starts: pass one of these as `preexec_fn`.

A shell, `nohup` or a CI runner may start its background jobs with SIGINT ignored, and everything below inherits that, the
tests included. So a test that presses Ctrl-C says what its process begins with.
"""

from __future__ import annotations

import signal


def taken() -> None:
    """As below a terminal."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ignored() -> None:
    """As in a background job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
