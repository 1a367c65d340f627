"""kill -9 in the middle of load, again and again over one data directory.

Each round starts writers of every kind, kills the server at a random moment, starts it again and
checks: what was acknowledged is there once and in order, what was not is absent or whole, producers
recognise their duplicates, acknowledged creates, closes and deletes hold, and older rounds still read
the same bytes. A failing round is replayed by its seed: MILLSTREAM_TEST_SEED=<seed>.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections.abc import Callable

import pytest

from support.http import Api, producer, request_bytes
from support.load import LOST_CONNECTION, Writer, check_survivors, writers_for
from support.server import Server

ROUNDS_SHORT, ROUNDS_FULL = 20, 200
KEPT_DIGESTS = 6


class ControlWriter:
    """Creates, closes and deletes streams until the server dies; remembers what was acknowledged."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.created = self.closed = self.deleted = 0

    def target(self, number: int) -> str:
        return Api.target(f"{self.prefix}/control/{number}")

    def run(self, api: Api, start: threading.Barrier) -> None:
        text = {"Content-Type": "text/plain"}
        try:
            with api.connect() as connection:
                start.wait(30)
                while True:
                    number = self.created
                    made = connection.request("PUT", self.target(number), text, b"body")
                    assert made.status == 201, made
                    self.created += 1
                    closing = {**text, "Stream-Closed": "true"}
                    done = connection.request("POST", self.target(number), closing, b"end")
                    assert done.status == 204, done
                    self.closed += 1
                    if number >= 5:
                        gone = connection.request("DELETE", self.target(number - 5))
                        assert gone.status == 204, gone
                        self.deleted += 1
        except LOST_CONNECTION:
            return

    def check(self, api: Api) -> None:
        with api.connect() as connection:
            for number in range(self.created + 1):
                answer = connection.request("GET", self.target(number))
                state = (answer.status, answer.body, answer.get("stream-closed"))
                whole, ended, gone = (200, b"body", None), (200, b"bodyend", "true"), 404
                if number < self.deleted:
                    assert answer.status == gone, f"deleted {number} came back: {state}"
                elif number < self.closed:
                    in_flight = number == self.deleted and answer.status == gone
                    assert state == ended or in_flight, (number, state)
                elif number < self.created:
                    assert state in (whole, ended), (number, state)
                else:
                    assert answer.status == gone or state in (whole, ended), (number, state)


def check_producers(api: Api, writers: list[Writer], survived: dict[str, int]) -> None:
    """Everything that is stored is a duplicate; the next sequence number is not."""
    for writer in writers:
        if not writer.with_producer:
            continue
        count = survived[writer.name]
        with api.connect() as connection:
            for number in range(max(0, count - 3), count):
                connection.send(writer.request(number))
                answer = connection.read_response()
                assert answer.status == 204, (writer.name, number, answer.status)
                assert answer["producer-seq"] == str(count - 1)
            connection.send(writer.request(count))
            assert connection.read_response().status == 200, (writer.name, count)
            headers = {"Content-Type": writer.content_type, **producer(writer.name, 0, count + 5)}
            connection.send(request_bytes("POST", Api.target(writer.stream), headers, b"gap"))
            assert connection.read_response().status == 409
        writer.sent = max(writer.sent, count + 1)
        writer.acknowledged = count + 1


def digest(api: Api, stream: str) -> str:
    return hashlib.sha256(api.read_all(stream)).hexdigest()


def one_round(server: Server, number: int, chance: random.Random) -> list[Writer]:
    api = Api(server, deadline_s=20.0)
    prefix = f"round{number}"
    writers, control = writers_for(prefix, chance), ControlWriter(prefix)
    for stream in {(writer.stream, writer.content_type) for writer in writers}:
        empty = b"[]" if "json" in stream[1] else b""
        assert api.put(stream[0], empty, stream[1]).status == 201
    start = threading.Barrier(len(writers) + 2)
    threads = [
        threading.Thread(target=worker.run, args=(api, start)) for worker in [*writers, control]
    ]
    for thread in threads:
        thread.start()
    start.wait(30)
    time.sleep(chance.uniform(0.02, 0.7))
    server.kill()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    server.restart(checkpoint_bytes=chance.choice(["64KiB", "1MiB", "64MiB"]))
    assert [fault for writer in writers for fault in writer.faults] == []
    survived = check_survivors(api, writers)
    control.check(api)
    check_producers(api, writers, survived)
    check_survivors(api, writers)
    total = sum(writer.acknowledged for writer in writers)
    print(f"round {number}: {total} acknowledged, ready again after {server.start_seconds:.2f} s")
    assert total > 0
    return writers


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_every_acknowledged_append_survives_kill_9(
    start_server: Callable[..., Server], full: bool
) -> None:
    seed = int(os.environ.get("MILLSTREAM_TEST_SEED") or random.randrange(1 << 32))
    print(f"seed {seed}")
    chance = random.Random(seed)
    rounds = ROUNDS_FULL if full else ROUNDS_SHORT
    soak_until = time.monotonic() + 60 * float(os.environ.get("MILLSTREAM_SOAK_MINUTES", "0"))
    server = start_server(settings={"checkpoint_bytes": "1MiB", "append_max_bytes": "256KiB"})
    api = Api(server, deadline_s=20.0)
    known: dict[str, str] = {}
    number = 0
    while number < rounds or time.monotonic() < soak_until:
        writers = one_round(server, number, chance)
        for stream, expected in known.items():
            assert digest(api, stream) == expected, f"{stream} changed after it was checked"
        text = [writer.stream for writer in writers if not writer.json_mode]
        chosen = chance.choice(text)
        known[chosen] = digest(api, chosen)
        while len(known) > KEPT_DIGESTS:
            known.pop(chance.choice(list(known)))
        number += 1
    server.check_log()
