"""The guides say what there is: Python blocks compile and import, commands and their options exist, links lead somewhere."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from millstream.cli.main import cli
from support.server import ROOT

GUIDES = sorted(
    page for folder in ("guides", "jobs") for page in (ROOT / "docs" / folder).glob("*.md")
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:[*/\d ]+ )?(?:ExecStart=)?(?:/\S*/)?millstream (\S.*)")
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+\.md)(#[^)]+)?\)")


def blocks(guide: Path, language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(guide.read_text()) if name == language]


@pytest.fixture(params=GUIDES, ids=[guide.stem for guide in GUIDES])
def guide(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_there_are_guides() -> None:
    assert {"spark", "spark-standalone", "spark-yarn", "spark-kubernetes", "spark-connect"} <= {
        guide.stem for guide in GUIDES
    }


def test_python_blocks_compile_and_import_what_exists(guide: Path) -> None:
    for text in blocks(guide, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("millstream"):
                exec(ast.unparse(node), {})


def resolved(words: list[str]) -> tuple[click.Command, list[str]]:
    command: click.Command = cli
    while words and isinstance(command, click.Group) and not words[0].startswith("-"):
        found = command.get_command(click.Context(command), words[0])
        assert found is not None, f"there is no command `{words[0]}`"
        command, words = found, words[1:]
    return command, words


def lines(guide: Path) -> Iterator[str]:
    """Lines of a shell, of a crontab and of a unit, and texts of a program: where a command may stand."""
    for language in ("sh", "ini"):
        for text in blocks(guide, language):
            yield from text.replace("\\\n", " ").splitlines()
    for text in blocks(guide, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_commands_and_their_options_exist(guide: Path) -> None:
    for line in lines(guide):
        called = COMMAND.search(line)
        if called is None:
            continue
        command, rest = resolved(shlex.split(called[1], comments=True))
        known = {name for parameter in command.params for name in parameter.opts}
        unknown = {word for word in rest if word.startswith("--")} - known
        assert not unknown, f"{line}: {unknown}"
        assert not isinstance(command, click.Group), line


def test_commands_of_schedulers_are_looked_at() -> None:
    page = ROOT / "docs" / "guides" / "scheduling.md"
    assert len([line for line in lines(page) if COMMAND.search(line)]) == 4


def test_links_lead_somewhere(guide: Path) -> None:
    for target, anchor in LINK.findall(guide.read_text()):
        document = (guide.parent / target).resolve()
        assert document.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
            assert anchor[1:] in anchors, f"{target}{anchor}"
