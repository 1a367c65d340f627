"""Dead letters: what a record that does not fit becomes, and how it is read again.

    {"reason":"wrong_type","field":"price","detail":"\\"x\\" is not double","stream":"orders","offset":17,
     "timestamp":"2026-11-16T02:03:04.000000Z","attempt":1,"value":"{\\"id\\":4,\\"price\\":\\"x\\"}"}

Where it sits: written by `decode`, written and read by `redrive`. `stream`, `offset` and `timestamp` are those of the record, however
often it was tried; `value` is its text, or `bytes` (base64) what it is where that is no text.
Invariant I-LET-1: a letter holds everything that is needed to try again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.spark.json.decoder import Decoder, JsonForm, merged

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import Column

CORRUPT: Final = "_dead_letter"
"""The field of a decoded value that says why it does not fit; null if it does."""
NOT_A_LETTER: Final = "not_a_letter"
SCHEMA: Final = (
    "reason STRING, field STRING, detail STRING, stream STRING NOT NULL, offset BIGINT NOT NULL, "
    "timestamp TIMESTAMP NOT NULL, attempt INT NOT NULL, value STRING, bytes BINARY"
)
TEXT_OPTIONS: Final = {
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
    "timeZone": "UTC",
}
"""How rows become JSON: every microsecond, in UTC whatever the session's zone is."""


def letter(attempts: Column) -> Column:
    """The letter of a decoded row, after so many attempts before; null if its value fits."""
    from pyspark.sql import functions as f

    found = f.col("value")[CORRUPT]
    parts = [found[name].alias(name) for name in ("reason", "field", "detail")]
    parts += [f.col(name) for name in ("stream", "offset", "timestamp")]
    parts += [(attempts + 1).alias("attempt"), found["record"].alias("value"), found["bytes"]]
    return f.when(found.isNotNull(), f.to_json(f.struct(*parts), TEXT_OPTIONS))


class Reopened:
    """Letters as the records that they are about, decoded again: for `mapInArrow`. What is no letter is one, about itself."""

    def __init__(self, form: JsonForm, schema: pa.Schema) -> None:
        self._form = form
        self._schema = schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        kind = self._schema.field("value").type
        decoder = Decoder(self._form, kind)
        for batch in batches:
            letters = batch.column("value")
            foreign = letters.field(CORRUPT)
            is_letter = foreign.is_null()
            values, _ = decoder.decode(_texts(letters.filter(is_letter)))
            others = pa.array([_about(found) for found in foreign.drop_null()], kind)
            columns = {
                name: pc.if_else(is_letter, letters.field(name), batch.column(name))
                for name in ("stream", "offset", "timestamp")
            }
            columns["attempt"] = pc.if_else(is_letter, letters.field("attempt"), 0)
            columns["value"] = merged(values, others, foreign.is_valid())
            arrays = [columns[field.name].cast(field.type) for field in self._schema]
            yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _texts(letters: pa.StructArray) -> pa.Array:
    texts = letters.field("value").cast(pa.binary())
    return pc.fill_null(pc.coalesce(texts, letters.field("bytes").cast(pa.binary())), b"")


def _about(found: Any) -> dict[str, Any]:
    return {CORRUPT: {**found.as_py(), "reason": NOT_A_LETTER}}
