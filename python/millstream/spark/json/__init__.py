"""JSON values by a schema, as Spark's `from_json` gives them: `decoder` decides how, whole blocks by Arrow, by `columns`, or record by
record by `convert` with `tokens` and `times`.
"""
