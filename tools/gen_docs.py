"""The parts of docs/ that are made from the code and from kept runs: settings, command line, metrics, error codes, the
Python client, what was killed, what was measured.

Run by hand after a change (`python tools/gen_docs.py`), and as `--check` by tests/docs, which fails with a diff when a
document is stale. A document is written by hand except for its regions, each between two marks:

    <!-- begin generated: metrics -->
    <!-- end generated: metrics -->

Invariants: the code is the only source of a region; a line of a Rust table that cannot be read is an error, never left
out; every region of `REGIONS` is in a document, and every mark in a document names a region.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

import durability_table
import python_reference
import spark_speed
from millstream import errors, settings
from millstream.cli.main import PROGRAM, cli
from millstream.spark import options as spark_options

ROOT = Path(__file__).resolve().parent.parent
ENGINE = ROOT / "engine/core/src"
HELP_COLUMNS = 100
TEXT = r'"((?:[^"\\]|\\.)*)"'
ERROR_LINE = re.compile(rf"(\w+) {TEXT} (\d+) {TEXT} {TEXT};")
HISTOGRAM = re.compile(
    r'APPEND_SECONDS: \(&str, &str, &str\) = \(\s*"([^"]+)",\s*"([^"]+)",\s*"([^"]+)"'
)
METRIC_LINE = re.compile(rf"(\w+) {TEXT} {TEXT} {TEXT};")
MARK = re.compile(r"^<!-- (begin|end) generated: ([a-z-]+) -->$")
GROUP_TITLES = {
    "server": "Server",
    "live": "Live reading",
    "limits": "Limits",
    "storage": "Storage",
    "client": "Client commands",
}


class Unreadable(Exception):  # noqa: N818 - named by what happened
    """A source or a document is not in the form that this script reads."""


@dataclass(frozen=True)
class ErrorRow:
    code: str
    status: int
    title: str
    hint: str


def rust_table(path: Path, macro: str, line_form: re.Pattern[str]) -> Iterator[tuple[str, ...]]:
    """The lines of a Rust table `macro! { ... }`, taken apart by `line_form`."""
    body = re.search(rf"^{macro}! \{{\n(.*?)^\}}", path.read_text(), re.MULTILINE | re.DOTALL)
    if body is None:
        raise Unreadable(f"{path.name} has no table `{macro}!`")
    for line in body[1].splitlines():
        match = line_form.fullmatch(line.strip())
        if match is None:
            raise Unreadable(f"{path.name}: not a line of `{macro}!`: {line.strip()}")
        yield tuple(group.replace('\\"', '"').replace("\\\\", "\\") for group in match.groups())


def error_rows() -> list[ErrorRow]:
    rows = rust_table(ENGINE / "error.rs", "error_codes", ERROR_LINE)
    return [ErrorRow(code, int(status), title, hint) for _, code, status, title, hint in rows]


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell(text) for text in line) + " |" for line in lines)


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def error_codes() -> str:
    """For the HTTP reference: what a client of any language sees."""
    rows = [(str(row.status), code(row.code), row.title, row.hint) for row in by_status()]
    return table(("status", "code", "title", "hint"), rows)


def by_status() -> list[ErrorRow]:
    return sorted(error_rows(), key=lambda row: row.status)


def python_errors() -> str:
    """The same codes with the exception that the Python client raises."""
    rows = []
    for row in error_rows():
        raised = errors.CODES.get(row.code)
        if raised is None:
            raise Unreadable(f"errors.CODES lacks `{row.code}` of error.rs")
        retried = "yes" if raised.retryable else ""
        rows.append((code(row.code), str(row.status), code(raised.__name__), retried, row.title))
    return table(("code", "status", "exception", "retryable", "title"), rows)


def client_errors() -> str:
    """Exceptions that no answer of a Millstream server leads to by its code."""
    served = {errors.CODES[row.code] for row in error_rows()}
    rows = []
    for name, found in vars(errors).items():
        if not (inspect.isclass(found) and issubclass(found, errors.MillstreamError)):
            continue
        if found in served or any(issubclass(other, found) for other in served):
            continue
        first = (inspect.getdoc(found) or "").splitlines()[0]
        rows.append((code(found.code), code(name), first))
    return table(("code", "exception", "meaning"), rows)


def metrics() -> str:
    rows = rust_table(ENGINE / "metrics.rs", "metrics", METRIC_LINE)
    lines = [(code(name), kind, text) for _, kind, name, text in rows]
    source = (ENGINE / "metrics.rs").read_text(encoding="utf-8")
    histogram = HISTOGRAM.search(source)
    if histogram is None:
        raise Unreadable("metrics.rs has no histogram")
    name, kind, text = histogram.groups()
    lines.append((code(name), kind, text))
    return table(("metric", "kind", "meaning"), lines)


def all_settings() -> str:
    parts = []
    for group in dict.fromkeys(row.group for row in settings.TABLE):
        rows = [setting_line(row) for row in settings.TABLE if row.group == group]
        head = ("TOML key", "flag", "environment", "default", "allowed", "meaning")
        parts.append(f"## {GROUP_TITLES[group]}\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def setting_line(row: settings.Setting) -> tuple[str, ...]:
    return (
        code(row.name),
        code(row.flag),
        code(row.environment),
        code(row.default_text) or "unset",
        allowed(row),
        row.help,
    )


def allowed(row: settings.Setting) -> str:
    """What a value may be, in the units in which it is written."""
    if row.choices:
        return ", ".join(code(choice) for choice in row.choices)
    if row.minimum is None or row.maximum is None:
        return {
            settings.Kind.FLAG: "true, false",
            settings.Kind.PATH: "a directory",
            settings.Kind.PLACES: "a list",
            settings.Kind.ORIGINS: "a list",
        }.get(row.kind, "text")
    shown = settings.format_size if row.kind is settings.Kind.SIZE else str
    return f"{shown(row.minimum)} to {shown(row.maximum)}"


def commands() -> str:
    parts = []
    for names, command in command_tree((PROGRAM,), cli):
        context: click.Context | None = None
        for name in names:
            context = click.Context(
                command if name is names[-1] else cli,
                info_name=name,
                parent=context,
                terminal_width=HELP_COLUMNS,
                max_content_width=HELP_COLUMNS,
                help_option_names=["-h", "--help"],
                color=False,
            )
        if context is None:
            raise Unreadable("a command without a name")
        shown = command.get_help(context).replace("\b", "")  # a mark of click that is not for eyes
        text = "\n".join(line.rstrip() for line in shown.splitlines())
        parts.append(f"## {' '.join(names)}\n\n```text\n{text}\n```")
    return "\n\n".join(parts)


def command_tree(
    names: tuple[str, ...], command: click.Command
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    yield names, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from command_tree((*names, name), found)


def spark_option_tables() -> str:
    """The options of the Spark connector, for reading and for writing."""
    groups = (
        ("Both", spark_options.ALL),
        ("Reading", spark_options.READS),
        ("Streaming reads", spark_options.STREAM),
        ("Batch reads", spark_options.BATCH),
        ("Writing", spark_options.WRITE),
    )
    parts = []
    for title, use in groups:
        rows = [
            (code(option.name), option.default or "unset", option.meaning, CHANGES[option.change])
            for option in spark_options.TABLE
            if option.use == use
        ]
        head = ("option", "default", "meaning", "may change between runs")
        parts.append(f"### {title}\n\n{table(head, rows)}")
    if sum(part.count("\n| `") for part in parts) != len(spark_options.TABLE):
        raise Unreadable("an option of the Spark connector is in no group")
    return "\n\n".join(parts)


CHANGES = {"yes": "yes", "new": "no: a new checkpoint"}

REGIONS: dict[str, Callable[[], str]] = {
    "error-codes": error_codes,
    "python-errors": python_errors,
    "client-errors": client_errors,
    "metrics": metrics,
    "settings": all_settings,
    "commands": commands,
    "durability": durability_table.durability,
    "spark-options": spark_option_tables,
    "spark-speed": spark_speed.spark_speed,
    "python-api": python_reference.python_api,
    "python-aio": python_reference.python_aio,
}


def with_regions(path: Path, found: set[str]) -> str:
    """The document's text with every region made anew; notes in `found` which ones it has."""
    lines: list[str] = []
    inside: str | None = None
    for line in path.read_text().splitlines():
        mark = MARK.match(line)
        if mark is None:
            if inside is None:
                lines.append(line)
            continue
        kind, name = mark.groups()
        if (
            name not in REGIONS
            or (kind == "begin") != (inside is None)
            or inside not in (None, name)
        ):
            raise Unreadable(f"{path.name}: misplaced or unknown mark: {line}")
        if kind == "begin":
            inside = name
            lines += [line, "", REGIONS[name](), ""]
            found.add(name)
        else:
            inside = None
            lines.append(line)
    if inside is not None:
        raise Unreadable(f"{path.name}: region `{inside}` has no end")
    return "\n".join(lines) + "\n"


def stale_documents(docs: Path) -> dict[Path, str]:
    """Documents that differ from what the code says, with the text they should have."""
    found: set[str] = set()
    wanted = {path: with_regions(path, found) for path in sorted(docs.rglob("*.md"))}
    if missing := set(REGIONS) - found:
        raise Unreadable("no document has the region " + ", ".join(sorted(missing)))
    return {path: text for path, text in wanted.items() if text != path.read_text()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the generated tables of docs/.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 with a diff")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where the documents are")
    arguments = parser.parse_args()
    try:
        stale = stale_documents(arguments.docs)
    except (Unreadable, durability_table.Broken) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path, text in stale.items():
        name = path.relative_to(arguments.docs).as_posix()
        if arguments.check:
            was, now = path.read_text().splitlines(True), text.splitlines(True)
            sys.stdout.writelines(
                difflib.unified_diff(was, now, f"{name} as it is", f"{name} made")
            )
        else:
            path.write_text(text)
            print(f"wrote {name}")
    if arguments.check and stale:
        print("error: stale documents; run `python tools/gen_docs.py`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
