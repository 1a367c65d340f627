"""The manager on a real engine: races with appends, and writes that fail."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from millstream._engine import Engine, EngineError
from millstream.control.http import ApiError
from millstream.control.limits import CLAIMS_MAX
from millstream.control.subscriptions import delivery
from millstream.control.subscriptions import journal as journal_module
from millstream.control.subscriptions import manager as manager_module
from millstream.control.subscriptions.address import Target
from millstream.control.subscriptions.journal import HISTORY_PREFIX
from millstream.control.subscriptions.machine import WakeRequest
from millstream.control.subscriptions.manager import SubscriptionManager
from millstream.control.subscriptions.model import Refused, Subscription
from unit.control.machine_support import at, config, whole

DEADLINE_S = 10.0
BASE = "http://127.0.0.1:1"
SUBSCRIBERS, STREAMS = 200, 200


class FaultyEngine:
    """A real engine whose history streams refuse appends while `broken` is set."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def append(self, path: str, data: bytes) -> str:
        if self.broken and path.startswith(HISTORY_PREFIX):
            raise EngineError("storage_full", "no room")
        return self._engine.append(path, data)


@asynccontextmanager
async def running(engine: Any) -> AsyncIterator[SubscriptionManager]:
    manager = SubscriptionManager(engine)
    await manager.start()
    try:
        yield manager
    finally:
        await manager.stop()


def acked(manager: SubscriptionManager, subscription: Subscription) -> dict[str, str]:
    return {link.path: link.acked for link in manager.links_of(subscription)}


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():  # noqa: ASYNC110 - the engine has no event for this
            await asyncio.sleep(0.01)


def run(work: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await work

    asyncio.run(bounded())


def pull(**changes: Any) -> Any:
    return config("pull-wake", **{"lease_ttl_ms": 60_000, **changes})


async def finish(manager: SubscriptionManager, name: str) -> None:
    subscription, token, views = await manager.claim(name, "worker")
    uid, generation = manager.open_token(token)
    wake = subscription.wake
    assert wake is not None
    acks = tuple((view.path, view.tail) for view in views if view.pending)
    request = WakeRequest(uid, generation, wake.wake_id, wake.generation, acks, done=True)
    await manager.acknowledge(name, "pull-wake", request)


def test_streams_made_while_a_subscription_is_made_are_not_missed(engine: Engine) -> None:
    """Whichever side of the creation a record falls on: it is before the start, or it is pending."""

    async def work() -> None:
        engine.create("wake/pool", "application/json")
        async with running(engine) as manager:
            names = [f"events/{n}" for n in range(300)]

            def make() -> None:
                for name in names:
                    engine.create(name, "text/plain")
                    engine.append(name, b"x")

            making = asyncio.get_running_loop().run_in_executor(None, make)
            await asyncio.sleep(0.002)
            await manager.create("s", pull(), BASE)
            await making

            async def all_linked() -> bool:
                return (await manager.get("s")).linked == len(names)

            await eventually(all_linked)
            subscription = await manager.get("s")
            for name in names:
                at_tail = acked(manager, subscription)[name] == engine.tail(name)
                assert at_tail or name in subscription.pending, name

    run(work())


def test_many_changes_for_many_subscriptions_leave_the_loop_to_others(engine: Engine) -> None:
    """Each new stream is a link of each subscription."""

    async def work() -> None:
        engine.create("wake/pool", "application/json")
        async with running(engine) as manager:
            manager._feed.stop()  # it would find that none of the streams is there
            machine = manager._machine
            for number in range(SUBSCRIBERS):
                whole(machine.create(f"s{number}", f"uid{number}", pull(), BASE, {}, 0))
            most, done = 0, asyncio.Event()

            async def tick() -> None:
                nonlocal most
                before = machine.state.links
                while not done.is_set():
                    await asyncio.sleep(0)
                    most = max(most, machine.state.links - before)
                    before = machine.state.links

            ticking = asyncio.create_task(tick())
            await asyncio.sleep(0)
            await manager._observe([(f"events/{n}", at(5), ["events/*"]) for n in range(STREAMS)])
            done.set()
            await ticking
            assert machine.state.links == SUBSCRIBERS * STREAMS
            for subscription in machine.state.subscriptions.values():
                assert subscription.wake is not None
                assert len(subscription.pending) == STREAMS
            # There are forty steps. Not by the clock: a collection of garbage falls into one of them.
            assert most <= SUBSCRIBERS * STREAMS / 20, f"{most} links at once"

    run(work())


def test_a_claim_right_after_an_append_finds_it(engine: Engine) -> None:
    async def work() -> None:
        engine.create("wake/pool", "application/json")
        async with running(engine) as manager:
            await manager.create("s", pull(), BASE)
            engine.create("events/a", "text/plain")
            for _ in range(30):
                engine.append("events/a", b"x")
                await finish(manager, "s")
            with pytest.raises(Refused) as caught:
                await manager.claim("s", "worker")
            assert caught.value.code == "NO_PENDING_WORK"

    run(work())


class BusyFeed:
    """A real engine that gives out no changes until it may."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.go_on = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def take_dirty(self, timeout_ms: int) -> Any:
        self.go_on.wait(DEADLINE_S)
        return self._engine.take_dirty(timeout_ms)


def test_claims_do_not_wait_for_ever_nor_in_any_number(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever keeps the feed busy: short calls have their places, and a claim its answer."""
    monkeypatch.setattr(manager_module, "CLAIM_SETTLES_S", 0.2)

    async def claim(manager: SubscriptionManager) -> str:
        try:
            await manager.claim("s", "worker")
        except Refused as refusal:
            return refusal.code
        except ApiError as refusal:
            return refusal.code
        return "claimed"

    async def work() -> None:
        engine.create("wake/pool", "application/json")
        engine.create("events/a", "text/plain")
        busy = BusyFeed(engine)
        async with running(busy) as manager:
            await manager.create("s", pull(), BASE)
            engine.append("events/a", b"x")
            asked = CLAIMS_MAX + 20
            answers = Counter(await asyncio.gather(*(claim(manager) for _ in range(asked))))
            assert answers == {"NO_PENDING_WORK": CLAIMS_MAX, "UNAVAILABLE": 20}
            busy.go_on.set()

            async def claimed() -> bool:
                return await claim(manager) == "claimed"

            await eventually(claimed)

    run(work())


class PausingEngine:
    """A real engine whose listings can be held back after they were made."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.hold = threading.Event()
        self.held = threading.Event()
        self.go_on = threading.Event()
        self.taken: list[str] = []
        self.taken_and_handled: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def list(self, prefix: str = "", after: str = "", limit: int = 1000) -> Any:
        page = self._engine.list(prefix, after, limit)
        if self.hold.is_set() and prefix == "events/":
            self.held.set()
            self.go_on.wait(DEADLINE_S)
        return page

    def take_dirty(self, timeout_ms: int) -> Any:
        self.taken_and_handled += self.taken  # the feed asks again only when it has dealt with them
        dirty, overflow = self._engine.take_dirty(timeout_ms)
        self.taken = [path for path, _ in dirty]
        return dirty, overflow


def test_what_the_feed_reports_while_a_subscription_is_made_counts_for_it(engine: Engine) -> None:
    async def work() -> None:
        engine.create("wake/pool", "application/json")
        pausing = PausingEngine(engine)
        async with running(pausing) as manager:
            pausing.hold.set()
            creating = asyncio.create_task(manager.create("s", pull(), BASE))
            assert await asyncio.to_thread(pausing.held.wait, DEADLINE_S)
            engine.create("events/between", "text/plain")
            engine.append("events/between", b"x")

            async def handled() -> bool:
                return "events/between" in pausing.taken_and_handled

            await eventually(handled)
            assert not creating.done()
            pausing.go_on.set()
            await creating
            assert list((await manager.get("s")).pending) == ["events/between"]

    run(work())


def wake_generations(engine: Engine) -> list[int]:
    return [record["generation"] for record in json.loads(engine.read("wake/pool")[0])]


async def is_unavailable(manager: SubscriptionManager) -> bool:
    try:
        await manager.get("s")
    except Refused as refusal:
        return refusal.status == 503
    return False


def test_a_failed_write_is_told_to_nobody_and_heals(engine: Engine) -> None:
    async def work() -> None:
        engine.create("wake/pool", "application/json")
        engine.create("events/a", "text/plain")
        faulty = FaultyEngine(engine)
        async with running(faulty) as manager:
            await manager.create("s", pull(), BASE)
            faulty.broken = True
            with pytest.raises(Refused) as caught:
                await manager.create("t", pull(), BASE)
            assert caught.value.status == 503
            faulty.broken = False

            async def healed() -> bool:
                return not await is_unavailable(manager)

            await eventually(healed)
            with pytest.raises(Refused) as caught:
                await manager.get("t")
            assert caught.value.status == 404
            await manager.create("t", pull(), BASE)

    run(work())


class FailedLog:
    """A real engine whose log has failed for good, as soon as it is said."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.failed = False
        self.read_again = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def status(self) -> dict[str, object]:
        trouble = {"trouble": "log_failed"} if self.failed else {}
        return self._engine.status() | trouble

    def append(self, path: str, data: bytes) -> str:
        if self.failed:
            raise EngineError("log_failed", "the log has failed")
        return self._engine.append(path, data)

    def read(self, *arguments: Any, **named: Any) -> Any:
        self.read_again += self.failed
        return self._engine.read(*arguments, **named)


def test_behind_a_failed_log_changes_are_refused_and_views_go_on(engine: Engine) -> None:
    async def work() -> None:
        engine.create("wake/pool", "application/json")
        engine.create("events/a", "text/plain")
        failing = FailedLog(engine)
        async with running(failing) as manager:
            await manager.create("s", pull(), BASE)
            failing.failed = True
            for _ in range(5):
                with pytest.raises(Refused) as caught:
                    await manager.delete("s")
                assert caught.value.status == 503
            for change in (
                manager.create("t", pull(), BASE),
                manager.add_streams("s", ["b"]),
                manager.remove_stream("s", "events/a"),
            ):
                with pytest.raises(Refused):
                    await change
            engine.append("events/a", b"x")
            await asyncio.sleep(0.2)
            subscription = await manager.get("s")
            assert (subscription.linked, subscription.wake) == (1, None)
            assert failing.read_again == 0

    run(work())


def test_a_wake_that_could_not_be_kept_is_not_announced_until_it_can(engine: Engine) -> None:
    async def work() -> None:
        engine.create("wake/pool", "application/json")
        engine.create("events/a", "text/plain")
        faulty = FaultyEngine(engine)
        async with running(faulty) as manager:
            await manager.create("s", pull(), BASE)
            faulty.broken = True
            engine.append("events/a", b"1")
            await eventually(lambda: is_unavailable(manager))
            await asyncio.sleep(0.2)
            assert wake_generations(engine) == []
            faulty.broken = False

            async def announced() -> bool:
                return wake_generations(engine) == [1]

            await eventually(announced)
            await finish(manager, "s")
        async with running(engine) as manager:
            subscription = await manager.get("s")
            assert acked(manager, subscription)["events/a"] == engine.tail("events/a")

    run(work())


def test_a_delivery_that_fails_as_nobody_foresaw_is_tried_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[bytes] = []

    async def post(target: Target, body: bytes, *_: Any) -> delivery.Reply:
        attempts.append(body)
        if len(attempts) == 1:
            raise RuntimeError("can't start new thread")
        return delivery.Reply(200, b'{"done": true}')

    async def work() -> None:
        engine.create("events/a", "text/plain")
        async with running(engine) as manager:
            await manager.create("s", config("webhook", webhook_url="https://hook.example/"), BASE)
            engine.append("events/a", b"x")

            async def delivered() -> bool:
                return (await manager.get("s")).wake is None and len(attempts) == 2

            await eventually(delivered)

    monkeypatch.setattr(delivery, "post", post)
    run(work())


def test_history_is_rewritten_while_work_goes_on(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "JOURNAL_REWRITE_BYTES_MIN", 6000)
    names = [f"s{number}" for number in range(8)]

    async def one(manager: SubscriptionManager, name: str) -> None:
        path = f"events/{name}"
        await manager.create(name, pull(pattern=None, streams=(path,)), BASE)
        for _ in range(15):
            engine.append(path, b"x")
            await finish(manager, name)

    async def work() -> None:
        engine.create("wake/pool", "application/json")
        for name in names:
            engine.create(f"events/{name}", "text/plain")
        async with running(engine) as manager:
            await asyncio.gather(*(one(manager, name) for name in names))
        (stream,), _ = engine.list(HISTORY_PREFIX)
        assert int(stream["path"].removeprefix(HISTORY_PREFIX)) > 2
        assert stream["bytes"] < 60_000
        async with running(engine) as manager:
            for name in names:
                subscription = await manager.get(name)
                path = f"events/{name}"
                assert acked(manager, subscription)[path] == engine.tail(path)
                assert subscription.generation == 15

    run(work())


def test_records_appended_while_nobody_watched_are_found_at_the_next_start(
    open_engine: Callable[[], Engine],
) -> None:
    engine = open_engine()

    async def first() -> None:
        engine.create("wake/pool", "application/json")
        engine.create("events/old", "text/plain")
        engine.append("events/old", b"before")
        engine.create("events/gone", "text/plain")
        async with running(engine) as manager:
            await manager.create("s", pull(streams=("x",)), BASE)
            assert "events/gone" in acked(manager, await manager.get("s"))

    run(first())
    engine.delete("events/gone")
    engine.append("events/old", b"after")
    for name in ("events/new", "x"):
        engine.create(name, "text/plain")
        engine.append(name, b"1")
    engine.create("events/empty", "text/plain")

    async def second() -> None:
        async with running(engine) as manager:

            async def all_seen() -> bool:
                subscription = await manager.get("s")
                gone = "events/gone" not in acked(manager, subscription)
                return len(subscription.pending) == 3 and gone

            await eventually(all_seen)
            _, _, views = await manager.claim("s", "worker")
            assert {(view.path, view.acked == "-1") for view in views if view.pending} == {
                ("events/old", False),
                ("events/new", True),
                ("x", False),
            }

    run(second())


def test_thousands_of_streams_and_subscriptions(engine: Engine) -> None:
    async def work() -> None:
        engine.create("wake/pool", "application/json")
        async with running(engine) as manager:
            for number in range(300):
                await manager.create(f"s{number}", pull(pattern=f"events/{number}/*"), BASE)
            await manager.create("all", pull(pattern="events/**"), BASE)

            def fill() -> None:
                for number in range(3000):
                    name = f"events/{number % 300}/{number}"
                    engine.create(name, "text/plain")
                    engine.append(name, b"x")

            await asyncio.get_running_loop().run_in_executor(None, fill)

            async def all_seen() -> bool:
                return len((await manager.get("all")).pending) == 3000

            await eventually(all_seen)
            assert len((await manager.get("s7")).pending) == 10

    run(work())
