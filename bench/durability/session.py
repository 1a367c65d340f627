"""One run of a durability benchmark: its options, its result folder, its report.

Every record is on disk as soon as it is measured: `results.json` is replaced whole after each, so
a run that is cut off still leaves what it had. The tables are made from that document alone, and
`--from results.json` makes them again without measuring.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from comparison import cells, machine
from comparison.servers import BENCH, KINDS, ROOT, BenchError, Kind, commit

Document = dict[str, Any]


def parser(description: str | None, *, repetitions: int) -> argparse.ArgumentParser:
    """The options that all three benchmarks take."""
    made = argparse.ArgumentParser(description=(description or "").split("\n", 1)[0])
    made.add_argument("--quick", action="store_true", help="short and small: indicative only")
    made.add_argument(
        "--repetitions", type=int, help=f"repetitions per cell ({repetitions}, quick: 1)"
    )
    made.add_argument("--quiet-wait", type=float, help="seconds to wait for a quiet machine (15)")
    made.add_argument("--output", type=Path, help="result folder (bench/results/<date>-<name>)")
    made.add_argument(
        "--markdown",
        action="store_true",
        help="standard output is the tables alone; what happens goes to standard error",
    )
    made.add_argument("--from", dest="source", type=Path, help="report an existing results.json")
    made.set_defaults(default_repetitions=repetitions)
    return made


def finish(made: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Parses and fills in the defaults that depend on `--quick`."""
    options = made.parse_args(arguments)
    if options.repetitions is None:
        options.repetitions = 1 if options.quick else options.default_repetitions
    if options.quiet_wait is None:
        options.quiet_wait = 2.0 if options.quick else 15.0
    if options.repetitions < 1 or options.quiet_wait < 0:
        made.error("--repetitions must be at least 1 and --quiet-wait not negative")
    return options


def millstream(*flags: str) -> Kind:
    """Millstream with further flags of `millstream serve`."""
    plain = KINDS["millstream"]
    return replace(plain, command=lambda data, port: [*plain.command(data, port), *flags])


class Session:
    """Collects the records of a run and keeps them on disk."""

    def __init__(self, name: str, options: argparse.Namespace, arguments: Sequence[str]) -> None:
        started = datetime.now(UTC)
        self.folder = _folder(name, options, started)
        self._markdown: bool = options.markdown
        self.document: Document = {
            "benchmark": name,
            "started": started.strftime("%Y-%m-%d %H:%M UTC"),
            "command": " ".join([f".venv/bin/python bench/{name}.py", *arguments]),
            "source": commit(ROOT),
            "quick": options.quick,
            "repetitions": options.repetitions,
            "machine": machine.describe(BENCH),
            "complete": False,
            "records": [],
        }

    def say(self, text: str) -> None:
        print(text, file=sys.stderr if self._markdown else sys.stdout, flush=True)

    def add(self, record: dict[str, Any]) -> None:
        self.document["records"].append(record)
        self._write()

    def close(self) -> None:
        self.document["complete"] = True
        self._write()

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self.folder / "results.json"
        fresh = target.with_suffix(".new")
        fresh.write_text(json.dumps(self.document, indent=1) + "\n")
        os.replace(fresh, target)


def _folder(name: str, options: argparse.Namespace, started: datetime) -> Path:
    """A folder that does not exist yet: no run overwrites another."""
    if options.output is not None:
        chosen = Path(options.output)
        if chosen.exists():
            raise BenchError(f"{chosen} exists already")
        return chosen
    stem = f"{started:%Y-%m-%d}-{name}" + ("-quick" if options.quick else "")
    number, folder = 1, BENCH / "results" / stem
    while folder.exists():
        number += 1
        folder = BENCH / "results" / f"{stem}-{number}"
    return folder


def heading(document: Document) -> list[str]:
    """When, what, where: the lines above the tables."""
    where = document["machine"]
    unfinished = "" if document["complete"] else " The run was cut off."
    quick = " Quick run: indicative only." if document["quick"] else ""
    return [
        f"{document['started']}, `{document['command']}`, source {document['source']}.{quick}{unfinished}",
        f"{where['processor']}, {where['cores']} cores, {where['memory']}, {where['data directories']}.",
    ]


Measure = Callable[[Session, argparse.Namespace, Path], None]
Report = Callable[[Document], tuple[list[str], bool]]


def run(
    name: str, options: argparse.Namespace, arguments: list[str], measure: Measure, report: Report
) -> int:
    """Measures (or reads an earlier run), prints the tables, and says whether all is well."""
    if options.source is not None:
        document = json.loads(Path(options.source).read_text())
        if document.get("benchmark") != name:
            raise BenchError(f"{options.source} is no result of {name}.py")
        return _print(document, report)
    KINDS["millstream"].install()
    cells.build_load_generator()
    session = Session(name, options, _shown(arguments))
    # A folder of its own: two benchmarks at a time disturb, but do not destroy, each other.
    root = BENCH / f".data-{name}-{os.getpid()}"
    root.mkdir()
    try:
        measure(session, options, root)
    finally:
        shutil.rmtree(root)
    session.close()
    code = _print(session.document, report, session.folder / "REPORT.md")
    inside = session.folder.is_relative_to(BENCH.parent)
    written = session.folder.relative_to(BENCH.parent) if inside else session.folder
    session.say(f"\nwritten: {written}")
    return code


def _shown(arguments: Sequence[str]) -> list[str]:
    """The arguments that made the figures: not those that say where and how to print them."""
    hidden = ("--markdown", "--output")
    following_output = [False, *(one == "--output" for one in arguments)]
    return [
        one
        for one, follows in zip(arguments, following_output, strict=False)
        if not follows and one.split("=", 1)[0] not in hidden
    ]


def _print(document: Document, report: Report, file: Path | None = None) -> int:
    lines, fine = report(document)
    text = "\n".join([*heading(document), "", *lines])
    print(text)
    if file is not None:
        title = f"# Benchmark: {document['benchmark']}"
        file.write_text(f"{title}\n\n{text}\n")
    return 0 if fine else 1


def main(name: str, body: Callable[[list[str]], int]) -> None:
    """Runs a script: 0 fine, 1 a bound or a verification failed, 2 it could not run."""
    try:
        sys.exit(body(sys.argv[1:]))
    except BenchError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)


def verdict(passed: bool | None, *, final: bool) -> str:
    if passed is None:
        return "not measured"
    word = "pass" if passed else "FAIL"
    return word if final else f"{word} (indicative)"
