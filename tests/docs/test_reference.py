"""The reference in docs/ says what the code says.

Generated tables are made again and compared. What is written by hand is held against the sources where a machine can:
codes, settings, limits and metrics that a document names must exist, and none may be left out.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from millstream import errors, settings
from millstream._engine import Engine
from millstream.client.producer import ProducerOptions
from millstream.client.retry import Retry
from support.server import ROOT

DOCS = ROOT / "docs"
ENGINE = ROOT / "engine/core/src"
CONTROL = ROOT / "python/millstream/control"
RUNNING = DOCS / "operating/running.md"
NOT_FOR_USERS = {"listen", "restored"}
"""An engine without a socket, and the one life over restored files."""
CLIENT_ONLY_CODES = {"rate_limited", "unauthorized", "forbidden"}
"""Codes that the Python client gives to answers of proxies and other servers."""


def generator(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools/gen_docs.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def engine_codes() -> set[str]:
    rows = re.findall(
        r'^ {4}\w+ "([a-z_]+)" \d{3} "', (ENGINE / "error.rs").read_text(), re.MULTILINE
    )
    assert len(rows) == len(set(rows)) > 30
    return set(rows)


def engine_setting_keys() -> set[str]:
    source = (ROOT / "engine/py/src/settings.rs").read_text()
    return set(re.findall(r'^\s+"([a-z_]+)" =>', source, re.MULTILINE))


def start_codes() -> set[str]:
    """Codes with which an engine refuses to open or start."""
    sources = [path.read_text() for path in ENGINE.rglob("*.rs")]
    return {
        found
        for text in sources
        for found in re.findall(r'EngineError::new\(\s*"([a-z_]+)"', text, re.DOTALL)
    }


def test_generated_tables_are_fresh() -> None:
    done = generator("--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_stale_table_is_found_and_shown(tmp_path: Path) -> None:
    copy = tmp_path / "docs"
    shutil.copytree(DOCS, copy)
    metrics = copy / "reference/metrics.md"
    text = metrics.read_text()
    metrics.write_text(text.replace("| gauge |", "| counter |", 1))
    stale = generator("--check", "--docs", str(copy))
    assert stale.returncode == 1
    assert re.search(r"^\+.*\| gauge \|", stale.stdout, re.MULTILINE), stale.stdout
    assert generator("--docs", str(copy)).returncode == 0
    assert metrics.read_text() == text


@pytest.mark.parametrize("damage", ["end generated: metrics", "begin generated: metrics"])
def test_a_document_that_lost_a_mark_is_an_error(tmp_path: Path, damage: str) -> None:
    copy = tmp_path / "docs"
    shutil.copytree(DOCS, copy)
    metrics = copy / "reference/metrics.md"
    metrics.write_text(metrics.read_text().replace(f"<!-- {damage} -->\n", ""))
    done = generator("--check", "--docs", str(copy))
    assert done.returncode == 1
    assert "metrics" in done.stderr


def test_engine_and_python_know_the_same_codes() -> None:
    assert set(errors.CODES) - engine_codes() == CLIENT_ONLY_CODES
    assert engine_codes() - set(errors.CODES) == set()


def test_settings_table_and_engine_know_the_same_keys() -> None:
    handed_over = {row.name for row in settings.TABLE if row.engine}
    assert handed_over | NOT_FOR_USERS == engine_setting_keys()


def test_the_built_engine_understands_every_setting(tmp_path: Path) -> None:
    given = settings.Settings(data_dir=str(tmp_path / "data"), public_url="http://s.example")
    values = given.engine_settings()
    assert set(values) | NOT_FOR_USERS == engine_setting_keys()
    engine = Engine({**values, "listen": False})
    engine.stop()
    with pytest.raises(ValueError, match="colour"):
        Engine({**values, "listen": False, "colour": 1})


def test_every_code_of_a_failed_start_says_what_to_do() -> None:
    table = re.search(
        r"^## When it does not start$(.*?)^## ", RUNNING.read_text(), re.MULTILINE | re.DOTALL
    )
    assert table is not None
    documented = set(re.findall(r"^\| `([a-z_]+)` \|", table[1], re.MULTILINE))
    assert documented == start_codes()


def test_every_code_of_subscriptions_is_documented() -> None:
    sources = "".join(path.read_text() for path in CONTROL.rglob("*.py"))
    used = set(re.findall(r'(?:Refused|ApiError)\(\s*(\d{3}),\s*"([A-Z_]+)"', sources))
    used |= {("409", code) for code in re.findall(r'_invalid.*\n.*"(INVALID_OFFSET)"', sources)}
    used |= set(re.findall(r'(\d{3}): "([A-Z_]+)"', sources))
    assert len(used) >= 10
    reference = (DOCS / "reference/http.md").read_text()
    rows = [
        (status, codes)
        for status, codes in re.findall(r"^\| (\d{3}) \| (.+?) \|", reference, re.MULTILINE)
    ]
    shown = {(status, code) for status, codes in rows for code in re.findall(r"`([A-Z_]+)`", codes)}
    assert shown == used


def test_names_that_documents_use_exist() -> None:
    """Settings and metrics in prose are real ones."""
    listener = ROOT / "python" / "millstream" / "spark" / "observe" / "listener.py"
    tables = (ENGINE / "metrics.rs").read_text() + listener.read_text()
    metrics = set(re.findall(r'"(millstream_[a-z_]+)"', tables))
    keys = {row.name for row in settings.TABLE}
    fields = {"lease_ttl_ms"} | _json_fields(DOCS / "reference" / "pipeline-http.md")
    for options in (ProducerOptions, Retry):
        fields |= {one.name for one in dataclasses.fields(options)}
    for document in DOCS.rglob("*.md"):
        text = document.read_text()
        for name in re.findall(r"\bmillstream_[a-z_]+\b", text):
            assert name in metrics, f"{document.name}: {name}"
        for name in re.findall(r"`([a-z_]+_(?:ms|bytes|max))`", text):
            assert name in keys | metrics | fields, f"{document.name}: {name}"


def _json_fields(document: Path) -> set[str]:
    """Names of fields in the JSON examples of a page."""
    blocks = re.findall(r"```json\n(.*?)```", document.read_text(), flags=re.DOTALL)
    return {name for block in blocks for name in re.findall(r'"([a-z_]+)":', block)}


def test_tests_and_sources_that_documents_name_exist() -> None:
    missing = []
    for document in DOCS.rglob("*.md"):
        for name in re.findall(
            r"`((?:tests|engine|python|tools|bench)/[\w./-]+)`", document.read_text()
        ):
            if not (ROOT / name).exists():
                missing.append(f"{document.name}: {name}")
    assert missing == []


def test_decisions_are_numbered_without_holes_and_have_their_parts() -> None:
    pages = sorted((DOCS / "adr").glob("[0-9]*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    for page in pages:
        text = page.read_text()
        parts = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert parts == ["Context", "Decision", "Alternatives", "Consequences"], page.name
        assert len(text.splitlines()) <= 60, f"{page.name} is longer than a page"
