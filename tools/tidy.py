"""The house rules of docs/STYLE.md that a machine can check, as one command.

Run by `make lint` over every file that is tracked or would be. Prints one line per finding and exits
1 if there is any. Each rule is a function from a file to findings; the list of rules is at the end.

Invariants: no rule has an exception list by file name, so a rule that does not fit is changed for all;
the script needs nothing but the standard library.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

LINES_MAX = 800
SOURCE_SUFFIXES = {".py", ".pyi", ".rs", ".js", ".mjs", ".ts"}
PROSE_SUFFIXES = {".md", ".toml", ".html", ".css", ".sh", ".yml", ".yaml"}
LOCKS = {"requirements.lock", "Cargo.lock", "package-lock.json"}

# Top to bottom; a module may use the ones on lines below its own, never above or beside it.
RUST_LAYERS: list[set[str]] = [
    {"engine"},
    {"serve", "verify"},
    {"shard"},
    {"replicate", "tier"},
    {"log"},
    {"stream"},
    {"codec"},
    {"config", "refusal"},
    {"metrics"},
    {"model"},
    {"limits", "error", "io"},
]
RUST_FROM_ANYWHERE = {"report"}

# The native module is invisible to import-linter, so its rule stands here: the rest is pure Python.
ENGINE_IMPORTERS = {"server", "control", "embed", "embed.py", "testing", "testing.py"}

# Written in pieces, so that this file passes its own rules.
UNFINISHED = re.compile(r"\b(?:" + "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX"]) + r")\b")
RUST_UNFINISHED = re.compile("(?:to" + r"do!|unimple" + r"mented!)\s*\(")
MACHINE_PATH = re.compile(
    r"(?<![\w.$}:>/-])/(?:" + "|".join(["root", "home", "work", "farm"]) + r")/"
)
REGISTRY_HOST = re.compile(
    "|".join(
        [r"files\.python" + r"hosted\.org", r"pypi\." + "org/simple", r"registry\." + r"npmjs\.org"]
    )
)


@dataclass(frozen=True)
class Source:
    """One file under check: its path from the root, and its text."""

    path: Path
    text: str

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()


Rule = Callable[[Source], Iterator[str]]


def file_is_short(source: Source) -> Iterator[str]:
    if source.path.suffix in SOURCE_SUFFIXES and len(source.lines) > LINES_MAX:
        yield f"{len(source.lines)} lines, at most {LINES_MAX}: is it still about one thing?"


def module_has_header(source: Source) -> Iterator[str]:
    opening = {".py": '"""', ".pyi": "#", ".rs": "//!", ".js": "//", ".mjs": "//", ".ts": "//"}
    wanted = opening.get(source.path.suffix)
    if wanted is None:
        return
    body = [line for line in source.lines if line.strip() and not line.startswith("#!")]
    first = body[0].lstrip("r") if body else ""
    if not first.startswith((wanted, "/*") if wanted == "//" else wanted):
        yield f"starts without a module header ({wanted} what it is, where it sits, what it keeps)"


def nothing_is_unfinished(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.lines, 1):
        if UNFINISHED.search(line) or (
            source.path.suffix == ".rs" and RUST_UNFINISHED.search(line)
        ):
            yield f"line {number}: unfinished by its own words: {line.strip()[:80]}"


def no_machine_paths(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.lines, 1):
        if MACHINE_PATH.search(line):
            yield f"line {number}: a path of one machine: {line.strip()[:80]}"


def no_registry_hosts(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.lines, 1):
        if REGISTRY_HOST.search(line):
            yield f"line {number}: a registry host: {line.strip()[:80]}"


def document_has_one_title(source: Source) -> Iterator[str]:
    if source.path.suffix != ".md":
        return
    outside_code = re.sub(r"^(```|~~~).*?^\1", "", source.text, flags=re.MULTILINE | re.DOTALL)
    titles = [line for line in outside_code.splitlines() if line.startswith("# ")]
    if len(titles) != 1:
        yield f"{len(titles)} titles; a document has one"


def python_is_postponed(source: Source) -> Iterator[str]:
    """Annotations are strings everywhere, so that a type never costs an import."""
    if source.path.suffix != ".py":
        return
    has_code = re.search(
        r"^(?:import|from|def|class|async|[A-Za-z_]+\s*[:=])", source.text, re.MULTILINE
    )
    if has_code and "from __future__ import annotations" not in source.text:
        yield "lacks `from __future__ import annotations`"


def engine_is_imported_by_few(source: Source) -> Iterator[str]:
    parts = source.path.parts
    if parts[:2] != ("python", "millstream") or source.path.suffix != ".py":
        return
    imports = re.search(r"^\s*(?:from|import) millstream\._engine\b", source.text, re.MULTILINE)
    imports = imports or re.search(
        r"^\s*from millstream import .*\b_engine\b", source.text, re.MULTILINE
    )
    if imports and parts[2] not in ENGINE_IMPORTERS:
        yield "imports the native module; only " + ", ".join(sorted(ENGINE_IMPORTERS)) + " may"


def rust_layers_point_down(source: Source) -> Iterator[str]:
    parts = source.path.parts
    if parts[:3] != ("engine", "core", "src") or source.path.suffix != ".rs":
        return
    if source.path.stem.endswith("tests"):
        return  # tests may compose what production code may not
    here = parts[3].removesuffix(".rs")
    if here == "lib":
        return
    rank = {module: level for level, layer in enumerate(RUST_LAYERS) for module in layer}
    if here in RUST_FROM_ANYWHERE:
        rank = {**rank, here: len(RUST_LAYERS)}
    if here not in rank:
        yield f"the module `{here}` has no place in RUST_LAYERS of tools/tidy.py"
        return
    code = re.sub(r"//.*", "", source.text)
    code = re.split(r"#\[cfg\(test\)\]\s*mod\s", code)[0]
    for used in sorted(used_modules(code) - RUST_FROM_ANYWHERE - {here}):
        if used not in rank:
            continue
        if rank[used] <= rank[here]:
            yield f"`{here}` uses `crate::{used}`, which is not below it"


def used_modules(code: str) -> set[str]:
    """First path segments after `crate::`, with `use crate::{a, b::c}` taken apart."""
    used = set(re.findall(r"\bcrate::([a-z_]+)", code))
    for group in re.findall(r"\buse crate::\{((?:[^{}]|\{[^{}]*\})*)\}", code):
        flat = re.sub(r"\{[^{}]*\}", "", group)
        used |= {item.strip().split("::")[0] for item in flat.split(",") if item.strip()}
    return used


RULES: list[Rule] = [
    file_is_short,
    module_has_header,
    nothing_is_unfinished,
    no_machine_paths,
    no_registry_hosts,
    document_has_one_title,
    python_is_postponed,
    engine_is_imported_by_few,
    rust_layers_point_down,
]


def files_under_check(root: Path) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=root,
        check=True,
        capture_output=True,
    ).stdout.decode()
    paths = [Path(name) for name in listed.split("\0") if name]
    extensionless = {"Makefile", "run"}
    return sorted(
        path
        for path in paths
        if (path.suffix in SOURCE_SUFFIXES | PROSE_SUFFIXES or path.name in LOCKS | extensionless)
        and (root / path).is_file()
    )


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    findings = 0
    paths = files_under_check(root)
    for path in paths:
        source = Source(path, (root / path).read_text(encoding="utf-8"))
        rules: list[Rule] = [no_registry_hosts] if path.name in LOCKS else RULES
        for rule in rules:
            for finding in rule(source):
                print(f"{path}: {finding}")
                findings += 1
    print(f"tidy: {len(paths)} files, {findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
