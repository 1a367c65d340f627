"""`millstream demo`: once as it is, once ended by Ctrl-C, and where Spark is missing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pyarrow.dataset as dataset
import pytest

from support.commands import Run

SECONDS_ON_TWO_CORES = 120.0


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    started: list[Run] = []

    def begin(*arguments: str) -> Run:
        run = Run(tmp_path, "http://127.0.0.1:1", *arguments)
        started.append(run)
        return run

    yield begin
    for run in started:
        run.kill()


def test_the_demo_lands_what_it_appends_and_leaves_only_what_it_says(
    start: Callable[..., Run], tmp_path: Path, full: bool
) -> None:
    began = time.monotonic()
    run = start("demo", "--keep")
    assert run.end(280.0) == 0, run.err
    if full:  # with nothing beside it
        assert time.monotonic() - began < SECONDS_ON_TWO_CORES
    said = "\n".join(run.out)
    (kept,) = tmp_path.glob("millstream-demo-*")
    found = re.search(r"([\d,]+) records of ([\d,]+) streams landed in (\d+) files", said)
    assert found is not None, said
    assert int(found[1].replace(",", "")) == dataset.dataset(kept / "lake").count_rows() > 60_000
    assert re.search(r"[\d,]+ changes of the stock make \d+ rows in version=\d+: .* agree", said)
    assert re.search(r"[\d,]+ clicks are [\d,]+ visits in `shop/visits`.* agree", said)
    assert list((kept / "stock").glob("version=*/*.parquet"))
    for text in (
        "espresso beans",
        "the stock that is low",
        "throughput (records/s)",
        "lag (records)",
        "demo.svg",
    ):
        assert text in said
    assert ElementTree.parse(kept / "demo.svg").getroot().tag.endswith("svg")
    first, second = said.split("landing what is new")
    assert first.count("  batch ") >= 4
    assert second.count("  batch ") >= 2
    assert "0 behind the tail" in second
    assert run.left() == []


def test_ctrl_c_leaves_no_process_and_no_directory(
    start: Callable[..., Run], tmp_path: Path, full: bool
) -> None:
    for moment in ("starting Spark", "  batch 0:") if full else ("starting Spark",):
        run = start("demo")
        run.wait_for_line(moment)
        os.killpg(run.process.pid, signal.SIGINT)  # what a terminal does
        assert run.end(60.0) == 130
        assert run.left() == []
        assert not list(tmp_path.glob("millstream-demo-*"))
        assert run.err == []


def test_without_pyspark_there_is_one_line_to_type(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, importlib.metadata as m\n"
        "sys.modules['pyspark'] = None\n"
        "real = m.version\n"
        "def version(name):\n"
        "    if name == 'pyspark': raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "millstream.cli", "--json", "demo"],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done
    error = json.loads(done.stderr)["error"]
    assert "pip install 'millstream[" in error["hint"]
    assert not list(tmp_path.glob("millstream-demo-*"))
