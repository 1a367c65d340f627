"""How things look: records, tables, progress. Colour and escapes only on a terminal.

Where it sits: used by the commands; knows nothing about servers.

Invariants:
- I-REN-1  What is piped is plain: JSON records one per line, byte streams byte for byte.
- I-REN-2  On a terminal no byte of a record reaches it as a control character.
- I-REN-3  Colour never carries meaning alone, and NO_COLOR switches it off.
"""

from __future__ import annotations

import base64
import json
import os
import re
import time
from typing import IO, TYPE_CHECKING, Any, TextIO, TypeAlias

from millstream.types import LiveMode as _LiveMode
from millstream.types import is_json_type, is_text_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from millstream.client.sync.producer import Producer
    from millstream.types import Record, StreamInfo

LiveMode: TypeAlias = _LiveMode

DIM, RED, GREEN, YELLOW, BLUE, CYAN = "2", "31", "32", "33", "34", "36"
_TOKEN = re.compile(
    r'("(?:[^"\\]|\\.)*")(\s*:)?|(-?[0-9][0-9.eE+-]*)|\b(true|false|null)\b', re.DOTALL
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def use_colour(stream: TextIO) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str, colour: str) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m"


def paint_json(text: str) -> str:
    """Colour the tokens of a JSON text; the text itself stays as it is."""

    def token(match: re.Match[str]) -> str:
        string, colon, number, word = match.groups()
        if string is not None:
            return paint(string, BLUE) + colon if colon else paint(string, GREEN)
        return paint(number, CYAN) if number is not None else paint(word, YELLOW)

    return _TOKEN.sub(token, text)


def harmless(text: str) -> str:
    """Show control characters as escapes, so that a record cannot drive the terminal."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


class Printer:
    """Prints records: for a person on a terminal, for a program otherwise."""

    def __init__(self, stdout: TextIO, *, as_json: bool, offsets: bool, live: bool = False) -> None:
        self._text = stdout
        self._binary: IO[bytes] = stdout.buffer
        self._as_json = as_json
        self._offsets = offsets
        self._terminal = stdout.isatty()
        self._colour = use_colour(stdout)
        self._live = live
        self._open_line = False

    def print(self, records: Sequence[Record], content_type: str) -> None:
        json_stream = is_json_type(content_type)
        if not self._as_json and not json_stream and not self._terminal and not self._offsets:
            for record in records:
                self._binary.write(record.data)
        else:
            lines = [self._line(record, content_type, json_stream) for record in records]
            self._binary.write("".join(lines).encode("utf-8", "surrogateescape"))
            if lines:
                self._open_line = not lines[-1].endswith("\n")
        if self._live or self._terminal:
            self._binary.flush()

    def _line(self, record: Record, content_type: str, json_stream: bool) -> str:
        if self._as_json:
            return json.dumps(describe(record, content_type), ensure_ascii=False) + "\n"
        prefix = self._prefix(record)
        if json_stream:
            text = _one_line(record)
            if self._terminal:
                text = harmless(text)
            return prefix + (paint_json(text) if self._colour else text) + "\n"
        if self._terminal:
            text = harmless(record.data.decode("utf-8", "backslashreplace"))
        else:
            text = record.data.decode("utf-8", "surrogateescape")
        return prefix + text + ("\n" if prefix and not text.endswith("\n") else "")

    def _prefix(self, record: Record) -> str:
        if not self._offsets:
            return ""
        return (paint(record.offset, DIM) if self._colour else record.offset) + "\t"

    def finish(self) -> None:
        """A person's next prompt must not stick to the last record."""
        if self._terminal and self._open_line:
            self._text.write("\n")
        self._text.flush()


def _one_line(record: Record) -> str:
    """The record's own text; re-written only if it spans lines, which would break line tools."""
    text = record.text
    if "\n" in text or "\r" in text:
        return json.dumps(record.value, ensure_ascii=False, separators=(",", ":"))
    return text


def describe(record: Record, content_type: str) -> dict[str, Any]:
    """One record as `--json` prints it: `value`, `text` or `base64`, whichever fits."""
    if is_json_type(content_type):
        return {"offset": record.offset, "value": record.value}
    if is_text_type(content_type):
        try:
            return {"offset": record.offset, "text": record.data.decode("utf-8")}
        except UnicodeDecodeError:
            pass
    return {"offset": record.offset, "base64": base64.b64encode(record.data).decode("ascii")}


def print_streams(rows: Iterable[StreamInfo], stdout: TextIO) -> None:
    """A table on a terminal; tab-separated lines, path first, otherwise."""
    if not stdout.isatty():
        stdout.writelines("\t".join(_cells(row, plain=True)) + "\n" for row in rows)
        return
    header = ("PATH", "TYPE", "CLASS", "RECORDS", "BYTES", "STATE")
    table = [header, *(tuple(_cells(row, plain=False)) for row in rows)]
    if len(table) == 1:
        stdout.write("no streams\n")
        return
    widths = [max(len(line[column]) for line in table) for column in range(len(header))]
    colour = use_colour(stdout)
    for index, line in enumerate(table):
        cells = [
            cell.rjust(width) if column in (3, 4) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        text = "  ".join(cells).rstrip()
        stdout.write((paint(text, DIM) if index == 0 and colour else text) + "\n")


def _cells(row: StreamInfo, *, plain: bool) -> list[str]:
    size = row.bytes
    return [
        row.path if plain else harmless(row.path),
        row.content_type,
        row.durability or "-",
        "-" if row.records is None else str(row.records) if plain else f"{row.records:,}",
        "-" if size is None else str(size) if plain else human_bytes(size),
        "closed" if row.closed else "open",
    ]


def print_info(info: StreamInfo, stdout: TextIO) -> None:
    created = None
    if info.created_at_ms is not None:
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(info.created_at_ms / 1000))
    lines: list[tuple[str, object]] = [
        ("path", info.path),
        ("content type", info.content_type),
        ("state", "closed" if info.closed else "open"),
        ("tail", info.tail),
        ("durability", info.durability),
        ("records", info.records),
        ("bytes", info.bytes),
        ("ttl seconds", info.ttl_seconds),
        ("expires at", info.expires_at),
        ("created at", created),
        ("forked from", info.forked_from),
        ("incarnation", info.incarnation),
    ]
    colour = use_colour(stdout)
    for name, value in lines:
        if value is not None:
            label = f"{name}:".ljust(14)
            stdout.write(f"{paint(label, DIM) if colour else label} {value}\n")


def human_bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


class Progress:
    """A counter on stderr while a long input is read; silent unless a person watches."""

    PAUSE_SECONDS = 0.2
    FIRST_SECONDS = 0.5

    def __init__(self, stderr: TextIO) -> None:
        self._stderr = stderr
        self._shown = stderr.isatty()
        self._started = time.monotonic()
        self._next = self._started + self.FIRST_SECONDS
        self._bytes = 0
        self._width = 0

    def update(self, size: int, producer: Producer) -> None:
        self._bytes += size
        if not self._shown:
            return
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self.PAUSE_SECONDS
            done = producer.acknowledged
            rate = done / (now - self._started)
            read = human_bytes(self._bytes)
            self._show(f"{done:,} records acknowledged, {read} read, {rate:,.0f} records/s")

    def _show(self, text: str) -> None:
        self._stderr.write("\r" + text.ljust(self._width))
        self._stderr.flush()
        self._width = len(text)

    def finish(self) -> None:
        if self._width:
            self._stderr.write("\r" + " " * self._width + "\r")
            self._stderr.flush()
