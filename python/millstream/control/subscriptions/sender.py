"""Sending a wake: a signed webhook request, or a record on the wake stream.

Sits below `manager`. Invariants: webhooks run in `turns`, names are looked up by `lookups`, and never two sends for one wake; what is sent was read
from synced state; a failure of any kind is a `DeliveryFailed`, which the caller turns into a retry.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from millstream._engine import EngineError
from millstream.control.limits import DELIVERY_TIMEOUT_MS_MAX
from millstream.control.subscriptions import address, delivery
from millstream.control.subscriptions.address import AddressRefused
from millstream.control.subscriptions.delivery import DeliveryFailed
from millstream.control.subscriptions.lookups import Lookups
from millstream.control.subscriptions.turns import Turn, Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor

    from millstream._engine import Engine
    from millstream.allowlists import Place
    from millstream.control.subscriptions.keys import Keys
    from millstream.control.subscriptions.model import StreamView, Subscription, Wake

log = logging.getLogger(__name__)


class Sender:
    def __init__(
        self,
        engine: Engine,
        pool: Executor,
        keys: Keys,
        now_ms: Callable[[], int],
        allowed: tuple[Place, ...],
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._keys = keys
        self._now_ms = now_ms
        self._allowed = allowed
        self._turns = Turns(lambda change: engine.count("webhooks_waiting", change))
        self._lookups = Lookups(lambda change: engine.count("webhook_lookups", change))
        self._in_flight: set[str] = set()

    def line_up(self, subscription: Subscription, wake: Wake, go: Callable[[Turn], None]) -> None:
        """Has `go` called when it is this wake's turn; not at all if a send of it waits or is under way."""
        url = subscription.config.webhook_url
        if wake.wake_id not in self._in_flight:
            self._in_flight.add(wake.wake_id)
            target = url and urlsplit(url).netloc.lower()
            self._turns.line_up(target, subscription.uid, wake.attempt, go)

    @contextlib.contextmanager
    def sending(self, wake_id: str, turn: Turn) -> Iterator[None]:
        """The only send of this wake; its turn ends with it."""
        try:
            yield
        finally:
            turn.end()
            self._in_flight.discard(wake_id)

    async def send(
        self, turn: Turn, subscription: Subscription, wake: Wake, views: list[StreamView]
    ) -> bool:
        """Sends one wake; whether the receiver is done with it already."""
        webhook = subscription.config.type == "webhook"
        try:
            if webhook:
                done = await turn.post(self._post(subscription, wake, views))
            else:
                done = await self._announce(subscription, wake)
        except Exception as error:
            if webhook:
                self._engine.count("webhook_failures", 1)
            if isinstance(error, DeliveryFailed):
                raise
            # Nobody foresaw it, and who does not try again would never send this wake.
            log.error("subscription %s: a delivery failed", subscription.id, exc_info=error)
            raise DeliveryFailed(f"{type(error).__name__}: {error}") from error
        if webhook:
            self._engine.count("webhooks", 1)
        return done

    async def _post(self, subscription: Subscription, wake: Wake, views: list[StreamView]) -> bool:
        now = self._now_ms()
        callback = f"/v1/stream/__ds/subscriptions/{quote(subscription.id, safe='')}/callback"
        payload = {
            "subscription_id": subscription.id,
            "wake_id": wake.wake_id,
            "generation": wake.generation,
            "streams": [view.to_json() for view in views],
            "callback_url": subscription.base_url + callback,
            "callback_token": self._keys.mint_token(subscription.uid, wake.generation, now),
        }
        body = json.dumps(payload, separators=(",", ":")).encode("utf-8")
        headers = {
            "Content-Type": "application/json",
            "Webhook-Signature": self._keys.signature_header(body, now),
        }
        timeout_s = min(subscription.config.lease_ttl_ms, DELIVERY_TIMEOUT_MS_MAX) / 1000
        try:
            target = address.parse(subscription.config.webhook_url or "", self._allowed)
        except AddressRefused as error:
            raise DeliveryFailed(f"address refused: {error}") from error
        tls = self._tls if target.secure else None
        resolver = self._lookups.resolve
        reply = await delivery.post(target, body, headers, timeout_s, resolver, tls)
        return reply.done

    async def _announce(self, subscription: Subscription, wake: Wake) -> bool:
        path = subscription.config.wake_stream or ""
        record = {
            "type": "wake",
            "subscription_id": subscription.id,
            "stream": wake.trigger,
            "generation": wake.generation,
            "ts": self._now_ms(),
        }
        data = json.dumps(record, separators=(",", ":")).encode("utf-8")
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._pool, self._engine.append, path, data)
        except EngineError as error:
            raise DeliveryFailed(f"wake stream {path!r}: {error.detail}") from error
        return False

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return ssl.create_default_context()
