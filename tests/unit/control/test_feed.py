"""The change feed: streams that many follow are dealt with in turns, behind those that few follow."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, cast

from millstream.control.limits import FEED_ROUND_LINKS, FEED_WAITING_MAX
from millstream.control.subscriptions.feed import Feed, Scope
from millstream.control.subscriptions.machine import Change

DEADLINE_S = 10.0
HEAVY = [f"heavy/{number}" for number in range(40)]


class Changes:
    """An engine that only gives out changes: what is in `rounds`, one at a time."""

    def __init__(self, *rounds: list[str]) -> None:
        self.rounds = list(rounds)

    def take_dirty(self, _timeout_ms: int) -> tuple[list[tuple[str, list[str]]], bool]:
        taken = self.rounds.pop(0) if self.rounds else []
        return [(path, []) for path in taken], False

    def tail(self, path: str) -> str:
        return path

    def list(self, *_: object) -> tuple[list[object], None]:
        return [], None


def fed(engine: Changes, count: int, claimed: str | None = None) -> tuple[list[list[str]], int]:
    """What is delivered together, of so many streams in all; and how many were when a claim had its answer."""
    batches: list[list[str]] = []
    told = 0

    async def work() -> None:
        nonlocal told
        begun, done = asyncio.Event(), asyncio.Event()

        async def deliver(changes: list[Change]) -> None:
            if changes:
                batches.append([path for path, _, _ in changes])
                begun.set()
            await asyncio.sleep(0)
            if sum(map(len, batches)) >= count:
                done.set()

        def weigh(path: str, patterns: Collection[str]) -> int:
            return FEED_ROUND_LINKS // 2 if path.startswith("heavy") else 1

        feed = Feed(cast(Any, engine), deliver, lambda: Scope([], []), weigh)
        feed.start()
        async with asyncio.timeout(DEADLINE_S):
            await begun.wait()
            await feed.settle(lambda: False, lambda waiting: claimed in waiting)
            told = sum(map(len, batches))
            await done.wait()
        feed.stop()
        await asyncio.sleep(0.1)

    asyncio.run(work())
    return batches, told


def test_what_few_follow_does_not_wait_for_what_many_follow() -> None:
    lights = [[f"light/{number}"] for number in range(5)]
    batches, _ = fed(Changes(HEAVY, *lights), len(HEAVY) + len(lights))
    assert max(map(len, batches)) == 2
    for light in lights:
        assert batches.index(light) < 2 + 2 * len(lights)
    order = [path for batch in batches for path in batch if path.startswith("heavy")]
    assert order == HEAVY


def test_a_claim_waits_only_for_what_concerns_it() -> None:
    _, told = fed(Changes(HEAVY), len(HEAVY), claimed="other")
    assert told < 10
    _, told = fed(Changes(HEAVY), len(HEAVY), claimed=HEAVY[30])
    assert 30 < told < 40


def test_a_stream_that_changes_again_keeps_its_place() -> None:
    batches, _ = fed(Changes(HEAVY, [HEAVY[-1], HEAVY[0]]), len(HEAVY) + 1)
    order = [path for batch in batches for path in batch]
    assert order == [*HEAVY, HEAVY[0]]


def test_more_is_taken_only_while_little_waits() -> None:
    many = [f"heavy/{number}" for number in range(FEED_WAITING_MAX + 10)]
    engine = Changes(many, ["light"])
    batches, _ = fed(engine, 30, claimed="other")
    assert ["light"] not in batches[:5]
