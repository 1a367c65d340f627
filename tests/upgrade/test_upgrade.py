"""Data directories of earlier versions open, and hold what was told of them.

`make.py` has made the archives; each ended in an orderly way or by kill -9. The class decides what may be missing.
"""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.classes import read_through
from support.http import Api, producer
from support.pipeline import Pipeline
from support.server import Server, binary
from support.staging import Staging

HERE = Path(__file__).resolve().parent
COLUMNS = ["value", "offset"]
JOINED = sorted((HERE / "joined").glob("*.tar.gz"))
ARCHIVES = sorted(path.name for path in HERE.glob("*.tar.gz"))


@pytest.fixture(params=ARCHIVES)
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(HERE / request.param) as opened:
        opened.extractall(tmp_path, filter="data")
    return tmp_path


def check(api: Api, streams: dict[str, Any], *, killed: bool) -> None:
    """Each stream by its head, from its start, and from each offset that was told."""
    for path, known in streams.items():
        durability = known["head"]["stream-durability"]
        head = api.head(path)
        names = [name for name in known["head"] if name != "stream-next-offset"]
        assert {name: head.get(name) for name in names} == {n: known["head"][n] for n in names}
        if durability == "ephemeral" or (durability in ("memory", "disk") and killed):
            body, _ = read_through(api, path)
            whole = "".join(text for _, text, _ in known["pieces"])
            assert whole.startswith(body.decode("latin-1"))
            # The log has the bytes of `disk`. But this kernel is not the one that it was written under, so that
            # some could be lost: such a stream goes on in a new epoch.
            assert durability != "disk" or len(body) == len(whole), path
            continue
        assert head.offset == known["head"]["stream-next-offset"], path
        for offset, text, following in known["pieces"]:
            read = api.get(path, offset=offset)
            assert (read.body.decode("latin-1"), read.offset) == (text, following), (path, offset)


def test_the_archives_are_there() -> None:
    assert [path.name for path in JOINED] == ["kill.tar.gz", "stop.tar.gz"]
    assert {name.rsplit("-", 1)[1] for name in ARCHIVES} == {"stop.tar.gz", "kill.tar.gz"}


def test_a_directory_of_before_is_sound(archive: Path) -> None:
    done = subprocess.run(
        [binary(), "verify", "--json", "--data-dir", archive / "data"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_was_told_of_a_directory_of_before_holds(
    archive: Path, request: pytest.FixtureRequest, start_server: Callable[..., Server]
) -> None:
    killed = "kill" in request.node.callspec.params["archive"]
    told = json.loads((archive / "told.json").read_text())
    settings = {"read_window_bytes": 4096}
    server = start_server(data_dir=archive / "data", settings=settings)
    api = Api(server)
    check(api, told["streams"], killed=killed)
    for name in ("fsync", "memory"):  # the latter is `fsync` since its change
        path = f"classes/{name}"
        for number in range(5):
            again = api.post(path, b"x", headers=producer(f"p{number}", 3, 7))
            assert (again.status, again["producer-seq"]) == (204, "7")
            assert api.post(path, b"x", headers=producer(f"p{number}", 2, 7)).status == 403
    refused = api.post("source", b"x", headers={"Stream-Seq": "seq-3"})
    assert refused.code == "sequence_conflict"
    assert api.head("gone/source").status == 410
    listed = api.call("GET", "/v1/stream/__ds/subscriptions/kept")
    assert (listed.status, listed.json()["streams"][0]["path"]) == (200, "json")
    staging = Staging(api)
    staging.commit("query", 3, [told["stage"]])
    assert api.read_all("staged").endswith(b"row 19 of 2,committed later,")
    assert staging.commit("query", 3, [told["stage"]])["duplicate"] is True
    # The new server's own forms are written over the old ones; what was told holds on.
    server.crash_and_restart()
    streams = {path: known for path, known in told["streams"].items() if path != "staged"}
    check(api, streams, killed=True)


@pytest.mark.parametrize("joined", JOINED, ids=lambda path: path.name)
def test_a_part_and_a_body_under_one_entry_are_read_as_two_records(
    joined: Path, tmp_path: Path, start_server: Callable[..., Server]
) -> None:
    """Forks of byte streams that began with both had one index entry for the two."""
    with tarfile.open(joined) as opened:
        opened.extractall(tmp_path, filter="data")
    server = start_server(data_dir=tmp_path / "data")
    pipeline = Pipeline(Api(server))
    for _ in range(2):
        for name in ("fork", "deep"):
            for max_bytes in (1, 1 << 20):
                read = pipeline.read(pipeline.whole(name), columns=COLUMNS, max_bytes=max_bytes)
                assert read.column("value") == [b"aaaa", b"bb", b"own", b"later"]
                assert read.column("offset") == [0, 1, 2, 3]
            part = pipeline.read([pipeline.records(name, 2, 4)])
            assert part.column("value") == [b"own", b"later"]
        server.crash_and_restart()
