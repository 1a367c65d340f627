"""From the tokens of one record to values of a schema, field by field as Spark's `from_json` does it.

Where it sits: between `json_tokens.py` and `decode.py`. The schema is an Arrow type, which says the same as
Spark's. A value that does not fit makes its field null and its record corrupt; what was read so far
stays, also inside nested objects and arrays.

Invariants:
- I-CNV-1  A record gives either a row, or a row with the news that it is corrupt; it never raises.
- I-CNV-2  Nothing is guessed: numbers are not read from strings (decimals excepted, as in Spark), nor
           booleans from numbers. A string takes any value as its JSON text.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from typing import Any, Final, TypeAlias

import pyarrow as pa

from millstream.spark import json_times
from millstream.spark.json_tokens import ENDS, STARTS, Malformed, Token, Tokens, joined_surrogates

Convert: TypeAlias = Callable[[Tokens], Any]


class Misfit(Exception):  # noqa: N818 - it reports what the value is
    """A value does not fit its type."""


class Partial(Exception):  # noqa: N818 - as above
    """A value was read in part; `result` is what fits."""

    def __init__(self, result: Any) -> None:
        super().__init__("in part")
        self.result = result


FAULTS: Final = (Misfit, Malformed)


class Row:
    """A decoded record: `values` by field (None: an empty text), and whether it is corrupt."""

    __slots__ = ("corrupt", "values")

    def __init__(self, values: dict[str, Any] | None, *, corrupt: bool) -> None:
        self.values = values
        self.corrupt = corrupt


class RecordConverter:
    """Decodes records of one schema (an Arrow struct type)."""

    def __init__(self, kind: pa.StructType, time_zone: str) -> None:
        self._time_zone = time_zone
        self._fields = self._converters(kind)

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

    def _converters(self, kind: pa.StructType) -> dict[str, Convert]:
        return {field.name: self._converter(field.type) for field in kind}

    def _object(self, tokens: Tokens, fields: dict[str, Convert]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        broken = False
        while tokens.next() not in (None, Token.END_OBJECT):
            name = tokens.current_name()
            convert = fields.get(name) if name is not None else None
            if convert is None or name is None:
                tokens.skip_children()
                continue
            depth = tokens.depth
            tokens.next()
            try:
                values[name] = convert(tokens)
            except Partial as partial:
                broken = True
                values[name] = partial.result
            except FAULTS:
                broken = True
                tokens.leave_to(depth)
        if broken:
            raise Partial(values)
        return values

    def _array(self, tokens: Tokens, convert: Convert) -> list[Any]:
        values: list[Any] = []
        broken = False
        while tokens.next() not in (None, Token.END_ARRAY):
            try:
                values.append(convert(tokens))
            except Partial as partial:
                broken = True
                values.append(partial.result)
        if broken:
            raise Partial(values)
        return values

    def _map(self, tokens: Tokens, convert: Convert) -> list[tuple[str, Any]]:
        keys: list[str] = []
        values: list[Any] = []
        broken = False
        while tokens.next() not in (None, Token.END_OBJECT):
            keys.append(joined_surrogates(tokens.current_name() or ""))
            try:
                values.append(convert(tokens))
            except Partial as partial:
                broken = True
                values.append(partial.result)
            except FAULTS:
                broken = True
                tokens.skip_children()
        if len(keys) != len(values):
            raise Misfit("a map with a value that does not fit")
        pairs = list(zip(keys, values, strict=True))
        if broken:
            raise Partial(pairs)
        return pairs

    # ------------------------------------------------------------------ one converter per type

    def _converter(self, kind: pa.DataType) -> Convert:
        if pa.types.is_struct(kind):
            fields = self._converters(kind)
            return _on({Token.START_OBJECT: lambda tokens: self._object(tokens, fields)})
        if pa.types.is_map(kind):
            item = self._converter(kind.item_type)
            return _on({Token.START_OBJECT: lambda tokens: self._map(tokens, item)})
        if pa.types.is_list(kind):
            element = self._converter(kind.value_type)
            return _on({Token.START_ARRAY: lambda tokens: self._array(tokens, element)})
        return _on(self._plain(kind))

    def _plain(self, kind: pa.DataType) -> dict[Token, Convert]:
        types = pa.types
        if types.is_boolean(kind):
            return {Token.TRUE: lambda _: True, Token.FALSE: lambda _: False}
        if types.is_integer(kind):
            return {Token.INT: lambda tokens: integer(tokens.text(), kind.bit_width)}
        if types.is_float64(kind):
            return _numbers(_float) | {Token.STRING: special_float}
        if types.is_float32(kind):
            return _numbers(lambda tokens: single(_float(tokens))) | {Token.STRING: special_float}
        if types.is_decimal(kind):
            exact = decimal_of(kind.precision, kind.scale)
            return {
                Token.INT: lambda tokens: exact(tokens.text()),
                Token.FLOAT: lambda tokens: exact(tokens.text()),
                Token.STRING: lambda tokens: exact(_decimal_text(tokens)),
            }
        if types.is_date(kind):
            return {Token.STRING: lambda tokens: date(_filled(tokens))}
        if types.is_timestamp(kind):
            return self._timestamp(kind)
        if types.is_binary(kind):
            return {Token.STRING: lambda tokens: tokens.base64()}
        assert types.is_string(kind), kind
        return dict.fromkeys(Token, json_text)

    def _timestamp(self, kind: pa.TimestampType) -> dict[Token, Convert]:
        if kind.tz is None:
            return {Token.STRING: lambda tokens: timestamp(_filled(tokens), "UTC", local=True)}
        zone = self._time_zone
        return {
            Token.STRING: lambda tokens: timestamp(_filled(tokens), zone, local=False),
            Token.INT: lambda tokens: _in_64_bits(integer(tokens.text(), 64) * 1_000_000),
        }


def _on(by_token: dict[Token, Convert]) -> Convert:
    """Null is null for every type; a token that the type has no use for is a misfit."""

    def convert(tokens: Tokens) -> Any:
        token = tokens.token
        if token is Token.FIELD_NAME:
            tokens.next()
            return convert(tokens)
        if token is Token.NULL or token is None:
            return None
        found = by_token.get(token)
        if found is None:
            if token is Token.STRING:
                tokens.text()  # Spark looks whether it is empty, and may find it broken
            raise Misfit(f"a {token.value} does not fit")
        return found(tokens)

    return convert


def _float(tokens: Tokens) -> float:
    """An integer has no negative zero, a fraction has."""
    text = tokens.text()
    return 0.0 if text == "-0" else float(text)


def _numbers(convert: Convert) -> dict[Token, Convert]:
    def word_or_number(tokens: Tokens) -> Any:
        return convert(tokens) if tokens.text()[-1:].isdigit() else special_float(tokens)

    return {Token.INT: convert, Token.FLOAT: word_or_number}


# ---------------------------------------------------------------------------- plain values


def integer(text: str | int, bits: int) -> int:
    value = int(text)
    # A byte may be written without its sign: Java's parser takes 0 to 255 for it too.
    low, high = (-128, 255) if bits == 8 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    if not low <= value <= high:
        raise Misfit("an integer out of range")
    return value - 256 if bits == 8 and value > 127 else value


def _in_64_bits(value: int) -> int:
    """Java's multiplication wraps around."""
    return (value + 2**63) % 2**64 - 2**63


def single(value: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


_SPECIAL: Final = {
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "+INF": float("inf"),
    "+Infinity": float("inf"),
    "-INF": float("-inf"),
    "-Infinity": float("-inf"),
}


def special_float(tokens: Tokens) -> float:
    value = _SPECIAL.get(tokens.text())
    if value is None:
        raise Misfit("a text does not fit a number")
    return value


_DECIMAL: Final = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,9})?", re.ASCII)
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
            raise Misfit("a decimal out of range") from None
        if abs(value) >= limit:
            raise Misfit("a decimal out of range")
        return value

    return convert


def _filled(tokens: Tokens) -> str:
    text = tokens.text()
    if not text:
        raise Misfit("an empty text")
    return text


def _decimal_text(tokens: Tokens) -> str:
    return _filled(tokens).replace(",", "")


def date(text: str) -> int:
    found = json_times.days(text)
    if found is None:
        found = json_times.days(_without_gmt(text))
    if found is None and re.fullmatch(r"[+-]?\d{1,10}", text, re.ASCII):
        # Once dates were written as numbers of days in a text; Spark still reads that.
        found = int(text)
        if not -(2**31) <= found < 2**31:
            found = None
    if found is None:
        raise Misfit("a text does not fit a date")
    return found


def timestamp(text: str, zone: str, *, local: bool) -> int:
    found = json_times.micros(text, zone, local=local)
    if found is None and not local:
        found = json_times.micros(_without_gmt(text), zone, local=False)
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
    _copy(tokens, parts)
    return "".join(parts)


def _copy(tokens: Tokens, parts: list[str]) -> None:
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
            return
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
        return java_double(float(text)) if text[-1].isdigit() else quoted(java_special(text))
    return str(token.value)


def quoted(text: str) -> str:
    def escaped(match: re.Match[str]) -> str:
        return _SHORT.get(match[0]) or f"\\u{ord(match[0]):04X}"

    return '"' + _UNSAFE.sub(escaped, joined_surrogates(text)) + '"'


def java_special(text: str) -> str:
    return {"+INF": "Infinity", "+Infinity": "Infinity", "-INF": "-Infinity"}.get(text, text)


def java_double(value: float) -> str:
    """A double as Java writes it."""
    if value in (float("inf"), float("-inf")):
        return quoted("Infinity" if value > 0 else "-Infinity")
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
