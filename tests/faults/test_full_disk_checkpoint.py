"""A checkpoint that finds no space: it is given up whole, tried again, and nobody has to restart the server.

A checkpoint writes the bytes, and for every changed stream an entry of the catalog with its producers; both
cases here need many times more for the entries than for the bytes. The disk becomes full before the checkpoint
begins, or while it is under way, by a file of somebody else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from support.classes import as_class, change
from support.disk import fill, mounted
from support.http import Api, Response, producer, request_bytes
from support.server import Server

MIB = 1 << 20
SETTINGS = {
    "wal_file_bytes": "10MiB",
    "append_max_bytes": "64KiB",
    "checkpoint_bytes": "1GiB",
    "long_poll_timeout_ms": 500,
}
DEADLINE_S = 60.0
TEXT = {"Content-Type": "text/plain"}
STREAMS = 20_000
PRODUCERS, STREAMS_OF_PRODUCERS = 5_000, 16
TOGETHER = 500


# Asked for before the server, so that it is unmounted after it.
@pytest.fixture(params=["ext4", "tmpfs"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "small", 120 * MIB, request.param) as root:
        yield root


def send_all(api: Api, requests: list[bytes], status: int) -> None:
    with api.connect() as connection:
        for begin in range(0, len(requests), TOGETHER):
            part = requests[begin : begin + TOGETHER]
            connection.send(b"".join(part))
            for _ in part:
                answer = connection.read_response()
                assert answer.status == status, answer


def make_many_streams(api: Api, prefix: str) -> None:
    paths = (Api.target(f"{prefix}/{number:05}") for number in range(STREAMS))
    send_all(api, [request_bytes("PUT", path, TEXT, b"one") for path in paths], 201)


def make_many_producers(api: Api, prefix: str) -> None:
    for number in range(STREAMS_OF_PRODUCERS):
        path = f"{prefix}/{number:05}"
        assert api.put(path).status == 201
        appends = (
            request_bytes("POST", Api.target(path), {**TEXT, **producer(f"{name:064}", 0, 0)}, b"x")
            for name in range(PRODUCERS)
        )
        send_all(api, list(appends), 200)


def check_streams(api: Api, prefix: str) -> None:
    """Every stream with its record."""
    for number in range(0, STREAMS, 7):
        found = api.get(f"{prefix}/{number:05}")
        assert (found.status, found.body) == (200, b"one"), (number, found)


def check_producers(api: Api, prefix: str) -> None:
    """Every record once, and every producer known: what it sends again is a duplicate."""
    for number in range(STREAMS_OF_PRODUCERS):
        path = f"{prefix}/{number:05}"
        for name in range(0, PRODUCERS, 251):
            again = api.post(path, b"x", headers=producer(f"{name:064}", 0, 0))
            assert again.status == 204, again
        assert api.read_all(path) == b"x" * PRODUCERS


WORK: dict[str, tuple[Callable[[Api, str], None], Callable[[Api, str], None]]] = {
    "streams": (make_many_streams, check_streams),
    "producers": (make_many_producers, check_producers),
}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.005)


def append_when_possible(api: Api, path: str, body: bytes) -> None:
    """Refused only for the space until it is noticed: never as a log that has failed."""

    def appended() -> bool:
        answer: Response = api.post(path, body)
        assert answer.status == 204 or answer.code == "storage_full", answer
        return answer.status == 204

    wait_until(appended, "writes did not come back with the space")


def check_recovery(
    api: Api, server: Server, fillers: list[Path], prefixes: list[str], kind: str
) -> None:
    """From a disk that is full in the middle of a checkpoint to a restart after kill -9."""
    _, check = WORK[kind]
    kept = api.read_all("probe")
    assert kept.rstrip(b"!") == b"before"
    check_streams_are_listed(api)
    for filler in fillers:
        filler.unlink()
    append_when_possible(api, "probe", b"after")
    wait_until(
        lambda: api.metric("millstream_checkpoints_total") > 0,
        "the checkpoint was not tried again",
    )
    api.wait_for_metric("millstream_storage_full", 0)
    for prefix in prefixes:
        check(api, prefix)
    server.crash_and_restart()
    for prefix in prefixes:
        check(api, prefix)
    assert api.read_all("probe") == kept + b"after"


def check_streams_are_listed(api: Api) -> None:
    listed = api.call("GET", "/-/api/streams?limit=100")
    assert listed.status == 200, listed


def fill_until_refused(api: Api, small: Path) -> list[Path]:
    """Takes the space again and again: a checkpoint that is still through gives log files back."""
    fillers: list[Path] = []

    def refused() -> bool:
        fillers.append(fill(small, leave_bytes=5 * MIB).rename(small / f"filler-{len(fillers)}"))
        answer = api.post("probe", b"!")
        assert answer.status == 204 or answer.code == "storage_full", answer
        return answer.status == 507

    wait_until(refused, "appends are never refused")
    return fillers


@pytest.mark.parametrize("kind", WORK)
def test_a_checkpoint_without_space_for_the_catalog_is_put_off(
    small: Path, start_server: Callable[..., Server], kind: str
) -> None:
    server = start_server(data_dir=small / "data", settings=SETTINGS)
    api = Api(server, deadline_s=20.0)
    assert api.put("probe", b"before").status == 201
    make, _ = WORK[kind]
    make(api, "a")
    fillers = fill_until_refused(api, small)
    check_recovery(api, server, fillers, ["a"], kind)


def test_a_change_of_class_does_not_wait_for_space(
    small: Path, start_server: Callable[..., Server]
) -> None:
    """What it needs is a checkpoint, and that finds no space: it is refused, and a stop has nothing to wait for."""
    server = start_server(data_dir=small / "data", settings=SETTINGS)
    api = Api(server, deadline_s=10.0)
    assert api.put("probe", b"before").status == 201
    assert api.put("memory", b"x", headers=as_class("ephemeral")).status == 201
    fill(small, leave_bytes=0)
    for path, name in (("memory", "fsync"), ("probe", "ephemeral")):
        refused = change(api, path, name)
        assert (refused.status, refused.code) == (507, "storage_full")
    assert api.read_all("memory") == b"x"
    server.stop()


def squeeze(api: Api, small: Path, make: Callable[[], None]) -> Path | None:
    """Fills the disk as soon as a checkpoint has begun; `None` if that was through before."""
    packs = small / "data" / "packs"
    before, done = set(packs.glob("*.pack")), api.metric("millstream_checkpoints_total")
    make()
    wait_until(lambda: set(packs.glob("*.pack")) > before, "no checkpoint began")
    filler = fill(small, leave_bytes=0)
    wait_until(
        lambda: (
            api.metric("millstream_checkpoint_failures_total") > 0
            or api.metric("millstream_checkpoints_total") > done
        ),
        "the checkpoint did not end",
    )
    if api.metric("millstream_checkpoint_failures_total") > 0:
        return filler
    filler.unlink()
    api.wait_for_metric("millstream_storage_full", 0)
    return None


def test_a_checkpoint_that_meets_a_full_disk_is_taken_back_and_tried_again(
    small: Path, start_server: Callable[..., Server]
) -> None:
    """Somebody takes all the space while the checkpoint is writing, after it had looked."""
    server = start_server(data_dir=small / "data", settings=SETTINGS)
    api = Api(server, deadline_s=20.0)
    assert api.put("probe", b"before").status == 201
    # So that what is left is taken in no time.
    half = fill(small, leave_bytes=64 * MIB).rename(small / "half")
    prefixes: list[str] = []
    filler = None
    while filler is None:
        assert len(prefixes) < 3, "every checkpoint was through before the disk was full"
        prefixes.append(f"round-{len(prefixes)}")
        filler = squeeze(api, small, partial(make_many_streams, api, prefixes[-1]))
    check_recovery(api, server, [filler, half], prefixes, "streams")
