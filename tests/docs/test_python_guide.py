"""The guide to the Python client runs as it stands, block by block, against a real server."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from support.server import ROOT, Server

GUIDE = ROOT / "docs/guides/python.md"


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_guide_shows_what_people_use() -> None:
    text = "\n".join(blocks())
    for name in ("pandas", "polars", "duckdb", "asyncio", "numbered=True", "read_arrow(pattern="):
        assert name in text, name


def test_every_block_runs(server: Server) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(blocks())],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "MILLSTREAM_URL": server.url},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("749251.0") == 3, "pandas, polars and DuckDB"
    assert "['stream', 'number', 'time', 'value']" in done.stdout
