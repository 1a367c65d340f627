"""Batch jobs: one answer instead of a query. No trigger, no checkpoint of their own, and a report at the end.

Where it sits: beside `job`; `driver.run` does one, the commands print its report and end with what it says.
Invariant I-BAT-1: a report is for people (`lines`) and for programs (`document`), and both say the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from millstream.errors import InvalidArgument
from millstream.spark.jobs.job import Job, Request, selection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession


class Report(ABC):
    """What a batch job found or did."""

    @property
    @abstractmethod
    def ok(self) -> bool:
        """Whether the command ends with 0."""

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """Everything, as JSON has it."""

    @abstractmethod
    def lines(self) -> list[str]:
        """Everything, for people."""


class BatchJob(Job):
    """A job that is done when it returns."""

    runs_once = True
    reads_streams: ClassVar[bool] = True
    """Whether `--from` names streams."""
    from_help: ClassVar[str] = "Stream or glob to read; may be given several times."
    to_help: ClassVar[str] = "Where to write."
    to_required: ClassVar[bool] = True
    checkpoint_help: ClassVar[str] = ""
    """What a checkpoint of another run is good for here; empty if for nothing."""

    @abstractmethod
    def run(self, session: SparkSession, request: Request) -> Report:
        """Do it all."""

    def begin(self, request: Request, session: SparkSession, every_seconds: float | None) -> Report:  # noqa: ARG002
        from millstream.spark.jobs.run import driver

        return driver.run(self, request, session)

    def check_once(self, request: Request, every_seconds: float | None) -> None:
        """What is for queries alone means nothing here."""
        if self.reads_streams:
            selection(request.streams)
        given = {
            "every": every_seconds is not None,
            "max-rows": request.rows_per_batch is not None,
            "checkpoint": request.checkpoint is not None and not self.checkpoint_help,
        }
        for name, is_given in given.items():
            if is_given:
                raise InvalidArgument(
                    f"job `{self.name}` is done once, at once: --{name} means nothing for it",
                    hint="leave it out; to repeat the job, run the command again (cron, Airflow)",
                )


def text_table(names: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> list[str]:
    """Rows below headings: texts to the left, numbers to the right."""
    shown = [
        tuple(f"{cell:,}" if not isinstance(cell, str) else cell for cell in row) for row in rows
    ]
    widths = [
        max(len(name), *(len(row[column]) for row in shown)) if shown else len(name)
        for column, name in enumerate(names)
    ]
    lines = [
        "  ".join(name.upper().ljust(width) for name, width in zip(names, widths, strict=True))
    ]
    for row, raw in zip(shown, rows, strict=True):
        cells = zip(row, raw, widths, strict=True)
        lines.append(
            "  ".join(
                text.ljust(width) if isinstance(cell, str) else text.rjust(width)
                for text, cell, width in cells
            )
        )
    return [line.rstrip() for line in lines]
