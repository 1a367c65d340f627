"""Answers that are owed come, whatever else happens: half-closed clients, closing connections, renewals."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from support.http import Api, request_bytes
from support.server import Server

TEXT = {"Content-Type": "text/plain"}


def test_a_half_closed_client_gets_its_acknowledgement(shared: Api, path: str) -> None:
    shared.put(path)
    for number in range(30):
        with shared.connect() as connection:
            connection.send(request_bytes("POST", Api.target(path), TEXT, b"%d," % number))
            connection.socket.shutdown(socket.SHUT_WR)
            assert connection.read_response().status == 204
            assert connection.is_closed_by_server()
    assert shared.read_all(path) == b"".join(b"%d," % number for number in range(30))


def test_a_closing_connection_waits_for_a_slow_log(start_server: Callable[..., Server]) -> None:
    server = start_server(environment={"MILLSTREAM_FAULT_SYNC_DELAY_MS": "1500"}, deadline_s=60.0)
    api = Api(server, deadline_s=20.0)
    assert api.put("slow").status == 201
    with api.connect() as connection:
        connection.send(
            request_bytes("POST", Api.target("slow"), {**TEXT, "Connection": "close"}, b"late")
        )
        assert connection.read_response().status == 204


def test_a_stop_waits_for_a_slow_log(start_server: Callable[..., Server]) -> None:
    server = start_server(environment={"MILLSTREAM_FAULT_SYNC_DELAY_MS": "2000"}, deadline_s=60.0)
    api = Api(server, deadline_s=20.0)
    assert api.put("slow").status == 201
    appends = api.metric("millstream_appends_total")
    with api.connect() as connection:
        connection.send(request_bytes("POST", Api.target("slow"), TEXT, b"late"))
        api.wait_for_metric("millstream_appends_total", appends + 1)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        assert connection.read_response().status == 204
        stopping.join(30)
    assert server.process.returncode == 0


def test_a_renewed_lifetime_keeps_nobody_waiting(start_server: Callable[..., Server]) -> None:
    api = Api(start_server())
    lifetime = {**TEXT, "Stream-TTL": "10"}
    assert api.put("brief", headers=lifetime).status == 201
    # A renewal is worth a frame of its own only after a tenth of the lifetime.
    time.sleep(1.2)
    assert api.get("brief").status == 200
    assert api.put("brief", headers=lifetime).status == 200
    assert api.put("brief", headers={**TEXT, "Stream-TTL": "11"}).status == 409


def test_an_expired_fork_is_simply_gone(shared: Api, path: str) -> None:
    source, fork = f"{path}/source", f"{path}/fork"
    shared.put(source)
    headers = {"Stream-Forked-From": Api.target(source), "Stream-TTL": "1"}
    assert shared.put(fork, headers=headers).status == 201
    time.sleep(1.1)
    assert shared.get(fork).status == 404
    assert shared.put(fork, headers=TEXT).status == 201
