"""JSON values by a schema: whole blocks at once where that is safe, record by record where it is not.

Where it sits: called by `columns.Shaper` for each batch of a task with `valueFormat=json`. The result is the same as
Spark's `from_json` with the same schema and mode.

    block of records ──► parser of Arrow ──► as it should be? ──► done
                              │ refuses the block: one record does not fit
                              ▼
                         `columns.py`: every record, once ──► rows in doubt one by one, by `convert.py`

The block parser is used only for types where what it accepts is certainly what Spark gives: it fails for
everything else (a number in a string field, a key twice, a value out of range), and then the careful way decides.

Invariants:
- I-DEC-1  One bad record never changes what its neighbours become.
- I-DEC-2  The three ways give the same row for every record that they accept.
- I-DEC-3  PERMISSIVE keeps every row, DROPMALFORMED leaves corrupt ones out, FAILFAST fails on the first.
- I-DEC-4  A block is looked at twice at most, however many of its records are bad.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from millstream.errors import OptionInvalid, RecordMalformed
from millstream.spark.json.columns import Columns, is_iso, iso_times, put
from millstream.spark.json.convert import Misfit, RecordConverter, Row
from millstream.spark.json.explain import Explainer
from millstream.spark.json.times import known_zone

if TYPE_CHECKING:
    from collections.abc import Sequence

SHOWN_CHARACTERS: Final = 200
DECIMAL_DIGITS: Final = 38
_OBJECT: Final = r"^[ \t\r]*\{"


@dataclass(frozen=True, slots=True)
class JsonForm:
    """How values are decoded; plain data."""

    ddl: str
    mode: str
    corrupt: str
    time_zone: str
    required: tuple[str, ...] = ()
    """Fields without which a record does not fit."""

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
        self._required = form.required
        self._corrupt_type = pa.string()
        self._explainer: Explainer | None = None
        if self._corrupt_index >= 0 and pa.types.is_struct(kind.field(self._corrupt_index).type):
            self._corrupt_type = kind.field(self._corrupt_index).type
            self._explainer = Explainer(fields, form.required, form.time_zone)
        self._converter = RecordConverter(pa.struct(fields), form.time_zone)
        self._columns = Columns(fields, form.time_zone)
        self._fields = fields
        carriers = [_carrier(field.type) for field in fields]
        self._block_schema: pa.Schema | None = None
        if all(carrier is not None for carrier in carriers):
            pairs = zip(fields, carriers, strict=True)
            self._block_schema = pa.schema([field.with_type(kind) for field, kind in pairs])

    def decode(self, values: pa.BinaryArray) -> tuple[pa.StructArray, pa.BooleanArray | None]:
        """The decoded values, and which rows to keep (None: all)."""
        columns = self._block(values)
        nothing = pa.nulls(len(values), self._corrupt_type)
        if columns is not None:
            made = self._struct(columns, nothing)
            bad = self._lacking(made)
            return self._treated(made, values.to_pylist(), bad) if bad else (made, None)
        texts = values.to_pylist()
        found = self._columns.decode(texts)
        made = self._struct(found.columns, nothing)
        return self._careful(made, texts, sorted(found.doubts), found.corrupt - found.doubts)

    def _struct(
        self, columns: Sequence[pa.Array], corrupt: pa.Array, nulls: pa.Array | None = None
    ) -> pa.StructArray:
        columns = list(columns)
        if self._corrupt_index >= 0:
            columns.insert(self._corrupt_index, corrupt)
        return pa.StructArray.from_arrays(columns, fields=list(self._kind), mask=nulls)

    # ------------------------------------------------------------------ whole blocks

    def _block(self, values: pa.BinaryArray) -> list[pa.Array] | None:
        """The columns of a block in which every record fits; else None."""
        count = len(values)
        if self._block_schema is None or values.null_count or count == 0:
            return None
        try:
            text = values.cast(pa.string())  # refuses what is not UTF-8
            # A line break inside a record would make two lines of it. A `null` is no row of nulls in Spark, and
            # Arrow's parser crashes where a block begins with one.
            if pc.any(pc.match_substring(text, "\n")).as_py():
                return None
            if not pc.all(pc.match_substring_regex(text, _OBJECT)).as_py():
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
            if table.num_rows != count:
                return None
            return [_finished(table.column(field.name), field.type) for field in self._fields]
        except (pa.ArrowInvalid, Misfit):
            return None

    # ------------------------------------------------------------------ record by record

    def _careful(
        self, made: pa.StructArray, texts: list[bytes | None], doubts: Sequence[int], bad: set[int]
    ) -> tuple[pa.StructArray, pa.BooleanArray | None]:
        """The rows in doubt put in their places, each as it is made alone."""
        rows: list[dict[str, Any] | None] = []
        for index in doubts:
            data = texts[index]
            row = Row(None, corrupt=False) if data is None else self._converter.row(data)
            rows.append(row.values)
            if row.corrupt:
                bad.add(index)
        if rows:
            made = put(made, doubts, pa.array(rows, self._kind))
        bad |= self._lacking(made)
        return self._treated(made, texts, bad) if bad else (made, None)

    def _lacking(self, made: pa.StructArray) -> set[int]:
        """Rows without a field that is required; an empty record has none at all."""
        lacks = [made.field(name) for name in self._required]
        if self._explainer is not None:
            lacks.append(made)
        return {
            index
            for column in lacks
            if column.null_count
            for index in pc.indices_nonzero(pc.is_null(column)).to_pylist()
        }

    def _treated(
        self, made: pa.StructArray, texts: list[bytes | None], bad: set[int]
    ) -> tuple[pa.StructArray, pa.BooleanArray | None]:
        """What the mode does with rows that do not fit."""
        if self._mode == "FAILFAST":
            raise malformed(texts[min(bad)] or b"")
        if self._mode == "DROPMALFORMED":
            return made, pa.array([index not in bad for index in range(len(texts))], pa.bool_())
        columns = [made.field(field.name) for field in self._fields]
        shown = pa.array(
            [
                self._shown(text or b"") if index in bad else None
                for index, text in enumerate(texts)
            ],
            self._corrupt_type,
        )
        # With its reason every row is one, also an empty record.
        nulls = None if self._explainer else made.is_null()
        return self._struct(columns, shown, nulls), None

    def _shown(self, data: bytes) -> Any:
        if self._explainer is not None:
            return self._explainer.entry(data)
        return data.decode("utf-8", "replace")


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
    if types.is_decimal(kind):
        # Digits as many as the type has, shifted by its scale: Arrow wraps around where that is too much.
        if kind.precision + kind.scale <= DECIMAL_DIGITS:
            return kind
        return pa.decimal256(kind.precision, kind.scale) if top else None
    if top and is_iso(kind):
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


def _finished(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    """A column of the block parser as its own type; a misfit if a value needs a closer look."""
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.nulls(0, column.type)
    if pa.types.is_string(array.type) and not pa.types.is_string(kind):
        return iso_times(array, kind, others=False)
    _check(array)
    return array.cast(kind)


def _check(array: pa.Array) -> None:
    """What the block parser takes and Spark does not, or takes for something else."""
    kind = array.type
    if pa.types.is_list(kind):
        _check(array.flatten())
    elif pa.types.is_struct(kind):
        for field in array.flatten():
            _check(field)
    elif pa.types.is_decimal(kind):
        array.validate(full=True)  # it lets an integer have more digits than the type
    elif pa.types.is_floating(kind):
        # Arrow makes -0.0 of the integer -0 too, Spark only of a fraction: the text has to decide.
        zeros = array.filter(pc.equal(array, 0.0))
        if len(zeros) and pc.any(pc.less(pc.divide(1.0, zeros), 0.0)).as_py():
            raise Misfit("a negative zero")
