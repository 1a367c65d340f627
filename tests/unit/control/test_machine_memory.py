"""What links cost: nothing of their own while nothing is outstanding, and a bound for all of them together."""

from __future__ import annotations

import tracemalloc

import pytest

from millstream.control.subscriptions import machine as machine_module
from millstream.control.subscriptions.machine import Machine
from millstream.control.subscriptions.model import Refused
from unit.control.machine_support import at, create, new_machine, picture, replayed, request

STREAMS = 2000
SUBSCRIPTIONS = 20
# A dictionary entry alone takes more.
BYTES_PER_LINK_MAX = 20


def tails(position: int) -> dict[str, str]:
    """As the engine lists them: other strings each time."""
    return {f"events/{number:08d}": at(position) for number in range(STREAMS)}


def subscribed(count: int = SUBSCRIPTIONS) -> Machine:
    machine = new_machine()
    for number in range(count):
        create(machine, f"s{number}", tails=tails(10))
    return machine


def test_quiet_links_of_further_subscriptions_take_no_memory() -> None:
    machine = subscribed(1)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(1, SUBSCRIPTIONS):
            create(machine, f"s{number}", tails=tails(10))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / (STREAMS * (SUBSCRIPTIONS - 1)) < BYTES_PER_LINK_MAX


def test_a_restart_keeps_quiet_links_as_small() -> None:
    rows = picture(subscribed().state)
    state = replayed(rows)
    assert state.links == STREAMS * SUBSCRIPTIONS
    assert state.offsets == 0
    for path, tail in tails(10).items():
        state.note_tail(path, tail)
    assert state.offsets == 0


def test_links_are_kept_apart_only_until_they_have_caught_up() -> None:
    machine = subscribed()
    machine.observe([("events/00000007", at(20))])
    assert machine.state.offsets == SUBSCRIPTIONS
    for number in range(SUBSCRIPTIONS):
        name = f"s{number}"
        assert list(machine.get(name).pending) == ["events/00000007"]
        wake = machine.get(name).wake
        assert wake is not None
        machine.sent(name, wake.wake_id, done=True, now_ms=1)
        assert not machine.get(name).pending
        assert machine.state.offsets == SUBSCRIPTIONS - number - 1


def test_a_subscription_that_is_behind_stays_behind_when_others_go_on() -> None:
    machine = subscribed(2)
    path = "events/00000007"
    machine.observe([(path, at(20))])
    done = request(machine, "s0", acks=((path, at(20)),), done=True)
    machine.acknowledge("s0", "webhook", done, {path: at(20)}, 1)
    create(machine, "late", tails=tails(10) | {path: at(20)})
    machine.observe([(path, at(30))])
    state = machine.state
    links = {name: state.link(machine.get(name), path) for name in ("s0", "s1", "late")}
    assert {name: link.acked for name, link in links.items() if link is not None} == {
        "s0": at(20),
        "s1": at(10),
        "late": at(20),
    }
    machine.delete("s1")
    assert picture(replayed(picture(state))) == picture(state)
    assert path in machine.get("s0").pending


def test_links_of_all_subscriptions_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "SUBSCRIPTION_LINKS_MAX", 2 * STREAMS + 1)
    machine = subscribed(2)
    before = picture(machine.state)
    with pytest.raises(Refused, match=f"at most {2 * STREAMS + 1} streams") as refused:
        create(machine, "one too many", tails=tails(10))
    assert (refused.value.status, refused.value.code) == (429, "TOO_MANY_LINKS")
    machine.add_streams("s0", ["room for one"], {})
    with pytest.raises(Refused):
        machine.add_streams("s0", ["no", "more"], {})
    machine.remove_stream("s0", "room for one")
    assert picture(machine.state) == before
    # A wake is promised to who is subscribed already.
    machine.observe([("events/new", at(5))])
    assert "events/new" in machine.get("s0").pending
    machine.delete("s1")
    create(machine, "in its place", tails=tails(10))
