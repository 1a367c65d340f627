"""The state of all subscriptions as a fold over events.

Sits between `events` and `machine`: `apply` is the only thing that changes a subscription, live and at
replay alike, so what a restart rebuilds is what was there. Tails are knowledge about the engine, not
history: they come from the feed and are lost and learned again.

What is linked is kept once per stream, not once per stream and subscription: streams with the same owners share a
group that names them, and an owner that has acknowledged as much as the others, normally everything, has no offset
of its own. So ten thousand subscriptions to a hundred thousand quiet streams cost what one of them does.
Invariants: `streams` has exactly the linked paths, and each path's group names exactly the subscriptions that link it;
a known tail is the stream's base; a subscription has an offset of its own exactly where it differs from the base; every
name and pattern that began or ceased to be followed is among the touched ones until somebody takes them; each
subscription knows its groups, so that what concerns one costs what it has, whatever others have. Streams that nobody
follows after a deletion have a group without owners and leave in steps (`sweep`).
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, TypeVar

from millstream.control.limits import (
    FOLLOWED_STREAM_BYTES,
    JOURNAL_LINKS_PER_EVENT,
    NAMED_LINK_BYTES,
    SWEPT_STREAMS_STEP,
)
from millstream.control.subscriptions import events as e
from millstream.control.subscriptions.model import Config, Link, Subscription, Wake
from millstream.control.subscriptions.offsets import is_pending

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from collections.abc import Set as AbstractSet

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Group:
    """The streams that have the same owners. `key` is the XOR of the owners' tokens, and names no other set."""

    key: int
    owners: set[str]
    paths: dict[str, None]


@dataclass(slots=True)
class Known:
    """A linked stream. `base` is what the owners without an offset of their own have acknowledged."""

    path: str
    group: Group
    base: str
    tail: str | None = None
    apart: int = 0  # how many owners have an offset of their own
    named: int = 0  # how many owners link it by name


class State:
    def __init__(self) -> None:
        self.subscriptions: dict[str, Subscription] = {}
        self.patterns: dict[str, dict[str, None]] = {}  # with their subscriptions
        self.streams: dict[str, Known] = {}
        self.links = 0  # of all subscriptions together
        self.link_bytes = 0  # what they take, all but the offsets
        self.offsets = 0  # those of them that take memory of their own
        self.touched_names: set[str] = set()
        self.touched_patterns: set[str] = set()
        self._groups: dict[int, Group] = {}
        self._groups_of: dict[str, dict[Group, None]] = {}
        self._ownerless: list[Group] = []
        self._tokens: dict[str, int] = {}

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
            # A rewritten history may repeat what it has seen already: of links that have gone since, too.
            case e.Unlinked(paths=paths):
                for path in paths:
                    if (known := self._followed(subscription, path)) is not None:
                        self._unlink(subscription, known)
            case e.Relabelled(path=path):
                if (known := self._followed(subscription, path)) is not None:
                    self._unname(subscription, known)
            case e.Acked(acks=acks):
                for path, offset in acks:
                    if (known := self._followed(subscription, path)) is not None:
                        self._keep(subscription, known, offset)
            case _:
                _apply_to_wake(subscription, event)

    def note_tail(self, path: str, tail: str) -> None:
        """Learns where a linked stream ends; an older reading that arrives late changes nothing."""
        known = self.streams.get(path)
        if known is None or tail < (known.tail or ""):
            return
        known.tail = tail
        if known.base == tail and not known.apart:
            return
        behind, known.base = known.base, tail
        for owner in known.group.owners:
            subscription = self.subscriptions[owner]
            self._keep(subscription, known, subscription.offsets.get(path, behind))

    def forget_tail(self, path: str) -> str | None:
        """The stream is gone; where it ended, if that was known."""
        known = self.streams.get(path)
        if known is None:
            return None
        tail, known.tail = known.tail, None
        return tail

    def tail_of(self, path: str) -> str | None:
        known = self.streams.get(path)
        return known.tail if known is not None else None

    def is_named(self, path: str) -> bool:
        """Whether a subscription follows the stream by its name."""
        known = self.streams.get(path)
        return known is not None and known.named > 0

    def owners_of(self, path: str) -> AbstractSet[str]:
        known = self.streams.get(path)
        return known.group.owners if known is not None else frozenset()

    def link(self, subscription: Subscription, path: str) -> Link | None:
        known = self._followed(subscription, path)
        if known is None:
            return None
        acked = subscription.offsets.get(path, known.base)
        return Link(known.path, acked, path in subscription.explicit)

    def paths_of(self, subscription: Subscription) -> Iterator[str]:
        groups = self._groups_of.get(subscription.id, {})
        return chain.from_iterable(group.paths for group in groups)

    def links_of(self, subscription: Subscription) -> Iterator[Link]:
        for path in self.paths_of(subscription):
            acked = subscription.offsets.get(path) or self.streams[path].base
            yield Link(path, acked, path in subscription.explicit)

    def sweep(self) -> bool:
        """Forgets some of the streams that nobody follows any more; whether there are others."""
        for _ in range(SWEPT_STREAMS_STEP):
            while self._ownerless and not self._ownerless[-1].paths:
                self._ownerless.pop()
            if not self._ownerless:
                return False
            self._drop(self.streams[next(reversed(self._ownerless[-1].paths))])
        return True

    def _followed(self, subscription: Subscription, path: str) -> Known | None:
        known = self.streams.get(path)
        return known if known is not None and subscription.id in known.group.owners else None

    def _create(self, event: e.Created) -> None:
        if event.id in self.subscriptions:
            raise ValueError(f"subscription {event.id!r} is created twice")
        config = Config(**{**event.config, "streams": tuple(event.config["streams"])})
        self.subscriptions[event.id] = Subscription(
            event.id, event.uid, config, event.base_url, event.at_ms, event.generation
        )
        # Random, so that no choice of ids makes two sets of them look the same.
        self._tokens[event.id] = secrets.randbits(128)
        self._groups_of[event.id] = {}
        if config.pattern is not None:
            self.patterns.setdefault(config.pattern, {})[event.id] = None
            self.touched_patterns.add(config.pattern)

    def _delete(self, subscription: Subscription) -> None:
        for path in list(subscription.explicit):
            self._unname(subscription, self.streams[path])
        for path in subscription.offsets:
            self.streams[path].apart -= 1
        self.offsets -= len(subscription.offsets)
        self.links -= subscription.linked
        for group in self._groups_of.pop(subscription.id):
            self._leave(group, subscription.id)
        self.sweep()
        pattern = subscription.config.pattern
        if pattern is not None:
            del self.patterns[pattern][subscription.id]
            if not self.patterns[pattern]:
                del self.patterns[pattern]
                self.touched_patterns.add(pattern)
        del self.subscriptions[subscription.id]
        del self._tokens[subscription.id]

    def _link(self, subscription: Subscription, path: str, acked: str, explicit: bool) -> None:
        known = self.streams.get(path)
        if known is not None and not known.group.owners:  # about to be forgotten: it begins anew
            self._drop(known)
            known = None
        if known is None:  # the only owner, without an offset of its own
            known = self.streams[path] = Known(path, self._group_of(subscription.id), acked)
            known.group.paths[path] = None
            self.link_bytes += stream_bytes(path)
            subscription.linked += 1
            self.links += 1
        elif subscription.id not in known.group.owners:
            subscription.linked += 1
            self.links += 1
            self._move(known, subscription.id)
            self._keep(subscription, known, acked)
        if explicit and path not in subscription.explicit:
            subscription.explicit.add(known.path)
            known.named += 1
            self.link_bytes += named_bytes(path)
            if known.named == 1:
                self.touched_names.add(known.path)

    def _group_of(self, id: str) -> Group:  # noqa: A002
        """The group of the streams that nobody else follows."""
        key = self._tokens[id]
        group = self._groups.get(key)
        return group if group is not None else self._new_group(key, {id})

    def _new_group(self, key: int, owners: set[str]) -> Group:
        group = self._groups[key] = Group(key, owners, {})
        for owner in owners:
            self._groups_of[owner][group] = None
        return group

    def _unlink(self, subscription: Subscription, known: Known) -> None:
        self._unname(subscription, known)
        self._keep(subscription, known, known.base)
        subscription.pending.pop(known.path, None)
        subscription.linked -= 1
        self.links -= 1
        if len(known.group.owners) > 1:
            self._move(known, subscription.id)
        else:
            self._drop(known)

    def _drop(self, known: Known) -> None:
        """Nobody follows the stream any more."""
        self._take_out(known)
        del self.streams[known.path]
        self.link_bytes -= stream_bytes(known.path)

    def _take_out(self, known: Known) -> None:
        group = known.group
        del group.paths[known.path]
        if not group.paths and group.owners:
            del self._groups[group.key]
            for owner in group.owners:
                del self._groups_of[owner][group]

    def _keep(self, subscription: Subscription, known: Known, acked: str) -> None:
        """Keeps an acknowledged offset, and whether something is pending behind it."""
        path = known.path
        change = (acked != known.base) - (path in subscription.offsets)
        if acked != known.base:
            subscription.offsets[path] = acked
        elif change:
            del subscription.offsets[path]
        known.apart += change
        self.offsets += change
        if known.tail is not None and is_pending(acked, known.tail):
            subscription.pending.setdefault(path)
        else:
            subscription.pending.pop(path, None)

    def _move(self, known: Known, id: str) -> None:  # noqa: A002
        """Puts a stream into the group with this owner more, or less if it has it."""
        group = known.group
        key = group.key ^ self._tokens[id]
        target = self._groups.get(key)
        if target is None and len(group.paths) == 1:
            # Nobody else is in the group: it becomes the next one. Most sets on the way are nobody's.
            self._rename(group, key)
            group.owners ^= {id}
            if id in group.owners:
                self._groups_of[id][group] = None
            else:
                del self._groups_of[id][group]
            return
        if target is None:
            target = self._new_group(key, group.owners ^ {id})
        self._take_out(known)
        target.paths[known.path] = None
        known.group = target

    def _leave(self, group: Group, id: str) -> None:  # noqa: A002
        """Takes an owner away from all streams of a group; its own index goes elsewhere."""
        key = group.key ^ self._tokens[id]
        target = self._groups.get(key)
        group.owners.remove(id)
        if not group.owners:
            del self._groups[group.key]
            self._ownerless.append(group)
        elif target is None:
            self._rename(group, key)
        else:
            del self._groups[group.key]
            less, more = sorted((group, target), key=lambda one: len(one.paths))
            for path in less.paths:
                self.streams[path].group = more
            more.paths.update(less.paths)
            more.key = key
            self._groups[key] = more
            for owner in less.owners:
                del self._groups_of[owner][less]

    def _rename(self, group: Group, key: int) -> None:
        del self._groups[group.key]
        group.key = key
        self._groups[key] = group

    def _unname(self, subscription: Subscription, known: Known) -> None:
        if known.path not in subscription.explicit:
            return
        subscription.explicit.remove(known.path)
        known.named -= 1
        self.link_bytes -= named_bytes(known.path)
        if not known.named:
            self.touched_names.add(known.path)


def stream_bytes(path: str) -> int:
    """What following a stream takes, by whoever."""
    return FOLLOWED_STREAM_BYTES + _text_bytes(path)


def named_bytes(path: str) -> int:
    """What a link takes on top of that because it names its stream."""
    return NAMED_LINK_BYTES + _text_bytes(path)


def _text_bytes(text: str) -> int:
    """What a text takes at most: beyond ASCII up to four bytes a character, and its UTF-8 beside it."""
    return len(text) if text.isascii() else 4 * len(text) + len(text.encode())


def linked(id: str, rows: Iterable[e.LinkRow]) -> Iterator[e.Linked]:  # noqa: A002
    """`Linked` events of bounded size for any number of rows."""
    for chunk in chunks(rows, JOURNAL_LINKS_PER_EVENT):
        yield e.Linked(id, tuple(chunk))


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


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
