"""Forks beyond the official suite: repeated PUTs, limits of sub-offsets, and where forks may begin."""

from __future__ import annotations

import pytest

from support.classes import WEAK, Gap, as_class, fork_as, read_through
from support.http import Api, producer
from support.server import Server
from support.sse import EventStream


def fork_of(
    source: str, offset: str | None = None, sub_offset: str | None = None
) -> dict[str, str]:
    headers = {"Stream-Forked-From": Api.target(source)}
    if offset is not None:
        headers["Stream-Fork-Offset"] = offset
    if sub_offset is not None:
        headers["Stream-Fork-Sub-Offset"] = sub_offset
    return headers


@pytest.mark.parametrize(
    "source_headers",
    [{}, {"Stream-TTL": "3600"}, {"Stream-Expires-At": "2999-01-01T00:00:00Z"}],
    ids=["plain", "ttl", "expiry"],
)
def test_repeated_put_of_a_fork_that_inherited_everything(
    shared: Api, path: str, source_headers: dict[str, str]
) -> None:
    source, fork = f"{path}/source", f"{path}/fork"
    shared.put(source, b"abc", headers=source_headers)
    assert shared.put(fork, b"", None, fork_of(source)).status == 201
    assert shared.put(fork, b"", None, fork_of(source)).status == 200
    shared.post(source, b"later")
    assert shared.put(fork, b"", None, fork_of(source)).status == 200
    for name in source_headers:
        assert shared.head(fork)[name.lower()] == shared.head(source)[name.lower()]
    assert shared.put(fork, b"", None, {**fork_of(source), "Stream-TTL": "7"}).status == 409
    assert shared.put(fork, b"", "text/plain").status == 409


def test_repeated_put_of_a_fork_names_an_offset_that_there_was(shared: Api, path: str) -> None:
    source, fork = f"{path}/source", f"{path}/fork"
    tail = shared.put(source, b"abc").offset
    assert shared.put(fork, b"", None, fork_of(source, tail)).status == 201
    assert shared.put(fork, b"", None, fork_of(source, tail)).status == 200
    never = f"0009999999999999_{tail[17:]}"
    assert shared.put(fork, b"", None, fork_of(source, never)).status == 409


def test_a_part_that_is_larger_than_an_append_may_be_is_refused_at_once(
    server: Server, api: Api, path: str
) -> None:
    """It was appended when more was allowed; now the log would never have room for it."""
    source, fork = f"{path}/source", f"{path}/fork"
    start = api.put(source).offset
    api.post(source, b"b" * 2_000_000)
    server.restart(append_max_bytes="1KiB", wal_file_bytes="64KiB", checkpoint_bytes="64KiB")
    refused = api.put(fork, b"", None, fork_of(source, start, "1900000"))
    assert (refused.status, refused.code) == (413, "payload_too_large")
    assert api.put(fork, b"", None, fork_of(source, start, "1000")).status == 201
    assert api.get(fork).body == b"b" * 1000


def test_fork_has_an_identity_of_its_own(shared: Api, path: str) -> None:
    source, fork = f"{path}/source", f"{path}/fork"
    created = shared.put(source, b"abc")
    forked = shared.put(fork, b"", None, fork_of(source))
    assert forked["stream-incarnation"] != created["stream-incarnation"]
    assert forked.offset == created.offset


@pytest.mark.parametrize("offset", ["junk", "-1x", "", "9999999999999999_9999999999999999"])
def test_fork_offset_that_the_source_never_gave_out(shared: Api, path: str, offset: str) -> None:
    source = f"{path}/source"
    shared.put(source, b"abc")
    answer = shared.put(f"{path}/fork", b"", None, fork_of(source, offset))
    assert (answer.status, answer.code) == (400, "fork_offset_invalid")


def test_fork_inside_an_append_is_refused(shared: Api, path: str) -> None:
    source = f"{path}/source"
    tail = shared.put(source, b"abcdef").offset
    epoch, _, position = tail.partition("_")
    inside = f"{epoch}_{int(position) - 2:016d}"
    answer = shared.put(f"{path}/fork", b"", None, fork_of(source, inside))
    assert (answer.status, answer.code) == (400, "fork_offset_invalid")


def test_missing_and_deleted_sources(shared: Api, path: str) -> None:
    source = f"{path}/source"
    answer = shared.put(f"{path}/fork", b"", None, fork_of(source))
    assert (answer.status, answer.code) == (404, "fork_source_missing")
    shared.put(source)
    shared.put(f"{path}/holder", b"", None, fork_of(source))
    shared.delete(source)
    answer = shared.put(f"{path}/fork", b"", None, fork_of(source))
    assert (answer.status, answer.code) == (409, "fork_source_gone")


def test_fork_of_itself_is_refused(shared: Api, path: str) -> None:
    answer = shared.put(path, b"", None, fork_of(path))
    assert (answer.status, answer.code) == (404, "fork_source_missing")
    shared.put(path)
    assert shared.put(path, b"", None, fork_of(path)).status == 409


def test_forks_do_not_share_producers_or_sequence(shared: Api, path: str) -> None:
    source, fork = f"{path}/source", f"{path}/fork"
    shared.put(source)
    headers = {"Producer-Id": "p", "Producer-Epoch": "0", "Producer-Seq": "0", "Stream-Seq": "m"}
    assert shared.post(source, b"x", headers=headers).status == 200
    shared.put(fork, b"", None, fork_of(source))
    assert shared.post(fork, b"y", headers=headers).status == 200
    assert shared.get(fork).body == b"xy"


def test_appends_to_a_source_never_appear_in_its_fork(shared: Api, path: str) -> None:
    source, fork = f"{path}/source", f"{path}/fork"
    middle = shared.put(source, b"1,").offset
    shared.post(source, b"2,")
    shared.put(fork, b"", None, fork_of(source, middle))
    shared.post(source, b"3,")
    shared.post(fork, b"f,")
    shared.close_stream(source)
    assert shared.get(fork).body == b"1,f,"
    assert shared.get(fork, offset=middle).body == b"f,"
    assert shared.post(fork, b"g,").status == 204
    assert shared.get(source).body == b"1,2,3,"


# --- offsets of another life of the path ------------------------------------------------------


def lives(api: Api, path: str, count: int) -> tuple[str, str, list[list[str]]]:
    """One fork, created, appended to and deleted again and again. Its own offsets of each life; the last one lives."""
    source, fork = f"{path}/source", f"{path}/fork"
    anchor = api.put(source, b"inherited,").offset
    own: list[list[str]] = []
    for life in range(count):
        if life:
            assert api.delete(fork).status == 204
        made = api.put(fork, b"", None, fork_of(source))
        assert (made.status, made.offset) == (201, anchor), "the first tail is the fork offset"
        own.append([api.post(fork, b"life%d.%d," % (life, number)).offset for number in range(3)])
    return fork, anchor, own


def test_a_fork_created_again_gives_out_no_offset_twice(shared: Api, path: str) -> None:
    fork, anchor, own = lives(shared, path, 4)
    everything = [offset for life in own for offset in life]
    assert len({anchor, *everything}) == 13
    assert read_through(shared, fork) == (b"inherited,life3.0,life3.1,life3.2,", [])
    assert read_through(shared, fork, anchor) == (b"life3.0,life3.1,life3.2,", [])
    assert read_through(shared, fork, own[3][1]) == (b"life3.2,", [])


@pytest.mark.parametrize("live", [None, "long-poll", "sse"])
def test_an_offset_of_another_life_leads_to_a_gap(shared: Api, path: str, live: str | None) -> None:
    fork, _, own = lives(shared, path, 2)
    shared.close_stream(fork)
    whole = b"inherited,life1.0,life1.1,life1.2,"
    for offset in own[0]:
        if live == "sse":
            with EventStream.open(shared, fork, offset) as events:
                seen = events.until_end()
            controls = [event.json() for event in seen if event.kind == "control"]
            assert controls[0]["streamGapReason"] == "recreated"
            assert "".join(event.data for event in seen if event.kind == "data") == whole.decode()
            continue
        answer = shared.get(fork, offset=offset, live=live)
        gap = Gap.of(answer)
        assert gap is not None
        assert gap.certain
        assert (gap.begin, gap.reason, answer.body) == (offset, "recreated", whole)
        assert answer["cache-control"] == "no-store"


def test_a_condition_of_another_life_does_not_hold(shared: Api, path: str) -> None:
    fork, anchor, own = lives(shared, path, 2)
    for offset in [anchor, *own[0], *own[1][:-1]]:
        answer = shared.post(fork, b"x", headers={"If-Match": f'"{offset}"'})
        assert (answer.status, answer.offset) == (412, own[1][-1])
    assert shared.post(fork, b"x", headers={"If-Match": f'"{own[1][-1]}"'}).status == 204


def test_a_condition_at_the_fork_point_holds_until_the_first_append(shared: Api, path: str) -> None:
    source, fork = f"{path}/source", f"{path}/fork"
    anchor = shared.put(source, b"abc").offset
    shared.put(fork, b"", None, fork_of(source))
    assert shared.post(fork, b"x", headers={"If-Match": f'"{anchor}"'}).status == 204
    assert shared.post(fork, b"x", headers={"If-Match": f'"{anchor}"'}).status == 412


def test_no_address_of_a_fork_is_immutable_with_two_bodies(shared: Api, path: str) -> None:
    record = b"r" * (1 << 20)
    source, fork = f"{path}/source", f"{path}/fork"
    offsets = [shared.put(source, record).offset]
    offsets += [shared.post(source, record).offset for _ in range(11)]
    kept: dict[str, bytes] = {}
    for fill, anchor in ((b"1", offsets[-1]), (b"2", offsets[5]), (b"3", offsets[-1])):
        shared.put(fork, b"", None, fork_of(source, anchor))
        own = [shared.post(fork, fill * (1 << 20)).offset for _ in range(10)]
        for offset in [*offsets, *own]:
            answer = shared.get(fork, offset=offset)
            if "immutable" in answer["cache-control"]:
                assert kept.setdefault(offset, answer.body) == answer.body
        assert own[0] in kept, "a fork's own full windows may be kept"
        shared.delete(fork)


def test_forks_that_end_by_themselves_give_out_no_offset_twice(shared: Api, path: str) -> None:
    source, fork = f"{path}/source", f"{path}/fork"
    shared.put(source, b"abc")
    offsets = []
    for body in (b"one", b"two"):
        ends = {"Stream-Expires-At": "2000-01-01T00:00:00Z"} if body == b"one" else {}
        made = shared.put(fork, body, None, {**fork_of(source), **ends})
        assert made.status == 201
        offsets.append(made.offset)
    assert offsets[0] != offsets[1]
    assert shared.get(fork, offset=offsets[0])["stream-gap"].startswith(f"from={offsets[0]};")


def test_what_a_fork_is_created_with_is_its_own(shared: Api, path: str) -> None:
    source, fork = f"{path}/source", f"{path}/fork"
    first = shared.put(source, b"abc").offset
    shared.post(source, b"defghi")
    seen = set()
    for sub_offset, body in ((None, b"x"), (None, b"y"), ("1", b""), ("1", b""), ("1", b"z")):
        made = shared.put(fork, body, None, fork_of(source, first, sub_offset))
        assert made.offset not in seen
        seen.add(made.offset)
        expected = b"abc" + (b"d" if sub_offset else b"") + body
        assert shared.get(fork).body == expected
        assert shared.get(fork, offset=first).body == expected[3:]
        shared.delete(fork)


def test_a_fork_of_a_fork_knows_the_offsets_of_all_above_it(shared: Api, path: str) -> None:
    known = {"": shared.put(f"{path}/0", b"0,").offset}
    for level in range(1, 6):
        made = shared.put(f"{path}/{level}", b"", None, fork_of(f"{path}/{level - 1}"))
        assert made.offset == list(known.values())[-1]
        known[str(level)] = shared.post(f"{path}/{level}", b"%d," % level).offset
    assert len(set(known.values())) == 6
    for number, offset in enumerate(known.values()):
        expected = b"".join(b"%d," % level for level in range(number + 1, 6))
        assert read_through(shared, f"{path}/5", offset) == (expected, [])
    whole = shared.get(f"{path}/5")
    assert (whole.body, whole["stream-up-to-date"]) == (b"0,1,2,3,4,5,", "true")
    # A fork further back is none of those in between.
    shared.put(f"{path}/back", b"back,", None, fork_of(f"{path}/5", known["2"]))
    assert read_through(shared, f"{path}/back") == (b"0,1,2,back,", [])
    body, gaps = read_through(shared, f"{path}/back", known["4"])
    assert (body, gaps[0].reason) == (b"0,1,2,back,", "recreated")


def test_a_long_chain_forgets_the_oldest_offsets_and_nothing_else(shared: Api, path: str) -> None:
    offsets = [shared.put(f"{path}/0", b"0,").offset]
    for level in range(1, 80):
        fork = f"{path}/{level}"
        assert shared.put(fork, b"", None, fork_of(f"{path}/{level - 1}")).offset == offsets[-1]
        offsets.append(shared.post(fork, b"%d," % level).offset)
    whole = b"".join(b"%d," % level for level in range(80))
    assert read_through(shared, f"{path}/79") == (whole, [])
    for level in (79, 78, 60, 50):
        rest = b"".join(b"%d," % later for later in range(level + 1, 80))
        assert read_through(shared, f"{path}/79", offsets[level]) == (rest, [])
    body, gaps = read_through(shared, f"{path}/79", offsets[0])
    assert (body, [gap.reason for gap in gaps]) == (whole, ["recreated"])


def test_a_source_goes_on_under_the_same_positions(shared: Api, path: str) -> None:
    source, fork = f"{path}/source", f"{path}/fork"
    shared.put(source, b"abc")
    shared.put(fork, b"", None, fork_of(source))
    theirs, own = shared.post(source, b"123").offset, shared.post(fork, b"456").offset
    assert theirs != own
    answer = shared.get(fork, offset=theirs)
    gap = Gap.of(answer)
    assert gap is not None
    assert (gap.reason, gap.end[16:], answer.body) == ("recreated", f"_{3:016}", b"456")
    assert shared.get(source, offset=own).status == 400


def test_producers_of_a_fork_are_known_from_their_first_append(shared: Api, path: str) -> None:
    source, fork = f"{path}/source", f"{path}/fork"
    shared.put(source, b"abc")
    shared.put(fork, b"", None, fork_of(source))
    assert shared.post(fork, b"x", headers=producer("p", 0, 1)).status == 409
    for seq in (0, 1):
        assert shared.post(fork, b"x", headers=producer("p", 0, seq)).status == 200
        assert shared.post(fork, b"x", headers=producer("p", 0, seq)).status == 204
    assert shared.post(fork, b"x", headers=producer("p", 0, 3)).status == 409
    assert shared.get(fork).body == b"abcxx"


@pytest.mark.parametrize("name", WEAK)
@pytest.mark.parametrize("kind", ["fork", "plain"])
def test_an_epoch_that_many_streams_share_is_not_inherited(
    server: Server, api: Api, path: str, name: str, kind: str
) -> None:
    """Both streams go on in the epoch of the crash; then one becomes a fork of the other."""
    source, fork = f"{path}/source", f"{path}/fork"
    api.put(source, b"abc", headers=as_class(name))
    api.put(fork, headers=fork_as(source, name) if kind == "fork" else as_class(name))
    server.crash_and_restart()
    tail = api.head(source).offset
    missing = int(api.head(fork).offset[17:]) - int(tail[17:])
    theirs = api.post(source, b"s" * (10 + max(missing, 0))).offset
    own = api.post(fork, b"f" * (10 + max(-missing, 0))).offset
    assert theirs == own, "two streams, one name: only one path may know it"
    whole = api.read_all(source)
    api.delete(fork)
    made = api.put(fork, b"", None, fork_as(source, name))
    assert made.offset != own
    answer = api.get(fork, offset=own)
    gap = Gap.of(answer)
    assert gap is not None
    assert (gap.reason, answer.body) == ("recreated", whole)
    assert api.post(fork, b"x", headers={"If-Match": f'"{own}"'}).status == 412
    assert read_through(api, fork, made.offset) == (b"", [])
    assert read_through(api, fork) == (whole, [])
    end = api.post(fork, b"x").offset
    assert read_through(api, fork, made.offset) == (b"x", [])
    assert read_through(api, fork, end) == (b"", [])


def test_a_fork_at_a_tail_behind_a_possible_loss_says_where_it_is(
    server: Server, api: Api, path: str
) -> None:
    """The source's tail has a name that another stream at the fork's path had too, behind other bytes."""
    source, fork = f"{path}/source", f"{path}/fork"
    known = api.put(source, b"aaaa", headers=as_class("memory")).offset
    api.put(fork, b"zzzz", headers=as_class("memory"))
    server.crash_and_restart()
    shared_name = api.head(fork).offset
    assert shared_name == api.head(source).offset != known
    api.delete(fork)
    made = api.put(fork, b"", None, fork_as(source, "fsync", shared_name))
    assert (made.status, made.offset) == (201, known)
    answer = api.get(fork, offset=shared_name)
    gap = Gap.of(answer)
    assert gap is not None
    assert (gap.reason, answer.body) == ("recreated", b"aaaa"), "they were at other bytes"
    assert read_through(api, fork, made.offset) == (b"", [])
    assert api.post(fork, b"x", headers={"If-Match": f'"{shared_name}"'}).status == 412
    assert api.post(fork, b"x", headers={"If-Match": f'"{made.offset}"'}).status == 204
    again = api.put(fork, b"", None, fork_as(source, "fsync", shared_name))
    assert again.status == 200


@pytest.mark.parametrize("name", WEAK)
def test_what_a_fork_lost_is_a_gap_at_its_fork_point(
    server: Server, api: Api, path: str, name: str
) -> None:
    source, fork = f"{path}/source", f"{path}/fork"
    anchor = api.put(source, b"abc").offset
    api.put(fork, b"", None, fork_as(source, name))
    own = api.post(fork, b"0123456789").offset
    server.crash_and_restart()
    kept = int(api.head(fork).offset[17:]) - 3
    for offset, body in ((anchor, b"0123456789"[:kept]), (own, b"")):
        found, gaps = read_through(api, fork, offset)
        assert (found, [gap.reason for gap in gaps]) == (body, ["crash"])
        assert gaps[-1].certain == (offset == own and kept < 10)
    again = api.post(fork, b"abcdefghij").offset
    assert again != own


def test_forks_keep_their_offsets_through_restarts(server: Server, api: Api, path: str) -> None:
    fork, anchor, own = lives(api, path, 2)
    empty = f"{path}/empty"
    api.put(empty, b"", None, fork_of(f"{path}/source"))
    for end in (server.stop, server.kill, server.stop):
        end()
        server.restart()
        assert (api.head(fork).offset, api.head(empty).offset) == (own[1][2], anchor)
        assert read_through(api, fork, own[1][0]) == (b"life1.1,life1.2,", [])
        _, gaps = read_through(api, fork, own[0][0])
        assert [gap.reason for gap in gaps] == ["recreated"]
