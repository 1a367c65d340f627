"""The servers of the tests are forked from one that has loaded everything: each must be what its command starts.

Every test here runs with both.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.forking import Forked
from support.http import Api
from support.server import ROOT, Server, ServerError

DEADLINE_S = 30.0


@pytest.fixture(params=["forked", "from its command"])
def start(
    request: pytest.FixtureRequest,
    start_server: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Server]:
    monkeypatch.delenv("MILLSTREAM_TEST_FULL", raising=False)
    monkeypatch.delenv("MILLSTREAM_TEST_BINARY", raising=False)
    forked = request.param == "forked"

    def one(**options: object) -> Server:
        server = start_server(from_command=not forked, **options)
        assert isinstance(server.process, Forked) == forked
        return server

    return one


def test_it_leads_its_own_session_and_ends_in_order(start: Callable[..., Server]) -> None:
    server = start()
    assert os.getsid(server.process.pid) == server.process.pid
    Api(server).put("s", b"x")
    server.stop()
    assert server.process.poll() == server.process.returncode == 0
    assert server.restart().process.poll() is None
    assert Api(server).read_all("s") == b"x"
    server.kill()
    assert server.process.returncode == -signal.SIGKILL


def test_it_takes_settings_environment_and_place_from_the_test(
    start: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.setenv("MILLSTREAM_DURABILITY", "ephemeral")  # of the caller: servers do not get it
    server = start(working_dir=place, settings={"durability": "memory"})
    server.wait_for_log("durability=memory")
    assert Path(f"/proc/{server.process.pid}/cwd").resolve() == place.resolve()
    assert "durability=disk" in start(flags=("--durability", "disk")).log()


def test_a_start_that_fails_is_told(start: Callable[..., Server], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(ServerError, match=r"ended with 1 before ready\n(.*\n)*.*port_in_use"):
            start(flags=("--port", port))


def test_one_that_dies_by_itself_fails_its_test(start: Callable[..., Server]) -> None:
    server = start()
    os.kill(server.process.pid, signal.SIGABRT)
    assert server.process.wait(DEADLINE_S) == -signal.SIGABRT
    with pytest.raises(ServerError, match="the server ended by itself with -6"):
        server.close()
    server.kill()  # from here its end is on purpose


def test_no_other_variables_reach_a_forked_one(start_server: Callable[..., Server]) -> None:
    """Python has read them before it forks, so a server that is given one is started from its command."""
    server = start_server(environment={"PYTHONIOENCODING": "latin-1"})
    assert isinstance(server.process, subprocess.Popen)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


ENDS_WITHOUT_A_WORD = """
import os, signal, sys
from pathlib import Path
from support.server import Server
server = Server(Path(sys.argv[1]))
print(server.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_none_outlives_the_process_of_its_test(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_WITHOUT_A_WORD, str(tmp_path / "data")],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        stdout=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
    )
    assert ended.returncode == -signal.SIGKILL
    until = time.monotonic() + DEADLINE_S
    while runs(int(ended.stdout)):
        assert time.monotonic() < until, "the server is still there"
        time.sleep(0.02)
