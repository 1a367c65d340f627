"""`millstream verify` and `--repair` on real directories of real servers: what is broken is named, what is whole is kept."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.http import Api, Closed, Connection, Response, Truncated
from support.server import Server, ServerError, binary

DEADLINE_S = 60.0
SMALL = 12
RECORD = 40_000
VICTIM_TYPE = "text/x-of-the-victim"
# Small log files: they are copied for every test.
SETTINGS = {"append_max_bytes": "1MiB", "wal_file_bytes": "1MiB"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MILLSTREAM_")}
    return subprocess.run(
        [str(binary()), "verify", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def report(data_dir: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    done = run("--data-dir", str(data_dir), "--json", *arguments)
    assert done.returncode in (0, 1), done
    return done.returncode, json.loads(done.stdout)


def errors_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [finding for finding in found["findings"] if finding["severity"] == "error"]


def record(number: int) -> bytes:
    return bytes([65 + number]) * RECORD


class Filled:
    """A stopped server's directory with bytes in a segment, in a pack, and in the log alone."""

    def __init__(
        self, root: Path, content: dict[str, bytes], start_server: Callable[..., Server]
    ) -> None:
        self.root = root
        self.content = content
        self._start_server = start_server

    def start(self) -> Server:
        return self._start_server(data_dir=self.root, settings=SETTINGS)

    def file(self, pattern: str) -> Path:
        found = sorted(self.root.glob(pattern))
        assert found, pattern
        return found[0]

    def pack(self) -> Path:
        return next(
            path for path in self.root.glob("packs/*") if b"in the pack" in path.read_bytes()
        )

    def log_with(self, text: bytes) -> tuple[Path, int]:
        """The log file that has this text, and where."""
        for path in sorted(self.root.glob("wal/*.wal")):
            at = path.read_bytes().find(text)
            if at >= 0:
                return path, at
        raise AssertionError(f"no log file has {text!r}")

    def check_all_but(self, *damaged: str) -> tuple[Server, Api]:
        """Starts the server; every other stream must be whole."""
        server = self.start()
        api = Api(server)
        for path, content in self.content.items():
            if path not in damaged:
                assert api.read_all(path) == content, path
        return server, api


def flip(path: Path, byte: int) -> None:
    with path.open("r+b") as file:
        file.seek(byte)
        old = file.read(1)
        file.seek(byte)
        file.write(bytes([old[0] ^ 0x21]))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """Made once, copied for each test."""
    content: dict[str, bytes] = {}
    server = Server(tmp_path_factory.mktemp("template") / "data", settings=SETTINGS)
    api = Api(server)

    def append(path: str, data: bytes, content_type: str = "text/plain") -> None:
        assert api.put(path, content_type=content_type).status in (200, 201)
        assert api.post(path, data, content_type).status == 204
        content[path] = content.get(path, b"") + data

    try:
        server.stop()  # the control plane's own streams get a pack of their own
        server.restart()
        for number in range(SMALL):
            append(f"small/{number}", b"in the pack %d;" % number)
        for number in range(4):
            append("big", record(number))
        append("victim", b"of a catalog entry", VICTIM_TYPE)
        server.stop()  # writes a checkpoint
        server.restart()
        for number in range(SMALL):
            append(f"small/{number}", b"in the log %d;" % number)
    finally:
        server.kill()
    return server.data_dir, content


@pytest.fixture
def filled(
    template: tuple[Path, dict[str, bytes]],
    tmp_path: Path,
    start_server: Callable[..., Server],
) -> Filled:
    root = tmp_path / "copy"
    shutil.copytree(template[0], root)
    return Filled(root, dict(template[1]), start_server)


def test_a_whole_directory_is_whole(filled: Filled) -> None:
    code, found = report(filled.root)
    assert (code, found["whole"], found["errors"]) == (0, True, 0), found
    assert found["streams"] >= len(filled.content)  # and those of the control plane
    assert found["frames"] >= SMALL
    assert found["stream_bytes"] >= 4 * RECORD
    text = run("--data-dir", str(filled.root), "--progress")
    assert text.returncode == 0
    assert text.stdout.startswith("whole: ")
    assert "verifying: " in text.stderr
    assert "(100 %)" in text.stderr
    filled.check_all_but()


def test_verifying_changes_nothing(filled: Filled) -> None:
    flip(filled.file("segments/*/*.seg"), 1000)

    def files() -> dict[str, bytes]:
        paths = [path for path in filled.root.rglob("*") if path.is_file()]
        return {str(path): path.read_bytes() for path in paths}

    before = files()
    assert report(filled.root)[0] == 1
    assert files() == before


def test_what_cannot_be_looked_at_exits_2(server: Server, tmp_path: Path) -> None:
    locked = run("--data-dir", str(server.data_dir))
    assert locked.returncode == 2
    assert "in use" in locked.stderr
    assert "--url" in locked.stderr
    missing = run("--data-dir", str(tmp_path / "nowhere"))
    assert missing.returncode == 2
    assert not (tmp_path / "nowhere").exists()
    assert run("--data-dir", "x", "--url", server.url).returncode == 2
    assert run("--repair", "--url", server.url).returncode == 2


def test_a_directory_of_something_else_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("not a stream")
    code, found = report(tmp_path)
    assert code == 1
    assert found["beyond_repair"]
    assert errors_of(found)[0]["file"] == "format"


def test_a_torn_tail_is_no_error(filled: Filled) -> None:
    path, at = filled.log_with(b"in the log %d;" % (SMALL - 1))
    flip(path, at)  # the newest frame: nothing proves that it was synced
    code, found = report(filled.root)
    assert (code, errors_of(found)) == (0, [])
    filled.check_all_but(f"small/{SMALL - 1}")


def test_a_hole_in_the_log(filled: Filled) -> None:
    path, at = filled.log_with(b"in the log 5;")
    flip(path, at)
    with pytest.raises(ServerError, match=r"frame [0-9]+ is damaged"):
        filled.start()
    code, found = report(filled.root)
    error = errors_of(found)[0]
    assert (code, error["file"], error["stream"]) == (1, f"wal/{path.name}", "small/5")
    assert error["byte"] <= at

    code, found = report(filled.root, "--repair")
    assert (code, found["whole"]) == (0, True), found
    repair = found["repair"]
    assert repair["after"]["errors"] == 0
    assert (filled.root / repair["kept_in"] / "wal" / path.name).exists()
    assert any("frames" in given["what"] for given in repair["given_up"])
    server, api = filled.check_all_but("small/5")
    assert api.read_all("small/5") == b"in the pack 5;"
    assert api.post("small/5", b"goes on").status == 204
    server.stop()
    assert report(filled.root)[0] == 0


def test_appends_behind_a_hole_keep_their_place(start_server: Callable[..., Server]) -> None:
    server = start_server()
    api = Api(server)
    api.put("s")
    tails = [api.post("s", b"record %02d;" % number).offset for number in range(20)]
    server.kill()
    path = next(
        path for path in sorted(server.data_dir.glob("wal/*")) if b"record 07" in path.read_bytes()
    )
    flip(path, path.read_bytes().find(b"record 07"))
    code, found = report(server.data_dir, "--repair")
    assert (code, found["whole"]) == (0, True), found
    marked = [given for given in found["repair"]["given_up"] if given["stream"] == "s"]
    assert [given["what"].partition(":")[0] for given in marked] == ["bytes 70..80"]
    server.restart()
    behind = api.get("s", offset=tails[7])
    assert behind.body.startswith(b"record 08;record 09;")
    epoch, _, position = api.head("s").offset.partition("_")
    before_epoch, _, before_position = tails[-1].partition("_")
    assert position == before_position
    assert int(epoch) > int(before_epoch), "frames were lost: offsets must not be used again"


DAMAGES: dict[str, tuple[str, str, Callable[[Filled, Path], None]]] = {
    # name: which file, which stream is hurt, how
    "byte of a segment": ("segments/*/*.seg", "big", lambda _, path: flip(path, RECORD + 5)),
    "segment cut short": (
        "segments/*/*.seg",
        "big",
        lambda _, path: os.truncate(path, 3 * RECORD + 7),
    ),
    "segment missing": ("segments/*/*.seg", "big", lambda _, path: path.unlink()),
    "byte of an index": ("segments/*/*.idx", "big", lambda _, path: flip(path, 32 + 4)),
    "index missing": ("segments/*/*.idx", "big", lambda _, path: path.unlink()),
    "byte in a pack": (
        "packs/*.pack",
        "small/3",
        lambda filled, _: flip(filled.pack(), filled.pack().read_bytes().find(b"in the pack 3;")),
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_outside_the_log_stays_with_its_stream(filled: Filled, name: str) -> None:
    pattern, stream, damage = DAMAGES[name]
    path = filled.file(pattern)
    damage(filled, path)
    code, found = report(filled.root)
    hurt = errors_of(found)
    assert code == 1
    assert {error["stream"] for error in hurt} == {stream}, hurt
    assert all(error["file"].startswith(pattern.partition("*")[0]) for error in hurt)
    assert all(error["byte"] is not None for error in hurt)

    text = run("--data-dir", str(filled.root), "--repair")
    assert text.returncode == 0, text
    assert f"not recovered: stream {stream}: bytes " in text.stdout
    assert "repaired; the originals are in repair-" in text.stdout
    code, found = report(filled.root)
    assert code == 0
    notes = [note for note in found["findings"] if "known to be damaged" in note["what"]]
    assert [note["stream"] for note in notes] == [stream]
    filled.check_all_but(stream)


def file_with(root: Path, text: bytes) -> tuple[Path, int]:
    """Where a stream's bytes are, outside of the log."""
    for path in [*root.glob("packs/*.pack"), *root.glob("segments/*/*.seg")]:
        if (at := path.read_bytes().find(text)) >= 0:
            return path, at
    raise AssertionError(f"no file has {text!r}")


def test_a_server_starts_without_the_subscriptions_that_were_damaged(
    start_server: Callable[..., Server],
) -> None:
    server = start_server()
    api = Api(server)
    root = "/v1/stream/__ds/subscriptions/"

    def subscribe(name: str) -> int:
        config = {"type": "webhook", "pattern": "a/*", "webhook": {"url": "https://example.com/"}}
        headers = {"Content-Type": "application/json", "Host": f"127.0.0.1:{server.port}"}
        return api.call("PUT", root + name, headers, json.dumps(config).encode()).status

    for name in ("before", "in-the-damage", "behind"):
        assert subscribe(name) == 201
    keys = api.call("GET", "/v1/stream/__ds/jwks.json").json()
    server.stop()  # writes a checkpoint
    flip(*file_with(server.data_dir, b"in-the-damage"))
    done = run("--data-dir", str(server.data_dir), "--repair")
    assert done.returncode == 0, done
    assert "not recovered: stream __ds/state/subscriptions/" in done.stdout

    server.restart()
    assert [api.call("GET", root + name).status for name in ("before", "behind")] == [200, 200]
    assert api.call("GET", root + "in-the-damage").status == 404
    server.wait_for_log("subscriptions: stream __ds/state/subscriptions/")
    assert subscribe("in-the-damage") == 201  # is written, and with it a history without the gap
    server.stop()
    assert run("--data-dir", str(server.data_dir)).returncode == 0

    flip(*file_with(server.data_dir, b'"signing_seed"'))
    assert run("--data-dir", str(server.data_dir), "--repair").returncode == 0
    server.restart()
    server.wait_for_log("subscriptions: stream __ds/state/keys lacks")
    assert api.call("GET", "/v1/stream/__ds/jwks.json").json() != keys
    assert api.call("GET", root + "behind").status == 200


def test_a_missing_pack_hurts_whoever_was_in_it(filled: Filled) -> None:
    filled.pack().unlink()
    code, found = report(filled.root)
    hurt = {error["stream"] for error in errors_of(found)}
    assert code == 1
    assert hurt >= {f"small/{number}" for number in range(SMALL)}
    assert "big" not in hurt
    code, found = report(filled.root, "--repair")
    assert (code, found["whole"]) == (0, True), found
    filled.check_all_but(*hurt)


def test_an_entry_of_the_catalog_that_does_not_decode(filled: Filled) -> None:
    catalog = filled.root / "catalog.redb"
    content = catalog.read_bytes()
    at, places = -1, 0
    while (at := content.find(VICTIM_TYPE.encode(), at + 1)) >= 0:
        flip(catalog, at)
        places += 1
    assert places, "the entry was not found"
    code, found = report(filled.root)
    assert code == 1
    assert "victim" in {error["stream"] for error in errors_of(found)}, found
    code, found = report(filled.root, "--repair")
    assert (code, found["whole"]) == (0, True), found
    assert "victim" in {given["stream"] for given in found["repair"]["given_up"]}
    assert (filled.root / found["repair"]["kept_in"] / "catalog.redb").exists()
    _, api = filled.check_all_but("victim")
    assert api.get("victim").status == 404
    assert api.put("victim", b"begins again").status == 201


def test_a_catalog_that_cannot_be_opened(filled: Filled) -> None:
    catalog = filled.root / "catalog.redb"
    content = b"\xee" * 8192 + catalog.read_bytes()[8192:]
    catalog.write_bytes(content)
    code, found = report(filled.root, "--repair")
    assert code == 1
    assert found["beyond_repair"]
    assert found["repair"] is None
    assert any("restore a backup" in error["what"] for error in errors_of(found))
    assert catalog.read_bytes() == content
    assert not list(filled.root.glob("repair-*"))


def test_foreign_files_are_notes(filled: Filled) -> None:
    (filled.root / "wal" / "notes.txt").write_text("mine")
    (filled.root / "README").write_text("mine too")
    shutil.copy(filled.file("packs/*.pack"), filled.root / "packs" / "fffffff0.pack")
    code, found = report(filled.root)
    assert (code, found["errors"]) == (0, 0)
    assert {note["file"] for note in found["findings"]} == {
        "README",
        "packs/fffffff0.pack",
        "wal/notes.txt",
    }
    filled.check_all_but()


CLASSES = ("fsync", "disk", "memory", "ephemeral")


class Load:
    """Appends, forks, closes and deletes in one class until it is told to stop."""

    def __init__(self, api: Api, durability: str, stop: threading.Event) -> None:
        self.api = api
        self.durability = durability
        self.stop = stop
        self.faults: list[str] = []

    def run(self) -> None:
        with contextlib.suppress(Closed, Truncated, OSError), self.api.connect() as connection:
            for number in range(100_000):
                if self.stop.is_set() or self.faults:
                    return
                self.step(connection, number)

    def step(self, connection: Connection, number: int) -> None:
        path = f"load/{self.durability}/{number % 20}"
        typed = {"Content-Type": "text/plain"}
        wanted = {**typed, "Stream-Durability": self.durability}
        self.expect(connection.request("PUT", self.api.target(path), wanted, b""), 200, 201)
        body = b"x" * (3000 if number % 7 else 40_000)
        self.expect(connection.request("POST", self.api.target(path), typed, body), 204)
        if number % 5 == 0:
            fork = self.api.target(f"{path}/fork-{number % 3}")
            forked = {
                "Stream-Forked-From": self.api.target(path),
                "Stream-Durability": self.durability,
            }
            self.expect(connection.request("PUT", fork, forked, b""), 200, 201, 409)
            if number % 10 == 0:
                self.expect(connection.request("DELETE", fork, {}, None), 204, 404, 410)
        if number % 50 == 49:
            self.expect(connection.request("DELETE", self.api.target(path), {}, None), 204)
            # Its forks keep the path: the next round needs them gone.
            for fork_number in range(3):
                fork = self.api.target(f"{path}/fork-{fork_number}")
                self.expect(connection.request("DELETE", fork, {}, None), 204, 404, 410)

    def expect(self, answer: Response, *statuses: int) -> None:
        # A weak append does not wait for a log that cannot keep up: it is told so.
        busy = answer.status == 503 and answer.code == "server_busy"
        if answer.status not in statuses and not (busy and self.durability != "fsync"):
            self.faults.append(f"{answer.status} {answer.text[:300]}")


def test_a_running_server_verifies_itself_under_load(start_server: Callable[..., Server]) -> None:
    server = start_server(settings={"checkpoint_bytes": "1MiB"})
    api = Api(server)
    stop = threading.Event()
    loads = [Load(api, durability, stop) for durability in CLASSES]
    writers = [threading.Thread(target=load.run) for load in loads]
    for writer in writers:
        writer.start()
    try:
        until_checkpoints(api, 2)
        for _ in range(5):
            done = run("--url", server.url, "--json")
            found = json.loads(done.stdout)
            assert (done.returncode, errors_of(found)) == (0, []), done
            assert found["frames"] > 0
        until_checkpoints(api, 4)
        server.kill()
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    code, found = report(server.data_dir)
    assert (code, errors_of(found)) == (0, []), "after kill -9"
    server.restart().stop()
    code, found = report(server.data_dir)
    assert (code, errors_of(found)) == (0, []), "after a clean stop"
    assert [load.faults for load in loads] == [[]] * len(loads)


def until_checkpoints(api: Api, count: int) -> None:
    """The load itself makes them; every look is a request."""
    for _ in range(20_000):
        if api.metric("millstream_checkpoints_total") >= count:
            return
    raise AssertionError(f"{count} checkpoints never came")


def test_a_running_server_finds_damage(filled: Filled) -> None:
    server = filled.start()
    flip(filled.file("segments/*/*.seg"), 2 * RECORD + 1)
    done = run("--url", server.url)
    assert done.returncode == 1
    assert f"at byte {2 * RECORD} (stream big): bytes {2 * RECORD}..{3 * RECORD}" in done.stdout
    assert "--repair" in done.stdout


def test_the_control_plane_runs_one_at_a_time(filled: Filled) -> None:
    api = Api(filled.start())
    idle = json.loads(api.call("GET", "/-/api/verify").body)
    assert (idle["state"], idle["report"]) == ("idle", None)
    started = [api.call("POST", "/-/api/verify") for _ in range(8)]
    statuses = [answer.status for answer in started]
    assert statuses[0] == 202
    assert set(statuses) <= {202, 409}
    refused = [json.loads(answer.body) for answer in started if answer.status == 409]
    assert all(problem["code"] == "verify_running" for problem in refused)
    ended = json.loads(api.call("GET", "/-/api/verify?wait_ms=20000").body)
    assert ended["state"] == "done", ended
    assert ended["bytes_done"] == ended["bytes_total"] > 0
    assert ended["report"]["errors"] == 0
    assert api.call("GET", "/-/api/verify?wait_ms=soon").status == 400
    assert api.call("DELETE", "/-/api/verify").status == 200


def test_help_teaches() -> None:
    text = run("--help").stdout
    for word in ("--repair", "--url", "--data-dir", "repair-<time>/", "corruption", "Exit codes"):
        assert word in text
