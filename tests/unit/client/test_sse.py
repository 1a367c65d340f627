"""The event parser gives the same events however the bytes are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.client import sse
from millstream.client.sse import Event, EventParser

WIRE = (
    b": hello\n\nevent: data\ndata:[1,\ndata:2]\n\nevent: control\ndata:{}\n\n"
    b"event: data\r\ndata: two\r\ndata:\r\n\r\nid: 7\nretry: 3\ndata:x\n\nevent: data\rdata:y\r\r"
    b"data:\n\nevent: data\ndata:half"
)
EVENTS = [
    Event("data", b"[1,\n2]"),
    Event("control", b"{}"),
    Event("data", b"two\n"),
    Event("message", b"x"),
    Event("data", b"y"),
    Event("message", b""),
]


@given(st.lists(st.integers(0, len(WIRE)), max_size=20))
def test_events_do_not_depend_on_the_cuts(cuts: list[int]) -> None:
    marks = [0, *sorted(cuts), len(WIRE)]
    parser = EventParser()
    found: list[Event] = []
    for a, b in itertools.pairwise(marks):
        found += parser.feed(WIRE[a:b])
    assert found == EVENTS


def test_byte_by_byte() -> None:
    parser = EventParser()
    found = [event for byte in WIRE for event in parser.feed(bytes([byte]))]
    assert found == EVENTS


def test_an_event_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "EVENT_BYTES_MAX", 100)
    parser = EventParser()
    parser.feed(b"data:" + b"x" * 60 + b"\n")
    with pytest.raises(sse.EventTooLarge):
        parser.feed(b"data:" + b"x" * 60)
