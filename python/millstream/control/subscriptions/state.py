"""The state of all subscriptions as a fold over events.

Sits between `events` and `machine`: `apply` is the only thing that changes a subscription, live and at
replay alike, so what a restart rebuilds is what was there. Tails are knowledge about the engine, not
history: they come from the feed and are lost and learned again.
Invariants: `owners_of[path]` names exactly the subscriptions that link the path; `tails` has linked paths only.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING

from millstream.control.limits import JOURNAL_LINKS_PER_EVENT
from millstream.control.subscriptions import events as e
from millstream.control.subscriptions.globs import GlobIndex
from millstream.control.subscriptions.model import Config, Link, Subscription, Wake
from millstream.control.subscriptions.offsets import is_pending

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class State:
    def __init__(self) -> None:
        self.subscriptions: dict[str, Subscription] = {}
        self.globs = GlobIndex()
        self.owners_of: dict[str, tuple[str, ...]] = {}
        self.tails: dict[str, str] = {}
        self.explicit: dict[str, int] = {}  # path -> how many subscriptions link it explicitly

    def apply(self, event: e.Event) -> None:
        if isinstance(event, e.Created):
            self._create(event)
            return
        subscription = self.subscriptions.get(event.id)
        if subscription is None:
            raise ValueError(f"event {event.kind} for unknown subscription {event.id!r}")
        match event:
            case e.Rebased(base_url=base_url):
                subscription.base_url = base_url
            case e.Deleted():
                self._delete(subscription)
            case e.Linked(links=links):
                for path, acked, explicit in links:
                    self._link(subscription, path, acked, explicit)
            case e.Unlinked(paths=paths):
                for path in paths:
                    self._unlink(subscription, path)
            case e.Relabelled(path=path):
                if subscription.links[path].explicit:
                    subscription.links[path].explicit = False
                    self._count_explicit(path, -1)
            case e.Acked(acks=acks):
                for path, offset in acks:
                    subscription.links[path].acked = offset
                    self._refresh(subscription, path)
            case _:
                _apply_to_wake(subscription, event)

    def note_tail(self, path: str, tail: str) -> None:
        """Learns where a linked stream ends; an older reading that arrives late changes nothing."""
        owners = self.owners_of.get(path)
        if owners is None or tail < self.tails.get(path, ""):
            return
        self.tails[path] = tail
        for owner in owners:
            self._refresh(self.subscriptions[owner], path)

    def dump(self) -> Iterator[e.Event]:
        """The shortest history that leads to this state: what a rewritten journal starts with."""
        for subscription in self.subscriptions.values():
            yield e.Created(
                subscription.id,
                subscription.uid,
                asdict(subscription.config),
                subscription.base_url,
                subscription.created_at_ms,
                subscription.generation,
            )
            rows = ((path, link.acked, link.explicit) for path, link in subscription.links.items())
            yield from linked(subscription.id, rows)
            if subscription.wake is not None:
                yield from _dump_wake(subscription.id, subscription.wake)

    def _create(self, event: e.Created) -> None:
        if event.id in self.subscriptions:
            raise ValueError(f"subscription {event.id!r} is created twice")
        config = Config(**{**event.config, "streams": tuple(event.config["streams"])})
        self.subscriptions[event.id] = Subscription(
            event.id, event.uid, config, event.base_url, event.at_ms, event.generation
        )
        if config.pattern is not None:
            self.globs.add(config.pattern, event.id)

    def _delete(self, subscription: Subscription) -> None:
        for path in list(subscription.links):
            self._unlink(subscription, path)
        if subscription.config.pattern is not None:
            self.globs.remove(subscription.config.pattern, subscription.id)
        del self.subscriptions[subscription.id]

    def _link(self, subscription: Subscription, path: str, acked: str, explicit: bool) -> None:
        link = subscription.links.get(path)
        if link is not None:
            if explicit and not link.explicit:
                link.explicit = True
                self._count_explicit(path, 1)
            return
        subscription.links[path] = Link(acked, explicit)
        if explicit:
            self._count_explicit(path, 1)
        self.owners_of[path] = (*self.owners_of.get(path, ()), subscription.id)
        self._refresh(subscription, path)

    def _unlink(self, subscription: Subscription, path: str) -> None:
        if subscription.links.pop(path).explicit:
            self._count_explicit(path, -1)
        subscription.pending.pop(path, None)
        owners = tuple(owner for owner in self.owners_of[path] if owner != subscription.id)
        if owners:
            self.owners_of[path] = owners
        else:
            del self.owners_of[path]
            self.tails.pop(path, None)

    def _count_explicit(self, path: str, change: int) -> None:
        count = self.explicit.get(path, 0) + change
        if count:
            self.explicit[path] = count
        else:
            del self.explicit[path]

    def _refresh(self, subscription: Subscription, path: str) -> None:
        tail = self.tails.get(path)
        if tail is not None and is_pending(subscription.links[path].acked, tail):
            subscription.pending.setdefault(path)
        else:
            subscription.pending.pop(path, None)


def linked(id: str, rows: Iterable[e.LinkRow]) -> Iterator[e.Linked]:  # noqa: A002
    """`Linked` events of bounded size for any number of rows."""
    iterator = iter(rows)
    while chunk := tuple(islice(iterator, JOURNAL_LINKS_PER_EVENT)):
        yield e.Linked(id, chunk)


def _apply_to_wake(subscription: Subscription, event: e.Event) -> None:
    if isinstance(event, e.Woke):
        subscription.generation = event.generation
        subscription.wake = Wake(
            event.wake_id, event.generation, event.trigger, dict(event.snapshot)
        )
        return
    wake = subscription.wake
    if wake is None or getattr(event, "wake_id", None) != wake.wake_id:
        raise ValueError(f"event {event.kind} for {subscription.id!r} names no wake in flight")
    match event:
        case e.Sent(lease_until_ms=lease_until_ms):
            wake.phase = "open"
            wake.lease_until_ms = lease_until_ms
            wake.next_attempt_at_ms = None
        case e.SendFailed():
            wake.attempt = event.attempt
            wake.next_attempt_at_ms = event.next_attempt_at_ms
            wake.last_error = event.error
        case e.Claimed():
            wake.phase = "claimed"
            wake.holder = event.holder
            wake.lease_until_ms = event.lease_until_ms
            wake.next_attempt_at_ms = None
        case e.Extended(lease_until_ms=lease_until_ms):
            wake.lease_until_ms = lease_until_ms
        case e.Finished():
            subscription.wake = None
        case _:
            raise ValueError(f"event {event.kind} is not about a wake")


def _dump_wake(id: str, wake: Wake) -> Iterator[e.Event]:  # noqa: A002
    yield e.Woke(id, wake.wake_id, wake.generation, wake.trigger, tuple(wake.snapshot.items()))
    if wake.attempt:
        due = wake.next_attempt_at_ms or 0
        yield e.SendFailed(id, wake.wake_id, wake.attempt, due, wake.last_error or "")
    if wake.phase == "open":
        yield e.Sent(id, wake.wake_id, wake.lease_until_ms)
    elif wake.phase == "claimed":
        yield e.Claimed(id, wake.wake_id, wake.holder or "", wake.lease_until_ms or 0)
