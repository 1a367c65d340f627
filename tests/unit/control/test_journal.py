"""The journal on a real engine: nothing lost, nothing half, nothing twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from millstream._engine import Engine
from millstream.control import limits
from millstream.control.subscriptions import events as e
from millstream.control.subscriptions import journal as module
from millstream.control.subscriptions.journal import (
    HISTORY_PREFIX,
    KEYS_PATH,
    Journal,
    JournalDamaged,
)


def acked(number: int) -> e.Event:
    return e.Acked("s", (("events/a", f"{number:016d}_{number:016d}"),))


def history_streams(engine: Engine) -> list[str]:
    return [entry["path"] for entry in engine.list(HISTORY_PREFIX)[0]]


def opened(engine: Engine) -> Journal:
    journal = Journal(engine)
    journal.load()
    return journal


def test_events_come_back_in_order_and_equal(open_engine: Callable[[], Engine]) -> None:
    written: list[e.Event] = [
        e.Created("s", "u", {"streams": ["x"], "pattern": None}, "http://h", 5),
        e.Linked("s", (("x", "-1", True), ("é/\u2603", "-1", False))),
        e.Woke("s", "w_1", 1, "x", (("x", "0000000000000001_0000000000000002"),)),
        e.SendFailed("s", "w_1", 1, 99, 'quo"te'),
        e.Sent("s", "w_1", None),
    ]
    journal = opened(open_engine())
    journal.append([[event] for event in written])
    assert Journal(open_engine()).load() == written


def test_a_rewrite_replaces_history_and_the_tail_follows_it(engine: Engine) -> None:
    journal = opened(engine)
    journal.append([[acked(n)] for n in range(10)])
    journal.rewrite([acked(100)])
    journal.append([[acked(101)]])
    assert Journal(engine).load() == [acked(100), acked(101)]
    assert len(history_streams(engine)) == 1


def test_a_rewrite_is_wanted_only_when_most_is_history(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "JOURNAL_REWRITE_BYTES_MIN", 1000)
    journal = opened(engine)
    while not journal.needs_rewrite():
        journal.append([[acked(1)]])
    journal.rewrite([acked(n) for n in range(50)])
    assert not journal.needs_rewrite()
    journal.append([[acked(n) for n in range(50)]])
    assert not Journal(engine).needs_rewrite()
    again = opened(engine)
    for _ in range(4):
        again.append([[acked(n) for n in range(50)]])
    assert again.needs_rewrite()


def test_a_long_transaction_is_written_in_parts_and_read_as_one(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "JOURNAL_RECORD_BYTES_MAX", 300)
    transaction = [acked(n) for n in range(50)]
    opened(engine).append([transaction])
    body, *_ = engine.read(history_streams(engine)[0])
    records = json.loads(body)[1:]
    assert len(records) > 5
    assert [record["more"] for record in records] == [True] * (len(records) - 1) + [False]
    assert Journal(engine).load() == transaction


class Failing:
    """The engine, until the given append: that one and all later ones fail as on a full disk."""

    def __init__(self, engine: Engine, appends: int) -> None:
        self._engine = engine
        self._left = appends

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def append(self, path: str, data: bytes) -> str:
        self._left -= 1
        if self._left < 0:
            raise OSError("no room")
        return self._engine.append(path, data)


@pytest.mark.parametrize("appends", range(1, 8))
def test_a_transaction_that_was_cut_is_gone_and_does_not_leak_into_the_next(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, appends: int
) -> None:
    monkeypatch.setattr(module, "JOURNAL_RECORD_BYTES_MAX", 300)
    opened(engine).append([[acked(1)]])
    failing = Journal(Failing(engine, appends))
    failing.load()
    with pytest.raises(OSError, match="no room"):
        failing.append([[acked(n) for n in range(2, 200)]])
    journal = Journal(engine)
    assert journal.load() == [acked(1)]
    assert journal.needs_rewrite()
    journal.rewrite([acked(1), acked(500)])
    journal.append([[acked(501)]])
    assert Journal(engine).load() == [acked(1), acked(500), acked(501)]


@pytest.mark.parametrize("appends", range(8))
def test_a_rewrite_that_was_cut_leaves_the_old_history(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, appends: int
) -> None:
    monkeypatch.setattr(module, "JOURNAL_RECORD_BYTES_MAX", 300)
    opened(engine).append([[acked(1)]])
    failing = Journal(Failing(engine, appends))
    failing.load()
    with pytest.raises(OSError, match="no room"):
        failing.rewrite([acked(n) for n in range(2, 200)])
    assert len(history_streams(engine)) == 2
    assert Journal(engine).load() == [acked(1)]
    assert len(history_streams(engine)) == 1


def test_keys_are_made_once(open_engine: Callable[[], Engine]) -> None:
    first = Journal(open_engine()).load_keys()
    assert Journal(open_engine()).load_keys().jwks() == first.jwks()


def test_reserved_streams_are_synced_and_not_listed(engine: Engine) -> None:
    journal = opened(engine)
    journal.load_keys()
    assert engine.list() == ([], None)
    entries, _ = engine.list("__ds/state/")
    assert {entry["path"] for entry in entries} == {KEYS_PATH, HISTORY_PREFIX + "0" * 15 + "1"}
    assert {entry["durability"] for entry in entries} == {"fsync"}


def test_what_holds_of_a_history_with_a_gap() -> None:
    """Whole subscriptions behind the gap; of earlier ones nothing that rests on what may be lost."""

    def created(name: str) -> e.Event:
        return e.Created(name, "u", {}, "http://x", 1)

    def linked(name: str) -> e.Event:
        return e.Linked(name, (("s", "1", True),))

    def rebased(name: str) -> e.Event:
        return e.Rebased(name, "http://y")

    before = [created("a"), rebased("a"), created("b"), created("again")]
    behind = [linked("a"), rebased("a"), rebased("lost"), linked("lost"), e.Deleted("lost")]
    behind += [e.Deleted("b"), linked("b"), created("again"), created("new"), rebased("new")]
    kept = [linked("a"), e.Deleted("b"), e.Deleted("again"), created("again")]
    kept += [created("new"), rebased("new")]
    assert list(module._without_gaps([before, behind])) == before + kept
    assert list(module._without_gaps([before, [], [rebased("a"), linked("a")]])) == [
        *before,
        linked("a"),
    ]
    assert list(module._without_gaps([behind])) == behind, "without a gap nothing is judged"


@pytest.mark.parametrize(
    "record",
    [b'{"v":2,"more":false,"events":[]}', b'{"v":1,"more":false,"events":[{"kind":"?"}]}', b"7"],
)
def test_a_history_from_elsewhere_is_refused_not_ignored(engine: Engine, record: bytes) -> None:
    opened(engine)
    engine.append(history_streams(engine)[0], record)
    with pytest.raises(JournalDamaged):
        Journal(engine).load()


def test_one_record_stays_below_one_read() -> None:
    assert limits.JOURNAL_RECORD_BYTES_MAX * 2 < 4 << 20
