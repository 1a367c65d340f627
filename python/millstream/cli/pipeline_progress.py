"""How a running job looks: one line that is written over, lines in a log, or JSON lines.

Where it sits: fed by `pipeline` with the batches that `jobs.run.driver` reports.

Invariants:
- I-PRO-1  Without `--json` everything goes to stderr; with it every batch is one line on stdout.
- I-PRO-2  A log gets at most one line per `LINE_EVERY_S`, however short the batches are; the newest batch
           is always shown in the end, and the sums leave nothing out.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Final, TextIO

import click

from millstream.spark.observe.lag import lag

if TYPE_CHECKING:
    from millstream.cli.context import App
    from millstream.spark.jobs.job import Request
    from millstream.spark.jobs.run.driver import Step, Summary
    from millstream.spark.observe.lag import Lag

LINE_EVERY_S: Final = 1.0


class Display:
    """The progress of one run."""

    def __init__(self, app: App, stderr: TextIO) -> None:
        self._json = app.json
        self._stderr = stderr
        self._terminal = stderr.isatty()
        self._began = time.monotonic()
        self._shown_at: float | None = None
        self._waiting: str | None = None
        self._rows = 0
        self._open_line = False

    def say(self, text: str) -> None:
        if not self._json:
            self.clear()
            click.echo(text, file=self._stderr)

    def begin(self, job: str, request: Request) -> None:
        self._began = time.monotonic()
        self.say(f"{job}: {', '.join(request.streams)} -> {request.target}")

    def step(self, step: Step) -> None:
        """One batch was done."""
        behind = lag(step.progress)
        self._rows += step.rows
        if self._json:
            document = {
                "batch": step.batch,
                "rows": step.rows,
                "seconds": round(step.seconds, 3),
                "lag_records": behind.records,
                "lag_bytes": behind.bytes,
            }
            click.echo(json.dumps(document))
            return
        rate = step.rows / step.seconds if step.seconds > 0 else 0.0
        self._waiting = (
            f"batch {step.batch}: {step.rows:,} rows in {step.seconds:.1f} s ({rate:,.0f} rows/s), "
            f"{self._rows:,} rows so far, {_behind(behind)}"
        )
        self.poll()

    def poll(self) -> None:
        """Show what waits for its turn."""
        now = time.monotonic()
        due = self._terminal or self._shown_at is None or now - self._shown_at >= LINE_EVERY_S
        if self._waiting is None or not due:
            return
        if self._terminal:
            click.echo(f"\r\x1b[K{self._waiting}", file=self._stderr, nl=False)
            self._open_line = True
        else:
            click.echo(self._waiting, file=self._stderr)
        self._shown_at, self._waiting = now, None

    def clear(self) -> None:
        if self._open_line:
            click.echo("\r\x1b[K", file=self._stderr, nl=False)
            self._open_line = False

    def end(self, request: Request, summary: Summary) -> None:
        self.clear()
        if self._json:
            document = {
                "done": True,
                "batches": summary.batches,
                "rows": summary.rows,
                "seconds": round(summary.seconds, 3),
                "target": str(request.target),
            }
            if summary.state is not None:
                document |= {"open": summary.state.open, "late": summary.state.late}
            if summary.left_out:
                document["left_out"] = summary.left_out
            click.echo(json.dumps(document))
            return
        if summary.state is not None:
            self.say(str(summary.state))
        if summary.left_out:
            self.say(f"{summary.left_out:,} records were left out")
        if summary.rows == 0:
            self.say("nothing new: everything was there already")
            return
        rate = summary.rows / summary.seconds if summary.seconds > 0 else 0.0
        self.say(
            f"done: {summary.rows:,} rows in {summary.batches} batches, "
            f"{summary.seconds:.1f} s ({rate:,.0f} rows/s) -> {request.target}"
        )


def _behind(behind: Lag) -> str:
    if not behind.records:
        return "at the tail"
    pace = "" if behind.seconds is None else f" (about {behind.seconds:.0f} s at this pace)"
    return f"{behind.records:,} records behind the tail{pace}"
