"""What users read is plain English: turns of phrase that were found to puzzle them do not come back."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

PUZZLING = re.compile(
    r"get on\b|(?<!here) is no (?!longer|more)|that is none|in no known way|\bso many\b|be told|under way"
    r"|looked into|was ended|\bits answer|given up:"
)
RUST_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def rust_strings(path: Path) -> list[tuple[int, str]]:
    """String literals outside of comments, assertions and tests."""
    code = path.read_text().split("#[cfg(test)]\nmod tests {")[0]
    found: list[tuple[int, str]] = []
    for number, line in enumerate(code.splitlines(), 1):
        if not line.lstrip().startswith(("//", "debug_assert", "assert", ".expect")):
            found += [(number, text) for text in RUST_STRING.findall(line)]
    return found


def python_strings(path: Path) -> list[tuple[int, str]]:
    """String literals that are no docstrings, also those that only document a field."""
    tree = ast.parse(path.read_text())
    documenting = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in documenting
    ]


def sources() -> list[tuple[str, int, str]]:
    rust = [path for path in ROOT.glob("engine/*/src/**/*.rs") if "sim" not in path.parts]
    python = ROOT.glob("python/millstream/**/*.py")
    texts = [(path, rust_strings(path)) for path in rust if not path.stem.endswith("_tests")]
    texts += [(path, python_strings(path)) for path in python]
    return [
        (str(path.relative_to(ROOT)), number, text)
        for path, found in texts
        for number, text in found
    ]


def test_messages_have_no_puzzling_turns_of_phrase() -> None:
    texts = sources()
    assert len(texts) > 5000, "the strings were not found"
    puzzling = [entry for entry in texts if PUZZLING.search(entry[2])]
    assert not puzzling
