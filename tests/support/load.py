"""Writers for crash tests: each remembers what it sent and what was acknowledged.

A writer owns one connection and one sequence of numbered records. Invariant used by the checks: the
records of one writer are sent in order over one connection, so what survives of them is a prefix.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
from dataclasses import dataclass, field

from support.http import (
    Api,
    Closed,
    Connection,
    Response,
    Timeout,
    Truncated,
    producer,
    request_bytes,
)

LOST_CONNECTION = (Closed, Truncated, Timeout, OSError)


@dataclass
class Writer:
    """One connection that appends numbered records to one stream until the server dies."""

    name: str
    stream: str
    depth: int
    json_mode: bool = False
    with_producer: bool = False
    size: int = 64
    durability: str = "fsync"
    sent: int = 0
    acknowledged: int = 0
    # Numbers below this one were answered; what became of the others only the stream can tell.
    answered: int = 0
    # Weak appends are refused rather than made to wait; these numbers are nowhere.
    refused: set[int] = field(default_factory=set)
    # The offset behind each acknowledged record, for streams with one writer.
    offsets: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def content_type(self) -> str:
        return "application/json" if self.json_mode else "text/plain"

    def record(self, number: int) -> bytes:
        filler = "." * (self.size + (number * 7919) % self.size)
        if self.json_mode:
            return json.dumps([self.name, number, filler]).encode()
        return f"{self.name}:{number}:{filler}\n".encode()

    def request(self, number: int) -> bytes:
        headers = {"Content-Type": self.content_type}
        if self.with_producer:
            headers |= producer(self.name, 0, number)
        body = self.record(number)
        # A JSON record is itself an array, so it is wrapped once more to arrive as one record.
        return request_bytes("POST", Api.target(self.stream), headers, b"[" + body + b"]" if self.json_mode else body)  # fmt: skip

    def run(self, api: Api, start: threading.Barrier) -> None:
        with contextlib.suppress(*LOST_CONNECTION), api.connect() as connection:
            start.wait(30)
            while True:
                self.burst(connection)

    def burst(self, connection: Connection) -> None:
        first = self.sent
        batch = b"".join(self.request(first + ahead) for ahead in range(self.depth))
        self.sent += self.depth
        connection.send(batch)
        for number in range(first, first + self.depth):
            self.note(number, connection.read_response())
        if self.with_producer and self.refused:
            # The sequence goes on where it was refused: everything behind that was out of order.
            self.sent = self.answered = min(self.refused)
            self.refused.clear()

    def note(self, number: int, answer: Response) -> None:
        self.answered = number + 1
        if answer.status == (200 if self.with_producer else 204):
            assert not (self.with_producer and self.refused), "accepted behind a refused one"
            self.acknowledged += 1
            self.offsets.append(answer.offset)
        elif self.durability != "fsync" and self.may_refuse(answer):
            self.refused.add(number)
        else:
            self.faults.append(f"{self.name}: {answer.status} {answer.body[:200]!r}")
            raise Closed

    def may_refuse(self, answer: Response) -> bool:
        """Busy, or a producer's records that were sent behind one that met a busy log."""
        if answer.status == 409 and self.refused:
            return self.with_producer and answer.code == "producer_gap"
        return answer.status == 503 and answer.code == "server_busy"

    def check_order(self, seen: list[int]) -> None:
        """What was acknowledged in its order, from the first on; then, in order, what was under way."""
        told = [number for number in range(self.answered) if number not in self.refused]
        cut = min(len(seen), len(told))
        assert seen[:cut] == told[:cut], f"{self.stream} {self.name}: lost, doubled or out of order"
        rest = seen[cut:]
        assert rest == sorted(set(rest)), f"{self.stream} {self.name}: doubled or out of order"
        assert all(self.answered <= number < self.sent for number in rest), rest[:5]


def writers_for(
    prefix: str, chance: random.Random, durability: str = "fsync", many: int = 4
) -> list[Writer]:
    """A mix: own and shared streams, deep and shallow pipelines, producers and none, large records."""
    shared, shared_json = f"{prefix}/shared", f"{prefix}/shared-json"
    mix = []
    for number in range(many):
        depth = chance.choice([1, 1, 8, 64])
        mix.append(Writer(f"plain{number}", shared, depth))
        mix.append(Writer(f"json{number}", shared_json, depth, json_mode=True))
    for number in range(many):
        depth = chance.choice([1, 4, 32])
        mix.append(Writer(f"prod{number}", shared, depth, with_producer=True))
        mix.append(Writer(f"own{number}", f"{prefix}/own{number}", depth, with_producer=True))
    mix.append(Writer("large", f"{prefix}/large", 2, size=40_000))
    for writer in mix:
        writer.durability = durability
    return mix


def weak_writers_for(prefix: str, chance: random.Random, durability: str) -> list[Writer]:
    """One writer per stream, so that what survives of a stream is a prefix of what was sent to it."""
    return [
        Writer("own", f"{prefix}/own", chance.choice([1, 8, 64]), durability=durability),
        Writer("json", f"{prefix}/json", 4, json_mode=True, durability=durability),
        Writer("prod", f"{prefix}/prod", 8, with_producer=True, durability=durability),
    ]


def records_of(api: Api, stream: str, *, json_mode: bool) -> list[tuple[str, int, str]]:
    """All records as (writer, number, filler); any record that is not whole raises."""
    if json_mode:
        found, offset = [], "-1"
        while True:
            answer = api.get(stream, offset=offset)
            assert answer.status == 200, (answer.status, answer.body[:300])
            found += [(str(w), int(n), str(f)) for w, n, f in answer.json()]
            offset = answer.offset
            if answer.get("stream-up-to-date"):
                return found
    text = api.read_all(stream).decode()
    assert text == "" or text.endswith("\n"), f"cut inside a record: {text[-80:]!r}"
    parts = [line.split(":") for line in text.splitlines()]
    return [(writer, int(number), filler) for writer, number, filler in parts]


def check_survivors(api: Api, writers: list[Writer]) -> dict[str, int]:
    """Every acknowledged record once and in order, the others absent or whole. Counts by writer."""
    survived: dict[str, int] = {}
    for stream in sorted({writer.stream for writer in writers}):
        mine = {writer.name: writer for writer in writers if writer.stream == stream}
        found = records_of(api, stream, json_mode=next(iter(mine.values())).json_mode)
        numbers: dict[str, list[int]] = {name: [] for name in mine}
        for name, number, filler in found:
            numbers[name].append(number)
            size = mine[name].size
            assert len(filler) == size + (number * 7919) % size, f"{name}:{number} is not whole"
        for name, seen in numbers.items():
            writer = mine[name]
            writer.check_order(seen)
            assert len(seen) >= writer.acknowledged, (
                f"{stream} {name}: {writer.acknowledged} acknowledged, {len(seen)} found"
            )
            assert len(seen) <= writer.sent
            survived[name] = len(seen)
    return survived
