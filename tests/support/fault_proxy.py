"""A proxy between a client and a real server that breaks things at a chosen request.

Faults are placed where they hurt: before the n-th request of a kind reaches the server, or after the server has applied it
and before the answer leaves. So the product needs no hooks for tests, and what is tested is what is shipped.

    proxy.at("POST", "/v1/commit", drop, moment="after")       the commit is applied, its answer is lost
    proxy.at("PUT", "/v1/stage/", kill_driver, nth=3)          kill -9 when the third stage is on its way

Invariants: an answer is relayed whole or not at all; a rule fires once; an action that fails is kept and raised by `check`;
every connection has a deadline; the proxy keeps its port while the server behind it comes and goes.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal, Protocol
from urllib.parse import urlsplit

DEADLINE_S = 120.0
HOP_HEADERS = {"connection", "keep-alive", "content-length", "transfer-encoding", "date", "server"}

Moment = Literal["before", "after"]

# A server started by an action dies with the thread that started it (PR_SET_PDEATHSIG counts threads), so
# actions run in threads that live as long as the test process.
_ACTORS = ThreadPoolExecutor(4, thread_name_prefix="fault")


class Upstream(Protocol):
    """Where requests go; read for each connection, because a restarted server may have moved."""

    @property
    def port(self) -> int: ...


class Drop(Exception):
    """Raised by an action: the client's connection is closed instead of an answer."""


@dataclass
class Call:
    """One request that came, and how it was answered (0: not at all)."""

    method: str
    path: str
    body: bytes
    client_port: int
    status: int = 0
    answer: bytes = b""


Action = Callable[[Call], None]


def drop(_call: Call) -> None:
    raise Drop


@dataclass
class Rule:
    method: str
    prefix: str
    moment: Moment
    first: int
    last: int
    action: Action
    seen: int = 0

    def matches(self, call: Call) -> bool:
        return call.method == self.method and call.path.startswith(self.prefix)


class FaultProxy:
    """Listens on a port of its own and forwards to `upstream`, one connection for another."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._faults: list[BaseException] = []
        self.calls: list[Call] = []
        proxy = self

        class Handler(_Handler):
            def serve(self) -> None:
                proxy._serve(self)

        self._listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._listener.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._listener.server_port}"
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.05,))
        self._thread.start()

    def at(
        self,
        method: str,
        prefix: str,
        action: Action,
        *,
        nth: int = 1,
        times: int = 1,
        moment: Moment,
    ) -> Rule:
        """Run `action` at the n-th request (from now on) whose method and path fit, and `times - 1` more."""
        rule = Rule(method, prefix, moment, nth, nth + times - 1, action)
        with self._lock:
            self._rules.append(rule)
        return rule

    def clear(self) -> None:
        """Forget the rules and the calls so far."""
        with self._lock:
            self._rules.clear()
            self.calls.clear()

    def seen(self, method: str, prefix: str) -> list[Call]:
        with self._lock:
            calls = list(self.calls)
        return [call for call in calls if call.method == method and call.path.startswith(prefix)]

    def check(self) -> None:
        """Raise what an action raised."""
        if self._faults:
            raise AssertionError("an action of the fault proxy failed") from self._faults[0]

    def close(self) -> None:
        self._listener.shutdown()
        self._thread.join(DEADLINE_S)
        self._listener.server_close()

    # ------------------------------------------------------------------ one request

    def _serve(self, handler: _Handler) -> None:
        length = int(handler.headers.get("Content-Length") or 0)
        call = Call(
            handler.command,
            urlsplit(handler.path).path,
            handler.rfile.read(length),
            handler.client_address[1],
        )
        with self._lock:
            self.calls.append(call)
        try:
            self._fire(call, "before")
            response = self._forward(handler, call)
            self._fire(call, "after")
        except (Drop, http.client.HTTPException, OSError):
            # The server is gone, or a rule says so: the client sees a broken connection.
            handler.close_connection = True
            return
        handler.relay(response, call.answer)

    def _fire(self, call: Call, moment: Moment) -> None:
        due: list[Rule] = []
        with self._lock:
            for rule in self._rules:
                if rule.moment == moment and rule.matches(call):
                    rule.seen += 1
                    if rule.first <= rule.seen <= rule.last:
                        due.append(rule)
        for rule in due:
            try:
                _ACTORS.submit(rule.action, call).result(DEADLINE_S)
            except Drop:
                raise
            except BaseException as error:
                self._faults.append(error)
                raise Drop from error

    def _forward(self, handler: _Handler, call: Call) -> http.client.HTTPResponse:
        connection = handler.upstream(self._upstream.port)
        headers = {
            name: value
            for name, value in handler.headers.items()
            if name.lower() not in HOP_HEADERS
        }
        connection.request(call.method, handler.path, call.body or None, headers)
        response = connection.getresponse()
        call.answer = response.read()
        call.status = response.status
        return response


class _Handler(BaseHTTPRequestHandler, ABC):
    protocol_version = "HTTP/1.1"
    timeout = DEADLINE_S

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._upstream: http.client.HTTPConnection | None = None

    def finish(self) -> None:
        if self._upstream is not None:
            self._upstream.close()
        with contextlib.suppress(OSError):
            super().finish()

    def handle(self) -> None:
        # A client that was killed leaves its connections as they are.
        with contextlib.suppress(ConnectionError):
            super().handle()

    def upstream(self, port: int) -> http.client.HTTPConnection:
        if self._upstream is not None and self._upstream.port != port:
            self._upstream.close()
            self._upstream = None
        if self._upstream is None:
            self._upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        return self._upstream

    def relay(self, response: http.client.HTTPResponse, body: bytes) -> None:
        self.send_response_only(response.status, response.reason)
        for name, value in response.getheaders():
            if name.lower() not in HOP_HEADERS:
                self.send_header(name, value)
        length = response.getheader("Content-Length") if self.command == "HEAD" else str(len(body))
        if response.status != 204 and length is not None:
            self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    @abstractmethod
    def serve(self) -> None:
        """Answer one request; the proxy says how."""

    def do_GET(self) -> None:
        self.serve()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = do_GET  # noqa: N815 - as above

    def log_message(self, *_arguments: object) -> None:
        """Silent: the calls are kept."""
