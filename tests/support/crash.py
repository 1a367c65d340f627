"""What crash rounds do beside plain appends, and how losses are judged.

`ControlWriter`, `ForkWriter` and `ClassChanger` run until the server dies and then say what must be there.
`LastingWriter` keeps one stream per class through all rounds. `check_weak` holds the promise of the classes
that may lose: what survives is a prefix, and everything else is reported.

Invariant: no number is ever used for two records, so an offset that was given out twice is seen.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from dataclasses import dataclass, field

from support.http import Api, Closed, Connection, Response, request_bytes
from support.load import LOST_CONNECTION, Writer, records_of

CLASSES = ("ephemeral", "memory", "disk", "fsync")
STRONG = ("disk", "fsync")
TEXT = {"Content-Type": "text/plain"}
BUSY_DEADLINE_S = 10.0


def is_strong(durability: str) -> bool:
    """Whether the class promises to survive kill -9."""
    return durability in STRONG


def epoch_of(offset: str) -> int:
    return int(offset.partition("_")[0])


@dataclass
class Gap:
    start: str
    end: str
    reason: str
    certain: bool


def gap_of(answer: Response) -> Gap | None:
    text = answer.get("stream-gap")
    if text is None:
        return None
    parts = dict(part.strip().split("=", 1) for part in text.split(";"))
    return Gap(parts["from"], parts["to"], parts["reason"], parts["certain"] == "1")


def expect(answer: Response, status: int) -> Response:
    """A server that is about to die may answer nothing, but never something else."""
    assert answer.status == status, (answer.status, answer.body[:300])
    return answer


def send_patiently(connection: Connection, request: bytes) -> Response:
    """Sends again what met a busy log: weak appends are refused rather than made to wait."""
    until = time.monotonic() + BUSY_DEADLINE_S
    while True:
        connection.send(request)
        answer = connection.read_response()
        if answer.status != 503 or answer.code != "server_busy":
            return answer
        assert time.monotonic() < until, "the log was busy for ever"
        time.sleep(0.005)


def append(connection: Connection, stream: str, body: bytes) -> str:
    """One acknowledged append; the offset behind it."""
    request = request_bytes("POST", Api.target(stream), TEXT, body)
    return expect(send_patiently(connection, request), 204).offset


@dataclass
class Loss:
    """What one stream lost in one round, and whether its reader was told."""

    durability: str
    acknowledged: int
    lost: int
    reported: int


def read_to_end(connection: Connection, stream: str) -> tuple[int, bytes, str | None]:
    """Status, everything to the tail, and whether the stream is closed there.

    More than one answer where an epoch ends, be it without a byte behind it.
    """
    body, offset = b"", "-1"
    for _ in range(100):
        answer = connection.request("GET", Api.target(stream, offset=offset))
        body += answer.body if answer.status == 200 else b""
        if answer.status != 200 or answer.get("stream-up-to-date") == "true":
            return answer.status, body, answer.get("stream-closed")
        offset = answer.offset
    raise AssertionError(f"{stream}: the tail was never reached")


class ControlWriter:
    """Creates, closes and deletes streams until the server dies; remembers what was acknowledged."""

    def __init__(self, prefix: str, durability: str = "fsync") -> None:
        self.prefix, self.durability = prefix, durability
        self.created = self.closed = self.deleted = 0

    def target(self, number: int) -> str:
        return Api.target(f"{self.prefix}/control/{number}")

    def run(self, api: Api, start: threading.Barrier) -> None:
        first = {**TEXT, "Stream-Durability": self.durability}
        with contextlib.suppress(*LOST_CONNECTION), api.connect() as connection:
            start.wait(30)
            while True:
                number = self.created
                expect(connection.request("PUT", self.target(number), first, b"body"), 201)
                self.created += 1
                closing = {**TEXT, "Stream-Closed": "true"}
                request = request_bytes("POST", self.target(number), closing, b"end")
                expect(send_patiently(connection, request), 204)
                self.closed += 1
                if number >= 5:
                    expect(connection.request("DELETE", self.target(number - 5)), 204)
                    self.deleted += 1

    def check(self, api: Api) -> None:
        # Control operations are synced in every class; the bytes of an ephemeral stream are not.
        keeps = self.durability != "ephemeral"
        whole = (200, b"body" if keeps else b"", None)
        ended = (200, b"bodyend" if keeps else b"", "true")
        with api.connect() as connection:
            for number in range(self.created + 1):
                state = read_to_end(connection, f"{self.prefix}/control/{number}")
                gone = state[0] == 404
                if number < self.deleted:
                    assert gone, f"deleted {number} came back: {state}"
                elif number < self.closed:
                    assert state == ended or (number == self.deleted and gone), (number, state)
                elif number < self.created:
                    assert state in (whole, ended), (number, state)
                else:
                    assert gone or state in (whole, ended), (number, state)


class ForkWriter:
    """Forks of sources that are deleted right after: the fork keeps what it inherited.

    The fork's class is strong and the source's is any: the fork is acknowledged only when what it inherits
    has reached the fork's own class.
    """

    def __init__(self, prefix: str, chance: random.Random) -> None:
        self.prefix = prefix
        self.pairs = [(chance.choice(CLASSES), chance.choice(STRONG)) for _ in range(400)]
        self.forked = self.deleted = self.appended = 0

    def names(self, number: int) -> tuple[str, str]:
        return f"{self.prefix}/source/{number}", f"{self.prefix}/fork/{number}"

    def run(self, api: Api, start: threading.Barrier) -> None:
        with contextlib.suppress(*LOST_CONNECTION), api.connect() as connection:
            start.wait(30)
            for number, (weak, strong) in enumerate(self.pairs):
                self.one(connection, number, weak, strong)

    def one(self, connection: Connection, number: int, weak: str, strong: str) -> None:
        source, fork = self.names(number)
        first = {**TEXT, "Stream-Durability": weak}
        expect(connection.request("PUT", Api.target(source), first, b"one,"), 201)
        append(connection, source, b"two,")
        forking = {"Stream-Forked-From": f"/v1/stream/{source}", "Stream-Durability": strong}
        expect(connection.request("PUT", Api.target(fork), {**TEXT, **forking}), 201)
        self.forked += 1
        expect(connection.request("DELETE", Api.target(source)), 204)
        self.deleted += 1
        append(connection, fork, b"mine")
        self.appended += 1

    def check(self, api: Api) -> None:
        with api.connect() as connection:
            for number in range(self.forked):
                source, fork = self.names(number)
                answer = connection.request("GET", Api.target(fork))
                state = (self.pairs[number], answer.status, answer.body)
                wanted = (b"one,two,mine",) if number < self.appended else (b"one,two,", b"one,two,mine")  # fmt: skip
                assert answer.status == 200, f"fork {number} is gone: {state}"
                assert answer.body in wanted, f"fork {number} lost what it inherited: {state}"
                if number < self.deleted:
                    again = connection.request("GET", Api.target(source))
                    assert again.status in (404, 410), f"source {number} came back: {again}"


class ClassChanger:
    """Appends to one stream while its class changes; counts what each change has made safe."""

    def __init__(self, prefix: str, chance: random.Random) -> None:
        self.stream = f"{prefix}/changing"
        self.order = [chance.choice(CLASSES) for _ in range(200)]
        self.per_class = chance.randrange(1, 12)
        self.durability, self.asked = "fsync", "fsync"
        self.acknowledged = self.safe = self.sent = 0
        self.offsets: list[str] = []

    def run(self, api: Api, start: threading.Barrier) -> None:
        with contextlib.suppress(*LOST_CONNECTION), api.connect() as connection:
            start.wait(30)
            for durability in self.order:
                self.append(connection)
                self.change(connection, durability)

    def append(self, connection: Connection) -> None:
        for _ in range(self.per_class):
            self.sent += 1
            body = f"{self.sent - 1}\n".encode()
            self.offsets.append(append(connection, self.stream, body))
            self.acknowledged += 1
            if is_strong(self.durability):
                self.safe = self.acknowledged

    def change(self, connection: Connection, durability: str) -> None:
        self.asked = durability
        body = json.dumps({"durability": durability}).encode()
        headers = {"Content-Type": "application/json"}
        answer = connection.request("PATCH", f"/-/api/streams/{self.stream}", headers, body)
        # The control plane goes down with its server: that is no answer to the change.
        if answer.status in (503, 504):
            raise Closed
        assert expect(answer, 200).json()["durability"] == durability
        self.durability = durability
        if is_strong(durability):
            self.safe = self.acknowledged

    def check(self, api: Api) -> Loss:
        head = expect(api.head(self.stream), 200)
        assert head["stream-durability"] in (self.durability, self.asked)
        found = [int(line) for line in api.read_all(self.stream).decode().splitlines()]
        assert found[: self.safe] == list(range(self.safe)), (
            f"{self.safe} were made safe, found {found[:5]}..{found[-5:]}"
        )
        assert found == sorted(set(found)), "doubled or out of order"
        lost = self.acknowledged - sum(number < self.acknowledged for number in found)
        told = self.offsets and gap_of(expect(api.get(self.stream, offset=self.offsets[-1]), 200))
        if lost:
            assert told, f"{lost} lost in silence"
        return Loss("changing", self.acknowledged, lost, lost if told else 0)


@dataclass
class LastingWriter:
    """One stream that lives through every round; no number and no offset is ever used twice."""

    durability: str
    stream: str
    per_round: int = 60
    sent: int = 0
    acknowledged: dict[int, str] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    this_round: list[int] = field(default_factory=list)
    given_up: set[int] = field(default_factory=set)

    def run(self, api: Api, start: threading.Barrier) -> None:
        with contextlib.suppress(*LOST_CONNECTION), api.connect() as connection:
            start.wait(30)
            for _ in range(self.per_round):
                number, self.sent = self.sent, self.sent + 1
                offset = append(connection, self.stream, f"{number}\n".encode())
                self.note(number, offset)

    def check(self, api: Api, chance: random.Random) -> Loss:
        found = [int(line) for line in api.read_all(self.stream).decode().splitlines()]
        assert found == sorted(set(found)), "doubled or out of order"
        present = set(found)
        missing = set(self.acknowledged) - present - self.given_up
        assert not self.given_up & present, "what was lost came back"
        assert missing <= set(self.this_round), "an older round lost more"
        if is_strong(self.durability):
            assert not missing, f"{self.durability} lost {sorted(missing)[:5]}"
        self.given_up |= missing
        known = sorted(present & set(self.acknowledged))
        for number in chance.sample(known, k=min(5, len(known))):
            self.check_same_bytes(api, number, found)
        count, last = len(self.this_round), self.this_round[-1:]
        # What is appended from here on belongs to the next round.
        self.this_round = []
        if last and not is_strong(self.durability):
            self.check_told(api, self.acknowledged[last[0]], len(missing))
        return Loss(self.durability, count, len(missing), len(missing))

    def check_told(self, api: Api, last: str, lost: int) -> None:
        tail = expect(api.head(self.stream), 200).offset
        gaps, end = follow(api, self.stream, last)
        number, self.sent = self.sent, self.sent + 1
        with api.connect() as connection:
            self.note(number, append(connection, self.stream, f"{number}\n".encode()))
        gaps += follow(api, self.stream, end)[0]
        check_gap(gaps, last, tail, lost)

    def note(self, number: int, offset: str) -> None:
        assert offset not in self.numbers, (
            f"{self.durability}: {offset} names {self.numbers[offset]} and {number}"
        )
        self.numbers[offset] = number
        self.acknowledged[number] = offset
        self.this_round.append(number)

    def check_same_bytes(self, api: Api, number: int, found: list[int]) -> None:
        """An old offset still leads to what followed it then, or says that there is a gap."""
        answer = expect(api.get(self.stream, offset=self.acknowledged[number]), 200)
        after = [other for other in found if other > number]
        told = gap_of(answer) is not None
        lines = [int(line) for line in answer.body.decode().splitlines()]
        assert lines == after[: len(lines)], (number, lines[:3], after[:3])
        if after and not told:
            assert lines, f"nothing behind {number}, and no gap"


def check_weak(api: Api, writer: Writer) -> Loss:
    """A stream of a class that may lose: a prefix is there, and its reader is told of the rest."""
    head = expect(api.head(writer.stream), 200)
    assert head["stream-durability"] == writer.durability
    found = [n for _, n, _ in records_of(api, writer.stream, json_mode=writer.json_mode)]
    writer.check_order(found)
    assert len(found) <= writer.sent
    if writer.durability == "ephemeral":
        assert found == [], "an ephemeral stream kept records"
    lost = max(0, writer.acknowledged - len(found))
    if not writer.acknowledged:
        return Loss(writer.durability, 0, 0, 0)
    last = writer.offsets[-1]
    assert epoch_of(head.offset) > epoch_of(last)
    gaps, end = follow(api, writer.stream, last)
    check_goes_on(api, writer)
    # Somebody who has read everything that was left hears of the gap with the first byte behind it.
    gaps += follow(api, writer.stream, end)[0]
    check_gap(gaps, last, head.offset, lost)
    return Loss(writer.durability, writer.acknowledged, lost, lost)


def follow(api: Api, stream: str, offset: str) -> tuple[list[Gap], str]:
    """Reads to the tail as a client does; the gaps it was told of, and where it ended."""
    gaps = []
    for _ in range(10_000):
        answer = expect(api.get(stream, offset=offset), 200)
        gap = gap_of(answer)
        gaps += [gap] if gap else []
        offset = answer.offset
        if answer.get("stream-up-to-date") == "true":
            return gaps, offset
    raise AssertionError(f"{stream}: the tail was never reached")


def check_gap(gaps: list[Gap], last: str, tail: str, lost: int) -> None:
    """One gap, for a crash, from where the reader stood; certain exactly if something is missing."""
    assert len(gaps) == 1, (gaps, last, tail, lost)
    gap = gaps[0]
    assert (gap.reason, gap.certain) == ("crash", lost > 0), (gap, last, lost)
    assert epoch_of(gap.start) < epoch_of(gap.end) == epoch_of(tail), (gap, last, tail)
    if lost:
        assert gap.start == last, (gap, last)


def check_goes_on(api: Api, writer: Writer) -> None:
    """Writing goes on in the new epoch; a producer takes up wherever it is."""
    with api.connect() as connection:
        answer = send_patiently(connection, writer.request(writer.sent))
        assert answer.status == (200 if writer.with_producer else 204), answer
        assert answer.offset not in set(writer.offsets)
        assert epoch_of(answer.offset) > epoch_of(writer.offsets[-1])
        if writer.with_producer:
            connection.send(writer.request(writer.sent))
            assert connection.read_response().status == 204, "a duplicate was taken twice"
    writer.sent += 1
