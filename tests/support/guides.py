"""The Python that guides show, for tests that run it as it is shown."""

from __future__ import annotations

import re
from collections.abc import Mapping

from support.server import ROOT

GUIDES = ROOT / "docs" / "guides"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def python_of(page: str, instead: Mapping[str, str] | None = None) -> list[str]:
    """The blocks of a page; what is in `instead`, addresses and paths, is that of the test, and has to be in them."""
    text = (GUIDES / f"{page}.md").read_text()
    blocks = BLOCK.findall(text)
    for shown, meant in (instead or {}).items():
        assert any(shown in block for block in blocks), f"{page}.md does not show {shown}"
        blocks = [block.replace(shown, meant) for block in blocks]
    return blocks
