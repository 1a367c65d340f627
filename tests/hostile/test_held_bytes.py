"""What the server holds for clients that do not read is bounded together, and costs nobody who reads."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from support.http import Api, Connection, request_bytes
from support.pipeline import Pipeline
from support.server import Server
from support.sse import Event, EventStream

KIB = 1 << 10
MIB = 1 << 20
TEXT = {"Content-Type": "text/plain"}
BUDGET = 32 * MIB
# Allocators keep some of what they were given back; the server's own buffers are of this order, too.
SLACK = 40 * MIB
PER_CONNECTION = 20 * KIB
# What finished pipeline answers may take together (`PIPELINE_ANSWERS_MAX_BYTES`).
ANSWERS_MAX = 512 * MIB


@pytest.fixture
def tight(start_server: Callable[..., Server]) -> Server:
    # From its command: the allocator of a forked server has memory of its parent, and gives back otherwise.
    settings = {"client_bytes_max": BUDGET, "send_timeout_ms": 120_000}
    return start_server(settings=settings, from_command=True)


def stalled(api: Api, requests: bytes) -> Connection:
    """Sends requests and reads nothing into a receive buffer that is as small as it can be."""
    connection = Connection.__new__(Connection)
    connection.deadline_s = 60.0
    connection._buffer = bytearray()
    connection._ended = False
    connection.socket = socket.socket()
    connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.socket.connect(("127.0.0.1", api.server.port))
    connection.send(requests)
    return connection


@contextmanager
def crowd(api: Api, requests: bytes, count: int) -> Iterator[list[Connection]]:
    with ExitStack() as stack:
        yield [stack.enter_context(stalled(api, requests)) for _ in range(count)]


def settled_metric(api: Api, name: str) -> int:
    """The value of a counter when it has stopped to grow."""
    until = time.monotonic() + 60
    before, same = -1, 0
    while same < 5:
        assert time.monotonic() < until, f"{name} still grows"
        value = api.metric(name)
        same = same + 1 if value == before else 0
        before = value
        time.sleep(0.02)
    return before


def works_for_others(api: Api, path: str) -> None:
    other = f"{path}/other"
    assert api.put(other, b"x" * 60_000).status == 201
    with api.connect() as connection:
        for number in range(20):
            append = connection.request("POST", Api.target(other), TEXT, b"%05d" % number)
            assert append.status == 204
            answer = connection.request("GET", Api.target(other))
            assert answer.body[-5:] == b"%05d" % number
        connection.send(request_bytes("GET", Api.target(other)) * 20)
        for _ in range(20):
            assert len(connection.read_response().body) == 60_100
    assert api.call("GET", "/-/health").status == 200


def test_pipelined_reads_that_nobody_takes_are_not_kept(
    tight: Server, path: str, full: bool
) -> None:
    api = Api(tight, deadline_s=60.0)
    body = bytes(65 + number * number % 26 for number in range(60_000))
    api.put(path, body)
    count = 6000 if full else 600
    works_for_others(api, path)
    before = tight.rss_bytes()
    with crowd(api, request_bytes("GET", Api.target(path)) * 100, count) as clients:
        settled_metric(api, "millstream_reads_total")
        assert tight.rss_bytes() - before < BUDGET + SLACK + count * PER_CONNECTION
        assert api.metric("millstream_client_bytes") < BUDGET + MIB
        assert api.metric("millstream_client_bytes_full_total") > 0
        works_for_others(api, f"{path}/meanwhile")
        for reader in (*clients[:3], *clients[-3:]):
            reader.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, MIB)
            for _ in range(100):
                assert reader.read_response().body == body
    api.wait_for_metric("millstream_connections", 1)
    assert api.metric("millstream_client_bytes") == 0


def test_figures_that_nobody_takes_are_not_kept(tight: Server, full: bool) -> None:
    """Answers that are made anew for each who asks."""
    api = Api(tight, deadline_s=60.0)
    count = 6000 if full else 3000
    with crowd(api, request_bytes("GET", "/-/metrics") * 400, count):
        api.wait_until_metric("millstream_client_bytes_full_total", lambda often: often > count)
        most = max(api.metric("millstream_client_bytes") for _ in range(50))
        assert most < BUDGET + MIB + count * 16 * KIB


def test_bodies_of_tiny_chunks_are_decoded_in_turns_also_without_room(
    start_server: Callable[..., Server], path: str
) -> None:
    """What has no room waits in the socket: little is taken at a time, and not all of it at once."""
    settings = {"reactors": 1, "client_bytes_max": 16 * MIB, "send_timeout_ms": 120_000}
    server = start_server(settings=settings)
    api = Api(server, deadline_s=60.0)
    api.put(path, b"x" * 60_000)
    headers = {**TEXT, "Transfer-Encoding": "chunked"}
    senders, chunks = 400, 10_000
    chunked = request_bytes("POST", Api.target(path), headers) + b"1\r\nx\r\n" * chunks
    with ExitStack() as stack:
        stack.enter_context(crowd(api, request_bytes("GET", Api.target(path)) * 100, 600))
        api.wait_until_metric("millstream_client_bytes_full_total", lambda often: often > 600)
        connections = [stack.enter_context(api.connect()) for _ in range(senders)]
        asker = stack.enter_context(api.connect())
        seen = [api.metric("millstream_appends_total")]
        done = seen[0] + senders
        with server.frozen():
            for connection in connections:
                connection.send(chunked + b"0\r\n\r\n")
        while seen[-1] < done:
            text = asker.request("GET", "/-/metrics").text
            seen.append(int(text.partition("\nmillstream_appends_total ")[2].split()[0]))
        for connection in connections:
            assert connection.read_response().status == 204
    between = {count for count in seen if seen[0] < count < done}
    assert len(between) > 1, "all of them at once"


def test_acknowledgements_that_nobody_takes_are_not_kept(
    tight: Server, path: str, full: bool
) -> None:
    api = Api(tight, deadline_s=60.0)
    api.put(path)
    count, depth = (1000, 2500) if full else (150, 2500)
    # For a page of another origin acknowledgements are twice as long.
    page = {**TEXT, "Origin": "http://page.example"}
    append = request_bytes("POST", Api.target(path), page, b"x")
    before = tight.rss_bytes()
    with ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(stalled(api, append))
            client.socket.setblocking(False)
            # As much as the sockets take.
            left = memoryview(append * depth)
            while left:
                try:
                    left = left[client.socket.send(left) :]
                except BlockingIOError:
                    break
        settled_metric(api, "millstream_appends_total")
        assert tight.rss_bytes() - before < BUDGET + SLACK + count * PER_CONNECTION
        works_for_others(api, path)


def test_input_that_waits_behind_a_stalled_answer_is_not_kept(
    tight: Server, path: str, full: bool
) -> None:
    api = Api(tight, deadline_s=60.0)
    api.put(path, b"y" * 60_000)
    count = 4000 if full else 500
    get = request_bytes("GET", Api.target(path), {"X-Padding": "p" * 8000})
    before = tight.rss_bytes()
    with ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(stalled(api, get))
            client.socket.setblocking(False)
            try:
                client.socket.send(get * 40)
            except BlockingIOError:
                continue
        settled_metric(api, "millstream_reads_total")
        assert tight.rss_bytes() - before < BUDGET + SLACK + count * 2 * PER_CONNECTION
        works_for_others(api, path)


def record_of(kind: str, size: int) -> bytes:
    if kind == "application/json":
        items = [
            {"number": number, "text": "line\nbreak \r\n" * 20} for number in range(size // 450)
        ]
        return json.dumps(items, indent=1).encode()
    if kind == "text/plain":
        line = b"text without an end " * 12
        return b"".join(b" %d\r\n\n\r  x\n%b\n" % (i, line) for i in range(size // 260))
    return bytes(range(256)) * (size // 256) + b"end"


def matches(kind: str, event: Event, record: bytes) -> bool:
    if kind == "application/json":
        return bool(event.json() == json.loads(record))
    if kind == "text/plain":
        return event.data == record.decode().replace("\r\n", "\n").replace("\r", "\n")
    return event.decoded() == record


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/octet-stream"])
def test_large_events_that_nobody_takes_are_not_kept(
    tight: Server, path: str, full: bool, kind: str
) -> None:
    api = Api(tight, deadline_s=60.0)
    record = record_of(kind, 15 * MIB)
    api.put(path, b"" if kind != "application/json" else b"[]", kind)
    assert api.post(path, record, kind).status == 204
    count = 100 if full else 24
    before = tight.rss_bytes()
    request = request_bytes("GET", Api.target(path, offset="-1", live="sse"))
    with crowd(api, request, count) as clients:
        api.wait_for_metric("millstream_sse_subscribers", count)
        assert api.call("GET", "/-/health").status == 200
        settled_metric(api, "millstream_read_bytes_total")
        assert tight.rss_bytes() - before < BUDGET + SLACK + count * PER_CONNECTION
        works_for_others(api, f"{path}/other")
        for reader in clients[:: count - 1]:
            reader.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * MIB)
            head = reader.read_head()
            events = EventStream(reader, head)
            data = next_event_of_many_pieces(events)
            assert matches(kind, data, record)
            assert events.control()["upToDate"] is True
        late = f"{path}/late"
        api.put(late, content_type="text/plain")
        assert api.post(late, b"on time").status == 204
    api.wait_for_metric("millstream_sse_subscribers", 0)


def next_event_of_many_pieces(events: EventStream) -> Event:
    """The next event; unlike `EventStream.next` it looks at each byte once."""
    pieces: list[bytes] = []
    seen = b""
    for piece in events._pieces:
        pieces.append(piece)
        if b"\n\n" in seen[-1:] + piece:
            break
        seen = piece
    events._pending = b"".join(pieces)
    return events.next()


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/octet-stream"])
@pytest.mark.parametrize("version", [0, 1])
def test_a_large_record_reaches_its_readers_whole(
    shared: Api, path: str, kind: str, version: int
) -> None:
    record = record_of(kind, 700 * KIB)
    shared.put(path, b"" if kind != "application/json" else b"[]", kind)
    shared.post(path, record, kind)
    shared.post(path, b'"next"', kind)
    shared.close_stream(path)
    target = Api.target(path, offset="-1", live="sse")
    with shared.connect() as connection:
        connection.send(f"GET {target} HTTP/1.{version}\r\nHost: x\r\n\r\n".encode())
        head = connection.read_head()
        assert (head.get("transfer-encoding") == "chunked") == (version == 1)
        events = list(EventStream(connection, head))
    assert [event.kind for event in events] == ["data", "control"] * 2
    assert matches(kind, events[0], record)
    assert matches(kind, events[2], b'"next"' if kind != "application/json" else b'["next"]')
    assert "streamClosed" not in events[1].json()
    assert events[3].json()["streamClosed"] is True


def test_readers_of_one_large_record_share_its_pieces(tight: Server, path: str) -> None:
    api = Api(tight, deadline_s=30.0)
    api.put(path, content_type="application/octet-stream")
    readers = [EventStream.open(api, path) for _ in range(12)]
    for reader in readers:
        reader.control()
    record = record_of("application/octet-stream", 2 * MIB)
    before = api.metric("millstream_read_bytes_total")
    assert api.post(path, record, "application/octet-stream").status == 204
    for reader in readers:
        data = next_event_of_many_pieces(reader)
        assert base64.b64decode(data.data) == record
        assert reader.control()["upToDate"] is True
        reader.connection.close()
    assert api.metric("millstream_read_bytes_total") - before < len(readers) * len(record)


def test_listings_that_nobody_takes_are_bounded_and_leave_room_for_other_calls(
    start_server: Callable[..., Server],
) -> None:
    settings = {"client_bytes_max": BUDGET, "send_timeout_ms": 120_000, "reactors": 1}
    server = start_server(settings=settings)
    api = Api(server, deadline_s=60.0)
    long_name = "/".join(["n" * 200] * 4)
    with api.connect() as connection:
        creates = [request_bytes("PUT", Api.target(f"{long_name}/{n}"), TEXT) for n in range(1000)]
        connection.send(b"".join(creates))
        for _ in creates:
            assert connection.read_response().status == 201
    assert len(api.call("GET", "/-/api/streams?limit=1000").body) > 800 * KIB
    before = server.rss_bytes()
    listing, one = "/-/api/streams?limit=1000", f"/-/api/streams/{long_name}/7"
    with crowd(api, request_bytes("GET", listing), 250) as clients:
        for client in clients:
            assert client.socket.recv(1, socket.MSG_PEEK), "an answer, or a refusal"
        assert api.call("GET", one).status == 200
        # The control plane makes 32 of them at once, each of 1 MiB and twice in memory for a moment.
        assert server.peak_rss_bytes() - before < BUDGET + SLACK + 64 * MIB
        assert api.metric("millstream_client_bytes") < BUDGET + MIB
        assert api.metric("millstream_control_crowded_total") > 0
    api.wait_for_metric("millstream_connections", 1)
    assert api.metric("millstream_client_bytes") == 0


def read_of_many_records(api: Api, path: str, window: int) -> bytes:
    """A request to `/v1/read` whose answer is a window full of small records."""
    api.put(path, content_type="application/octet-stream")
    append = request_bytes(
        "POST", Api.target(path), {"Content-Type": "application/octet-stream"}, b"d" * 1000
    )
    with api.connect() as connection:
        for _ in range(9 * MIB // 1000 // 200):
            connection.send(append * 200)
            for _ in range(200):
                assert connection.read_response().status == 204
    asked = {"ranges": Pipeline(api).whole(path), "max_bytes": window}
    return request_bytes("POST", "/v1/read", None, json.dumps(asked).encode())


@contextmanager
def untaken_answers(api: Api, request: bytes, wanted: int) -> Iterator[None]:
    """Clients that take nothing, until so many bytes are held for them."""
    with ExitStack() as stack:
        until = time.monotonic() + api.deadline_s
        while (held := api.metric("millstream_pipeline_answer_bytes")) <= wanted:
            assert time.monotonic() < until, f"{held} of {wanted} bytes are held"
            for _ in range(20):
                stack.enter_context(stalled(api, request))
            api.wait_for_metric("millstream_pipeline_queue", 0)
        yield


@pytest.mark.parametrize("window", [8 * MIB, 100 * KIB])
def test_memory_of_answers_that_nobody_took_is_given_back(
    tight: Server, path: str, window: int
) -> None:
    api = Api(tight, deadline_s=60.0)
    request = read_of_many_records(api, path, window)
    before = tight.rss_bytes()
    # What allocators do with memory depends on what they were given back before.
    for _ in range(3):
        with untaken_answers(api, request, 256 * MIB):
            assert tight.rss_bytes() - before > 200 * MIB
        api.wait_for_metric("millstream_pipeline_answer_bytes", 0)
        until = time.monotonic() + 20
        while (kept := tight.rss_bytes() - before) > 2 * SLACK:
            assert time.monotonic() < until, f"{kept >> 20} MiB are not given back"
            time.sleep(0.1)


def test_memory_of_bodies_that_the_control_plane_had_is_given_back(tight: Server) -> None:
    api = Api(tight, deadline_s=60.0)
    streams = ",".join("{}" for _ in range(300_000))
    body = f'{{"type":"nope","streams":[{streams}]}}'.encode()
    wrong = request_bytes(
        "PUT", "/v1/stream/__ds/subscriptions/s", {"Content-Type": "application/json"}, body
    )
    before = tight.rss_bytes()
    for _ in range(2):
        with ExitStack() as stack:
            connections = [stack.enter_context(api.connect()) for _ in range(100)]
            for connection in connections:
                connection.send(wrong)
            for connection in connections:
                assert connection.read_response().status >= 400
        api.wait_for_metric("millstream_inflight_bytes", 0)
        until = time.monotonic() + 30
        while (kept := tight.rss_bytes() - before) > 2 * SLACK:
            assert time.monotonic() < until, f"{kept >> 20} MiB are not given back"
            time.sleep(0.1)


def test_pipeline_answers_that_nobody_takes_are_bounded(tight: Server, path: str) -> None:
    api = Api(tight, deadline_s=60.0)
    window = 8 * MIB
    request = read_of_many_records(api, path, window)
    pipeline = Pipeline(api)
    whole, many = pipeline.whole(path), [f"{path}/{number}" for number in range(300)]
    large = [("/v1/tails", {"streams": many}), ("/v1/read", {"ranges": whole})]
    small = [("/v1/tails", {"streams": [path]}), ("/v1/read", {"ranges": whole, "max_bytes": 1000})]
    rest = json.dumps({"ranges": whole, "max_bytes": 300 * KIB}).encode()
    filling = request_bytes("POST", "/v1/read", None, rest)
    with (
        untaken_answers(api, request, ANSWERS_MAX - window),
        untaken_answers(api, filling, ANSWERS_MAX - 300 * KIB),
    ):
        refused = api.metric("millstream_refusals_total")
        for target, question in large:
            answer = pipeline.post(target, question)
            assert (answer.status, answer.code) == (503, "server_busy")
            assert answer.get("retry-after")
        assert api.metric("millstream_refusals_total") == refused + len(large)
        # Those who ask for little are not shut out.
        for target, question in small:
            assert pipeline.post(target, question).status == 200
        # An answer may be a little larger than it was asked to be.
        assert api.metric("millstream_pipeline_answer_bytes") < ANSWERS_MAX + window
        works_for_others(api, path)
    api.wait_for_metric("millstream_pipeline_answer_bytes", 0)
    for target, question in large:
        assert pipeline.post(target, question).status == 200


def test_answers_of_the_pipeline_take_about_what_they_hold(
    start_server: Callable[..., Server],
) -> None:
    """Clients that ask for as much as they may, and take it: memory that is asked for in vain is not free."""
    server = start_server()
    api = Api(server, deadline_s=60)
    api.put("large", b"", "application/json")
    records = b"[" + b",".join([b'{"a":1}'] * 1_000_000) + b"]"
    for _ in range(4):
        assert api.post("large", records, "application/json").status == 204
    told = Pipeline(api).tail("large")
    ranges = [{"stream": "large", "from": told["first"], "to": told["tail"]}]
    asked = {"ranges": ranges, "max_bytes": 64 * MIB}
    read = request_bytes("POST", "/v1/read", None, json.dumps(asked).encode())
    taken = Counter[int]()

    def take() -> None:
        for _ in range(12):
            with api.connect() as connection:
                connection.send(read)
                head = connection.read_head()
                taken[head.status] += 1
                for _ in connection.body_pieces(head):
                    pass

    clients = [threading.Thread(target=take) for _ in range(8)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(120)
    assert taken[200] >= 20, taken
    assert server.peak_rss_bytes() < ANSWERS_MAX + 200 * MIB
