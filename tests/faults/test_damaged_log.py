"""Damage in the log and the catalog: what was synced is never given up in silence.

A bad byte below the synced mark stops the start, names file and byte, and changes nothing on disk,
however often it is tried. A torn tail behind everything that was acknowledged is cut without a word lost.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.disk import Batch, batches_of, flip, log_batches, log_files, refusal, snapshot
from support.http import Api
from support.server import Server

PARTS = 40


def written(server: Server) -> bytes:
    """Many small group commits, each acknowledged before the next; then the server is killed."""
    api = Api(server)
    assert api.put("s").status == 201
    with api.connect() as connection:
        for number in range(PARTS):
            body = f"part {number}\n".encode()
            answer = connection.request(
                "POST", Api.target("s"), {"Content-Type": "text/plain"}, body
            )
            assert answer.status == 204
    server.kill()
    return b"".join(f"part {number}\n".encode() for number in range(PARTS))


def batch_with(data_dir: Path, text: bytes) -> Batch:
    for batch in log_batches(data_dir):
        if text in batch.file.read_bytes()[batch.position : batch.end]:
            return batch
    raise AssertionError(f"{text!r} is nowhere in the log")


def check_refused(data_dir: Path, name: str, lowest: int, highest: int) -> None:
    """Three starts, three times the same refusal, and not one byte changed."""
    before = snapshot(data_dir)
    for _ in range(3):
        said = refusal(data_dir)
        assert "log_damaged" in said, said
        assert name in said, said
        found = re.search(r"byte (\d+)", said)
        assert found, said
        assert lowest <= int(found[1]) <= highest, said
        assert snapshot(data_dir) == before


@pytest.mark.parametrize("where", ["batch header", "frame header", "payload", "last byte"])
def test_damage_in_the_middle_stops_the_start(server: Server, where: str) -> None:
    whole = written(server)
    target = batch_with(server.data_dir, b"part 20\n")
    data = target.file.read_bytes()
    at = {
        "batch header": target.position + 41,
        "frame header": target.position + 64 + 17,
        "payload": data.index(b"part 20\n"),
        "last byte": target.end - 1,
    }[where]
    flip(target.file, at)
    check_refused(server.data_dir, target.file.name, target.position, target.end)
    # Undamaged again it starts, and nothing is missing: the refusals have cost nothing.
    flip(target.file, at)
    server.restart()
    assert Api(server).read_all("s") == whole


def test_zeros_in_the_middle_stop_the_start(server: Server) -> None:
    """A page that never reached the disk although later ones did, and were proven synced."""
    written(server)
    target = batch_with(server.data_dir, b"part 12\n")
    with target.file.open("r+b") as handle:
        handle.seek(target.position)
        handle.write(bytes(target.end - target.position))
    check_refused(server.data_dir, target.file.name, target.position, target.end)


@pytest.mark.parametrize("torn", ["garbage", "half a batch", "zeros, then a batch", "short file"])
def test_a_torn_tail_is_cut_and_nothing_acknowledged_is_lost(server: Server, torn: str) -> None:
    whole = written(server)
    last = log_batches(server.data_dir)[-1]
    data = last.file.read_bytes()
    batch = data[last.position : last.end]
    with last.file.open("r+b") as handle:
        handle.seek(last.end)
        if torn == "garbage":
            handle.write(os.urandom(5000))
        elif torn == "half a batch":
            handle.write(batch[: len(batch) - 3])
        elif torn == "zeros, then a batch":
            handle.write(bytes(512) + batch)
        else:
            handle.truncate(last.end)
    server.restart()
    api = Api(server)
    assert api.read_all("s") == whole
    assert api.post("s", b"more").status == 204
    server.crash_and_restart()
    assert api.read_all("s") == whole + b"more"


def log_of_several_files(start_server: Callable[..., Server]) -> tuple[Server, bytes, list[Path]]:
    server = start_server(
        settings={
            "wal_file_bytes": "10MiB",
            "append_max_bytes": "1MiB",
            "checkpoint_bytes": "1GiB",
        }
    )
    api = Api(server)
    api.put("s")
    parts = [bytes([65 + number % 26]) * 1_000_000 for number in range(30)]
    with api.connect() as connection:
        for part in parts:
            answer = connection.request(
                "POST", Api.target("s"), {"Content-Type": "text/plain"}, part
            )
            assert answer.status == 204
    server.kill()
    used = [file for file in log_files(server.data_dir) if batches_of(file)]
    assert len(used) >= 4, used
    return server, b"".join(parts), used


@pytest.mark.parametrize("which", ["first", "middle"])
def test_a_missing_log_file_stops_the_start(
    start_server: Callable[..., Server], tmp_path: Path, which: str
) -> None:
    server, whole, used = log_of_several_files(start_server)
    missing = used[0] if which == "first" else used[2]
    shutil.move(missing, tmp_path / missing.name)
    before = snapshot(server.data_dir)
    said = refusal(server.data_dir)
    assert "log_damaged" in said, said
    assert re.search(r"[0-9a-f]{16}\.wal", said), said
    assert snapshot(server.data_dir) == before
    # The file comes back, and with it everything.
    shutil.move(tmp_path / missing.name, missing)
    server.restart()
    assert Api(server).read_all("s") == whole


@pytest.mark.parametrize("how", ["empty", "removed"])
def test_a_log_folder_that_is_not_there_stops_the_start(
    server: Server, tmp_path: Path, how: str
) -> None:
    """A device that was not mounted must not read as an empty server."""
    whole = written(server)
    aside = tmp_path / "aside"
    shutil.move(server.data_dir / "wal", aside)
    if how == "empty":
        (server.data_dir / "wal").mkdir()
    before = snapshot(server.data_dir)
    assert "log_missing" in refusal(server.data_dir)
    assert snapshot(server.data_dir) == before
    if how == "empty":
        (server.data_dir / "wal").rmdir()
    shutil.move(aside, server.data_dir / "wal")
    server.restart()
    assert Api(server).read_all("s") == whole


def test_a_missing_catalog_stops_the_start(server: Server, tmp_path: Path) -> None:
    whole = written(server)
    shutil.move(server.data_dir / "catalog.redb", tmp_path / "aside")
    before = snapshot(server.data_dir)
    said = refusal(server.data_dir)
    assert "catalog_missing" in said
    assert "catalog.redb" in said
    assert snapshot(server.data_dir) == before
    shutil.move(tmp_path / "aside", server.data_dir / "catalog.redb")
    server.restart()
    assert Api(server).read_all("s") == whole


@pytest.mark.parametrize("damage", ["garbage", "empty", "cut"])
def test_a_damaged_catalog_stops_the_start(server: Server, damage: str) -> None:
    whole = written(server)
    catalog = server.data_dir / "catalog.redb"
    good, log = catalog.read_bytes(), log_files(server.data_dir)
    bad = {"garbage": b"\xa5" * len(good), "empty": b"", "cut": good[: len(good) // 2]}[damage]
    catalog.write_bytes(bad)
    for _ in range(3):
        said = refusal(server.data_dir)
        assert "catalog_damaged" in said, said
        assert log_files(server.data_dir) == log
    catalog.write_bytes(good)
    server.restart()
    assert Api(server).read_all("s") == whole
