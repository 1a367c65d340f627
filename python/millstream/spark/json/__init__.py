"""JSON values by a schema, as Spark's `from_json` gives them: `decoder` decides how, whole blocks by Arrow (`blocks`, without
records of another `shape`), or record by record by `convert` with `times`.
"""
