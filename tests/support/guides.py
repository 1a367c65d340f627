"""The Python that guides show, for tests that run it as it is shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from support.server import ROOT

GUIDES = ROOT / "docs" / "guides"


def blocks_of(page: Path, language: str) -> list[str]:
    """The blocks of a document in one language, as they are shown."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return pattern.findall(page.read_text())


def python_of(page: str, instead: Mapping[str, str] | None = None) -> list[str]:
    """The blocks of a page; what is in `instead`, addresses and paths, is that of the test, and has to be in them."""
    blocks = blocks_of(GUIDES / f"{page}.md", "python")
    for shown, meant in (instead or {}).items():
        assert any(shown in block for block in blocks), f"{page}.md does not show {shown}"
        blocks = [block.replace(shown, meant) for block in blocks]
    return blocks
