"""The decisions about subscriptions: a command and the time in, events and effects out.

Sits between `manager` (which does the I/O) and `state` (which folds events). No I/O, no clock, no
randomness of its own: time is an argument, wake ids and jitter come from the two functions given at start.
Invariants: a command that is refused changes nothing; every change is an event; an effect may be carried out
only after the events returned with it are synced.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias

from millstream._engine import matching
from millstream.control.limits import (
    OBSERVED_LINKS_STEP,
    RETRY_FIRST_MS,
    RETRY_JITTER,
    RETRY_MAX_MS,
    SUBSCRIPTION_LINK_BYTES_MAX,
    SUBSCRIPTION_LINKS_MAX,
    SUBSCRIPTIONS_MAX,
    WAKE_STREAMS_MAX,
)
from millstream.control.subscriptions import events as e
from millstream.control.subscriptions.model import Config, Refused, StreamView, Subscription, Wake
from millstream.control.subscriptions.offsets import BEFORE_FIRST, ZERO, is_empty, is_minted
from millstream.control.subscriptions.state import (
    State,
    chunks,
    linked,
    named_bytes,
    stream_bytes,
)

if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Collection,
        Generator,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )

# A stream, its tail (None: it is gone), and the patterns that match it.
Change = tuple[str, str | None, "Sequence[str]"]

RESERVED_PREFIX: Final = "__ds/"


@dataclass(frozen=True, slots=True)
class Send:
    """Try to deliver this wake now (webhook request, or a record on the wake stream)."""

    id: str
    wake_id: str


@dataclass(frozen=True, slots=True)
class Alarm:
    """Call `tick` for this subscription at this time."""

    id: str
    due_ms: int


Effect = Send | Alarm


@dataclass(slots=True)
class Outcome:
    """What one command led to. `created` and `next_wake` answer the commands that have such an answer."""

    events: list[e.Event] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    created: bool = False
    next_wake: bool = False


# A command that takes long: others have their turn between its steps.
Steps: TypeAlias = "Generator[None, None, Outcome]"


@dataclass(frozen=True, slots=True)
class WakeRequest:
    """A worker's callback, ack or release: what its token says and what its body says."""

    token_uid: str
    token_generation: int
    wake_id: str
    generation: int
    acks: tuple[tuple[str, str], ...] = ()
    done: bool = False


def retry_delay_ms(attempt: int, jitter: float) -> int:
    """Delay after the given failed attempt (1 is the first); `jitter` lies in -1..1."""
    base = min(RETRY_FIRST_MS << min(attempt - 1, 16), RETRY_MAX_MS)
    return round(base * (1 + RETRY_JITTER * jitter))


class Machine:
    def __init__(self, mint_wake_id: Callable[[], str], draw_jitter: Callable[[], float]) -> None:
        self.state = State()
        self._mint_wake_id = mint_wake_id
        self._draw_jitter = draw_jitter

    # Reading.

    def get(self, id: str) -> Subscription:  # noqa: A002
        subscription = self.state.subscriptions.get(id)
        if subscription is None or subscription.opening:
            raise Refused(404, "SUBSCRIPTION_NOT_FOUND", f"there is no subscription {id!r}")
        return subscription

    def views(self, subscription: Subscription) -> list[StreamView]:
        """The streams a wake is about, then (while few) the ones with nothing new.

        A webhook is told the snapshot that its "done" acknowledges, a pull worker what is pending now.
        """
        wake = subscription.wake
        if wake is not None and subscription.config.type == "webhook":
            about = wake.snapshot
        else:
            about = self._pending_tails(subscription)
        views = [
            StreamView(path, link.explicit, link.acked, tail, tail > link.acked)
            for path, tail in about.items()
            if (link := self.state.link(subscription, path)) is not None
        ]
        if subscription.linked <= WAKE_STREAMS_MAX:
            views += [
                StreamView(link.path, link.explicit, link.acked, link.acked, pending=False)
                for link in self.state.links_of(subscription)
                if link.path not in about and link.path not in subscription.pending
            ]
        return views

    # Configuration.

    def create(
        self,
        id: str,  # noqa: A002
        uid: str,
        config: Config,
        base_url: str,
        tails: Mapping[str, str],
        now_ms: int,
    ) -> Steps:
        """Creates or confirms, in steps. `tails` has every stream that exists now and is listed or may match.

        Between the steps anything may happen but another change of subscriptions' links. Until the last one nobody
        knows of the subscription, and no event is about it; steps that are given up leave nothing behind.
        """
        outcome = Outcome()
        existing = self.state.subscriptions.get(id)
        if existing is not None:
            if existing.config.identity() != config.identity():
                raise Refused(
                    409,
                    "SUBSCRIPTION_ALREADY_EXISTS",
                    f"subscription {id!r} exists with a different configuration",
                )
            if existing.base_url != base_url:
                self._emit(outcome, e.Rebased(id, base_url))
            return outcome
        if len(self.state.subscriptions) >= SUBSCRIPTIONS_MAX:
            raise Refused(
                429, "TOO_MANY_SUBSCRIPTIONS", f"at most {SUBSCRIPTIONS_MAX} subscriptions are kept"
            )
        rows: dict[str, e.LinkRow] = {
            path: (path, tails.get(path, ZERO), True) for path in config.streams
        }
        size = self._size(rows.values())
        if config.pattern is not None:
            for paths in chunks(tails, OBSERVED_LINKS_STEP):
                matches = {
                    path: (path, tails[path], False)
                    for path in matching(config.pattern, paths)
                    if path not in rows and path != config.wake_stream
                }
                rows |= matches
                size += self._size(matches.values())
                yield
        self._require_room(len(rows), size)
        outcome.created = True
        self._emit(outcome, e.Created(id, uid, asdict(config), base_url, now_ms))
        subscription = self.state.subscriptions[id]
        subscription.opening = True
        try:
            for event in linked(id, rows.values()):
                self._link(outcome, event, tails)
                yield
        except BaseException:
            self.state.apply(e.Deleted(id))
            raise
        subscription.opening = False
        return outcome

    def delete(self, id: str) -> Outcome:  # noqa: A002
        outcome = Outcome()
        if id in self.state.subscriptions:
            self._emit(outcome, e.Deleted(id))
        return outcome

    def add_streams(self, id: str, paths: Sequence[str], tails: Mapping[str, str]) -> Outcome:  # noqa: A002
        subscription = self.get(id)
        outcome = Outcome()
        if subscription.config.wake_stream in paths:
            raise Refused(
                400, "INVALID_REQUEST", "a subscription cannot follow its own wake_stream"
            )
        rows = {
            path: (path, tails.get(path, ZERO), True)
            for path in paths
            if path not in subscription.explicit
        }
        self._require_room(len(rows), self._size(rows.values()))
        for event in linked(id, rows.values()):
            self._link(outcome, event, tails)
        return outcome

    def remove_stream(self, id: str, path: str) -> Outcome:  # noqa: A002
        """Ends the explicit link; an existing stream that the pattern matches stays linked by it."""
        subscription = self.get(id)
        outcome = Outcome()
        if path not in subscription.explicit:
            return outcome
        if self._wants(subscription, path) and self.state.tail_of(path) is not None:
            self._emit(outcome, e.Relabelled(id, path))
        else:
            self._emit(outcome, e.Unlinked(id, (path,)))
            self._drop_empty_wake(outcome, subscription)
        return outcome

    # The engine's side: streams change.

    def observe(self, changes: Iterable[Change]) -> Iterator[Outcome]:
        """Streams that were created, appended to, closed or deleted.

        In pieces, each a decision of its own: other commands may come between them.
        """
        outcome, links = Outcome(), 0
        touched: dict[str, None] = {}
        for path, tail, patterns in changes:
            if path.startswith(RESERVED_PREFIX):  # our own history must never wake anybody
                continue
            if tail is None:
                links += len(self.state.owners_of(path))
                self._forget_stream(outcome, path)
            else:
                if not is_empty(tail):
                    self._link_newcomer(outcome, path, patterns)
                self.state.note_tail(path, tail)
                owners = self.state.owners_of(path)
                links += len(owners)
                touched.update(dict.fromkeys(owners))
            if links >= OBSERVED_LINKS_STEP:
                yield outcome
                outcome, links = Outcome(), 0
        for id in touched:  # noqa: A001
            subscription = self.state.subscriptions.get(id)
            if subscription is not None and self._wake_if_idle(outcome, subscription):
                links += min(len(subscription.pending), WAKE_STREAMS_MAX)
            if links >= OBSERVED_LINKS_STEP:
                yield outcome
                outcome, links = Outcome(), 0
        yield outcome

    def _link_newcomer(self, outcome: Outcome, path: str, patterns: Iterable[str]) -> None:
        """A stream not linked at creation did not exist then: all of it is new to the subscription.

        That holds above the bound of links, too: it is for those who ask, and a wake is promised.
        """
        wanting = {id for pattern in patterns for id in self.state.patterns.get(pattern, ())}  # noqa: A001
        for id in sorted(wanting - self.state.owners_of(path)):  # noqa: A001
            subscription = self.state.subscriptions[id]
            if path != subscription.config.wake_stream and not subscription.opening:
                self._emit(outcome, e.Linked(id, ((path, BEFORE_FIRST, False),)))

    def _forget_stream(self, outcome: Outcome, path: str) -> None:
        """A deleted stream loses its glob links; an explicit link waits for it, from the start."""
        known = self.state.forget_tail(path)
        for id in sorted(self.state.owners_of(path)):  # noqa: A001
            subscription = self.state.subscriptions[id]
            link = self.state.link(subscription, path)
            if link is None or subscription.opening:  # what it opens with is looked at again
                continue
            if link.explicit and link.acked == ZERO and known is None:
                continue
            self._emit(outcome, e.Unlinked(id, (path,)))
            if link.explicit:
                self._emit(outcome, e.Linked(id, ((path, ZERO, True),)))
            self._drop_empty_wake(outcome, subscription)

    # The worker's side.

    def claim(self, id: str, worker: str, now_ms: int) -> Outcome:  # noqa: A002
        """A pull worker takes the lease; a wake is made on the spot if work waits without one."""
        subscription = self.get(id)
        self._require_type(subscription, "pull-wake")
        outcome = Outcome()
        wake = subscription.wake
        if wake is not None and wake.phase == "claimed":
            if wake.lease_until_ms is None or wake.lease_until_ms > now_ms:
                raise Refused(
                    409,
                    "ALREADY_CLAIMED",
                    f"{wake.holder!r} holds the lease",
                    current_holder=wake.holder,
                    generation=wake.generation,
                )
            self._finish(outcome, subscription, wake, "expired")
            wake = None
        if not subscription.pending:
            raise Refused(409, "NO_PENDING_WORK", "no linked stream has unacknowledged records")
        if wake is None:
            wake = self._wake(outcome, subscription)
        lease_until_ms = now_ms + subscription.config.lease_ttl_ms
        self._emit(outcome, e.Claimed(id, wake.wake_id, worker, lease_until_ms))
        outcome.effects = [Alarm(id, lease_until_ms)]
        return outcome

    def acknowledge(
        self,
        id: str,  # noqa: A002
        kind: str,
        request: WakeRequest,
        tails: Mapping[str, str | None],
        now_ms: int,
    ) -> Outcome:
        """A callback or an ack. `tails` has the present tail of every stream in `request.acks`."""
        subscription = self.get(id)
        self._require_type(subscription, kind)
        wake = self._require_current(subscription, request, now_ms)
        acks = self._checked_acks(subscription, request.acks, tails)
        outcome = Outcome()
        for path, _ in acks:
            tail = tails[path]
            if tail is not None and self.state.tail_of(path) is not None:  # not deleted meanwhile
                self.state.note_tail(path, tail)
        if acks:
            self._emit(outcome, e.Acked(id, acks))
        if request.done:
            self._finish(outcome, subscription, wake, "done")
            outcome.next_wake = self._wake_if_idle(outcome, subscription)
            return outcome
        lease_until_ms = now_ms + subscription.config.lease_ttl_ms
        if wake.phase == "sending":  # the receiver answers before its response reached us
            self._emit(outcome, e.Sent(id, wake.wake_id, lease_until_ms))
        else:
            self._emit(outcome, e.Extended(id, wake.wake_id, lease_until_ms))
        outcome.effects.append(Alarm(id, lease_until_ms))
        return outcome

    def release(self, id: str, request: WakeRequest, now_ms: int) -> Outcome:  # noqa: A002
        subscription = self.get(id)
        self._require_type(subscription, "pull-wake")
        wake = self._require_current(subscription, request, now_ms)
        outcome = Outcome()
        self._finish(outcome, subscription, wake, "released")
        outcome.next_wake = self._wake_if_idle(outcome, subscription)
        return outcome

    # The sender's side.

    def sent(self, id: str, wake_id: str, done: bool, now_ms: int) -> Outcome:  # noqa: A002
        """A delivery succeeded; `done` is the receiver's synchronous answer."""
        outcome = Outcome()
        subscription, wake = self._current(id, wake_id)
        if subscription is None or wake is None:
            return outcome
        if done:
            acks = tuple(
                (path, tail)
                for path, tail in wake.snapshot.items()
                if (link := self.state.link(subscription, path)) is not None and tail > link.acked
            )
            if acks:
                self._emit(outcome, e.Acked(id, acks))
            self._finish(outcome, subscription, wake, "done")
            outcome.next_wake = self._wake_if_idle(outcome, subscription)
        elif wake.phase == "sending":
            is_webhook = subscription.config.type == "webhook"
            lease_until_ms = now_ms + subscription.config.lease_ttl_ms if is_webhook else None
            self._emit(outcome, e.Sent(id, wake_id, lease_until_ms))
            if lease_until_ms is not None:
                outcome.effects.append(Alarm(id, lease_until_ms))
        return outcome

    def send_failed(self, id: str, wake_id: str, error: str, now_ms: int) -> Outcome:  # noqa: A002
        outcome = Outcome()
        subscription, wake = self._current(id, wake_id)
        if subscription is None or wake is None or wake.phase != "sending":
            return outcome
        attempt = wake.attempt + 1
        due_ms = now_ms + retry_delay_ms(attempt, self._draw_jitter())
        self._emit(outcome, e.SendFailed(id, wake_id, attempt, due_ms, error[:500]))
        outcome.effects.append(Alarm(id, due_ms))
        return outcome

    # Time passes.

    def tick(self, id: str, now_ms: int) -> Outcome:  # noqa: A002
        """A lease may have run out, or a retry may be due. Harmless at any other time."""
        outcome = Outcome()
        subscription = self.state.subscriptions.get(id)
        if subscription is None or subscription.wake is None:
            return outcome
        wake = subscription.wake
        due_ms = wake.next_attempt_at_ms if wake.phase == "sending" else wake.lease_until_ms
        if due_ms is None:
            return outcome
        if due_ms > now_ms:
            outcome.effects.append(Alarm(id, due_ms))
        elif wake.phase != "sending":
            self._finish(outcome, subscription, wake, "expired")
            self._wake_if_idle(outcome, subscription)
        elif subscription.config.type == "pull-wake" or any(
            id in self.state.owners_of(path) for path in wake.snapshot
        ):
            outcome.effects.append(Send(id, wake.wake_id))
        else:
            self._finish(outcome, subscription, wake, "empty")
            self._wake_if_idle(outcome, subscription)
        return outcome

    def resume(self) -> list[Effect]:
        """After replay: what has to be sent or waited for again."""
        effects: list[Effect] = []
        for subscription in self.state.subscriptions.values():
            wake = subscription.wake
            if wake is None:
                continue
            due_ms = wake.next_attempt_at_ms if wake.phase == "sending" else wake.lease_until_ms
            if due_ms is not None:
                effects.append(Alarm(subscription.id, due_ms))
            elif wake.phase == "sending":
                effects.append(Send(subscription.id, wake.wake_id))
        return effects

    # Parts.

    def _emit(self, outcome: Outcome, event: e.Event) -> None:
        self.state.apply(event)
        outcome.events.append(event)

    def _link(self, outcome: Outcome, event: e.Linked, tails: Mapping[str, str]) -> None:
        self._emit(outcome, event)
        for path, _, _ in event.links:
            if path in tails:
                self.state.note_tail(path, tails[path])

    def _size(self, rows: Collection[e.LinkRow]) -> int:
        """What these links would take."""
        size = sum(stream_bytes(path) for path, _, _ in rows if path not in self.state.streams)
        return size + sum(named_bytes(path) for path, _, explicit in rows if explicit)

    def _require_room(self, links: int, size: int) -> None:
        state = self.state
        if state.links + links > SUBSCRIPTION_LINKS_MAX:
            raise Refused(
                429,
                "TOO_MANY_LINKS",
                f"subscriptions may follow at most {SUBSCRIPTION_LINKS_MAX} streams, all"
                f" subscriptions counted together; {state.links} are followed now,"
                f" and this request adds {links}",
            )
        if state.link_bytes + size > SUBSCRIPTION_LINK_BYTES_MAX:
            raise Refused(
                429,
                "TOO_MANY_LINKS",
                f"what subscriptions follow may take at most {SUBSCRIPTION_LINK_BYTES_MAX} bytes of"
                f" memory, all subscriptions counted together; {state.link_bytes} are taken now,"
                f" and this request adds {size}",
            )

    def _wants(self, subscription: Subscription, path: str) -> bool:
        config = subscription.config
        return (
            config.pattern is not None
            and path != config.wake_stream
            and bool(matching(config.pattern, [path]))
        )

    def _pending_tails(self, subscription: Subscription) -> dict[str, str]:
        """The longest-waiting pending streams with their tails, as many as one wake may list."""
        pending = islice(subscription.pending, WAKE_STREAMS_MAX)
        return {path: self.state.tail_of(path) or ZERO for path in pending}

    def _drop_empty_wake(self, outcome: Outcome, subscription: Subscription) -> None:
        """An unclaimed pull wake whose work vanished must not stand in the way of the next one."""
        wake = subscription.wake
        if (
            wake is not None
            and wake.phase != "claimed"
            and subscription.config.type == "pull-wake"
            and not subscription.pending
        ):
            self._finish(outcome, subscription, wake, "empty")

    def _wake_if_idle(self, outcome: Outcome, subscription: Subscription) -> bool:
        if subscription.wake is not None or not subscription.pending or subscription.opening:
            return False
        self._wake(outcome, subscription)
        return True

    def _wake(self, outcome: Outcome, subscription: Subscription) -> Wake:
        snapshot = self._pending_tails(subscription)
        if (
            subscription.config.type == "pull-wake"
        ):  # its workers ack by themselves, offset by offset
            snapshot = dict(islice(snapshot.items(), 1))
        wake_id = self._mint_wake_id()
        event = e.Woke(
            subscription.id,
            wake_id,
            subscription.generation + 1,
            next(iter(snapshot)),
            tuple(snapshot.items()),
        )
        self._emit(outcome, event)
        outcome.effects.append(Send(subscription.id, wake_id))
        wake = subscription.wake
        assert wake is not None
        return wake

    def _finish(
        self, outcome: Outcome, subscription: Subscription, wake: Wake, reason: str
    ) -> None:
        self._emit(outcome, e.Finished(subscription.id, wake.wake_id, reason))

    def _current(self, id: str, wake_id: str) -> tuple[Subscription | None, Wake | None]:  # noqa: A002
        subscription = self.state.subscriptions.get(id)
        if subscription is None or subscription.wake is None:
            return None, None
        return (
            (subscription, subscription.wake)
            if subscription.wake.wake_id == wake_id
            else (None, None)
        )

    def _require_type(self, subscription: Subscription, kind: str) -> None:
        if subscription.config.type != kind:
            raise Refused(400, "INVALID_REQUEST", f"subscription {subscription.id!r} is not {kind}")

    def _require_current(
        self, subscription: Subscription, request: WakeRequest, now_ms: int
    ) -> Wake:
        wake = subscription.wake
        if (
            wake is None
            or request.token_uid != subscription.uid
            or request.token_generation != wake.generation
            or request.generation != wake.generation
            or request.wake_id != wake.wake_id
            or (wake.lease_until_ms is not None and wake.lease_until_ms <= now_ms)
        ):
            raise Refused(409, "FENCED", "this wake is over; a later one may be in flight")
        if subscription.config.type == "pull-wake" and wake.phase != "claimed":
            raise Refused(409, "FENCED", "this wake is not claimed")
        return wake

    def _checked_acks(
        self,
        subscription: Subscription,
        acks: Sequence[tuple[str, str]],
        tails: Mapping[str, str | None],
    ) -> tuple[tuple[str, str], ...]:
        """All acks, each stream once with its last offset; or a refusal if any of them is wrong."""
        reached: dict[str, str] = {}
        for path, offset in acks:
            link = self.state.link(subscription, path)
            if link is None:
                raise _invalid_offset(f"stream {path!r} is not part of this subscription")
            if not is_minted(offset):
                raise _invalid_offset(f"{offset!r} was not returned by a read of {path!r}")
            if offset < reached.get(path, link.acked):
                raise _invalid_offset(f"{offset} is before the acknowledged offset of {path!r}")
            tail = tails.get(path)
            if tail is None or offset > tail:
                raise _invalid_offset(f"{offset} is beyond the tail of {path!r}")
            reached[path] = offset
        return tuple(reached.items())


def _invalid_offset(message: str) -> Refused:
    return Refused(409, "INVALID_OFFSET", message)
