"""The records of the Spark benchmark, and how they get into a server.

A record is a JSON object of exactly 200 bytes. Its middle is pseudo-random, so that neither a dictionary nor
a compressor finds the same bytes twice. `fill` appends them over several connections, pipelined, one record or
one array of records per POST, and counts every acknowledgement: what was not acknowledged was not written.
"""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from comparison.servers import BenchError

RECORD_BYTES = 200
PIPELINE = 256
CONNECTIONS = 4
NOISE_BYTES = 1 << 20
SOCKET_SECONDS = 60.0


@dataclass(frozen=True)
class Share:
    """What one connection writes: records `first` to `first + count` into its own stream."""

    stream: str
    first: int
    count: int


class Records:
    """Record number N is the same in every run."""

    def __init__(self) -> None:
        noise = random.Random(20_261_116)
        self._noise = "".join(noise.choices("0123456789abcdefghijklmnopqrstuvwxyz", k=NOISE_BYTES))

    def __getitem__(self, number: int) -> bytes:
        head = f'{{"id":{number:010d},"user":"u{number % 9973:04d}","at":{1_763_000_000_000 + number},"note":"'
        # JSON numbers have no leading zeros: the id is padded by its first digit instead.
        head = head.replace('{"id":0', '{"id":1', 1)
        return f'{head}{self.noise(number, RECORD_BYTES - len(head) - 2)}"}}'.encode()

    def noise(self, number: int, length: int) -> str:
        at = (number * 7919) % (NOISE_BYTES - length)
        return self._noise[at : at + length]

    def range(self, first: int, count: int) -> Iterator[bytes]:
        return (self[number] for number in range(first, first + count))


def shares(prefix: str, count: int) -> list[Share]:
    each, left = divmod(count, CONNECTIONS)
    made, first = [], 0
    for number in range(CONNECTIONS):
        own = each + (number < left)
        made.append(Share(f"{prefix}/{number}", first, own))
        first += own
    return made


def fill(url: str, parts: list[Share], records: Records, per_post: int) -> None:
    """Writes every share; raises if a single POST was not acknowledged."""
    failures: list[BaseException] = []

    def run(share: Share) -> None:
        try:
            _fill_one(url, share, records, per_post)
        except (BenchError, OSError) as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(share,)) for share in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise BenchError(f"filling failed: {failures[0]}")


def _fill_one(url: str, share: Share, records: Records, per_post: int) -> None:
    address = urlsplit(url)
    path = f"/v1/stream/{share.stream}"
    host = f"{address.hostname}:{address.port}"
    with socket.create_connection(
        (address.hostname or "", address.port or 80), SOCKET_SECONDS
    ) as link:
        answers = _Answers(link)
        common = f"Host: {host}\r\nContent-Type: application/json\r\n"
        link.sendall(f"PUT {path} HTTP/1.1\r\n{common}Content-Length: 0\r\n\r\n".encode())
        answers.expect(1, b"201")
        for posts in _posts(share, records, per_post, f"POST {path} HTTP/1.1\r\n{common}"):
            link.sendall(b"".join(posts))
            answers.expect(len(posts), b"204")


def _posts(share: Share, records: Records, per_post: int, head: str) -> Iterator[list[bytes]]:
    window: list[bytes] = []
    last = share.first + share.count
    for first in range(share.first, last, per_post):
        batch = list(records.range(first, min(per_post, last - first)))
        body = batch[0] if per_post == 1 else b"[" + b",".join(batch) + b"]"
        window.append(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if len(window) == max(1, PIPELINE // per_post):
            yield window
            window = []
    if window:
        yield window


class _Answers:
    """Counts answers without a body on one connection."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._rest = b""

    def expect(self, count: int, status: bytes) -> None:
        while count:
            received = self._link.recv(1 << 20)
            if not received:
                raise BenchError("the server closed the connection")
            data = self._rest + received
            *whole, self._rest = data.split(b"\r\n\r\n")
            for answer in whole:
                if answer[9:12] != status:
                    raise BenchError(f"unexpected answer: {answer[:200]!r}")
            count -= len(whole)
