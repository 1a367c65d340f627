"""`millstream backup` and `millstream restore` against real servers: under load, killed, damaged, cancelled."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import ctrl_c
from support.backup_load import Load
from support.classes import set_class
from support.http import Api, Response, producer, request_bytes
from support.server import Server, binary

StartServer = Callable[..., Server]
BUSY = {"checkpoint_bytes": "64KiB", "append_max_bytes": "256KiB", "wal_file_bytes": "64KiB"}
DEADLINE_S = 60.0
MIB = 1 << 20


def ask(api: Api, to: Path | str, **options: Any) -> Response:
    body = json.dumps({"to": str(to), **options}).encode()
    return api.call("POST", "/-/api/backups", {"Content-Type": "application/json"}, body)


def look(api: Api, identifier: str, wait_ms: int = 0) -> dict[str, Any]:
    answer = api.call("GET", f"/-/api/backups/{identifier}?wait_ms={wait_ms}")
    assert answer.status == 200, answer
    document: dict[str, Any] = answer.json()
    return document


def finished(api: Api, identifier: str) -> dict[str, Any]:
    until = time.monotonic() + DEADLINE_S
    while (seen := look(api, identifier, 5000))["state"] == "running":
        assert time.monotonic() < until, seen
    return seen


def backed_up(api: Api, to: Path, **options: Any) -> dict[str, Any]:
    answer = ask(api, to, **options)
    assert answer.status == 202, answer
    ended = finished(api, answer.json()["id"])
    assert ended["state"] == "done", ended
    return ended


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until, "it did not come to that in time"
        time.sleep(0.01)


def environment() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith("MILLSTREAM_")}


def run(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(binary()), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env=environment(),
        cwd=cwd,
        check=False,
    )


def restored(backup: Path, data_dir: Path) -> Path:
    done = run("restore", backup, "--data-dir", data_dir)
    assert done.returncode == 0, done
    return data_dir


def files(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if not path.is_dir()}


def fill(api: Api, megabytes: int) -> None:
    """Streams with segments of their own, and a few that share a pack."""
    for number in range(megabytes * 5):
        made = api.put(f"big/{number}", bytes([65 + number % 26]) * 200_000)
        assert made.status == 201, made
    for number in range(20):
        assert api.put(f"small/{number}", b"little").status == 201


# --- under load ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_backup_under_load_restores_to_one_moment(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = start_server(settings=BUSY)
    api = Api(server, deadline_s=20.0)
    load = Load(api)
    backups = [tmp_path / f"backup-{number}" for number in range(3)]
    befores = []
    with load.running():
        load.wait_for(30)
        for number, backup in enumerate(backups):
            befores.append(load.before())
            summary = backed_up(api, backup)["summary"]
            assert summary["damaged"] == 0
            assert summary["commit_number"] >= summary["checkpoint"] > 0
            assert stat.S_IMODE(backup.stat().st_mode) == 0o700
            load.wait_for(30 + 10 * number)
    originals = load.originals()
    tails = {one.stream: api.head(one.stream).offset for one in load.appenders}
    assert api.metric("millstream_checkpoints_total") > 3
    for number, (backup, before) in enumerate(zip(backups, befores, strict=True)):
        copy = start_server(data_dir=restored(backup, tmp_path / f"restored-{number}"))
        other = Api(copy, deadline_s=20.0)
        check_old_offsets(other, tails, originals)
        load.check(other, before, originals)
        copy.stop()
    server.check_log()


def check_old_offsets(api: Api, tails: dict[str, str], originals: dict[str, bytes]) -> None:
    """A reader of the old server reads on where the backup ends, and is told."""
    for stream, old in tails.items():
        whole = api.read_all(stream)
        answer = api.get(stream, offset=old)
        assert answer.status == 200, answer
        gap = dict(part.split("=", 1) for part in answer["stream-gap"].split("; "))
        assert gap["reason"] == "restore", answer.headers
        assert gap["from"] == old
        assert answer.body == b""
        epoch, position = gap["to"].split("_")
        assert int(position) == len(whole)
        assert int(epoch) > int(old.split("_")[0])
        second = originals[stream].index(b"\n") + 1
        answer = api.get(stream, offset=f"{old[:16]}_{second:016d}")
        assert answer.get("stream-gap") is None, answer.headers
        assert answer.body, "records that were backed up are read by their old offsets"
        assert whole[second:].startswith(answer.body)


def test_a_restored_stream_goes_on_in_a_new_epoch(
    server: Server, api: Api, start_server: StartServer, tmp_path: Path
) -> None:
    assert api.put("s", b"kept.").status == 201
    backed_up(api, tmp_path / "backup")
    lost = api.post("s", b"lost.").offset
    tag = api.get("s")["etag"]
    copy = Api(start_server(data_dir=restored(tmp_path / "backup", tmp_path / "restored")))
    new = copy.post("s", b"newer").offset
    assert new.split("_")[1] == lost.split("_")[1]
    assert new > lost
    assert copy.read_all("s") == b"kept.newer"
    assert tag not in (copy.get("s")["etag"], copy.head("s")["etag"]), "as many bytes, and others"
    answer = copy.get("s", offset=lost)
    assert (answer.status, answer.body) == (200, b"newer"), answer
    assert "reason=restore" in answer["stream-gap"]
    assert copy.get("s", offset=new).body == b""
    # And so it stays, over a clean restart and a crash.
    copied = copy.server
    assert isinstance(copied, Server)
    for again in (copied.restart, copied.crash_and_restart):
        again()
        assert copy.get("s", offset=lost).body == b"newer"
        assert copy.head("s").offset == new


@pytest.mark.parametrize("name", ["fsync", "disk", "memory", "ephemeral"])
def test_what_the_backup_holds_of_a_producer_stays_a_duplicate(
    api: Api, start_server: StartServer, tmp_path: Path, name: str
) -> None:
    api.put("s", headers={"Stream-Durability": "fsync" if name == "ephemeral" else name})
    for seq in range(4):
        assert api.post("s", b"%d," % seq, headers=producer("p", 0, seq)).status == 200
    if name == "ephemeral":
        set_class(api, "s", name)
        assert api.post("s", b"4,", headers=producer("p", 0, 4)).status == 200
    backed_up(api, tmp_path / "backup")
    copied = start_server(data_dir=restored(tmp_path / "backup", tmp_path / "restored"))
    copy = Api(copied)
    for seq in range(4):
        assert copy.post("s", b"x", headers=producer("p", 0, seq)).status == 204
    assert copy.post("s", b"7,", headers=producer("p", 0, 7)).status == 200
    assert copy.read_all("s") == b"0,1,2,3,7,"


def test_numbers_that_a_producer_skipped_after_a_restore_are_no_duplicates(
    api: Api, start_server: StartServer, tmp_path: Path
) -> None:
    api.put("s")
    for seq in range(2):
        assert api.post("s", b"%d," % seq, headers=producer("p", 0, seq)).status == 200
    backed_up(api, tmp_path / "backup")
    copied = start_server(data_dir=restored(tmp_path / "backup", tmp_path / "restored"))
    copy = Api(copied)
    assert copy.post("s", b"4,", headers=producer("p", 0, 4)).status == 200
    for again in (lambda: None, copied.restart, copied.crash_and_restart):
        again()
        answers = [copy.post("s", b"x", headers=producer("p", 0, n)) for n in range(5)]
        # What was stored before the backup, and what it went on with; nothing in between.
        assert [answer.status for answer in answers] == [204, 204, 409, 409, 204]
        assert answers[2].code == "producer_gap"
    assert copy.read_all("s") == b"0,1,4,"


def test_offsets_of_the_time_that_a_restore_loses_are_a_gap(
    server: Server, api: Api, start_server: StartServer, tmp_path: Path
) -> None:
    weak = {"Stream-Durability": "memory"}
    kept = api.put("weak", b"kept.", headers=weak).offset
    for name in ("again", "closed"):
        assert api.put(name, b"kept.").status == 201
    assert api.close_stream("closed").status == 204
    backed_up(api, tmp_path / "backup")
    # An epoch that begins with a crash, and new lives of two paths.
    server.crash_and_restart()
    lost = {"weak": api.post("weak", b"lost.").offset}
    for name, content in (("again", b"lost.lost."), ("closed", b"l")):
        assert api.delete(name).status == 204
        lost[name] = api.put(name, content).offset
    copy = Api(start_server(data_dir=restored(tmp_path / "backup", tmp_path / "restored")))
    for name in ("weak", "again"):
        assert copy.post(name, b"newer").status == 204
    # What ends before the backup does was another life for certain: its reader has seen nothing of this one.
    for name, body in (("weak", b"newer"), ("again", b"newer"), ("closed", b"kept.")):
        answer = copy.get(name, offset=lost[name])
        assert (answer.status, answer.body) == (200, body), answer
        gap = dict(part.split("=", 1) for part in answer["stream-gap"].split("; "))
        assert (gap["from"], gap["reason"]) == (lost[name], "restore")
        assert copy.get(name, offset=gap["to"]).body == body
        # Whatever it had before that offset, it may be other bytes.
        fork = {"Stream-Forked-From": Api.target(name), "Stream-Fork-Offset": lost[name]}
        assert copy.put(f"{name}/fork", b"", None, fork).code == "fork_offset_invalid"
    fork = {"Stream-Forked-From": Api.target("weak"), "Stream-Fork-Offset": kept}
    assert copy.put("weak/kept", b"", None, fork).status == 201
    assert copy.read_all("weak/kept") == b"kept."
    made_up = int(copy.head("weak").offset.split("_")[0]) + 1
    assert copy.get("weak", offset=f"{made_up:016d}_{5:016d}").status == 400
    assert copy.get("gone", offset=lost["weak"]).status == 404


def create_many(api: Api, prefix: str, count: int) -> int:
    """Creates streams faster than one in a millisecond; the highest incarnation among them."""
    highest, step = 0, 500
    with api.connect() as connection:
        for first in range(0, count, step):
            paths = (Api.target(f"{prefix}/{number}") for number in range(first, first + step))
            text = {"Content-Type": "text/plain"}
            connection.send(b"".join(request_bytes("PUT", path, text) for path in paths))
            for _ in range(step):
                made = connection.read_response()
                assert made.status == 201, made
                highest = max(highest, int(made["stream-incarnation"]))
    return highest


def test_no_restored_server_gives_out_an_incarnation_of_the_one_before_it(
    start_server: StartServer, tmp_path: Path
) -> None:
    """Creates above 1,000 a second run ahead of the clock, and the old server goes on after its backup."""
    api = Api(start_server(), deadline_s=30.0)
    create_many(api, "before", 40_000)
    for life in range(3):
        backup = tmp_path / f"backup-{life}"
        backed_up(api, backup)
        used = create_many(api, f"after-{life}", 2_000)
        copy = start_server(data_dir=restored(backup, tmp_path / f"restored-{life}"))
        api = Api(copy, deadline_s=30.0)
        made = api.put(f"new-{life}", b"other bytes")
        assert int(made["stream-incarnation"]) > used
        # The epoch that streams of the backup go on in comes from the same counter.
        assert api.post("before/0", b"more").status == 204
        assert int(api.head("before/0").offset[:16]) > used


def test_ephemeral_records_are_not_in_a_backup_but_their_streams_are(
    api: Api, start_server: StartServer, tmp_path: Path
) -> None:
    assert api.put("e", headers={"Stream-Durability": "ephemeral"}).status == 201
    old = api.post("e", b"gone with the process").offset
    backed_up(api, tmp_path / "backup")
    copy = Api(start_server(data_dir=restored(tmp_path / "backup", tmp_path / "restored")))
    assert copy.head("e")["stream-durability"] == "ephemeral"
    assert copy.read_all("e") == b""
    answer = copy.get("e", offset=old)
    assert (answer.status, answer.body) == (200, b"")
    # Restored, and then started: each costs an ephemeral stream its records.
    assert answer["stream-gap"].startswith(f"from={old}; ")
    assert answer["stream-gap"].endswith("certain=1")


def test_an_idle_or_empty_server_is_backed_up_as_well(
    api: Api, start_server: StartServer, tmp_path: Path
) -> None:
    for number in range(2):
        backed_up(api, tmp_path / f"empty-{number}")
    assert api.put("s", b"one").status == 201
    backed_up(api, tmp_path / "one")
    backed_up(api, tmp_path / "same")
    for name, status in (("empty-1", 404), ("one", 200), ("same", 200)):
        copy = start_server(data_dir=restored(tmp_path / name, tmp_path / f"data-of-{name}"))
        assert Api(copy).get("s").status == status
        copy.stop()


# --- the original goes on ------------------------------------------------------------------------


@pytest.mark.slow
def test_pinned_files_stay_for_the_backup_and_go_when_it_ends(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = start_server(settings=BUSY)
    api = Api(server)
    fill(api, 4)
    backup = tmp_path / "backup"
    started = ask(api, backup, rate_mib_per_second=2).json()
    wait_until(lambda: look(api, started["id"])["phase"] == "segments")
    pinned = {name for name in files(server.data_dir) if name.endswith((".seg", ".pack"))}
    for entry in [*(f"big/{n}" for n in range(20)), *(f"small/{n}" for n in range(20))]:
        assert api.delete(entry).status == 204
    checkpoints = api.metric("millstream_checkpoints_total")
    assert api.put("more").status == 201

    def write_until(condition: Callable[[], bool]) -> None:
        def step() -> bool:
            assert api.post("more", b"m" * 100_000).status == 204
            return condition()

        wait_until(step)

    write_until(lambda: api.metric("millstream_checkpoints_total") > checkpoints + 3)
    assert look(api, started["id"])["state"] == "running", "it has to outlast the deletes"
    assert pinned <= files(server.data_dir), "a file went away under the backup"
    assert finished(api, started["id"])["state"] == "done"
    # A pack may hold other streams besides; a segment belongs to one.
    segments = {name for name in pinned if name.endswith(".seg")}
    assert len(segments) >= 20
    write_until(lambda: not segments & files(server.data_dir))
    # Log files are freed as well: what is left is what one checkpoint leaves.
    write_until(lambda: len([n for n in files(server.data_dir) if n.endswith(".wal")]) <= 4)
    copy = Api(start_server(data_dir=restored(backup, tmp_path / "restored")))
    assert copy.read_all("big/7") == b"H" * 200_000
    assert copy.read_all("small/7") == b"little"


def test_a_second_backup_is_refused_while_one_runs(api: Api, tmp_path: Path) -> None:
    fill(api, 2)
    first = ask(api, tmp_path / "first", rate_mib_per_second=1).json()
    refused = ask(api, tmp_path / "second")
    assert (refused.status, refused.code) == (409, "backup_running")
    assert first["id"] in refused.json()["detail"]
    assert not (tmp_path / "second").exists()
    cancelled = api.call("DELETE", f"/-/api/backups/{first['id']}")
    assert cancelled.status == 202
    assert finished(api, first["id"])["state"] == "cancelled"
    assert not (tmp_path / "first").exists()
    backed_up(api, tmp_path / "second")
    assert api.call("DELETE", f"/-/api/backups/{first['id']}").status == 200


def test_a_stopping_server_cancels_its_backup_and_stops_cleanly(
    server: Server, api: Api, tmp_path: Path
) -> None:
    fill(api, 3)
    started = ask(api, tmp_path / "backup", rate_mib_per_second=1).json()
    wait_until(lambda: look(api, started["id"])["phase"] == "segments")
    assert server.stop() < 2.0
    assert not (tmp_path / "backup").exists()
    server.restart()
    assert api.read_all("big/0") == b"A" * 200_000
    assert api.call("GET", f"/-/api/backups/{started['id']}").code == "backup_not_found"


def test_a_server_killed_in_the_middle_leaves_what_nobody_takes_for_a_backup(
    server: Server, api: Api, tmp_path: Path
) -> None:
    fill(api, 3)
    backup = tmp_path / "backup"
    started = ask(api, backup, rate_mib_per_second=1).json()
    wait_until(lambda: look(api, started["id"])["phase"] == "segments")
    server.kill()
    assert (backup / "catalog.redb").exists()
    refused = run("restore", backup, "--data-dir", tmp_path / "restored")
    assert refused.returncode == 1
    assert "not finished" in refused.stderr
    assert not (tmp_path / "restored").exists()
    served = run("serve", "--port", "0", "--data-dir", backup)
    assert served.returncode == 1
    assert "no format file" in served.stderr
    assert "millstream restore" in served.stderr
    server.restart()
    assert api.read_all("big/1") == b"B" * 200_000


# --- refusals ------------------------------------------------------------------------------------


def test_where_a_backup_may_not_be_made(server: Server, api: Api, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(server.data_dir)
    refusals = [
        ("relative", 400, "bad_request"),
        ("/", 400, "bad_request"),
        (tmp_path / "absent" / "backup", 400, "bad_request"),
        (tmp_path / "there", 409, "backup_exists"),
        (tmp_path / "link", 409, "backup_exists"),
        (server.data_dir / "backup", 403, "backup_refused"),
        (tmp_path / "link" / "backup", 403, "backup_refused"),
    ]
    for to, status, code in refusals:
        refused = ask(api, to)
        assert (refused.status, refused.code) == (status, code), (to, refused)
    json_type = {"Content-Type": "application/json"}
    for body in (b"", b"[]", b"{", b'{"to": 1}', b'{"to": "/x", "extra": 1}'):
        refused = api.call("POST", "/-/api/backups", json_type, body)
        assert (refused.status, refused.code) == (400, "bad_request"), body
    assert ask(api, tmp_path / "x", rate_mib_per_second=-1).status == 400
    assert ask(api, tmp_path / "x", allow_damage="yes").status == 400
    assert api.call("GET", "/-/api/backups/none").code == "backup_not_found"
    assert api.call("DELETE", "/-/api/backups/none").code == "backup_not_found"


def test_a_server_on_the_network_makes_backups_below_backup_dir_only(
    start_server: StartServer, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "out").symlink_to(tmp_path)
    network = ("--host", "0.0.0.0", "--insecure")
    api = Api(start_server(flags=network))
    refused = ask(api, tmp_path / "backup")
    assert (refused.status, refused.code) == (403, "backup_refused")
    api = Api(start_server(flags=network, settings={"backup_dir": str(place)}))
    for to in (tmp_path / "backup", place / ".." / "backup", place / "out" / "backup", place):
        refused = ask(api, to)
        assert refused.code in ("backup_refused", "backup_exists"), (to, refused.body)
    assert not (tmp_path / "backup").exists()
    backed_up(api, place / "backup")


def test_restore_never_overwrites_and_finds_every_changed_byte(api: Api, tmp_path: Path) -> None:
    fill(api, 1)
    backup = tmp_path / "backup"
    backed_up(api, backup)
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("kept")
    refused = run("restore", backup, "--data-dir", full)
    assert refused.returncode == 1
    assert "not empty" in refused.stderr
    assert files(full) == {"mine"}
    names = sorted(files(backup))
    assert {"backup.json", "format.backup", "catalog.redb"} < set(names)
    chosen = [*(name for name in names if "/" not in name), *(n for n in names if "0.wal" in n)]
    chosen += [next(n for n in names if n.endswith(end)) for end in (".wal", ".pack", ".seg")]
    for name in chosen:
        path = backup / name
        whole = path.read_bytes()
        changed = bytearray(whole)
        changed[len(whole) // 3] ^= 1
        path.write_bytes(changed)
        refused = run("restore", backup, "--data-dir", tmp_path / "new")
        assert refused.returncode == 1, name
        assert Path(name).name in refused.stderr, refused.stderr
        assert not (tmp_path / "new").exists()
        path.write_bytes(whole)
    restored(backup, tmp_path / "new")


def test_a_restore_killed_in_the_middle_leaves_what_no_server_runs_on(
    api: Api, tmp_path: Path
) -> None:
    fill(api, 4)
    backup = tmp_path / "backup"
    backed_up(api, backup)
    caught = [number for number in range(10) if kill_in_the_middle(backup, tmp_path / f"r{number}")]
    assert caught, "no restore was caught before its end"
    cut = tmp_path / f"r{caught[0]}"
    served = run("serve", "--port", "0", "--data-dir", cut)
    assert served.returncode == 1, served
    refused = run("restore", backup, "--data-dir", cut)
    assert refused.returncode == 1
    assert "not empty" in refused.stderr


def kill_in_the_middle(backup: Path, data_dir: Path) -> bool:
    """Whether the restore was still at its files when it was killed."""
    process = subprocess.Popen(
        [str(binary()), "restore", str(backup), "--data-dir", str(data_dir)], env=environment()
    )
    try:
        wait_until(lambda: (data_dir / "restore.partial" / "segments").exists())
    finally:
        process.kill()
        process.wait()
    return (data_dir / "restore.partial").exists() and not (data_dir / "format").exists()


def test_damage_in_the_server_fails_a_backup_and_is_named(
    server: Server, api: Api, tmp_path: Path
) -> None:
    fill(api, 1)
    backed_up(api, tmp_path / "whole")
    segment = next(path for path in server.data_dir.rglob("*.seg") if path.stat().st_size)
    content = bytearray(segment.read_bytes())
    content[100] ^= 1
    segment.write_bytes(content)
    ended = finished(api, ask(api, tmp_path / "backup").json()["id"])
    assert (ended["state"], ended["error"]["code"]) == ("failed", "backup_damaged")
    assert segment.name in ended["error"]["detail"]
    assert not (tmp_path / "backup").exists()
    told = run("backup", tmp_path / "backup", "--url", server.url)
    assert told.returncode == 1
    assert segment.name in told.stderr
    assert "--allow-damage" in told.stderr
    copied = run("backup", tmp_path / "backup", "--url", server.url, "--allow-damage")
    assert copied.returncode == 0
    assert segment.name in copied.stderr
    restored(tmp_path / "backup", tmp_path / "restored")


# --- the command line ----------------------------------------------------------------------------


def test_the_commands_tell_what_they_did(server: Server, api: Api, tmp_path: Path) -> None:
    fill(api, 1)
    done = run("backup", "monday", "--url", server.url, "--json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done
    told = json.loads(done.stdout)
    assert told["to"] == str(tmp_path / "monday")
    assert told["streams"] >= 25, "these, and what the control plane keeps for itself"
    manifest = json.loads((tmp_path / "monday" / "backup.json").read_text())
    assert manifest["commit_number"] == told["commit_number"]
    assert manifest["bytes"] == sum(entry["bytes"] for entry in manifest["files"])
    done = run("restore", "monday", "--data-dir", "data", "--json", cwd=tmp_path)
    assert done.returncode == 0, done
    assert json.loads(done.stdout)["files"] == len(manifest["files"])
    again = run("backup", "monday", "--url", server.url, cwd=tmp_path)
    assert again.returncode == 1
    assert "exists" in again.stderr
    absent = run("restore", "tuesday", "--data-dir", "other", cwd=tmp_path)
    assert absent.returncode == 1
    assert not (tmp_path / "tuesday").exists()
    assert not (tmp_path / "other").exists()
    assert run("backup", "x", "--url", "http://127.0.0.1:9").returncode == 5
    assert run("backup", "x", "--url", "http://192.0.2.1:9").returncode == 2
    assert run("restore", "monday", cwd=tmp_path).returncode == 2


def test_ctrl_c_cancels_the_backup_on_the_server(server: Server, api: Api, tmp_path: Path) -> None:
    fill(api, 3)
    backup = tmp_path / "backup"
    process = subprocess.Popen(
        [str(binary()), "backup", str(backup), "--url", server.url, "--rate", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        preexec_fn=ctrl_c.taken,
    )
    try:
        wait_until(lambda: (backup / "segments").exists())
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, told
    assert re.search("cancelling", told)
    assert not backup.exists()
    backed_up(api, backup)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_restore_that_is_told_to_end_leaves_nothing_behind(
    api: Api, tmp_path: Path, number: signal.Signals
) -> None:
    fill(api, 1)
    backup, target = tmp_path / "backup", tmp_path / "restored"
    backed_up(api, backup)
    (segment, *_) = (path for path in (backup / "segments").rglob("*") if path.is_file())
    segment.unlink()
    os.mkfifo(segment)  # nobody writes to it, so that the restore waits here
    process = subprocess.Popen(
        [str(binary()), "restore", str(backup), "--data-dir", str(target)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        preexec_fn=ctrl_c.taken,
    )
    try:
        wait_until(lambda: (target / "restore.partial").exists())
        process.send_signal(number)
        _, told = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, told
    assert not target.exists()
