"""What concerns one subscription costs what it has, however many groups of streams the others make."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from millstream.control.limits import JOURNAL_LINKS_PER_EVENT
from millstream.control.subscriptions import state as state_module
from millstream.control.subscriptions.events import encode
from millstream.control.subscriptions.machine import Machine
from millstream.control.subscriptions.model import Refused
from millstream.control.subscriptions.state import State
from unit.control.machine_support import (
    at,
    create,
    creation,
    new_machine,
    observe,
    picture,
    replayed,
    whole,
)

OTHERS = 40


class Unwalked(dict[Any, Any]):
    """A table that nobody goes through: what is looked for is looked up."""

    def __iter__(self) -> Any:
        raise AssertionError("all groups were gone through")

    keys = values = items = __iter__


def with_all_pairs() -> Machine:
    """Each two of the others follow a stream of their own, so each stream has other owners."""
    machine = new_machine()
    for one in range(OTHERS):
        pairs = (sorted((one, other)) for other in range(OTHERS) if other != one)
        names = tuple(f"{low}.{high}" for low, high in pairs)
        create(machine, f"s{one}", pattern=None, streams=names)
    return machine


def test_other_subscriptions_groups_are_not_gone_through() -> None:
    machine = with_all_pairs()
    assert len(machine.state._groups) == OTHERS * (OTHERS - 1) // 2
    machine.state._groups = Unwalked(machine.state._groups)
    create(machine, "small", pattern=None, streams=("0.1", "alone"))
    small = machine.get("small")
    assert {link.path for link in machine.state.links_of(small)} == {"0.1", "alone"}
    assert {view.path for view in machine.views(small)} == {"0.1", "alone"}
    machine.delete("small")
    machine.delete("s0")
    assert "alone" not in machine.state.streams
    assert machine.state.owners_of("0.1") == {"s1"}
    assert len(list(machine.state.links_of(machine.get("s1")))) == OTHERS - 1


def test_a_deletion_goes_by_groups_not_by_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = new_machine()
    tails = {f"events/{number}": at(1) for number in range(2000)}
    create(machine, "stays", tails=tails)
    create(machine, "goes", tails=tails)
    moved: list[str] = []
    monkeypatch.setattr(State, "_move", lambda _, known, __: moved.append(known.path))
    machine.delete("goes")
    assert moved == []
    assert machine.state.links == 2000
    assert machine.state.owners_of("events/7") == {"stays"}


def test_groups_that_become_one_keep_all_streams() -> None:
    machine = new_machine()
    create(machine, "one", pattern=None, streams=("a", "b", "c"))
    create(machine, "two", pattern=None, streams=("b", "c", "d"))
    create(machine, "three", pattern=None, streams=("c", "d", "e"))
    machine.delete("two")  # what was for one and two, and for one: is one's; ...
    state = machine.state
    assert {path: set(state.owners_of(path)) for path in state.streams} == {
        "a": {"one"},
        "b": {"one"},
        "c": {"one", "three"},
        "d": {"three"},
        "e": {"three"},
    }
    assert len(state._groups) == 3
    assert picture(replayed(picture(state))) == picture(state)


def test_streams_that_nobody_follows_leave_in_steps_and_may_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state_module, "SWEPT_STREAMS_STEP", 10)
    machine = new_machine()
    create(machine, tails={f"events/{number}": at(5) for number in range(100)})
    machine.delete("s")
    state = machine.state
    assert len(state.streams) == 90
    create(machine, "named", pattern=None, streams=tuple(state.streams)[:3])
    assert {link.acked for link in state.links_of(machine.get("named"))} == {at(0, 0)}
    while state.sweep():
        pass
    assert len(state.streams) == 3
    machine.delete("named")
    assert (state.links, state.link_bytes, state.streams) == (0, 0, {})


def test_a_creation_takes_a_bounded_part_of_its_streams_at_a_time() -> None:
    machine = new_machine()
    tails = {f"events/{number}": at(1) for number in range(10_000)}
    links = [0]
    steps = creation(machine, tails=tails)
    with pytest.raises(StopIteration) as end:
        while True:
            next(steps)
            links.append(machine.state.links)
            with pytest.raises(Refused):
                machine.get("s")
    assert len(end.value.value.events) == 1 + 10_000 // JOURNAL_LINKS_PER_EVENT
    assert len(links) >= 20, "half of them to look which streams match"
    assert max(after - before for before, after in pairwise(links)) == JOURNAL_LINKS_PER_EVENT
    assert machine.get("s").linked == 10_000


def test_a_creation_that_is_given_up_leaves_nothing() -> None:
    machine = new_machine()
    before = picture(machine.state)
    steps = creation(machine, tails={f"events/{number}": at(1) for number in range(5000)})
    while not machine.state.links:
        next(steps)
    steps.close()
    assert picture(machine.state) == before
    assert (machine.state.links, machine.state.subscriptions) == (0, {})


def test_nothing_is_decided_about_a_subscription_before_it_has_its_links() -> None:
    machine = new_machine()
    steps = creation(machine, tails={f"events/{number}": at(1) for number in range(3000)})
    while not machine.state.links:
        next(steps)
    changes = [("events/new", at(5)), ("events/0", None), ("events/1", at(9))]
    assert observe(machine, changes).events == []
    assert not machine.state.owners_of("events/new")
    made = whole(steps).events
    after = observe(machine, changes).events
    assert {event.kind for event in after} == {"linked", "unlinked", "woke"}
    assert set(machine.get("s").pending) == {"events/new", "events/1"}
    assert not machine.state.owners_of("events/0")
    assert picture(replayed([encode(event) for event in made + after])) == picture(machine.state)
