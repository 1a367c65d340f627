"""Records that jobs leave out because they were asked to, by query: told at the end of a run.

Where it sits: counted by jobs whose batches are functions of this process (`enrich`), read by `driver.watch`.
"""

from __future__ import annotations

from typing import Final

_COUNTS: Final[dict[str, int]] = {}


def add(query_id: str, records: int) -> None:
    _COUNTS[query_id] = _COUNTS.get(query_id, 0) + records


def taken(query_id: str) -> int:
    """How many the query has left out since this was asked last."""
    return _COUNTS.pop(query_id, 0)
