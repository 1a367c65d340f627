r"""The shape of records that fit a schema, as a pattern for Arrow's matcher.

Where it sits: below `blocks.py`, which leaves records of another shape to `convert.py` once a block was refused.

    (?: [{,] (?: "id":NUMBER | "other name":ANYTHING ) )+ \} \z

Invariant I-SHA-1: nothing is decided by it. A record of another shape may fit as well, and costs time; most that have
this shape are what the block parser takes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa

_GAP: Final = r"[ \t\r]*"
_HEX: Final = "[0-9a-fA-F]"
_PAIR: Final = rf"[dD][89abAB]{_HEX}{{2}}\\u[dD][c-fC-F]{_HEX}{{2}}"
_ESCAPE: Final = rf'\\(?:["\\/bfnrt]|u(?:[0-9abcefABCEF]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}}|{_PAIR}))'
_CHARACTERS: Final = rf'(?:[^"\\\x00-\x1f]|{_ESCAPE})*"'
_TEXT: Final = f'"{_CHARACTERS}'
_DIGITS: Final = "(?:0|[1-9][0-9]*)"
_EXPONENT: Final = r"(?:[eE][+-]?[0-9]{1,2})?"
_ATOM: Final = rf"{_TEXT}|-?{_DIGITS}(?:\.[0-9]+)?{_EXPONENT}|true|false|null"
# Arrow takes the integer -0 for -0.0, unlike Spark, and of too many digits makes no infinity.
_FLOAT: Final = (
    rf"(?:0|-?[1-9][0-9]{{0,40}})(?:\.[0-9]+)?{_EXPONENT}|-0\.[0-9]*[1-9][0-9]*{_EXPONENT}"
)
_LEAP: Final = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"
DATE: Final = (
    rf"(?:[0-9]{{4}}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP})"
)
_CLOCK: Final = r"[T ](?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
TIME: Final = rf"{DATE}{_CLOCK}(?:Z|[+-](?:0[0-9]|1[0-7]):[0-5][0-9])"
"""Days and times in forms of ISO 8601 that exist."""


_ANYTHING: Final = rf"{_ATOM}|[\[{{](?:{_ATOM}|[\[\]{{}},: \t\r])*[\]}}]"
"""Objects and lists as well, but inside them order and brackets are not looked at."""
UTF_8: Final = (
    r"^(?:[\x00-\x7f]|[\xc2-\xdf][\x80-\xbf]|\xe0[\xa0-\xbf][\x80-\xbf]|[\xe1-\xec\xee\xef][\x80-\xbf]{2}"
    r"|\xed[\x80-\x9f][\x80-\xbf]|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}|\xf4[\x80-\x8f][\x80-\xbf]{2})*\z"
)


def of_record(fields: Iterable[pa.Field], *, utc: bool) -> str:
    return rf"^{_object(fields, utc)}[ \t\r\n]*\z"


def unquoted(fields: Iterable[pa.Field]) -> str:
    """Values that are no text in fields that hold nothing else at any depth; empty if there is no such field."""
    kinds: dict[str, bool] = {}
    for field in _at_any_depth(fields):
        kinds[field.name] = kinds.get(field.name, True) and pa.types.is_string(field.type)
    found = "|".join(name(one) for one, is_text in kinds.items() if is_text)
    return rf"((?:{found}){_GAP})(-?[1-9][0-9]*|0|true|false)([ \t\r,}}])" if found else ""


def name(text: str) -> str:
    """A name and its colon."""
    return _literal(json.dumps(text, ensure_ascii=False).encode()) + f"{_GAP}:"


def _at_any_depth(fields: Iterable[pa.Field]) -> Iterator[pa.Field]:
    for field in fields:
        yield field
        kind = field.type
        yield from _at_any_depth([kind.field(n) for n in range(kind.num_fields)])


def _object(fields: Iterable[pa.Field], utc: bool) -> str:
    """Known names with values of their types, and other names with any. It may begin with a comma: that is half as long."""
    names: dict[str, list[bytes]] = {}
    for field in fields:
        name = json.dumps(field.name, ensure_ascii=False)[1:].encode()
        names.setdefault(_value(field.type, utc), []).append(name)
    known = (
        rf'"(?:{"|".join(map(_literal, found))}){_GAP}:{_GAP}(?:{value}|null)'
        for value, found in names.items()
    )
    others = _others([name for found in names.values() for name in found])
    pair = "|".join([*known, rf'"(?:{others}){_GAP}:{_GAP}(?:{_ANYTHING})'])
    return rf"(?:\{{{_GAP}|(?:[{{,]{_GAP}(?:{pair}){_GAP})+)\}}"


def _literal(text: Iterable[int]) -> str:
    """What matches these bytes."""
    return "".join(re.escape(chr(one)) if one < 128 else rf"\x{one:02x}" for one in text)


def _others(names: list[bytes]) -> str:
    """Names other than these; all end with their quote. What has an escape may be one of them."""
    behind: dict[bytes, set[int]] = {b"": set()}
    for name in names:
        for place, one in enumerate(name):
            behind.setdefault(name[:place], set()).add(one)
    return "|".join(
        rf'{_literal(begin)}(?:[^"\\\x00-\x1f{_literal(known)}][^"\\\x00-\x1f]*)'
        + ('"' if ord('"') in known else '?"')
        for begin, known in sorted(behind.items())
    )


def _value(kind: pa.DataType, utc: bool) -> str:
    types = pa.types
    if types.is_boolean(kind):
        return "true|false"
    if types.is_integer(kind):
        return f"-?(?:{_up_to(str(2 ** (kind.bit_width - 1) - 1))})"
    if types.is_floating(kind):
        return _FLOAT
    if types.is_decimal(kind):
        digits = kind.precision - kind.scale
        number = rf"-?(?:0|[1-9][0-9]{{0,{digits - 1}}})" if digits > 0 else "-?0"
        number += rf"(?:\.[0-9]{{1,{kind.scale}}})?" if kind.scale else ""
        return f'{number}|"{number}"'
    if types.is_date(kind):
        return f'"{DATE}"'
    if types.is_timestamp(kind):
        return f'"{TIME}{"?" if utc else ""}"'
    if types.is_list(kind):
        item = f"(?:{_value(kind.value_type, utc)}|null)"
        return rf"(?:\[{_GAP}|(?:[\[,]{_GAP}{item}{_GAP})+)\]"
    if types.is_struct(kind):
        return _object(kind, utc)
    return _TEXT


def _up_to(limit: str) -> str:
    """Digits of a number from 0 to this one."""
    shorter = rf"[1-9][0-9]{{0,{len(limit) - 2}}}"
    parts = ["0"] + [shorter] * (len(limit) > 1) + [limit] * (len(limit) > 0)
    for place, digit in enumerate(limit):
        low, behind = int(place == 0), len(limit) - place - 1
        parts += [rf"{limit[:place]}[{low}-{int(digit) - 1}][0-9]{{{behind}}}"] * (int(digit) > low)
    return "|".join(parts)
