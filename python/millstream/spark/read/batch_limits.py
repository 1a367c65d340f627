"""How much a micro-batch may read: `maxOffsetsPerTrigger` and `maxBytesPerTrigger`, both at once.

Where it sits: between "how far could it go" and "how far does it go" in `stream_reader.py`. Sharing is in
`tasks.py`; this module asks the server for the places where the shares end.

Invariants:
- I-ADM-1  With a limit on records, a batch has at most that many.
- I-ADM-2  A limit on bytes is kept to within one append per stream, since places are between appends.
- I-ADM-3  If anything waits, something is admitted: a query never stands still before a small limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millstream.spark.read import offsets, tasks
from millstream.spark.read.offsets import Entry, byte_position

if TYPE_CHECKING:
    from collections.abc import Mapping

    from millstream.client.pipeline_read import FoundPlace, StreamTail
    from millstream.client.sync.reads import PipelineReads


@dataclass(frozen=True, slots=True)
class Limits:
    max_records: int | None = None
    max_bytes: int | None = None
    min_records: int | None = None
    max_delay_ms: int = 0


def admit(
    reads: PipelineReads,
    begins: Mapping[str, Entry],
    ends: Mapping[str, Entry],
    tails: Mapping[str, StreamTail],
    limits: Limits,
) -> dict[str, Entry]:
    """The ends that the limits allow; streams that get nothing this time are left out."""
    records = _shares({n: ends[n]["n"] - begins[n]["n"] for n in ends}, limits.max_records)
    weights = {n: byte_position(ends[n]["at"]) - byte_position(begins[n]["at"]) for n in ends}
    sizes = _shares(weights, limits.max_bytes)
    admitted: dict[str, Entry] = {}
    wanted: dict[str, list[dict[str, Any]]] = {}
    for name, end in ends.items():
        begin = begins[name]
        asked: list[dict[str, Any]] = []
        if records is not None and records[name] < end["n"] - begin["n"]:
            asked.append({"number": begin["n"] + records[name]})
        if sizes is not None and sizes[name] < weights[name]:
            asked.append({"byte": byte_position(begin["at"]) + sizes[name]})
        if (records is not None and records[name] == 0) or (
            sizes is not None and sizes[name] == 0 and weights[name] > 0
        ):
            continue
        if asked:
            wanted[name] = asked
        else:
            admitted[name] = end
    for name, stream in reads.look_up(wanted).items():
        if stream.incarnation == tails[name].incarnation:
            place = _nearest(stream.at, begins[name])
            if place is not None and place.number < ends[name]["n"]:
                admitted[name] = offsets.entry(place.offset, stream.incarnation, place.number)
            elif place is not None:
                admitted[name] = ends[name]
    return admitted


def _shares(backlog: Mapping[str, int], limit: int | None) -> dict[str, int] | None:
    if limit is None or sum(backlog.values()) <= limit:
        return None
    return tasks.share(backlog, limit)


def _nearest(found: tuple[FoundPlace, ...], begin: Entry) -> FoundPlace | None:
    """The nearest of the places that is ahead; None if a look-up failed."""
    ahead = [place for place in found if place.error is None and place.number > begin["n"]]
    return min(ahead, key=lambda place: place.number) if ahead else None
