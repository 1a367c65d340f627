"""Reads through long chains of forks: the same bytes as ever, and bounded work for each request.

Work is counted, not timed: `millstream_fork_lookups_total` grows with every ancestor that a read has looked up. One request
passes at most 64 inherited pieces, and finds the owner of each in a number of steps that grows with the logarithm of the
chain's length.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pytest

from support.http import Api, Response, request_bytes
from support.pipeline import Pipeline, Window
from support.server import Server
from support.sse import EventStream

DEPTH = 3_000
PIECES_PER_REQUEST = 64
# Steps to an ancestor (twice the logarithm, rounded up), looks at each piece of a request.
STEPS, LOOKS = 30, 8
REQUEST_LOOKUPS_MAX = PIECES_PER_REQUEST * STEPS * LOOKS


@dataclass(frozen=True)
class Chain:
    api: Api
    path: str
    records: list[bytes]

    @property
    def leaf(self) -> str:
        return f"{self.path}/{DEPTH - 1}"

    def lookups(self, call: Callable[[], Response]) -> tuple[Response, int]:
        """What a request answers, and how many ancestors it looked up."""
        before = self.api.metric("millstream_fork_lookups_total")
        answer = call()
        return answer, self.api.metric("millstream_fork_lookups_total") - before


def times_ms(window: Window) -> list[int]:
    stamps = window.table.column("timestamp").cast(pa.timestamp("ms", tz="UTC"))
    times: list[int] = stamps.cast(pa.int64()).to_pylist()
    return times


def fork_requests(path: str, levels: range) -> bytes:
    """Each level forks the one above and has a record of its own."""
    return b"".join(
        request_bytes(
            "PUT",
            Api.target(f"{path}/{level}"),
            {"Stream-Forked-From": Api.target(f"{path}/{level - 1}")},
            b"%05d," % level,
        )
        for level in levels
    )


@pytest.fixture(scope="session")
def chain(shared_server: Server) -> Chain:
    api, path = Api(shared_server, deadline_s=60.0), "t/fork-chain"
    assert api.put(f"{path}/0", b"00000,").status == 201
    with api.connect() as connection:
        for start in range(1, DEPTH, 500):
            levels = range(start, min(start + 500, DEPTH))
            connection.send(fork_requests(path, levels))
            for _ in levels:
                assert connection.read_response().status == 201
    return Chain(api, path, [b"%05d," % level for level in range(DEPTH)])


def test_catch_up_looks_up_few_ancestors_per_request(chain: Chain) -> None:
    offset, body, requests = "-1", b"", 0
    while True:
        asked = offset
        answer, lookups = chain.lookups(lambda at=asked: chain.api.get(chain.leaf, offset=at))
        assert answer.status == 200
        assert lookups <= REQUEST_LOOKUPS_MAX, (offset, lookups)
        body, offset, requests = body + answer.body, answer.offset, requests + 1
        if answer.get("stream-up-to-date") == "true":
            break
    assert body == b"".join(chain.records)
    assert requests >= DEPTH / PIECES_PER_REQUEST


def test_a_window_that_ends_at_a_seam_stays_the_same(chain: Chain) -> None:
    first = chain.api.get(chain.leaf)
    second = chain.api.get(chain.leaf, offset=first.offset)
    # For this life of the path; the next one may leave its source earlier.
    assert second["cache-control"] == "no-cache"
    assert chain.api.get(chain.leaf, offset=first.offset).body == second.body
    again = chain.api.get(chain.leaf, {"If-None-Match": second["etag"]}, offset=first.offset)
    assert again.status == 304


def test_events_carry_the_whole_chain_in_bounded_frames(chain: Chain) -> None:
    before = chain.api.metric("millstream_fork_lookups_total")
    with EventStream.open(chain.api, chain.leaf) as events:
        seen = events.until_up_to_date()
    data = [event.data for event in seen if event.kind == "data"]
    assert "".join(data).encode() == b"".join(chain.records)
    assert max(len(event) for event in data) <= PIECES_PER_REQUEST * len(chain.records[0])
    lookups = chain.api.metric("millstream_fork_lookups_total") - before
    assert lookups <= len(data) * REQUEST_LOOKUPS_MAX


@pytest.mark.parametrize("count", [1, 2, 1500, DEPTH - 1, DEPTH])
def test_the_last_records(chain: Chain, count: int) -> None:
    answer, lookups = chain.lookups(lambda: chain.api.get(chain.leaf, tail=count))
    assert lookups <= REQUEST_LOOKUPS_MAX
    body = answer.body
    if answer.get("stream-up-to-date") != "true":
        body += chain.api.read_all(chain.leaf, answer.offset)
    assert body == b"".join(chain.records[-count:])


@pytest.mark.parametrize("number", [0, 1, 1500, DEPTH - 1])
def test_reads_from_a_point_in_time(chain: Chain, number: int) -> None:
    pipeline = Pipeline(chain.api)
    times = times_ms(pipeline.read(pipeline.whole(chain.leaf), columns=["timestamp"]))
    first = next(at for at, time_ms in enumerate(times) if time_ms >= times[number])
    answer, lookups = chain.lookups(lambda: chain.api.get(chain.leaf, since=str(times[number])))
    assert lookups <= REQUEST_LOOKUPS_MAX
    assert answer.status == 200
    body = answer.body
    if answer.get("stream-up-to-date") != "true":
        body += chain.api.read_all(chain.leaf, answer.offset)
    assert body == b"".join(chain.records[first:])


def test_arrow_rows_of_the_whole_chain(chain: Chain) -> None:
    pipeline = Pipeline(chain.api)
    ranges = pipeline.whole(chain.leaf)
    before = chain.api.metric("millstream_fork_lookups_total")
    window = pipeline.read(ranges, columns=["value", "offset"])
    assert [bytes(value) for value in window.column("value")] == chain.records
    assert chain.api.metric("millstream_fork_lookups_total") - before <= DEPTH * STEPS * LOOKS


def test_a_fork_of_the_leaf_and_a_conditional_append(chain: Chain) -> None:
    middle = chain.api.get(chain.leaf, offset="-1").offset
    headers = {"Stream-Forked-From": Api.target(chain.leaf), "Stream-Fork-Offset": middle}
    fork = f"{chain.path}/inside"
    answer, lookups = chain.lookups(lambda: chain.api.put(fork, b"own,", None, headers))
    assert answer.status == 201
    assert lookups <= REQUEST_LOOKUPS_MAX
    expected = b"".join(chain.records[:PIECES_PER_REQUEST]) + b"own,"
    assert chain.api.read_all(fork) == expected
    answer, lookups = chain.lookups(
        lambda: chain.api.post(fork, b"more,", headers={"If-Match": f'"{answer.offset}"'})
    )
    assert answer.status == 204
    assert lookups <= REQUEST_LOOKUPS_MAX
    assert chain.api.read_all(fork) == expected + b"more,"


def test_a_random_tree_of_forks_reads_like_its_model(server: Server, api: Api, path: str) -> None:
    """Forks leave their sources anywhere, also inside what these have inherited themselves."""
    seed = int(os.environ.get("MILLSTREAM_TEST_SEED", "20"))
    chance = random.Random(seed)
    pipeline = Pipeline(api)
    model = {f"{path}/0": [b"first,"]}
    api.put(f"{path}/0", b"first,")
    for number in range(1, 120):
        # Mostly the newest, so that chains become long.
        names = list(model)
        source = names[-1] if chance.random() < 0.7 else chance.choice(names)
        inherited = chance.randint(0, len(model[source]))
        at = pipeline.place(source, number=inherited)["offset"]
        own = [b"%d.%d," % (number, count) for count in range(chance.randint(0, 2))]
        name = f"{path}/{number}"
        headers = {"Stream-Forked-From": Api.target(source), "Stream-Fork-Offset": at}
        assert api.put(name, b"", None, headers).status == 201, f"seed {seed}"
        for record in own:
            assert api.post(name, record).status == 204
        model[name] = model[source][:inherited] + own
    server.crash_and_restart()
    for name, records in model.items():
        assert api.read_all(name) == b"".join(records), f"seed {seed}: {name}"
        count = chance.randint(0, len(records))
        assert api.get(name, tail=count).body == b"".join(records[len(records) - count :])
        rows = pipeline.read(pipeline.whole(name), columns=["timestamp", "value"])
        assert [bytes(value) for value in rows.column("value")] == records
        if records:
            times = times_ms(rows)
            assert times == sorted(times)
            since = chance.choice(times)
            first = next(at for at, time_ms in enumerate(times) if time_ms >= since)
            assert api.get(name, since=str(since)).body == b"".join(records[first:])
