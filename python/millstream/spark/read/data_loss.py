"""Records that are gone: what counts as loss, how it is told, and whether the query goes on.

Where it sits: asked by the planner for streams whose identity or history changed, and by tasks for what
the server reports while they read.

    another incarnation                        loss: it is another stream, whatever was read of the old one
    stream gone, read to its end               none: it is dropped from the checkpoint in silence
    stream gone, otherwise                     loss
    stream not chosen any more                 none: its place stays for when it is chosen again
    checkpoint beyond the end of its epoch     loss: the server lost records that were read
    certain gap behind the checkpoint          loss
    possible gap (`certain` false)             a warning: nothing is known to be lost

Where a removed stream ended is known to the server, for some time; behind that, the last tail that this
process has seen must do.

Invariants:
- I-LOS-1  `failOnDataLoss=true` ends in `DataLoss` with stream, range, reason and a way out.
- I-LOS-2  `failOnDataLoss=false` goes on, and says so once per loss; never silently.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from millstream.errors import DataLoss
from millstream.spark.read.offsets import epoch_of
from millstream.types import Gap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millstream.client.pipeline_read import StreamEnd
    from millstream.spark.read.offsets import Entry

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

    def possible(self, stream: str, gap: Gap) -> None:
        """A gap that may have held nothing."""
        LOGGER.warning(
            "stream `%s`: records between %s and %s may be missing: %s",
            stream, gap.from_offset, gap.to_offset, REASONS.get(gap.reason, gap.reason),
        )  # fmt: skip

    def gap(self, stream: str, gap: Gap) -> None:
        """A gap that the server reports where the query reads on."""
        if not gap.certain:
            self.possible(stream, gap)
            return
        self.found(
            Loss(stream, span(gap.from_offset, gap.to_offset), REASONS.get(gap.reason, gap.reason))
        )

    def short(self, streams: Sequence[str], missing: int, expected: int, *, told: bool) -> None:
        """Fewer records came than there were when the batch was planned."""
        del told  # a gap that is not certain has warned, and was no loss yet
        self.found(
            Loss(
                "`, `".join(streams[:5]),
                f"{missing} of the {expected} records that were planned",
                "they were there when the batch was planned, and are gone now",
            )
        )

    def found_before(self, stream: str, asked: int, first: int) -> None:
        """The first record asked for is no longer there."""
        self.found(Loss(stream, records(asked, first), REASONS["retention"]))

    def recreated(self, stream: str, first: int, behind: int | None) -> None:
        """Another stream has the name now. The old one had records up to `behind`; None: not known."""
        if behind is None:
            what = f"everything from record {first} of the stream that the checkpoint knows"
        elif behind > first:
            what = f"{records(first, behind)} of the stream that the checkpoint knows"
        else:
            what = f"everything from record {first}, where the stream of the checkpoint ended,"
        self.found(Loss(stream, what, "it was deleted, and another stream has its name now"))

    def gone(self, stream: str, entry: Entry, end: StreamEnd | None, seen: int | None) -> None:
        """A stream vanished. `end` is where it ended, `seen` the last tail that was seen; None: not known."""
        first = entry["n"]
        if end is not None:
            self._ended(stream, entry, end)
        elif seen is not None:
            self.unread(stream, first, seen)
        else:
            self.found(
                Loss(
                    stream,
                    f"whatever came after record {first}",
                    "it was deleted or has expired, and it is not known where it ended",
                )
            )

    def _ended(self, stream: str, entry: Entry, end: StreamEnd) -> None:
        at, first, behind = entry["at"], entry["n"], end.tail_number
        if behind > first:
            self.unread(stream, first, behind)
        elif not read_to_end(entry, end):
            # As many records or fewer, and others: a crash had taken some that were read.
            self.found(
                Loss(
                    stream,
                    f"the checkpoint is at record {first} (offset {at}), but the stream was cut back "
                    f"and ended at record {behind}; what took the place of its last records",
                    "it was deleted or has expired since",
                )
            )
        elif epoch_of(at) != epoch_of(end.tail_offset):
            self.possible(stream, Gap(at, end.tail_offset, "crash", certain=False))

    def unread(self, stream: str, first: int, behind: int) -> None:
        """A stream is gone that had records up to `behind`, of which `first` is the next to be read."""
        if behind > first:
            reason = "it was deleted or has expired before they were read"
            self.found(Loss(stream, records(first, behind), reason))


def read_to_end(entry: Entry, end: StreamEnd) -> bool:
    """Whether nothing of a removed stream is behind the checkpoint, nor took the place of what was read."""
    return end.tail_number == entry["n"] and int(epoch_of(entry["at"])) >= end.epoch


def records(first: int, behind: int) -> str:
    return f"records {first} to {behind - 1}"


def span(start: str, end: str) -> str:
    return f"the records between offsets {start} and {end}"
