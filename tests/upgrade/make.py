"""Makes the data directories of an earlier version that test_upgrade.py opens.

Run by hand, once for a version worth keeping, with that version's command:
`MILLSTREAM_TEST_BINARY=OLD/bin/millstream python tests/upgrade/make.py FOLDER NAME`. It writes NAME-stop.tar.gz (an orderly
end) and NAME-kill.tar.gz (kill -9, so that the log is to be replayed), each with what the old server had told. The
archives are kept for ever.
"""

from __future__ import annotations

import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.classes import as_class, fork_as, set_class
from support.http import Api, producer
from support.server import Server
from support.staging import Staging, rows_body

JSON = "application/json"
SETTINGS = {"wal_file_bytes": "1MiB", "append_max_bytes": "64KiB", "checkpoint_bytes": "64KiB"}
FAR = "2099-01-01T00:00:00Z"


def make_streams(api: Api) -> None:
    """Every class and kind of stream, some of it in a checkpoint and some behind it."""
    for name in ("fsync", "disk", "memory", "ephemeral"):
        api.put(f"classes/{name}", b"first,", headers=as_class(name))
    api.put("json", b'[{"a":1},{"b":[2,3]}]', JSON)
    api.put("closed", b"whole", headers={"Stream-Closed": "true"})
    api.put("lasts/idle", b"x", headers={"Stream-TTL": "3000000000"})
    api.put("lasts/until", b"x", headers={"Stream-Expires-At": FAR})
    api.put("again", b"first life")
    api.delete("again")
    api.put("again", b"second life")
    api.put("source", b"0123456789")
    middle = api.post("source", b"abc").offset
    api.post("source", b"behind the fork")
    api.put("fork", b"", None, fork_as("source", "disk", middle))
    api.post("fork", b"own")
    api.put("fork/of/fork", b"", None, fork_as("fork", "fsync"))
    api.put("gone/source", b"kept for its fork")
    api.put("gone/fork", b"", None, fork_as("gone/source", "fsync"))
    api.delete("gone/source")


def append_much(api: Api, turn: int) -> None:
    """Appends of many sizes, each by a producer of its own name."""
    for number in range(40):
        body = bytes([97 + number % 26]) * (1 + (number * 997) % 5000)
        for name in ("fsync", "disk", "memory", "ephemeral"):
            headers = producer(f"p{number % 5}", turn, number // 5)
            assert api.post(f"classes/{name}", body, headers=headers).status == 200
        assert api.post("json", b'[%d,"%d"]' % (number, turn), JSON).status == 204
    api.post("source", b"s", headers={"Stream-Seq": f"seq-{turn}"})


def commit(staging: Staging, turn: int) -> None:
    rows = [("staged", b"row %d of %d," % (number, turn)) for number in range(20)]
    staging.commit("query", turn, [staging.stage(f"stage-{turn}", rows_body(rows))])


def told(api: Api) -> dict[str, Any]:
    """What readers get of each stream: its head, and what follows each offset on the way."""
    names = ("stream-next-offset", "stream-incarnation", "stream-durability", "content-type",
             "stream-closed", "stream-ttl", "stream-expires-at")  # fmt: skip
    streams: dict[str, Any] = {}
    for row in api.call("GET", "/-/api/streams?limit=1000").json()["streams"]:
        path, offset, pieces = row["path"], "-1", []
        while True:
            read = api.get(path, offset=offset)
            pieces.append((offset, read.body.decode("latin-1"), read.offset))
            if read.get("stream-up-to-date") == "true":
                break
            offset = read.offset
        head = api.head(path)
        heads = {name: head.get(name) for name in names}
        streams[path] = {"head": heads, "records": row["records"], "pieces": pieces}
    return streams


def make(folder: Path, name: str, ending: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        server = Server(place / "data", settings={**SETTINGS, "read_window_bytes": 4096})
        api = Api(server)
        staging = Staging(api)
        make_streams(api)
        api.put("staged")
        for turn in range(3):
            append_much(api, turn)
            commit(staging, turn)
        api.wait_until_metric("millstream_checkpoints_total", lambda count: count > 0)
        set_class(api, "classes/disk", "memory")
        set_class(api, "classes/memory", "fsync")
        append_much(api, 3)
        waits = staging.stage("waits", rows_body([("staged", b"committed later,")]))
        api.put("wakes", b"", JSON)
        subscription = {"type": "pull-wake", "streams": ["json"], "wake_stream": "wakes"}
        made = api.call(
            "PUT",
            "/v1/stream/__ds/subscriptions/kept",
            {"Content-Type": JSON},
            json.dumps(subscription).encode(),
        )
        assert made.status == 201, made.body
        document = {"streams": told(api), "stage": waits}
        (place / "told.json").write_text(json.dumps(document))
        getattr(server, ending)()
        with tarfile.open(folder / f"{name}-{ending}.tar.gz", "w:gz", compresslevel=9) as archive:
            for part in ("data", "told.json"):
                archive.add(place / part, part)


if __name__ == "__main__":
    for way in ("stop", "kill"):
        make(Path(sys.argv[1]), sys.argv[2], way)
