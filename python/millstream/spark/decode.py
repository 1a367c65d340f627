"""JSON values by a schema: whole blocks at once where that is safe, record by record where it is not.

Where it sits: called by `columns.Shaper` for each batch of a task with `valueFormat=json`. The result is the same as
Spark's `from_json` with the same schema and mode.

    block of records ──► parser of Arrow ──► as it should be? ──► done
                              │ refuses the block: one record does not fit
                              ▼
                         halves, and halves of halves; the last few one by one: good ones by `json_quick`,
                         the others by `json_convert`

The block parser is used only for types where what it accepts is certainly what Spark gives: it fails for
everything else (a number in a string field, a key twice, a value out of range), and then the careful way decides.

Invariants:
- I-DEC-1  One bad record never changes what its neighbours become.
- I-DEC-2  The block path and the careful path give the same row for every record that both accept.
- I-DEC-3  PERMISSIVE keeps every row, DROPMALFORMED leaves corrupt ones out, FAILFAST fails on the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from millstream.errors import OptionInvalid, RecordMalformed
from millstream.spark.json_convert import RecordConverter
from millstream.spark.json_quick import QuickConverter
from millstream.spark.json_times import known_zone

CAREFUL_ROWS: Final = 32
"""A block of so few rows is not halved again."""
SHOWN_CHARACTERS: Final = 200
_ISO_TIME: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?Z$"
_ISO_DATE: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"


@dataclass(frozen=True, slots=True)
class JsonForm:
    """How values are decoded; plain data."""

    ddl: str
    mode: str
    corrupt: str
    time_zone: str

    def check(self) -> None:
        if not known_zone(self.time_zone):
            raise OptionInvalid(
                f"option `timeZone` is `{self.time_zone}`",
                hint="name a zone such as UTC, +01:00 or Europe/Rome",
            )


class Decoder:
    """Decodes the values of one task. `kind` is the struct that Spark expects."""

    def __init__(self, form: JsonForm, kind: pa.StructType) -> None:
        self._mode = form.mode
        self._kind = kind
        self._corrupt_index = kind.get_field_index(form.corrupt)
        fields = [field for field in kind if field.name != form.corrupt]
        self._converter = RecordConverter(pa.struct(fields), form.time_zone)
        self._quick = QuickConverter(pa.struct(fields), form.time_zone)
        self._fields = fields
        carriers = [_carrier(field.type) for field in fields]
        self._block_schema: pa.Schema | None = None
        if all(carrier is not None for carrier in carriers):
            pairs = zip(fields, carriers, strict=True)
            self._block_schema = pa.schema([field.with_type(kind) for field, kind in pairs])

    def decode(self, values: pa.BinaryArray) -> tuple[pa.StructArray, pa.BooleanArray | None]:
        """The decoded values, and which rows to keep (None: all)."""
        parts: list[tuple[pa.StructArray, pa.BooleanArray | None]] = []
        self._decode(values, parts, try_block=self._block_schema is not None)
        arrays = [array for array, _ in parts]
        decoded = arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
        if all(keep is None for _, keep in parts):
            return decoded, None
        keeps = [
            pa.repeat(pa.scalar(True), len(array)) if keep is None else keep
            for array, keep in parts
        ]
        return decoded, pa.concat_arrays(keeps)

    def _decode(
        self,
        values: pa.BinaryArray,
        parts: list[tuple[pa.StructArray, pa.BooleanArray | None]],
        *,
        try_block: bool,
    ) -> None:
        if try_block:
            found = self._block(values)
            if found is not None:
                parts.append((found, None))
                return
            if len(values) > CAREFUL_ROWS:
                half = len(values) // 2
                self._decode(values[:half], parts, try_block=True)
                self._decode(values[half:], parts, try_block=True)
                return
        parts.append(self._careful(values))

    # ------------------------------------------------------------------ whole blocks

    def _block(self, values: pa.BinaryArray) -> pa.StructArray | None:
        """The rows of a block in which every record fits; else None."""
        count = len(values)
        if values.null_count or count == 0:
            return None
        try:
            text = values.cast(pa.string())  # refuses what is not UTF-8
            # A line break inside a record would make two lines of it.
            if pc.any(pc.match_substring(text, "\n")).as_py():
                return None
            lines = pc.binary_join(
                pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), text), "\n"
            )
            data = lines[0].as_buffer()
            table = pj.read_json(
                pa.BufferReader(data),
                read_options=pj.ReadOptions(use_threads=False, block_size=data.size + 1024),
                parse_options=pj.ParseOptions(
                    explicit_schema=self._block_schema, unexpected_field_behavior="ignore"
                ),
            )
        except pa.ArrowInvalid:
            return None
        if table.num_rows != count:
            return None
        columns: list[pa.Array] = []
        for field in self._fields:
            column = _finished(table.column(field.name), field.type)
            if column is None:
                return None
            columns.append(column)
        if self._corrupt_index >= 0:
            columns.insert(self._corrupt_index, pa.nulls(count, pa.string()))
        return pa.StructArray.from_arrays(columns, fields=list(self._kind))

    # ------------------------------------------------------------------ record by record

    def _careful(self, values: pa.BinaryArray) -> tuple[pa.StructArray, pa.BooleanArray | None]:
        rows: list[dict[str, Any] | None] = []
        keep: list[bool] = []
        corrupt_name = self._kind[self._corrupt_index].name if self._corrupt_index >= 0 else None
        for data in values.to_pylist():
            if data is None:
                rows.append(None)
                keep.append(True)
                continue
            quick = self._quick.row(data)
            if quick is not None:
                rows.append(quick)
                keep.append(True)
                continue
            row = self._converter.row(data)
            if row.corrupt and self._mode == "FAILFAST":
                raise malformed(data)
            keep.append(not row.corrupt or self._mode == "PERMISSIVE")
            found = row.values
            if row.corrupt and corrupt_name is not None and found is not None:
                found = {**found, corrupt_name: data.decode("utf-8", "replace")}
            rows.append(found)
        array = pa.array(rows, type=self._kind)
        return array, None if all(keep) else pa.array(keep, pa.bool_())


def malformed(data: bytes) -> RecordMalformed:
    shown = data.decode("utf-8", "replace")[:SHOWN_CHARACTERS]
    return RecordMalformed(
        f"a record does not fit `valueSchema`: {shown}",
        hint="`mode=PERMISSIVE` keeps such records in `_corrupt_record`, "
        "`DROPMALFORMED` leaves them out",
    )


def _carrier(kind: pa.DataType, *, top: bool = True) -> pa.DataType | None:
    """What the block parser reads a type as; None if it cannot be trusted with it."""
    types = pa.types
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_float64(kind):
        # A byte has a wider range in Java's parser than in Arrow's.
        return None if types.is_int8(kind) else kind
    if types.is_string(kind):
        return kind
    if top and (types.is_date(kind) or (types.is_timestamp(kind) and kind.tz is not None)):
        return pa.string()
    if types.is_list(kind):
        inner = _carrier(kind.value_type, top=False)
        return None if inner is None else pa.list_(kind.value_field.with_type(inner))
    if types.is_struct(kind):
        fields = [(field, _carrier(field.type, top=False)) for field in kind]
        if any(inner is None for _, inner in fields):
            return None
        return pa.struct([field.with_type(inner) for field, inner in fields])
    return None


def _finished(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array | None:
    """A column of the block parser as its own type; None if some text is in another form."""
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.nulls(0, column.type)
    if array.type == kind:
        return None if _has_negative_zero(array) else array
    form = _ISO_DATE if pa.types.is_date(kind) else _ISO_TIME
    fits = pc.match_substring_regex(array, form)
    if pc.all(fits, min_count=0).as_py() is False:
        return None
    try:
        return array.cast(kind)
    except pa.ArrowInvalid:
        return None


def _has_negative_zero(array: pa.Array) -> bool:
    """Arrow makes -0.0 of the integer -0 too, Spark only of a fraction: the text has to decide."""
    kind = array.type
    if pa.types.is_list(kind):
        return _has_negative_zero(array.flatten())
    if pa.types.is_struct(kind):
        return any(_has_negative_zero(field) for field in array.flatten())
    if not pa.types.is_floating(kind):
        return False
    zeros = array.filter(pc.equal(array, 0.0))
    return len(zeros) > 0 and bool(pc.any(pc.less(pc.divide(1.0, zeros), 0.0)).as_py())
