"""A lake as an Iceberg table with its catalog beside it: the driver commits metadata only.

Where it sits: the last step of `publish` with `table=iceberg`; needs the extra `[iceberg]`. The
table is `millstream.records` of the SQLite catalog `catalog.db` in the root; its partitions are
`day(timestamp)` and `stream`, taken from the statistics of the files.
Invariant I-LAK-11: the batch number of a query is a property of the table, set by the same commit that
adds the files; a batch whose number the table has is not entered again, and expiring snapshots does
not make the table forget it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from millstream.errors import PipelineError
from millstream.spark.jobs.lake.layout import IDENTIFIER, Layout
from millstream.spark.jobs.lake.publish import check_columns, not_taken, schema_of
from millstream.spark.jobs.lake.store import catalog_properties

if TYPE_CHECKING:
    from collections.abc import Mapping

    from millstream.spark.jobs.lake.publish import Manifest

CATALOG: Final = "millstream"
CATALOG_FILE: Final = "catalog.db"
PROPERTY: Final = "millstream.batch."
COMMIT_ATTEMPTS: Final = 5


class IcebergLake:
    """The Iceberg table at the root of the lake."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def enter(self, manifest: Manifest) -> None:
        from pyiceberg.exceptions import CommitFailedException

        catalog = open_catalog(self._layout)
        try:
            for attempt in range(COMMIT_ATTEMPTS):
                table = self._table(catalog, manifest)
                seen = table.properties.get(PROPERTY + manifest.query_id)
                if seen is not None and int(seen) >= manifest.batch_id:
                    return
                try:
                    self._commit(table, manifest)
                except CommitFailedException:
                    if attempt + 1 == COMMIT_ATTEMPTS:
                        raise
                else:
                    return
        finally:
            catalog.close()

    def entered(self, query_id: str) -> int | None:
        table = self._there()
        seen = None if table is None else table.properties.get(PROPERTY + query_id)
        return None if seen is None else int(seen)

    def check(self, schema: pa.Schema) -> None:
        from pyiceberg.catalog.sql import SqlCatalog

        table = self._there()
        if table is None:
            draft = SqlCatalog(CATALOG, uri="sqlite:///:memory:", warehouse=_uri(self._layout, ""))
            try:
                draft.create_table_transaction(IDENTIFIER, schema, _uri(self._layout, ""))
            except Exception as error:  # its own class for types has no common base with the others
                raise not_taken("Iceberg", error) from error
            finally:
                draft.close()
            return
        names = [field.name for field in table.schema().fields]
        there, records = ([(name, "") for name in some] for some in (names, schema.names))
        check_columns("Iceberg table", there, records)
        self._check_place(table)

    def _check_place(self, table: Any) -> None:
        by = ",".join(field.name for field in table.spec().fields)
        if by != ",".join(self._layout.partition_by):
            raise PipelineError(
                f"the Iceberg table is partitioned by {by or 'nothing'}",
                code="lake_schema_differs",
                hint="partition the records alike, or land into another table",
            )
        location = table.location().rstrip("/")
        if location != _uri(self._layout, "") and self._layout.catalog:
            raise PipelineError(
                f"`{self._layout.identifier}` of catalog `{self._layout.catalog}` is at `{location}`",
                code="lake_schema_differs",
                hint=f"write --to {location}, or name another --catalog-table",
            )

    def _there(self) -> Any:
        """The table, if there is one."""
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        if not self._layout.catalog and not (self._layout.root / CATALOG_FILE).is_file():
            return None
        catalog = open_catalog(self._layout)
        try:
            return catalog.load_table(self._layout.identifier)
        except (NoSuchTableError, NoSuchNamespaceError):
            return None
        finally:
            catalog.close()

    def _commit(self, table: Any, manifest: Manifest) -> None:
        paths = [_uri(self._layout, file.path) for file in manifest.files]
        batch = {
            "millstream.query": manifest.query_id,
            "millstream.batch": str(manifest.batch_id),
        }
        try:
            with table.transaction() as transaction:
                transaction.set_properties({PROPERTY + manifest.query_id: str(manifest.batch_id)})
                # A name holds query and batch: no file can be in the table before its batch is.
                transaction.add_files(paths, snapshot_properties=batch, check_duplicate_files=False)
        except ValueError as error:
            raise PipelineError(
                f"the Iceberg table does not take the files of batch {manifest.batch_id}: {error}",
                code="lake_schema_differs",
                hint="land into another directory, or run with the options of the first run",
            ) from error

    def _table(self, catalog: Any, manifest: Manifest) -> Any:
        from pyiceberg.exceptions import (
            NoSuchNamespaceError,
            NoSuchTableError,
            TableAlreadyExistsError,
        )

        try:
            return catalog.load_table(self._layout.identifier)
        except (NoSuchTableError, NoSuchNamespaceError):
            pass
        schema = schema_of(self._layout, manifest)
        assert schema is not None, "the files are in their place"
        namespace, _, _ = self._layout.identifier.rpartition(".")
        catalog.create_namespace_if_not_exists(namespace)
        try:
            return self._create(catalog, schema)
        except TableAlreadyExistsError:
            return catalog.load_table(self._layout.identifier)

    def _create(self, catalog: Any, schema: pa.Schema) -> Any:
        """Schema and partitions in one commit: a table without its partitions never exists."""
        from pyiceberg.transforms import DayTransform, IdentityTransform

        location = _uri(self._layout, "")
        # The files have no statistics of the values: they would repeat the records.
        properties = {"write.metadata.metrics.column.value": "none"}
        begun = catalog.create_table_transaction(
            self._layout.identifier, schema, location, properties=properties
        )
        with begun as transaction:
            with transaction.update_spec() as spec:
                for name in self._layout.partition_by:
                    if name == "date":
                        spec.add_field("timestamp", DayTransform(), "date")
                    else:
                        spec.add_field(name, IdentityTransform(), name)
        return catalog.load_table(self._layout.identifier)


def open_catalog(layout: Layout) -> Any:
    """The catalog of a lake, for the driver and for whoever reads the table."""
    from pyiceberg.catalog.sql import SqlCatalog

    if layout.catalog:
        return own_catalog(layout.catalog, catalog_properties(layout))
    layout.root.mkdir(parents=True, exist_ok=True)
    return SqlCatalog(
        CATALOG,
        uri=f"sqlite:///{layout.root / CATALOG_FILE}",
        warehouse=_uri(layout, ""),
    )


def own_catalog(name: str, properties: Mapping[str, str]) -> Any:
    """A catalog that the user has told pyiceberg about; what is said there counts more than `properties`."""
    from pyiceberg.catalog import load_catalog
    from pyiceberg.utils.config import Config

    said: Any = Config().get_catalog_config(name) or {}
    if not said:
        raise PipelineError(
            f"pyiceberg knows no catalog `{name}`",
            code="catalog_missing",
            hint=f"describe it in .pyiceberg.yaml, or with PYICEBERG_CATALOG__{name.upper()}__URI "
            "and the like",
        )
    try:
        return load_catalog(name, **{**properties, **said})
    except Exception as error:  # each kind of catalog has errors of its own
        raise PipelineError(
            f"catalog `{name}` cannot be used: {(str(error).splitlines() or [''])[0]}",
            code="catalog_missing",
            hint="check what .pyiceberg.yaml or PYICEBERG_CATALOG__... say about it",
        ) from error


def _uri(layout: Layout, path: str) -> str:
    root = layout.url if layout.scheme else f"file://{layout.root}"
    return f"{root}/{path}" if path else root


def data_files(catalog: Any) -> list[Any]:
    """The files that the newest snapshot counts; none if nothing was entered yet."""
    from pyiceberg.exceptions import NoSuchTableError

    try:
        table = catalog.load_table(IDENTIFIER)
    except NoSuchTableError:
        return []
    return [task.file for task in table.scan().plan_files()]


def relative(layout: Layout, address: str) -> str:
    """Where a file of the table is below the root."""
    return address.removeprefix(_uri(layout, "")).removeprefix("/")


def replace_files(layout: Layout, catalog: Any, old: list[Any], new: list[str]) -> None:
    """The new files instead of the old ones, by one commit; fails if one of the old ones is not counted any more.

    Batches that `land` enters meanwhile do no harm: the commit is made again on top of them.
    """
    from pyiceberg.exceptions import CommitFailedException, ValidationException

    wanted = {entry.file_path for entry in old}
    for attempt in range(COMMIT_ATTEMPTS):
        try:
            _replace(layout, catalog.load_table(IDENTIFIER), old, new)
        except (CommitFailedException, ValidationException):
            counted = {entry.file_path for entry in data_files(catalog)}
            if attempt + 1 == COMMIT_ATTEMPTS or not wanted <= counted:
                raise
        else:
            return


def _replace(layout: Layout, table: Any, old: list[Any], new: list[str]) -> None:
    from pyiceberg.io.pyarrow import parquet_file_to_data_file

    files = [parquet_file_to_data_file(table.io, table.metadata, _uri(layout, p)) for p in new]
    with table.transaction() as transaction:
        properties = {"millstream.compacted": str(len(old))}
        with transaction.update_snapshot(properties).overwrite() as snapshot:
            for entry in old:
                snapshot.delete_data_file(entry)
            for file in files:
                snapshot.append_data_file(file)
