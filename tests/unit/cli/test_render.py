"""What people and programs see: plain when piped, harmless and coloured on a terminal."""

from __future__ import annotations

import io
import json

import pytest

from millstream.cli import render
from millstream.types import Record, StreamInfo

OFFSET = "0_9"
JSON = "application/json"


class Screen(io.TextIOWrapper):
    """A standard output that says whether it is a terminal."""

    def __init__(self, *, terminal: bool) -> None:
        self.bytes = io.BytesIO()
        self.terminal = terminal
        super().__init__(self.bytes, encoding="utf-8", newline="")

    def isatty(self) -> bool:
        return self.terminal

    def shown(self) -> bytes:
        self.flush()
        return self.bytes.getvalue()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def record(data: bytes, value: object = None) -> Record:
    return Record(json.loads(data) if value is None else value, data, OFFSET)


def shown(records: list[Record], kind: str, *, terminal: bool = False, **options: bool) -> bytes:
    screen = Screen(terminal=terminal)
    printer = render.Printer(
        screen, as_json=options.get("as_json", False), offsets=options.get("offsets", False)
    )
    printer.print(records, kind)
    printer.finish()
    return screen.shown()


def test_json_is_one_line_per_record_in_its_own_text() -> None:
    records = [record(b'{"a": 1.10}'), record(b"[\n1,\n2]"), record(b'"x"')]
    assert shown(records, JSON) == b'{"a": 1.10}\n[1,2]\n"x"\n'


def test_bytes_are_piped_exactly() -> None:
    data = bytes(range(256))
    assert (
        shown([record(data, data), record(b"no newline", b"")], "image/png") == data + b"no newline"
    )


def test_a_record_cannot_drive_the_terminal() -> None:
    evil = b"\x1b]0;owned\x07\x1b[2J\xff ok\n"
    assert shown([record(evil, evil)], "text/plain", terminal=True) == (
        b"\\x1b]0;owned\\x07\\x1b[2J\\xff ok\n"
    )


def test_the_prompt_does_not_stick_to_the_last_record() -> None:
    assert shown([record(b"hi", b"hi")], "text/plain", terminal=True) == b"hi\n"
    assert shown([record(b"hi\n", b"hi\n")], "text/plain", terminal=True) == b"hi\n"


def test_json_is_coloured_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    records = [record(b'{"a":[1,true,"x"]}')]
    coloured = shown(records, JSON, terminal=True)
    assert coloured == (
        b'{\x1b[34m"a"\x1b[0m:[\x1b[36m1\x1b[0m,\x1b[33mtrue\x1b[0m,\x1b[32m"x"\x1b[0m]}\n'
    )
    assert b"\x1b" not in shown(records, JSON)
    monkeypatch.setenv("NO_COLOR", "1")
    assert b"\x1b" not in shown(records, JSON, terminal=True)


def test_offsets_stand_before_records() -> None:
    assert shown([record(b"1"), record(b"2")], JSON, offsets=True) == b"0_9\t1\n0_9\t2\n"
    assert shown([record(b"x", b"x")], "text/plain", offsets=True) == b"0_9\tx\n"


@pytest.mark.parametrize(
    ("data", "kind", "document"),
    [
        (b'{"a":1}', JSON, {"offset": OFFSET, "value": {"a": 1}}),
        ("ü\n".encode(), "text/plain", {"offset": OFFSET, "text": "ü\n"}),
        (b"\xff", "text/plain", {"offset": OFFSET, "base64": "/w=="}),
        (b"\x00\x01", "image/png", {"offset": OFFSET, "base64": "AAE="}),
    ],
)
def test_json_output_keeps_every_byte(data: bytes, kind: str, document: dict[str, object]) -> None:
    value = json.loads(data) if kind == JSON else data
    assert json.loads(shown([record(data, value)], kind, as_json=True)) == document


def test_the_list_is_a_table_for_people_and_tabs_for_programs() -> None:
    rows = [
        StreamInfo("a", JSON, "0_1", durability="fsync", records=1200, bytes=3_000_000),
        StreamInfo("long/er", "text/plain", "0_2", closed=True),
    ]
    piped = Screen(terminal=False)
    render.print_streams(rows, piped)
    assert piped.shown().decode() == (
        "a\tapplication/json\tfsync\t1200\t3000000\topen\nlong/er\ttext/plain\t-\t-\t-\tclosed\n"
    )
    table = Screen(terminal=True)
    render.print_streams(rows, table)
    lines = table.shown().decode().splitlines()
    assert "PATH" in lines[0]
    assert lines[1].split() == ["a", JSON, "fsync", "1,200", "2.9", "MiB", "open"]
    nothing = Screen(terminal=True)
    render.print_streams([], nothing)
    assert nothing.shown() == b"no streams\n"


def test_sizes_for_people() -> None:
    assert [render.human_bytes(n) for n in (0, 1023, 1536, 5 << 30, 1 << 45)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "32.0 TiB",
    ]
