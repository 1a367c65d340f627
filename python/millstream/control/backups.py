"""Backups under way and lately ended: one thread each, at most one at a time.

Sits between the routes of `backups_api` and the engine, which does the work and calls back with how far it is.
Invariants: one backup at a time; a cancelled one is asked to end and ends by itself, having removed what it wrote; what
ended is remembered, the newest few.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from millstream._engine import EngineError
from millstream.control.background import call_on, now_ms

if TYPE_CHECKING:
    from pathlib import Path

    from millstream._engine import BackupSummary, Engine

State = Literal["running", "done", "failed", "cancelled"]

REMEMBERED_MAX: Final = 16
CLOSE_WAIT_S: Final = 0.25


class BackupRunning(Exception):  # noqa: N818 - named by what is the case
    """Another backup is under way."""

    def __init__(self, identifier: str) -> None:
        super().__init__(identifier)
        self.identifier = identifier


@dataclass
class Backup:
    """One backup. Written by its thread, read by the event loop."""

    identifier: str
    to: Path
    started_ms: int
    state: State = "running"
    phase: str = "waiting"
    bytes_done: int = 0
    bytes_total: int = 0
    ended_ms: int | None = None
    summary: BackupSummary | None = None
    error: tuple[str, str] | None = None
    """Code and detail of what ended it."""
    cancel_asked: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def document(self) -> dict[str, Any]:
        error = self.error
        return {
            "id": self.identifier,
            "to": str(self.to),
            "state": self.state,
            "phase": self.phase,
            "bytes_done": self.bytes_done,
            "bytes_total": self.bytes_total,
            "started_at": self.started_ms,
            "ended_at": self.ended_ms,
            "summary": self.summary,
            "error": None if error is None else {"code": error[0], "detail": error[1]},
        }

    def on_progress(self, phase: str, bytes_done: int, bytes_total: int) -> bool:
        """Called by the engine a few times per second; false cancels."""
        self.phase, self.bytes_done, self.bytes_total = phase, bytes_done, bytes_total
        return not self.cancel_asked

    def end(self) -> None:
        self.ended_ms = now_ms()
        if self.error is None:
            self.state = "done"
        else:
            self.state = "cancelled" if self.error[0] == "backup_cancelled" else "failed"


class Backups:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = itertools.count(1)
        self._known: dict[str, Backup] = {}
        self._closed = False

    def find(self, identifier: str) -> Backup | None:
        return self._known.get(identifier)

    def start(self, to: Path, rate_bytes_per_second: int, allow_damage: bool) -> Backup:
        """Begins a backup; to be called on the event loop."""
        running = next((one for one in self._known.values() if one.state == "running"), None)
        if running is not None or self._closed:
            raise BackupRunning(running.identifier if running else "")
        started_ms = now_ms()
        backup = Backup(f"{started_ms}-{next(self._numbers)}", to, started_ms)
        loop = asyncio.get_running_loop()

        def tell_end() -> None:
            backup.end()
            backup.ended.set()

        def work() -> None:
            try:
                backup.summary = self._engine.backup(
                    str(to), backup.on_progress, rate_bytes_per_second, allow_damage
                )
            except EngineError as error:
                backup.error = (error.code, error.detail)
            except Exception as error:  # noqa: BLE001 - a thread has no caller; the backup tells it
                backup.error = ("internal", repr(error))
            call_on(loop, tell_end)

        # Not a daemon: the end of the process waits for it, within a bound, and the engine makes it short.
        threading.Thread(target=work, name="millstream-backup").start()
        self._known[backup.identifier] = backup
        while len(self._known) > REMEMBERED_MAX:
            del self._known[next(iter(self._known))]
        return backup

    async def close(self) -> None:
        """Cancels what runs. It may still be removing its files when this returns."""
        self._closed = True
        for backup in self._known.values():
            backup.cancel_asked = True
            if backup.state == "running":
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(backup.ended.wait(), CLOSE_WAIT_S)
