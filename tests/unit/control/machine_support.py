"""Short forms for tests of the subscription machine."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from itertools import chain
from typing import Any

from millstream._engine import matching
from millstream.control.subscriptions.events import Event, decode, encode
from millstream.control.subscriptions.machine import Machine, Outcome, Steps, WakeRequest
from millstream.control.subscriptions.model import Config
from millstream.control.subscriptions.snapshot import Snapshot
from millstream.control.subscriptions.state import State

BASE = "http://127.0.0.1:4437"


def at(position: int, epoch: int = 7) -> str:
    return f"{epoch:016d}_{position:016d}"


def new_machine(jitter: float = 0.0) -> Machine:
    numbers = itertools.count(1)
    return Machine(lambda: f"w_{next(numbers)}", lambda: jitter)


def config(kind: str = "webhook", **changes: Any) -> Config:
    values: dict[str, Any] = {
        "type": kind,
        "pattern": "events/*",
        "streams": (),
        "webhook_url": "http://127.0.0.1:9/hook" if kind == "webhook" else None,
        "wake_stream": "wake/pool" if kind == "pull-wake" else None,
        "lease_ttl_ms": 1000,
        "description": None,
    }
    return Config(**{**values, **changes})


def create(machine: Machine, name: str = "s", kind: str = "webhook", **changes: Any) -> Outcome:
    tails = changes.pop("tails", {})
    return whole(creation(machine, name, kind, tails=tails, **changes))


def creation(machine: Machine, name: str = "s", kind: str = "webhook", **changes: Any) -> Steps:
    tails = changes.pop("tails", {})
    return machine.create(name, f"uid-{name}", config(kind, **changes), BASE, tails, 0)


def whole(steps: Steps) -> Outcome:
    """All steps at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome


def observe(machine: Machine, changes: Iterable[tuple[str, str | None]]) -> Outcome:
    """Streams change, and the engine says with each which patterns match it."""
    patterns = list(machine.state.patterns)
    whole = Outcome()
    for piece in machine.observe(
        [(path, tail, [p for p in patterns if matching(p, [path])]) for path, tail in changes]
    ):
        whole.events += piece.events
        whole.effects += piece.effects
    return whole


def request(machine: Machine, name: str = "s", **changes: Any) -> WakeRequest:
    """A request that fits the wake in flight, but for the changes."""
    subscription = machine.get(name)
    wake = subscription.wake
    values: dict[str, Any] = {
        "token_uid": subscription.uid,
        "token_generation": subscription.generation,
        "wake_id": wake.wake_id if wake else "w_none",
        "generation": subscription.generation,
    }
    return WakeRequest(**{**values, **changes})


def dump(state: State) -> list[Event]:
    return list(chain.from_iterable(Snapshot(state).steps()))


def picture(state: State) -> list[dict[str, Any]]:
    """Everything durable about a state, comparable: links have no order."""
    rows = [encode(event) for event in dump(state)]
    for row in rows:
        if isinstance(links := row.get("links"), tuple):
            row["links"] = tuple(sorted(links))
    return rows


def in_order(rows: list[dict[str, Any]]) -> list[str]:
    """A picture without the order in which subscriptions were made."""
    return sorted(map(repr, rows))


def replayed(events: list[dict[str, object]]) -> State:
    state = State()
    for row in events:
        state.apply(decode(row))
    return state
