"""`ephemeral` streams beyond their memory: the bytes go to files, come back whole, and never outlive the process."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.classes import as_class, fork_as, read_through, set_class
from support.http import Api, Connection, Response
from support.server import Server

KIB, MIB = 1 << 10, 1 << 20
STREAMS = 40
TOTAL_BYTES = 20 * MIB
SPILLED = "millstream_ephemeral_spilled_bytes_total"
IN_MEMORY = "millstream_ephemeral_bytes"
BUDGET = MIB
BYTES = {"Content-Type": "application/octet-stream"}


def files(server: Server) -> list[Path]:
    place = server.data_dir / "spill"
    return sorted(place.iterdir()) if place.is_dir() else []


def wait_until(happened: Callable[[], bool], what: str, deadline_s: float = 20.0) -> None:
    until = time.monotonic() + deadline_s
    while not happened():
        assert time.monotonic() < until, what
        time.sleep(0.01)


def wait_for_room(api: Api) -> None:
    wait_until(lambda: api.metric(IN_MEMORY) <= BUDGET, "memory is not relieved")


def append(api: Api, connection: Connection, name: str, body: bytes) -> Response:
    """One append; a refusal at the bound says that nothing was stored, so it is sent again."""
    while True:
        answer = connection.request("POST", Api.target(name), BYTES, body)
        if answer.status != 503:
            assert answer.status == 204, (name, answer)
            return answer
        assert answer.code == "server_busy"
        wait_for_room(api)


class Filler:
    """Random appends to many streams, with the digest that each must read back as."""

    def __init__(self, api: Api, path: str, seed: int) -> None:
        self.api, self.chance = api, random.Random(seed)
        self.names = [f"{path}/{number}" for number in range(STREAMS)]
        self.contents = {name: hashlib.sha256() for name in self.names}
        self.offsets: dict[str, list[tuple[str, int]]] = {name: [] for name in self.names}
        self.sizes = dict.fromkeys(self.names, 0)
        for name in self.names:
            made = api.put(name, b"", "application/octet-stream", as_class("ephemeral"))
            assert made.status == 201

    def fill(self, total_bytes: int) -> None:
        written = 0
        with self.api.connect() as connection:
            while written < total_bytes:
                name = self.chance.choice(self.names)
                body = self.chance.randbytes(self.chance.choice([10, 5 * KIB, 60 * KIB]))
                answer = append(self.api, connection, name, body)
                written += len(body)
                self.contents[name].update(body)
                self.sizes[name] += len(body)
                self.offsets[name].append((answer.offset, self.sizes[name]))

    def check(self) -> None:
        for name in self.names:
            body = self.api.read_all(name)
            assert len(body) == self.sizes[name], name
            assert hashlib.sha256(body).digest() == self.contents[name].digest(), name
            if self.offsets[name]:
                offset, size = self.chance.choice(self.offsets[name])
                assert self.api.read_all(name, offset) == body[size:], (name, offset)


@pytest.fixture
def small(start_server: Callable[..., Server]) -> Server:
    return start_server(settings={"ephemeral_bytes_max": BUDGET})


def test_what_memory_cannot_hold_is_read_back_whole(small: Server, path: str) -> None:
    api = Api(small, deadline_s=30)
    filler = Filler(api, path, seed=7)
    filler.fill(TOTAL_BYTES)
    wait_for_room(api)
    assert api.metric(SPILLED) >= TOTAL_BYTES - 2 * BUDGET
    assert files(small), "nothing went to files"
    filler.check()
    filler.fill(MIB)
    filler.check()
    rows = api.call("GET", f"/-/api/streams?prefix={path}/&limit=1000").json()["streams"]
    assert {row["path"]: row["bytes"] for row in rows} == filler.sizes
    assert {row["path"]: row["records"] for row in rows} == {
        name: len(offsets) for name, offsets in filler.offsets.items()
    }
    for name in filler.names:
        last = api.get(name, tail=1)
        assert len(last.body) == filler.sizes[name] - (
            filler.offsets[name][-2][1] if len(filler.offsets[name]) > 1 else 0
        )


def test_deleting_the_streams_frees_the_files(small: Server, path: str) -> None:
    api = Api(small, deadline_s=30)
    filler = Filler(api, path, seed=8)
    filler.fill(4 * MIB)
    wait_for_room(api)
    assert files(small)
    for name in filler.names:
        assert api.delete(name).status == 204
    wait_until(lambda: not files(small), "files of deleted streams stay")
    wait_until(lambda: api.metric(IN_MEMORY) == 0, "memory of deleted streams stays")


@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_every_start_removes_the_files(small: Server, path: str, ending: str) -> None:
    api = Api(small, deadline_s=30)
    filler = Filler(api, path, seed=9)
    filler.fill(4 * MIB)
    wait_for_room(api)
    assert files(small)
    getattr(small, ending)()
    small.restart()
    assert files(small) == []
    for name in filler.names:
        assert api.get(name).body == b""
    again = Filler(api, f"{path}/again", seed=10)
    again.fill(3 * MIB)
    again.check()


@pytest.mark.parametrize("name", ["memory", "disk", "fsync"])
def test_spilled_bytes_become_durable_by_a_change_or_a_fork(
    small: Server, path: str, name: str
) -> None:
    api = Api(small, deadline_s=30)
    changed, source, fork = f"{path}/changed", f"{path}/source", f"{path}/fork"
    pieces = [random.Random(number).randbytes(50 * KIB) for number in range(40)]
    for stream in (changed, source):
        api.put(stream, b"", "application/octet-stream", as_class("ephemeral"))
        with api.connect() as connection:
            for piece in pieces:
                append(api, connection, stream, piece)
    wait_for_room(api)
    assert api.metric(SPILLED) >= MIB
    set_class(api, changed, name)
    assert api.put(fork, b"", None, fork_as(source, name)).status == 201
    whole = b"".join(pieces)
    for stream in (changed, source, fork):
        assert api.read_all(stream) == whole, stream
    for stream in (changed, fork):
        assert api.post(stream, b"more", "application/octet-stream").status == 204
    if name == "memory":
        small.restart()  # an orderly stop costs `memory` nothing
    else:
        small.crash_and_restart()
    for stream in (changed, fork):
        assert read_through(api, stream) == (whole + b"more", []), stream
