"""A table that records are looked up in: one version of it at a time, whole, in the memory of the driver.

Where it sits: below `enrich`. It is found by what is in its directory: a table of `materialise` (its newest version), a Delta table,
an Iceberg table of `land` (with `catalog.db`), or Parquet files; a Parquet file is one, too. `catalog:NAME/NAMESPACE.TABLE` is a table of
an Iceberg catalog of the user's own.

Invariants:
- I-LKP-1  What is read is one version: the files are listed once, and no others are opened.
- I-LKP-2  A key is in it once. A table in which one comes twice is refused, and so is one of more than `BYTES_MAX`.
- I-LKP-3  Keys are compared as text, and only types of which a value has one text can be keys.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs as pafs

from millstream.errors import InvalidArgument, PipelineError
from millstream.spark.jobs.lake.layout import S3, Layout, root_of
from millstream.spark.jobs.lake.store import reaching, s3, storage_options
from millstream.spark.jobs.lake.tables import check_installed
from millstream.spark.jobs.lake.target import table_at
from millstream.spark.jobs.shared.table_versions import Versions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

BYTES_MAX: Final = 256 << 20
"""Of the columns that are used. Every task holds the table."""
KEY: Final = "key"
JSON_MARK: Final = ":json"
CATALOG_PREFIX: Final = "catalog:"
_NAME: Final = re.compile(r"[^,=]+")


@dataclass(frozen=True, slots=True)
class Added:
    """A column of the table as a field of the record."""

    field: str
    column: str
    is_json: bool = False
    """The column holds JSON text, which becomes part of the record as it is."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One version of a table."""

    version: str
    schema: pa.Schema
    batches: Callable[[Sequence[str]], Iterable[pa.RecordBatch]]
    """The rows, with the columns that are named."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Which table, what is its key, and what is taken from it."""

    path: str
    key: str
    added: tuple[Added, ...]
    where: tuple[tuple[str, str], ...] = ()
    """Only rows in which these columns have these values."""

    def snapshot(self) -> Snapshot:
        """The newest version."""
        snapshot = _open(self.path)
        if snapshot is None:
            raise _missing(self.path)
        self._check(snapshot.schema)
        return snapshot

    def load(self, snapshot: Snapshot) -> pa.Table:
        """Its rows: `key` as text, and the fields that are added, by their names."""
        names = [self.key, *(one.column for one in self.added), *(name for name, _ in self.where)]
        found: list[pa.RecordBatch] = []
        size = 0
        for batch in snapshot.batches(list(dict.fromkeys(names))):
            rows = self._chosen(batch)
            size += rows.nbytes
            if size > BYTES_MAX:
                raise PipelineError(
                    f"`{self.path}` is larger than {BYTES_MAX >> 20} MiB in the columns that are used",
                    code="table_too_large",
                    hint="add fewer columns, or choose rows with --where; a larger table is a join of "
                    "its own in Spark",
                )
            found.append(rows)
        schema = self._schema(snapshot.schema)
        table = pa.Table.from_batches(found, schema)
        table = table.filter(pc.is_valid(table[KEY]))
        self._check_unique(table[KEY])
        return table

    def _schema(self, schema: pa.Schema) -> pa.Schema:
        kinds = [(one.field, _plain(schema.field(one.column).type)) for one in self.added]
        return pa.schema([(KEY, pa.string()), *kinds])

    def _chosen(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        mask = None
        for name, value in self.where:
            same = pc.equal(_text(batch.column(name)), value)
            mask = same if mask is None else pc.and_(mask, same)
        rows = batch if mask is None else batch.filter(pc.fill_null(mask, False))
        schema = self._schema(batch.schema)
        columns = [_text(rows.column(self.key))]
        for one, field in zip(self.added, list(schema)[1:], strict=True):
            columns.append(_decoded(rows.column(one.column)).cast(field.type, safe=False))
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _check(self, schema: pa.Schema) -> None:
        for name in (self.key, *(one.column for one in self.added), *(n for n, _ in self.where)):
            if schema.names.count(name) != 1:
                raise PipelineError(
                    f"`{self.path}` has no column `{name}`",
                    code="column_missing",
                    hint="it has " + ", ".join(schema.names),
                )
        for name in (self.key, *(n for n, _ in self.where)):
            kind = schema.field(name).type
            if not _has_one_text(kind):
                raise PipelineError(
                    f"column `{name}` of `{self.path}` is `{kind}`, which does not compare with a "
                    "field of a JSON record",
                    code="key_type",
                    hint="a key is a text, an integer, a date or a boolean; convert the column",
                )
        for one in self.added:
            kind = _plain(schema.field(one.column).type)
            _check_type(one.column, kind)
            if one.is_json and not _is_text(kind) and not pa.types.is_binary(kind):
                raise PipelineError(
                    f"column `{one.column}` of `{self.path}` is `{kind}`, not JSON text",
                    code="key_type",
                    hint=f"leave `{JSON_MARK}` out",
                )

    def _check_unique(self, keys: pa.ChunkedArray) -> None:
        counts = keys.value_counts()
        values, times = counts.field("values"), counts.field("counts")
        twice = pc.greater(times, 1)
        if not pc.any(twice).as_py():
            return
        key, count = (part.filter(twice)[0].as_py() for part in (values, times))
        raise PipelineError(
            f"key `{key}` is in {count} rows of `{self.path}`",
            code="key_not_unique",
            hint="a record would be in the result several times; choose rows with --where "
            "COLUMN=VALUE, or another --lookup-key",
        )


def parse_added(text: str) -> tuple[Added, ...]:
    """`name,town=city,profile=value:json` -> fields and columns."""
    found = []
    for part in text.split(","):
        is_json = part.strip().endswith(JSON_MARK)
        field, equals, column = part.strip().removesuffix(JSON_MARK).partition("=")
        if not field or (equals and not _NAME.fullmatch(column)):
            raise InvalidArgument(
                f"--add: `{part}` is not a column",
                hint="write COLUMN, FIELD=COLUMN or FIELD=COLUMN:json, several with commas",
            )
        found.append(Added(field, column or field, is_json))
    return tuple(found)


def parse_where(text: str) -> tuple[tuple[str, str], ...]:
    """`type=user,active=true` -> columns and values."""
    pairs = []
    for part in text.split(",") if text else ():
        name, equals, value = part.partition("=")
        if not name.strip() or not equals:
            raise InvalidArgument(
                f"--where: `{part}` is not COLUMN=VALUE", hint="several with commas"
            )
        pairs.append((name.strip(), value))
    return tuple(pairs)


# ---------------------------------------------------------------------------- kinds of tables


def _open(path: str) -> Snapshot | None:
    if path.startswith(CATALOG_PREFIX):
        return _in_catalog(path.removeprefix(CATALOG_PREFIX))
    scheme, root = root_of(path)
    layout = Layout(root, scheme=scheme)
    with reaching(layout):
        kind = table_at(layout) if scheme or root.is_dir() else None
        if kind == "delta":
            return _delta(layout)
        if kind == "iceberg" and not scheme:
            return _iceberg(Layout(root, "iceberg"))
        numbers = Versions(root).numbers() if not scheme else []
        if numbers:
            newest = Versions(root).path(numbers[-1])
            return _files(pafs.LocalFileSystem(), newest.as_posix(), partitioning=None)
        store = s3() if scheme else pafs.LocalFileSystem()
        return _files(store, root.as_posix(), partitioning="hive")


def _files(store: Any, root: str, *, partitioning: str | None) -> Snapshot | None:
    """Parquet files; names that begin with `_` or `.` are not for readers."""
    found = [store.get_file_info(root)]
    if not found[0].is_file:
        chosen = pafs.FileSelector(root, recursive=True, allow_not_found=True)
        found = [info for info in store.get_file_info(chosen) if _is_data(info, root)]
    if not found or not found[0].is_file:
        return None
    found.sort(key=lambda info: info.path)
    said = repr([(info.path, info.size, info.mtime_ns) for info in found])
    single = found[0].path == root
    dataset = ds.dataset(
        [info.path for info in found],
        format="parquet",
        filesystem=store,
        partitioning=partitioning,
        partition_base_dir=None if single else root,
    )
    return _of_dataset(hashlib.sha256(said.encode()).hexdigest(), dataset)


def _is_data(info: Any, root: str) -> bool:
    parts = info.path.removeprefix(root).strip("/").split("/")
    hidden = any(part.startswith(("_", ".")) for part in parts)
    return bool(info.is_file and info.path.endswith(".parquet") and not hidden)


def _delta(layout: Layout) -> Snapshot:
    check_installed("delta")
    from deltalake import DeltaTable

    table = DeltaTable(layout.url, storage_options=storage_options(layout))
    return _of_dataset(f"delta {table.version()}", table.to_pyarrow_dataset())


def _iceberg(layout: Layout) -> Snapshot:
    check_installed("iceberg")
    from millstream.spark.jobs.lake.iceberg import open_catalog

    catalog = open_catalog(layout)
    try:
        return of_iceberg(catalog.load_table(layout.identifier))
    finally:
        catalog.close()


def _in_catalog(name: str) -> Snapshot | None:
    """`CATALOG/NAMESPACE.TABLE`, a table of the user's own."""
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

    catalog, _, identifier = name.partition("/")
    layout = Layout(Path(), "iceberg", scheme=S3, catalog=catalog, identifier=identifier)
    try:
        return _iceberg(layout)
    except (NoSuchTableError, NoSuchNamespaceError):
        return None


def of_iceberg(table: Any) -> Snapshot:
    current = table.current_snapshot()
    number = None if current is None else current.snapshot_id

    def batches(names: Sequence[str]) -> Iterable[pa.RecordBatch]:
        scan = table.scan(selected_fields=tuple(names), snapshot_id=number)
        yield from scan.to_arrow_batch_reader()

    return Snapshot(
        f"iceberg {number} {table.schema().schema_id}", table.schema().as_arrow(), batches
    )


def _of_dataset(version: str, dataset: Any) -> Snapshot:
    return Snapshot(
        version,
        pa.schema(dataset.schema),
        lambda names: dataset.to_batches(
            columns=list(names), batch_readahead=2, fragment_readahead=2
        ),
    )


def _missing(path: str) -> PipelineError:
    return PipelineError(
        f"there is no table at `{path}`",
        code="table_missing",
        hint="name a directory of Parquet files, a table of `land` or `materialise`, a Delta table, or "
        "catalog:NAME/NAMESPACE.TABLE",
    )


# ---------------------------------------------------------------------------- types


def _is_text(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string(), pa.string_view())


def _has_one_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    of_numbers = pa.types.is_integer(kind) or pa.types.is_date32(kind) or pa.types.is_boolean(kind)
    return _is_text(kind) or of_numbers


def _decoded(column: Any) -> Any:
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _text(column: Any) -> Any:
    return _decoded(column).cast(pa.string())


def _plain(kind: pa.DataType) -> pa.DataType:
    """The type that Spark has for it; one that it has no type for stays."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if _is_text(kind):
        return pa.string()
    if pa.types.is_large_binary(kind):
        return pa.binary()
    return kind


def _check_type(name: str, kind: pa.DataType) -> None:
    from pyspark.sql.pandas.types import from_arrow_type

    try:
        from_arrow_type(kind)
    except Exception as error:  # Spark's own class, which has the text of its JVM's errors
        raise PipelineError(
            f"column `{name}` is `{kind}`, which Spark has no type for",
            code="column_type",
            hint="convert it, or leave it out",
        ) from error
