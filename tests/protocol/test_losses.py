"""What each class keeps through an orderly stop and kill -9, and how a loss is told.

The promise is the table of `support.classes`: `disk` and `fsync` lose nothing at kill -9 and keep their
epoch; `memory` may lose its tail and `ephemeral` loses its records, both in a new epoch, with a gap.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from support.classes import (
    CLASSES,
    PAIRS,
    SURVIVES_KILL,
    WEAK,
    Gap,
    as_class,
    fork_as,
    read_through,
    set_class,
)
from support.http import Api, Response, producer
from support.pipeline import Pipeline
from support.server import Server
from support.sse import EventStream

pytestmark = pytest.mark.one_server

ENDINGS = ["stop", "kill"]
MEDIA = {"application/json": b"[1]", "text/plain": b"1", "application/octet-stream": b"1"}


@pytest.fixture(params=ENDINGS)
def restart(request: pytest.FixtureRequest, server: Server) -> Callable[[], None]:
    """Ends the server in one of the two ways and starts it over the same directory."""

    def end_and_start() -> None:
        getattr(server, request.param)()
        server.restart()

    return end_and_start


def waiting_get(api: Api, path: str, offset: str) -> Response:
    return api.get(path, offset=offset, live="long-poll")


# --- each class -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SURVIVES_KILL)
def test_a_durable_class_loses_nothing_and_keeps_its_epoch(
    server: Server, api: Api, path: str, name: str
) -> None:
    api.put(path, b"0,", headers=as_class(name))
    middle = api.post(path, b"1,").offset
    for number in range(2, 60):
        tail = api.post(path, b"%d," % number).offset
    server.crash_and_restart()
    assert api.head(path).offset == tail
    expected = b"".join(b"%d," % number for number in range(60))
    assert read_through(api, path) == (expected, [])
    assert read_through(api, path, middle) == (expected[4:], [])
    assert read_through(api, path, tail) == (b"", [])
    assert api.post(path, b"on").offset[:16] == tail[:16]


def test_memory_loses_nothing_in_an_orderly_stop(server: Server, api: Api, path: str) -> None:
    api.put(path, b"0,", headers=as_class("memory"))
    tail = api.post(path, b"1,").offset
    server.restart()
    assert read_through(api, path) == (b"0,1,", [])
    assert (api.head(path).offset, api.head(path)["stream-durability"]) == (tail, "memory")


def test_ephemeral_loses_its_records_and_nothing_else(
    api: Api, path: str, restart: Callable[[], None]
) -> None:
    made = api.put(
        path, b"[1,2]", "application/json", {**as_class("ephemeral"), "Stream-TTL": "99"}
    )
    tail = api.post(path, b"[3]", "application/json").offset
    restart()
    head = api.head(path)
    names = ("stream-incarnation", "content-type", "stream-durability")
    assert [head[name] for name in names] == [made[name] for name in names]
    assert (head["stream-ttl"], head.get("stream-closed")) == ("99", None)
    whole = api.get(path)
    assert (whole.body, whole.get("stream-up-to-date")) == (b"[]", "true")
    row = api.call("GET", f"/-/api/streams/{path}").json()
    assert (row["records"], row["bytes"]) == (0, 0)
    # An offset of before reads on, and says that the records in front of it are lost for certain.
    lost = api.get(path, offset=tail)
    assert Gap.of(lost) == Gap(tail, head.offset, "crash", certain=True)
    assert (lost.status, lost.body, lost.offset) == (200, b"[]", head.offset)
    assert lost["cache-control"] == "no-store"
    again = api.post(path, b"[4]", "application/json").offset
    assert again > tail
    later = api.get(path, offset=tail)
    assert (later.body, later.offset) == (b"[4]", again)
    assert Gap.of(later) == Gap(tail, head.offset, "crash", certain=True)
    assert Gap.of(api.get(path, offset=head.offset)) is None


def test_a_stream_in_memory_that_is_appended_to_outlives_its_ttl_and_a_crash(
    server: Server, api: Api, path: str
) -> None:
    api.put(path, b"kept", headers={"Stream-TTL": "2"})
    set_class(api, path, "ephemeral")
    until = time.monotonic() + 4.5
    while time.monotonic() < until:
        assert api.post(path, b"x").status == 204
        time.sleep(0.1)  # the age of the stream is what this is about
    server.crash_and_restart()
    answer = api.get(path)
    assert (answer.status, answer.body) == (200, b"kept")


def test_a_possible_loss_is_told_to_whoever_comes_back(server: Server, api: Api, path: str) -> None:
    api.put(path, b"0,", headers=as_class("memory"))
    middle = api.post(path, b"1,").offset
    tail = api.post(path, b"2,").offset
    server.crash_and_restart()
    head = api.head(path).offset
    assert head > tail, "a new epoch begins where something may be lost"
    kept = api.get(path).body
    assert b"0,1,2,".startswith(kept)
    gap = Gap.of(api.get(path, offset=tail))
    assert gap == Gap(tail, head, "crash", certain=kept != b"0,1,2,")
    # Also to a reader that had not come so far, and while nothing follows the loss yet.
    for offset, expected in (("-1", kept), (middle, kept[4:])):
        body, gaps = read_through(api, path, offset)
        assert (body, [(gap.end, gap.reason) for gap in gaps]) == (expected, [(head, "crash")])
        with EventStream.open(api, path, offset) as events:
            told = [event.json() for event in events.until_up_to_date() if event.kind == "control"]
        found = [gap for gap in map(Gap.of_control, told) if gap is not None]
        assert [gap.end for gap in found] == [head]
        assert told[-1]["streamNextOffset"] == head
    after = api.post(path, b"3,").offset
    assert read_through(api, path, tail) == (b"3,", [gap])
    body, gaps = read_through(api, path, middle)
    assert (body, [gap.end for gap in gaps]) == (kept[4:] + b"3,", [head])
    body, gaps = read_through(api, path)
    assert (body, [gap.end for gap in gaps]) == (kept + b"3,", [head])
    assert read_through(api, path, after) == (b"", [])


@pytest.mark.parametrize("name", WEAK)
def test_every_way_of_reading_tells_the_gap_once(
    server: Server, api: Api, path: str, name: str
) -> None:
    tails = {}
    for media, body in MEDIA.items():
        api.put(f"{path}/{media}", body, media, as_class(name))
        tails[media] = api.post(f"{path}/{media}", body, media).offset
    server.crash_and_restart()
    for media, tail in tails.items():
        check_every_way_of_reading(api, f"{path}/{media}", media, tail)


def check_every_way_of_reading(api: Api, path: str, media: str, tail: str) -> None:
    expected = Gap.of(api.get(path, offset=tail))
    assert expected is not None
    assert (expected.begin, expected.end) == (tail, api.head(path).offset)
    # Nothing to read yet: a waiting reader must not wait with the news.
    polled = waiting_get(api, path, tail)
    assert (Gap.of(polled), polled.offset) == (expected, expected.end), polled
    with EventStream.open(api, path, tail) as events:
        control = events.control()
        assert (Gap.of_control(control), control["streamNextOffset"]) == (expected, expected.end)
        newest = api.post(path, MEDIA[media], media).offset
        assert events.next().kind == "data"
        control = events.control()
        assert (control["streamNextOffset"], Gap.of_control(control)) == (newest, None)
    polled = waiting_get(api, path, tail)
    assert (Gap.of(polled), polled.offset, polled.body) == (expected, newest, MEDIA[media])
    with EventStream.open(api, path, tail) as events:
        seen = events.until_up_to_date()
    told = [Gap.of_control(event.json()) for event in seen if event.kind == "control"]
    assert [gap for gap in told if gap is not None] == [expected]
    assert sum(event.kind == "data" for event in seen) == 1


@pytest.mark.parametrize("again", ["stop", "kill"])
def test_two_losses_at_one_place_are_one_gap_that_leads_to_bytes(
    server: Server, api: Api, path: str, again: str
) -> None:
    """An epoch whose bytes are all lost has a name, and nothing else: no reader is sent there."""
    api.put(path, b"kept;", headers=as_class("fsync"))
    set_class(api, path, "ephemeral")
    tail = api.head(path).offset
    server.crash_and_restart()
    api.post(path, b"first;")
    told = Gap.of(api.get(path, offset=tail))
    getattr(server, again)()
    server.restart()
    pipeline = Pipeline(api)
    for body in (b"", b"other;"):
        newest = api.post(path, body).offset if body else api.head(path).offset
        read = api.get(path, offset=tail)
        gap = Gap.of(read)
        assert gap is not None
        assert told is not None
        assert (read.body, read.offset) == (body, newest)
        assert gap.end > told.end, "one offset for two byte strings"
        behind = api.get(path, offset=gap.end)
        assert (behind.body, Gap.of(behind)) == (body, None)
        assert read_through(api, path) == (b"kept;" + body, [gap])
        with EventStream.open(api, path, tail) as events:
            controls = [
                event.json() for event in events.until_up_to_date() if event.kind == "control"
            ]
        assert [found for found in map(Gap.of_control, controls) if found is not None] == [gap]
        [place] = pipeline.tail(path, {"offset": tail})["at"]
        assert (place["offset"], place["gap"]["to"]) == (gap.end, gap.end)
    read_by_ranges = pipeline.read(pipeline.whole(path))
    assert [found["to"] for found in read_by_ranges.gaps] == [gap.end]


@pytest.mark.parametrize("name", WEAK)
def test_a_reader_that_begins_in_the_new_epoch_is_told_of_no_gap(
    server: Server, api: Api, path: str, name: str
) -> None:
    api.put(path, b"1", headers=as_class(name))
    server.crash_and_restart()
    head = api.head(path).offset
    with EventStream.open(api, path, head) as events, api.connect() as polling:
        assert Gap.of_control(events.control()) is None
        target = api.target(path, offset=head, live="long-poll")
        polling.send(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        api.wait_for_metric("millstream_long_polls", 1)
        newest = api.post(path, b"2").offset
        assert events.next().data == "2"
        control = events.control()
        assert (control["streamNextOffset"], Gap.of_control(control)) == (newest, None)
        polled = polling.read_response()
        assert (polled.body, Gap.of(polled)) == (b"2", None)
    assert Gap.of(api.get(path, offset=head)) is None


def test_no_offset_ever_names_two_byte_strings(server: Server, api: Api, path: str) -> None:
    """Crash after crash: each offset that was ever told leads to its own bytes or to a gap."""
    told: dict[str, list[str]] = {name: [] for name in WEAK}
    for name in WEAK:
        api.put(f"{path}/{name}", headers=as_class(name))
    for turn in range(4):
        for number in range(3):
            for name in WEAK:
                told[name].append(api.post(f"{path}/{name}", b"%d-%d;" % (turn, number)).offset)
        server.crash_and_restart()
    everything = [b"%d-%d" % (turn, number) for turn in range(4) for number in range(3)]
    for name, offsets in told.items():
        api.post(f"{path}/{name}", b"last;")
        assert offsets == sorted(set(offsets))
        for index, offset in enumerate(offsets):
            body, gaps = read_through(api, f"{path}/{name}", offset)
            left = body.split(b";")[:-1]
            allowed = [*everything[index + 1 :], b"last"]
            assert [record for record in allowed if record in left] == left, (offset, body)
            assert left[-1] == b"last"
            # At least the last crash lies behind every one of these offsets.
            assert gaps, (offset, body)
            assert {gap.reason for gap in gaps} == {"crash"}


# --- control operations are durable in every class --------------------------------------------


@pytest.mark.parametrize("name", CLASSES)
def test_close_and_delete_never_come_back(
    api: Api, path: str, restart: Callable[[], None], name: str
) -> None:
    closed, ended, gone, again = (f"{path}/{end}" for end in ("closed", "ended", "gone", "again"))
    for stream in (closed, ended, gone, again):
        api.put(stream, b"body", headers=as_class(name))
    assert api.close_stream(closed).status == 204
    assert api.post(ended, b"end", headers={"Stream-Closed": "true"}).status == 204
    assert api.delete(gone).status == 204
    old = api.head(again)
    assert api.delete(again).status == 204
    new = api.put(again, b"new", headers=as_class(name))
    restart()
    assert api.head(gone).status == 404
    assert api.head(again)["stream-incarnation"] == new["stream-incarnation"]
    recreated = api.get(again, offset=old.offset)
    gap = Gap.of(recreated)
    assert gap is not None
    assert (gap.reason, gap.certain) == ("recreated", True)
    for stream, content in ((closed, b"body"), (ended, b"bodyend")):
        assert api.post(stream, b"more").code == "stream_closed"
        body, _ = read_through(api, stream)
        head = api.head(stream)
        assert (head["stream-closed"], head["stream-durability"]) == ("true", name)
        ended_here = api.get(stream, offset=head.offset)
        assert (ended_here["stream-closed"], ended_here.body) == ("true", b"")
        if name in SURVIVES_KILL:
            assert body == content
        elif name == "memory":
            # The close is a synced frame, and what stands before it in the log is synced with it.
            assert body == content
        else:
            assert content.startswith(body)


# --- producers --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SURVIVES_KILL)
def test_duplicates_stay_duplicates(server: Server, api: Api, path: str, name: str) -> None:
    api.put(path, headers=as_class(name))
    for seq in range(5):
        assert api.post(path, b"%d," % seq, headers=producer("p", 2, seq)).status == 200
    server.crash_and_restart()
    for seq in range(5):
        duplicate = api.post(path, b"%d," % seq, headers=producer("p", 2, seq))
        assert (duplicate.status, duplicate["producer-seq"]) == (204, "4")
    assert api.post(path, b"9,", headers=producer("p", 2, 9)).code == "producer_gap"
    assert api.post(path, b"x,", headers=producer("p", 1, 0)).code == "producer_fenced"
    assert api.post(path, b"5,", headers=producer("p", 2, 5)).status == 200
    assert api.get(path).body == b"0,1,2,3,4,5,"


@pytest.mark.parametrize("name", WEAK)
def test_a_producer_goes_on_at_any_number_after_a_loss(
    server: Server, api: Api, path: str, name: str
) -> None:
    tries = [(epoch, seq) for epoch in (2, 3) for seq in (0, 3, 4, 17)]
    for epoch, seq in tries:
        stream = f"{path}/{epoch}-{seq}"
        api.put(stream, headers=as_class(name))
        for number in range(4):
            api.post(stream, b"%d," % number, headers=producer("p", 2, number))
    server.crash_and_restart()
    for epoch, seq in tries:
        stream = f"{path}/{epoch}-{seq}"
        # What a log still has is recognised.
        kept = api.read_all(stream).count(b",")
        if epoch == 2 and seq < kept:
            again = api.post(stream, b"x", headers=producer("p", epoch, seq))
            assert (again.status, again["producer-seq"]) == (204, str(kept - 1)), (epoch, seq)
            continue
        resumed = api.post(stream, b"on,", headers=producer("p", epoch, seq))
        assert (resumed.status, resumed["producer-seq"]) == (200, str(seq)), (epoch, seq)
        # From here on it is an ordinary producer again.
        assert api.post(stream, b"on,", headers=producer("p", epoch, seq)).status == 204
        gap = api.post(stream, b"on,", headers=producer("p", epoch, seq + 2))
        assert (gap.code, gap["producer-expected-seq"]) == ("producer_gap", str(seq + 1))
        fenced = api.post(stream, b"x,", headers=producer("p", epoch - 1, 0))
        assert fenced.code == "producer_fenced"
        assert api.post(stream, b"end", headers=producer("p", epoch, seq + 1)).status == 200
        assert api.read_all(stream).endswith(b"on,end")


@pytest.mark.parametrize("name", WEAK)
def test_what_a_producer_went_past_after_a_loss_is_no_duplicate(
    server: Server, api: Api, path: str, name: str
) -> None:
    api.put(path, headers=as_class(name))
    for seq in range(2):
        api.post(path, b"%d," % seq, headers=producer("p", 2, seq))
    server.crash_and_restart()
    kept = api.read_all(path)
    # It sends again what it has no answer for, and the newest of it comes first.
    assert api.post(path, b"4,", headers=producer("p", 2, 4)).status == 200
    for seq in (2, 3):
        refused = api.post(path, b"%d," % seq, headers=producer("p", 2, seq))
        assert (refused.status, refused.code) == (409, "producer_gap")
        told = (refused["producer-expected-seq"], refused["producer-received-seq"])
        assert told == ("5", str(seq))
    assert api.post(path, b"4,", headers=producer("p", 2, 4)).status == 204
    assert api.post(path, b"5,", headers=producer("p", 2, 5)).status == 200
    assert api.post(path, b"3,", headers=producer("p", 2, 3)).code == "producer_gap"
    assert api.read_all(path) == kept + b"4,5,"


def send_again(api: Api, path: str, count: int) -> None:
    """A producer repeats its numbers, the oldest first: what is stored is a duplicate, what is not is taken."""
    kept = api.read_all(path)
    for seq in range(count):
        sent = api.post(path, b"%d," % seq, headers=producer("p", 2, seq))
        assert sent.status == (204 if b"%d," % seq in kept else 200), (seq, kept)
    assert api.read_all(path) == b"".join(b"%d," % seq for seq in range(count))


@pytest.mark.parametrize("name", [*SURVIVES_KILL, "memory"])
def test_a_time_in_memory_forgets_no_stored_number(
    api: Api, path: str, restart: Callable[[], None], name: str
) -> None:
    """In memory at the end, or there and back, with appends or without: what is stored is never stored again."""
    streams = [f"{path}/{count}-{back}" for count in (3, 5) for back in ("back", "stays")]
    for stream in streams:
        api.put(stream, headers=as_class(name))
        for seq in range(3):
            api.post(stream, b"%d," % seq, headers=producer("p", 2, seq))
        set_class(api, stream, "ephemeral")
        for seq in range(3, int(stream[len(path) + 1])):
            api.post(stream, b"%d," % seq, headers=producer("p", 2, seq))
    restart()
    for stream in streams:
        assert api.read_all(stream) == b"0,1,2,"
        if stream.endswith("back"):
            set_class(api, stream, name)
        send_again(api, stream, 5)


def test_a_number_that_was_sent_again_after_a_loss_is_not_stored_behind_changes_of_class(
    server: Server, api: Api, path: str
) -> None:
    api.put(path, headers=as_class("memory"))
    for seq in range(3):
        api.post(path, b"%d," % seq, headers=producer("p", 2, seq))
    server.crash_and_restart()
    send_again(api, path, 3)
    for name in ("ephemeral", "memory", "ephemeral", "fsync"):
        set_class(api, path, name)
        send_again(api, path, 3)


def test_what_a_fork_keeps_of_a_stream_in_memory_keeps_its_producers(
    api: Api, path: str, restart: Callable[[], None]
) -> None:
    api.put(path, headers=as_class("ephemeral"))
    for seq in range(3):
        api.post(path, b"%d," % seq, headers=producer("p", 2, seq))
    assert api.put(f"{path}/fork", b"", None, fork_as(path, "fsync")).status == 201
    for seq in range(3, 5):
        api.post(path, b"%d," % seq, headers=producer("p", 2, seq))
    restart()
    assert api.read_all(path) == b"0,1,2,"
    send_again(api, path, 5)


def test_the_stream_seq_after_a_restart_is_that_of_the_last_kept_record(
    api: Api, path: str, restart: Callable[[], None]
) -> None:
    api.put(path)
    kept = api.post(path, b"kept,", headers={"Stream-Seq": "b"}).offset
    set_class(api, path, "ephemeral")
    api.post(path, b"lost,", headers={"Stream-Seq": "d"})
    api.post(path, b"lost,")
    # The next checkpoint writes its state anew.
    assert api.put(f"{path}/fork", b"", None, fork_as(path, "fsync", kept)).status == 201
    restart()
    assert api.post(path, b"old", headers={"Stream-Seq": "b"}).code == "sequence_conflict"
    assert api.post(path, b"again,", headers={"Stream-Seq": "d"}).status == 204
    assert api.read_all(path) == b"kept,again,"


def test_a_close_whose_bytes_are_lost_is_no_duplicate(
    api: Api, path: str, restart: Callable[[], None]
) -> None:
    closing = {**producer("p", 2, 0), "Stream-Closed": "true"}
    for end in ("bytes", "alone", "kept"):
        stream, body = f"{path}/{end}", b"" if end == "alone" else b"end"
        api.put(stream, headers=as_class("ephemeral"))
        for _ in range(2):
            assert api.post(stream, body, headers=closing).status in (200, 204)
    # A fork makes what it inherits durable, and with it who sent it.
    assert api.put(f"{path}/fork", b"", None, fork_as(f"{path}/kept", "fsync")).status == 201
    restart()
    again = api.post(f"{path}/bytes", b"end", headers=closing)
    assert (again.status, again.code) == (409, "stream_closed")
    assert api.post(f"{path}/alone", b"", headers=closing).status == 204
    assert api.post(f"{path}/kept", b"end", headers=closing).status == 204
    assert [api.read_all(f"{path}/{end}") for end in ("bytes", "kept")] == [b"", b"end"]


# --- changes of class, and forks --------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_change_that_was_acknowledged_holds_through_kill_9(
    server: Server, api: Api, path: str, before: str, after: str
) -> None:
    made = api.put(path, b"0,", headers=as_class(before))
    api.post(path, b"1,")
    set_class(api, path, after)
    server.crash_and_restart()
    head = api.head(path)
    assert head["stream-durability"] == after
    assert head["stream-incarnation"] == made["stream-incarnation"]
    body, _ = read_through(api, path)
    if before in SURVIVES_KILL or after in SURVIVES_KILL:
        assert body == b"0,1,", "it was promised under one of the two classes"
    assert b"0,1,".startswith(body)


def test_what_is_written_behind_a_change_has_the_promise_of_the_new_class(
    server: Server, api: Api, path: str
) -> None:
    middles, tails, kept = {}, {}, {}
    streams = {f"{path}/{before}-{after}": (before, after) for before, after in PAIRS}
    for stream, (before, after) in streams.items():
        api.put(stream, b"0,", headers=as_class(before))
        set_class(api, stream, after)
        middles[stream] = api.post(stream, b"1,").offset
        tails[stream] = api.post(stream, b"2,").offset
    for turn in range(2):  # the second time every weak stream begins in an epoch of a loss
        server.crash_and_restart()
        for stream, (_, after) in streams.items():
            later, gaps = read_through(api, stream, middles[stream])
            head = api.head(stream)
            assert head["stream-durability"] == after
            if after in SURVIVES_KILL:
                assert (later, gaps, head.offset) == (b"2,", [], tails[stream]), stream
                assert read_through(api, stream) == (kept.get(stream, b"0,") + b"1,2,", [])
            else:
                assert later in (b"", b"2,"), stream
                assert Gap.of(api.get(stream, offset=tails[stream])) is not None, stream
        if turn == 0:
            for stream in streams:
                kept[stream] = read_through(api, stream)[0]
                middles[stream] = api.post(stream, b"1,").offset
                tails[stream] = api.post(stream, b"2,").offset


@pytest.mark.parametrize(
    ("source", "fork"), [pair for pair in PAIRS if pair[0] in WEAK and pair[1] in SURVIVES_KILL]
)
def test_a_durable_fork_makes_what_it_inherits_durable(
    server: Server, api: Api, path: str, source: str, fork: str
) -> None:
    tails = {}
    for end in ("deleted", "kept"):
        one, two = f"{path}/{end}", f"{path}/{end}-fork"
        api.put(one, b"in,", headers=as_class(source))
        tails[two] = api.post(one, b"herited,").offset
        api.post(one, b"later")
        assert api.put(two, b"", None, fork_as(one, fork, tails[two])).status == 201
        if end == "deleted":
            assert api.delete(one).status == 204
    server.crash_and_restart()
    for end in ("deleted", "kept"):
        one, two = f"{path}/{end}", f"{path}/{end}-fork"
        assert read_through(api, two) == (b"in,herited,", [])
        assert (api.head(two).offset, api.head(two)["stream-durability"]) == (tails[two], fork)
        assert api.head(one).status == (410 if end == "deleted" else 200)
        assert api.post(two, b"own").status == 204
        assert read_through(api, two) == (b"in,herited,own", [])


def test_forks_of_every_pair_of_classes_after_a_crash(server: Server, api: Api, path: str) -> None:
    tails: dict[str, str] = {}
    for source, fork in PAIRS:
        one, two = f"{path}/{source}-{fork}", f"{path}/{source}-{fork}-fork"
        api.put(one, b"in,", headers=as_class(source))
        api.post(one, b"herited,")
        assert api.put(two, b"", None, fork_as(one, fork)).status == 201
        tails[two] = api.post(two, b"own").offset
        tails[one] = api.post(one, b"later").offset
    server.crash_and_restart()
    for source, fork in PAIRS:
        one, two = f"{path}/{source}-{fork}", f"{path}/{source}-{fork}-fork"
        own, _ = read_through(api, two)
        whole = b"in,herited,own"
        if fork in SURVIVES_KILL:
            assert (own, api.head(two).offset) == (whole, tails[two]), (source, fork)
        else:
            assert whole.startswith(own), (source, fork)
            assert Gap.of(api.get(two, offset=tails[two])) is not None, (source, fork)
            if source in SURVIVES_KILL:
                assert own.startswith(b"in,herited,"), (source, fork)
        theirs, _ = read_through(api, one)
        if source in SURVIVES_KILL:
            assert (theirs, api.head(one).offset) == (b"in,herited,later", tails[one])
        else:
            assert b"in,herited,later".startswith(theirs), (source, fork)
