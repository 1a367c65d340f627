"""Random schemas, and random records for them: most fit, some do not, some are no JSON. From a seed alone."""

from __future__ import annotations

import json
import random
from typing import Any

PLAIN = (
    "boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "string", "binary", "date", "timestamp",
    "timestamp_ntz", "decimal(10,2)", "decimal(38,18)", "decimal(5,0)",
)  # fmt: skip
AT_ONCE = ("boolean", "smallint", "int", "bigint", "double", "string", "date", "timestamp", "decimal(10,2)", "decimal(38,18)")  # fmt: skip
"""Of these a whole block is decoded at once."""
TEXTS = (
    "", " ", "a", "ü€😀", 'q"\\\n\t', "1", "1.5", "1,000", "NaN", "-INF", "true", "YWJj", "YWI=", "YWJ", "Y W=", "null", "it's",
    "2026-11-16", "2024-02-29", "2026-02-30", "2026-13-01", "2026-1-2", "0001-01-01", "9999-12-31", "10000-01-01",
    "2026-11-16T02:03:04Z", "2026-11-16T02:03:04.123456Z", "2026-11-16 02:03:04", "2026-11-16 02:03:04.5", "2026-11-16T02:03:04",
    "2026-11-16T02:03:04+01:00", "2026-11-16 02:03:04.25-17:59", "2026-11-16T02:03:04+18:00", "2026-11-16T24:00:00Z",
    "2026-11-16T02:03:04.1234567Z", "2026-11-16T02:03:60Z", "1960-01-01T00:00:00.000001Z", "2026-11-16T02:03:04 Europe/Rome",
)  # fmt: skip
NUMBERS = (
    "0", "-0", "0.0", "-0.0", "1", "-1", "127", "128", "255", "256", "32768", "2147483648", "9223372036854775807", "9223372036854775808",
    "1e2", "1.5", "-2.25", "1e-7", "0.1", "123456789.125", "1e30", "1e400", "12345678.905", "NaN", "Infinity", "-Infinity",
    "-INF", "1" * 400, "0." + "3" * 60,
)  # fmt: skip


def schema(chance: random.Random) -> dict[str, Any]:
    """Fields by name. A type is a name, a list of one element's type, a map's value type in a tuple, or fields again."""
    at_once = chance.random() < 0.5
    count = chance.randint(1, 5)
    return {f"f{n}": chance.choice(AT_ONCE) if at_once else _type(chance, 2) for n in range(count)}


def _type(chance: random.Random, depth: int) -> Any:
    kind = chance.randrange(8) if depth else 7
    if kind == 0:
        return [_type(chance, depth - 1)]
    if kind == 1:
        return (_type(chance, depth - 1),)
    if kind == 2:
        return {name: _type(chance, depth - 1) for name in "xyz"[: chance.randint(1, 3)]}
    return chance.choice(PLAIN)


def ddl(kind: Any) -> str:
    if isinstance(kind, list):
        return f"array<{ddl(kind[0])}>"
    if isinstance(kind, tuple):
        return f"map<string,{ddl(kind[0])}>"
    if isinstance(kind, dict):
        return f"struct<{','.join(f'{name}:{ddl(inner)}' for name, inner in kind.items())}>"
    return str(kind)


def records(fields: dict[str, Any], count: int, chance: random.Random) -> list[str]:
    strange = chance.choice([0, 0, 0.02, 0.3])
    return [_record(fields, strange, chance) for _ in range(count)]


def _record(fields: dict[str, Any], strange: float, chance: random.Random) -> str:
    text = _text(fields, strange, chance)
    if chance.random() < strange / 4:
        return chance.choice(
            ["", " ", "null", "[]", "7", text + " x", text + text, f" {text}", "'", f"[{text}]"]
        )
    if chance.random() < strange / 4:
        return text.replace('"', "'")
    if chance.random() < strange / 2:
        at = chance.randrange(len(text))
        put = chance.choice(["", "", '"', "{", "}", "]", ",", ":", "\\", "\\u12", "\t", "x", "0"])
        return chance.choice(
            [text[:at], text[:at] + put + text[at + 1 :], text[:at] + put + text[at:]]
        )
    return text


def _text(kind: Any, strange: float, chance: random.Random) -> str:
    if chance.random() < 0.05:
        return "null"
    if chance.random() < strange / 3:
        return _text(_type(chance, 1), 0, chance)
    if isinstance(kind, list):
        return f"[{', '.join(_text(kind[0], strange, chance) for _ in range(chance.randrange(3)))}]"
    if isinstance(kind, tuple):
        return _object(
            [(chance.choice("abc"), kind[0]) for _ in range(chance.randrange(3))], strange, chance
        )
    if isinstance(kind, dict):
        names = [name for name in kind if chance.random() < 0.9]
        if chance.random() < strange:
            names.append(chance.choice(names or ["f0"]))
        chance.shuffle(names)
        pairs = [(name, kind.get(name, "int")) for name in names]
        return _object(
            [*pairs, ("more", "string")] if chance.random() < 0.2 else pairs, strange, chance
        )
    if chance.random() < strange:
        return chance.choice([chance.choice(NUMBERS), json.dumps(chance.choice(TEXTS)), "true"])
    return _fitting(kind, chance)


def _object(pairs: list[tuple[str, Any]], strange: float, chance: random.Random) -> str:
    colon = chance.choice([":", ": "])
    return (
        "{"
        + ",".join(f'"{name}"{colon}{_text(kind, strange, chance)}' for name, kind in pairs)
        + "}"
    )


def _fitting(kind: str, chance: random.Random) -> str:
    number = chance.randrange(-(10 ** chance.randint(0, 4)), 10 ** chance.randint(0, 4))
    if kind == "boolean":
        return chance.choice(["true", "false"])
    if kind == "tinyint":
        return str(number % 100)
    if kind in ("smallint", "int", "bigint"):
        return str(number)
    if kind in ("float", "double") or kind.startswith("decimal"):
        return str(number) if chance.random() < 0.3 else f"{number}.{chance.randrange(100):02d}"
    if kind == "string":
        return json.dumps(chance.choice(TEXTS), ensure_ascii=chance.random() < 0.5)
    if kind == "binary":
        return chance.choice(['"YWJj"', '""', '"YWI="'])
    day = f"{chance.randrange(1900, 2100)}-{chance.randrange(1, 13):02d}-{chance.randrange(1, 29):02d}"
    if kind == "date":
        return f'"{day}"'
    clock = f"{chance.randrange(24):02d}:{chance.randrange(60):02d}:{chance.randrange(60):02d}"
    end = "" if kind == "timestamp_ntz" else chance.choice(["Z", "", "+01:00", ".5Z", "-05:30"])
    return f'"{day}{chance.choice("T ")}{clock}{end}"'
