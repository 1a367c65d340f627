"""A record that a job cannot take, as one clear error with its stream and offset.

Where it sits: below the jobs whose own expressions look into records; `driver.plain_error` reads the text again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column


def refused(code: str, what: str, *, hint: str) -> Column:
    """A text column that, where it is computed, ends the query: "record 7 of stream `s` `what`"."""
    from pyspark.sql import functions as f

    said = [
        f.lit(f"{code}: record "),
        f.col("offset").cast("string"),
        f.lit(" of stream `"),
        f.col("stream"),
        f.lit(f"` {what}. Hint: {hint}."),
    ]
    return f.raise_error(f.concat(*said)).cast("string")
