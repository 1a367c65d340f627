"""The guides say what there is: Python blocks compile and import, commands and their options exist, links lead somewhere."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import click
import pytest

from millstream.cli.main import cli
from support.server import ROOT

GUIDES = sorted(
    page for folder in ("guides", "jobs") for page in (ROOT / "docs" / folder).glob("*.md")
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
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


def test_commands_and_their_options_exist(guide: Path) -> None:
    for text in blocks(guide, "sh"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] != ["millstream"]:
                continue
            command, rest = resolved(words[1:])
            known = {name for parameter in command.params for name in parameter.opts}
            unknown = {word for word in rest if word.startswith("--")} - known
            assert not unknown, f"{line}: {unknown}"


def test_links_lead_somewhere(guide: Path) -> None:
    for target, anchor in LINK.findall(guide.read_text()):
        document = (guide.parent / target).resolve()
        assert document.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
            assert anchor[1:] in anchors, f"{target}{anchor}"
