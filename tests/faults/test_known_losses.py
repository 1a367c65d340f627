"""How other servers have lost data, as tests. Numbers and letters are those of docs/operating/failures.md."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from support.disk import flip, log_files, without_root_override
from support.http import Api, Response, Timeout, producer, request_bytes
from support.server import Server

TEXT = {"Content-Type": "text/plain"}
SYNC_DELAY = "MILLSTREAM_FAULT_SYNC_DELAY_MS"


@pytest.mark.parametrize("first", ["memory", "disk"])
def test_item_01_a_stronger_default_after_a_weaker_one_cuts_nothing(
    start_server: Callable[..., Server], first: str
) -> None:
    server = start_server(settings={"durability": first})
    api = Api(server)
    assert api.put("s", b"one,")["stream-durability"] == first
    for number in range(50):
        assert api.post("s", b"%d," % number).status == 204
    whole = api.read_all("s")
    server.stop()
    server.restart(durability="fsync")
    assert api.read_all("s") == whole
    assert api.head("s")["stream-durability"] == first
    assert api.get("s").get("stream-gap") is None
    assert api.post("s", b"more").status == 204
    server.stop()
    server.restart(durability=first)
    assert api.read_all("s") == whole + b"more"


def test_item_05_a_duplicate_is_not_confirmed_before_its_original_is_durable(
    start_server: Callable[..., Server],
) -> None:
    server = start_server(environment={SYNC_DELAY: "700"})
    api = Api(server, deadline_s=20)
    api.put("s")
    once = request_bytes("POST", Api.target("s"), {**TEXT, **producer("p", 0, 0)}, b"x")
    with api.connect() as first, api.connect() as second:
        first.send(once)
        second.deadline_s = 0.4
        second.send(once)
        with pytest.raises(Timeout):
            second.read_response()
        second.deadline_s = 20
        answers = sorted([first.read_response().status, second.read_response().status])
    assert answers == [200, 204]
    assert api.get("s").body == b"x"
    server.kill()


def test_item_09_one_damaged_entry_costs_no_other_stream_and_stays(
    start_server: Callable[..., Server],
) -> None:
    server = start_server(settings={"checkpoint_bytes": "64KiB"})
    api = Api(server)
    api.put("damaged-entry", content_type="text/x-marked-type", body=b"d" * 40_000)
    api.put("healthy", b"h" * 40_000)
    before = api.metric("millstream_checkpoints_total")
    api.put("push", b"p" * 100_000)
    while api.metric("millstream_checkpoints_total") == before:
        threading.Event().wait(0.01)
    server.stop()
    catalog = server.data_dir / "catalog.redb"
    at = catalog.read_bytes().find(b"text/x-marked-type")
    assert at > 0
    while at > 0:
        flip(catalog, at + 3)
        at = catalog.read_bytes().find(b"text/x-marked-type")
    for _ in range(3):
        server.restart()
        answer = api.get("damaged-entry")
        assert answer.status == 500, answer
        # It is not taken for absent: nobody may create over it by accident.
        assert api.put("damaged-entry").status == 500
        assert api.read_all("healthy") == b"h" * 40_000
        assert api.post("healthy", b"").status in (204, 400)
        server.kill()


@pytest.mark.parametrize("how", ["deleted", "expired"])
def test_item_10_a_path_made_again_is_the_new_stream_after_a_crash(
    start_server: Callable[..., Server], how: str
) -> None:
    server = start_server(settings={"checkpoint_bytes": "64KiB", "sweep_interval_ms": 100})
    api = Api(server)
    lifetime = {"Stream-TTL": "1"} if how == "expired" else {}
    old = api.put("again", b"o" * 100_000, headers=lifetime)
    if how == "deleted":
        assert api.delete("again").status == 204
    else:
        until = time.monotonic() + 10
        while api.head("again").status != 404:
            assert time.monotonic() < until
            # A look would renew a sliding lifetime; HEAD does not.
            threading.Event().wait(0.2)
    new = api.put("again", b"new,")
    assert new.status == 201
    assert api.post("again", b"more").status == 204
    for _ in range(3):
        server.crash_and_restart()
        answer = api.get("again")
        assert (answer.status, answer.body) == (200, b"new,more")
        assert answer["stream-incarnation"] == new["stream-incarnation"]
        assert answer["stream-incarnation"] != old["stream-incarnation"]


def test_item_21_a_delete_holds_although_its_files_cannot_be_removed(
    start_server: Callable[..., Server],
) -> None:
    server = start_server(settings={"checkpoint_bytes": "64KiB"}, before_exec=without_root_override)
    api = Api(server)
    api.put("doomed", b"d" * 200_000)
    before = api.metric("millstream_checkpoints_total")
    api.put("push", b"p" * 200_000)
    while api.metric("millstream_checkpoints_total") == before:
        threading.Event().wait(0.01)
    held = [
        file
        for file in server.data_dir.rglob("*")
        if file.is_file() and file.parent.name != "wal" and b"d" * 1000 in file.read_bytes()
    ]
    assert held
    folders = {file.parent for file in held if file.parent != server.data_dir}
    for folder in folders:
        folder.chmod(0o555)
    try:
        assert api.delete("doomed").status == 204
        assert api.get("doomed").status == 404
        server.crash_and_restart()
        assert api.get("doomed").status == 404
        assert api.get("push").status == 200
    finally:
        for folder in folders:
            folder.chmod(0o755)
    server.crash_and_restart()
    assert api.get("doomed").status == 404
    assert api.put("doomed", b"again").status == 201
    assert api.get("doomed").body == b"again"


@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_item_22_the_last_fork_frees_the_path_of_its_source(
    server: Server, api: Api, ending: str
) -> None:
    api.put("source", b"kept")
    for number in range(3):
        assert fork(api, "source", f"fork{number}").status == 201
    assert api.delete("source").status == 204
    assert api.put("source").status == 409
    for number in range(3):
        assert api.get(f"fork{number}").body == b"kept"
        assert api.delete(f"fork{number}").status == 204
        getattr(server, ending)()
        server.restart()
    until = time.monotonic() + 10
    while (made := api.put("source", b"new")).status != 201:
        assert made.status == 409
        assert time.monotonic() < until, "the path stays blocked for ever"
        threading.Event().wait(0.02)
    assert api.get("source").body == b"new"


def fork(api: Api, source: str, name: str) -> Response:
    return api.put(name, headers={"Stream-Forked-From": f"/v1/stream/{source}"})


def test_item_23_a_fork_that_races_the_delete_of_its_source_lives_or_never_was(
    server: Server, api: Api
) -> None:
    made: list[str] = []
    for number in range(30):
        source, name = f"source{number}", f"fork{number}"
        api.put(source, b"kept")
        start = threading.Barrier(2)
        answers: list[Response] = []

        def race(
            source: str = source,
            name: str = name,
            start: threading.Barrier = start,
            answers: list[Response] = answers,
        ) -> None:
            start.wait(10)
            answers.append(fork(api, source, name))

        thread = threading.Thread(target=race)
        thread.start()
        start.wait(10)
        assert api.delete(source).status == 204
        thread.join(10)
        assert answers[0].status in (201, 404, 409), answers
        if answers[0].status == 201:
            made.append(name)
        else:
            assert api.get(name).status == 404
    for _ in range(2):
        server.crash_and_restart()
        for name in made:
            assert api.get(name).body == b"kept", name
        for number in range(30):
            assert api.get(f"source{number}").status in (404, 410)


def test_w2_a_background_sync_that_fails_is_not_forgotten(
    start_server: Callable[..., Server],
) -> None:
    """Only `disk` appends: nobody waits for the sync, so only the timer can notice that it fails."""
    server = start_server(environment={"MILLSTREAM_FAULT_FAIL": "sync:40"})
    api = Api(server)
    api.put("s", headers={"Stream-Durability": "disk"})
    acknowledged = b""
    until = time.monotonic() + 30
    while True:
        answer = api.post("s", b"x")
        if answer.status != 204:
            break
        acknowledged += b"x"
        assert time.monotonic() < until, "the sync that failed went unnoticed"
    assert (answer.status, answer.code) in ((503, "server_busy"), (503, "outcome_unknown"))
    ready = api.call("GET", "/-/ready")
    assert (ready.status, ready.json()["status"]) == (503, "log_failed")
    assert api.metric("millstream_wal_failed") == 1
    old_tail = api.head("s").offset
    server.kill()
    server.environment = {}
    server.restart()
    # After a failed sync nobody knows what the disk has: the readers of `disk` streams are told.
    gap = api.get("s", offset=old_tail).get("stream-gap")
    assert gap is not None
    assert "reason=crash" in gap


def test_w8_restarts_do_not_collect_log_files(server: Server, api: Api) -> None:
    api.put("s")
    for turn in range(10):
        assert api.post("s", b"%d," % turn).status == 204
        (server.kill if turn % 2 else server.stop)()
        server.restart()
    before = api.metric("millstream_checkpoints_total")
    api.put("push", b"p" * 2_000_000)
    until = time.monotonic() + 20
    while (
        api.metric("millstream_checkpoints_total") == before or len(log_files(server.data_dir)) > 4
    ):
        assert time.monotonic() < until, log_files(server.data_dir)
        threading.Event().wait(0.05)
    assert api.get("s").body == b"0,1,2,3,4,5,6,7,8,9,"


def test_w10_small_records_at_the_start_are_read(server: Server, api: Api) -> None:
    api.put("s")
    for size in range(1, 130):
        assert api.post("s", b"%3d" % size + b"." * size).status == 204
    server.crash_and_restart()
    whole = api.read_all("s")
    assert whole == b"".join(b"%3d" % size + b"." * size for size in range(1, 130))
