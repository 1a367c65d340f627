"""Commits of many stages: what a checkpoint of them does follows their bytes, and what is remembered of them is little."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from support.http import Api
from support.many_streams import create_many
from support.server import Server
from support.staging import Staging, rows_body

MIB = 1 << 20
STAGES = 80  # more than a checkpoint keeps open


def read_bytes(server: Server) -> int:
    """What the server has read so far, from wherever."""
    text = Path(f"/proc/{server.process.pid}/io").read_text()
    found = re.search(r"^rchar: (\d+)$", text, re.MULTILINE)
    assert found
    return int(found[1])


def test_a_checkpoint_looks_at_each_stage_once(start_server: Callable[..., Server]) -> None:
    server = start_server()
    staging = Staging(Api(server))
    streams = [f"s/{number}" for number in range(200)]
    create_many(server, streams)
    body = rows_body([(stream, b'"the same record"') for stream in streams])
    stages = [staging.stage(f"t{number}", body) for number in range(STAGES)]
    written = sum(path.stat().st_size for path in (server.data_dir / "packs").iterdir())
    before = read_bytes(server)
    staging.commit("p", 1, stages)
    until = time.monotonic() + 20
    while staging.api.metric("millstream_hot_bytes") > 0:
        assert time.monotonic() < until, "the checkpoint does not end"
        assert read_bytes(server) - before < 20 * written, "stages are read again and again"
        time.sleep(0.02)
    assert read_bytes(server) - before < 20 * written
    assert staging.commit("p", 1, stages)["duplicate"]
