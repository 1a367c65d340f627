"""Subscriptions at work: joins the pure machine to the engine, the clock, the disk and the network.

Sits between `routes` (HTTP) and everything else in this package. All methods run on the control loop; what
blocks runs in its own threads. Invariants: nothing is answered, sent or announced before the events it rests
on are synced; if a write fails, memory is rebuilt from disk and until then every call is refused with 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from millstream._engine import EngineError, matching
from millstream.control.lanes import Lane
from millstream.control.limits import (
    CLAIM_SETTLES_S,
    CLAIMS_MAX,
    LARGE_VIEWS_MAX,
    MEMBERSHIP_CALLS_MAX,
    OBSERVED_LINKS_STEP,
)
from millstream.control.subscriptions import address, globs
from millstream.control.subscriptions.address import AddressRefused
from millstream.control.subscriptions.alarms import Alarms
from millstream.control.subscriptions.delivery import DeliveryFailed
from millstream.control.subscriptions.events import Linked
from millstream.control.subscriptions.feed import Feed, Scope
from millstream.control.subscriptions.journal import Journal, JournalDamaged, lasting
from millstream.control.subscriptions.machine import (
    Alarm,
    Change,
    Effect,
    Machine,
    Outcome,
    Send,
    Steps,
    WakeRequest,
)
from millstream.control.subscriptions.model import (
    Config,
    Link,
    Refused,
    StreamView,
    Subscription,
    Wake,
)
from millstream.control.subscriptions.sender import Sender
from millstream.control.subscriptions.snapshot import Snapshot
from millstream.control.subscriptions.watching import Watching
from millstream.control.subscriptions.writer import WriteFailed, Writer

if TYPE_CHECKING:
    from collections.abc import (
        AsyncIterator,
        Callable,
        Collection,
        Coroutine,
        Iterator,
        Sequence,
    )

    from millstream._engine import Engine
    from millstream.allowlists import Place
    from millstream.control.subscriptions.keys import Keys
    from millstream.control.subscriptions.turns import Turn

log = logging.getLogger(__name__)
T = TypeVar("T")

STOP_TIMEOUT_S: Final = 0.3
RECOVER_PAUSE_S: Final = 1.0


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def unavailable() -> Refused:
    return Refused(503, "UNAVAILABLE", "subscriptions are being recovered; try again shortly")


class SubscriptionManager:
    def __init__(
        self,
        engine: Engine,
        allowed: tuple[Place, ...] = (),
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._allowed = allowed  # webhook targets that the operator named
        self._changes = Lane(engine, MEMBERSHIP_CALLS_MAX, "UNAVAILABLE")
        self._claims = Lane(engine, CLAIMS_MAX, "UNAVAILABLE")
        self.large_views = Lane(engine, LARGE_VIEWS_MAX, "UNAVAILABLE")
        self._progress = progress
        self._journal = Journal(engine, progress)
        self._disk = ThreadPoolExecutor(1, "millstream-journal")
        self._pool = ThreadPoolExecutor(4, "millstream-control")
        self._machine = _new_machine()
        self._available = False
        self._stopping = asyncio.Event()
        self._membership = asyncio.Lock()
        self._relayed: list[Change] | None = None  # changes seen while a membership change is made
        self._watching = Watching(engine, self._in_pool)
        self._measured: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # Life.

    async def start(self) -> None:
        """Loads keys and history, then goes on with every wake that was in flight."""
        self.keys: Keys = await self._on_disk(self._journal.load_keys)
        self._writer = Writer(
            self._journal, self._disk, lambda: Snapshot(self._machine.state), self._recover
        )
        self._alarms = Alarms(now_ms, self._tick)
        self._sender = Sender(self._engine, self._pool, self.keys, now_ms, self._allowed)
        self._feed = Feed(self._engine, self._observe, self._scope, self._weigh)
        await self._replay()
        self._spawn(self._writer.run())
        self._spawn(self._alarms.run())
        await self._follow()
        self._feed.start()

    async def stop(self) -> None:
        self._stopping.set()
        self._feed.stop()
        with contextlib.suppress(WriteFailed, TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._writer.synced()
        self._available = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._disk.shutdown(wait=False, cancel_futures=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _replay(self) -> None:
        events = await self._on_disk(self._journal.load)
        machine = _new_machine()
        work = 0
        for event in lasting(events):
            machine.state.apply(event)
            work += len(event.links) if isinstance(event, Linked) else 1
            if work >= OBSERVED_LINKS_STEP:
                work = 0
                self._progress()
                await asyncio.sleep(0)
        # What a failed write was about may be watched and is not followed.
        before, now = self._machine.state, machine.state
        now.touched_names.update(before.streams, before.touched_names)
        now.touched_patterns.update(before.patterns, before.touched_patterns)
        self._machine = machine
        self._measure()
        self._available = True
        self._perform(machine.resume())

    async def _recover(self, error: BaseException) -> None:
        """A write failed: what is on disk counts. The pause keeps a full disk from being hammered."""
        self._available = False
        while not self._stopping.is_set():
            log.error("subscriptions: a write failed (%s); reloading from disk in 1 s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECOVER_PAUSE_S):
                    await self._stopping.wait()
                    return
            try:
                await self._replay()
                await self._follow()
            except (EngineError, JournalDamaged, ValueError) as again:
                error = again
                continue
            self._feed.request_rescan()
            return

    # Configuration.

    async def create(self, id: str, config: Config, base_url: str) -> tuple[Subscription, bool]:  # noqa: A002
        """The subscription and whether it is new."""
        async with self._membership_change():
            machine = self._ready()
            tails: dict[str, str] = {}
            if id not in machine.state.subscriptions:
                self._check_webhook(config)
                await self._check_wake_stream(config)
                self._feed.watching = True
                await self._watching.begin(config.streams, config.pattern)
                tails = await self._in_pool(lambda: self._collect_tails(config))
            outcome = await self._decide_in_steps(
                lambda m: m.create(id, secrets.token_hex(8), config, base_url, tails, now_ms())
            )
        return self._ready().get(id), outcome.created

    async def get(self, id: str) -> Subscription:  # noqa: A002
        await self._synced()
        return self._ready().get(id)

    def links_of(self, subscription: Subscription) -> Iterator[Link]:
        return self._machine.state.links_of(subscription)

    async def delete(self, id: str) -> None:  # noqa: A002
        async with self._membership_change():
            await self._decide(lambda machine: machine.delete(id))

    async def add_streams(self, id: str, paths: list[str]) -> None:  # noqa: A002
        async with self._membership_change():
            self._ready().get(id)
            await self._watching.begin(paths)
            tails = await self._in_pool(lambda: self._tails(paths))
            await self._decide(
                lambda machine: machine.add_streams(
                    id, paths, {path: tail for path, tail in tails.items() if tail is not None}
                )
            )

    async def remove_stream(self, id: str, path: str) -> None:  # noqa: A002
        async with self._membership_change():
            await self._decide(lambda machine: machine.remove_stream(id, path))

    # Workers.

    async def claim(self, id: str, worker: str) -> tuple[Subscription, str, list[StreamView]]:  # noqa: A002
        """The claimed subscription, the claim's token, and the streams to work on."""
        subscription = self._ready().get(id)
        if not subscription.pending:
            # An append that was just acknowledged may not have come through the feed yet.
            with self._claims.place(), contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLAIM_SETTLES_S):
                    await self._feed.settle(
                        lambda: bool(subscription.pending),
                        lambda waiting: self._concern(subscription, waiting),
                    )
        views: list[StreamView] = []
        token = ""

        def claim(machine: Machine) -> Outcome:
            nonlocal views, token
            now = now_ms()
            outcome = machine.claim(id, worker, now)
            claimed = machine.get(id)
            views = machine.views(claimed)
            token = self.keys.mint_token(claimed.uid, claimed.generation, now)
            return outcome

        await self._decide(claim)
        return self._ready().get(id), token, views

    async def acknowledge(self, id: str, kind: str, request: WakeRequest) -> bool:  # noqa: A002
        """Applies a callback or an ack; whether another wake follows at once."""
        self._ready().get(id)
        paths = [path for path, _ in request.acks]
        tails = await self._in_pool(lambda: self._tails(paths)) if paths else {}
        outcome = await self._decide(
            lambda machine: machine.acknowledge(id, kind, request, tails, now_ms())
        )
        return outcome.next_wake

    async def release(self, id: str, request: WakeRequest) -> None:  # noqa: A002
        await self._decide(lambda machine: machine.release(id, request, now_ms()))

    def open_token(self, token: str) -> tuple[str, int]:
        return self.keys.open_token(token, now_ms())

    # Decisions and what follows from them.

    def _ready(self) -> Machine:
        if not self._available:
            raise unavailable()
        return self._machine

    def _require_log(self) -> None:
        """Behind a log that has failed nothing can be kept until a restart: then nothing is decided, so that there is
        nothing to read again either."""
        if self._log_failed():
            raise Refused(503, "UNAVAILABLE", "the log has failed; only a restart can repair it")

    def _log_failed(self) -> bool:
        return self._engine.status()["trouble"] == "log_failed"

    async def _decide(self, command: Callable[[Machine], Outcome]) -> Outcome:
        """Runs a command; returns, or refuses, only once all it rests on is synced."""
        self._require_log()
        try:
            outcome = command(self._ready())
        except Refused:
            await self._synced()
            raise
        return await self._keep(outcome)

    async def _decide_in_steps(self, command: Callable[[Machine], Steps]) -> Outcome:
        """As `_decide`, for what takes long: others have their turn meanwhile."""
        self._require_log()
        machine = self._ready()
        steps = command(machine)
        try:
            while True:
                next(steps)
                await asyncio.sleep(0)
                if self._ready() is not machine:  # read again from disk, without what is begun
                    raise unavailable()
        except StopIteration as end:
            outcome: Outcome = end.value
        except Refused:
            await self._synced()
            raise
        finally:
            steps.close()
        return await self._keep(outcome)

    async def _keep(self, outcome: Outcome) -> Outcome:
        """Tells nobody, and begins nothing, before what was decided is synced."""
        self._measure()
        self._writer.put(outcome.events)
        await self._synced()
        self._perform(outcome.effects)
        return outcome

    def _measure(self) -> None:
        """Says among the metrics how much is kept."""
        state = self._machine.state
        kept = {
            "subscription_links": state.links,
            "subscription_link_bytes": state.link_bytes,
            "subscription_offsets": state.offsets,
        }
        for name, number in kept.items():
            if change := number - self._measured.get(name, 0):
                self._engine.count(name, change)
        self._measured = kept

    async def _synced(self) -> None:
        try:
            await self._writer.synced()
        except WriteFailed as error:
            raise unavailable() from error

    async def _sweep(self) -> None:
        """Forgets what nobody follows any more, some thousand streams at a time."""
        for _ in iter(self._machine.state.sweep, False):
            await asyncio.sleep(0)
        self._measure()

    async def _quietly(self, command: Callable[[Machine], Outcome]) -> None:
        """A decision nobody waits for. If it cannot be kept, the reload takes the matter up again."""
        with contextlib.suppress(Refused):
            await self._decide(command)

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(id=id, wake_id=wake_id):
                    self._line_up(id, wake_id)
                case Alarm(id=id, due_ms=due_ms):
                    self._alarms.arm(id, due_ms)

    def _line_up(self, id: str, wake_id: str) -> None:  # noqa: A002
        if (found := self._to_send(id, wake_id)) is not None:
            self._sender.line_up(*found, lambda turn: self._spawn(self._send(id, wake_id, turn)))

    async def _send(self, id: str, wake_id: str, turn: Turn) -> None:  # noqa: A002
        with self._sender.sending(wake_id, turn):
            found = self._to_send(id, wake_id)  # again: a turn may have been long in coming
            if found is None:
                return
            try:
                done = await self._sender.send(turn, *found, self._machine.views(found[0]))
            except DeliveryFailed as error:
                reason = str(error)
                log.warning("subscription %s, wake %s: %s", id, wake_id, reason)
                await self._quietly(lambda m: m.send_failed(id, wake_id, reason, now_ms()))
            else:
                await self._quietly(lambda m: m.sent(id, wake_id, done, now_ms()))

    def _to_send(self, id: str, wake_id: str) -> tuple[Subscription, Wake] | None:  # noqa: A002
        subscription = self._machine.state.subscriptions.get(id)
        wake = subscription.wake if subscription is not None else None
        if subscription is None or wake is None or wake.wake_id != wake_id:
            return None
        return (subscription, wake) if wake.phase == "sending" else None

    async def _tick(self, id: str) -> None:  # noqa: A002
        await self._quietly(lambda machine: machine.tick(id, now_ms()))

    # The engine's side.

    async def _observe(self, changes: list[Change]) -> None:
        if self._relayed is not None:
            self._relayed += changes
        if (
            not self._available or self._log_failed()
        ):  # all is listed again when there is a state again
            return
        machine = self._machine
        for outcome in machine.observe(changes):
            if machine is not self._machine or not self._available:
                return  # read again from disk: all is listed again
            with contextlib.suppress(Refused):
                await self._keep(outcome)
            await asyncio.sleep(0)

    def _weigh(self, path: str, patterns: Sequence[str]) -> int:
        """How many follow a stream, or will: what a change of it costs. Called by the feed's thread."""
        state = self._machine.state
        wanting = sum(len(state.patterns.get(pattern, ())) for pattern in patterns)
        return max(len(state.owners_of(path)), wanting)

    def _concern(self, subscription: Subscription, paths: Collection[str]) -> bool:
        """Whether one of the streams may be the subscription's; yes, where that is costly to say."""
        if subscription.config.pattern is not None or subscription.linked > OBSERVED_LINKS_STEP:
            return True
        return any(path in paths for path in self._machine.state.paths_of(subscription))

    def _scope(self) -> Scope:
        state = self._machine.state
        prefixes = {globs.literal_prefix(pattern) for pattern in state.patterns}
        return Scope(globs.cover(prefixes), list(state.streams))

    @contextlib.asynccontextmanager
    async def _membership_change(self) -> AsyncIterator[None]:
        """One change of patterns or links at a time. What the feed reports meanwhile is reported again
        after it, since it may concern links that were not there yet."""
        with self._changes.place():
            async with self._membership:
                self._require_log()
                self._relayed = []
                try:
                    yield
                finally:
                    changes, self._relayed = self._relayed, None
                    if changes:
                        await self._observe(changes)
                    await self._sweep()
                    self._watching.end(self._machine.state)
                    await self._follow()

    async def _follow(self) -> None:
        state = self._machine.state
        await self._watching.follow(state)
        self._feed.watching = bool(state.subscriptions)

    def _check_webhook(self, config: Config) -> None:
        if config.webhook_url is not None:
            try:
                address.parse(config.webhook_url, self._allowed)
            except AddressRefused as error:
                raise Refused(400, "WEBHOOK_URL_REJECTED", str(error)) from error

    async def _check_wake_stream(self, config: Config) -> None:
        if config.wake_stream is not None:
            path = config.wake_stream
            found = await self._in_pool(lambda: self._engine.list_one(path))
            if found is None:
                raise Refused(400, "INVALID_REQUEST", f"wake_stream {path!r} does not exist")
            if found["content_type"].partition(";")[0].strip().lower() != "application/json":
                raise Refused(400, "INVALID_REQUEST", f"wake_stream {path!r} is not a JSON stream")

    def _collect_tails(self, config: Config) -> dict[str, str]:
        """Every existing stream that the configuration lists or may match, with its tail."""
        found = {p: tail for p, tail in self._tails(config.streams).items() if tail is not None}
        if config.pattern is None:
            return found
        prefix = globs.literal_prefix(config.pattern)
        after: str | None = ""
        while after is not None:
            page, after = self._engine.list(prefix, after, 1000)
            tails = {row["path"]: row["tail"] for row in page}
            found.update((path, tails[path]) for path in matching(config.pattern, list(tails)))
        return found

    def _tails(self, paths: list[str] | tuple[str, ...]) -> dict[str, str | None]:
        return {path: self._engine.tail(path) for path in paths}

    # Threads and tasks.

    async def _in_pool(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except EngineError as error:
            log.warning("subscriptions: the engine refused: %s", error.detail)
            raise unavailable() from error

    async def _on_disk(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        if self._stopping.is_set():
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("subscriptions: a task failed", exc_info=error)


def _new_machine() -> Machine:
    return Machine(
        mint_wake_id=lambda: "w_" + secrets.token_hex(12),
        draw_jitter=lambda: random.uniform(-1.0, 1.0),
    )
