"""Data directories that are not what a server expects: each is refused in words, and left alone."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.disk import log_files, mounted, refusal, snapshot, without_root_override
from support.http import Api
from support.server import Server


def server_with_everything(start_server: Callable[..., Server]) -> Server:
    """A directory with log, catalog, a segment and a pack in it."""
    server = start_server(settings={"checkpoint_bytes": "64KiB"})
    api = Api(server)
    api.put("large", b"L" * 300_000)
    for number in range(5):
        api.put(f"small/{number}", b"s" * 100)
    api.post("large", b"L" * 300_000)
    until_checkpoint(api)
    return server


def until_checkpoint(api: Api) -> None:
    before = api.metric("millstream_checkpoints_total")
    api.post("large", b"L" * 300_000)
    while api.metric("millstream_checkpoints_total") == before:
        threading.Event().wait(0.02)


def check_everything(api: Api) -> None:
    assert api.read_all("large") == b"L" * len(api.read_all("large"))
    for number in range(5):
        assert api.get(f"small/{number}").body == b"s" * 100


def test_foreign_files_are_ignored_and_kept(start_server: Callable[..., Server]) -> None:
    server = server_with_everything(start_server)
    server.stop()
    present = {entry.name for entry in server.data_dir.iterdir() if entry.is_dir()}
    assert present >= {"wal"}, present
    foreign = []
    for folder in sorted({"", *present}):
        for name in (
            "notes.txt",
            ".hidden",
            "0000.wal",
            "x.seg",
            "catalog.redb.bak",
            "\udcff\udcfe",
        ):
            file = server.data_dir / folder / name
            file.write_bytes(f"mine: {folder}".encode())
            foreign.append(file)
        inner = server.data_dir / folder / "mine"
        inner.mkdir()
        (inner / "deep").write_bytes(b"deep")
        foreign.append(inner / "deep")
    for ending in (server.stop, server.kill):
        server.restart()
        api = Api(server)
        check_everything(api)
        until_checkpoint(api)
        ending()
        for file in foreign:
            assert file.read_bytes().startswith((b"mine: ", b"deep")), file
    server.restart()
    check_everything(Api(server))


@pytest.mark.parametrize("text", ["millstream 2\n", "millstream 99 future\n", "", "other\n"])
def test_a_directory_of_another_format_is_refused(server: Server, text: str) -> None:
    Api(server).put("s", b"kept")
    server.stop()
    mark = server.data_dir / "format"
    ours = mark.read_text()
    mark.write_text(text)
    before = snapshot(server.data_dir)
    said = refusal(server.data_dir)
    assert "format_unknown" in said
    assert repr(text.strip())[1:-1] in said
    assert "another version" in said
    assert snapshot(server.data_dir) == before
    mark.write_text(ours)
    server.restart()
    assert Api(server).get("s").body == b"kept"


def test_a_directory_without_its_format_mark_is_refused(server: Server) -> None:
    Api(server).put("s", b"kept")
    server.stop()
    mark = server.data_dir / "format"
    ours = mark.read_text()
    mark.unlink()
    before = snapshot(server.data_dir)
    assert "format_missing" in refusal(server.data_dir)
    assert snapshot(server.data_dir) == before
    mark.write_text(ours)
    server.restart()
    assert Api(server).get("s").body == b"kept"


@pytest.mark.parametrize("where", ["itself", "parent"])
def test_a_data_directory_that_is_a_file(tmp_path: Path, where: str) -> None:
    file = tmp_path / "file"
    file.write_text("not a directory")
    named = file if where == "itself" else file / "data"
    said = refusal(named)
    assert str(named) in said
    assert "io_error" in said
    assert file.read_text() == "not a directory"


@pytest.fixture
def obedient(start_server: Callable[..., Server]) -> Callable[..., Server]:
    """Servers for which file modes hold, also when the tests run as root."""

    def start(**options: object) -> Server:
        return start_server(before_exec=without_root_override, **options)

    return start


@pytest.mark.parametrize("what", ["directory", "wal", "log file", "catalog.redb", "format", "lock"])
def test_permission_denied_is_refused_with_the_name(
    obedient: Callable[..., Server], what: str
) -> None:
    server = obedient()
    Api(server).put("s", b"kept")
    server.stop()
    root = server.data_dir
    target = {"directory": root, "log file": log_files(root)[-1]}.get(what, root / what)
    mode = target.stat().st_mode
    target.chmod(0o000)
    try:
        said = refusal(root, obey_modes=True)
    finally:
        target.chmod(mode)
    assert "ermission denied" in said, said
    assert "io_error" in said, "a file that may not be read is not a damaged one"
    assert target.name in said or "log directory" in said or "format file" in said, said
    server.restart()
    assert Api(server).get("s").body == b"kept"


def test_a_directory_that_may_only_be_read(obedient: Callable[..., Server]) -> None:
    server = obedient()
    Api(server).put("s", b"kept")
    server.stop()
    (server.data_dir / "wal").chmod(0o555)
    try:
        assert "ermission denied" in refusal(server.data_dir, obey_modes=True)
    finally:
        (server.data_dir / "wal").chmod(0o755)
    server.restart()
    assert Api(server).get("s").body == b"kept"


@pytest.fixture
def file_system(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "mount", 120 << 20) as root:
        yield root


def remount(root: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", root], check=True, capture_output=True)


def test_a_read_only_file_system_is_refused(
    file_system: Path, start_server: Callable[..., Server]
) -> None:
    server = start_server(data_dir=file_system / "data")
    Api(server).put("s", b"kept")
    server.stop()
    remount(file_system, "ro")
    said = refusal(server.data_dir)
    assert "Read-only file system" in said, said
    remount(file_system, "rw")
    server.restart()
    assert Api(server).get("s").body == b"kept"


def test_the_second_server_leaves_the_first_unharmed_under_load(server: Server, api: Api) -> None:
    api.put("s")
    stop = threading.Event()
    acknowledged: list[bytes] = []

    def write() -> None:
        with api.connect() as connection:
            while not stop.is_set():
                body = b"%06d\n" % len(acknowledged)
                headers = {"Content-Type": "text/plain"}
                assert connection.request("POST", Api.target("s"), headers, body).status == 204
                acknowledged.append(body)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3):
            before = len(acknowledged)
            said = refusal(server.data_dir)
            assert "directory_locked" in said
            assert str(os.fspath(server.data_dir)) in said
            assert len(acknowledged) > before
    finally:
        stop.set()
        writer.join(10)
    assert not writer.is_alive()
    server.crash_and_restart()
    assert api.read_all("s") == b"".join(acknowledged)
