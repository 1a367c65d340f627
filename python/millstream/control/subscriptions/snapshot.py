"""The shortest history that leads to a state, taken in steps while decisions go on.

Sits between `state` and `writer`, which begins a new journal with it. Each event is about one subscription, so each is
seen in its own moment: what happened to it before is in what was seen, what happens later follows behind (`note`).
Its links are seen after that, some at a time. Invariant: the steps, and then `since`, lead to the state as it is: what
is repeated of a link has been seen already, and ends where it has ended.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from millstream.control.limits import JOURNAL_LINKS_PER_EVENT
from millstream.control.subscriptions import events as e
from millstream.control.subscriptions.state import chunks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from millstream.control.subscriptions.model import Subscription, Wake
    from millstream.control.subscriptions.state import State

# What seeing a subscription costs, in links.
_SUBSCRIPTION_WEIGHT = 20


class Snapshot:
    def __init__(self, state: State) -> None:
        self._state = state
        self._ahead = dict.fromkeys(reversed(state.subscriptions))
        self.since: list[e.Event] = []

    def note(self, events: Iterable[e.Event]) -> None:
        """Something is decided meanwhile: it counts where it is not going to be seen."""
        self.since += [event for event in events if event.id not in self._ahead]

    def steps(self) -> Iterator[list[e.Event]]:
        """Pieces of about as many links as one event may have."""
        step: list[e.Event] = []
        weight = 0
        while self._ahead:
            subscription = self._state.subscriptions.get(self._ahead.popitem()[0])
            if subscription is None or subscription.opening:  # then all of it comes later
                continue
            paths = list(self._state.paths_of(subscription))
            step += _heading(subscription)
            wake = subscription.wake
            weight += _SUBSCRIPTION_WEIGHT + len(subscription.config.streams)
            weight += len(wake.snapshot) if wake is not None else 0
            for chunk in chunks(paths, JOURNAL_LINKS_PER_EVENT):
                links = (self._state.link(subscription, path) for path in chunk)
                rows = tuple((link.path, link.acked, link.explicit) for link in links if link)
                if rows:
                    step.append(e.Linked(subscription.id, rows))
                weight += len(chunk)
                if weight >= JOURNAL_LINKS_PER_EVENT:
                    yield step
                    step, weight = [], 0
            if weight >= JOURNAL_LINKS_PER_EVENT:
                yield step
                step, weight = [], 0
        yield step


def _heading(subscription: Subscription) -> Iterator[e.Event]:
    yield e.Created(
        subscription.id,
        subscription.uid,
        asdict(subscription.config),
        subscription.base_url,
        subscription.created_at_ms,
        subscription.generation,
    )
    if subscription.wake is not None:
        yield from _dump_wake(subscription.id, subscription.wake)


def _dump_wake(id: str, wake: Wake) -> Iterator[e.Event]:  # noqa: A002
    yield e.Woke(id, wake.wake_id, wake.generation, wake.trigger, tuple(wake.snapshot.items()))
    if wake.attempt:
        due = wake.next_attempt_at_ms or 0
        yield e.SendFailed(id, wake.wake_id, wake.attempt, due, wake.last_error or "")
    if wake.phase == "open":
        yield e.Sent(id, wake.wake_id, wake.lease_until_ms)
    elif wake.phase == "claimed":
        yield e.Claimed(id, wake.wake_id, wake.holder or "", wake.lease_until_ms or 0)
