"""What is repeated and what is not, over real sockets that break in every way."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

import millstream
from millstream import errors
from millstream.client.retry import Retry
from unit.client.scripted import Peer, ScriptedServer, Seen, refused_url

QUICK = Retry(attempts=4, delay_seconds=0.01, delay_seconds_max=0.05)
HEAD = {"Content-Type": "text/plain", "Stream-Next-Offset": "0_5"}
OWN = {**HEAD, "Stream-Incarnation": "i1"}


def connect(url: str, timeout_seconds: float = 5.0) -> millstream.Client:
    return millstream.connect(url, retry=QUICK, timeout_seconds=timeout_seconds)


def text_stream(client: millstream.Client) -> millstream.Stream:
    return client.stream("a", content_type="text/plain")


def broken(peer: Peer) -> None:
    peer.read()
    peer.reset()


def only_a_head(peer: Peer) -> None:
    """The next connection: a repeated append would show here as a POST."""
    assert peer.read().method == "HEAD"
    peer.answer(200, headers=HEAD)


def test_nobody_listens() -> None:
    with connect(refused_url()) as client, pytest.raises(errors.ConnectionFailed) as caught:
        text_stream(client).append("x")
    assert caught.value.hint is not None
    assert "millstream serve" in caught.value.hint


def test_a_read_is_repeated_after_a_break() -> None:
    def answer(peer: Peer) -> None:
        assert peer.read().target == "/v1/stream/a?offset=-1"
        peer.answer(200, b"hello", {**HEAD, "Stream-Up-To-Date": "true"})

    with ScriptedServer(broken, broken, answer) as server, connect(server.url) as client:
        assert [record.data for record in text_stream(client).read()] == [b"hello"]


def test_a_read_that_ends_short_is_repeated_and_not_delivered() -> None:
    def short(peer: Peer) -> None:
        peer.read()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nStream-Next-Offset: 0_5\r\n\r\nhel")

    def whole(peer: Peer) -> None:
        peer.read()
        peer.answer(200, b"hello", {**HEAD, "Stream-Up-To-Date": "true"})

    with ScriptedServer(short, whole) as server, connect(server.url) as client:
        assert b"".join(record.data for record in text_stream(client).read()) == b"hello"


def test_a_plain_append_that_may_have_arrived_is_not_repeated() -> None:
    with ScriptedServer(broken, only_a_head) as server, connect(server.url) as client:
        with pytest.raises(errors.OutcomeUnknown):
            text_stream(client).append("x")
        client.stream("a").info()


def test_a_plain_append_is_repeated_when_the_server_says_it_refused() -> None:
    bodies = []

    def busy(peer: Peer) -> None:
        for status, code in ((503, "server_busy"), (503, "shutting_down")):
            bodies.append(peer.read().body)
            peer.problem(status, code)
        bodies.append(peer.read().body)
        peer.answer(429)
        bodies.append(peer.read().body)
        peer.answer(204, headers={"Stream-Next-Offset": "0_9"})

    with ScriptedServer(busy) as server, connect(server.url) as client:
        assert text_stream(client).append("x") == "0_9"
    assert bodies == [b"x"] * 4


def test_a_bare_503_does_not_promise_that_an_append_was_refused() -> None:
    def proxy(peer: Peer) -> None:
        peer.read()
        peer.answer(503, b"upstream went away", {"Connection": "close"})

    with ScriptedServer(proxy, only_a_head) as server, connect(server.url) as client:
        with pytest.raises(errors.Unavailable):
            text_stream(client).append("x")
        client.stream("a").info()


def test_an_unknown_outcome_named_by_the_server_is_not_repeated() -> None:
    def unknown(peer: Peer) -> None:
        peer.read()
        peer.problem(503, "outcome_unknown", {"Connection": "close"})

    with ScriptedServer(unknown, only_a_head) as server, connect(server.url) as client:
        with pytest.raises(errors.OutcomeUnknown):
            text_stream(client).append("x")
        client.stream("a").info()


def test_retry_after_is_honoured() -> None:
    def busy(peer: Peer) -> None:
        peer.read()
        peer.problem(503, "server_busy", {"Retry-After": "1"})
        peer.read()
        peer.answer(200, headers=HEAD)

    with ScriptedServer(busy) as server, connect(server.url) as client:
        began = time.monotonic()
        client.stream("a").info()
        assert time.monotonic() - began >= 1.0


def test_attempts_are_bounded() -> None:
    def busy(peer: Peer) -> None:
        for _ in range(QUICK.attempts):
            peer.read()
            peer.problem(503, "server_busy")
        peer.wait_closed()

    with ScriptedServer(busy) as server, connect(server.url) as client:
        with pytest.raises(errors.Unavailable):
            client.stream("a").info()
        client.close()


def test_a_repeated_delete_that_finds_nothing_has_succeeded() -> None:
    def gone(peer: Peer) -> None:
        peer.read()
        peer.answer(404)

    with ScriptedServer(broken, gone) as server, connect(server.url) as client:
        client.stream("a").delete()


def test_a_first_delete_that_finds_nothing_has_not() -> None:
    def gone(peer: Peer) -> None:
        peer.read()
        peer.answer(404)

    with ScriptedServer(gone) as server, connect(server.url) as client:
        with pytest.raises(errors.StreamNotFound):
            client.stream("a").delete()


def test_create_and_close_are_repeated() -> None:
    def answer(status: int) -> object:
        def handler(peer: Peer) -> None:
            peer.read()
            peer.answer(status, headers=HEAD)

        return handler

    script = (broken, answer(200), broken, answer(204))
    with ScriptedServer(*script) as server:  # type: ignore[arg-type]
        with connect(server.url) as client:
            assert client.create("a").created is False
        with connect(server.url) as client:
            assert client.stream("a").close() == "0_5"


def test_a_silent_server_times_out() -> None:
    def silent(peer: Peer) -> None:
        peer.read()
        peer.wait_closed()

    with (
        ScriptedServer(silent, only_a_head) as server,
        connect(server.url, timeout_seconds=0.2) as client,
    ):
        with pytest.raises(errors.OutcomeUnknown):
            text_stream(client).append("x")
        client.stream("a").info()


def test_an_early_refusal_of_a_large_body_is_understood() -> None:
    def refuse(peer: Peer) -> None:
        peer.socket.recv(100)
        peer.problem(413, "payload_too_large", {"Connection": "close"})
        peer.wait_closed()

    # Told at once: the server takes no more of the body, so a client that only sends waits for its timeout.
    with ScriptedServer(refuse) as server, connect(server.url, timeout_seconds=600) as client:
        with pytest.raises(errors.PayloadTooLarge):
            text_stream(client).append(b"x" * 50_000_000)


def test_connections_are_kept_and_a_dead_one_is_noticed_before_it_is_used() -> None:
    closed = threading.Event()

    def one(peer: Peer) -> None:
        for _ in range(2):
            peer.read()
            peer.answer(204, headers=HEAD)
        peer.socket.close()
        closed.set()

    def two(peer: Peer) -> None:
        peer.read()
        peer.answer(204, headers=HEAD)

    with ScriptedServer(one, two) as server, connect(server.url) as client:
        stream = text_stream(client)
        stream.append("1")
        stream.append("2")
        assert closed.wait(5)
        time.sleep(
            0.05
        )  # the FIN is on its way through the loopback; nothing can be awaited for it
        stream.append("3")


def test_a_conditional_append_is_not_sent_to_a_server_that_would_ignore_it() -> None:
    def foreign(peer: Peer) -> None:
        assert peer.read().method == "HEAD"
        peer.answer(200, headers={**HEAD, "Content-Length": "0"})
        peer.wait_closed()

    with ScriptedServer(foreign) as server, connect(server.url) as client:
        with pytest.raises(errors.NotSupported):
            text_stream(client).append("x", if_match="0_0")
        client.close()


def test_a_conditional_append_that_lost_its_race_tells_the_tail() -> None:
    seen: list[Seen] = []

    def own(peer: Peer) -> None:
        peer.read()
        peer.send(b"HTTP/1.1 200 OK\r\nStream-Incarnation: i\r\nStream-Next-Offset: 0_1\r\n\r\n")
        seen.append(peer.read())
        peer.problem(412, "precondition_failed", {"Stream-Next-Offset": "0_9"})

    with ScriptedServer(own) as server, connect(server.url) as client:
        with pytest.raises(errors.PreconditionFailed) as caught:
            text_stream(client).append("x", if_match="0_0")
    assert caught.value.tail == "0_9"
    assert seen[0].headers["if-match"] == '"0_0"'


@pytest.mark.parametrize("start", [{"tail": 3}, {"since": "2026-01-01T00:00:00Z"}])
def test_reading_by_extension_from_a_server_that_ignores_it_is_an_error(
    start: dict[str, object],
) -> None:
    def foreign(peer: Peer) -> None:
        peer.read()
        peer.answer(200, b"everything", {**HEAD, "Stream-Up-To-Date": "true"})

    with ScriptedServer(foreign) as server, connect(server.url) as client:
        with pytest.raises(errors.NotSupported):
            list(text_stream(client).read(**start))  # type: ignore[arg-type]


def test_a_durability_that_is_not_confirmed_is_an_error() -> None:
    def foreign(peer: Peer) -> None:
        peer.read()
        peer.answer(201, headers=HEAD)

    with ScriptedServer(foreign) as server, connect(server.url) as client:
        with pytest.raises(errors.NotSupported):
            client.create("a", durability="memory")


def test_a_change_of_class_is_not_sent_to_a_server_that_has_none() -> None:
    def foreign(peer: Peer) -> None:
        assert peer.read().method == "HEAD"
        peer.answer(200, headers={**HEAD, "Content-Length": "0"})
        peer.wait_closed()

    with ScriptedServer(foreign) as server, connect(server.url) as client:
        with pytest.raises(errors.NotSupported, match="durability"):
            text_stream(client).set_durability("disk")
        client.close()


def test_a_change_of_class_is_repeated_until_it_is_answered() -> None:
    seen: list[Seen] = []

    def lost(peer: Peer) -> None:
        peer.read()
        peer.send(b"HTTP/1.1 200 OK\r\nStream-Incarnation: i\r\nStream-Next-Offset: 0_1\r\n\r\n")
        seen.append(peer.read())
        peer.reset()

    def answered(peer: Peer) -> None:
        seen.append(peer.read())
        entry = b'{"path":"a/b c","content_type":"text/plain","tail":"0_1","durability":"disk"}'
        peer.answer(200, entry, {"Content-Type": "application/json"})

    with ScriptedServer(lost, answered) as server, connect(server.url) as client:
        info = client.stream("a/b c").set_durability("disk")
    assert (info.path, info.durability, info.tail) == ("a/b c", "disk", "0_1")
    for request in seen:
        assert (request.method, request.target) == ("PATCH", "/-/api/streams/a/b%20c")
        assert request.body == b'{"durability":"disk"}'


def test_a_closed_client_says_so() -> None:
    client = connect("http://127.0.0.1:1")
    client.close()
    with pytest.raises(errors.ClientClosed):
        client.stream("a").info()


def test_async_repeats_reads_and_not_appends() -> None:
    def answer(peer: Peer) -> None:
        peer.read()
        peer.answer(200, b"hello", {**HEAD, "Stream-Up-To-Date": "true"})

    async def scenario(url: str) -> None:
        async with millstream.aio.connect(url, retry=QUICK) as client:
            stream = client.stream("a", content_type="text/plain")
            assert [record.data async for record in stream.read()] == [b"hello"]
        async with millstream.aio.connect(url, retry=QUICK) as client:
            stream = client.stream("a", content_type="text/plain")
            with pytest.raises(errors.OutcomeUnknown):
                await stream.append("x")
            await stream.info()

    with ScriptedServer(broken, answer, broken, only_a_head) as server:
        asyncio.run(scenario(server.url))


def test_async_understands_an_early_refusal() -> None:
    def refuse(peer: Peer) -> None:
        peer.socket.recv(100)
        peer.problem(413, "payload_too_large", {"Connection": "close"})
        peer.wait_closed()

    async def scenario(url: str) -> None:
        async with millstream.aio.connect(url, retry=QUICK, timeout_seconds=600) as client:
            with pytest.raises(errors.PayloadTooLarge):
                await client.stream("a", content_type="text/plain").append(b"x" * 50_000_000)

    with ScriptedServer(refuse) as server:
        asyncio.run(scenario(server.url))
