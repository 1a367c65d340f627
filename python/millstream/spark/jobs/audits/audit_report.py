"""What an audit says: findings with their stream and range of records, a row per stream, and what the server found in its own bytes.

Where it sits: filled by `audit`, printed by the commands.
Invariant I-ARP-1: a finding of a kind in `DIFFERENCES` makes the audit fail; every other one only informs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

from millstream.spark.jobs.run.batch import Report, text_table

FINDINGS_MAX: Final = 1000
"""Most findings that a report lists; all of them are counted."""
KINDS: Final = {
    "missing": "not in the target",
    "doubled": "more than once in the target",
    "altered": "not what the stream has",
    "extra": "in the target, not in the stream",
    "lost": "in the target; the stream lost them in a crash, which its class allows",
}
DIFFERENCES: Final = ("missing", "doubled", "altered", "extra")


@dataclass(frozen=True, slots=True)
class Finding:
    """Records of one stream that are not as they should be: `records` of them, from `first` to `last`."""

    kind: str
    stream: str
    first: int
    last: int
    records: int

    def __str__(self) -> str:
        span = f"record {self.first}"
        if self.last != self.first:
            every = self.records == self.last - self.first + 1
            span = f"records {self.first} to {self.last}"
            span += "" if every else f" ({self.records:,} of them)"
        return f"{self.kind}: stream `{self.stream}`, {span}: {KINDS[self.kind]}"


@dataclass(slots=True)
class StreamRow:
    """How one stream stands."""

    stream: str
    state: str = "whole"
    """`whole`, `differs`, `deleted`, `recreated` (another stream has the name now), `not landed`."""
    compared: int = 0
    """Records of the stream that the target should have."""
    in_target: int = 0
    behind: int = 0
    """Records that are still to come: no error."""
    ahead: int = 0
    """Rows of a batch that was being published."""
    unbacked: int = 0
    """Rows that the stream has no longer, by retention or because it is gone: only counted."""


@dataclass(slots=True)
class AuditReport(Report):
    target: str
    streams: list[StreamRow] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    """Records by kind of finding, those included that are not listed."""
    files: list[str] = field(default_factory=list)
    """Files of the lake that are missing or cannot be read."""
    server: dict[str, Any] | None = None
    """The report of `verify`; None if it was not asked for."""

    @property
    def ok(self) -> bool:
        whole = self.server is None or self.server["errors"] == 0
        return whole and not self.files and not any(self.counts.get(kind) for kind in DIFFERENCES)

    def document(self) -> dict[str, Any]:
        return {
            "whole": self.ok,
            "target": self.target,
            "streams": [asdict(row) for row in self.streams],
            "counts": self.counts,
            "findings": [asdict(finding) for finding in self.findings],
            "files": self.files,
            "server": self.server,
        }

    def lines(self) -> list[str]:
        names = ("stream", "state", "compared", "in target", "behind", "ahead", "unbacked")
        rows = [
            (
                row.stream,
                row.state,
                row.compared,
                row.in_target,
                row.behind,
                row.ahead,
                row.unbacked,
            )
            for row in self.streams
        ]
        lines = text_table(names, rows) if rows else ["no streams"]
        lines += [f"file: `{path}` is missing or cannot be read" for path in self.files]
        lines += [str(finding) for finding in self.findings]
        left = sum(self.counts.values()) - sum(finding.records for finding in self.findings)
        if left > 0:
            lines.append(f"... and {left:,} records more")
        lines += self._server()
        differing = sum(self.counts.get(kind, 0) for kind in DIFFERENCES)
        lines.append("whole" if self.ok else f"not whole: {differing:,} records differ")
        return lines

    def _server(self) -> list[str]:
        if self.server is None:
            return []
        lines = []
        for found in self.server["findings"]:
            at = "" if found["byte"] is None else f" at byte {found['byte']}"
            stream = "" if found["stream"] is None else f" (stream {found['stream']})"
            said = f"{found['file']}{at}{stream}: {found['what']}"
            lines.append(f"server: {found['severity']}: {said}")
        errors = self.server["errors"]
        outcome = "its own bytes are whole" if errors == 0 else f"{errors} errors in its own bytes"
        return [*lines, f"server: {outcome}"]
