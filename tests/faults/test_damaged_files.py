"""Damage outside the log: it isolates its stream, and the others are served.

A segment or pack that is gone, too short or unreadable is an error (or a reported gap) for the range it
held. It is never a short body that looks whole, never other bytes, and never the end of the server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from support.disk import refusal, without_root_override
from support.http import Api, Closed, Timeout, Truncated
from support.server import Server

LARGE_BYTES = 300_000
SMALL = 5


def content(name: str, size: int) -> bytes:
    line = f"{name} ".encode()
    return (line * (size // len(line) + 1))[:size]


def stored(start_server: Callable[..., Server]) -> Server:
    """Two streams with a segment each and several in a pack, all of it out of the log; stopped."""
    server = start_server(settings={"checkpoint_bytes": "64KiB"}, before_exec=without_root_override)
    api = Api(server)
    for name in ("one", "two"):
        assert api.put(name, content(name, LARGE_BYTES)).status == 201
    # The server's own small streams leave the log first, into a pack of their own.
    checkpoint(api)
    for number in range(SMALL):
        assert api.put(f"small/{number}", content(f"small{number}", 2000)).status == 201
    checkpoint(api)
    server.stop()
    return server


def checkpoint(api: Api) -> None:
    """Twice: one that was under way may have missed what was written before."""
    for _ in range(2):
        before = api.metric("millstream_checkpoints_total")
        assert api.put(f"push/{before}", content("push", LARGE_BYTES)).status == 201
        while api.metric("millstream_checkpoints_total") == before:
            threading.Event().wait(0.01)


def files_with(data_dir: Path, text: bytes) -> list[Path]:
    """The files outside the log that hold these bytes."""
    found = [
        file
        for file in sorted(data_dir.rglob("*"))
        if file.is_file() and file.parent.name != "wal" and text in file.read_bytes()
    ]
    assert found, f"{text!r} is in no file"
    return found


def outcome(api: Api, name: str, size: int) -> str:
    """How reading a damaged stream ends; bytes that are not the stream's own are a failure."""
    whole = content(name.replace("/", ""), size)
    try:
        answer = api.get(name)
    except (Closed, Truncated, Timeout):
        return "cut off"
    if answer.status == 200:
        assert answer.get("stream-gap") is not None or answer.body == whole, "wrong bytes as whole"
        return "gap" if answer.get("stream-gap") else "whole"
    assert answer.status == 500, answer
    assert answer.code == "internal"
    return "error"


def damage(file: Path, how: str) -> None:
    if how == "removed":
        file.unlink()
    elif how == "emptied":
        file.write_bytes(b"")
    elif how == "shortened":
        with file.open("r+b") as handle:
            handle.truncate(file.stat().st_size // 2)
    else:
        file.chmod(0o000)


@pytest.mark.parametrize("how", ["removed", "emptied", "shortened", "unreadable"])
def test_a_damaged_segment_costs_only_its_stream(
    start_server: Callable[..., Server], how: str
) -> None:
    server = stored(start_server)
    for file in files_with(server.data_dir, b"one one one"):
        damage(file, how)
    for turn in range(2):
        server.restart()
        api = Api(server)
        # Who may not open a file says so; a file that lacks its bytes is damage.
        assert outcome(api, "one", LARGE_BYTES) == ("error" if how == "unreadable" else "gap")
        # The second time it may be known from the first, if that lived long enough for a checkpoint.
        found = api.metric("millstream_read_errors_total") > 0
        assert found or how == "shortened" or turn == 1
        # The others are whole, the damaged one still has its name and takes new data.
        assert outcome(api, "two", LARGE_BYTES) == "whole"
        for number in range(SMALL):
            assert outcome(api, f"small/{number}", 2000) == "whole"
        assert api.head("one").status == 200
        tail = api.head("one").offset
        assert api.post("one", b"new").status == 204
        assert api.get("one", offset=tail).body == b"new"
        assert api.call("GET", "/-/health").status == 200
        server.kill()
    # It can be deleted and made again.
    server.restart()
    assert api.delete("one").status == 204
    assert api.put("one", b"fresh").status == 201
    assert api.get("one").body == b"fresh"


@pytest.mark.parametrize("how", ["removed", "emptied", "unreadable"])
def test_a_damaged_pack_costs_only_the_streams_in_it(
    start_server: Callable[..., Server], how: str
) -> None:
    server = stored(start_server)
    for file in files_with(server.data_dir, b"small3 small3"):
        damage(file, how)
    server.restart()
    api = Api(server)
    assert outcome(api, "small/3", 2000) == ("error" if how == "unreadable" else "gap")
    for name in ("one", "two"):
        assert outcome(api, name, LARGE_BYTES) == "whole"
    assert api.post("one", b"new").status == 204
    assert api.put("after", b"x").status == 201


def test_subscriptions_that_cannot_be_read_stop_the_start(
    start_server: Callable[..., Server],
) -> None:
    """They would be lost in silence otherwise; the data itself is not touched."""
    server = stored(start_server)
    packs = server.data_dir / "packs"
    packs.rename(server.data_dir / "aside")
    packs.mkdir()
    said = refusal(server.data_dir)
    assert "control plane did not load" in said
    assert "(control)" in said
    packs.rename(server.data_dir / "empty")
    (server.data_dir / "aside").rename(packs)
    server.restart()
    for number in range(SMALL):
        assert outcome(Api(server), f"small/{number}", 2000) == "whole"
