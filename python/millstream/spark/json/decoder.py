"""JSON values by a schema: whole blocks at once where that is safe, record by record where it is not.

Where it sits: called by `read/columns.py` for each batch of a task with `valueFormat=json`, and by the jobs. The result is the
same as Spark's `from_json` with the same schema and mode.

    block of records ──► `blocks.py` takes it? ──► done
                              │ no: one record does not fit
                              ▼
                         without the records that look odd ──► takes it? ──► done, but for the odd ones
                              │ no                                              │
                              ▼                                                 ▼
                         all of them                        one by one, by `convert.py`

Invariants:
- I-DEC-1  One bad record never changes what its neighbours become.
- I-DEC-2  Both ways give the same row for every record that they accept.
- I-DEC-3  PERMISSIVE keeps every row, DROPMALFORMED leaves corrupt ones out, FAILFAST fails on the first.
- I-DEC-4  A block is parsed three times at most, and a record alone once, however many of them are bad.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import OptionInvalid, RecordMalformed
from millstream.spark.json.blocks import Blocks
from millstream.spark.json.convert import RecordConverter
from millstream.spark.json.explain import Fault, entry
from millstream.spark.json.times import known_zone

if TYPE_CHECKING:
    from collections.abc import Iterable

SHOWN_CHARACTERS: Final = 200
SORTED_OUT_MOST: Final = 2
"""Once more, because only what the parser says tells which names come twice."""


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
        self._form = form
        self._kind = kind
        self._corrupt = kind.get_field_index(form.corrupt)
        self._with_reasons = self._corrupt >= 0 and pa.types.is_struct(kind[self._corrupt].type)
        fields = [field for field in kind if field.name != form.corrupt]
        self._blocks = Blocks(fields, form.time_zone)
        self._converter = RecordConverter(fields, form.time_zone, form.required)
        self._wary = False

    def decode(self, values: pa.BinaryArray) -> tuple[pa.StructArray, pa.BooleanArray | None]:
        """The decoded values, and which rows to keep (None: all)."""
        usual, odd = self._blockwise(values)
        if not odd.true_count:
            return usual, None
        rows, fits = self._carefully(values.filter(odd).to_pylist())
        made = merged(usual, pa.array(rows, self._kind), odd)
        if self._form.mode != "DROPMALFORMED" or all(fits):
            return made, None
        return made, pc.replace_with_mask(pc.invert(odd), odd, pa.array(fits))

    def _blockwise(self, values: pa.BinaryArray) -> tuple[pa.StructArray, pa.BooleanArray]:
        """The rows that can be made at once, and which records are not among them."""
        odd = pa.repeat(pa.scalar(False), len(values))
        found = None if self._wary else self._blocks.decode(values)
        if found is None and self._blocks.trusted:
            for _ in range(SORTED_OUT_MOST):
                texts, odd = self._blocks.sorted_out(values)
                found = self._blocks.decode(texts.filter(pc.invert(odd)))
                if found is not None:
                    break
        # Where all records fit, nobody looks for odd ones.
        self._wary = found is None or odd.true_count > 0
        if found is None:
            return pa.array([], self._kind), pa.repeat(pa.scalar(True), len(values))
        columns, doubts = found
        if self._corrupt >= 0:
            columns.insert(self._corrupt, pa.nulls(len(doubts), self._kind[self._corrupt].type))
        made = pa.StructArray.from_arrays(columns, fields=list(self._kind))
        for name in self._form.required:
            doubts = pc.or_(doubts, pc.is_null(made.field(name)))
        if doubts.true_count:
            odd = pc.replace_with_mask(odd, pc.invert(odd), doubts)
            made = made.filter(pc.invert(doubts))
        return made, odd

    def _carefully(
        self, texts: Iterable[bytes | None]
    ) -> tuple[list[dict[str, Any] | None], list[bool]]:
        """Each record by itself, and whether it fits; what the mode does with those that do not."""
        rows: list[dict[str, Any] | None] = []
        fits: list[bool] = []
        for text in texts:
            data = text or b""
            values, fault = self._converter.row(data)
            if values is None and self._with_reasons:
                # With its reason every row is one, also an empty record.
                values, fault = {}, Fault()
            if fault is not None:
                if self._form.mode == "FAILFAST":
                    raise malformed(data)
                if values is not None:
                    values[self._form.corrupt] = self._shown(data, fault)
            rows.append(values)
            fits.append(fault is None)
        return rows, fits

    def _shown(self, data: bytes, fault: Fault) -> Any:
        if self._with_reasons:
            return entry(data, fault, self._kind)
        return data.decode("utf-8", "replace")


def merged(usual: pa.Array, others: pa.Array, odd: pa.BooleanArray) -> pa.Array:
    """Both in one array: the others at the odd places, each in its order."""
    rows = [pc.indices_nonzero(pc.invert(odd)), pc.indices_nonzero(odd)]
    return pa.concat_arrays([usual, others]).take(pc.sort_indices(pa.concat_arrays(rows)))


def malformed(data: bytes) -> RecordMalformed:
    shown = data.decode("utf-8", "replace")[:SHOWN_CHARACTERS]
    return RecordMalformed(
        f"a record does not fit `valueSchema`: {shown}",
        hint="`mode=PERMISSIVE` keeps such records in `_corrupt_record`, "
        "`DROPMALFORMED` leaves them out",
    )
