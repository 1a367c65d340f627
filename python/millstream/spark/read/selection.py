"""Which streams are read, and where `/v1/tails` finds the places that people and limits ask for.

Where it sits: between the readers on the driver and the client. All look-ups of a step go in as few
requests as the server's bounds allow.

Invariants:
- I-PLC-1  What is known already (first, tail) is not asked again.
- I-PLC-2  A place is looked up in the incarnation that the caller means, or not at all.
- I-PLC-3  Closed streams that were read to their end count in no bound but that of the walk: their entries stay in the checkpoint,
           so that they are never read again, and another stream of the name is.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from millstream.client.pipeline_read import NAMES_PER_REQUEST
from millstream.client.ranges import Place
from millstream.errors import MillstreamError, OptionInvalid, ServerError, StreamNotFound
from millstream.spark.read.offsets import Bound, Position

if TYPE_CHECKING:
    from millstream.client.pipeline_read import FoundPlace, StreamEnd, StreamTail, Tails
    from millstream.client.sync.reads import PipelineReads
    from millstream.spark.options import Options
    from millstream.spark.read.data_loss import Losses
    from millstream.spark.read.offsets import Entry

TOO_MANY: Final = "too_many_streams"
STREAMS_MAX: Final = 20_000
"""The server's bound on the streams of one request, and of a query on those that are open or unread."""
WALKED_MAX: Final = 100_000
"""How many streams a query may have together with those that are closed and read to their end."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The streams of a read: by name, or by a pattern."""

    names: tuple[str, ...] = ()
    pattern: str | None = None

    def ask(
        self,
        reads: PipelineReads,
        cursor: str | None = None,
        wait_ms: int = 0,
        *,
        walk: bool = False,
    ) -> Tails:
        """The tails; with `walk` also those of more streams than one answer has."""
        try:
            if self.pattern is None:
                return reads.tails(streams=self.names, cursor=cursor, wait_ms=wait_ms)
            try:
                return reads.tails(pattern=self.pattern, cursor=cursor, wait_ms=wait_ms)
            except ServerError as error:
                if not walk or error.code != TOO_MANY:
                    raise
            return self._walked(reads)
        except ServerError as error:
            raise self.explained(error) from None

    def _walked(self, reads: PipelineReads) -> Tails:
        """All streams of the pattern, page by page. With the cursor of the first page, what changes meanwhile is told again."""
        first = page = reads.tails(pattern=self.pattern, after="")
        streams = list(first.streams)
        while page.next is not None:
            if len(streams) > WALKED_MAX:
                raise self.too_many(WALKED_MAX)
            page = reads.tails(pattern=self.pattern, after=page.next)
            streams += page.streams
        return replace(first, streams=tuple(streams), next=None)

    def check_bound(self, tails: Mapping[str, StreamTail], entries: Mapping[str, Entry]) -> None:
        """A query has a bound on its streams, but closed ones that were read to their end are none of them."""
        if len(tails) <= STREAMS_MAX:
            return
        left = sum(not finished(tail, entries.get(name)) for name, tail in tails.items())
        if left > STREAMS_MAX:
            raise self.too_many(STREAMS_MAX)

    def too_many(self, most: int) -> OptionInvalid:
        what = "open or unread streams" if most == STREAMS_MAX else "streams, closed ones included"
        return OptionInvalid(
            f"`{self.pattern or 'subscribe'}` is more than {most:,} {what}",
            hint="run several queries, each with a pattern for a part of the names "
            "(for example by prefix), each with its own checkpoint",
            code=TOO_MANY,
        )

    def chooser(self) -> Callable[[str], bool]:
        """Tells whether a stream of some name would be read; in doubt it would, so that its loss is told.

        Only for streams that are gone: of the others the server says it. Where its patterns and those of
        Python mean different things, Python warns.
        """
        if self.pattern is None:
            return frozenset(self.names).__contains__
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                pattern = re.compile(self.pattern)
        except (re.error, Warning, RecursionError):
            return lambda _: True
        return lambda name: pattern.fullmatch(name) is not None

    def explained(self, error: ServerError) -> MillstreamError:
        """The server's refusal in the words of the options."""
        if error.code == TOO_MANY:
            return self.too_many(STREAMS_MAX)
        if error.status == 400 and self.pattern is not None:
            return OptionInvalid(
                f"option `subscribePattern` is `{self.pattern}`: {error.message}",
                hint="a regular expression for whole names, without look-around",
            )
        return error

    def all_there(self, tails: Tails) -> dict[str, StreamTail]:
        """The streams by name; one that was named and is missing is an error."""
        if self.pattern is None and tails.missing:
            listed = ", ".join(f"`{name}`" for name in tails.missing[:5])
            more = f" and {len(tails.missing) - 5} more" if len(tails.missing) > 5 else ""
            one = len(tails.missing) == 1
            raise StreamNotFound(
                f"stream{'' if one else 's'} {listed}{more} {'does' if one else 'do'} not exist",
                hint="create it first, or check the name with `millstream stream list`; "
                "`subscribePattern` waits for streams that come later",
            )
        return {stream.name: stream for stream in tails.streams}


def selection(options: Options) -> Selection:
    by_name, by_pattern = options.given("subscribe"), options.given("subscribePattern")
    if by_name == by_pattern:
        said = "both `subscribe` and `subscribePattern` are" if by_name else "no stream is"
        raise OptionInvalid(
            f"{said} given", hint="give one of `subscribe` (names) and `subscribePattern`"
        )
    if by_pattern:
        return Selection(pattern=options.text("subscribePattern"))
    names = [name.strip().removeprefix("/") for name in options.text("subscribe").split(",")]
    names = [name for name in dict.fromkeys(names) if name]
    if not names:
        raise OptionInvalid("option `subscribe` names no stream", hint="separate names by commas")
    if len(names) > STREAMS_MAX:
        raise OptionInvalid(
            f"option `subscribe` names more than {STREAMS_MAX:,} streams",
            hint="run several queries, each with its own checkpoint",
            code=TOO_MANY,
        )
    return Selection(names=tuple(names))


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one incarnation of a stream."""

    there: bool
    replaced: bool = False
    """Another stream has its name now."""
    end: StreamEnd | None = None
    """Where it ended; None if it is there, or if the server does not remember it."""


def fates(reads: PipelineReads, wanted: Mapping[str, str]) -> dict[str, Fate]:
    """Ask what became of streams, by name and incarnation."""
    found: dict[str, Fate] = {}
    names = list(wanted)
    for begin in range(0, len(names), NAMES_PER_REQUEST):
        part = names[begin : begin + NAMES_PER_REQUEST]
        answer = reads.tails(streams=[{"name": n, "incarnation": wanted[n]} for n in part])
        there = {stream.name: stream.incarnation for stream in answer.streams}
        ends = {(end.name, end.incarnation): end for end in answer.removed}
        for name in part:
            alive = there.get(name) == wanted[name]
            replaced = name in there and not alive
            found[name] = Fate(alive, replaced, ends.get((name, wanted[name])))
    return found


def finished(tail: StreamTail, entry: Entry | None) -> bool:
    """Whether a stream will never have another record for a reader that is at `entry`."""
    if not tail.closed:
        return False
    if entry is None or entry["id"] != tail.incarnation:
        return tail.tail_number == tail.first_number
    return entry["n"] >= tail.tail_number


def known(position: Position, stream: StreamTail) -> Place | None:
    """The place of a position, if it needs no look-up."""
    if position.kind == "earliest":
        return Place(stream.first_offset, stream.first_number)
    tail = Place(stream.tail_offset, stream.tail_number)
    if position.kind == "latest":
        return tail
    if position.kind == "number" and position.number == stream.tail_number:
        return tail
    if position.kind == "number" and position.number == stream.first_number:
        return Place(stream.first_offset, stream.first_number)
    return None


def question(position: Position) -> dict[str, Any]:
    if position.kind == "offset":
        return {"offset": position.offset}
    return {position.kind: position.number}


class Locator:
    """Turns bounds of the options into places."""

    def __init__(self, reads: PipelineReads, losses: Losses) -> None:
        self._reads = reads
        self._losses = losses

    def starts(self, bound: Bound, streams: Mapping[str, StreamTail]) -> dict[str, Place]:
        """Where reading begins. A record that is not there yet is an error, a lost one is loss."""
        places = self._places(bound, streams)
        for name, place in places.items():
            position = bound.of(name)
            if position.kind != "number":
                continue
            stream = streams[name]
            if position.number > stream.tail_number:
                raise OptionInvalid(
                    f"option `{bound.option}` begins with record {position.number} of stream "
                    f"`{name}`, which has {stream.tail_number}",
                    hint="use `latest` for what comes next",
                )
            if place.number > position.number:
                self._losses.found_before(name, position.number, place.number)
        return places

    def ends(self, bound: Bound, streams: Mapping[str, StreamTail]) -> dict[str, Place]:
        """Where reading ends now: the bound, or the tail where that is nearer."""
        nearer: dict[str, StreamTail] = {}
        places: dict[str, Place] = {}
        for name, stream in streams.items():
            position = bound.of(name)
            beyond = (
                position.kind == "latest"
                or (position.kind == "number" and position.number >= stream.tail_number)
                or (position.kind == "time_ms" and (stream.time_ms or 0) < position.number)
            )
            if beyond:
                places[name] = Place(stream.tail_offset, stream.tail_number)
            else:
                nearer[name] = stream
        places.update(self._places(bound, nearer))
        return places

    def _places(self, bound: Bound, streams: Mapping[str, StreamTail]) -> dict[str, Place]:
        places: dict[str, Place] = {}
        wanted: dict[str, list[dict[str, Any]]] = {}
        for name, stream in streams.items():
            position = bound.of(name)
            place = known(position, stream)
            if place is None:
                wanted[name] = [question(position)]
            else:
                places[name] = place
        for name, answer in self._reads.look_up(wanted).items():
            places[name] = self._accepted(bound, streams[name], answer)
        for name in wanted:
            if name not in places:
                raise StreamNotFound(f"stream `{name}` was deleted just now", hint="start again")
        return places

    def _accepted(self, bound: Bound, before: StreamTail, answer: StreamTail) -> Place:
        found: FoundPlace = answer.at[0]
        if answer.incarnation != before.incarnation:
            raise StreamNotFound(
                f"stream `{answer.name}` was deleted and created again just now", hint="start again"
            )
        if found.error is not None:
            raise OptionInvalid(
                f"option `{bound.option}`: stream `{answer.name}` does not have this offset "
                f"({found.error})",
                hint="`earliest`, a record number or a time always work",
            )
        if found.gap is not None:
            self._losses.gap(answer.name, found.gap)
        return Place(found.offset, found.number)
