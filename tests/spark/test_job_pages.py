"""The example on the page of each job, in the shared session: it runs as it is shown and checks itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from millstream.spark.jobs import JOBS
from support.server import ROOT, Server

PAGES = sorted((ROOT / "docs" / "jobs").glob("[a-z]*.md"))
PARTS = ["Command", "Input", "Output", "Guarantee", "What a crash does", "From a program"]
EXAMPLE = re.compile(r"^## From a program$.*?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_every_job_has_a_page_with_its_parts() -> None:
    with_guide = {"land", "copy"}
    assert {page.stem for page in PAGES} == JOBS.keys() - with_guide
    for page in PAGES:
        assert re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE) == PARTS, page.name


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_the_example_runs(
    spark: Any, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: Path
) -> None:
    monkeypatch.setenv("MILLSTREAM_URL", server.url)
    monkeypatch.chdir(tmp_path)
    found = EXAMPLE.search(page.read_text())
    assert found is not None
    assert "assert" in found[1]
    exec(compile(found[1], str(page), "exec"), {"spark": spark})
