"""The guide to the Python client runs as it stands, block by block, against a real server.

Blocks that need a package which is not installed here are left out, by their imports; the others need nothing but the client,
pyarrow and pandas, which the tests always have.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys

from support.server import ROOT, Server

GUIDE = ROOT / "docs/guides/python.md"
OPTIONAL = {"polars", "duckdb"}


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)


def lacking(block: str) -> set[str]:
    names = {
        alias.name.split(".")[0]
        for node in ast.walk(ast.parse(block))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    return {name for name in names if importlib.util.find_spec(name) is None}


def test_the_guide_shows_what_people_use() -> None:
    text = "\n".join(blocks())
    for name in ("pandas", "polars", "duckdb", "asyncio", "numbered=True", "read_arrow(pattern="):
        assert name in text, name


def test_every_block_runs(server: Server) -> None:
    chosen = [block for block in blocks() if not lacking(block)]
    assert set().union(*(lacking(block) for block in blocks())) <= OPTIONAL
    assert len(chosen) >= 6
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(chosen)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "MILLSTREAM_URL": server.url},
    )
    assert done.returncode == 0, done.stderr
    assert "749251.0" in done.stdout
    assert "['stream', 'number', 'time', 'value']" in done.stdout
