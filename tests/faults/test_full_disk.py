"""A full disk, on a small file system of its own.

Appends and creates are refused with 507 before anything is lost; reads, closes and deletes go on; writes
come back by themselves with the space; what was acknowledged survives kill -9 in the full state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.disk import fill, free_bytes, mounted, refusal
from support.http import Api
from support.server import Server

MIB = 1 << 20
SETTINGS = {
    "wal_file_bytes": "10MiB",
    "append_max_bytes": "64KiB",
    "checkpoint_bytes": "8MiB",
    "long_poll_timeout_ms": 500,
}
RECORD_BYTES = 50_000


# Asked for before the server, so that it is unmounted after it.
@pytest.fixture(params=["ext4", "tmpfs"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", 100 * MIB, request.param) as root:
        yield root


def record(number: int) -> bytes:
    return f"{number:08}".encode() + b"." * (RECORD_BYTES - 9) + b"\n"


def append_until_full(api: Api, path: str, first: int = 0, *, weak: bool = False) -> int:
    """Appends numbered records until one is refused; the number that was refused.

    A smaller one may still fit: the bound is the room that is left in the present log file.
    """
    number, until = first, time.monotonic() + 60
    with api.connect() as connection:
        while time.monotonic() < until:
            answer = connection.request(
                "POST", Api.target(path), {"Content-Type": "text/plain"}, record(number)
            )
            if answer.status == 204:
                number += 1
            elif answer.status == 503 and weak:
                # A weak append does not wait for the next log file; it is told to come again.
                assert answer.code == "server_busy", answer
                time.sleep(0.01)
            else:
                assert (answer.status, answer.code) == (507, "storage_full"), answer
                return number
    raise AssertionError("the disk never got full")


def expected(count: int) -> bytes:
    return b"".join(record(number) for number in range(count))


def append_when_possible(api: Api, path: str, number: int, deadline_s: float = 20.0) -> None:
    """The client's part of recovering: trying again until the space is noticed."""
    until = time.monotonic() + deadline_s
    while True:
        answer = api.post(path, record(number))
        if answer.status == 204:
            return
        assert answer.code in ("storage_full", "server_busy"), answer
        assert time.monotonic() < until, "writes did not come back with the space"
        time.sleep(0.05)


def test_full_disk_refuses_before_losing_and_recovers_by_itself(
    small: Path, start_server: Callable[..., Server]
) -> None:
    server = start_server(data_dir=small / "data", settings=SETTINGS)
    api = Api(server)
    for name in ("full", "to-close", "to-delete", "spare"):
        assert api.put(name).status == 201
    assert api.post("to-close", b"kept").status == 204
    filler = fill(small, leave_bytes=16 * MIB)

    count = append_until_full(api, "full")
    assert count > 0
    assert api.metric("millstream_storage_full") == 1
    assert (api.put("new", record(0)).status, api.get("new").status) == (507, 404)

    # Reading goes on, and every byte that was acknowledged is there; what was refused is not.
    assert api.read_all("full") == expected(count)
    assert api.get("to-close", live="long-poll", offset="-1").body == b"kept"
    assert api.call("GET", "/-/ready").status == 200
    # So do close and delete: they free space or need none.
    assert api.close_stream("to-close").status == 204
    assert api.delete("to-delete").status == 204

    filler.unlink()
    append_when_possible(api, "full", count)
    api.wait_for_metric("millstream_storage_full", 0)
    assert api.put("new").status == 201
    server.crash_and_restart()
    assert api.read_all("full") == expected(count + 1)
    assert (api.head("to-close")["stream-closed"], api.get("to-delete").status) == ("true", 404)


def test_kill_9_in_the_full_state_loses_nothing(
    small: Path, start_server: Callable[..., Server]
) -> None:
    server = start_server(data_dir=small / "data", settings=SETTINGS)
    api = Api(server)
    api.put("full")
    api.put("gone")
    filler = fill(small, leave_bytes=16 * MIB)
    count = append_until_full(api, "full")
    assert api.delete("gone").status == 204
    server.kill()

    # Not one more block: the server says so and touches nothing.
    fill_more = fill(small, leave_bytes=0) if free_bytes(small) > 0 else filler
    said = refusal(server.data_dir)
    assert "No space left" in said, said

    fill_more.unlink(missing_ok=True)
    filler.unlink(missing_ok=True)
    server.restart()
    assert api.read_all("full") == expected(count)
    assert api.get("gone").status == 404
    append_when_possible(api, "full", count)
    assert api.read_all("full") == expected(count + 1)


@pytest.mark.parametrize("weak", ["memory", "disk"])
def test_a_full_disk_is_full_for_every_class_that_uses_it(
    small: Path, start_server: Callable[..., Server], weak: str
) -> None:
    server = start_server(data_dir=small / "data", settings=SETTINGS)
    api = Api(server)
    for name in (weak, "fsync", "ephemeral"):
        assert api.put(name, headers={"Stream-Durability": name}).status == 201
    filler = fill(small, leave_bytes=16 * MIB)
    count = append_until_full(api, weak, weak=True)
    assert api.post("fsync", record(0)).status == 507
    # Ephemeral appends need no log, so there is nothing to refuse them for.
    assert api.post("ephemeral", record(0)).status == 204
    assert api.read_all("ephemeral") == record(0)
    # A fork needs them to last, and there may be no room for that: it is told so, and does not wait for it.
    fork = api.put("fork", headers={"Stream-Forked-From": "ephemeral"})
    assert fork.status == 201 or (fork.status, fork.code) == (507, "storage_full")
    assert api.read_all(weak) == expected(count)
    filler.unlink()
    append_when_possible(api, weak, count)
    assert api.read_all(weak) == expected(count + 1)
