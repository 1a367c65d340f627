"""Weak spots of other servers around clients that stop. The number names the entry of the list."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

import pytest

from support.http import Api, Closed, Connection, Truncated, request_bytes
from support.server import Server
from support.sse import EventStream

MIB = 1 << 20
TEXT = {"Content-Type": "text/plain"}
BYTES = {"Content-Type": "application/octet-stream"}
STOP_BOUND_S = 2.0


def stalled_reader(api: Api, target: str) -> Connection:
    """Asks for much, takes nothing: a small receive buffer that is never emptied."""
    connection = Connection.__new__(Connection)
    connection.deadline_s = api.deadline_s
    connection._buffer = bytearray()
    connection._ended = False
    connection.socket = socket.socket()
    connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.socket.settimeout(api.deadline_s)
    connection.socket.connect(("127.0.0.1", api.server.port))
    connection.send(request_bytes("GET", target))
    return connection


def fill(api: Api, path: str, mebibytes: int) -> None:
    api.put(path, content_type="application/octet-stream")
    with api.connect() as connection:
        for _ in range(mebibytes):
            answer = connection.request("POST", Api.target(path), BYTES, b"d" * MIB)
            assert answer.status == 204


def test_item_25_stalled_readers_hold_up_nobody(server: Server, api: Api, path: str) -> None:
    fill(api, path, 8)
    readers = [stalled_reader(api, Api.target(path, offset="-1")) for _ in range(600)]
    began = time.monotonic()
    other = f"{path}/other"
    assert api.put(other, b"x").status == 201
    assert api.post(other, b"y").status == 204
    assert api.get(other).body == b"xy"
    assert len(api.get(path).body) >= MIB
    assert api.close_stream(other).status == 204
    assert api.delete(other).status == 204
    assert time.monotonic() - began < 15.0
    assert server.rss_bytes() < 400 * MIB
    assert server.stop() < STOP_BOUND_S
    for reader in readers:
        reader.close()


def test_a_stream_deleted_under_a_stalled_reader_is_no_read_error(
    start_server: Callable[..., Server], path: str
) -> None:
    # The window is larger than what two sockets hold, so that most of the body is read after the delete.
    server = start_server(settings={"read_window_bytes": 16 * MIB})
    api = Api(server)
    fill(api, path, 16)
    reader = stalled_reader(api, Api.target(path, offset="-1"))
    head = reader.read_head()
    assert (head.status, head["content-length"]) == (200, str(16 * MIB))
    assert api.delete(path).status == 204
    with pytest.raises((Truncated, Closed)):
        for _ in reader.body_pieces(head):
            pass
    reader.close()
    assert api.metric("millstream_read_errors_total") == 0
    assert "broke off" not in server.log()


def test_item_26_slow_heads_and_bodies_are_timed_out(
    start_server: Callable[..., Server], path: str
) -> None:
    server = start_server(settings={"header_timeout_ms": 600, "body_timeout_ms": 600})
    api = Api(server)
    api.put(path)
    half_head = api.connect()
    half_head.send(b"GET /-/health HTTP/1.1\r\nHost:")
    half_body = api.connect()
    whole = request_bytes("POST", Api.target(path), TEXT, b"0123456789")
    half_body.send(whole[:-4])
    half_chunk = api.connect()
    half_chunk.send(request_bytes("POST", Api.target(path), TEXT, b"abc", chunked=True)[:-3])
    for connection in (half_head, half_body, half_chunk):
        began = time.monotonic()
        answer = connection.read_response()
        assert (answer.status, answer.code) == (408, "request_timeout")
        assert connection.is_closed_by_server()
        assert time.monotonic() - began < 5.0
        connection.close()
    assert api.get(path).body == b""


def test_item_26_dripping_heads_do_not_extend_their_time(
    start_server: Callable[..., Server],
) -> None:
    server = start_server(settings={"header_timeout_ms": 600})
    api = Api(server)
    with api.connect() as drip:
        began = time.monotonic()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for letter in b"GET /-/health HTTP/1.1\r\nX-Long: " + b"y" * 200:
                drip.send(bytes([letter]))
                if server_has_spoken(drip):
                    break
                time.sleep(0.02)
        assert drip.read_response().status == 408
        assert time.monotonic() - began < 4.0


def server_has_spoken(connection: Connection) -> bool:
    connection.socket.setblocking(False)
    try:
        return bool(connection.socket.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False


def test_item_26_idle_connections_make_room(start_server: Callable[..., Server]) -> None:
    limits = {"idle_timeout_ms": 500, "header_timeout_ms": 500, "connections_max": 100}
    server = start_server(settings=limits)
    api = Api(server)
    silent = [api.connect() for _ in range(100)]
    began = time.monotonic()
    for connection in silent:
        farewell = connection.read_to_end()
        assert farewell == b"" or farewell.startswith(b"HTTP/1.1 408 ")
        connection.close()
    assert time.monotonic() - began < 5.0
    assert api.call("GET", "/-/health").status == 200


def test_item_26_idle_after_a_request_is_closed_quietly(
    start_server: Callable[..., Server],
) -> None:
    server = start_server(settings={"idle_timeout_ms": 400})
    with Api(server).connect() as connection:
        assert connection.request("GET", "/-/health").status == 200
        assert connection.is_closed_by_server()


@pytest.mark.slow
def test_item_27_sse_over_a_long_backlog_needs_little_memory(
    server: Server, api: Api, path: str, full: bool
) -> None:
    mebibytes = 2048 if full else 200
    api.deadline_s = 60.0
    fill(api, path, mebibytes)
    api.close_stream(path)
    server.stop()
    server.restart()
    received = 0
    with EventStream.open(api, path) as events:
        for event in events:
            if event.kind == "data":
                received += len(event.decoded())
            events.raw = b""
    assert received == mebibytes * MIB
    assert server.peak_rss_bytes() < 200 * MIB


def test_item_27_a_live_reader_that_never_reads_is_closed(
    start_server: Callable[..., Server], path: str
) -> None:
    server = start_server(settings={"send_timeout_ms": 1000})
    api = Api(server)
    fill(api, path, 16)
    stalled = stalled_reader(api, Api.target(path, offset="-1", live="sse"))
    api.wait_for_metric("millstream_sse_subscribers", 1)
    api.wait_for_metric("millstream_sse_subscribers", 0)
    stalled.close()
    slow_catch_up = stalled_reader(api, Api.target(path, offset="-1"))
    api.wait_for_metric("millstream_connections", 2)
    api.wait_for_metric("millstream_connections", 1)
    # A body cut short must look cut short, never like a complete one.
    with pytest.raises((Truncated, Closed)):
        slow_catch_up.read_response()
    slow_catch_up.close()


def test_a_live_reader_of_a_backlog_reconnects_after_its_time(
    start_server: Callable[..., Server], path: str
) -> None:
    api = Api(start_server(settings={"sse_lifetime_ms": 1000}), deadline_s=30.0)
    fill(api, path, 32)
    received, offset, streams = 0, "-1", 0
    while received < 32 * MIB:
        streams += 1
        with EventStream.open(api, path, offset) as events:
            began = time.monotonic()
            for event in events:
                if event.kind == "control":
                    offset = event.json()["streamNextOffset"]
                    continue
                received += len(event.decoded())
                if received > 8 * MIB > received - MIB:
                    # The server has the rest to send all the while.
                    time.sleep(max(0, began + 1.2 - time.monotonic()))
                if received == 32 * MIB:
                    break
    assert streams > 1, "one answer for the whole backlog"
    assert received == 32 * MIB


def test_clients_that_send_and_take_no_answers_are_ended(
    start_server: Callable[..., Server], path: str
) -> None:
    """The time for answers counts, not that for the next request: the server itself has stopped to read."""
    settings = {"send_timeout_ms": 2000, "idle_timeout_ms": 120_000, "header_timeout_ms": 120_000}
    api = Api(start_server(settings=settings), deadline_s=20.0)
    api.put(path)
    appends = request_bytes("POST", Api.target(path), TEXT, b"y") * 4000
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            client = stack.enter_context(stalled_reader(api, Api.target(path)))
            client.socket.setblocking(False)
            left = memoryview(appends)
            with contextlib.suppress(BlockingIOError):
                while left:
                    left = left[client.socket.send(left) :]
        api.wait_for_metric("millstream_connections", 1)


def test_a_client_may_take_its_answers_as_late_as_the_setting_says(
    start_server: Callable[..., Server], path: str
) -> None:
    settings = {"send_timeout_ms": 60_000, "header_timeout_ms": 1000}
    server = start_server(settings=settings)
    api = Api(server, deadline_s=60.0)
    api.put(path)
    append = request_bytes("POST", Api.target(path), TEXT, b"y")
    count = 20_000
    with stalled_reader(api, Api.target(path)) as client:
        sender = threading.Thread(target=client.socket.sendall, args=(append * count,))
        sender.start()
        # Its sockets are full of answers, and the server waits in the middle of a head: for longer than a head may take.
        seen = -1
        while seen != (seen := api.metric("millstream_appends_total")):
            time.sleep(2.5)
        # Beside others a buffer this small overflows again and again, and the kernel sends anew ever more slowly.
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        assert client.read_response().status == 200
        for _ in range(count):
            assert client.read_response().status == 204
        sender.join(60)
    assert len(api.read_all(path)) == count


@pytest.mark.parametrize("live", [None, "sse"])
def test_a_slow_client_that_takes_bytes_is_served_to_the_end(
    start_server: Callable[..., Server], path: str, live: str | None
) -> None:
    """The kernel has room for more only after seconds; that the client takes something is seen all the same."""
    server = start_server(settings={"send_timeout_ms": 1000, "sse_keepalive_ms": 600_000})
    api = Api(server)
    api.put(path, b"d" * 400_000)
    query = {"live": live} if live else {}
    with stalled_reader(api, Api.target(path, offset="-1", **query)) as slow:
        taken, until = 0, time.monotonic() + 6
        while time.monotonic() < until:
            taken += len(slow.socket.recv(1000))
            time.sleep(0.05)
        while taken < 400_000:
            piece = slow.socket.recv(65_536)
            assert piece, f"ended after {taken} bytes"
            taken += len(piece)
    assert api.metric("millstream_connection_timeouts_total") == 0


def test_the_last_answers_may_be_taken_as_late_as_the_setting_says(
    start_server: Callable[..., Server], path: str
) -> None:
    api = Api(start_server(settings={"send_timeout_ms": 60_000}), deadline_s=60.0)
    api.put(path)
    append = request_bytes("POST", Api.target(path), TEXT, b"y")
    last = request_bytes("POST", Api.target(path), TEXT | {"Connection": "close"}, b"z")
    count, before = 1500, api.metric("millstream_appends_total")
    with stalled_reader(api, Api.target(path)) as client:
        client.send(append * count)
        api.wait_for_metric("millstream_appends_total", before + count)
        client.send(last)
        client.socket.shutdown(socket.SHUT_WR)
        # The time between the end of the requests and the first look at the answers.
        time.sleep(7)
        assert client.read_response().status == 200
        for number in range(count + 1):
            assert client.read_response().status == 204, number
        assert client.is_closed_by_server()


def test_who_never_takes_the_last_answers_is_ended_and_counted(
    start_server: Callable[..., Server], path: str
) -> None:
    api = Api(start_server(settings={"send_timeout_ms": 1000}), deadline_s=20.0)
    api.put(path)
    append = request_bytes("POST", Api.target(path), TEXT, b"y")
    with stalled_reader(api, Api.target(path)) as client:
        client.send(append * 2500)
        client.socket.shutdown(socket.SHUT_WR)
        api.wait_for_metric("millstream_connections", 1)
        assert api.metric("millstream_connection_timeouts_total") == 1


def test_item_32_out_of_descriptors_is_survived_without_spinning(
    start_server: Callable[..., Server], path: str
) -> None:
    server = start_server(files_max=96)
    api = Api(server)
    api.put(path, b"x")
    request = request_bytes("GET", Api.target(path, offset="-1", live="sse"))
    with contextlib.ExitStack() as crowd:
        for _ in range(120):
            member = crowd.enter_context(socket.create_connection(("127.0.0.1", server.port), 5))
            member.sendall(request)
        before, began = server.cpu_seconds(), time.monotonic()
        time.sleep(1.5)
        used = (server.cpu_seconds() - before) / (time.monotonic() - began)
        assert used < 0.5, f"{used:.0%} of a core while nothing can be done"
    until = time.monotonic() + 10
    while True:
        try:
            with EventStream.open(api, path) as events:
                assert events.next().data == "x"
            break
        except (OSError, AssertionError, Closed):
            assert time.monotonic() < until, "the server did not come back"
            time.sleep(0.05)
    assert api.post(path, b"y").status == 204


def test_item_33_no_client_delays_the_shutdown(server: Server, api: Api, path: str) -> None:
    tail = api.put(path).offset
    fill(api, f"{path}/large", 8)
    idle = api.connect()
    assert idle.request("GET", "/-/health").status == 200
    poll = api.connect()
    poll.send(request_bytes("GET", Api.target(path, offset=tail, live="long-poll")))
    half_head = api.connect()
    half_head.send(b"POST /v1/stream/x HTTP/1.1\r\nHo")
    half_body = api.connect()
    half_body.send(request_bytes("POST", Api.target(path), TEXT, b"0123456789")[:-5])
    stalled = stalled_reader(api, Api.target(f"{path}/large", offset="-1"))
    with EventStream.open(api, path) as events:
        events.control()
        assert server.stop() < STOP_BOUND_S
    for connection in (idle, poll, half_head, half_body, stalled):
        connection.close()
    server.restart()
    assert api.get(path).body == b""
