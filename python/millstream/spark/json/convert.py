"""From the tokens of one record to values of a schema, field by field as Spark's `from_json` does it.

Where it sits: between `tokens.py` and `decoder.py`, for records that `columns.py` leaves. The schema is an Arrow
type, which says the same as Spark's. A value that does not fit makes its field null and its record corrupt; what was read
so far stays, also inside nested objects and arrays.

Invariants:
- I-CNV-1  A record gives either a row, or a row with the news that it is corrupt; it never raises.
- I-CNV-2  Nothing is guessed: numbers are not read from strings (decimals excepted, as in Spark), nor
           booleans from numbers. A string takes any value as its JSON text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from ctypes import c_float
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from math import isfinite
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import pyarrow as pa

from millstream.spark.json import times
from millstream.spark.json.tokens import ENDS, STARTS, Malformed, Token, Tokens, joined_surrogates

Convert: TypeAlias = Callable[[Tokens], Any]
Values = TypeVar("Values")


class Misfit(Exception):  # noqa: N818 - it reports what the value is
    """A value does not fit its type."""


class Fraction(str):
    """The text of a number that is no integer."""

    __slots__ = ()


class Partial(Exception):  # noqa: N818 - as above
    """A value was read in part; `result` is what fits."""

    def __init__(self, result: Any) -> None:
        super().__init__("in part")
        self.result = result


FAULTS: Final = (Misfit, Malformed)


class Row(NamedTuple):
    """A decoded record: `values` by field (None: an empty text), and whether it is corrupt."""

    values: dict[str, Any] | None
    corrupt: bool


class RecordConverter:
    """Decodes records of one schema (an Arrow struct type)."""

    def __init__(self, kind: pa.StructType, time_zone: str) -> None:
        self._time_zone = time_zone
        self._fields = {field.name: self._converter(field.type) for field in kind}

    def row(self, data: bytes) -> Row:
        tokens = Tokens(data.decode("utf-8", "replace"))
        try:
            first = tokens.next()
            if first is None:
                return Row(None, corrupt=False)
            if first is not Token.START_OBJECT:
                return Row({}, corrupt=True)
            return Row(self._object(tokens, self._fields), corrupt=False)
        except Partial as partial:
            return Row(partial.result, corrupt=True)
        except FAULTS:
            return Row({}, corrupt=True)

    # ------------------------------------------------------------------ nested values

    def _object(self, tokens: Tokens, fields: dict[str, Convert]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        broken = False
        while tokens.next() not in (None, Token.END_OBJECT):
            name = tokens.current_name() or ""
            if name not in fields:
                tokens.skip_children()
                continue
            depth = tokens.depth
            tokens.next()
            try:
                values[name], part = _part(fields[name], tokens)
                broken |= part
            except FAULTS:
                broken = True
                tokens.leave_to(depth)
        return _whole(values, broken)

    def _array(self, tokens: Tokens, convert: Convert) -> list[Any]:
        values: list[Any] = []
        broken = False
        while tokens.next() not in (None, Token.END_ARRAY):
            value, part = _part(convert, tokens)
            values.append(value)
            broken |= part
        return _whole(values, broken)

    def _map(self, tokens: Tokens, convert: Convert) -> list[tuple[str, Any]]:
        pairs: list[tuple[str, Any]] = []
        broken = misfit = False
        while tokens.next() not in (None, Token.END_OBJECT):
            name = joined_surrogates(tokens.current_name() or "")
            try:
                value, part = _part(convert, tokens)
                pairs.append((name, value))
                broken |= part
            except FAULTS:
                misfit = True
                tokens.skip_children()
        if misfit:
            raise Misfit("a map with a value that does not fit")
        return _whole(pairs, broken)

    # ------------------------------------------------------------------ one converter per type

    def _converter(self, kind: pa.DataType) -> Convert:
        if pa.types.is_struct(kind):
            fields = {field.name: self._converter(field.type) for field in kind}
            return _begins(Token.START_OBJECT, lambda tokens: self._object(tokens, fields))
        if pa.types.is_map(kind):
            item = self._converter(kind.item_type)
            return _begins(Token.START_OBJECT, lambda tokens: self._map(tokens, item))
        if pa.types.is_list(kind):
            element = self._converter(kind.value_type)
            return _begins(Token.START_ARRAY, lambda tokens: self._array(tokens, element))
        if pa.types.is_string(kind):
            return _begins(None, json_text)
        if pa.types.is_binary(kind):
            return _begins(Token.STRING, lambda tokens: tokens.base64())
        by_type = leaves(kind, self._time_zone)
        return _begins(None, lambda tokens: leaf(by_type, _value(tokens)))


def _part(convert: Convert, tokens: Tokens) -> tuple[Any, bool]:
    """A value, and whether it was read in part."""
    try:
        return convert(tokens), False
    except Partial as partial:
        return partial.result, True


def _whole(values: Values, broken: bool) -> Values:
    if broken:
        raise Partial(values)
    return values


def _begins(first: Token | None, found: Convert) -> Convert:
    """Null is null for every type; a value that begins with another token than `first` is a misfit."""

    def convert(tokens: Tokens) -> Any:
        if tokens.token is Token.FIELD_NAME:
            tokens.next()
        token = tokens.token
        if token is Token.NULL or token is None:
            return None
        if first is not None and token is not first:
            _value(tokens)
            raise Misfit(f"a {token.value} does not fit")
        return found(tokens)

    return convert


def _value(tokens: Tokens) -> Any:
    """The value as Python's parser gives it; a word that is a number only in Java is a text."""
    token = tokens.token
    if token is Token.STRING:
        return (
            tokens.text()
        )  # also where it is not wanted: Spark looks whether it is empty, and may find it broken
    if token is Token.INT:
        return int(tokens.text())
    if token is Token.FLOAT:
        text = tokens.text()
        return Fraction(text) if text[-1:].isdigit() else text
    return token is Token.TRUE if token in (Token.TRUE, Token.FALSE) else token


# ---------------------------------------------------------------------------- plain values

Leaves: TypeAlias = dict[type, Callable[[Any], Any]]


def leaves(kind: pa.DataType, zone: str) -> Leaves:
    """How a plain type is made of what Python's JSON parser gives: by the type of that."""
    types = pa.types
    if types.is_boolean(kind):
        return {bool: lambda value: value}
    if types.is_integer(kind):
        return {int: lambda value: integer(value, kind.bit_width)}
    if types.is_float64(kind):
        return {int: float, float: float, Fraction: float, str: special_float}
    if types.is_float32(kind):
        wide = leaves(pa.float64(), zone)
        return dict.fromkeys(wide, lambda value: c_float(leaf(wide, value)).value)
    if types.is_decimal(kind):
        exact = decimal_of(kind.precision, kind.scale)
        return {
            int: lambda value: exact(str(value)),
            Fraction: exact,
            str: lambda value: exact(value.replace(",", "")),
        }
    if types.is_date(kind):
        return {str: date}
    if types.is_timestamp(kind):
        if kind.tz is None:
            return {str: lambda value: timestamp(value, "UTC", local=True)}
        return {
            str: lambda value: timestamp(value, zone, local=False),
            int: lambda value: _in_64_bits(integer(value, 64) * 1_000_000),
        }
    return {}


def leaf(by_type: Leaves, value: Any) -> Any:
    if value is None:
        return None
    convert = by_type.get(type(value))
    if convert is None:
        raise Misfit(f"{value!r} does not fit")
    return convert(value)


def integer(value: int, bits: int) -> int:
    # A byte may be written without its sign: Java's parser takes 0 to 255 for it too.
    low, high = (-128, 255) if bits == 8 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    if not low <= value <= high:
        raise Misfit("an integer out of range")
    return value - 256 if bits == 8 and value > 127 else value


def _in_64_bits(value: int) -> int:
    """Java's multiplication wraps around."""
    return (value + 2**63) % 2**64 - 2**63


_SPECIAL: Final = {
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "+INF": float("inf"),
    "+Infinity": float("inf"),
    "-INF": float("-inf"),
    "-Infinity": float("-inf"),
}


def special_float(text: str) -> float:
    value = _SPECIAL.get(text)
    if value is None:
        raise Misfit("a text does not fit a number")
    return value


_DECIMAL: Final = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?0*\d{1,9})?", re.ASCII)
_WIDE: Final = Context(prec=2000)


def decimal_of(precision: int, scale: int) -> Callable[[str], Decimal]:
    unit = Decimal(1).scaleb(-scale)
    limit = Decimal(10) ** (precision - scale)

    def convert(text: str) -> Decimal:
        if not _DECIMAL.fullmatch(text):
            raise Misfit("a text does not fit a decimal")
        try:
            value = Decimal(text).quantize(unit, ROUND_HALF_UP, _WIDE)
        except InvalidOperation:
            value = limit
        if abs(value) >= limit:
            raise Misfit("a decimal out of range")
        return value

    return convert


def date(text: str) -> int:
    found = times.days(_without_gmt(text))
    if found is None and re.fullmatch(r"[+-]?\d{1,10}", text, re.ASCII):
        # Once dates were written as numbers of days in a text; Spark still reads that.
        found = int(text)
        if not -(2**31) <= found < 2**31:
            found = None
    if found is None:
        raise Misfit("a text does not fit a date")
    return found


def timestamp(text: str, zone: str, *, local: bool) -> int:
    found = times.micros(text, zone, local=local)
    if found is None and not local:
        found = times.micros(_without_gmt(text), zone, local=False)
    if found is None or not -(2**63) <= found < 2**63:
        raise Misfit("a text does not fit a time")
    return found


def _without_gmt(text: str) -> str:
    return text.replace("GMT", "", 1)


# ---------------------------------------------------------------------------- any value as text

_UNSAFE: Final = re.compile(r'["\\\x00-\x1f]')
_SHORT: Final = {
    '"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r",
}  # fmt: skip


def json_text(tokens: Tokens) -> str:
    """A string as it is; anything else as its JSON text, written anew."""
    if tokens.token is Token.STRING:
        return joined_surrogates(tokens.text())
    parts: list[str] = []
    depth = 0
    fresh = True
    while True:
        token = tokens.token
        if token is None:
            raise Malformed("the text ends inside an object or array")
        if token in ENDS:
            depth -= 1
        elif not fresh:
            parts.append(",")
        parts.append(_piece(token, tokens))
        fresh = token in STARTS or token is Token.FIELD_NAME
        depth += token in STARTS
        if depth == 0:
            return "".join(parts)
        tokens.next()


def _piece(token: Token, tokens: Tokens) -> str:
    if token is Token.FIELD_NAME:
        return quoted(tokens.text()) + ":"
    if token is Token.STRING:
        return quoted(tokens.text())
    if token is Token.INT:
        return str(int(tokens.text()))
    if token is Token.FLOAT:
        text = tokens.text()
        return java_double(_SPECIAL[text] if text in _SPECIAL else float(text))
    return str(token.value)


def quoted(text: str) -> str:
    def escaped(match: re.Match[str]) -> str:
        return _SHORT.get(match[0]) or f"\\u{ord(match[0]):04X}"

    return '"' + _UNSAFE.sub(escaped, joined_surrogates(text)) + '"'


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
