"""An audit of a lake: which records are compared, what is only behind, and what no stream has any more.

Where it sits: between the job `audit` and the sums of `compare`.

How a row of the lake is taken, by its number n:

    n < first of the stream, or the stream is gone or another one now    unbacked: counted, and its numbers are looked at
    first <= n < where the lake has come to                              compared
    up to the tail                                                       ahead: a batch was being published
    beyond the tail                                                      extra: no stream ever had it, or a crash took it
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from millstream.client.control import control_call
from millstream.client.sync.reads import PipelineReads
from millstream.errors import InvalidArgument, StreamNotFound
from millstream.spark.jobs.audits.audit_report import (
    DIFFERENCES,
    FINDINGS_MAX,
    AuditReport,
    Finding,
    StreamRow,
)
from millstream.spark.jobs.audits.compare import (
    AHEAD,
    BACKED,
    BEYOND,
    UNBACKED,
    Bound,
    Sum,
    Suspect,
    hashed,
    parts,
    records,
    repetitions,
    sums,
)
from millstream.spark.jobs.job import glob_pattern, source_options
from millstream.spark.jobs.lake.contents import contents_of, lake_at, rows
from millstream.spark.options import Options
from millstream.spark.read.columns import TYPES
from millstream.spark.read.offsets import epoch_of
from millstream.spark.read.selection import selection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from millstream.client.pipeline_read import StreamTail
    from millstream.client.sync.client import Client
    from millstream.spark.jobs.audit import Audit
    from millstream.spark.jobs.job import Request
    from millstream.spark.jobs.run.position import Position

WEAK: Final = ("ephemeral", "memory", "disk")
"""Classes that may lose the newest records in a crash."""
OF_VALUES: Final = ("valueFormat", "valueSchema", "columnNameOfCorruptRecord")
"""Options of the run that made the lake, without which the values would look different."""
ALL_NUMBERS: Final = 2**62
NO_BEGIN: Final = -(2**62)


def audit_lake(
    job: Audit, session: SparkSession, request: Request, client: Client, seconds: float
) -> AuditReport:
    reads = PipelineReads(client, seconds)
    made = job.made_by(request)
    contents = contents_of(lake_at(str(request.target.path)))
    columns = _compared(contents.columns.names)
    chosen = selection(Options(source_options(job, request)))
    tails = {one.name: one for one in chosen.ask(reads).streams}
    size = job.range_of(request)
    audit = _LakeAudit(job, session, request, made, columns, size)

    lake = hashed(rows(session, contents, ("stream", *columns)), columns)
    if chosen.pattern is None:
        from pyspark.sql import functions as f

        lake = lake.where(f.col("stream").isin(*chosen.names) | f.col("broken").isNotNull())
    cut = {} if made is None else cut_back(reads, made, tails)
    bounds = {name: audit.bound(tail, cut.get(name)) for name, tail in tails.items()}
    same = [bound for name, bound in bounds.items() if not audit.replaced(name, tails)]
    found, broken = sums(parts(lake, same), size)
    takes = chosen.chooser()
    of_lake = [one for one in found if one.stream in tails or takes(one.stream)]
    audit.told = {one.stream for one in of_lake} | tails.keys()
    _none_unknown(chosen.names, audit.told, made)
    bounds = {name: audit.narrowed(bound, of_lake) for name, bound in bounds.items()}
    of_streams = audit.read_sums(bounds)

    report = AuditReport(str(request.target), files=sorted({*contents.missing, *broken}))
    report.streams = [
        audit.row(name, tails, bounds, of_lake, of_streams) for name in sorted(audit.told)
    ]
    fresh = {one.name: one for one in chosen.ask(reads).streams}
    findings, counts = audit.differing(lake, bounds, of_lake, of_streams, fresh)
    beyond, how_many = audit.beyond(lake, of_lake, fresh, client)
    for key, count in how_many.items():
        counts[key] = counts.get(key, 0) + count
    others = audit.unbacked(lake, bounds, of_lake, tails)
    for one in others:
        counts[one.kind, one.stream] = counts.get((one.kind, one.stream), 0) + one.records
    conclude(report, findings + beyond + others, counts, tails)
    return report


def _compared(names: Sequence[str]) -> list[str]:
    """The columns of a lake that streams have, too: all of them, but for the partitions."""
    for name in ("stream", "offset"):
        if name not in names:
            raise InvalidArgument(
                f"the lake has no column `{name}`, so nobody knows which record a row is",
                hint="land with the column `stream` and `offset`",
            )
    strange = [name for name in names if name not in TYPES]
    if strange:
        raise InvalidArgument(
            f"the lake has a column `{strange[0]}`, which no stream has",
            hint="an audit is for lakes of job `land`",
        )
    return [name for name in names if name != "stream"]


def _none_unknown(names: Sequence[str], told: set[str], made: Position | None) -> None:
    for name in names:
        if name not in told and (made is None or name not in made.streams):
            raise StreamNotFound(
                f"stream `{name}` does not exist, and the lake has no record of it",
                hint="check the name with `millstream stream list`",
            )


def cut_back(
    reads: PipelineReads, made: Position, tails: Mapping[str, StreamTail]
) -> dict[str, int]:
    """Streams that a crash has cut back since: where reading goes on, whose numbers are given anew from there."""
    doubtful = {
        name: [{"offset": entry["at"]}]
        for name, entry in made.streams.items()
        if name in tails
        and tails[name].incarnation == entry["id"]
        and epoch_of(tails[name].tail_offset) != epoch_of(entry["at"])
    }
    found = reads.look_up(doubtful) if doubtful else {}
    return {name: one.at[0].number for name, one in found.items() if one.at[0].error is None}


class _LakeAudit:
    """What the steps of one audit share."""

    def __init__(
        self,
        job: Audit,
        session: SparkSession,
        request: Request,
        made: Position | None,
        columns: list[str],
        size: int,
    ) -> None:
        self._job = job
        self._session = session
        self._request = request
        self._made = made
        self._columns = columns
        self._size = size
        self.told: set[str] = set()

    # ------------------------------------------------------------------ which records

    def bound(self, tail: StreamTail, cut: int | None) -> Bound:
        """Where the comparison of a stream ends; at its tail as long as nobody knows."""
        entry = None if self._made is None else self._made.streams.get(tail.name)
        upto = tail.tail_number
        if entry is not None:
            done = entry["n"] if cut is None else cut
            upto = min(done, upto) if entry["id"] == tail.incarnation else tail.first_number
        return Bound(tail.name, tail.first_number, max(upto, tail.first_number), tail.tail_number)

    def narrowed(self, bound: Bound, of_lake: Sequence[Sum]) -> Bound:
        """Without a checkpoint that knows the stream the lake has come to its own last record."""
        if self._made is not None and bound.stream in self._made.streams:
            return bound
        last = [one.last for one in of_lake if one.stream == bound.stream and one.part == BACKED]
        return replace(bound, upto=max(last, default=bound.first - 1) + 1)

    def replaced(self, name: str, tails: Mapping[str, StreamTail]) -> bool:
        entry = None if self._made is None else self._made.streams.get(name)
        return entry is not None and name in tails and entry["id"] != tails[name].incarnation

    # ------------------------------------------------------------------ the streams

    def read_sums(self, bounds: Mapping[str, Bound]) -> list[Sum]:
        ends = {name: bound.upto for name, bound in bounds.items() if bound.upto > bound.first}
        if not ends:
            return []
        options = named(list(ends))
        if any("*" in name for name in self._request.streams):  # more than can be named
            ends = {name: bound.upto for name, bound in bounds.items()}
            options = {}
        found, _ = sums(self._stream(ends, {}, options), self._size)
        return [one for one in found if one.stream in ends]

    def _stream(
        self, ends: Mapping[str, int], starts: Mapping[str, int], chosen: Mapping[str, str]
    ) -> DataFrame:
        """Records of streams, hashed like those of the lake; without `chosen` of all that the audit is for."""
        made = {} if self._made is None else self._made.fixed
        of_values = made if made.get("valueFormat") == "json" else {}
        options = {
            **{name: of_values[name] for name in OF_VALUES if of_values.get(name)},
            **source_options(self._job, self._request),
            "columns": ",".join(["stream", *self._columns]),
            "failOnDataLoss": "false",
            "startingOffsets": json.dumps(dict(starts)) if starts else "earliest",
            "endingOffsets": json.dumps(dict(ends)),
        }
        if chosen:
            options.pop("subscribe", None)
            options.pop("subscribePattern", None)
        options |= chosen
        read = self._session.read.format("millstream").options(**options).load()
        return hashed(read, self._columns)

    # ------------------------------------------------------------------ what differs

    def differing(
        self,
        lake: DataFrame,
        bounds: Mapping[str, Bound],
        of_lake: Sequence[Sum],
        of_streams: Sequence[Sum],
        fresh: Mapping[str, StreamTail],
    ) -> tuple[list[Finding], dict[tuple[str, str], int]]:
        """Ranges whose sums differ, looked at record by record; what retention took meanwhile is left out."""
        wanted = {(one.stream, one.bucket): one.checksum for one in of_streams}
        found = {(one.stream, one.bucket): one.checksum for one in of_lake if one.part == BACKED}
        begins = _begins(of_streams)
        suspects = []
        for key in sorted(wanted.keys() | found.keys()):
            name, bucket = key
            bound, tail = bounds[name], fresh.get(name)
            if wanted.get(key) == found.get(key) or tail is None:
                continue
            first = max(bound.first, tail.first_number)
            begin = begins.get(name, NO_BEGIN)
            suspects.append(Suspect(name, bucket, first, bound.upto, begin))
        if not suspects:
            return [], {}
        names = {one.stream for one in suspects}
        starts = {
            name: max(
                min(one.bucket * self._size for one in suspects if one.stream == name),
                fresh[name].first_number,
            )
            for name in names
        }
        ends = {
            name: min(
                max((one.bucket + 1) * self._size for one in suspects if one.stream == name),
                bounds[name].upto,
            )
            for name in names
        }
        starts = {name: min(start, ends[name]) for name, start in starts.items()}
        stream = self._stream(ends, starts, named(list(ends)))
        return records(stream, lake, suspects, self._size)

    def beyond(
        self,
        lake: DataFrame,
        of_lake: Sequence[Sum],
        fresh: Mapping[str, StreamTail],
        client: Client,
    ) -> tuple[list[Finding], dict[tuple[str, str], int]]:
        """Rows behind the tail, but for those of an earlier stream of the name."""
        behind = [one for one in of_lake if one.part == BEYOND and one.stream in fresh]
        if not behind:
            return [], {}
        begins = {name: _created(client, name) for name in {one.stream for one in behind}}
        suspects = [
            Suspect(
                one.stream,
                one.bucket,
                fresh[one.stream].tail_number,
                ALL_NUMBERS,
                begins[one.stream],
            )
            for one in behind
        ]
        return records(lake.limit(0), lake, suspects, self._size)

    def unbacked(
        self,
        lake: DataFrame,
        bounds: Mapping[str, Bound],
        of_lake: Sequence[Sum],
        tails: Mapping[str, StreamTail],
    ) -> list[Finding]:
        """Numbers that are missing or doubled among rows that no stream has any more."""
        by_stream: dict[str, list[Sum]] = defaultdict(list)
        for one in of_lake:
            if one.part == UNBACKED:
                by_stream[one.stream].append(one)
        findings: list[Finding] = []
        suspects: list[Suspect] = []
        for name, ranges in by_stream.items():
            expected = ranges[0].first
            for one in ranges:
                findings += _absent(name, expected, one.first)
                expected = one.last + 1
                if not one.is_contiguous(self._size):
                    limit = bounds[name].first if name in bounds else ALL_NUMBERS
                    suspects.append(Suspect(name, one.bucket, 0, limit, NO_BEGIN))
            findings += _absent(name, expected, self._end(name, tails))
        if suspects:
            for row in repetitions(lake, suspects, self._size):
                missing = row["last"] - row["first"] + 1 - row["numbers"]
                doubled = row["rows"] - row["distinct"]
                for kind, count in (("missing", missing), ("doubled", doubled)):
                    if count:
                        findings.append(
                            Finding(kind, row["stream"], row["first"], row["last"], count)
                        )
        return findings

    def _end(self, name: str, tails: Mapping[str, StreamTail]) -> int:
        """Where the rows without a stream must end, if that is known."""
        if name in tails and not self.replaced(name, tails):
            return tails[name].first_number
        entry = None if self._made is None else self._made.streams.get(name)
        return 0 if entry is None else entry["n"]

    # ------------------------------------------------------------------ the report

    def row(
        self,
        name: str,
        tails: Mapping[str, StreamTail],
        bounds: Mapping[str, Bound],
        of_lake: Sequence[Sum],
        of_streams: Sequence[Sum],
    ) -> StreamRow:
        counts = {
            part: sum(one.rows for one in of_lake if (one.stream, one.part) == (name, part))
            for part in (BACKED, AHEAD, BEYOND, UNBACKED)
        }
        row = StreamRow(
            name,
            compared=sum(one.rows for one in of_streams if one.stream == name),
            in_target=counts[BACKED],
            ahead=counts[AHEAD],
            unbacked=counts[UNBACKED],
        )
        bound = bounds.get(name)
        if bound is None:
            row.state = "deleted"
            return row
        row.behind = bound.tail - bound.upto
        if self.replaced(name, tails):
            row.state = "recreated"
        elif row.behind and not sum(counts.values()) and bound.upto == bound.first:
            row.state = "not landed"
        return row


def _begins(of_streams: Sequence[Sum]) -> dict[str, int]:
    """When the oldest record was accepted that each stream has: whatever is older is of an earlier stream."""
    found: dict[str, int] = {}
    for one in of_streams:
        if one.begin is not None:
            found[one.stream] = min(one.begin, found.get(one.stream, one.begin))
    return found


def _created(client: Client, name: str) -> int:
    """When a stream was created, in microseconds. What a crash took of it is older than the oldest record it has now."""
    try:
        found = control_call(client, "GET", f"/-/api/streams/{quote(name)}")
    except StreamNotFound:
        return NO_BEGIN
    return int(found["created_at"]) * 1000


def named(names: Sequence[str]) -> dict[str, str]:
    """The option of the source that chooses exactly these streams."""
    if any("," in name for name in names):
        return {"subscribePattern": "|".join(f"(?:{glob_pattern(name)})" for name in names)}
    return {"subscribe": ",".join(names)}


def _absent(name: str, first: int, behind: int) -> list[Finding]:
    if behind <= first:
        return []
    return [Finding("missing", name, first, behind - 1, behind - first)]


def conclude(
    report: AuditReport,
    findings: Sequence[Finding],
    counts: Mapping[tuple[str, str], int],
    tails: Mapping[str, StreamTail],
) -> None:
    """Findings and counts into the report; what a weak stream may lose is no difference."""
    lossy = {name for name, one in tails.items() if one.durability in WEAK and one.epochs > 1}

    def kind_of(kind: str, stream: str) -> str:
        return "lost" if kind == "extra" and stream in lossy else kind

    shown = [replace(one, kind=kind_of(one.kind, one.stream)) for one in findings]
    shown.sort(key=lambda one: (one.kind not in DIFFERENCES, one.stream, one.first))
    report.findings = shown[:FINDINGS_MAX]
    for (kind, stream), count in counts.items():
        told = kind_of(kind, stream)
        report.counts[told] = report.counts.get(told, 0) + count
        if told in DIFFERENCES:
            for row in report.streams:
                if row.stream == stream and row.state == "whole":
                    row.state = "differs"
