"""A webhook receiver on loopback that answers as told and keeps what it got."""

from __future__ import annotations

import base64
import json
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

Answer = tuple[int, bytes]
Behaviour = Callable[["Wake"], Answer]

ACCEPT: Answer = (200, b"{}")
DONE: Answer = (200, b'{"done":true}')


@dataclass(frozen=True)
class Wake:
    """One request that arrived."""

    body: bytes
    signature: str
    at: float

    @property
    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.body)
        return value

    @property
    def streams(self) -> dict[str, dict[str, Any]]:
        return {entry["path"]: entry for entry in self.json["streams"]}

    @property
    def pending(self) -> dict[str, str]:
        """Path to tail of what the wake is about."""
        return {
            p: entry["tail_offset"] for p, entry in self.streams.items() if entry["has_pending"]
        }

    def verify(self, jwks: dict[str, Any]) -> None:
        """Raises unless the signature is by a key of the set, over this very body."""
        parts = dict(part.split("=", 1) for part in self.signature.split(","))
        (key,) = [key for key in jwks["keys"] if key["kid"] == parts["kid"]]
        public = Ed25519PublicKey.from_public_bytes(unpad(key["x"]))
        public.verify(unpad(parts["ed25519"]), parts["t"].encode() + b"." + self.body)
        assert abs(int(parts["t"]) - self.at) < 60


def unpad(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


class Receiver:
    def __init__(self, behaviour: Behaviour, port: int = 0) -> None:
        self.behaviour = behaviour
        self._wakes: queue.Queue[Wake] = queue.Queue()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                wake = Wake(self.rfile.read(length), self.headers["Webhook-Signature"], time.time())
                status, body = receiver.behaviour(wake)
                receiver._wakes.put(wake)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    def next(self, deadline_s: float = 10.0) -> Wake:
        try:
            return self._wakes.get(timeout=deadline_s)
        except queue.Empty:
            raise AssertionError(f"no wake within {deadline_s} s") from None

    def expect_silence(self, seconds: float) -> None:
        try:
            wake = self._wakes.get(timeout=seconds)
        except queue.Empty:
            return
        raise AssertionError(f"an unexpected wake: {wake.body!r}")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
