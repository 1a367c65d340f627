"""Writers of every kind that run until they are told to stop, and remember what was acknowledged.

Used by the tests of backup: `before()` is taken right before a backup is asked for, and `check` holds a restored server
against it and against what the original server has in the end.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from support.http import Api, Connection, producer


@dataclass
class Appender:
    """One stream, appended to with producer sequence numbers; every record says which it is."""

    stream: str
    durability: str
    padding: int
    acknowledged: int = 0

    def record(self, number: int) -> bytes:
        return f"{self.stream} {number:07d} {'.' * self.padding}\n".encode()

    def prepare(self, api: Api) -> None:
        made = api.put(self.stream, headers={"Stream-Durability": self.durability})
        assert made.status == 201, made

    def step(self, connection: Connection) -> None:
        number = self.acknowledged
        answer = self.send(connection, number)
        # Weak appends are refused rather than made to wait; a producer may try again.
        assert answer in (200, 204, 503), (self.stream, number, answer)
        if answer != 503:
            self.acknowledged = number + 1

    def send(self, connection: Connection, number: int) -> int:
        headers = {"Content-Type": "text/plain", **producer(self.stream, 0, number)}
        target = Api.target(self.stream)
        return connection.request("POST", target, headers, self.record(number)).status

    def check(self, api: Api, before: int, original: bytes) -> None:
        found = api.read_all(self.stream)
        assert original.startswith(found), f"{self.stream} is not a prefix of the original"
        count = found.count(b"\n")
        assert count >= before, f"{self.stream}: {count} of {before} acknowledged records"
        if self.durability != "fsync":
            return
        with api.connect() as connection:
            for number in range(max(0, count - 3), count):
                assert self.send(connection, number) == 204, (self.stream, number)
            assert self.send(connection, count) == 200, (self.stream, count)
        assert api.read_all(self.stream) == found + self.record(count)


@dataclass
class Forks:
    """Sources that are forked and deleted: the forks need them."""

    prefix: str
    acknowledged: int = 0

    def body(self, number: int) -> bytes:
        return f"source {number}\n".encode() * (3000 if number % 3 == 0 else 3)

    def prepare(self, api: Api) -> None:
        """Each step makes its own streams."""

    def step(self, connection: Connection) -> None:
        number = self.acknowledged
        source = f"{self.prefix}/source/{number}"
        text = {"Content-Type": "text/plain"}
        made = connection.request("PUT", Api.target(source), text, self.body(number))
        assert made.status == 201, made
        fork = {**text, "Stream-Forked-From": "/v1/stream/" + source}
        forked = connection.request("PUT", Api.target(f"{self.prefix}/fork/{number}"), fork, b"")
        assert forked.status == 201, forked
        gone = connection.request("DELETE", Api.target(source))
        assert gone.status == 204, gone
        self.acknowledged = number + 1

    def check(self, api: Api, before: int) -> None:
        for number in range(before):
            assert api.get(f"{self.prefix}/source/{number}").status == 410, number
            assert api.read_all(f"{self.prefix}/fork/{number}") == self.body(number), number


@dataclass
class Deletes:
    """Streams that come and go, some with a file of their own."""

    prefix: str
    acknowledged: int = 0

    def prepare(self, api: Api) -> None:
        """Each step makes its own stream."""

    def step(self, connection: Connection) -> None:
        number = self.acknowledged
        target = Api.target(f"{self.prefix}/{number}")
        body = b"x" * (40_000 if number % 4 == 0 else 10)
        made = connection.request("PUT", target, {"Content-Type": "text/plain"}, body)
        assert made.status == 201, made
        if number >= 3:
            gone = connection.request("DELETE", Api.target(f"{self.prefix}/{number - 3}"))
            assert gone.status == 204, gone
        self.acknowledged = number + 1

    def check(self, api: Api, before: int) -> None:
        for number in range(before):
            status = api.get(f"{self.prefix}/{number}").status
            assert status == 404 if number < before - 3 else status in (200, 404), number


@dataclass
class Load:
    """All of them at once."""

    api: Api
    appenders: list[Appender] = field(default_factory=list)
    forks: Forks = field(default_factory=lambda: Forks("forks"))
    deletes: Deletes = field(default_factory=lambda: Deletes("deletes"))
    faults: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.appenders = [
            Appender(f"appends/{durability}/{padding}", durability, padding)
            for durability in ("fsync", "disk", "memory")
            for padding in (0, 5000)
        ]

    def workers(self) -> list[Appender | Forks | Deletes]:
        return [*self.appenders, self.forks, self.deletes]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Runs while the block does; a writer that failed fails the test."""
        for worker in self.workers():
            worker.prepare(self.api)
        stop = threading.Event()
        threads = [
            threading.Thread(target=self._run, args=(worker, stop)) for worker in self.workers()
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert self.faults == []

    def _run(self, worker: Appender | Forks | Deletes, stop: threading.Event) -> None:
        try:
            with self.api.connect() as connection:
                while not stop.is_set():
                    worker.step(connection)
        except BaseException as fault:  # noqa: BLE001 - told by `running` in the test's own thread
            self.faults.append(fault)

    def wait_for(self, count: int) -> None:
        """Until every worker has done so many steps."""
        moved = threading.Event()
        for _ in range(3000):
            if self.faults or all(worker.acknowledged >= count for worker in self.workers()):
                return
            moved.wait(0.01)
        raise AssertionError([worker.acknowledged for worker in self.workers()])

    def before(self) -> list[int]:
        """What is acknowledged now, in the order of `workers`."""
        return [worker.acknowledged for worker in self.workers()]

    def originals(self) -> dict[str, bytes]:
        return {one.stream: self.api.read_all(one.stream) for one in self.appenders}

    def check(self, restored: Api, before: list[int], originals: dict[str, bytes]) -> None:
        counts = iter(before)
        for appender in self.appenders:
            appender.check(restored, next(counts), originals[appender.stream])
        self.forks.check(restored, next(counts))
        self.deletes.check(restored, next(counts))
