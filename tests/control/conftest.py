"""Subscriptions as a client sees them, on a real server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from control.receiver import ACCEPT, Answer, Receiver
from support.http import Api, Response
from support.server import Server

ROOT = "/v1/stream/__ds/subscriptions/"


class Subscriptions:
    """The subscription API and the streams behind it, one call per method."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.api = Api(server)

    def call(
        self, method: str, target: str, body: object = None, token: str | None = None
    ) -> Response:
        headers = {"Content-Type": "application/json", "Host": f"127.0.0.1:{self.server.port}"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        data = None if body is None else json.dumps(body).encode()
        return self.api.call(method, target, headers, data)

    def put(self, name: str, **config: Any) -> Response:
        return self.call("PUT", ROOT + name, config)

    def hook(self, name: str, receiver: Receiver, **config: Any) -> Response:
        values = {"type": "webhook", "pattern": "events/*", "webhook": {"url": receiver.url}}
        response = self.put(name, **{**values, **config})
        assert response.status == 201, response.body
        return response

    def pull(self, name: str, **config: Any) -> Response:
        self.create("wake/pool", b"[]")
        values = {"type": "pull-wake", "pattern": "events/*", "wake_stream": "wake/pool"}
        response = self.put(name, **{**values, **config})
        assert response.status == 201, response.body
        return response

    def get(self, name: str) -> dict[str, Any]:
        response = self.call("GET", ROOT + name)
        assert response.status == 200, response.body
        value: dict[str, Any] = response.json()
        return value

    def acked(self, name: str) -> dict[str, str]:
        return {link["path"]: link["acked_offset"] for link in self.get(name)["streams"]}

    def claim(self, name: str, worker: str = "one") -> Response:
        return self.call("POST", f"{ROOT}{name}/claim", {"worker": worker})

    def answer(
        self,
        name: str,
        action: str,
        wake: dict[str, Any],
        acks: dict[str, str] | None = None,
        **fields: Any,
    ) -> Response:
        """Sends an ack, a callback or a release for a claim or a webhook body."""
        body = {"wake_id": wake["wake_id"], "generation": wake["generation"], **fields}
        if acks is not None:
            body["acks"] = [{"stream": path, "offset": offset} for path, offset in acks.items()]
        token = wake.get("token") or wake["callback_token"]
        return self.call("POST", f"{ROOT}{name}/{action}", body, token)

    def create(self, path: str, body: bytes = b"") -> str:
        response = self.api.put(path, body, "application/json")
        assert response.status in (200, 201), response.body
        return response.offset

    def append(self, path: str, value: object = 1) -> str:
        response = self.api.post(path, json.dumps(value).encode(), "application/json")
        assert response.status in (200, 204), response.body
        return response.offset

    def wakes(self, name: str, stream: str = "wake/pool") -> list[dict[str, Any]]:
        records = self.api.get(stream, offset="-1").json()
        return [record for record in records if record["subscription_id"] == name]


def eventually(condition: Callable[[], bool], what: str, deadline_s: float = 10.0) -> None:
    """Asks the server again until it says so: for states that have no event to wait for."""
    until = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until, f"not within {deadline_s} s: {what}"
        time.sleep(0.02)


@pytest.fixture
def server(start_server: Callable[..., Server]) -> Server:
    """A server of the test's own that may call receivers on this machine."""
    return start_server(settings={"long_poll_timeout_ms": 2000, "webhook_allow": "127.0.0.1"})


@pytest.fixture
def subscriptions(server: Server) -> Subscriptions:
    return Subscriptions(server)


@pytest.fixture
def start_receiver() -> Iterator[Callable[..., Receiver]]:
    started: list[Receiver] = []

    def start(*answers: Answer, port: int = 0) -> Receiver:
        """Gives these answers in turn, then the last one for ever."""
        waiting = list(answers or (ACCEPT,))

        def behave(wake: object) -> Answer:
            return waiting.pop(0) if len(waiting) > 1 else waiting[0]

        receiver = Receiver(behave, port)
        started.append(receiver)
        return receiver

    yield start
    for receiver in started:
        receiver.close()
