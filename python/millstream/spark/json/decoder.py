"""JSON values by a schema: whole blocks at once where that is safe, record by record where it is not.

Where it sits: called by `columns.Shaper` for each batch of a task with `valueFormat=json`. The result is the same as
Spark's `from_json` with the same schema and mode.

    block of records ──► parser of Arrow ──► as it should be? ──► done
                              │ refuses the block: one record does not fit
                              ▼
                         without the records that look odd ──► as it should be? ──► done, but for the odd ones
                              │ refuses these too               │
                              ▼                                 ▼
                         `columns.py`: every record, once ──► rows in doubt one by one, by `convert.py`

The block parser is used only for types where what it accepts is certainly what Spark gives: it fails for
everything else (a number in a string field, a key twice, a value out of range), and then the careful way decides. What looks odd
decides nothing: an odd record is looked at with care, all others have to pass the block parser.

Invariants:
- I-DEC-1  One bad record never changes what its neighbours become.
- I-DEC-2  The three ways give the same row for every record that they accept.
- I-DEC-3  PERMISSIVE keeps every row, DROPMALFORMED leaves corrupt ones out, FAILFAST fails on the first.
- I-DEC-4  A block is parsed twice at most, the first one that is refused once more, however many of its records are bad.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

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
_NOTHING: Final = r"^\z."
PATTERN_MAX: Final = 20_000
"""Longer ones would not fit into the memory of the matcher."""
_BEGINS: Final[tuple[tuple[Callable[[pa.DataType], bool], str], ...]] = (
    (pa.types.is_boolean, "tf"), (pa.types.is_decimal, '"0-9-'), (pa.types.is_list, r"\["), (pa.types.is_nested, "{"),
    (pa.types.is_integer, "0-9-"), (pa.types.is_floating, "0-9-"), (lambda _: True, '"'),
)  # fmt: skip
"""What values begin with, by type."""
Bad: TypeAlias = dict[int, str | None]
"""Rows that do not fit, and the field that is to blame where that is known."""


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
        self._odd_values = _odd_values(fields)
        self._wary = False

    def decode(self, values: pa.BinaryArray) -> tuple[pa.StructArray, pa.BooleanArray | None]:
        """The decoded values, and which rows to keep (None: all)."""
        made, bad = self._blockwise(values)
        return self._treated(made, values, bad) if bad else (made, None)

    def _made(self, columns: Sequence[pa.Array], count: int) -> pa.StructArray:
        """Rows that fit, as far as anybody knows."""
        return self._struct(columns, pa.nulls(count, self._corrupt_type))

    def _struct(
        self, columns: Sequence[pa.Array], corrupt: pa.Array, nulls: pa.Array | None = None
    ) -> pa.StructArray:
        columns = list(columns)
        if self._corrupt_index >= 0:
            columns.insert(self._corrupt_index, corrupt)
        return pa.StructArray.from_arrays(columns, fields=list(self._kind), mask=nulls)

    # ------------------------------------------------------------------ whole blocks

    def _blockwise(self, values: pa.BinaryArray) -> tuple[pa.StructArray, Bad]:
        odd = self._odd(values) if self._wary else None
        if odd is not None and odd.true_count:
            columns = self._block(values.filter(pc.invert(odd)))
            if columns is None:
                return self._careful(values)
            usual = self._made(columns, len(values) - odd.true_count)
            others, found = self._careful(values.filter(odd))
            rows = pc.indices_nonzero(odd).to_pylist()
            made = _merged(usual, others, odd)
            bad = {rows[row]: field for row, field in found.items()}
            return made, self._lacking(made) | bad
        columns = self._block(values)
        if columns is not None:
            made = self._made(columns, len(values))
            return made, self._lacking(made)
        if self._wary or self._block_schema is None:
            return self._careful(values)
        self._wary = True  # from now on; where all records fit, nobody looks for odd ones
        return self._blockwise(values)

    def _odd(self, values: pa.BinaryArray) -> pa.BooleanArray:
        """Which records are to be looked at with care: nothing is decided by it."""
        whole = pc.and_(pc.starts_with(values, b"{"), pc.ends_with(values, b"}"))
        # Not in one pattern with the begin: it would take four times as long.
        odd = pc.match_substring_regex(values, self._odd_values)
        return pc.fill_null(pc.or_(odd, pc.invert(whole)), True)

    def _block(self, values: pa.BinaryArray) -> list[pa.Array] | None:
        """The columns of a block in which every record fits; else None."""
        count = len(values)
        if self._block_schema is None or values.null_count or count == 0:
            return None
        try:
            text = values.cast(pa.string())  # refuses what is not UTF-8
            # A `null` is no row of nulls in Spark, and Arrow's parser crashes where a block begins with one. A line
            # break inside a record would make two lines of it.
            if not pc.all(pc.match_substring_regex(text, _OBJECT)).as_py():
                return None
            if b"\n" in text.buffers()[2].to_pybytes():
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

    def _careful(self, values: pa.BinaryArray) -> tuple[pa.StructArray, Bad]:
        """Every record once, and those in doubt put in their places, each as it is made alone."""
        texts = values.to_pylist()
        found = self._columns.decode(texts)
        made = self._made(found.columns, len(values))
        bad: Bad = {row: name for row, name in found.corrupt.items() if row not in found.doubts}
        rows: list[dict[str, Any] | None] = []
        doubts = sorted(found.doubts)
        for index in doubts:
            data = texts[index]
            row = Row(None, corrupt=False) if data is None else self._converter.row(data)
            rows.append(row.values)
            if row.corrupt:
                bad[index] = None
        if rows:
            made = put(made, doubts, pa.array(rows, self._kind))
        return made, self._lacking(made, found.doubts) | bad

    def _lacking(self, made: pa.StructArray, doubts: Iterable[int] = ()) -> Bad:
        """Rows without a field that is required; an empty record has none at all. Those in doubt may have it twice."""
        lacks: list[tuple[str | None, pa.Array]] = [(None, made)] if self._explainer else []
        lacks += [(name, made.field(name)) for name in self._required]
        bad: Bad = {}
        for name, column in lacks:
            if column.null_count:
                for row in pc.indices_nonzero(pc.is_null(column)).to_pylist():
                    bad.setdefault(row, name)
        return bad | {row: None for row in doubts if row in bad}

    def _treated(
        self, made: pa.StructArray, values: pa.BinaryArray, bad: Bad
    ) -> tuple[pa.StructArray, pa.BooleanArray | None]:
        """What the mode does with rows that do not fit."""
        rows = sorted(bad)
        if self._mode == "FAILFAST":
            raise malformed(values[rows[0]].as_py() or b"")
        if self._mode == "DROPMALFORMED":
            return made, pa.array([index not in bad for index in range(len(values))], pa.bool_())
        columns = [made.field(field.name) for field in self._fields]
        texts = values.take(pa.array(rows)).to_pylist()
        shown = [self._shown(text or b"", bad[row]) for row, text in zip(rows, texts, strict=True)]
        places: list[int | None] = [None] * len(values)
        for place, row in enumerate(rows):
            places[row] = place
        corrupt = pa.array(shown, self._corrupt_type).take(pa.array(places, pa.int64()))
        # With its reason every row is one, also an empty record.
        nulls = None if self._explainer else made.is_null()
        return self._struct(columns, corrupt, nulls), None

    def _shown(self, data: bytes, field: str | None) -> Any:
        if self._explainer is not None:
            return self._explainer.entry(data, field)
        return data.decode("utf-8", "replace")


def _merged(usual: pa.Array, odd_ones: pa.Array, odd: pa.BooleanArray) -> pa.Array:
    """Both in one array, each row where it was."""
    of_odd = pc.cumulative_sum(odd.cast(pa.int64()))
    of_usual = pc.cumulative_sum(pc.invert(odd).cast(pa.int64()))
    places = pc.if_else(odd, pc.add(of_odd, len(usual)), of_usual)
    return pa.concat_arrays([usual, odd_ones]).take(pc.subtract(places, 1))


def _odd_values(fields: Iterable[pa.Field]) -> str:
    """A pattern of records in which a value of these fields begins as its type does not."""
    names: dict[str, list[str]] = {}
    for field in fields:
        name = re.escape(json.dumps(field.name, ensure_ascii=False))
        begins = next(begins for fits, begins in _BEGINS if fits(field.type))
        names.setdefault(begins, []).append(name)
    values = (rf"(?:{'|'.join(found)})\s*:\s*[^n\s{begin}]" for begin, found in names.items())
    found = "|".join(values) or _NOTHING
    return found if len(found) <= PATTERN_MAX else _NOTHING


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
