"""The subscription machine, rule by rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from millstream.control.limits import WAKE_STREAMS_MAX
from millstream.control.subscriptions import events as e
from millstream.control.subscriptions.machine import (
    Alarm,
    Machine,
    Outcome,
    Send,
    retry_delay_ms,
)
from millstream.control.subscriptions.model import Refused
from millstream.control.subscriptions.offsets import BEFORE_FIRST, ZERO
from unit.control.machine_support import at, create, dump, new_machine, observe, request, whole


@pytest.fixture
def machine() -> Machine:
    return new_machine()


def acked(machine: Machine, name: str = "s") -> dict[str, str]:
    return {link.path: link.acked for link in machine.state.links_of(machine.get(name))}


def refusal(code: str, status: int = 409) -> object:
    class Matcher:
        def __eq__(self, other: object) -> bool:
            return isinstance(other, Refused) and (other.code, other.status) == (code, status)

    return Matcher()


# Linking.


def test_existing_matches_and_explicit_streams_start_at_their_tail(machine: Machine) -> None:
    tails = {"events/a": at(10), "other/x": at(20), "events/deep/b": at(5)}
    create(machine, streams=("other/x", "never/there"), tails=tails)
    assert acked(machine) == {"other/x": at(20), "never/there": ZERO, "events/a": at(10)}
    assert machine.get("s").wake is None


def test_a_stream_first_seen_through_an_append_starts_before_it(machine: Machine) -> None:
    create(machine)
    outcome = observe(machine, [("events/new", at(5))])
    assert acked(machine) == {"events/new": BEFORE_FIRST}
    assert outcome.effects == [Send("s", "w_1")]


def test_an_empty_stream_wakes_nobody_but_its_first_record_does(machine: Machine) -> None:
    create(machine, streams=("events/known",))
    assert observe(machine, [("events/new", at(0)), ("events/known", at(0))]).events == []
    assert observe(machine, [("events/new", at(3))]).effects == [Send("s", "w_1")]


def test_a_stream_that_never_exists_stays_linked_and_silent(machine: Machine) -> None:
    create(machine, pattern=None, streams=("never",))
    assert observe(machine, [("never", None)]).events == []
    assert machine.tick("s", 10**9).events == []
    assert acked(machine) == {"never": ZERO}
    assert observe(machine, [("never", at(1))]).effects == [Send("s", "w_1")]


def test_a_subscription_does_not_follow_its_own_wake_stream(machine: Machine) -> None:
    create(machine, kind="pull-wake", pattern="**", tails={"wake/pool": at(9)})
    assert acked(machine) == {}
    assert observe(machine, [("wake/pool", at(20))]).events == []
    with pytest.raises(Refused) as caught:
        machine.add_streams("s", ["wake/pool"], {})
    assert caught.value == refusal("INVALID_REQUEST", 400)


def test_reserved_streams_wake_nobody(machine: Machine) -> None:
    create(machine, pattern="**")
    assert observe(machine, [("__ds/state/subscriptions/1", at(5))]).events == []


def test_removing_an_explicit_link_leaves_the_glob_link_with_its_offset(machine: Machine) -> None:
    create(machine, streams=("events/a", "other"), tails={"events/a": at(4), "other": at(4)})
    machine.remove_stream("s", "events/a")
    machine.remove_stream("s", "other")
    machine.remove_stream("s", "absent")
    assert acked(machine) == {"events/a": at(4)}
    assert "events/a" not in machine.get("s").explicit
    assert list(machine.state.patterns) == ["events/*"]
    assert not any(map(machine.state.is_named, ("events/a", "other")))


def test_adding_a_known_stream_again_keeps_its_offset(machine: Machine) -> None:
    create(machine, tails={"events/a": at(4)})
    machine.add_streams("s", ["events/a", "b"], {"events/a": at(9), "b": at(2)})
    assert acked(machine) == {"events/a": at(4), "b": at(2)}
    assert "events/a" in machine.get("s").explicit
    assert machine.add_streams("s", ["b"], {"b": at(7)}).events == []


def test_deleting_a_subscribed_stream_ends_glob_links_and_resets_explicit_ones(
    machine: Machine,
) -> None:
    tails = {"events/a": at(4), "x": at(4)}
    create(machine, "s", streams=("x",), tails=tails)
    create(machine, "t", streams=("x",), tails=tails)
    observe(machine, [("events/a", None), ("x", None)])
    assert acked(machine, "s") == acked(machine, "t") == {"x": ZERO}
    assert not machine.get("s").pending
    observe(machine, [("events/a", at(2, epoch=8)), ("x", at(1, epoch=8))])
    assert acked(machine, "s") == {"x": ZERO, "events/a": BEFORE_FIRST}
    assert set(machine.get("t").pending) == {"x", "events/a"}


def test_a_recreated_stream_is_pending_even_if_it_is_shorter(machine: Machine) -> None:
    create(machine, tails={"events/a": at(100, epoch=7)})
    assert observe(machine, [("events/a", at(1, epoch=8))]).effects == [Send("s", "w_1")]


# Configuration.


def test_the_same_configuration_confirms_and_another_conflicts(machine: Machine) -> None:
    assert create(machine, streams=("b", "a")).created
    again = create(machine, streams=("a", "b"))
    assert not again.created
    assert again.events == []
    for changes in ({"lease_ttl_ms": 2000}, {"pattern": "x/*"}, {"description": "d"}):
        with pytest.raises(Refused) as caught:
            create(machine, streams=("a", "b"), **changes)
        assert caught.value == refusal("SUBSCRIPTION_ALREADY_EXISTS")


def test_confirming_under_another_address_moves_callbacks_there(machine: Machine) -> None:
    create(machine)
    subscription = machine.get("s")
    whole(machine.create("s", "uid-2", subscription.config, "https://public", {}, 5))
    assert (subscription.base_url, subscription.uid) == ("https://public", "uid-s")


def test_deleting_is_idempotent_and_voids_the_wake(machine: Machine) -> None:
    create(machine)
    observe(machine, [("events/a", at(1))])
    machine.delete("s")
    assert machine.delete("s").events == []
    assert machine.sent("s", "w_1", True, 5).events == []
    assert machine.tick("s", 10**9).events == []
    assert not machine.state.patterns
    assert not machine.state.streams
    assert not machine.state.links
    assert not machine.state.offsets


# Webhooks.


def test_done_acknowledges_the_snapshot_and_later_records_wake_again(machine: Machine) -> None:
    create(machine)
    observe(machine, [("events/a", at(1)), ("events/b", at(2))])
    observe(machine, [("events/a", at(9))])
    outcome = machine.sent("s", "w_1", True, 50)
    assert acked(machine) == {"events/a": at(1), "events/b": at(2)}
    assert outcome.next_wake
    wake = machine.get("s").wake
    assert wake is not None
    assert (wake.generation, wake.wake_id, wake.snapshot) == (2, "w_2", {"events/a": at(9)})


def test_only_one_wake_is_in_flight(machine: Machine) -> None:
    create(machine)
    assert observe(machine, [("events/a", at(1))]).effects
    assert observe(machine, [("events/a", at(2)), ("events/b", at(2))]).effects == []


def test_a_wake_lists_a_bounded_number_of_streams_and_the_rest_follow(machine: Machine) -> None:
    create(machine)
    observe(machine, [(f"events/{n}", at(1)) for n in range(WAKE_STREAMS_MAX + 5)])
    assert len(machine.views(machine.get("s"))) == WAKE_STREAMS_MAX
    machine.sent("s", "w_1", True, 1)
    assert len(machine.views(machine.get("s"))) == 5


def test_a_delivered_wake_that_is_not_answered_expires_and_wakes_again(machine: Machine) -> None:
    create(machine)
    observe(machine, [("events/a", at(1))])
    assert machine.sent("s", "w_1", False, 100).effects == [Alarm("s", 1100)]
    assert machine.tick("s", 1099).effects == [Alarm("s", 1100)]
    stale = request(machine)
    assert machine.tick("s", 1100).effects == [Send("s", "w_2")]
    with pytest.raises(Refused) as caught:
        machine.acknowledge("s", "webhook", stale, {}, 1101)
    assert caught.value == refusal("FENCED")


def test_failures_are_retried_with_growing_delays_and_show_in_the_status(machine: Machine) -> None:
    create(machine)
    observe(machine, [("events/a", at(1))])
    now, delays = 0, []
    for _ in range(8):
        (alarm,) = machine.send_failed("s", "w_1", "refused", now).effects
        assert isinstance(alarm, Alarm)
        delays.append(alarm.due_ms - now)
        assert machine.get("s").status == "failed"
        assert machine.tick("s", alarm.due_ms - 1).effects == [alarm]
        assert machine.tick("s", alarm.due_ms).effects == [Send("s", "w_1")]
        now = alarm.due_ms
    assert delays == [1000, 2000, 4000, 8000, 16000, 32000, 60000, 60000]
    machine.sent("s", "w_1", False, now)
    assert machine.get("s").status == "active"
    assert machine.get("s").generation == 1


@pytest.mark.parametrize(
    ("attempt", "jitter", "delay"), [(1, -1, 800), (1, 1, 1200), (99, 1, 72000)]
)
def test_jitter_is_a_fifth_either_way(attempt: int, jitter: float, delay: int) -> None:
    assert retry_delay_ms(attempt, jitter) == delay


def test_a_retry_whose_streams_are_all_gone_ends_quietly(machine: Machine) -> None:
    create(machine)
    observe(machine, [("events/a", at(1))])
    machine.send_failed("s", "w_1", "refused", 0)
    observe(machine, [("events/a", None)])
    outcome = machine.tick("s", 1000)
    assert outcome.events == [e.Finished("s", "w_1", "empty")]
    assert machine.get("s").status == "active"


def test_a_callback_may_overtake_the_response(machine: Machine) -> None:
    create(machine)
    observe(machine, [("events/a", at(1))])
    outcome = machine.acknowledge("s", "webhook", request(machine), {}, 10)
    assert outcome.effects == [Alarm("s", 1010)]
    assert machine.send_failed("s", "w_1", "response lost", 20).events == []
    done = request(machine, acks=(("events/a", at(1)),), done=True)
    assert not machine.acknowledge("s", "webhook", done, {"events/a": at(1)}, 30).next_wake
    assert machine.sent("s", "w_1", True, 40).events == []


# Acks.


@pytest.mark.parametrize(
    "changes",
    [
        {"token_uid": "another"},
        {"token_generation": 0},
        {"generation": 2},
        {"wake_id": "w_0"},
    ],
)
def test_anything_stale_is_fenced(machine: Machine, changes: dict[str, Any]) -> None:
    create(machine)
    observe(machine, [("events/a", at(1))])
    with pytest.raises(Refused) as caught:
        machine.acknowledge("s", "webhook", request(machine, **changes), {}, 1)
    assert caught.value == refusal("FENCED")


@pytest.mark.parametrize(
    "bad",
    [
        ("events/unknown", at(1)),
        ("events/a", "-1"),
        ("events/a", "now"),
        ("events/a", at(4)),
        ("events/a", at(11)),
    ],
)
def test_one_wrong_ack_refuses_them_all(machine: Machine, bad: tuple[str, str]) -> None:
    create(machine, tails={"events/a": at(5), "events/b": at(5)})
    observe(machine, [("events/a", at(10)), ("events/b", at(10))])
    acks = (("events/b", at(10)), bad)
    tails = {"events/a": at(10), "events/b": at(10), "events/unknown": at(5)}
    with pytest.raises(Refused) as caught:
        machine.acknowledge("s", "webhook", request(machine, acks=acks, done=True), tails, 1)
    assert caught.value == refusal("INVALID_OFFSET")
    assert acked(machine) == {"events/a": at(5), "events/b": at(5)}
    assert machine.get("s").wake is not None


def test_a_worker_may_acknowledge_what_the_feed_has_not_reported_yet(machine: Machine) -> None:
    create(machine)
    observe(machine, [("events/a", at(5))])
    done = request(machine, acks=(("events/a", at(9)),), done=True)
    assert not machine.acknowledge("s", "webhook", done, {"events/a": at(9)}, 1).next_wake
    assert observe(machine, [("events/a", at(5))]).effects == []  # an old report comes in late
    assert observe(machine, [("events/a", at(9))]).effects == []


def test_an_old_report_that_comes_late_does_not_hide_work(machine: Machine) -> None:
    create(machine, tails={"events/a": at(5)})
    observe(machine, [("events/a", at(9))])
    observe(machine, [("events/a", at(5))])
    assert set(machine.get("s").pending) == {"events/a"}


# Pull.


@pytest.fixture
def pull(machine: Machine) -> Machine:
    create(machine, kind="pull-wake")
    return machine


def test_two_workers_one_lease(pull: Machine) -> None:
    observe(pull, [("events/a", at(1))])
    pull.sent("s", "w_1", False, 0)
    assert pull.claim("s", "one", 100).effects == [Alarm("s", 1100)]
    with pytest.raises(Refused) as caught:
        pull.claim("s", "two", 200)
    assert caught.value == refusal("ALREADY_CLAIMED")
    assert caught.value.extra == {"current_holder": "one", "generation": 1}


def test_a_claim_makes_the_wake_itself_and_needs_no_announcement(pull: Machine) -> None:
    observe(pull, [("events/a", at(1))])
    pull.claim("s", "one", 0)
    done = request(pull, acks=(("events/a", at(1)),), done=True)
    pull.acknowledge("s", "pull-wake", done, {"events/a": at(1)}, 1)
    pull.state.note_tail("events/a", at(2))  # known, but not woken for yet
    outcome = pull.claim("s", "one", 2)
    assert outcome.effects == [Alarm("s", 1002)]
    assert pull.get("s").generation == 2


def test_a_claim_without_work_is_refused(pull: Machine) -> None:
    with pytest.raises(Refused) as caught:
        pull.claim("s", "one", 0)
    assert caught.value == refusal("NO_PENDING_WORK")


def test_a_wake_that_nobody_claims_does_not_expire(pull: Machine) -> None:
    observe(pull, [("events/a", at(1))])
    assert pull.sent("s", "w_1", False, 0).effects == []
    assert pull.tick("s", 10**9).events == []


def test_an_expired_claim_wakes_again_and_fences_the_old_worker(pull: Machine) -> None:
    observe(pull, [("events/a", at(1))])
    pull.claim("s", "one", 0)
    stale = request(pull)
    with pytest.raises(Refused) as caught:  # the lease is over, whether or not the timer rang
        pull.acknowledge("s", "pull-wake", stale, {}, 1000)
    assert caught.value == refusal("FENCED")
    assert pull.tick("s", 1000).effects == [Send("s", "w_2")]
    pull.claim("s", "two", 1001)
    with pytest.raises(Refused) as caught:
        pull.release("s", stale, 1002)
    assert caught.value == refusal("FENCED")


def test_a_claim_after_the_lease_ran_out_takes_over_before_the_timer(pull: Machine) -> None:
    observe(pull, [("events/a", at(1))])
    pull.claim("s", "one", 0)
    pull.claim("s", "two", 1000)
    wake = pull.get("s").wake
    assert wake is not None
    assert (wake.holder, wake.generation) == ("two", 2)


def test_heartbeats_keep_the_lease(pull: Machine) -> None:
    observe(pull, [("events/a", at(1))])
    pull.claim("s", "one", 0)
    for now in range(900, 9900, 900):
        pull.acknowledge("s", "pull-wake", request(pull), {}, now)
        assert pull.tick("s", now + 99).events == []
    assert pull.get("s").generation == 1


def test_release_with_work_left_wakes_again(pull: Machine) -> None:
    observe(pull, [("events/a", at(1))])
    pull.claim("s", "one", 0)
    assert pull.release("s", request(pull), 1).effects == [Send("s", "w_2")]


def test_acks_without_a_claim_are_fenced(pull: Machine) -> None:
    observe(pull, [("events/a", at(1))])
    with pytest.raises(Refused) as caught:
        pull.acknowledge("s", "pull-wake", request(pull), {}, 1)
    assert caught.value == refusal("FENCED")


def test_an_unclaimed_wake_whose_work_vanished_does_not_block_the_next(pull: Machine) -> None:
    observe(pull, [("events/a", at(1))])
    pull.sent("s", "w_1", False, 0)
    observe(pull, [("events/a", None)])
    assert pull.get("s").wake is None
    assert observe(pull, [("events/b", at(1))]).effects == [Send("s", "w_2")]


def test_a_missing_wake_stream_is_retried_and_claims_still_work(pull: Machine) -> None:
    observe(pull, [("events/a", at(1))])
    pull.send_failed("s", "w_1", "no such stream", 0)
    assert pull.get("s").status == "failed"
    assert pull.tick("s", 1000).effects == [Send("s", "w_1")]
    pull.claim("s", "one", 1001)
    assert pull.get("s").status == "active"
    assert pull.sent("s", "w_1", False, 1002).events == []


def test_the_two_kinds_do_not_take_each_others_calls(pull: Machine) -> None:
    create(pull, "hook")
    calls: tuple[Callable[[], Outcome], ...] = (
        lambda: pull.claim("hook", "w", 0),
        lambda: pull.release("hook", request(pull, "hook"), 0),
        lambda: pull.acknowledge("hook", "pull-wake", request(pull, "hook"), {}, 0),
        lambda: pull.acknowledge("s", "webhook", request(pull), {}, 0),
    )
    for call in calls:
        with pytest.raises(Refused) as caught:
            call()
        assert caught.value == refusal("INVALID_REQUEST", 400)


# Restart.


def test_after_replay_sends_and_timers_go_on(machine: Machine) -> None:
    create(machine, "sending")
    create(machine, "retrying", pattern="r/*")
    create(machine, "leased", pattern="l/*")
    create(machine, "waiting", kind="pull-wake", pattern="w/*")
    observe(machine, [(f"{p}/a", at(1)) for p in ("events", "r", "l", "w")])
    wakes = {
        name: sub.wake.wake_id for name, sub in machine.state.subscriptions.items() if sub.wake
    }
    machine.send_failed("retrying", wakes["retrying"], "x", 500)
    machine.sent("leased", wakes["leased"], False, 600)
    machine.sent("waiting", wakes["waiting"], False, 600)
    fresh = new_machine()
    for event in dump(machine.state):
        fresh.state.apply(event)
    assert fresh.resume() == [
        Send("sending", wakes["sending"]),
        Alarm("retrying", 1500),
        Alarm("leased", 1600),
    ]
