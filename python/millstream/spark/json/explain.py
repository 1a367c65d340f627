"""Why a record does not fit its schema: which field, and what is there instead.

Where it sits: `convert.py` says where the fault is; `decoder.py` asks for the reason in words, and only where a corrupt-record
column wants one (`REASONS_TYPE`).

Invariant I-REA-1: every corrupt record has a reason; the field is named if the fault is inside one.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Final, NamedTuple

import pyarrow as pa

REASONS_TYPE: Final = "struct<record:string,bytes:binary,reason:string,field:string,detail:string>"
"""A corrupt-record column that wants to know why."""
SHOWN_CHARACTERS: Final = 100


class Fault(NamedTuple):
    """What is wrong with a record."""

    path: tuple[str, ...] = ()
    """The innermost field of nested objects that does not fit; of no length if it is the record."""
    missing: bool = False
    """The field has to be there, but is null or not there."""


def entry(data: bytes, fault: Fault, kind: pa.StructType) -> dict[str, Any]:
    """The corrupt-record column of one record: its text, or its bytes where they are no text."""
    text = data.decode("utf-8", "replace")
    is_text = text.encode() == data
    reason, detail = _reason(text, fault, kind)
    return {
        "record": text if is_text else None,
        "bytes": None if is_text else data,
        "reason": reason,
        "field": ".".join(fault.path) if fault.path else None,
        "detail": detail,
    }


def _reason(text: str, fault: Fault, kind: pa.DataType) -> tuple[str, str]:
    if fault.missing:
        return "missing", f"`{fault.path[0]}` is null or not there"
    value, problem = None, ""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = str(error)
    if not fault.path:
        if not problem and not isinstance(value, dict):
            return "not_an_object", f"{_cut(text.strip())} is not a JSON object"
        return "not_json", problem or "the record is damaged"
    for name in fault.path:
        value = value.get(name) if isinstance(value, dict) else None
        kind = kind.field(name).type
    found = "what is there" if value is None else _cut(json.dumps(value, ensure_ascii=False))
    return "wrong_type", f"{found} is not {_name(kind)}"


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


@cache
def _name(kind: pa.DataType) -> str:
    """The type as people write it in a schema."""
    from pyspark.sql.pandas.types import from_arrow_type

    name: str = from_arrow_type(kind).simpleString()
    return name
