"""From the text of one record to values of a schema, field by field as Spark's `from_json` does it.

Where it sits: below `decoder.py`, for records that `blocks.py` cannot be trusted with. Python's JSON parser reads the text; the schema
is an Arrow type, which says the same as Spark's. A value that does not fit makes its field null and its record corrupt;
what fits stays, also inside nested objects and arrays. Of a text that is not JSON nothing stays.

Invariants:
- I-CNV-1  A record gives a row, with a fault if it is corrupt; it never raises.
- I-CNV-2  Nothing is guessed: numbers are not read from strings (decimals excepted, as in Spark), nor
           booleans from numbers. A string takes any value as its JSON text.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections.abc import Callable, Iterable
from contextlib import suppress
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from math import isfinite
from typing import Any, Final, NamedTuple

import pyarrow as pa

from millstream.spark.json import times
from millstream.spark.json.explain import Fault


class Fraction(str):
    """The text of a number that is no integer."""

    __slots__ = ()


class Misfit(Exception):  # noqa: N818 - it reports what the value is
    """A value does not fit its type."""


class Partial(Misfit):
    """Parts of a value do not fit: `result` is what does, `path` leads from it to the field to blame."""

    def __init__(self, result: Any, path: tuple[str, ...] = ()) -> None:
        super().__init__("in part")
        self.result = result
        self.path = path


class Broken(Exception):  # noqa: N818 - as above
    """Nothing of the record stays: it is not JSON, or Spark stumbles over the value that `path` leads to."""

    path: tuple[str, ...] = ()


class Row(NamedTuple):
    """A decoded record: `values` by field (None: an empty text), and what is wrong with it."""

    values: dict[str, Any] | None
    fault: Fault | None


class RecordConverter:
    """Decodes records of one schema (fields of Arrow), in which some fields are required."""

    def __init__(
        self, fields: Iterable[pa.Field], time_zone: str, required: Iterable[str] = ()
    ) -> None:
        self._record = Leaves({tuple: _object_of(fields, time_zone)})
        self._required = tuple(required)

    def row(self, data: bytes) -> Row:
        text = data.decode("utf-8", "replace").lstrip(" \t\r\n")
        values: dict[str, Any] | None = None
        sound = True
        try:
            if text:
                record, sound = parsed(text)
                values = self._record[type(record)](record)
        except Partial as partial:
            return Row(partial.result, Fault(partial.path if sound else ()))
        except Broken as broken:
            return Row({}, Fault(broken.path if sound else ()))
        except (Misfit, RecursionError):
            return Row({}, Fault())
        if not sound:
            return Row({}, Fault())
        for name in self._required:
            if values is None or values.get(name) is None:
                return Row(values, Fault((name,), missing=True))
        return Row(values, None)


# ---------------------------------------------------------------------------- the text

# A dict would hide that a name came twice; of numbers only NaN and infinities come as `float`.
_STRICT: Final = json.JSONDecoder(object_pairs_hook=tuple, parse_float=Fraction)
_LOOSE: Final = re.compile(
    r"""("|')((?:(?!\1)[^\\]|\\.)*)(?:\1|(\\?\Z))|([+-]?(?:INF|Infinity))(?![\w$])""", re.DOTALL
)
_ESCAPED: Final = r"(?:[^\\\0-\x1f]|\\[\"'\\/bfnrt]|\\u[0-9a-fA-F]{4})*"
_SOUND: Final = re.compile(_ESCAPED)
_CUT: Final = re.compile(_ESCAPED + r"\\u[0-9a-fA-F]{0,3}")
_QUOTE: Final = re.compile(r'\\.|"', re.DOTALL)
_HALF: Final = re.compile("[\ud800-\udfff]")


class Cut:
    """A string that ends inside an escape."""


class Damaged:
    """A string with another fault."""


def parsed(text: str) -> tuple[Any, bool]:
    """The first value of a text, objects as tuples of pairs; what follows is ignored. And whether it is sound."""
    damage: list[type] = []

    def constant(name: str) -> Any:
        if name == "NaN":
            return float(name)
        damage.append(Cut if name == "Infinity" else Damaged)
        return damage[-1]()

    try:
        return _STRICT.scan_once(text, 0)[0], True  # type: ignore[attr-defined]
    except (ValueError, StopIteration):
        pass
    loose = json.JSONDecoder(object_pairs_hook=tuple, parse_float=Fraction, parse_constant=constant)
    with suppress(ValueError, StopIteration):
        return loose.scan_once(_LOOSE.sub(_strict, text), 0)[0], not damage  # type: ignore[attr-defined]
    raise Broken


def _strict(found: re.Match[str]) -> str:
    """What Spark allows beyond JSON, as JSON: 'single quotes' and more names of infinity. Damage as the constants left."""
    _, inside, unended, infinity = found.groups()
    if unended is not None:
        raise Broken
    if infinity:
        return "-1e999" if infinity[0] == "-" else "1e999"
    if not _SOUND.fullmatch(inside):
        return "Infinity" if _CUT.fullmatch(inside) else "-Infinity"
    return f'"{_QUOTE.sub(_requoted, inside)}"'


def _requoted(mark: re.Match[str]) -> str:
    return {'"': '\\"', "\\'": "'"}.get(mark[0], mark[0])


def _whole(text: str) -> str:
    """Half a surrogate pair that stands alone becomes `?`, as in Java."""
    return text if text.isascii() else _HALF.sub("?", text)


# ---------------------------------------------------------------------------- values by type


class Leaves(dict[type, Callable[[Any], Any]]):
    """How a value of a schema is made of what Python's parser gives: by the type of that."""

    stumbles: type = Damaged
    """The kind of broken string behind which Spark does not find the way; behind the other it goes on."""

    def __missing__(self, found: type) -> Any:
        raise Broken if found is self.stumbles else Misfit


def _leaves(kind: pa.DataType, zone: str) -> Leaves:
    found = Leaves({**_by_type(kind, zone), type(None): lambda _: None})
    if pa.types.is_binary(kind):
        found.stumbles = Cut
    return found


def _by_type(kind: pa.DataType, zone: str) -> dict[type, Callable[[Any], Any]]:
    types = pa.types
    if types.is_struct(kind):
        return {tuple: _object_of(kind, zone)}
    if types.is_map(kind):
        return {tuple: _map_of(_leaves(kind.item_type, zone))}
    if types.is_list(kind):
        return {list: _list_of(_leaves(kind.value_type, zone))}
    if types.is_string(kind):
        return {**_TEXTS, str: _whole}
    if types.is_binary(kind):
        return {str: _base64}
    if types.is_boolean(kind):
        return {bool: bool}
    if types.is_integer(kind):
        return {int: _integer_of(kind.bit_width)}
    if types.is_floating(kind):
        # Of too many digits an infinity, also where there is no fraction.
        return {
            int: lambda value: float(str(value)),
            float: float,
            Fraction: float,
            str: _special_float,
        }
    if types.is_decimal(kind):
        exact = _decimal_of(kind.precision, kind.scale)
        return {
            int: lambda value: exact(str(value)),
            Fraction: exact,
            str: lambda value: exact(value.replace(",", "")),
        }
    if types.is_date(kind):
        return {str: _date}
    if types.is_timestamp(kind) and kind.tz is None:
        return {str: lambda value: _timestamp(value, "UTC", local=True)}
    if types.is_timestamp(kind):
        seconds = _integer_of(64)
        return {
            str: lambda value: _timestamp(value, zone, local=False),
            int: lambda value: _in_64_bits(seconds(value) * 1_000_000),
        }
    return {}


def _object_of(fields: Iterable[pa.Field], zone: str) -> Callable[[Any], dict[str, Any]]:
    known = {field.name: _leaves(field.type, zone) for field in fields}

    def convert(pairs: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        faults: dict[str, tuple[str, ...]] = {}
        for name, value in pairs:
            by_type = known.get(name)
            if by_type is None:
                continue
            try:
                values[name] = by_type[type(value)](value)
            except Partial as partial:
                values[name] = partial.result
                faults[name] = (name, *partial.path)
            except Misfit:
                faults[name] = (name,)
            except Broken as broken:
                broken.path = (name, *broken.path)
                raise
        if faults:
            raise Partial(values, next(faults[name] for name in known if name in faults))
        return values

    return convert


def _list_of(element: Leaves) -> Callable[[Any], list[Any]]:
    def convert(found: list[Any]) -> list[Any]:
        values, in_part = [], False
        for value in found:
            try:
                values.append(element[type(value)](value))
            except Partial as partial:
                values.append(partial.result)
                in_part = True
        if in_part:
            raise Partial(values)
        return values

    return convert


def _map_of(item: Leaves) -> Callable[[Any], list[tuple[str, Any]]]:
    items = _list_of(item)

    def convert(pairs: tuple[tuple[str, Any], ...]) -> list[tuple[str, Any]]:
        names = [_whole(name) for name, _ in pairs]
        try:
            return list(zip(names, items([value for _, value in pairs]), strict=True))
        except Partial as partial:
            raise Partial(list(zip(names, partial.result, strict=True))) from None

    return convert


# ---------------------------------------------------------------------------- plain values


def _integer_of(bits: int) -> Callable[[int], int]:
    # A byte may be written without its sign: Java's parser takes 0 to 255 for it too.
    low, high = (-128, 255) if bits == 8 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)

    def convert(value: int) -> int:
        if not low <= value <= high:
            raise Misfit
        return value - 256 if bits == 8 and value > 127 else value

    return convert


def _in_64_bits(value: int) -> int:
    """Java's multiplication wraps around."""
    return (value + 2**63) % 2**64 - 2**63


_INFINITIES: Final = ("Infinity", "+Infinity", "-Infinity", "+INF", "-INF")


def _special_float(text: str) -> float:
    if text != "NaN" and text not in _INFINITIES:
        raise Misfit
    return float(text)


_DECIMAL: Final = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?0*\d{1,9})?", re.ASCII)
_WIDE: Final = Context(prec=2000)


def _decimal_of(precision: int, scale: int) -> Callable[[str], Decimal]:
    unit = Decimal(1).scaleb(-scale)
    limit = Decimal(10) ** (precision - scale)

    def convert(text: str) -> Decimal:
        if not _DECIMAL.fullmatch(text):
            raise Misfit
        try:
            value = Decimal(text).quantize(unit, ROUND_HALF_UP, _WIDE)
        except InvalidOperation:
            value = limit
        if abs(value) >= limit:
            raise Misfit
        return value

    return convert


def _date(text: str) -> int:
    found = times.days(_without_gmt(text))
    if found is None and re.fullmatch(r"[+-]?\d{1,10}", text, re.ASCII):
        # Once dates were written as numbers of days in a text; Spark still reads that.
        found = int(text)
        if not -(2**31) <= found < 2**31:
            found = None
    if found is None:
        raise Misfit
    return found


def _timestamp(text: str, zone: str, *, local: bool) -> int:
    found = times.micros(text, zone, local=local)
    if found is None and not local:
        found = times.micros(_without_gmt(text), zone, local=False)
    if found is None or not -(2**63) <= found < 2**63:
        raise Misfit
    return found


def _without_gmt(text: str) -> str:
    return text.replace("GMT", "", 1)


_SEXTET: Final = "[A-Za-z0-9+/]"
_BASE64: Final = re.compile(rf"(?:[\0- ]*{_SEXTET}{{2}}(?:{_SEXTET}{{2}}|{_SEXTET}=|==))*[\0- ]*")
_UNENDED: Final = re.compile(rf"{_SEXTET}(?:{_SEXTET}=)?")
_PADDED: Final = re.compile(r"[^=]+=*")


def _base64(text: str) -> bytes:
    """Base64 with blanks between its groups of four. If one lacks its end, Spark takes the quote for a part of it."""
    rest = _BASE64.sub("", text, count=1)
    if rest:
        raise Broken if _UNENDED.fullmatch(rest) else Misfit
    return b"".join(b64decode(part) for part in _PADDED.findall(text))


# ---------------------------------------------------------------------------- any value as text

_UNSAFE: Final = re.compile('["\\\\\0-\x1f]|[\U00010000-\U0010ffff]')
_SHORT: Final = {
    '"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r",
}  # fmt: skip


def _quoted(text: str) -> str:
    def escaped(match: re.Match[str]) -> str:
        units = memoryview(match[0].encode("utf-16-le")).cast("H")
        return _SHORT.get(match[0]) or "".join(f"\\u{unit:04X}" for unit in units)

    return '"' + _UNSAFE.sub(escaped, _whole(text)) + '"'


def java_double(value: float) -> str:
    """A double as Java writes it."""
    if not isfinite(value):
        return {"nan": '"NaN"', "inf": '"Infinity"', "-inf": '"-Infinity"'}[str(value)]
    if value == 0:
        return "-0.0" if str(value)[0] == "-" else "0.0"
    sign, digits, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int)
    text = "".join(map(str, digits)).rstrip("0") or "0"
    point = len(digits) + exponent
    mark = "-" if sign else ""
    if 1e-3 <= abs(value) < 1e7:
        if point <= 0:
            return f"{mark}0.{'0' * -point}{text}"
        return f"{mark}{text[:point].ljust(point, '0')}.{text[point:] or '0'}"
    return f"{mark}{text[0]}.{text[1:] or '0'}E{point - 1}"


def _text_of(value: Any) -> str:
    text: str = _TEXTS[type(value)](value)
    return text


def _text_of_object(pairs: tuple[tuple[str, Any], ...]) -> str:
    return "{" + ",".join(f"{_quoted(name)}:{_text_of(value)}" for name, value in pairs) + "}"


_TEXTS: Final = Leaves(
    {
        type(None): lambda _: "null",
        bool: lambda value: "true" if value else "false",
        int: str,
        float: java_double,
        Fraction: lambda text: java_double(float(text)),
        str: _quoted,
        list: lambda values: f"[{','.join(map(_text_of, values))}]",
        tuple: _text_of_object,
    }
)
"""How the JSON text of a value is made, as Java writes it."""
