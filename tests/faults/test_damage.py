"""Bytes at rest that went bad: the range is a gap `corruption` of its stream, and everything else is served.

Real servers over real files. Every test damages files of a stopped server and then compares what readers
get with what was written: bytes that are not the stream's own, or a missing range that nobody reported,
fail it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import millstream
from support.http import Api, Response
from support.server import Server
from support.sse import EventStream

APPEND_BYTES = 2000
INDEX_ENTRY_BYTES = 32
# Small windows are copied and checked on their way; whole megabytes are moved by the kernel.
OFF = {"scrub_bytes_per_second": 0, "read_window_bytes": "16KiB", "long_poll_timeout_ms": 2000}
FAST = {"scrub_bytes_per_second": "4GiB", "scrub_interval_s": 1, "read_window_bytes": "4MiB"}
GAP = re.compile(r"from=(\S+); to=(\S+); reason=(\w+); certain=([01])")


@dataclass
class Written:
    """A stream's appends, and the offset in front of and behind each."""

    path: str
    appends: list[bytes] = field(default_factory=list)
    offsets: list[str] = field(default_factory=list)

    def all_but(self, *lost: int) -> bytes:
        return b"".join(each for number, each in enumerate(self.appends) if number not in lost)

    def gap(self, first: int, behind: int) -> tuple[str, str]:
        return self.offsets[first], self.offsets[behind]


def append_of(path: str, number: int) -> bytes:
    line = f"<{path}#{number}>".encode()
    return (line * APPEND_BYTES)[:APPEND_BYTES]


def write(api: Api, path: str, count: int) -> Written:
    written = Written(path, offsets=[api.put(path).offset])
    with api.connect() as connection:
        for number in range(count):
            written.appends.append(append_of(path, number))
            answer = connection.request(
                "POST", api.target(path), {"Content-Type": "text/plain"}, written.appends[-1]
            )
            assert answer.status == 204
            written.offsets.append(answer.offset)
    return written


def place_of(data_dir: Path, content: bytes) -> tuple[Path, int]:
    """The one file outside the log that holds these bytes, and where."""
    found = []
    for pattern in ("segments/*/*.seg", "packs/*.pack"):
        for file in data_dir.glob(pattern):
            at = file.read_bytes().find(content)
            if at >= 0:
                found.append((file, at))
    assert len(found) == 1, f"{content[:40]!r} is in {found}"
    return found[0]


def flip(file: Path, position: int, mask: int = 0x10) -> None:
    with file.open("r+b") as handle:
        handle.seek(position)
        old = handle.read(1)
        assert old, f"{file} ends before {position}"
        handle.seek(position)
        handle.write(bytes([old[0] ^ mask]))


def damage(data_dir: Path, written: Written, number: int) -> tuple[Path, int]:
    file, at = place_of(data_dir, written.appends[number])
    flip(file, at + APPEND_BYTES // 2)
    return file, at


def gap_of(answer: Response) -> tuple[str, str] | None:
    """The range of a gap that must be one of corruption."""
    text = answer.get("stream-gap")
    if text is None:
        return None
    found = GAP.fullmatch(text)
    assert found is not None, text
    assert (found[3], found[4]) == ("corruption", "1"), text
    assert answer["cache-control"] == "no-store"
    return found[1], found[2]


def read_all(api: Api, path: str, offset: str = "-1") -> tuple[bytes, list[tuple[str, str]]]:
    """Everything to the tail by catch-up reads, and the gaps on the way."""
    body, gaps = b"", []
    for _ in range(1000):
        answer = api.get(path, offset=offset)
        assert answer.status == 200, (answer.status, answer.body)
        gap = gap_of(answer)
        if gap is not None:
            gaps.append(gap)
            # A client that goes on from the gap's end gets the same bytes, and no second gap.
            again = api.get(path, offset=gap[1])
            assert (again.status, again.body, gap_of(again)) == (200, answer.body, None)
        body += answer.body
        offset = answer.offset
        if answer.get("stream-up-to-date") == "true":
            return body, gaps
    raise AssertionError("the tail was never reached")


def ready(api: Api) -> tuple[int, str]:
    answer = api.call("GET", "/-/ready")
    return answer.status, answer.json()["status"]


@pytest.fixture
def stopped(start_server: Callable[..., Server]) -> Callable[..., tuple[Server, list[Written]]]:
    """Streams of the given lengths on a server that has stopped, all of them out of the log."""

    def make(**lengths: int) -> tuple[Server, list[Written]]:
        server = start_server(settings=OFF)
        # The server's own streams go to a pack of their own, out of harm's way.
        server.restart()
        api = Api(server)
        streams = [write(api, path, count) for path, count in lengths.items()]
        server.stop()
        return server, streams

    return make


Stopped = Callable[..., tuple[Server, list[Written]]]


@pytest.mark.parametrize("count", [40, 6], ids=["segment", "pack"])
def test_a_flipped_byte_is_a_gap_of_one_append(stopped: Stopped, count: int) -> None:
    server, (bad, good) = stopped(bad=count, good=count)
    file, at = damage(server.data_dir, bad, 2)
    for turn in range(3):
        server.restart()
        api = Api(server)
        # The first server finds it by reading; the others know it before anybody reads.
        assert ready(api) == ((200, "ok") if turn == 0 else (200, "degraded"))
        assert read_all(api, "bad") == (bad.all_but(2), [bad.gap(2, 3)])
        assert read_all(api, "good") == (good.all_but(), [])
        assert ready(api) == (200, "degraded")
        assert api.call("GET", "/-/health").json()["status"] == "ok"
        assert api.metric("millstream_damaged_ranges") == 1
        server.stop()
    reports = [line for line in server.log().splitlines() if "is damaged" in line]
    assert len(reports) == 1, reports
    assert str(file.relative_to(server.data_dir)) in reports[0]
    assert f"byte {at}:" in reports[0]


def test_the_read_that_finds_damage_answers_with_the_gap(stopped: Stopped) -> None:
    server, (bad,) = stopped(bad=6)
    damage(server.data_dir, bad, 0)
    damage(server.data_dir, bad, 4)
    server.restart()
    api = Api(server)
    first = api.get("bad", offset="-1")
    assert (first.status, gap_of(first)) == (200, bad.gap(0, 1))
    assert first.body == b"".join(bad.appends[1:4]), "no answer spans a damaged range"
    assert first.offset == bad.offsets[4]
    second = api.get("bad", offset=first.offset)
    assert (gap_of(second), second.body) == (bad.gap(4, 5), bad.appends[5])
    # Offsets in front of it and behind it read as ever.
    assert gap_of(api.get("bad", offset=bad.offsets[1])) is None
    assert api.get("bad", offset=bad.offsets[5]).body == bad.appends[5]
    # A condition that held for the whole range does not hold for what is left of it.
    assert api.get("bad", {"If-None-Match": first.get("etag") or ""}, offset="-1").status == 200


def test_damage_up_to_the_tail_is_a_gap_and_up_to_date(stopped: Stopped) -> None:
    server, (bad,) = stopped(bad=6)
    damage(server.data_dir, bad, 5)
    server.restart()
    api = Api(server)
    for query in ({}, {"live": "long-poll"}):
        answer = api.get("bad", offset=bad.offsets[5], **query)
        assert (answer.status, answer.body, gap_of(answer)) == (200, b"", bad.gap(5, 6))
        assert answer["stream-up-to-date"] == "true"
        assert answer.offset == bad.offsets[6]
    # What comes next stands behind it.
    tail = api.post("bad", b"more").offset
    assert api.get("bad", offset=bad.offsets[6]).body == b"more"
    assert read_all(api, "bad") == (bad.all_but(5) + b"more", [bad.gap(5, 6)])
    assert api.head("bad").offset == tail


def test_long_polls_and_events_carry_the_gap(stopped: Stopped) -> None:
    server, (bad,) = stopped(bad=6)
    damage(server.data_dir, bad, 3)
    for turn in range(2):
        # The first turn finds the damage while it renders, the second one knows it.
        server.restart()
        api = Api(server)
        with EventStream.open(api, "bad") as events:
            assert events.next().data.encode() == b"".join(bad.appends[:3]), f"turn {turn}"
            assert "streamGapFrom" not in events.control()
            assert events.next().data.encode() == b"".join(bad.appends[4:])
            control = events.control()
            assert (control["streamGapFrom"], control["streamGapTo"]) == bad.gap(3, 4)
            assert control["streamGapReason"] == "corruption"
            assert control["streamGapCertain"] is True
            assert control["upToDate"] is True
            api.post("bad", b"live")
            assert events.next().data == "live"
            assert "streamGapFrom" not in events.control()
        bad.appends.append(b"live")
        answer = api.get("bad", offset=bad.offsets[3], live="long-poll")
        assert (gap_of(answer), answer.body) == (bad.gap(3, 4), b"".join(bad.appends[4:]))
        server.stop()


def test_events_end_at_damage_before_the_tail(stopped: Stopped) -> None:
    server, (bad,) = stopped(bad=6)
    damage(server.data_dir, bad, 5)
    server.restart()
    api = Api(server)
    with EventStream.open(api, "bad", bad.offsets[4]) as events:
        assert events.next().data.encode() == bad.appends[4]
        assert events.control()["streamNextOffset"] == bad.offsets[5]
        control = events.control()
        assert (control["streamGapFrom"], control["streamGapTo"]) == bad.gap(5, 6)
        assert control["upToDate"] is True
        api.post("bad", b"live")
        assert events.next().data == "live"


def test_forks_see_the_damage_of_what_they_inherit(stopped: Stopped) -> None:
    server, (bad,) = stopped(bad=40)
    server.restart()
    api = Api(server)

    def fork(name: str, at: int, *headers: tuple[str, str]) -> Response:
        forked = {"Stream-Forked-From": api.target("bad"), "Stream-Fork-Offset": bad.offsets[at]}
        return api.put(name, b"", "text/plain", {**forked, **dict(headers)})

    assert fork("behind", 30).status == 201
    assert fork("before", 10).status == 201
    for name in ("behind", "before"):
        assert api.post(name, b"own").status == 204
    server.stop()
    damage(server.data_dir, bad, 20)
    damage(server.data_dir, bad, 29)
    for _ in range(2):
        server.restart()
        api = Api(server)
        behind = b"".join(bad.appends[:20] + bad.appends[21:29]) + b"own"
        # The second gap ends where the fork's own epoch begins.
        start, end = bad.gap(29, 30)
        own = api.head("behind").get("stream-incarnation")
        seam = (start, f"{int(str(own)):016}{end[16:]}")
        assert read_all(api, "behind") == (behind, [bad.gap(20, 21), seam])
        before = b"".join(bad.appends[:10]) + b"own"
        assert read_all(api, "before") == (before, [])
        assert read_all(api, "bad") == (bad.all_but(20, 29), [bad.gap(20, 21), bad.gap(29, 30)])
        assert api.metric("millstream_damaged_ranges") == 2, "counted where the bytes are"
        server.stop()
    # A fork made afterwards inherits it as well; one that needs the damaged bytes is refused.
    server.restart()
    assert fork("at", 21).status == 201
    assert read_all(api, "at") == (bad.all_but(*range(20, 40)), [bad.gap(20, 21)])
    refused = fork("inside", 20, ("Stream-Fork-Sub-Offset", "5"))
    assert (refused.status, refused.code) == (400, "fork_offset_invalid")


def test_the_python_client_reports_the_gap(stopped: Stopped) -> None:
    server, (bad,) = stopped(bad=6)
    damage(server.data_dir, bad, 2)
    server.restart()
    with millstream.connect(server.url) as client:
        stream = client.stream("bad")
        with pytest.raises(millstream.GapError) as raised:
            list(stream.read())
        gap = raised.value.gap
        assert (gap.from_offset, gap.to_offset) == bad.gap(2, 3)
        assert (gap.reason, gap.certain) == ("corruption", True)
        behind = b"".join(record.data for record in stream.read(gap.to_offset))
        assert behind == b"".join(bad.appends[3:])
        noted: list[millstream.Gap] = []
        body = b"".join(record.data for record in stream.read(gaps=noted.append))
        assert (body, noted) == (bad.all_but(2), [gap])
        with stream.follow(gaps="record") as records:
            seen = b""
            while len(seen) < len(body):
                record = next(records)
                assert record.gap in (None, gap)
                seen += record.data
            assert seen == body


def test_a_damaged_index_loses_its_extent_and_no_more(stopped: Stopped) -> None:
    server, (bad, good) = stopped(bad=40, good=6)
    segment, _ = place_of(server.data_dir, bad.appends[0])
    # The end of the eleventh append, so that the index goes back.
    flip(segment.with_suffix(".idx"), 10 * INDEX_ENTRY_BYTES + 2, 0xFF)
    server.restart(**FAST)
    api = Api(server)
    api.wait_for_metric("millstream_damaged_ranges", 1)
    server.restart(**OFF)
    assert read_all(api, "bad") == (b"", [bad.gap(0, 40)])
    # From inside the range: the gap begins where the reader was.
    inside = api.get("bad", offset=bad.offsets[7])
    assert (gap_of(inside), inside.body) == ((bad.offsets[7], bad.offsets[40]), b"")
    assert read_all(api, "good") == (good.all_but(), [])
    tail = api.post("bad", b"more").offset
    assert read_all(api, "bad") == (b"more", [bad.gap(0, 40)])
    assert api.get("bad", tail=1).body == b"more"
    assert api.get("bad", offset=tail).body == b""


def test_a_reader_finds_a_damaged_index(stopped: Stopped) -> None:
    server, (bad,) = stopped(bad=40)
    segment, _ = place_of(server.data_dir, bad.appends[0])
    flip(segment.with_suffix(".idx"), 20 * INDEX_ENTRY_BYTES + 17)
    server.restart()
    api = Api(server)
    # Which of the offsets are boundaries cannot be told any more: that is no fault of the reader's.
    answer = api.get("bad", offset=bad.offsets[21])
    assert (answer.status, gap_of(answer)) == (200, (bad.offsets[21], bad.offsets[40]))
    assert read_all(api, "bad") == (b"", [bad.gap(0, 40)])
    epoch, _, _ = bad.offsets[40].partition("_")
    refused = api.get("bad", offset=f"{epoch}_{40 * APPEND_BYTES + 1:016d}")
    assert (refused.status, refused.code) == (400, "offset_beyond_tail")


@pytest.mark.parametrize("how", ["removed", "emptied", "shortened"])
def test_files_that_are_gone_or_short(stopped: Stopped, how: str) -> None:
    server, (large, small, good) = stopped(large=40, small=6, good=40)
    segment, _ = place_of(server.data_dir, large.appends[0])
    pack, _ = place_of(server.data_dir, small.appends[0])
    for file in (segment, pack):
        if how == "removed":
            file.unlink()
        else:
            size = 0 if how == "emptied" else 30 * APPEND_BYTES + 1
            with file.open("r+b") as handle:
                handle.truncate(size if file == segment else 0)
    kept = 30 if how == "shortened" else 0
    for _ in range(2):
        server.restart()
        api = Api(server)
        # 80 KB go by the kernel: the promise of a whole body is not made for a file that lacks it.
        body, gaps = read_all(api, "large")
        assert body == b"".join(large.appends[:kept])
        assert (gaps[0][0], gaps[-1][1]) == large.gap(kept, 40)
        assert all(left[1] == right[0] for left, right in itertools.pairwise(gaps))
        assert read_all(api, "small") == (b"", [small.gap(0, 6)])
        assert read_all(api, "good") == (good.all_but(), [])
        assert ready(api) == (200, "degraded")
        server.stop()


def test_a_file_that_comes_back_is_read_again(stopped: Stopped) -> None:
    server, (large, good) = stopped(large=40, good=6)
    segment, _ = place_of(server.data_dir, large.appends[0])
    aside = segment.with_suffix(".aside")
    segment.rename(aside)
    server.restart()
    api = Api(server)
    assert read_all(api, "large") == (b"", [large.gap(0, 40)])
    server.stop()
    aside.rename(segment)
    server.restart()
    assert read_all(api, "large") == (large.all_but(), [])
    api.wait_for_metric("millstream_damaged_ranges", 0)
    assert read_all(api, "good") == (good.all_but(), [])


def test_the_scrub_finds_damage_without_a_reader(stopped: Stopped) -> None:
    server, (large, small, good) = stopped(large=300, small=6, good=40)
    for number in (0, 150, 299):
        damage(server.data_dir, large, number)
    damage(server.data_dir, small, 5)
    server.restart(**FAST)
    api = Api(server)
    api.wait_for_metric("millstream_damaged_ranges", 4)
    assert ready(api) == (200, "degraded")
    assert api.metric("millstream_scrubbed_bytes_total") >= 346 * APPEND_BYTES
    assert api.metric("millstream_reads_total") == 0
    # Bodies of hundreds of kilobytes, which nobody checks on their way.
    gaps = [large.gap(number, number + 1) for number in (0, 150, 299)]
    assert read_all(api, "large") == (large.all_but(0, 150, 299), gaps)
    assert read_all(api, "small") == (small.all_but(5), [small.gap(5, 6)])
    assert read_all(api, "good") == (good.all_but(), [])
    # Saved by a checkpoint of its own, although nobody writes: a crash does not forget it.
    api.wait_for_metric("millstream_checkpoints_total", 1)
    server.crash_and_restart(**OFF)
    assert ready(api) == (200, "degraded")
    assert read_all(api, "large") == (large.all_but(0, 150, 299), gaps)
    # It goes with its streams.
    assert api.delete("large").status == api.delete("small").status == 204
    server.restart(**OFF)
    assert ready(api) == (200, "ok")


def test_a_slow_scrub_does_not_hold_up_the_stop(stopped: Stopped) -> None:
    server, _ = stopped(some=300)
    server.restart(scrub_bytes_per_second=1)
    Api(server).wait_for_metric("millstream_scrub_passes_total", 0)
    assert server.stop() < 3


def test_the_scrub_goes_round_and_finds_what_breaks_later(stopped: Stopped) -> None:
    server, (bad,) = stopped(bad=40)
    server.restart(**FAST)
    api = Api(server)
    api.wait_for_metric("millstream_scrub_passes_total", 1)
    assert api.metric("millstream_damaged_ranges") == 0
    damage(server.data_dir, bad, 11)
    api.wait_for_metric("millstream_damaged_ranges", 1)
    assert read_all(api, "bad") == (bad.all_but(11), [bad.gap(11, 12)])


def test_tail_and_since_in_front_of_damage(stopped: Stopped) -> None:
    server, (bad,) = stopped(bad=6)
    damage(server.data_dir, bad, 3)
    server.restart()
    api = Api(server)
    for query in ({"tail": 3}, {"since": 0}):
        answer = api.get("bad", **query)
        assert answer.status == 200
        if "tail" in query:
            assert (gap_of(answer), answer.body) == (bad.gap(3, 4), b"".join(bad.appends[4:]))
        else:
            assert (gap_of(answer), answer.body) == (None, b"".join(bad.appends[:3]))
    assert api.get("bad", tail=2).body == b"".join(bad.appends[4:])


def test_json_stays_json(start_server: Callable[..., Server]) -> None:
    server = start_server(settings=OFF)
    api = Api(server)
    offsets = [api.put("bad", b"", "application/json").offset]
    batches = [[{"batch": batch, "n": n, "pad": "x" * 50} for n in range(20)] for batch in range(5)]
    for batch in batches:
        body = json.dumps(batch, separators=(",", ":")).encode()
        offsets.append(api.post("bad", body, "application/json").offset)
    server.stop()
    file, at = place_of(server.data_dir, json.dumps(batches[2][7], separators=(",", ":")).encode())
    flip(file, at + 5)
    server.restart()
    first = api.get("bad")
    assert first.json() == batches[0] + batches[1]
    second = api.get("bad", offset=first.offset)
    assert second.json() == batches[3] + batches[4]
    assert gap_of(second) == (offsets[2], offsets[3])
    # Into a batch that is gone: its records are a gap, and those behind it come.
    inside = api.get("bad", tail=45)
    assert (inside.json(), gap_of(inside)) == (batches[3] + batches[4], (offsets[2], offsets[3]))
    assert api.get("bad", tail=5).json() == batches[4][15:]
