"""Random histories of subscriptions: what must hold after every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from millstream._engine import matching
from millstream.control.subscriptions import machine as machine_module
from millstream.control.subscriptions import snapshot as snapshot_module
from millstream.control.subscriptions import state as state_module
from millstream.control.subscriptions.events import Event, decode, encode
from millstream.control.subscriptions.machine import Alarm, Outcome, Send, Steps, WakeRequest
from millstream.control.subscriptions.model import Refused
from millstream.control.subscriptions.offsets import is_pending
from millstream.control.subscriptions.snapshot import Snapshot
from millstream.control.subscriptions.state import named_bytes, stream_bytes
from unit.control.machine_support import (
    at,
    creation,
    in_order,
    new_machine,
    observe,
    picture,
    replayed,
    request,
)

NAMES = st.sampled_from(["hook", "pull", "wide"])
PATHS = st.sampled_from(["events/a", "events/b", "other", "wake/pool", "deep/er/x"])
KINDS = {"hook": "webhook", "pull": "pull-wake", "wide": "webhook"}


class Subscriptions(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.machine = new_machine()
        self.now_ms = 1_000_000
        self.streams: dict[str, str] = {}
        self.epoch = 1
        self.events: list[dict[str, Any]] = []
        self.alarms: set[tuple[str, int]] = set()
        self.sends: set[tuple[str, str]] = set()
        self.generations: dict[str, int] = {}
        self.tickets: list[tuple[str, WakeRequest]] = []
        self.creation: Steps | None = None
        self.relayed: list[tuple[str, str | None]] = []
        self.rewrite: tuple[Snapshot, Iterator[list[Event]], list[Event]] | None = None
        self.watched_names: set[str] = set()  # by what is touched alone
        self.watched_patterns: set[str] = set()

    def take(self, outcome: Outcome) -> Outcome:
        self.events += [encode(event) for event in outcome.events]
        if self.rewrite is not None:
            self.rewrite[0].note(outcome.events)
        for effect in outcome.effects:
            match effect:
                case Send(id=name, wake_id=wake_id):
                    self.sends.add((name, wake_id))
                case Alarm(id=name, due_ms=due_ms):
                    self.alarms.add((name, due_ms))
        return outcome

    @rule(name=NAMES)
    def create(self, name: str) -> None:
        if name in self.machine.state.subscriptions or self.creation is not None:
            return
        pattern = {"hook": "events/*", "pull": "**", "wide": None}[name]
        streams = ("other", "missing") if name == "wide" else ()
        self.creation, self.relayed = (
            creation(
                self.machine,
                name,
                KINDS[name],
                pattern=pattern,
                streams=streams,
                tails=dict(self.streams),
            ),
            [],
        )
        self.generations[name] = 0
        self.a_creation_goes_on()

    @precondition(lambda self: self.creation is not None)
    @rule()
    def a_creation_goes_on(self) -> None:
        """One link at a time. What is reported meanwhile is reported again."""
        assert self.creation is not None
        with (
            patch.object(state_module, "JOURNAL_LINKS_PER_EVENT", 1),
            patch.object(machine_module, "OBSERVED_LINKS_STEP", 1),
        ):
            try:
                next(self.creation)
            except StopIteration as end:
                self.creation = None
                self.take(end.value)
                self.take(observe(self.machine, self.relayed))

    @precondition(lambda self: self.creation is not None)
    @rule()
    def a_creation_is_given_up(self) -> None:
        assert self.creation is not None
        before = picture(self.machine.state)
        self.creation.close()
        self.creation = None
        assert picture(self.machine.state) == before

    @precondition(lambda self: self.creation is None)
    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        self.take(self.machine.delete(name))

    @precondition(lambda self: self.creation is None)
    @rule(name=NAMES, path=PATHS)
    def add_stream(self, name: str, path: str) -> None:
        tails = {path: self.streams[path]} if path in self.streams else {}
        self.attempt(lambda: self.machine.add_streams(name, [path], tails))

    @precondition(lambda self: self.creation is None)
    @rule(name=NAMES, path=PATHS)
    def remove_stream(self, name: str, path: str) -> None:
        self.attempt(lambda: self.machine.remove_stream(name, path))

    @rule(changed=st.lists(st.tuples(PATHS, st.integers(0, 3)), min_size=1, max_size=3))
    def streams_change(self, changed: list[tuple[str, int]]) -> None:
        for path, growth in changed:
            if growth == 0:
                if path in self.streams:
                    del self.streams[path]
                else:
                    self.epoch += 1
                    self.streams[path] = at(0, self.epoch)
            else:
                tail = self.streams.get(path)
                if tail is None:
                    self.epoch += 1
                    tail = at(0, self.epoch)
                self.streams[path] = f"{tail[:17]}{int(tail[17:]) + growth:016d}"
        paths = dict.fromkeys(path for path, _ in changed)
        changes = [(path, self.streams.get(path)) for path in paths]
        self.relayed += changes
        self.take(observe(self.machine, changes))

    @rule(milliseconds=st.integers(1, 2000))
    def time_passes(self, milliseconds: int) -> None:
        self.now_ms += milliseconds
        due = {entry for entry in self.alarms if entry[1] <= self.now_ms}
        self.alarms -= due
        for name, _ in sorted(due):
            self.take(self.machine.tick(name, self.now_ms))

    @rule(result=st.sampled_from(["done", "accepted", "failed"]))
    def a_send_ends(self, result: str) -> None:
        if not self.sends:
            return
        name, wake_id = min(self.sends)
        self.sends.discard((name, wake_id))
        if result == "failed":
            self.take(self.machine.send_failed(name, wake_id, "broken", self.now_ms))
        else:
            done = result == "done" and KINDS[name] == "webhook"
            self.take(self.machine.sent(name, wake_id, done, self.now_ms))

    @rule(worker=st.sampled_from(["one", "two"]))
    def claim(self, worker: str) -> None:
        before = self.wake_of("pull")
        outcome = self.attempt(lambda: self.machine.claim("pull", worker, self.now_ms))
        if outcome is not None:
            assert (
                before is None
                or before.phase != "claimed"
                or before.lease_until_ms is None
                or (before.lease_until_ms <= self.now_ms)
            )
            self.tickets.append(("pull", request(self.machine, "pull")))

    @rule(name=NAMES)
    def a_receiver_learns_of_its_wake(self, name: str) -> None:
        if self.wake_of(name) is not None:
            self.tickets.append((name, request(self.machine, name)))

    @rule(number=st.integers(0, 50), done=st.booleans(), all_read=st.booleans())
    def acknowledge(self, number: int, done: bool, all_read: bool) -> None:
        if not self.tickets:
            return
        name, ticket = self.tickets[number % len(self.tickets)]
        subscription = self.machine.state.subscriptions.get(name)
        acks: tuple[tuple[str, str], ...] = ()
        if subscription is not None and all_read:
            linked = [link.path for link in self.machine.state.links_of(subscription)]
            acks = tuple((path, self.streams[path]) for path in linked if path in self.streams)
        full = WakeRequest(
            ticket.token_uid,
            ticket.token_generation,
            ticket.wake_id,
            ticket.generation,
            acks,
            done,
        )
        wake = self.wake_of(name)
        tails = {path: self.streams.get(path) for path, _ in acks}
        outcome = self.attempt(
            lambda: self.machine.acknowledge(name, KINDS[name], full, tails, self.now_ms)
        )
        if outcome is not None:
            assert wake is not None
            assert wake.wake_id == ticket.wake_id
            if done and all_read:
                assert not outcome.next_wake

    @rule(number=st.integers(0, 50))
    def release(self, number: int) -> None:
        if self.tickets:
            name, ticket = self.tickets[number % len(self.tickets)]
            self.attempt(lambda: self.machine.release(name, ticket, self.now_ms))

    @rule()
    def a_rewrite_goes_on(self) -> None:
        """One link or one subscription at a time, while all else happens."""
        if self.rewrite is None:
            snapshot = Snapshot(self.machine.state)
            self.rewrite = snapshot, snapshot.steps(), []
        snapshot, steps, history = self.rewrite
        with patch.object(snapshot_module, "JOURNAL_LINKS_PER_EVENT", 1):
            step = next(steps, None)
        if step is not None:
            history += step
            return
        self.rewrite = None
        whole = [encode(event) for event in history + snapshot.since]
        assert in_order(picture(replayed(whole))) == in_order(picture(self.machine.state))

    @rule()
    def restart(self) -> None:
        """A crash: memory is rebuilt from the events, then the streams are listed."""
        machine = new_machine()
        machine._mint_wake_id = self.machine._mint_wake_id
        for row in self.events:
            machine.state.apply(decode(row))
        machine.state.touched_names |= self.watched_names
        machine.state.touched_patterns |= self.watched_patterns
        self.machine = machine
        self.rewrite = self.creation = None
        self.sends, self.alarms = set(), set()
        for effect in machine.resume():
            self.take(Outcome(effects=[effect]))
        known = [(path, self.streams.get(path)) for path in list(machine.state.streams)]
        self.take(observe(machine, [*self.streams.items(), *known]))

    def attempt(self, command: Any) -> Outcome | None:
        before = picture(self.machine.state)
        try:
            return self.take(command())
        except Refused:
            assert picture(self.machine.state) == before, "a refusal changed something"
            return None

    def wake_of(self, name: str) -> Any:
        subscription = self.machine.state.subscriptions.get(name)
        wake = subscription.wake if subscription is not None else None
        return replace(wake) if wake is not None else None

    @invariant()
    def replay_gives_the_same_state(self) -> None:
        state = picture(self.machine.state)
        assert picture(replayed(self.events)) == state
        assert picture(replayed(state)) == state

    @invariant()
    def pending_is_what_lies_past_the_acknowledged_offset(self) -> None:
        for subscription in self.machine.state.subscriptions.values():
            if subscription.opening:
                continue
            expected = {
                link.path
                for link in self.machine.state.links_of(subscription)
                if link.path in self.streams and is_pending(link.acked, self.streams[link.path])
            }
            assert set(subscription.pending) == expected

    @invariant()
    def no_work_is_forgotten(self) -> None:
        """Pending work has a wake; a wake has a send, a timer, or waits for a claim."""
        for name, subscription in self.machine.state.subscriptions.items():
            wake = subscription.wake
            if subscription.opening:
                assert wake is None
            elif wake is None:
                assert not subscription.pending, name
            elif wake.phase == "sending":
                armed = any(entry[0] == name for entry in self.alarms)
                assert armed or (name, wake.wake_id) in self.sends
            elif wake.lease_until_ms is not None:
                assert any(n == name and due <= wake.lease_until_ms for n, due in self.alarms)
            else:
                assert subscription.config.type == "pull-wake"
                assert subscription.pending, "an unclaimed wake without work blocks the next"

    @invariant()
    def generations_only_grow(self) -> None:
        for name, subscription in self.machine.state.subscriptions.items():
            assert subscription.generation >= self.generations.get(name, 0)
            self.generations[name] = subscription.generation

    @invariant()
    def indexes_agree_with_the_links(self) -> None:
        state = self.machine.state
        owners: dict[str, set[str]] = {}
        explicit: dict[str, int] = {}
        for name, subscription in state.subscriptions.items():
            links = list(state.links_of(subscription))
            assert subscription.linked == len(links)
            for link in links:
                path = link.path
                assert state.link(subscription, path) == link
                owners.setdefault(path, set()).add(name)
                apart = path in subscription.offsets
                assert apart == (link.acked != state.streams[path].base)
                if link.explicit:
                    explicit[path] = explicit.get(path, 0) + 1
                else:
                    assert subscription.config.pattern is not None
                    assert matching(subscription.config.pattern, [path])
        assert {path: set(state.owners_of(path)) for path in state.streams} == owners
        named = {path: known.named for path, known in state.streams.items() if known.named}
        assert named == explicit
        assert state.link_bytes == sum(map(stream_bytes, owners)) + sum(
            count * named_bytes(path) for path, count in explicit.items()
        )
        self.watched_names ^= {
            n for n in state.touched_names if (n in self.watched_names) != (n in named)
        }
        self.watched_patterns ^= {
            p
            for p in state.touched_patterns
            if (p in self.watched_patterns) != (p in state.patterns)
        }
        state.touched_names, state.touched_patterns = set(), set()
        assert self.watched_names == named.keys()
        assert self.watched_patterns == state.patterns.keys()
        assert state.links == sum(len(names) for names in owners.values())
        assert state.offsets == sum(len(s.offsets) for s in state.subscriptions.values())
        for known in state.streams.values():
            having = [s for s in state.subscriptions.values() if known.path in s.offsets]
            assert known.apart == len(having)
            assert known.tail in (None, known.base)


TestSubscriptions = Subscriptions.TestCase
TestSubscriptions.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
