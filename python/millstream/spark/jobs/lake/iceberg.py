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
from millstream.spark.jobs.lake.layout import Layout
from millstream.spark.jobs.lake.publish import check_columns, not_taken, schema_of

if TYPE_CHECKING:
    from millstream.spark.jobs.lake.publish import Manifest

CATALOG: Final = "millstream"
CATALOG_FILE: Final = "catalog.db"
IDENTIFIER: Final = ("millstream", "records")
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

    def check(self, schema: pa.Schema) -> None:
        from pyiceberg.catalog.sql import SqlCatalog
        from pyiceberg.exceptions import NoSuchTableError

        if not (self._layout.root / CATALOG_FILE).is_file():
            draft = SqlCatalog(CATALOG, uri="sqlite:///:memory:", warehouse=_uri(self._layout, ""))
            try:
                draft.create_table_transaction(IDENTIFIER, schema, _uri(self._layout, ""))
            except Exception as error:  # its own class for types has no common base with the others
                raise not_taken("Iceberg", error) from error
            finally:
                draft.close()
            return
        catalog = open_catalog(self._layout)
        try:
            names = [field.name for field in catalog.load_table(IDENTIFIER).schema().fields]
        except NoSuchTableError:
            return
        finally:
            catalog.close()
        there, records = ([(name, "") for name in some] for some in (names, schema.names))
        check_columns("Iceberg table", there, records)

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
        from pyiceberg.exceptions import NoSuchTableError, TableAlreadyExistsError

        try:
            return catalog.load_table(IDENTIFIER)
        except NoSuchTableError:
            pass
        schema = schema_of(self._layout, manifest)
        assert schema is not None, "the files are in their place"
        catalog.create_namespace_if_not_exists(IDENTIFIER[0])
        try:
            return self._create(catalog, schema)
        except TableAlreadyExistsError:
            return catalog.load_table(IDENTIFIER)

    def _create(self, catalog: Any, schema: pa.Schema) -> Any:
        """Schema and partitions in one commit: a table without its partitions never exists."""
        from pyiceberg.transforms import DayTransform, IdentityTransform

        location = _uri(self._layout, "")
        # The files have no statistics of the values: they would repeat the records.
        properties = {"write.metadata.metrics.column.value": "none"}
        begun = catalog.create_table_transaction(
            IDENTIFIER, schema, location, properties=properties
        )
        with begun as transaction:
            with transaction.update_spec() as spec:
                for name in self._layout.partition_by:
                    if name == "date":
                        spec.add_field("timestamp", DayTransform(), "date")
                    else:
                        spec.add_field(name, IdentityTransform(), name)
        return catalog.load_table(IDENTIFIER)


def open_catalog(layout: Layout) -> Any:
    """The catalog of a lake, for the driver and for whoever reads the table."""
    from pyiceberg.catalog.sql import SqlCatalog

    layout.root.mkdir(parents=True, exist_ok=True)
    return SqlCatalog(
        CATALOG,
        uri=f"sqlite:///{layout.root / CATALOG_FILE}",
        warehouse=_uri(layout, ""),
    )


def _uri(layout: Layout, path: str) -> str:
    return f"file://{layout.root / path}" if path else f"file://{layout.root}"
