"""The durable history of subscriptions: events in a reserved fsync-class JSON stream of the engine.

Sits between `manager` and the engine. Blocking: call it from a worker thread, one call at a time.

Streams: `__ds/state/keys` has one record; `__ds/state/subscriptions/{number:016d}` is the history. A rewrite
starts the stream with the next number with the shortest history of the present state, then deletes the old one. It may
take many calls, between which the old one goes on.
Record: `{"v": 1, "more": false, "events": [...]}`. Records with `more` are parts of one transaction, whose
last part has `more` false. Invariants: a transaction is seen whole or not at all; the stream with the
highest number that holds its whole opening transaction is the truth, every other one is a leftover. Bytes that are
damaged for good are told in the log, and what still holds without them is kept; a file that is missing ends the start.
"""

from __future__ import annotations

import contextlib
import json
import logging
from typing import TYPE_CHECKING, Any, Final, Protocol

from millstream._engine import EngineError
from millstream.control.limits import (
    JOURNAL_RECORD_BYTES_MAX,
    JOURNAL_REWRITE_BYTES_MIN,
    JOURNAL_REWRITE_FACTOR,
)
from millstream.control.subscriptions import events as e
from millstream.control.subscriptions.keys import Keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

KEYS_PATH: Final = "__ds/state/keys"
HISTORY_PREFIX: Final = "__ds/state/subscriptions/"
_VERSION: Final = 1
_GAP: Final = object()  # in the place of records that are lost

log = logging.getLogger(__name__)


class JournalDamaged(Exception):  # noqa: N818
    """The reserved streams hold something this version cannot read."""


class StateStreams(Protocol):
    """The part of the engine that the journal stands on."""

    def create(self, path: str, content_type: str = ..., durability: str | None = ...) -> bool: ...
    def append(self, path: str, data: bytes) -> str: ...
    def read(
        self, path: str, offset: str = ..., max_bytes: int = ...
    ) -> tuple[bytes, str, bool, bool, tuple[str, str, str, bool] | None]: ...
    def tail(self, path: str) -> str | None: ...
    def damaged(self, path: str) -> bool: ...
    def delete(self, path: str) -> bool: ...
    def list(self, prefix: str = ..., after: str = ..., limit: int = ...) -> Any: ...


class Journal:
    def __init__(self, engine: StateStreams, progress: Callable[[], None] = lambda: None) -> None:
        """`progress` is called for each piece that is read."""
        self._engine = engine
        self._progress = progress
        self._number = 0
        self._bytes = 0
        self._snapshot_bytes = 0
        self._rewritten_bytes = 0

    def load_keys(self) -> Keys:
        """The server's keys, made and kept at the first start."""
        self._engine.create(KEYS_PATH, "application/json", "fsync")
        records = list(self._records(KEYS_PATH))
        if _GAP in records:
            self._engine.delete(KEYS_PATH)
            return self.load_keys()
        if not records:
            keys = Keys.generate()
            self._engine.append(KEYS_PATH, _dump(keys.to_record()))
            return keys
        try:
            return Keys.from_record(records[-1])
        except (KeyError, TypeError, ValueError) as error:
            raise JournalDamaged(f"stream {KEYS_PATH} does not hold a usable key") from error

    def load(self) -> list[e.Event]:
        """All events of the current history, oldest first; leftovers of a broken rewrite are removed."""
        numbers = self._numbers()
        events: list[e.Event] | None = None
        for number in reversed(numbers):
            events = self._load_one(number, is_oldest=number == numbers[0])
            if events is not None:
                self._number = number
                break
        for number in numbers:
            if events is None or number != self._number:
                with contextlib.suppress(EngineError):  # the next start, or rewrite, finds it again
                    self._engine.delete(_path(number))
        if events is None:
            self.rewrite([])
            return []
        return events

    def append(self, transactions: Iterable[list[e.Event]]) -> None:
        """Adds whole transactions, in order, and returns when they are synced."""
        records = [part for transaction in transactions for part in _parts(transaction)]
        for chunk in _chunks(records):
            self._engine.append(_path(self._number), chunk)
            self._bytes += len(chunk)

    def needs_rewrite(self) -> bool:
        return self._bytes > max(
            JOURNAL_REWRITE_BYTES_MIN, JOURNAL_REWRITE_FACTOR * self._snapshot_bytes
        )

    def rewrite(self, history: list[e.Event]) -> None:
        """Starts the next stream with `history`, which stands for everything so far."""
        self.begin_rewrite()
        self.extend_rewrite(history, ends=True)

    def begin_rewrite(self) -> None:
        path = _path(self._number + 1)
        self._engine.delete(path)  # a rewrite that failed before left a part of itself
        self._engine.create(path, "application/json", "fsync")
        self._rewritten_bytes = 0

    def extend_rewrite(self, history: list[e.Event], *, ends: bool) -> None:
        """Adds a part to the next stream's opening. Behind the last one it counts, and the one before goes."""
        number = self._number + 1
        for chunk in _chunks(list(_parts(history, ends=ends))):
            self._engine.append(_path(number), chunk)
            self._rewritten_bytes += len(chunk)
        if ends:
            previous, self._number = self._number, number
            self._bytes = self._snapshot_bytes = self._rewritten_bytes
            self._engine.delete(_path(previous))

    def _numbers(self) -> list[int]:
        numbers: list[int] = []
        after: str | None = ""
        while after is not None:
            page, after = self._engine.list(HISTORY_PREFIX, after, 1000)
            numbers += [int(entry["path"].removeprefix(HISTORY_PREFIX)) for entry in page]
        return sorted(numbers)

    def _load_one(self, number: int, *, is_oldest: bool) -> list[e.Event] | None:
        """The events of one stream, or None if its opening transaction is not whole. The oldest stream is no rewrite
        that broke off: if parts of its opening are lost, the others count."""
        histories: list[list[e.Event]] = [[]]  # with a gap between any two
        open_parts: list[e.Event] = []
        opened = False
        opening = 0
        self._bytes = 0
        for record in self._records(_path(number)):
            if record is _GAP:
                if not opened and is_oldest:
                    histories[-1] += open_parts
                    opened = True
                open_parts = []
                histories.append([])
                continue
            try:
                if record["v"] != _VERSION:
                    raise ValueError(f"version {record['v']}")
                open_parts += [e.decode(row) for row in record["events"]]
                if record["more"]:
                    continue
            except (KeyError, TypeError, ValueError) as error:
                raise JournalDamaged(f"stream {_path(number)}: {error}") from error
            histories[-1] += open_parts
            open_parts = []
            if not opened:
                opened = True
                opening = len(histories[-1])
        events = list(_without_gaps(histories))
        # What the opening took is not measured, but its share of the events is known.
        self._snapshot_bytes = self._bytes * opening // max(len(events), 1)
        if (open_parts or len(histories) > 1) and opened:
            # A crash cut the last transaction. Closing it would join it to the next one: start afresh. So does a gap.
            self._bytes = max(self._bytes, JOURNAL_REWRITE_BYTES_MIN + 1)
            self._snapshot_bytes = 0
        return events if opened else None

    def _records(self, path: str) -> Iterator[Any]:
        offset = "-1"
        while True:
            body, offset, up_to_date, _, gap = self._engine.read(path, offset)
            self._progress()
            if gap is not None and gap[3]:
                lack = f"stream {path} lacks {gap[0]} to {gap[1]} ({gap[2]})"
                if not self._engine.damaged(path):
                    raise JournalDamaged(lack)
                log.error("subscriptions: %s: what was kept there is lost", lack)
                yield _GAP
            self._bytes += len(body)
            try:
                yield from json.loads(body)
            except ValueError as error:
                raise JournalDamaged(
                    f"stream {path} does not hold a JSON array: {error}"
                ) from error
            if up_to_date:
                return


def lasting(events: list[e.Event]) -> list[e.Event]:
    """Without what is about subscriptions that were deleted later."""
    ends = {event.id: number for number, event in enumerate(events) if isinstance(event, e.Deleted)}
    return [event for number, event in enumerate(events) if number > ends.get(event.id, -1)]


def _without_gaps(parts: list[list[e.Event]]) -> Iterator[e.Event]:
    """What still holds of a history of which something is lost between the parts: a subscription from before a gap is
    as it was there, but for new links and its end; one made behind the gap is whole."""
    yield from parts[0]
    alive: set[str] = set()
    _follow(alive, parts[0])
    for part in parts[1:]:
        whole: set[str] = set()
        for event in part:
            if isinstance(event, e.Created) and event.id in alive:
                yield e.Deleted(event.id)
            known = alive if isinstance(event, e.Linked | e.Deleted) else whole
            if isinstance(event, e.Created) or event.id in known:
                yield event
            _follow(whole, [event])
            _follow(alive, [event])


def _follow(ids: set[str], events: list[e.Event]) -> None:
    """Which subscriptions there are behind these events."""
    for event in events:
        if isinstance(event, e.Created):
            ids.add(event.id)
        elif isinstance(event, e.Deleted):
            ids.discard(event.id)


def _path(number: int) -> str:
    return f"{HISTORY_PREFIX}{number:016d}"


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def _record(events: list[bytes], more: bool) -> bytes:
    flag = b"true" if more else b"false"
    return b'{"v":%d,"more":%s,"events":[%s]}' % (_VERSION, flag, b",".join(events))


def _parts(transaction: list[e.Event], *, ends: bool = True) -> Iterator[bytes]:
    """One transaction as records of bounded size, the last one closing it if it ends there."""
    rows: list[bytes] = []
    size = 0
    for event in transaction:
        row = _dump(e.encode(event))
        if rows and size + len(row) > JOURNAL_RECORD_BYTES_MAX:
            yield _record(rows, more=True)
            rows, size = [], 0
        rows.append(row)
        size += len(row)
    yield _record(rows, more=not ends)


def _chunks(records: list[bytes]) -> Iterator[bytes]:
    """JSON arrays of whole records, each small enough for one append."""
    chunk: list[bytes] = []
    size = 0
    for record in records:
        if chunk and size + len(record) > JOURNAL_RECORD_BYTES_MAX:
            yield b"[" + b",".join(chunk) + b"]"
            chunk, size = [], 0
        chunk.append(record)
        size += len(record)
    if chunk:
        yield b"[" + b",".join(chunk) + b"]"
