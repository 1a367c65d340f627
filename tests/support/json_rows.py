"""Decoded JSON rows as values that can be compared: Python's dates end in the year 9999, Spark's do not."""

from __future__ import annotations

from typing import Any

import pyarrow as pa


def comparable(array: pa.StructArray) -> list[str]:
    """Each row as text; dates and times as numbers, so that every one has a value."""
    return [repr(row) for row in numbered(array).to_pylist()]


def numbered(array: pa.Array) -> Any:
    kind = array.type
    if pa.types.is_struct(kind):
        fields = [numbered(array.field(index)) for index in range(kind.num_fields)]
        names = [field.name for field in kind]
        return pa.StructArray.from_arrays(fields, names=names, mask=array.is_null())
    if pa.types.is_map(kind):
        items = numbered(array.items)
        return pa.MapArray.from_arrays(array.offsets, array.keys, items, mask=array.is_null())
    if pa.types.is_list(kind):
        values = numbered(array.values)
        return pa.ListArray.from_arrays(array.offsets, values, mask=array.is_null())
    if pa.types.is_date(kind):
        return array.cast(pa.int32())
    if pa.types.is_timestamp(kind):
        return array.cast(pa.int64())
    return array
