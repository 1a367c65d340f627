"""What following costs those who do not: patterns and names are compared and handed over where nobody waits."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from millstream._engine import Engine
from unit.control.test_manager import (
    BASE,
    FaultyEngine,
    eventually,
    is_unavailable,
    pull,
    run,
    running,
)

# The longest path with the most segments.
DEEP = "a/" * 510


def shortest_create_s(engine: Engine, prefix: str) -> float:
    """Of several, so that a busy machine does not count."""
    took = []
    for number in range(8):
        before = time.perf_counter()
        engine.create(f"{prefix}{number}", "text/plain")
        took.append(time.perf_counter() - before)
    return min(took)


def test_creating_a_stream_does_not_wait_for_patterns_to_be_compared(engine: Engine) -> None:
    async def work() -> None:
        engine.create("wake/pool", "application/json")
        async with running(engine) as manager:
            await manager.create("near", pull(pattern="no/such"), BASE)
            alone = shortest_create_s(engine, DEEP + "x")
            for number in range(200):
                pattern = "**/" + "a/" * 61 + f"*/{'a' * (1 + number % 2)}z{number}"
                await manager.create(f"s{number}", pull(pattern=pattern), BASE)
            assert shortest_create_s(engine, DEEP + "y") < 10 * max(alone, 0.001)

    run(work())


def test_the_control_loop_does_not_compare(engine: Engine) -> None:
    """In time that its thread computes: a busy machine does not count."""

    async def work() -> None:
        engine.create("wake/pool", "application/json")
        path = DEEP + "a"
        engine.create(path, "text/plain")
        async with running(engine) as manager:
            for number in range(30):
                choose = random.Random(number).choice
                wild = "/".join(choose(["*", "**"]) for _ in range(62))
                await manager.create(f"s{number}", pull(pattern=f"{wild}/z{number}"), BASE)
            subscription, _ = await manager.create("all", pull(pattern="**/a"), BASE)
            engine.append(path, b"x")
            before = time.thread_time()

            async def seen() -> bool:
                return path in subscription.pending

            await eventually(seen)
            assert time.thread_time() - before < 0.2

    run(work())


class CountingEngine:
    """A real engine that counts what is handed to it to watch."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.handed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def watch(self, *lists: list[str]) -> None:
        self.handed += sum(map(len, lists))
        self._engine.watch(*lists)

    def unwatch(self, *lists: list[str]) -> None:
        self.handed += sum(map(len, lists))
        self._engine.unwatch(*lists)


def test_only_what_changed_is_handed_to_the_engine(engine: Engine) -> None:
    async def work() -> None:
        engine.create("wake/pool", "application/json")
        counting = CountingEngine(engine)
        names = tuple(f"named/{number}" for number in range(3000))
        async with running(counting) as manager:
            await manager.create("many", pull(pattern=None, streams=names), BASE)
            before = counting.handed
            for number in range(10):
                await manager.create(f"s{number}", pull(pattern=f"events/{number}"), BASE)
            await manager.add_streams("many", ["one/more", "named/7"])
            await manager.remove_stream("many", "one/more")
            await manager.delete("s0")
            assert counting.handed - before < 50
        again = CountingEngine(engine)
        async with running(again):
            # And one that history names and nobody follows any more.
            assert again.handed == 3000 + 9 + 1

    run(work())


def test_what_nobody_follows_any_more_is_watched_no_longer(engine: Engine) -> None:
    async def work() -> None:
        engine.create("wake/pool", "application/json")
        paths = ["events/a", "x", "y", "events/*"]
        async with running(engine) as manager:
            await manager.create("s", pull(streams=("x", "y", "events/*")), BASE)
            await manager.create("t", pull(streams=("x",)), BASE)
            assert engine.globs_of(paths) == [["events/*"], [], [], ["events/*"]]
            await manager.remove_stream("s", "y")
            assert engine.globs_of(paths) == [["events/*"], [], None, ["events/*"]]
            await manager.delete("s")
            assert engine.globs_of(paths) == [["events/*"], [], None, ["events/*"]]
            await manager.delete("t")
            assert engine.globs_of(paths) == [None, None, None, None]

    run(work())


def test_what_could_not_be_kept_is_watched_no_longer(engine: Engine) -> None:
    async def work() -> None:
        engine.create("wake/pool", "application/json")
        faulty = FaultyEngine(engine)
        async with running(faulty) as manager:
            await manager.create("s", pull(streams=("x",)), BASE)
            faulty.broken = True
            made = manager.create("t", pull(pattern="y/*", streams=("z",)), BASE)
            assert await asyncio.gather(made, return_exceptions=True)
            faulty.broken = False

            async def settled() -> bool:
                watched = engine.globs_of(["events/a", "x", "y/a", "z"])
                return watched == [["events/*"], [], None, None]

            await eventually(settled)

            async def healed() -> bool:
                return not await is_unavailable(manager)

            await eventually(healed)

    run(work())
