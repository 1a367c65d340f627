"""The command line as a person and a script use it, against a real server."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from support import ctrl_c
from support.server import Server

DEADLINE_S = 30.0
COMMAND = [sys.executable, "-m", "millstream.cli"]


class Cli:
    """Runs commands against one server, in an empty directory."""

    def __init__(self, url: str, directory: Path) -> None:
        self.directory = directory
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith("MILLSTREAM_")
        }
        self.environment["MILLSTREAM_URL"] = url
        self.environment["PYTHONUNBUFFERED"] = ""
        self.environment.pop("NO_COLOR", None)
        self.environment.pop("FORCE_COLOR", None)

    def __call__(
        self, *arguments: str, stdin: bytes | None = None
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*COMMAND, *arguments],
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            timeout=DEADLINE_S,
            env=self.environment,
            cwd=self.directory,
            check=False,
        )

    def out(self, *arguments: str, stdin: bytes | None = None) -> bytes:
        """Run what must succeed without a word on stderr; returns stdout."""
        done = self(*arguments, stdin=stdin)
        assert (done.returncode, done.stderr) == (0, b""), done
        return done.stdout

    def start(
        self, *arguments: str, before_exec: Callable[[], None] = ctrl_c.taken
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment,
            cwd=self.directory,
            preexec_fn=before_exec,
        )


@pytest.fixture
def cli(shared_server: Server, tmp_path: Path) -> Cli:
    return Cli(shared_server.url, tmp_path)


@pytest.fixture
def started() -> Iterator[Callable[[subprocess.Popen[bytes]], subprocess.Popen[bytes]]]:
    """Ends, at the end of the test, the processes it was given."""
    processes: list[subprocess.Popen[bytes]] = []

    def keep(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        processes.append(process)
        return process

    yield keep
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait(DEADLINE_S)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def line_of(pipe: IO[bytes] | None) -> bytes:
    """The next line, or a failure at the deadline."""
    assert pipe is not None
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(pipe.readline()), daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    assert found, "no line in time"
    return found[0]


def test_append_and_read_text(cli: Cli, path: str) -> None:
    assert cli.out("append", path, "hi", "there", "--create") == b""
    assert cli.out("append", path, "-n", "no newline") == b""
    assert cli.out("read", path) == b"hi\nthere\nno newline"


def test_append_to_a_missing_stream_exits_3_with_a_hint(cli: Cli, path: str) -> None:
    done = cli("append", path, "x")
    assert (done.returncode, done.stdout) == (3, b"")
    error, hint = done.stderr.decode().splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    assert "--create" in hint


def test_stdin_lines_round_trip(cli: Cli, path: str) -> None:
    text = b"".join(b"line %d\r\n" % number for number in range(500)) + b"no newline at the end"
    cli.out("append", path, "-", "--create", stdin=text)
    assert cli.out("read", path) == text
    cli.out("append", f"{path}/piped", "--create", stdin=text)
    assert cli.out("read", f"{path}/piped") == text


def test_json_lines_round_trip_in_batches(cli: Cli, path: str) -> None:
    lines = b"".join(b'{"n": %d, "x": 1.10}\n' % number for number in range(5000))
    result = cli.out(
        "append",
        path,
        "-",
        "--create",
        "--content-type",
        "json",
        "--batch",
        "64",
        "--json",
        stdin=lines + b"\n\n",
    )
    assert json.loads(result)["records"] == 5000
    assert cli.out("read", path) == lines


def test_a_bad_line_is_named_and_the_ones_before_are_kept(cli: Cli, path: str) -> None:
    done = cli("append", path, "--create", "--content-type", "json", stdin=b"1\n2\n{\n4\n")
    assert done.returncode == 2
    assert b"line 3" in done.stderr
    assert b"2 records before it were appended" in done.stderr
    assert cli.out("read", path) == b"1\n2\n"


def test_json_arguments_are_all_or_none(cli: Cli, path: str) -> None:
    cli.out("append", path, '{"a":1}', "[1,2]", "--create", "--content-type", "json")
    done = cli("append", path, "1", "hello")
    assert done.returncode == 2
    assert b"needs its quotes" in done.stderr
    assert cli.out("read", path) == b'{"a":1}\n[1,2]\n'


def test_files(cli: Cli, path: str, tmp_path: Path) -> None:
    blob = bytes(range(256)) * 3
    (tmp_path / "blob").write_bytes(blob)
    result = cli.out(
        "append", path, "--file", "blob", "--whole", "--create", "--content-type", "bytes", "--json"
    )
    assert json.loads(result)["records"] == 1
    assert cli.out("read", path) == blob
    (tmp_path / "lines").write_bytes(b"1\n2\n")
    cli.out("append", f"{path}/lines", "--file", "lines", "--create", "--content-type", "json")
    assert cli.out("read", f"{path}/lines", "--limit", "1") == b"1\n"
    done = cli("append", path, "--file", "missing")
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: `missing`: ")


def test_stream_life(cli: Cli, path: str) -> None:
    made = json.loads(cli.out("stream", "create", path, "--content-type", "json", "--json"))
    assert (made["created"], made["content_type"]) == (True, "application/json")
    assert (
        json.loads(cli.out("stream", "create", path, "--content-type", "json", "--json"))["created"]
        is False
    )
    assert cli("stream", "create", path).returncode == 4
    assert b"application/json" in cli.out("stream", "info", path)
    assert json.loads(cli.out("--json", "stream", "close", path))["closed"] is True
    assert json.loads(cli.out("stream", "info", path, "--json"))["closed"] is True
    done = cli("append", path, "1")
    assert done.returncode == 4
    assert b"closed" in done.stderr
    cli.out("stream", "remove", path)
    assert cli("stream", "info", path).returncode == 3
    assert cli("stream", "remove", path).returncode == 3


def test_a_server_that_is_not_there_exits_5(cli: Cli, path: str) -> None:
    done = cli("read", path, "--url", "http://127.0.0.1:1")
    assert done.returncode == 5
    assert b"cannot reach http://127.0.0.1:1" in done.stderr
    assert b"millstream serve" in done.stderr


def test_errors_as_json(cli: Cli, path: str) -> None:
    done = cli("--json", "read", path)
    assert done.returncode == 3
    assert json.loads(done.stderr)["error"]["code"] == "stream_not_found"


def test_read_can_go_on_from_an_offset(cli: Cli, path: str) -> None:
    cli.out("append", path, "1", "--create", "--content-type", "json")
    first = json.loads(cli.out("read", path, "--json"))
    cli.out("append", path, "2")
    assert cli.out("read", path, "--from", first["offset"]) == b"2\n"
    offset, value = cli.out("read", path, "--offsets").decode().splitlines()[0].split("\t")
    assert value == "1"
    assert offset >= first["offset"]


def test_a_reader_that_has_enough_is_no_error(cli: Cli, path: str) -> None:
    lines = b"".join(b"%d\n" % number for number in range(100_000))
    cli.out("append", path, "-", "--create", "--content-type", "json", stdin=lines)
    process = cli.start("read", path)
    assert line_of(process.stdout) == b"0\n"
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(DEADLINE_S) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


def test_tail_shows_what_comes_and_ctrl_c_is_quiet(
    cli: Cli,
    path: str,
    started: Callable[[subprocess.Popen[bytes]], subprocess.Popen[bytes]],
) -> None:
    cli.out("append", path, "1", "--create", "--content-type", "json")
    process = started(cli.start("tail", path, "--from", "-1"))
    assert line_of(process.stdout) == b"1\n"
    cli.out("append", path, '{"a":2}')
    assert line_of(process.stdout) == b'{"a":2}\n'
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 130
    assert process.stderr is not None
    assert process.stderr.read() == b""


def test_ctrl_c_ends_what_was_started_as_a_background_job(
    cli: Cli,
    path: str,
    started: Callable[[subprocess.Popen[bytes]], subprocess.Popen[bytes]],
) -> None:
    cli.out("append", path, "1", "--create", "--content-type", "json")
    tail = started(cli.start("tail", path, "--from", "-1", before_exec=ctrl_c.ignored))
    serve = started(cli.start("serve", "--port", "0", before_exec=ctrl_c.ignored))
    assert line_of(tail.stdout) == b"1\n"
    assert line_of(serve.stdout).startswith(b"listening on ")
    for process, code in ((tail, 130), (serve, 0)):
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == code
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_tail_ends_with_a_closed_stream(cli: Cli, path: str) -> None:
    cli.out("append", path, "1", "2", "--create", "--content-type", "json")
    cli.out("stream", "close", path)
    assert cli.out("tail", path, "--from", "-1") == b"1\n2\n"


def test_tail_begins_with_the_last_ten(cli: Cli, path: str) -> None:
    numbers = [str(number) for number in range(15)]
    cli.out("append", path, *numbers, "--create", "--content-type", "json")
    cli.out("stream", "close", path)
    assert cli.out("tail", path).split() == [b"%d" % number for number in range(5, 15)]
    assert cli.out("tail", path, "-n", "2").split() == [b"13", b"14"]
    assert cli.out("tail", path, "-n", "0") == b""


def test_list_and_completion_know_the_streams(cli: Cli, path: str) -> None:
    for name in ("a", "b"):
        cli.out("stream", "create", f"{path}/{name}")
    listed = cli.out("stream", "list", f"{path}/").decode().splitlines()
    assert [line.split("\t")[0] for line in listed] == [f"{path}/a", f"{path}/b"]
    rows = [
        json.loads(line) for line in cli.out("stream", "list", f"{path}/", "--json").splitlines()
    ]
    assert [row["path"] for row in rows] == [f"{path}/a", f"{path}/b"]
    cli.environment |= {
        "_MILLSTREAM_COMPLETE": "bash_complete",
        "COMP_WORDS": f"millstream read {path}/",
        "COMP_CWORD": "2",
    }
    assert cli.out().decode().split() == [f"plain,{path}/a", f"plain,{path}/b"]


def test_tail_resumes_after_the_server_was_killed(
    server: Server,
    tmp_path: Path,
    path: str,
    started: Callable[[subprocess.Popen[bytes]], subprocess.Popen[bytes]],
) -> None:
    server.flags = ("--port", str(server.port))
    cli = Cli(server.url, tmp_path)
    cli.out("append", path, "1", "--create", "--content-type", "json")
    process = started(cli.start("tail", path, "--from", "-1"))
    assert line_of(process.stdout) == b"1\n"
    server.kill()
    assert line_of(process.stderr).startswith(b"warning: connection lost, resuming: ")
    server.restart()
    assert line_of(process.stderr) == b"warning: connection is back, nothing was missed\n"
    cli.out("append", path, "2")
    assert line_of(process.stdout) == b"2\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 130


def on_a_terminal(cli: Cli, *arguments: str) -> tuple[int, str]:
    """Run with stdout and stderr on a terminal; returns the exit code and what it showed."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=slave,
        stderr=slave,
        env={**cli.environment, "TERM": "xterm"},
        cwd=cli.directory,
    )
    os.close(slave)
    shown = b""
    began = time.monotonic()
    try:
        while time.monotonic() - began < DEADLINE_S:
            try:
                data = os.read(master, 65536)
            except OSError:
                break
            shown += data
        return process.wait(DEADLINE_S), shown.decode().replace("\r\n", "\n")
    finally:
        os.close(master)
        if process.poll() is None:
            process.kill()
            process.wait(DEADLINE_S)


def test_people_get_words_and_colours(cli: Cli, path: str) -> None:
    code, shown = on_a_terminal(cli, "append", path, "1", "--create", "--content-type", "json")
    assert code == 0
    assert shown.startswith(f"appended 1 record to `{path}`, tail ")
    assert on_a_terminal(cli, "read", path) == (0, "\x1b[36m1\x1b[0m\n")
    cli.environment["NO_COLOR"] = "1"
    assert on_a_terminal(cli, "read", path) == (0, "1\n")


def test_the_class_of_a_stream_is_chosen_shown_and_changed(cli: Cli, path: str) -> None:
    cli.out("stream", "create", path, "--durability", "disk")
    assert b"\tdisk\t" in cli.out("stream", "list", path)
    assert b"durability:    disk\n" in cli.out("stream", "info", path)
    assert cli.out("stream", "set", path, "--durability", "memory") == b""
    changed = json.loads(cli.out("stream", "set", path, "--durability", "ephemeral", "--json"))
    assert (changed["path"], changed["durability"]) == (path, "ephemeral")
    assert b"\tephemeral\t" in cli.out("stream", "list", path)
    other = cli("stream", "create", path, "--durability", "fsync")
    assert (other.returncode, other.stdout) == (4, b"")
    needs = cli("stream", "set", path, "--durability", "quorum")
    assert needs.returncode == 1
    assert needs.stderr.startswith(b"error: the class quorum needs a cluster"), needs
    assert b"hint: this server offers ephemeral" in needs.stderr
    assert cli("stream", "set", f"{path}/missing", "--durability", "disk").returncode == 3
    assert cli("stream", "set", path).returncode == 2
    for command in (["stream", "create"], ["stream", "set"], ["serve"]):
        text = cli.out(*command, "--help").decode()
        for name in ("ephemeral", "memory", "disk", "fsync", "quorum", "object"):
            assert f"\n    {name} " in text, (command, name)


def test_read_and_tail_tell_a_gap_on_stderr(
    server: Server,
    tmp_path: Path,
    path: str,
    started: Callable[[subprocess.Popen[bytes]], subprocess.Popen[bytes]],
) -> None:
    server.flags = ("--port", str(server.port))
    cli = Cli(server.url, tmp_path)
    cli.out("stream", "create", path, "--content-type", "json", "--durability", "ephemeral")
    cli.out("append", path, "1")
    tail = json.loads(cli.out("stream", "info", path, "--json"))["tail"]
    process = started(cli.start("tail", path, "--from", "-1"))
    assert line_of(process.stdout) == b"1\n"
    server.kill()
    assert line_of(process.stderr).startswith(b"warning: connection lost, resuming: ")
    server.restart()
    gap = line_of(process.stderr)
    assert gap.startswith(f"warning: records are missing between {tail} and ".encode()), gap
    assert gap.endswith(b" (reason: crash)\n")
    assert line_of(process.stderr) == b"warning: connection is back\n"
    cli.out("append", path, "2")
    assert line_of(process.stdout) == b"2\n"
    read = cli("read", path, "--from", tail)
    assert (read.returncode, read.stdout, read.stderr) == (0, b"2\n", gap)
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 130
    assert process.stderr is not None
    assert process.stderr.read() == b""
