"""Millstream in Spark: `format("millstream")`, and what belongs beside it.

Where it sits: above `client`; imports pyspark and pyarrow only when a name that needs them is used.
"""

from __future__ import annotations
