"""The code that README.md shows, block by block."""

from __future__ import annotations

import re
from dataclasses import dataclass

from support.server import ROOT

README = ROOT / "README.md"


@dataclass(frozen=True)
class Block:
    language: str
    text: str

    @property
    def uses_spark(self) -> bool:
        return self.language == "python" and "spark" in self.text


def blocks() -> list[Block]:
    found = re.findall(r"^```(\w+)\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(language, text) for language, text in found]
