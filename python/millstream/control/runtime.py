"""Server and control plane put together: what `millstream serve` runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.control.app import create_app
from millstream.server import lifecycle

if TYPE_CHECKING:
    from millstream.settings import Settings


def run(settings: Settings) -> int:
    """Serves until a signal ends it; the exit code of the process."""
    return lifecycle.run_server(settings, create_app)
