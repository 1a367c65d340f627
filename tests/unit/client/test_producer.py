"""The producer: order, once, over refusals and breaks; first its core, then over real sockets."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream import errors
from millstream.client import wire
from millstream.client.http import Request, Response, TransportFailure
from millstream.client.producer import ProducerCore, ProducerOptions
from millstream.client.retry import Retry
from unit.client.scripted import Peer, ScriptedServer

QUICK = Retry(attempts=4, delay_seconds=0.01, delay_seconds_max=0.02)


def make(kind: str = "application/json", **options: Any) -> ProducerCore:
    return ProducerCore(
        endpoint=wire.parse_url("http://127.0.0.1:1"),
        path="a",
        content_type=kind,
        producer_id="p",
        epoch=options.pop("epoch", 100),
        claim=options.pop("claim", True),
        options=ProducerOptions(**{"linger_seconds": 0.0, **options}),
        retry=QUICK,
    )


def tuple_of(request: Request | None) -> tuple[int, int]:
    assert request is not None
    headers = dict(request.headers)
    return int(headers["Producer-Epoch"]), int(headers["Producer-Seq"])


class Model:
    """The producer rules of the protocol, as a server applies them."""

    def __init__(self, epoch: int | None = None, last: int = -1) -> None:
        self.epoch = epoch
        self.last = last
        self.records: list[Any] = []

    def apply(self, request: Request) -> Response:
        epoch, sequence = tuple_of(request)
        if self.epoch is not None and epoch < self.epoch:
            return Response(403, {"producer-epoch": str(self.epoch)})
        if self.epoch is None or epoch > self.epoch:
            if sequence != 0:
                facts = {"producer-expected-seq": "0", "producer-received-seq": str(sequence)}
                return Response(409 if self.epoch is None else 400, facts)
            self.epoch, self.last = epoch, -1
        if sequence <= self.last:
            return Response(204, {})
        if sequence > self.last + 1:
            return Response(409, {"producer-expected-seq": str(self.last + 1)})
        self.last = sequence
        self.records += json.loads(request.body)
        return Response(200, {"stream-next-offset": f"0_{len(self.records)}"})


def test_time_ends_no_batch_under_an_epoch_of_the_callers_own() -> None:
    """A replay is dropped batch by batch: slower or faster, the same records must make the same batches."""

    def batches(seconds_between: float) -> list[bytes]:
        core, now, bodies = (
            make(claim=False, epoch=7, batch_records_max=4, in_flight_max=9, linger_seconds=0.5),
            0.0,
            [],
        )
        core._established = True
        for number in range(10):
            core.add(core.encode(number), now)
            now += seconds_between
            while (request := core.take(now)) is not None:
                bodies.append(request.body)
        assert core.wake_at() is None, "nothing is sent by time"
        core.seal(now)
        while (request := core.take(now)) is not None:
            bodies.append(request.body)
        return bodies

    assert batches(0.0) == batches(1.0) == batches(3600.0)


FATES = st.sampled_from(["ok", "ok", "ok", "busy", "lost-before", "lost-after"])


@settings(max_examples=300)
@given(st.integers(0, 30), st.lists(FATES, max_size=60), st.integers(1, 5), st.integers(1, 4))
def test_every_record_once_and_in_order_whatever_happens(
    count: int, fates: list[str], in_flight: int, batch: int
) -> None:
    core = make(in_flight_max=in_flight, batch_records_max=batch, delivery_seconds_max=1e9)
    core.retry = Retry(attempts=10**6, delay_seconds=0.01, delay_seconds_max=0.02)
    server = Model()
    now = 0.0
    fate = iter(fates)
    for number in range(count):
        core.add(core.encode(number), now)
    core.seal(now)
    for _ in range(10_000):
        if core.idle:
            break
        now += 1.0
        flight = []
        while (request := core.take(now)) is not None:
            flight.append(request)
        for index, request in enumerate(flight):
            what = next(fate, "ok")
            if what == "busy":
                core.on_response(Response(503, {}), now)
            elif what == "ok":
                core.on_response(server.apply(request), now)
            else:
                applied = flight[index:] if what == "lost-after" else []
                for lost in applied:
                    server.apply(lost)
                core.on_break(TransportFailure("broke", sent=True), now, "x")
                break
    assert core.error is None
    assert core.idle
    assert server.records == list(range(count))
    assert core.acknowledged_records == count
    assert core.buffered_bytes == 0


def test_the_first_batch_travels_alone_until_the_epoch_is_claimed() -> None:
    core = make(batch_records_max=1, in_flight_max=3)
    for number in range(5):
        core.add(core.encode(number), 0)
    assert tuple_of(core.take(0)) == (100, 0)
    assert core.take(0) is None
    core.on_response(Response(200, {}), 0)
    assert [tuple_of(core.take(0)) for _ in range(3)] == [(100, 1), (100, 2), (100, 3)]
    assert core.take(0) is None


def test_a_newer_epoch_is_claimed_while_nothing_can_have_been_applied() -> None:
    core = make()
    core.add(core.encode(1), 0)
    core.take(0)
    core.on_response(Response(403, {"producer-epoch": "500"}), 0)
    assert tuple_of(core.take(0)) == (501, 0)


@pytest.mark.parametrize("case", ["given epoch", "lost before", "established"])
def test_otherwise_a_newer_epoch_is_the_end(case: str) -> None:
    core = make(claim=case != "given epoch")
    core.add(core.encode(1), 0)
    core.seal(0)
    core.take(0)
    if case == "lost before":
        core.on_break(TransportFailure("x", sent=True), 0, "x")
        assert core.take(1) is not None
    if case == "established":
        core.on_response(Response(200, {}), 0)
        core.add(core.encode(2), 0)
        assert core.take(1) is not None
    core.on_response(Response(403, {"producer-epoch": "500"}), 1)
    assert isinstance(core.error, errors.ProducerFenced)
    assert core.take(9) is None
    with pytest.raises(errors.ProducerClosed):
        core.add(core.encode(3), 9)


def test_a_server_that_lost_earlier_batches_is_found_out() -> None:
    core = make(batch_records_max=1)
    core.add(core.encode(0), 0)
    core.take(0)
    core.on_response(Response(200, {}), 0)
    core.add(core.encode(1), 0)
    for _ in range(5):
        if core.take(0) is not None:
            core.on_response(Response(409, {"producer-expected-seq": "0"}), 0)
    assert isinstance(core.error, errors.ProducerGap)


def test_bytes_in_flight_are_bounded_but_one_batch_always_goes() -> None:
    core = make("text/plain", in_flight_bytes_max=100)
    for text in ("a", "b" * 60, "c" * 60, "d", "e" * 500):
        core.add(core.encode(text), 0)
    core.take(0)
    core.on_response(Response(200, {}), 0)
    sizes = []
    while not core.idle:
        flight = []
        while (request := core.take(0)) is not None:
            flight.append(len(request.body))
        for _ in flight:
            core.on_response(Response(200, {}), 0)
        sizes.append(flight)
    assert sizes == [[60, 60], [1, 500]]


@pytest.mark.parametrize("last", [None, b'"bye"'])
def test_the_stream_is_closed_in_sequence(last: bytes | None) -> None:
    core = make()
    core.add(core.encode(1), 0)
    core.end(last, 0)
    first = core.take(0)
    assert first is not None
    assert "Stream-Closed" not in dict(first.headers)
    core.on_response(Response(200, {}), 0)
    second = core.take(0)
    assert second is not None
    assert (tuple_of(second), dict(second.headers)["Stream-Closed"]) == ((100, 1), "true")
    assert second.body == (b"" if last is None else b'["bye"]')
    core.on_break(TransportFailure("x", sent=True), 0, "x")
    assert core.take(9) == second
    core.on_response(Response(204, {"stream-next-offset": "0_7"}), 9)
    assert core.idle
    assert core.acknowledged_offset == "0_7"
    with pytest.raises(errors.ProducerClosed):
        core.add(core.encode(2), 9)


def test_bytes_are_never_melted_together() -> None:
    core = make("text/plain")
    for text in ("a", "b"):
        core.add(core.encode(text), 0)
    first = core.take(0)
    assert first is not None
    assert first.body == b"a"
    core.on_response(Response(200, {}), 0)
    second = core.take(0)
    assert second is not None
    assert second.body == b"b"


def test_batches_respect_their_bounds() -> None:
    core = make(batch_records_max=3, batch_bytes_max=40)
    for value in ["x", "x", "x", "x", "y" * 30, "z" * 100, "x"]:
        core.add(core.encode(value), 0)
    core.seal(0)
    bodies = []
    while (request := core.take(0)) is not None:
        bodies.append(json.loads(request.body))
        core.on_response(Response(200, {}), 0)
    assert bodies == [["x", "x", "x"], ["x", "y" * 30], ["z" * 100], ["x"]]


def test_delivery_has_a_deadline() -> None:
    core = make(delivery_seconds_max=10.0)
    core.add(core.encode(1), 0)
    core.take(0)
    core.on_response(Response(200, {}), 0)
    core.add(core.encode(2), 0)
    core.take(0)
    core.on_break(TransportFailure("x", sent=True), 5, "x")
    assert core.error is None
    core.take(6)
    core.on_break(TransportFailure("x", sent=True), 11, "x")
    assert isinstance(core.error, errors.ConnectionFailed)


# ---------------------------------------------------------------------------- over sockets


def applied(model: Model, peer: Peer, *, count: int) -> None:
    for _ in range(count):
        seen = peer.read()
        names = {"producer-epoch": "Producer-Epoch", "producer-seq": "Producer-Seq"}
        headers = tuple((names[name], seen.headers[name]) for name in names)
        response = model.apply(Request("POST", "/", headers, seen.body))
        peer.answer(response.status, headers=dict(response.headers))


def breaking_script(model: Model) -> ScriptedServer:
    def first(peer: Peer) -> None:
        applied(model, peer, count=3)
        seen = peer.read()
        # Applied, but the answer never arrives.
        names = {"producer-epoch": "Producer-Epoch", "producer-seq": "Producer-Seq"}
        headers = tuple((names[name], seen.headers[name]) for name in names)
        model.apply(Request("POST", "/", headers, seen.body))
        peer.reset()

    def second(peer: Peer) -> None:
        peer.read()
        peer.problem(503, "server_busy")
        with pytest.raises((AssertionError, ConnectionError)):
            applied(model, peer, count=10**6)

    return ScriptedServer(first, second)


def test_sync_producer_over_a_break_and_a_refusal() -> None:
    model = Model()
    with breaking_script(model) as server, millstream.connect(server.url, retry=QUICK) as client:
        stream = client.stream("a", content_type="application/json")
        with stream.producer("p", batch_records_max=7) as producer:
            for number in range(1000):
                producer.append(number)
        assert producer.acknowledged == 1000
        assert producer.pending == 0
    assert model.records == list(range(1000))


def test_async_producer_over_a_break_and_a_refusal() -> None:
    model = Model()

    async def scenario(url: str) -> None:
        async with millstream.aio.connect(url, retry=QUICK) as client:
            stream = client.stream("a", content_type="application/json")
            async with stream.producer("p", batch_records_max=7) as producer:
                for number in range(1000):
                    await producer.append(number)
            assert producer.acknowledged == 1000

    with breaking_script(model) as server:
        asyncio.run(scenario(server.url))
    assert model.records == list(range(1000))


def test_a_refusal_for_good_reaches_the_caller() -> None:
    def closed(peer: Peer) -> None:
        peer.read()
        peer.problem(409, "stream_closed")
        peer.wait_closed()

    with ScriptedServer(closed) as server, millstream.connect(server.url, retry=QUICK) as client:
        stream = client.stream("a", content_type="application/json")
        with pytest.raises(errors.StreamClosed), stream.producer("p") as producer:
            producer.append(1)
            producer.flush()


def test_append_waits_while_the_buffer_is_full() -> None:
    go = threading.Event()
    model = Model()

    def slow(peer: Peer) -> None:
        assert go.wait(10)
        with pytest.raises((AssertionError, ConnectionError)):
            applied(model, peer, count=10**6)

    with ScriptedServer(slow) as server, millstream.connect(server.url, retry=QUICK) as client:
        stream = client.stream("a", content_type="application/json")
        options = {"buffered_bytes_max": 1000, "batch_bytes_max": 100}
        with stream.producer("p", **options) as producer:
            done = threading.Event()

            def fill() -> None:
                for number in range(2000):
                    producer.append(number)
                done.set()

            thread = threading.Thread(target=fill)
            thread.start()
            assert not done.wait(0.3)
            assert producer.pending < 1000
            go.set()
            assert done.wait(10)
            thread.join()
    assert model.records == list(range(2000))


def test_a_producer_does_not_outlive_its_deadline() -> None:
    def silent(peer: Peer) -> None:
        peer.read()
        peer.wait_closed()

    with ScriptedServer(silent) as server, millstream.connect(server.url, retry=QUICK) as client:
        producer = client.stream("a", content_type="application/json").producer("p")
        producer.append(1)
        with pytest.raises(errors.RequestTimeout):
            producer.flush(timeout_seconds=0.2)
        producer.abandon()
        with pytest.raises(errors.ProducerClosed):
            producer.append(2)
