"""Whole blocks of records by Arrow's parser, for types where what it accepts is certainly what Spark gives.

Where it sits: called by `decoder.py`, which decodes record by record what is refused here: a value that does not fit, a key
twice, a type that the parser cannot be trusted with. `shape.py` says which records to leave out, so that the others are taken.

Invariant I-BLO-1: a block is refused, or all of its records are as `convert.py` makes them, but for those said to be in doubt.
"""

from __future__ import annotations

import re
from functools import reduce
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from millstream.spark.json import shape

DECIMAL_DIGITS: Final = 38
PATTERN_MAX: Final = 20_000
"""Longer ones would not fit into the memory of the matcher."""
_OBJECT: Final = r"^[ \t\r]*\{"
_NO_ZONE: Final = r"^(.{10}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?)$"
_TWICE: Final = re.compile(r"Column\((.*)\) was specified twice")


class _Refused(Exception):  # noqa: N818 - it is no error
    """A value needs a closer look."""


class Blocks:
    """Decodes blocks of records with these fields."""

    def __init__(self, fields: list[pa.Field], time_zone: str) -> None:
        self._fields = fields
        self._utc = time_zone in ("UTC", "Z", "GMT")
        self._shape = shape.of_record(fields, utc=self._utc)
        self._texts = shape.unquoted(fields)
        self._twice: set[str] = set()
        """Patterns of names that came twice in a record."""
        carriers = [(field, _carrier(field.type)) for field in fields]
        self.trusted = all(carrier is not None for _, carrier in carriers)
        if self.trusted:
            schema = pa.schema([field.with_type(carrier) for field, carrier in carriers])
            self._options = pj.ParseOptions(
                explicit_schema=schema, unexpected_field_behavior="ignore"
            )

    def sorted_out(self, values: pa.BinaryArray) -> tuple[pa.BinaryArray, pa.BooleanArray]:
        """The records, numbers and booleans in fields of text as text, and which had better be left out."""
        odd = self._odd(values)
        if self._texts and odd.true_count:
            found = values.filter(odd)
            quoted = pc.replace_substring_regex(found, self._texts, r'\1"\2"\3')
            if not quoted.equals(found):
                values = pc.replace_with_mask(values, odd, quoted)
                odd = pc.replace_with_mask(odd, odd, self._odd(quoted))
        return values, odd

    def _odd(self, values: pa.BinaryArray) -> pa.BooleanArray:
        """Records that look as if they do not fit. Nothing is decided by it."""
        fits = [pc.starts_with(values, b"{")]
        if len(self._shape) <= PATTERN_MAX:
            fits.append(pc.match_substring_regex(values, self._shape))
        for name in self._twice:
            found = pc.count_substring_regex(values, name)
            fits.append(pc.less_equal(found, pc.approximate_median(found)))
        try:
            values.cast(pa.string())
        except pa.ArrowInvalid:
            fits.append(pc.match_substring_regex(values, shape.UTF_8))
        return pc.fill_null(pc.invert(reduce(pc.and_, fits)), True)

    def decode(self, values: pa.BinaryArray) -> tuple[list[pa.Array], pa.BooleanArray] | None:
        """The columns of a block, and which of its records are in doubt; None if there may be more of them."""
        count = len(values)
        if not self.trusted or values.null_count:
            return None
        doubts = pa.repeat(pa.scalar(False), count)
        if count == 0:
            return [pa.nulls(0, field.type) for field in self._fields], doubts
        try:
            # The cast refuses what is not UTF-8.
            text = pc.ascii_rtrim(values.cast(pa.string()), " \t\r\n")
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
                parse_options=self._options,
            )
            if table.num_rows != count:
                return None
            columns = []
            for field in self._fields:
                column = _in_one(table.column(field.name))
                if _is_iso(field.type):
                    column, odd = self._iso(column, field.type)
                    doubts = pc.or_(doubts, odd)
                _check(column)
                columns.append(column.cast(field.type))
            return columns, doubts
        except (pa.ArrowInvalid, _Refused) as error:
            twice = _TWICE.search(str(error))
            if twice and "[]" not in twice[1]:
                self._twice.add(shape.name(twice[1].rpartition("/")[2]))
            return None

    def _iso(self, texts: pa.StringArray, kind: pa.DataType) -> tuple[pa.Array, pa.BooleanArray]:
        """Dates or times in forms of ISO 8601, and which texts have another."""
        form = f"^{shape.DATE if pa.types.is_date(kind) else shape.TIME}$"
        fits = pc.match_substring_regex(texts, form)
        if self._utc and fits.false_count and not pa.types.is_date(kind):
            texts = pc.replace_substring_regex(texts, _NO_ZONE, r"\1Z")
            fits = pc.match_substring_regex(texts, form)
        odd = pc.fill_null(pc.invert(fits), False)
        return pc.if_else(
            odd, pa.scalar(None, pa.string()), texts
        ) if odd.true_count else texts, odd


def _is_iso(kind: pa.DataType) -> bool:
    """Whether texts of ISO 8601 can become this type without a closer look."""
    return pa.types.is_date(kind) or (pa.types.is_timestamp(kind) and kind.tz is not None)


def _carrier(kind: pa.DataType, *, top: bool = True) -> pa.DataType | None:
    """What the block parser reads a type as; None if it cannot be trusted with it."""
    types = pa.types
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_string(kind):
        return kind
    if types.is_floating(kind):
        return pa.float64()  # as Java does, also where it is rounded afterwards
    if types.is_decimal(kind):
        # Digits as many as the type has, shifted by its scale: Arrow wraps around where that is too much.
        if kind.precision + kind.scale <= DECIMAL_DIGITS:
            return kind
        return pa.decimal256(kind.precision, kind.scale) if top else None
    if top and _is_iso(kind):
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


def _in_one(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks()
    return array if isinstance(array, pa.Array) else pa.concat_arrays(array.chunks)


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
            raise _Refused
