"""Records that are gone: what counts as loss, how it is told, and whether the query goes on.

Where it sits: asked by the planner for streams whose identity or history changed, and by tasks for what
the server reports while they read.

    another incarnation                        loss: the records of the old one were not all read
    stream gone, its last known tail read      none: it is dropped from the checkpoint in silence
    stream gone, otherwise                     loss
    checkpoint beyond the end of its epoch     loss: the server lost records that were read
    certain gap behind the checkpoint          loss
    possible gap (`certain` false)             a warning: nothing is known to be lost

Invariants:
- I-LOS-1  `failOnDataLoss=true` ends in `DataLoss` with stream, range, reason and a way out.
- I-LOS-2  `failOnDataLoss=false` goes on, and says so once per loss; never silently.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from millstream.errors import DataLoss

if TYPE_CHECKING:
    from millstream.client._pipeline_read import PipelineGap

LOGGER: Final = logging.getLogger("millstream.spark")
HINT: Final = (
    "if these records may be missing, set the option `failOnDataLoss` to false: the query then "
    "warns and goes on behind them; or begin with a new checkpoint"
)
REASONS: Final[dict[str, str]] = {
    "crash": "the server crashed and this durability class may lose its newest records then",
    "retention": "they are no longer kept",
    "corruption": "they were damaged on the server's disk",
    "recreated": "the stream was deleted and created again",
}


@dataclass(frozen=True, slots=True)
class Loss:
    """Something that a query was to read and cannot."""

    stream: str
    what: str
    """The range: record numbers or offsets, as exactly as it is known."""
    reason: str

    def sentence(self) -> str:
        return f"stream `{self.stream}`: {self.what} cannot be read: {self.reason}"


@dataclass(frozen=True, slots=True)
class Losses:
    """The policy of one query; plain data, travels to executors."""

    fail: bool

    def found(self, loss: Loss) -> None:
        """Fail, or warn and return."""
        if self.fail:
            raise DataLoss(loss.sentence(), hint=HINT)
        LOGGER.warning("data loss: %s (failOnDataLoss=false: reading goes on)", loss.sentence())

    def possible(self, stream: str, gap: PipelineGap) -> None:
        """A gap that may have held nothing."""
        LOGGER.warning(
            "stream `%s`: records between %s and %s may be missing: %s",
            stream, gap.start, gap.end, REASONS.get(gap.reason, gap.reason),
        )  # fmt: skip

    def gap(self, stream: str, gap: PipelineGap) -> None:
        """A gap that the server reports where the query reads on."""
        if not gap.certain:
            self.possible(stream, gap)
            return
        self.found(Loss(stream, span(gap.start, gap.end), REASONS.get(gap.reason, gap.reason)))

    def found_before(self, stream: str, asked: int, first: int) -> None:
        """The first record asked for is no longer there."""
        self.found(Loss(stream, f"records {asked} to {first - 1}", REASONS["retention"]))

    def recreated(self, stream: str, number: int) -> None:
        self.found(
            Loss(
                stream,
                f"everything from record {number} of the stream that the checkpoint knows",
                "it was deleted, and another stream has its name now",
            )
        )

    def gone(self, stream: str, number: int, tail_number: int | None) -> None:
        """A stream vanished. `tail_number` is its last known tail; None if it is not known."""
        if tail_number is None:
            self.found(
                Loss(
                    stream,
                    f"whatever came after record {number}",
                    "it was deleted or has expired, and nobody knows how far it went",
                )
            )
        elif tail_number > number:
            self.found(
                Loss(
                    stream,
                    f"records {number} to {tail_number - 1}",
                    "it was deleted or has expired before they were read",
                )
            )


def span(start: str, end: str) -> str:
    return f"the records between offsets {start} and {end}"
