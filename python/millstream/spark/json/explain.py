"""Why a record does not fit its schema: which field, and what is there instead.

Where it sits: in `decoder.py`, for the records that turned out to be bad, and only where somebody asks for the reason (`REASONS_TYPE`).
It decides nothing: where the field is not known, each one is decoded alone, by the converter that decides for whole records, until one
of them fails.

Invariants:
- I-EXP-1  A record that the converter calls corrupt has a reason; the field is named if the fault is inside one.
- I-EXP-2  It costs nothing while records fit.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from millstream.spark.json.convert import RecordConverter

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

REASONS_TYPE: Final = "struct<record:string,bytes:binary,reason:string,field:string,detail:string>"
"""A corrupt-record column that wants to know why."""
NOT_JSON: Final = "not_json"
NOT_AN_OBJECT: Final = "not_an_object"
WRONG_TYPE: Final = "wrong_type"
MISSING: Final = "missing"
SHOWN_CHARACTERS: Final = 100


class Reason(NamedTuple):
    reason: str
    field: str | None
    detail: str


class Explainer:
    """Says why records of one schema are bad."""

    def __init__(self, fields: Sequence[pa.Field], required: Iterable[str], time_zone: str) -> None:
        self._required = list(required)
        self._converter = cache(lambda kind: RecordConverter(kind, time_zone))
        self._nothing = self._converter(pa.struct([]))
        self._kinds = {field.name: field.type for field in fields}
        self._alone = [(field, self._converter(pa.struct([field]))) for field in fields]

    def entry(self, data: bytes, field: str | None = None) -> dict[str, Any]:
        """The corrupt-record column of one record: its text, or its bytes where they are no text.

        `field` is the one to blame in a record that is fine otherwise, if that is known.
        """
        found = self.why(data) if field is None else self._reason(field, data)
        text: str | None = None
        with suppress(UnicodeDecodeError):
            text = data.decode()
        entry = {"record": text, "bytes": data if text is None else None}
        return {**entry, **found._asdict()}

    def _reason(self, name: str, data: bytes) -> Reason:
        try:
            value = json.loads(data).get(name)
        except (ValueError, RecursionError, AttributeError):
            return self.why(data)
        return _missing(name) if value is None else _wrong_type(value, name, self._kinds[name])

    def why(self, data: bytes) -> Reason:
        if self._nothing.row(data).corrupt or not data.strip():
            return _not_an_object(data)
        values: dict[str, Any] = {}
        for field, converter in self._alone:
            row = converter.row(data)
            if row.corrupt:
                return self._inside(field, data)
            values |= row.values or {}
        for name in self._required:
            if values.get(name) is None:
                return _missing(name)
        return Reason(NOT_JSON, None, "the record is damaged behind its last field")

    def _is_bad(self, kind: pa.StructType, data: bytes) -> bool:
        return bool(self._converter(kind).row(data).corrupt)

    def _inside(self, field: pa.Field, data: bytes) -> Reason:
        """The innermost field of nested objects that is bad by itself."""
        path, wrap, kind = [field.name], field.with_type, field.type
        while pa.types.is_struct(kind) and not self._is_bad(pa.struct([wrap(pa.struct([]))]), data):
            for inner in kind:
                narrowed = wrap(pa.struct([inner]))
                if self._is_bad(pa.struct([narrowed]), data):
                    path.append(inner.name)
                    wrap = _deeper(wrap, inner)
                    kind = inner.type
                    break
            else:
                break
        return _wrong_type(_at(data, path), ".".join(path), kind)


def _missing(name: str) -> Reason:
    return Reason(MISSING, name, f"`{name}` is null or not there")


def _wrong_type(value: Any, name: str, kind: pa.DataType) -> Reason:
    found = "what is there" if value is None else _cut(json.dumps(value, ensure_ascii=False))
    return Reason(WRONG_TYPE, name, f"{found} is not {_name(kind)}")


def _deeper(wrap: Any, inner: pa.Field) -> Any:
    return lambda kind: wrap(pa.struct([inner.with_type(kind)]))


def _not_an_object(data: bytes) -> Reason:
    try:
        json.loads(data)
    except (ValueError, RecursionError) as error:
        return Reason(NOT_JSON, None, str(error))
    return Reason(NOT_AN_OBJECT, None, f"{_cut(data.decode().strip())} is not a JSON object")


def _at(data: bytes, path: list[str]) -> Any:
    try:
        value = json.loads(data)
        for name in path:
            value = value[name]
    except (ValueError, RecursionError, KeyError, TypeError):
        return None
    return value


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


@cache
def _name(kind: pa.DataType) -> str:
    """The type as people write it in a schema."""
    from pyspark.sql.pandas.types import from_arrow_type

    name: str = from_arrow_type(kind).simpleString()
    return name
