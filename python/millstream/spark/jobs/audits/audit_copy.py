"""An audit of a copy: the values of streams against those of the stream that `copy` or `replay` has made of them.

Where it sits: between the job `audit` and the sums of `compare`. A copy has numbers of its own, and several streams are merged in it, so
values are compared, each as often as it was sent.

Invariant I-AUC-1: a value may be in the target as often as in the streams up to their tails, and must be as often as up to the
position of the copy: what is between is a batch that was just committed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from millstream.client.sync.reads import PipelineReads
from millstream.errors import StreamNotFound
from millstream.spark.jobs.audits.audit_lake import conclude, named
from millstream.spark.jobs.audits.audit_report import AuditReport, StreamRow
from millstream.spark.jobs.audits.compare import BACKED, Bound, Sum, hashed, parts, runs, sums
from millstream.spark.jobs.job import source_options
from millstream.spark.jobs.replay import SOURCE_OPTIONS
from millstream.spark.options import Options
from millstream.spark.read.selection import selection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from millstream.client.pipeline_read import StreamTail
    from millstream.client.sync.client import Client
    from millstream.spark.jobs.audit import Audit
    from millstream.spark.jobs.job import Request
    from millstream.spark.jobs.run.position import Position


def audit_copy(
    job: Audit, session: SparkSession, request: Request, client: Client, seconds: float
) -> AuditReport:
    made = job.made_by(request)
    assert made is not None, "a copy has a checkpoint"
    target = str(request.target.stream)
    reads = PipelineReads(client, seconds)
    [copy] = _there(reads.tails(streams=[target]).streams, target)
    chosen = selection(Options(source_options(job, request)))
    tails = {one.name: one for one in chosen.ask(reads).streams}
    kept = {name: tail for name, tail in tails.items() if _is_same(tail, made)}
    report = AuditReport(str(request.target))
    report.streams = _rows(made, tails, chosen.chooser())
    size = job.range_of(request)

    of_copy = hashed(_read(session, request, {target: copy.tail_number}, {}), ["value"])
    in_copy, _ = sums(of_copy, size)
    bounds = {
        name: Bound(name, 0, min(made.streams[name]["n"], tail.tail_number), tail.tail_number)
        for name, tail in kept.items()
    }
    starts = _starts(made)
    ends = {name: bound.tail for name, bound in bounds.items()}
    of_streams = None
    done: list[Sum] = []
    if ends:
        of_streams = parts(
            hashed(_read(session, request, ends, starts), ["value"]), bounds.values()
        )
        done = [one for one in sums(of_streams, size)[0] if one.part == BACKED]
    for row in report.streams:
        row.compared = sum(one.rows for one in done if one.stream == row.stream)
    report.streams.append(StreamRow(f"stream:{target}", in_target=sum(one.rows for one in in_copy)))
    if _total(done) == _total(in_copy):
        return report
    missing, surplus = _differing(of_streams, of_copy)
    findings, counts = missing
    if surplus is not None:
        backed = {name for name, entry in made.streams.items() if name in kept}
        trimmed = any(tail.first_number > 0 for tail in kept.values()) or bool(starts)
        found, how_many = surplus
        if backed != set(made.streams) or trimmed:
            # Whatever the streams have no longer may be in the copy.
            report.streams[-1].unbacked = sum(
                count for (kind, _), count in how_many.items() if kind == "extra"
            )
            found = [one for one in found if one.kind != "extra"]
            how_many = {key: count for key, count in how_many.items() if key[0] != "extra"}
        findings, counts = findings + found, {**counts, **how_many}
    conclude(report, findings, counts, {**tails, f"stream:{target}": copy})
    return report


def _there(streams: Sequence[StreamTail], name: str) -> Sequence[StreamTail]:
    if not streams:
        raise StreamNotFound(f"stream `{name}` does not exist", hint="was the copy ever made?")
    return streams


def _is_same(tail: StreamTail, made: Position) -> bool:
    entry = made.streams.get(tail.name)
    return entry is not None and entry["id"] == tail.incarnation


def _rows(made: Position, tails: Mapping[str, StreamTail], takes: Any) -> list[StreamRow]:
    """How each stream stands, before anything is read."""
    found = []
    for name in sorted({*tails, *(name for name in made.streams if takes(name))}):
        row = StreamRow(name)
        tail, entry = tails.get(name), made.streams.get(name)
        if tail is None:
            row.state = "deleted"
        elif entry is None:
            row.behind = tail.tail_number - tail.first_number
            row.state = "not landed" if row.behind else row.state
        elif not _is_same(tail, made):
            row.state, row.behind = "recreated", tail.tail_number - tail.first_number
        else:
            row.behind = max(0, tail.tail_number - entry["n"])
        found.append(row)
    return found


def _starts(made: Position) -> dict[str, str]:
    """Where a replay began, as its checkpoint has it; its end is where it has come to."""
    begun = {name: option for name, option in SOURCE_OPTIONS.items() if name.startswith("start")}
    return {option: made.fixed[name] for name, option in begun.items() if made.fixed.get(name)}


def _read(
    session: SparkSession,
    request: Request,
    ends: Mapping[str, int],
    starts: Mapping[str, str],
) -> DataFrame:
    options = {**request.source_options, **request.connection(), "startingOffsets": "earliest"}
    options |= {
        **starts,
        **named(list(ends)),
        "columns": "stream,offset,value",
        "failOnDataLoss": "false",
        "endingOffsets": json.dumps(dict(ends)),
    }
    return session.read.format("millstream").options(**options).load()


def _total(found: Sequence[Sum]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*(one.checksum for one in found), strict=True))


def _differing(streams: DataFrame | None, copy: DataFrame) -> tuple[Any, Any]:
    """Records of the streams that the copy lacks, and records of the copy that are too many; each in runs."""
    from pyspark.sql import functions as f

    session = copy.sparkSession
    if streams is None:
        streams = session.createDataFrame(
            [], "stream string, offset bigint, hash bigint, part string"
        )
    sent = streams.groupBy("hash").agg(
        f.count_if(f.col("part") == BACKED).alias("done"), f.count("*").alias("sent")
    )
    there = copy.groupBy("hash").agg(f.count("*").alias("there"))
    both = sent.join(there, "hash", "full").fillna(0, ["done", "sent", "there"])
    lacking = both.where("there < done").select("hash")
    too_many = both.where("there > sent").select("hash", "sent")
    backed = streams.where(f.col("part") == BACKED).select("stream", "offset", "hash")
    missing = runs(backed.join(lacking, "hash").withColumn("kind", f.lit("missing")))
    kind = f.when(f.col("sent") > 0, "doubled").otherwise("extra")
    name = f.concat(f.lit("stream:"), f.col("stream"))
    surplus = copy.select("stream", "offset", "hash").join(too_many, "hash")
    return missing, runs(surplus.withColumn("kind", kind).withColumn("stream", name))
