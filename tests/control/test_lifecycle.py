"""Starting and stopping the process: one line when ready, 0 within two seconds, clear refusals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from control.conftest import Subscriptions
from control.receiver import ACCEPT, Answer, Receiver
from support import ctrl_c
from support.http import Api, request_bytes
from support.server import Server, binary

DEADLINE_S = 30.0


def serve(*flags: str) -> subprocess.CompletedProcess[str]:
    """Runs `serve` where it must refuse to start."""
    return subprocess.run(
        [str(binary()), "serve", *flags], capture_output=True, text=True, timeout=DEADLINE_S
    )


def test_the_line_that_says_ready_is_the_only_output(tmp_path: Path) -> None:
    place = ["--host", "127.0.0.1", "--port", "0", "--data-dir", str(tmp_path / "data")]
    process = subprocess.Popen(
        [str(binary()), "serve", *place],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=ctrl_c.taken,
    )
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert re.fullmatch(
                rf"listening on http://127\.0\.0\.1:\d+ data={tmp_path}/data durability=fsync\n",
                line,
            )
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == 0
            assert process.stdout.read() == ""
        finally:
            process.kill()


def test_a_port_in_use_is_one_line_with_a_hint(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = serve("--port", port, "--data-dir", str(tmp_path / "data"))
    assert result.returncode == 1
    assert result.stdout == ""
    error = result.stderr.strip().splitlines()[-1]
    assert port in error
    assert "--port" in error
    assert "Traceback" not in result.stderr


def test_a_directory_in_use_is_one_line_with_a_hint(server: Server) -> None:
    result = serve("--port", "0", "--data-dir", str(server.data_dir))
    assert result.returncode == 1
    assert result.stdout == ""
    assert "--data-dir" in result.stderr.strip().splitlines()[-1]
    assert "Traceback" not in result.stderr


@pytest.fixture
def stuck_receiver() -> Iterator[Receiver]:
    """Takes a wake and does not answer while the test lasts."""
    release = threading.Event()
    arrived = threading.Event()

    def hold(wake: object) -> Answer:
        arrived.set()
        release.wait(DEADLINE_S)
        return ACCEPT

    receiver = Receiver(hold)
    receiver.arrived = arrived  # type: ignore[attr-defined]
    yield receiver
    release.set()
    receiver.close()


def test_clients_cannot_hold_up_a_stop(
    subscriptions: Subscriptions, server: Server, stuck_receiver: Receiver
) -> None:
    subscriptions.hook("s", stuck_receiver)
    subscriptions.create("events/a", b"[1]")
    assert stuck_receiver.arrived.wait(10)  # type: ignore[attr-defined]
    with ExitStack() as stack:
        for sent in (
            b"",
            b"GET /v1/stream/events/a HTTP/1.1\r\nHost: x",
            request_bytes("GET", "/v1/stream/events/a?offset=now&live=sse"),
            request_bytes("GET", "/v1/stream/events/a?offset=now&live=long-poll"),
            b"PUT /v1/stream/__ds/subscriptions/t HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{",
        ):
            connection = stack.enter_context(server.connect())
            if sent:
                connection.send(sent)
        assert server.stop() < 2.0


def test_a_second_signal_ends_the_process_at_once() -> None:
    """With a shutdown that hangs, as the process would be after the first signal."""
    script = (
        "import threading\n"
        "from millstream.server.lifecycle import Signals\n"
        "signals = Signals()\n"
        "with signals.installed():\n"
        "    print('ready', flush=True)\n"
        "    signals.wait(None)\n"
        "    print('stopping', flush=True)\n"
        "    while True: threading.Event().wait(0.1)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "stopping\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE_S) == 130
        finally:
            process.kill()


def test_a_stop_waits_for_a_slow_disk_and_says_so(start_server: Callable[..., Server]) -> None:
    """Weak records are whole after a clean stop, however long the last sync takes."""
    server = start_server(environment={"MILLSTREAM_FAULT_SYNC_DELAY_MS": "4000"}, deadline_s=60.0)
    api = Api(server, deadline_s=DEADLINE_S)
    assert api.put("weak", headers={"Stream-Durability": "memory"}).status == 201
    tail = api.post("weak", b"acknowledged").offset
    server.stop(DEADLINE_S)
    assert "stopping: waiting for the log" in server.log()
    server.environment.clear()
    server.restart()
    assert api.get("weak").body == b"acknowledged"
    assert api.get("weak", offset=tail).get("stream-gap") is None


@pytest.mark.parametrize(
    ("bound", "commits"),
    [("STILL_MAX_S", "itertools.repeat(0)"), ("STOP_MAX_S", "itertools.count()")],
)
def test_a_stop_that_stands_still_or_has_no_end_is_given_up(bound: str, commits: str) -> None:
    script = (
        "import itertools, threading\n"
        "from millstream.server import lifecycle\n"
        f"lifecycle.{bound} = 0.3\n"
        f"commits = {commits}\n"
        "class Stopping:\n"
        "    def stop_progress(self): return 'the log', 7, next(commits)\n"
        "lifecycle._watch_stop(Stopping(), threading.Event())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert ended.returncode == 1
    assert "waiting for the log, streams to checkpoint: 7; exiting without" in ended.stderr


def test_the_private_socket_is_gone_after_a_stop(start_server: Callable[..., Server]) -> None:
    with tempfile.TemporaryDirectory() as short:  # a long one would not be used
        server = start_server(environment={"TMPDIR": short})
        (directory,) = Path(short).iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
        server.kill()
        server.restart()
        assert list(Path(short).iterdir()) == [directory]
        server.stop()
        assert list(Path(short).iterdir()) == []


def test_a_class_that_is_not_offered_is_refused_in_one_line(tmp_path: Path) -> None:
    result = serve("--port", "0", "--durability", "quorum", "--data-dir", str(tmp_path / "data"))
    assert result.returncode in (1, 2)
    assert result.stdout == ""
    assert "quorum" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_damaged_log_is_named_with_a_hint(server: Server) -> None:
    """Bytes that were synced once and do not fit any more must not be served around."""
    api = Api(server)
    api.put("a")
    for number in range(20):
        assert api.post("a", b"marker-%04d" % number).status in (200, 204)
    server.kill()
    files = (file for file in server.data_dir.rglob("*") if file.is_file())
    (log,) = [file for file in files if b"marker-0000" in file.read_bytes()]
    with log.open("r+b") as file:
        file.seek(log.read_bytes().index(b"marker-0000"))
        file.write(b"MARKER")
    result = serve("--port", "0", "--data-dir", str(server.data_dir))
    assert result.returncode == 1
    assert "millstream verify" in result.stderr.strip().splitlines()[-1]
    assert "Traceback" not in result.stderr


# A server with a directory that is never answered, as on a network mount whose other side has gone, and a thread that does
# not end, either, and is not a daemon.
STRAY = """
import os, sys, threading
from millstream.cli.main import main
never, mode = sys.argv[1:3]
realpath = os.path.realpath
def hanging(path, **options):
    return open(never).name if "never" in str(path) else realpath(path, **options)
os.path.realpath = hanging
if mode == "joined":
    threading.Thread(target=open, args=(never,), name="stray").start()
sys.argv = ["millstream", "serve", "--host", "127.0.0.1", "--port", "0", "--data-dir", sys.argv[3]]
sys.exit(main())
"""


@dataclass
class Port:
    port: int


@pytest.mark.parametrize("mode", ["unjoined", "joined"])
def test_a_stop_ends_in_time_whatever_a_thread_does(tmp_path: Path, mode: str) -> None:
    never = tmp_path / "never"
    os.mkfifo(never)
    process = subprocess.Popen(
        [sys.executable, "-c", STRAY, str(never), mode, str(tmp_path / "data")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    asked = json.dumps({"to": "/never/backup"}).encode()
    request = request_bytes("POST", "/-/api/backups", {"Content-Type": "application/json"}, asked)
    with process:
        try:
            assert process.stdout is not None
            found = re.search(r":(\d+) ", process.stdout.readline())
            assert found
            api = Api(Port(int(found[1])), deadline_s=DEADLINE_S)
            with ExitStack() as stack:
                for _ in range(2):
                    stack.enter_context(api.connect()).send(request)
                api.wait_until_metric("millstream_control_requests_total", lambda n: n == 2)
                refused = api.call(
                    "POST", "/-/api/backups", {"Content-Type": "application/json"}, asked
                )
                assert (refused.status, refused.code) == (503, "server_busy")
                assert api.call("GET", "/-/api/streams").status == 200
                process.send_signal(signal.SIGTERM)
                began = time.monotonic()
                assert process.wait(DEADLINE_S) == 0
                assert time.monotonic() - began < (3.0 if mode == "unjoined" else 8.0)
            assert process.stderr is not None
            assert ("stray" in process.stderr.read()) == (mode == "joined")
        finally:
            process.kill()


def test_a_long_way_to_a_backup_is_refused_before_it_is_gone(shared: Api) -> None:
    body = json.dumps({"to": "/proc/self/root" * 60_000 + "/tmp/backup"}).encode()
    began = time.monotonic()
    answer = shared.call("POST", "/-/api/backups", {"Content-Type": "application/json"}, body)
    assert time.monotonic() - began < 2.0
    assert (answer.status, answer.code) == (400, "bad_request")
    assert "4096 bytes" in answer.json()["detail"]
