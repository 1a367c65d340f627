"""Weak spots of other servers around acknowledged data. The number names the entry of the list."""

from __future__ import annotations

import contextlib
import random
import re
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.http import Api, Closed, Timeout, Truncated, producer, request_bytes
from support.server import Server, binary

TEXT = {"Content-Type": "text/plain"}
SYNC_DELAY = "MILLSTREAM_FAULT_SYNC_DELAY_MS"


@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_item_08_producers_and_sequences_survive_right_after_the_ack(
    server: Server, api: Api, path: str, ending: str
) -> None:
    api.put(path)
    for turn in range(3):
        seq = {"Stream-Seq": f"{turn:04}"}
        assert (
            api.post(path, b"%d," % turn, headers={**producer("p", 0, turn), **seq}).status == 200
        )
        getattr(server, ending)()
        server.restart()
        duplicate = api.post(path, b"again", headers={**producer("p", 0, turn), **seq})
        assert (duplicate.status, duplicate["producer-seq"]) == (204, str(turn))
        stale = api.post(path, b"stale", headers=seq)
        assert (stale.status, stale.code) == (409, "sequence_conflict")
    assert api.post(path, b"3,", headers=producer("p", 0, 3)).status == 200
    assert api.get(path).body == b"0,1,2,3,"


def test_item_11_nobody_is_answered_before_the_create_is_durable(
    start_server: Callable[..., Server], path: str
) -> None:
    server = start_server(environment={SYNC_DELAY: "1200"})
    api = Api(server)
    target = Api.target(path)
    first, second, third = api.connect(), api.connect(), api.connect()
    first.send(request_bytes("PUT", target, TEXT, b"one,"))
    second.send(
        request_bytes("PUT", target, TEXT, b"") + request_bytes("POST", target, TEXT, b"two")
    )
    third.deadline_s = second.deadline_s = first.deadline_s = 0.3
    third.send(request_bytes("GET", target))
    for connection in (first, second):
        with pytest.raises(Timeout):
            connection.read_response()
    # A reader may be told that there is nothing yet, or wait; it must not see what may vanish.
    with contextlib.suppress(Timeout):
        assert third.read_response().status == 404
    server.kill()
    server.environment = {}
    server.restart()
    answer = api.get(path)
    assert (answer.status, answer.body) in ((404, answer.body), (200, b"one,"), (200, b"one,two"))


def test_item_11_all_are_answered_once_it_is(
    start_server: Callable[..., Server], path: str
) -> None:
    server = start_server(environment={SYNC_DELAY: "400"})
    api = Api(server)
    target = Api.target(path)
    with api.connect() as first, api.connect() as second:
        began = time.monotonic()
        first.send(request_bytes("PUT", target, TEXT, b"one,"))
        second.send(
            request_bytes("PUT", target, TEXT, b"") + request_bytes("POST", target, TEXT, b"two")
        )
        creates = [first.read_response().status, second.read_response().status]
        assert second.read_response().status == 204
        assert time.monotonic() - began >= 0.35
    assert sorted(creates) == [200, 201]
    assert api.get(path).body in (b"one,two", b"two")


def test_item_12_create_with_content_is_one_step_for_readers(shared: Api, path: str) -> None:
    body = b"all of it" * 1000
    closed = {**TEXT, "Stream-Closed": "true"}
    for turn in range(40):
        target = Api.target(f"{path}/{turn}")
        done = threading.Event()
        seen: list[tuple[int, bytes, str | None]] = []

        def look(target: str = target, done: threading.Event = done) -> None:
            with shared.connect() as reader:
                while not done.is_set():
                    answer = reader.request("GET", target)
                    seen.append((answer.status, answer.body, answer.get("stream-closed")))  # noqa: B023

        reader = threading.Thread(target=look)
        reader.start()
        assert shared.call("PUT", target, closed, body).status == 201
        done.set()
        reader.join(10)
        for status, content, closed_seen in seen:
            if status == 200:
                assert (content, closed_seen) == (body, "true")
            else:
                assert status == 404


def test_item_12_create_with_content_is_one_step_for_a_crash(
    start_server: Callable[..., Server], path: str
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    body = b"all of it" * 5000
    server = start_server(environment={SYNC_DELAY: "20"})
    api = Api(server)
    for turn in range(6):
        target = Api.target(f"{path}/{turn}")
        with api.connect() as connection:
            connection.send(request_bytes("PUT", target, TEXT, body))
            connection.deadline_s = 5.0
            killer = threading.Timer(chance.uniform(0, 0.06), server.kill)
            killer.start()
            try:
                acknowledged = connection.read_response().status == 201
            except (Closed, Truncated, Timeout):
                acknowledged = False
            killer.join(10)
        server.restart()
        answer = api.call("GET", target)
        if acknowledged:
            assert (answer.status, answer.body) == (200, body)
        else:
            assert answer.status == 404 or answer.body == body


def test_item_16_second_server_on_one_directory_is_refused(
    server: Server, api: Api, path: str
) -> None:
    api.put(path, b"mine")
    rival = subprocess.run(
        [binary(), "serve", "--port", "0", "--data-dir", server.data_dir],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    said = rival.stdout + rival.stderr
    assert rival.returncode != 0
    assert re.search(r"lock|in use|another", said), said
    assert "listening on" not in said
    assert "Traceback" not in said
    assert api.post(path, b", still").status == 204
    server.crash_and_restart()
    assert api.get(path).body == b"mine, still"


def test_item_16_port_in_use_leaves_the_directory_alone(server: Server, tmp_path: Path) -> None:
    other = tmp_path / "other"
    rival = subprocess.run(
        [binary(), "serve", "--port", str(server.port), "--data-dir", other],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert rival.returncode != 0
    assert str(server.port) in rival.stdout + rival.stderr
    assert "Traceback" not in rival.stdout + rival.stderr


def test_item_18_default_directory_is_where_the_user_stands(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    server = start_server(working_dir=here)
    Api(server).put("kept", b"x")
    assert (here / "millstream-data").is_dir()
    assert "millstream-data" in server.log()
    server.crash_and_restart()
    assert Api(server).get("kept").body == b"x"
