"""Weak spots of other servers around limits and memory. The number names the entry of the list."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from support.http import Api, Connection, producer, request_bytes
from support.server import Server

MIB = 1 << 20
TEXT = {"Content-Type": "text/plain"}


@pytest.mark.parametrize("announced", [17 * MIB, 1 << 30, 1 << 40, (1 << 64) - 1])
def test_item_24_too_large_is_refused_before_the_body_is_read(
    shared: Api, path: str, announced: int
) -> None:
    shared.put(path)
    with shared.connect() as connection:
        headers = {**TEXT, "Content-Length": str(announced)}
        connection.send(request_bytes("POST", Api.target(path), headers))
        answer = connection.read_response()
        assert (answer.status, answer.code) == (413, "payload_too_large")
        assert answer["connection"].lower() == "close"
        assert connection.is_closed_by_server()
    assert shared.get(path).body == b""


def test_only_what_is_below_ds_has_the_limit_of_the_control_plane(shared: Api, path: str) -> None:
    body = b"x" * (2 * MIB)
    mine = f"__ds{path}"
    assert shared.put(mine).status == 201
    assert shared.post(mine, body).status == 204
    for spelt in ("__ds/subscriptions/s", "%5f_ds/subscriptions/s", "%5F%5Fds/subscriptions/s"):
        with shared.connect() as connection:
            headers = {**TEXT, "Content-Length": str(len(body))}
            connection.send(request_bytes("PUT", f"/v1/stream/{spelt}", headers))
            assert connection.read_response().status == 413, spelt


def test_item_24_expect_continue_gets_the_refusal_instead_of_the_go_ahead(
    shared: Api, path: str
) -> None:
    shared.put(path)
    headers = {**TEXT, "Content-Length": str(100 * MIB), "Expect": "100-continue"}
    with shared.connect() as connection:
        connection.send(request_bytes("POST", Api.target(path), headers))
        answer = connection.read_response()
        assert (answer.status, answer.interim) == (413, [])


def test_item_24_chunked_bodies_meet_the_same_limit(
    start_server: Callable[..., Server], path: str
) -> None:
    server = start_server(settings={"append_max_bytes": 64 * 1024})
    api = Api(server)
    api.put(path)
    head = request_bytes("POST", Api.target(path), TEXT, chunked=True).split(b"\r\n\r\n")[0]
    with api.connect() as connection:
        connection.send(head + b"\r\n\r\n")
        for _ in range(64):
            connection.send_what_it_takes(b"1000\r\n" + b"x" * 4096 + b"\r\n")
        answer = connection.read_response()
        assert (answer.status, answer.code) == (413, "payload_too_large")
    exactly = b"y" * (64 * 1024)
    assert api.post(path, exactly).status == 204
    assert api.post(path, exactly + b"y").status == 413


def test_item_24_one_huge_chunk_is_refused_at_its_announcement(shared: Api, path: str) -> None:
    shared.put(path)
    head = request_bytes("POST", Api.target(path), TEXT, chunked=True).split(b"\r\n\r\n")[0]
    for size in (b"40000000", b"7fffffffffffffff", b"ffffffffffffffff"):
        with shared.connect() as connection:
            connection.send(head + b"\r\n\r\n" + size + b"\r\n")
            assert connection.read_response().status in (400, 413)
            assert connection.is_closed_by_server()


def test_item_28_a_body_of_tiny_records_costs_a_bounded_multiple(
    server: Server, api: Api, path: str
) -> None:
    body = b"[" + b"1," * (7 * MIB) + b"1]"
    api.deadline_s = 60.0
    api.put(path, b"[]", "application/json")
    assert api.post(path, body, "application/json").status == 204
    assert server.peak_rss_bytes() < 400 * MIB
    window = api.get(path)
    assert window.body.startswith(b"[1,1,")
    assert set(window.json()) == {1}


def test_item_28_bodies_under_way_share_one_budget(
    start_server: Callable[..., Server], path: str
) -> None:
    server = start_server(settings={"inflight_bytes_max": 32 * MIB})
    api = Api(server)
    api.put(path, content_type="application/octet-stream")
    before = server.rss_bytes()
    headers = {"Content-Type": "application/octet-stream", "Content-Length": str(8 * MIB)}
    senders: list[Connection] = []
    for _ in range(40):
        sender = api.connect()
        sender.send(request_bytes("POST", Api.target(path), headers))
        sender.send_what_it_takes(b"z" * (2 * MIB))
        senders.append(sender)
    refused = 0
    for sender in senders:
        sender.deadline_s = 0.2
        try:
            answer = sender.read_response()
        except AssertionError:
            continue
        assert (answer.status, answer.code) == (503, "server_busy")
        assert int(answer["retry-after"]) >= 1
        refused += 1
    assert refused >= 20
    assert server.rss_bytes() - before < 100 * MIB
    for sender in senders:
        sender.close()
    api.wait_for_metric("millstream_inflight_bytes", 0)
    assert api.post(path, b"fine", "application/octet-stream").status == 204


def test_bodies_that_are_only_announced_take_no_room(
    start_server: Callable[..., Server], path: str
) -> None:
    server = start_server(settings={"inflight_bytes_max": 32 * MIB})
    api = Api(server)
    kind = "application/octet-stream"
    api.put(path, content_type=kind)
    headers = {"Content-Type": kind, "Content-Length": str(8 * MIB)}
    with ExitStack() as stack:
        for _ in range(40):
            sender = stack.enter_context(api.connect())
            sender.send(request_bytes("POST", Api.target(path), headers))
        api.wait_for_metric("millstream_connections", 41)
        for _ in range(5):
            with api.connect() as connection:
                request = request_bytes(
                    "POST", Api.target(path), {"Content-Type": kind}, b"x" * MIB
                )
                connection.send(request[:-1])
                api.wait_until_metric("millstream_inflight_bytes", lambda count: count >= MIB - 1)
                connection.send(request[-1:])
                assert connection.read_response().status == 204
        assert api.metric("millstream_inflight_bytes") < MIB
    api.wait_for_metric("millstream_inflight_bytes", 0)


@pytest.mark.parametrize("ttl", [str((1 << 64) - 1), str((1 << 63) - 1), str(1 << 62)])
def test_item_29_absurd_lifetimes_break_no_later_request(
    server: Server, api: Api, path: str, ttl: str
) -> None:
    created = api.put(path, b"x", headers={"Stream-TTL": ttl})
    assert created.status in (201, 400)
    expected = 200 if created.status == 201 else 404
    assert api.get(path).status == expected
    assert api.head(path).status == expected
    server.crash_and_restart()
    assert api.get(path).status == expected
    assert api.delete(path).status == (204 if expected == 200 else 404)


@pytest.mark.slow
def test_item_30_deep_fork_chains_overflow_nothing(
    server: Server, api: Api, path: str, full: bool
) -> None:
    depth = 20_000 if full else 4_000
    api.deadline_s = 60.0
    api.put(f"{path}/0", b"root,")
    with api.connect() as connection:
        for start in range(1, depth, 500):
            levels = range(start, min(start + 500, depth))
            connection.send(
                b"".join(
                    request_bytes(
                        "PUT",
                        Api.target(f"{path}/{level}"),
                        {"Stream-Forked-From": Api.target(f"{path}/{level - 1}")},
                        b"%d," % level if level % 1000 == 0 else b"",
                    )
                    for level in levels
                )
            )
            for _ in levels:
                assert connection.read_response().status == 201
    deepest = f"{path}/{depth - 1}"
    expected = b"root," + b"".join(b"%d," % level for level in range(1000, depth, 1000))
    assert api.read_all(deepest) == expected
    server.crash_and_restart()
    assert api.read_all(deepest) == expected
    # Deleting from the root upwards softens every level; the last one frees the whole chain.
    with api.connect() as connection:
        for start in range(0, depth, 500):
            levels = range(start, min(start + 500, depth))
            connection.send(
                b"".join(request_bytes("DELETE", Api.target(f"{path}/{level}")) for level in levels)
            )
            for _ in levels:
                assert connection.read_response().status == 204
    until = time.monotonic() + 20
    while api.get(f"{path}/0").status != 404:
        assert time.monotonic() < until, "the root of the chain was never freed"
        time.sleep(0.05)
    assert api.put(f"{path}/0").status == 201


@pytest.mark.slow
def test_item_31_producer_names_without_end_cost_bounded_memory(
    server: Server, api: Api, path: str, full: bool
) -> None:
    count = 1_000_000 if full else 40_000
    api.put(path)
    with api.connect() as connection:
        connection.deadline_s = 60.0
        half_way = 0
        for start in range(0, count, 1000):
            connection.send(
                b"".join(
                    request_bytes(
                        "POST", Api.target(path), {**TEXT, **producer(f"id-{n:0200}", 0, 0)}, b"x"
                    )
                    for n in range(start, start + 1000)
                )
            )
            for _ in range(1000):
                assert connection.read_response().status == 200
            if start == count // 2:
                half_way = server.rss_bytes()
    assert server.rss_bytes() < 200 * MIB
    assert server.rss_bytes() - half_way < 50 * MIB
    server.crash_and_restart()
    last = api.post(path, b"x", headers=producer(f"id-{count - 1:0200}", 0, 0))
    assert last.status == 204, "the newest producers are the ones that are remembered"


def test_producers_of_all_streams_together_are_bounded(
    start_server: Callable[..., Server], path: str
) -> None:
    """Each stream has fewer than it may have; idle ones leave memory, and nothing is forgotten."""
    settings = {"streams_cached_max": 64, "checkpoint_bytes": 64 * 1024, "sweep_interval_ms": 100}
    server = start_server(settings=settings)
    api = Api(server)
    streams, producers = 40, 500
    with api.connect() as connection:
        for stream in range(streams):
            target = Api.target(f"{path}/{stream}")
            connection.send(request_bytes("PUT", target, TEXT))
            assert connection.read_response().status == 201
            requests = [
                request_bytes("POST", target, {**TEXT, **producer(f"id-{n:0240}", 0, 0)}, b"x")
                for n in range(producers)
            ]
            connection.send(b"".join(requests))
            for _ in requests:
                assert connection.read_response().status == 200
    all_of_them = streams * producers * 240
    api.wait_until_metric("millstream_streams_cached", lambda cached: cached < streams)
    api.wait_until_metric("millstream_producer_bytes", lambda taken: taken <= 64 * 32 * 1024)
    assert api.metric("millstream_producer_bytes") < all_of_them / 2
    for stream in range(streams):
        last = api.post(f"{path}/{stream}", b"x", headers=producer(f"id-{7:0240}", 0, 0))
        assert (last.status, last["producer-seq"]) == (204, "0")
    for stream in range(streams):
        assert api.delete(f"{path}/{stream}").status == 204
    api.wait_for_metric("millstream_producer_bytes", 0)


def test_producers_of_streams_that_stay_in_memory_are_bounded(
    start_server: Callable[..., Server], path: str
) -> None:
    """Streams with a lifetime are not evicted: where they remember too many, nobody new is taken."""
    server = start_server(settings={"streams_cached_max": 16})
    api = Api(server)
    each, bound = 10_000, 64 * MIB
    streams: list[str] = []
    refused = 0
    with api.connect() as connection:
        while not refused:
            assert len(streams) < 40, "they are never too many"
            streams.append(f"{path}/{len(streams)}")
            target = Api.target(streams[-1])
            connection.send(request_bytes("PUT", target, {**TEXT, "Stream-TTL": "9999"}))
            assert connection.read_response().status == 201
            for start in range(0, each, 1000):
                requests = [
                    request_bytes("POST", target, {**TEXT, **producer(f"{n:0250}", 0, 0)}, b"x")
                    for n in range(start, start + 1000)
                ]
                connection.send(b"".join(requests))
                answers = [connection.read_response() for _ in requests]
                assert {answer.status for answer in answers} <= {200, 503}
                refused += sum(answer.status == 503 for answer in answers)
    assert "producers" in answers[-1].json()["detail"]
    assert answers[-1].get("retry-after")
    assert api.metric("millstream_producer_bytes") < bound * 1.1
    # Whoever is known goes on, and so does who needs not be.
    first = streams[0]
    assert api.post(first, b"x", headers=producer(f"{7:0250}", 0, 1)).status == 200
    assert api.post(first, b"x").status == 204
    for stream in streams[:4]:
        assert api.delete(stream).status == 204
    api.wait_until_metric("millstream_producer_bytes", lambda taken: taken < bound)
    assert api.post(streams[-1], b"x", headers=producer("new", 0, 0)).status == 200


def test_item_31_expired_streams_are_freed_without_being_touched(
    start_server: Callable[..., Server], path: str
) -> None:
    server = start_server(settings={"sweep_interval_ms": 200})
    api = Api(server)
    count = 2000
    before = api.metric("millstream_streams_deleted_total")
    with api.connect() as connection:
        connection.send(
            b"".join(
                request_bytes("PUT", Api.target(f"{path}/{n}"), {**TEXT, "Stream-TTL": "1"}, b"x")
                for n in range(count)
            )
        )
        for _ in range(count):
            assert connection.read_response().status == 201
    api.wait_for_metric("millstream_streams_deleted_total", before + count)


def test_heads_that_never_end_are_431(shared: Api) -> None:
    with shared.connect() as connection:
        connection.send_what_it_takes(b"GET /-/health HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 20_000)
        answer = connection.read_response()
        assert (answer.status, answer.code) == (431, "head_too_large")
        assert connection.is_closed_by_server()


def test_too_many_headers_are_431(shared: Api) -> None:
    many = {f"X-{n}": "y" for n in range(200)}
    answer = shared.call("GET", "/-/health", many)
    assert (answer.status, answer.code) == (431, "head_too_large")


def test_stored_header_values_are_bounded(shared: Api, path: str) -> None:
    shared.put(path)
    for headers in (producer("p" * 300, 0, 0), {"Stream-Seq": "s" * 300}):
        answer = shared.post(path, b"x", headers=headers)
        assert answer.status == 400
    assert shared.put(f"{path}/2", content_type="text/" + "x" * 300).status == 400


def test_garbage_never_breaks_the_server_or_grows_it(server: Server, api: Api) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    seeds = [
        request_bytes("POST", Api.target("g"), TEXT, b"hello"),
        request_bytes("PUT", Api.target("g"), TEXT, b"hello", chunked=True),
        request_bytes("GET", Api.target("g", offset="-1", live="sse")),
    ]
    warm = 0
    for turn in range(1500):
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.randrange(1, 8)):
            place = chance.randrange(len(data))
            kind = chance.randrange(3)
            if kind == 0:
                data[place] = chance.randrange(256)
            elif kind == 1:
                del data[place : place + chance.randrange(1, 6)]
            else:
                data[place:place] = chance.randbytes(chance.randrange(1, 6))
            if not data:
                data = bytearray(b"\0")
        connection = api.connect()
        connection.send_what_it_takes(bytes(data))
        connection.abort()
        if turn == 500:
            warm = server.rss_bytes()
    assert api.call("GET", "/-/health").status == 200
    api.wait_for_metric("millstream_connections", 1)
    assert server.rss_bytes() - warm < 20 * MIB
