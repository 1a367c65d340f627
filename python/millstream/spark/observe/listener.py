"""A listener that tells how streaming queries do: to Prometheus, and to a stream.

    from millstream.spark import LagListener

    listener = LagListener(port=9464, url="http://127.0.0.1:4437", stream="metrics/spark")
    spark.streams.addListener(listener)
    ...
    listener.close()

Where it sits: in the process of the driver (Connect: of the client). Spark calls it after each batch of every query of the
session; queries that read no Millstream stream have batch times and rows, and no lag.

Invariants:
- I-LIS-1  It never holds up a query: what needs the network is done by a thread of its own, from a queue with an end. What
           does not fit is dropped, counted and reported.
- I-LIS-2  It never fails a query: what goes wrong is counted, logged once in a row, and shown as a metric.
- I-LIS-3  It remembers at most `QUERIES_MAX` queries; the one that ended or reported longest ago goes first.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.streaming.listener import StreamingQueryListener

from millstream.errors import InvalidArgument, MillstreamError
from millstream.spark.observe.lag import Lag, as_document, lag

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

    from millstream.client.sync.client import Client, Stream

QUERIES_MAX: Final = 100
PENDING_MAX: Final = 1000
APPEND_AT_ONCE: Final = 100
CLOSE_DEADLINE_S: Final = 10.0
REQUEST_DEADLINE_S: Final = 5.0
log = logging.getLogger("millstream.spark")

METRICS: Final = {
    "millstream_spark_query_active": ("gauge", "1 while the query runs, 0 when it has ended"),
    "millstream_spark_lag_records": ("gauge", "Records behind the end of the last batch"),
    "millstream_spark_lag_bytes": ("gauge", "Bytes behind the end of the last batch"),
    "millstream_spark_lag_seconds": (
        "gauge",
        "Age of the oldest unread record, or time to catch up where no server was named",
    ),
    "millstream_spark_batch_seconds": ("gauge", "Seconds of the last batch, by phase"),
    "millstream_spark_batch_rows": ("gauge", "Rows of the last batch"),
    "millstream_spark_batches_total": ("counter", "Batches that reported since the listener began"),
    "millstream_spark_rows_total": ("counter", "Rows of those batches"),
    "millstream_spark_reported_time_seconds": ("gauge", "When the query last reported"),
    "millstream_spark_export_dropped_total": (
        "counter",
        "Reports that did not reach the stream because the queue was full",
    ),
    "millstream_spark_export_errors_total": ("counter", "Exports that failed"),
}


@dataclass(slots=True)
class _Query:
    """What is known about one query."""

    name: str
    active: bool = True
    batches: int = 0
    rows_total: int = 0
    rows: int = 0
    lag: Lag | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    reported_at: float = 0.0


class LagListener(StreamingQueryListener):
    """Exports lag and batch times of every query of a session.

    `port`: serve them for Prometheus at `http://HOST:PORT/metrics` (0 picks a port, see `.port`).
    `textfile`: keep them in this file, for the node exporter. `stream`: append a JSON record per batch to this stream of
    the server `url`; it is created if it is missing. With `url` the seconds of lag are the exact age of records.
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        host: str = "127.0.0.1",
        textfile: str | os.PathLike[str] | None = None,
        url: str | None = None,
        stream: str | None = None,
    ) -> None:
        if port is None and textfile is None and stream is None:
            raise InvalidArgument(
                "the listener has nowhere to report to", hint="give `port`, `textfile` or `stream`"
            )
        if stream is not None and url is None:
            raise InvalidArgument("`stream` needs the `url` of its server")
        self._lock = threading.Lock()
        self._queries: dict[str, _Query] = {}
        self._dropped = 0
        self._errors = 0
        self._in_trouble = False
        self._textfile = None if textfile is None else Path(textfile)
        self._stream_name = stream
        self._client = None if url is None else _connect(url)
        self._pending: queue.Queue[Mapping[str, Any] | None] = queue.Queue(PENDING_MAX)
        self._server = None if port is None else _serve(self, host, port)
        self._worker = threading.Thread(target=self._work, name="millstream-lag", daemon=True)
        self._worker.start()

    @property
    def port(self) -> int:
        """Where the metrics are served."""
        assert self._server is not None, "no port was asked for"
        return int(self._server.server_address[1])

    # ------------------------------------------------------------------ what Spark calls

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        self._know(str(event.id), event.name)

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        self._enqueue(as_document(event.progress))

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - Spark's name
        """Nothing new: the last numbers still hold."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        self._enqueue({"id": str(event.id), "terminated": True})

    def _enqueue(self, report: Mapping[str, Any]) -> None:
        while True:
            try:
                self._pending.put_nowait(report)
                return
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._pending.get_nowait()  # the oldest is worth least
                    with self._lock:
                        self._dropped += 1

    # ------------------------------------------------------------------ the thread

    def _work(self) -> None:
        target: Stream | None = None
        while True:
            reports = self._next()
            if reports is None:
                return
            records: list[dict[str, Any]] = []
            for report in reports:
                with self._guard():
                    if (record := self._take(report)) is not None:
                        records.append(record)
            with self._guard():
                if self._textfile is not None:
                    _replace(self._textfile, self.text())
            # The end of a query makes no record, and an append of nothing is refused.
            if self._client is not None and self._stream_name is not None and records:
                with self._guard():
                    if target is None:
                        target = self._client.create(
                            self._stream_name, content_type="application/json"
                        )
                    target.append_many(records)

    def _next(self) -> list[Mapping[str, Any]] | None:
        """What is pending, at most `APPEND_AT_ONCE`; `None` at the end."""
        first = self._pending.get()
        if first is None:
            return None
        reports = [first]
        while len(reports) < APPEND_AT_ONCE:
            try:
                report = self._pending.get_nowait()
            except queue.Empty:
                break
            if report is None:
                self._pending.put(None)  # seen again when these are done
                break
            reports.append(report)
        return reports

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except (MillstreamError, OSError, KeyError, TypeError, ValueError) as error:
            with self._lock:
                self._errors += 1
            if not self._in_trouble:
                log.warning("the metrics of a query were not exported: %s", error)
            self._in_trouble = True
        else:
            self._in_trouble = False

    def _take(self, report: Mapping[str, Any]) -> dict[str, Any] | None:
        """Remember a report, and make the record of it."""
        if report.get("terminated"):
            with self._lock:
                if report["id"] in self._queries:
                    self._queries[report["id"]].active = False
            return None
        known = self._know(str(report["id"]), report.get("name"))
        found = self._lag(report)
        rows = _rows(report)
        seconds = {
            str(phase): milliseconds / 1000
            for phase, milliseconds in (report.get("durationMs") or {}).items()
        }
        with self._lock:
            known.active = True
            known.batches += 1
            known.rows, known.rows_total = rows, known.rows_total + rows
            known.lag, known.seconds, known.reported_at = found, seconds, time.time()
        return _record(report, rows, seconds, found)

    def _lag(self, report: Mapping[str, Any]) -> Lag | None:
        try:
            return lag(report, client=self._client)
        except InvalidArgument:
            return None  # a query over other sources
        except MillstreamError:
            with self._lock:
                self._errors += 1
            return lag(report)  # the server cannot be asked now: an estimate is better than nothing

    def _know(self, identity: str, name: str | None) -> _Query:
        with self._lock:
            known = self._queries.get(identity)
            if known is None:
                if len(self._queries) >= QUERIES_MAX:
                    ordered = sorted(
                        self._queries,
                        key=lambda key: (self._queries[key].active, self._queries[key].reported_at),
                    )
                    del self._queries[ordered[0]]
                known = self._queries[identity] = _Query(name or "")
            return known

    # ------------------------------------------------------------------ what Prometheus sees

    def text(self) -> str:
        """All metrics in the text format of Prometheus."""
        samples: dict[str, list[str]] = {name: [] for name in METRICS}
        with self._lock:
            for identity, known in self._queries.items():
                for name, value, phase in _samples(known):
                    label = f'query="{identity}",name="{_escaped(known.name)}"' + phase
                    samples[name].append(f"{name}{{{label}}} {value}")
            samples["millstream_spark_export_dropped_total"] = [
                f"millstream_spark_export_dropped_total {self._dropped}"
            ]
            samples["millstream_spark_export_errors_total"] = [
                f"millstream_spark_export_errors_total {self._errors}"
            ]
        lines = []
        for name, (kind, text) in METRICS.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *samples[name]]
        return "\n".join(lines) + "\n"

    def close(self) -> None:
        """Send what is pending and end; takes at most `CLOSE_DEADLINE_S`."""
        until = time.monotonic() + CLOSE_DEADLINE_S
        if self._worker.is_alive():
            with contextlib.suppress(queue.Full):
                self._pending.put(None, timeout=CLOSE_DEADLINE_S)
            self._worker.join(max(0.0, until - time.monotonic()))
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._client is not None:
            self._client.close()


def _connect(url: str) -> Client:
    from millstream.client.retry import Retry
    from millstream.client.sync.client import Client

    return Client(url, timeout_seconds=REQUEST_DEADLINE_S, retry=Retry(attempts=3))


def _rows(report: Mapping[str, Any]) -> int:
    rows = report.get("numInputRows")
    if not isinstance(rows, int):  # Connect does not say
        rows = (report.get("sink") or {}).get("numOutputRows")
    return max(0, rows) if isinstance(rows, int) else 0


def _record(
    report: Mapping[str, Any], rows: int, seconds: Mapping[str, float], found: Lag | None
) -> dict[str, Any]:
    """One batch as a JSON record of the stream."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "query": str(report["id"]),
        "run": str(report.get("runId")),
        "name": report.get("name"),
        "batch": report.get("batchId"),
        "rows": rows,
        "seconds": dict(seconds),
        "lag": None
        if found is None
        else {
            "records": found.records,
            "bytes": found.bytes,
            "seconds": found.seconds,
            "exact": found.exact,
        },
    }


def _samples(known: _Query) -> Iterator[tuple[str, float, str]]:
    yield "millstream_spark_query_active", int(known.active), ""
    if not known.batches:
        return
    if known.lag is not None:
        yield "millstream_spark_lag_records", known.lag.records, ""
        yield "millstream_spark_lag_bytes", known.lag.bytes, ""
        if known.lag.seconds is not None:
            yield "millstream_spark_lag_seconds", round(known.lag.seconds, 3), ""
    for phase, seconds in known.seconds.items():
        yield "millstream_spark_batch_seconds", seconds, f',phase="{_escaped(phase)}"'
    yield "millstream_spark_batch_rows", known.rows, ""
    yield "millstream_spark_batches_total", known.batches, ""
    yield "millstream_spark_rows_total", known.rows_total, ""
    yield "millstream_spark_reported_time_seconds", round(known.reported_at, 3), ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _replace(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new one."""
    handle, aside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(aside, 0o644)
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise


def _serve(listener: LagListener, host: str, port: int) -> ThreadingHTTPServer:
    """Answer GET /metrics from a thread of its own."""

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_DEADLINE_S

        def do_GET(self) -> None:
            found = self.path.partition("?")[0] == "/metrics"
            body = listener.text().encode() if found else b"metrics are at /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Silent: a scrape is no news."""

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="millstream-metrics", daemon=True).start()
    return server
