"""What links cost: nothing of their own while nothing is outstanding and others follow the same streams; what is
counted for them is what they take; and a bound for all of them together, by number and by bytes."""

from __future__ import annotations

import gc
import json
import tracemalloc

import pytest

from millstream.control.subscriptions import machine as machine_module
from millstream.control.subscriptions.machine import Machine
from millstream.control.subscriptions.model import Refused
from millstream.control.subscriptions.state import State
from unit.control.machine_support import (
    at,
    create,
    new_machine,
    observe,
    picture,
    replayed,
    request,
)

STREAMS = 2000
SUBSCRIPTIONS = 20
COUNTED = 500
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


@pytest.mark.parametrize("length", [20, 1000])
@pytest.mark.parametrize("letter", ["x", "\N{GRINNING FACE}"])
@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("again", [False, True])
def test_what_is_counted_for_links_is_what_they_take(
    length: int, letter: str, is_named: bool, again: bool
) -> None:
    """When they are made, and when they come from disk."""

    def names() -> list[str]:
        return [f"{number:08d}/".ljust(length, letter) for number in range(COUNTED)]

    def made() -> State:
        machine = new_machine()
        if is_named:
            create(machine, pattern=None, streams=tuple(names()))
        else:
            create(machine, pattern="**", tails={name: at(10) for name in names()})
        return machine.state

    made()
    text = json.dumps(picture(made()))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        state = replayed(json.loads(text)) if again else made()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert state.links == COUNTED
    assert 0.2 < (after - before) / state.link_bytes < 1.0


def test_what_is_counted_for_links_goes_with_them() -> None:
    machine = new_machine()
    create(machine, "glob", tails=tails(10))
    alone = machine.state.link_bytes
    create(machine, "names", pattern=None, streams=("a", "b", "events/00000001"))
    machine.add_streams("names", ["b", "c"], {})
    machine.remove_stream("names", "a")
    observe(machine, [("b", at(1)), ("b", None)])
    assert machine.state.link_bytes > alone
    machine.delete("names")
    assert machine.state.link_bytes == alone
    machine.delete("glob")
    assert machine.state.link_bytes == 0


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
    observe(machine, [("events/00000007", at(20))])
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
    observe(machine, [(path, at(20))])
    done = request(machine, "s0", acks=((path, at(20)),), done=True)
    machine.acknowledge("s0", "webhook", done, {path: at(20)}, 1)
    create(machine, "late", tails=tails(10) | {path: at(20)})
    observe(machine, [(path, at(30))])
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
    observe(machine, [("events/new", at(5))])
    assert "events/new" in machine.get("s0").pending
    machine.delete("s1")
    create(machine, "in its place", tails=tails(10))


def test_what_links_take_has_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "SUBSCRIPTION_LINK_BYTES_MAX", 100_000)
    machine = subscribed(0)
    create(machine, "s0", pattern=None, streams=tuple(f"{n:02d}".ljust(1000) for n in range(30)))
    before = picture(machine.state)
    with pytest.raises(Refused, match="at most 100000 bytes") as refused:
        create(machine, "t", pattern=None, streams=tuple(f"{n:02d}".rjust(1000) for n in range(30)))
    assert (refused.value.status, refused.value.code) == (429, "TOO_MANY_LINKS")
    with pytest.raises(Refused):
        machine.add_streams("s0", [f"{n:02d}".rjust(1000) for n in range(30)], {})
    assert picture(machine.state) == before
    # The same streams again cost less than others would.
    create(machine, "t", pattern=None, streams=tuple(f"{n:02d}".ljust(1000) for n in range(10)))
    # A wake is promised to who is subscribed already.
    create(machine, "glob", pattern="**")
    observe(machine, [("/".join(["x" * 999, str(number)]), at(5)) for number in range(100)])
    assert machine.get("glob").linked == 100
    machine.delete("s0")
    machine.delete("glob")
    create(machine, "u", pattern=None, streams=tuple(f"{n:02d}".rjust(1000) for n in range(20)))
