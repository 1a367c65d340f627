"""Following over real sockets: nothing missed, nothing twice, no gap in silence, no tight loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import millstream
from millstream import errors
from millstream.client import follow
from millstream.client.retry import Retry
from millstream.types import Gap
from unit.client.scripted import Handler, Peer, ScriptedServer

QUICK = Retry(attempts=3, delay_seconds=0.01, delay_seconds_max=0.05)
SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def page(
    body: bytes, offset: str, *, kind: str = "application/json", **flags: str
) -> Callable[[Peer], None]:
    headers = {"Content-Type": kind, "Stream-Next-Offset": offset}
    headers |= {name.replace("_", "-"): value for name, value in flags.items()}

    def answer(peer: Peer) -> None:
        peer.answer(200, body, headers)

    return answer


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(body: bytes, control: bytes) -> bytes:
    data = b"event: data\ndata:" + body + b"\n\n" if body else b""
    return chunk(data + b"event: control\ndata:" + control + b"\n\n")


def script(*turns: tuple[str, Callable[[Peer], None]]) -> Handler:
    """On one connection: expect a target that ends so, then answer."""

    def handler(peer: Peer) -> None:
        for target, answer in turns:
            seen = peer.read()
            assert seen.target.endswith(target), seen.target
            answer(peer)

    return handler


def values(url: str, **options: Any) -> list[Any]:
    with millstream.connect(url, retry=QUICK) as client:
        return [record.value for record in client.stream("a").follow(**options)]


def test_sse_delivers_whole_batches_and_resumes_where_it_broke() -> None:
    def first(peer: Peer) -> None:
        peer.send(SSE_HEAD + event(b"[1]", b'{"streamNextOffset":"0_2","streamCursor":"7"}'))
        # This batch has no control event yet: it must not be delivered, but read again.
        peer.send(chunk(b"event: data\ndata:[2]\n\n"))
        peer.reset()

    def second(peer: Peer) -> None:
        peer.send(SSE_HEAD + event(b"[2,3]", b'{"streamNextOffset":"0_4","streamClosed":true}'))

    caught_up = page(b"[0]", "0_1", stream_up_to_date="true")
    nothing = page(b"[]", "0_2", stream_up_to_date="true")
    lost: list[errors.MillstreamError] = []
    resumed = threading.Event()
    with ScriptedServer(
        script(("?offset=-1", caught_up), ("?offset=0_1&live=sse", first)),
        script(("?offset=0_2", nothing), ("?offset=0_2&live=sse&cursor=7", second)),
    ) as server:
        found = values(
            server.url,
            on_reconnect=lambda error, _: lost.append(error),
            on_resume=resumed.set,
        )
    assert found == [0, 1, 2, 3]
    assert len(lost) == 1
    assert resumed.is_set()


def test_a_recycled_sse_connection_is_opened_again_without_a_word() -> None:
    def recycled(peer: Peer) -> None:
        peer.send(SSE_HEAD + event(b"[1]", b'{"streamNextOffset":"0_2"}') + b"0\r\n\r\n")

    def last(peer: Peer) -> None:
        peer.send(SSE_HEAD + event(b"", b'{"streamNextOffset":"0_2","streamClosed":true}'))

    lost: list[object] = []
    with ScriptedServer(
        script(
            ("?offset=-1", page(b"[]", "0_1", stream_up_to_date="true")),
            ("live=sse", recycled),
        ),
        script(("?offset=0_2&live=sse", last)),
    ) as server:
        assert values(server.url, on_reconnect=lambda *told: lost.append(told)) == [1]
    assert lost == []


def binary_server(data: bytes) -> ScriptedServer:
    def live(peer: Peer) -> None:
        head = SSE_HEAD.replace(b"\r\n\r\n", b"\r\nStream-SSE-Data-Encoding: base64\r\n\r\n")
        peer.send(head + event(data, b'{"streamNextOffset":"0_4","streamClosed":true}'))

    empty = page(b"", "0_0", kind="application/octet-stream", stream_up_to_date="true")
    return ScriptedServer(script(("offset=-1", empty), ("live=sse", live)))


def test_binary_comes_through_base64_over_several_lines() -> None:
    with binary_server(b"AAH/\ndata:Cg==") as server:
        assert values(server.url) == [b"\x00\x01\xff\n"]


def test_bad_base64_is_not_guessed_at() -> None:
    with binary_server(b"AA=H/") as server, pytest.raises(errors.ProtocolError):
        values(server.url)


def test_text_is_followed_byte_for_byte_by_long_poll() -> None:
    kind = "text/plain"
    with ScriptedServer(
        script(
            ("?offset=-1", page(b"a\r\n", "0_1", kind=kind, stream_up_to_date="true")),
            ("?offset=0_1&live=long-poll", page(b"b\r", "0_2", kind=kind, stream_cursor="5")),
            (
                "?offset=0_2&live=long-poll&cursor=5",
                lambda peer: peer.answer(
                    204, headers={"Stream-Next-Offset": "0_2", "Stream-Cursor": "6"}
                ),
            ),
            (
                "?offset=0_2&live=long-poll&cursor=6",
                page(b"c", "0_3", kind=kind, stream_closed="true"),
            ),
        )
    ) as server:
        assert values(server.url) == [b"a\r\n", b"b\r", b"c"]


def test_a_server_that_answers_nothing_at_once_is_not_asked_in_a_tight_loop() -> None:
    asked = 0

    def idle(peer: Peer) -> None:
        nonlocal asked
        peer.socket.settimeout(0.3)
        try:
            while True:
                peer.read()
                asked += 1
                page(b"", "0_1", kind="text/plain", stream_up_to_date="true")(peer)
        except (TimeoutError, AssertionError, ConnectionError):
            return

    slow = Retry(attempts=3, delay_seconds=0.2, delay_seconds_max=0.2)
    with ScriptedServer(idle) as server, millstream.connect(server.url, retry=slow) as client:
        follower = client.stream("a").follow()
        stopper = threading.Timer(0.5, follower.close)
        stopper.start()
        assert list(follower) == []
        stopper.join()
        client.close()
    assert 2 <= asked <= 8


@pytest.mark.parametrize("mode", ["sse", "long-poll"])
def test_close_from_another_thread_ends_a_waiting_follower(mode: Any) -> None:
    waiting = threading.Event()

    def wait(peer: Peer) -> None:
        if mode == "sse":
            peer.send(SSE_HEAD)
        waiting.set()
        peer.wait_closed()

    caught_up = page(b"[1]", "0_1", stream_up_to_date="true")
    with ScriptedServer(script(("-1", caught_up), (f"live={mode}", wait))) as server:
        with millstream.connect(server.url, retry=QUICK) as client:
            follower = client.stream("a").follow(mode=mode)
            found: list[Any] = []
            thread = threading.Thread(target=lambda: found.extend(r.value for r in follower))
            thread.start()
            assert waiting.wait(5)
            follower.close()
            thread.join(5)
            assert not thread.is_alive()
    assert found == [1]
    assert follower.offset == "0_1"


def test_a_follower_that_never_reached_the_server_gives_up() -> None:
    def broken(peer: Peer) -> None:
        peer.read()
        peer.reset()

    with ScriptedServer(broken, broken, broken) as server, pytest.raises(errors.ConnectionFailed):
        values(server.url)


def test_a_stream_that_vanished_ends_the_follower() -> None:
    with (
        ScriptedServer(
            script(
                ("-1", page(b"[1]", "0_1", stream_up_to_date="true")),
                ("live=sse", lambda peer: peer.problem(404, "stream_not_found")),
            )
        ) as server,
        pytest.raises(errors.StreamNotFound),
    ):
        values(server.url)


def test_a_silent_live_connection_is_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "LIVE_SILENCE_SECONDS", 0.2)

    def silent(peer: Peer) -> None:
        peer.send(SSE_HEAD)
        peer.wait_closed()

    with ScriptedServer(
        script(("-1", page(b"[1]", "0_1", stream_up_to_date="true")), ("live=sse", silent)),
        script(("?offset=0_1", page(b"[2]", "0_2", stream_closed="true"))),
    ) as server:
        assert values(server.url) == [1, 2]


GAP = "from=0_2; to=5_2; reason=crash; certain=0"
EXPECTED_GAP = Gap("0_2", "5_2", "crash", certain=False)


def gap_server() -> ScriptedServer:
    return ScriptedServer(
        script(
            ("offset=-1", page(b"[1]", "0_2")),
            ("offset=0_2", page(b"[2]", "5_4", stream_gap=GAP, stream_closed="true")),
        )
    )


def test_a_gap_raises_by_default() -> None:
    found = []
    with gap_server() as server, millstream.connect(server.url, retry=QUICK) as client:
        with pytest.raises(errors.GapError) as caught:
            for record in client.stream("a").read():
                found.append(record.value)
    assert found == [1]
    assert caught.value.gap == EXPECTED_GAP


def test_a_gap_can_be_a_record(caplog: pytest.LogCaptureFixture) -> None:
    with gap_server() as server, millstream.connect(server.url, retry=QUICK) as client:
        records = list(client.stream("a").follow(gaps="record"))
    assert [(record.value, record.gap) for record in records] == [
        (1, None),
        (None, EXPECTED_GAP),
        (2, None),
    ]
    assert "records may be missing" in caplog.text


def test_a_gap_can_be_called_back() -> None:
    told: list[Gap] = []
    with gap_server() as server:
        assert values(server.url, gaps=told.append) == [1, 2]
    assert told == [EXPECTED_GAP]


def test_a_gap_in_sse_is_seen() -> None:
    control = (
        b'{"streamNextOffset":"5_4","streamClosed":true,"streamGapFrom":"0_2",'
        b'"streamGapTo":"5_2","streamGapReason":"retention"}'
    )
    with ScriptedServer(
        script(
            ("-1", page(b"[1]", "0_2", stream_up_to_date="true")),
            ("sse", lambda peer: peer.send(SSE_HEAD + event(b"[2]", control))),
        )
    ) as server:
        told: list[Gap] = []
        assert values(server.url, gaps=told.append) == [1, 2]
    assert told == [Gap("0_2", "5_2", "retention")]


def test_a_stream_created_again_is_a_gap_even_if_the_server_does_not_say_so() -> None:
    with (
        ScriptedServer(
            script(
                ("-1", page(b"[1]", "0_1", stream_incarnation="x")),
                ("0_1", page(b"[2]", "0_2", stream_incarnation="y", stream_closed="true")),
            )
        ) as server,
        pytest.raises(errors.GapError, match="recreated"),
    ):
        values(server.url)


def test_async_follow_resumes_too() -> None:
    def first(peer: Peer) -> None:
        peer.send(SSE_HEAD + event(b"[1]", b'{"streamNextOffset":"0_2"}'))
        peer.reset()

    async def scenario(url: str) -> list[Any]:
        async with millstream.aio.connect(url, retry=QUICK) as client:
            return [record.value async for record in client.stream("a").follow()]

    with ScriptedServer(
        script(("-1", page(b"[0]", "0_1", stream_up_to_date="true")), ("sse", first)),
        script(("?offset=0_2", page(b"[2]", "0_3", stream_closed="true"))),
    ) as server:
        began = time.monotonic()
        assert asyncio.run(scenario(server.url)) == [0, 1, 2]
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("mode", ["sse", "long-poll"])
def test_async_close_from_another_task_ends_a_waiting_follower(mode: Any) -> None:
    waiting = threading.Event()

    def wait(peer: Peer) -> None:
        if mode == "sse":
            peer.send(SSE_HEAD)
        waiting.set()
        peer.wait_closed()

    async def scenario(url: str) -> list[Any]:
        async with millstream.aio.connect(url, retry=QUICK) as client:
            follower = client.stream("a").follow(mode=mode)

            async def follow() -> list[Any]:
                return [record.value async for record in follower]

            task = asyncio.create_task(follow())
            assert await asyncio.to_thread(waiting.wait, 5)
            await follower.aclose()
            found = await asyncio.wait_for(task, 5)
            assert follower.offset == "0_1"
            return found

    caught_up = page(b"[1]", "0_1", stream_up_to_date="true")
    with ScriptedServer(script(("-1", caught_up), (f"live={mode}", wait))) as server:
        assert asyncio.run(scenario(server.url)) == [1]
