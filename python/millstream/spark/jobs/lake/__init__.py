"""A directory of Parquet files, or a Delta or Iceberg table, filled exactly once: the sink behind jobs that write files.

Reading order: `layout` (names of files), `store` (a directory or a bucket), `sink` (what Spark calls), `files` (a task), `publish` (the
driver, and why it is exact) and `objects` (the same on an object store), `tables` with `delta` and `iceberg`.
"""
