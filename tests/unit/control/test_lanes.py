"""Places for calls that wait."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import ExitStack
from typing import Any, cast

import pytest

from millstream.control import limits
from millstream.control.http import ApiError
from millstream.control.lanes import Lane
from support.server import ROOT


class Numbers:
    """Of an engine only what a lane touches: its metrics."""

    def __init__(self) -> None:
        self.counted: Counter[str] = Counter()

    def count(self, name: str, change: int) -> None:
        self.counted[name] += change


def test_a_lane_holds_so_many_and_refuses_the_next_at_once() -> None:
    numbers = Numbers()
    lane = Lane(cast(Any, numbers), 3)
    with ExitStack() as taken:
        for _ in range(3):
            taken.enter_context(lane.place())
        with pytest.raises(ApiError) as caught, lane.place():
            pass
        assert (caught.value.status_code, caught.value.code) == (503, "server_busy")
        assert caught.value.headers is not None
        assert caught.value.headers["Retry-After"] == "1"
        assert numbers.counted == {"control_waiting": 3, "control_crowded": 1}
    assert numbers.counted["control_waiting"] == 0


def test_a_place_is_given_back_when_its_call_fails() -> None:
    lane = Lane(cast(Any, Numbers()), 1)
    for _ in range(3):
        with pytest.raises(RuntimeError), lane.place():
            raise RuntimeError


def test_all_lanes_together_leave_room_for_short_calls() -> None:
    source = (ROOT / "engine/core/src/limits.rs").read_text()
    found = re.search(r"PROXY_CONCURRENT_MAX: usize = (\d+);", source)
    assert found
    lanes = (
        limits.WAITING_CALLS_MAX,
        limits.CLASS_CHANGES_MAX,
        limits.LISTINGS_MAX,
        limits.MEMBERSHIP_CALLS_MAX,
        limits.CLAIMS_MAX,
        limits.LARGE_VIEWS_MAX,
        limits.BACKUP_PLACES_MAX,
    )
    assert sum(lanes) <= int(found[1]) - 15
