"""A block of records by Python's own JSON parser, column by column: many times faster than token by token.

Where it sits: in `decoder.py`, for blocks that Arrow's parser refuses because one of their records does not fit, and for types
that it cannot be trusted with. What comes out is a column for each field, and the rows that `convert.py` has to look at.

Invariant I-JCO-1: a row that is not in doubt is what the careful way gives, and every value of it fits its type.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from millstream.spark.json.convert import Fraction, Leaves, Misfit, leaf, leaves

_FAULTS: Final = (Misfit, ValueError, ArithmeticError, StopIteration, RecursionError, pa.ArrowException)  # fmt: skip
_AS_THEY_ARE: Final[dict[pa.DataType, type]] = {
    pa.bool_(): bool, pa.int16(): int, pa.int32(): int, pa.int64(): int, pa.float64(): float, pa.string(): str,
}  # fmt: skip
"""Types that Arrow makes of Python's values by itself, and refuses where one does not fit."""
_ISO_DATE: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"
_ISO_TIME: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?Z$"


class Columns:
    """Decodes blocks of records with these fields."""

    def __init__(self, fields: Iterable[pa.Field], time_zone: str) -> None:
        self._fields = [(field.name, field.type, _made(field.type, time_zone)) for field in fields]
        exact = any("decimal" in str(kind) for _, kind, _ in self._fields)
        decoder = json.JSONDecoder(
            object_pairs_hook=tuple,  # a dict would hide that a name came twice
            parse_float=Fraction if exact else float,
            parse_constant=_refuse,
        )
        self._scan = decoder.scan_once  # type: ignore[attr-defined]

    def decode(self, texts: Sequence[bytes | None]) -> Decoded:
        """Every record once."""
        decoded = Decoded([], {}, set())
        records: list[dict[str, Any]] = []
        scan = self._scan
        for row, data in enumerate(texts):
            record = {}
            try:
                text = (data or b"").decode().strip(" \t\r\n")
                pairs, end = scan(text, 0)
                if type(pairs) is tuple:
                    record = dict(pairs)
                if type(pairs) is not tuple or len(record) != len(pairs) or end != len(text):
                    decoded.doubts.add(row)
            except _FAULTS:
                decoded.doubts.add(row)
            records.append(record)
        for name, kind, by_type in self._fields:
            # A plain value that does not fit is null, and Spark goes on behind it; all others depend on what is inside.
            simple = not pa.types.is_nested(kind) and kind not in (pa.string(), pa.binary())
            values = [record.get(name) for record in records]
            column, misfits = _column(kind, values, by_type)
            decoded.columns.append(column)
            if not simple:
                decoded.doubts.update(misfits)
            for row in misfits:
                decoded.corrupt.setdefault(row, name)
        return decoded


class Decoded(NamedTuple):
    columns: list[pa.Array]
    corrupt: dict[int, str]
    """Rows in which a value did not fit, and its field; if they are not in doubt, they are as they should be."""
    doubts: set[int]
    """Rows to be decoded again, with care, whatever the columns have there."""


def _column(kind: pa.DataType, values: list[Any], by_type: Leaves) -> tuple[pa.Array, list[int]]:
    """At once what Arrow can make of it, the rest one by one; and the rows with a value that does not fit."""
    array = _at_once(kind, values)
    left = pc.is_null(array).to_pylist()
    odd = [row for row, value in enumerate(values) if value is not None and left[row]]
    misfits: list[int] = []
    if not odd:
        return array, misfits
    fitting: list[Any] = []
    for row in odd:
        try:
            fitting.append(leaf(by_type, values[row]))
        except _FAULTS:
            misfits.append(row)
            fitting.append(None)
    made = pa.array(fitting, kind)
    return made if len(odd) == len(values) else put(array, odd, made), misfits


def _at_once(kind: pa.DataType, values: list[Any]) -> pa.Array:
    """What Arrow makes of values of the type that is usual for this kind; null for all others, or for all."""
    usual = str if is_iso(kind) else _AS_THEY_ARE.get(kind)
    if usual is None:
        return pa.nulls(len(values), kind)
    known = [value if type(value) is usual else None for value in values]
    try:
        return (
            iso_times(pa.array(known, pa.string()), kind, others=True)
            if is_iso(kind)
            else pa.array(known, kind)
        )
    except _FAULTS:
        return pa.nulls(len(values), kind)


def put(array: pa.Array, rows: Sequence[int], others: pa.Array) -> pa.Array:
    """The array with others at these rows."""
    places = list(range(len(array)))
    for place, row in enumerate(rows, len(array)):
        places[row] = place
    return pa.concat_arrays([array, others]).take(pa.array(places, pa.int64()))


def _made(kind: pa.DataType, zone: str) -> Leaves:
    """How a value of any type is made of what Python's parser gives."""
    if pa.types.is_struct(kind):
        fields = {field.name: _made(field.type, zone) for field in kind}
        return {
            tuple: lambda pairs: {
                name: leaf(fields[name], value) for name, value in _once(pairs) if name in fields
            }
        }
    if pa.types.is_map(kind):
        item = _made(kind.item_type, zone)
        return {tuple: lambda pairs: [(_whole(key), leaf(item, value)) for key, value in _once(pairs)]}  # fmt: skip
    if pa.types.is_list(kind):
        element = _made(kind.value_type, zone)
        return {list: lambda values: [leaf(element, value) for value in values]}
    return {str: _whole} if pa.types.is_string(kind) else leaves(kind, zone)


def _once(pairs: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    if len(dict(pairs)) != len(pairs):
        raise Misfit("a name comes twice")
    return pairs


def _whole(text: str) -> str:
    text.encode()  # half a surrogate pair is none
    return text


def is_iso(kind: pa.DataType) -> bool:
    """Whether texts of ISO 8601 can become this type without a closer look."""
    return pa.types.is_date(kind) or (pa.types.is_timestamp(kind) and kind.tz is not None)


def iso_times(texts: pa.StringArray, kind: pa.DataType, *, others: bool) -> pa.Array:
    """Dates and times in the plain form of ISO 8601, at once; `others` become null, or are a misfit."""
    fits = pc.match_substring_regex(texts, _ISO_DATE if pa.types.is_date(kind) else _ISO_TIME)
    if pc.all(fits, min_count=0).as_py() is False:
        if not others:
            raise Misfit("a text in another form")
        texts = pc.if_else(fits, texts, pa.scalar(None, pa.string()))
    return texts.cast(kind)


def _refuse(_: str) -> Any:
    raise ValueError("JSON does not have this number")
