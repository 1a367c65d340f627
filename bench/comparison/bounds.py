"""The bounds that Millstream promises, and the verdict on each.

A ratio bound is judged on the median of the ratios of the repetitions, each taken between two
runs of the same repetition. A verdict is final only with at least five repetitions of at least
ten seconds; otherwise it is called indicative. A run of Millstream that failed its verification
fails every bound that rests on it, however fast it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from comparison.cells import Cell

FINAL_REPETITIONS = 5
FINAL_SECONDS = 10.0
MEGABYTE = 1_000_000


@dataclass(frozen=True)
class RatioBound:
    cell: str
    peer: str
    limit: float
    at_least: bool


@dataclass(frozen=True)
class AbsoluteBound:
    name: str
    cell: str
    limit: float
    at_least: bool
    unit: str


@dataclass(frozen=True)
class Verdict:
    text: str
    wanted: str
    values: tuple[float, ...]
    passed: bool | None
    """None: not measured in this run."""
    note: str = ""

    @property
    def middle(self) -> float | None:
        return median(self.values) if self.values else None


RATIOS: tuple[RatioBound, ...] = (
    RatioBound("append_c64", "npm", 25.0, at_least=True),
    RatioBound("append_c256", "npm", 25.0, at_least=True),
    RatioBound("catchup", "npm", 8.0, at_least=True),
    RatioBound("sse", "npm", 0.1, at_least=False),
    RatioBound("append_c1", "rust", 1.0, at_least=True),
    RatioBound("append_c64", "rust", 1.0, at_least=True),
    RatioBound("append_c256", "rust", 1.5, at_least=True),
    RatioBound("append_p16", "rust", 5.0, at_least=True),
    RatioBound("catchup", "rust", 0.9, at_least=True),
    RatioBound("sse", "rust", 1.2, at_least=False),
)


BASELINE = "baseline"
"""Another build of Millstream, measured wherever this one is."""
BASELINE_SHARE = 0.97
CREATES_TITLE = "100,000 creates over one connection"


def names(cell: str, server: str, *, baseline: bool = False) -> bool:
    """Whether a bound compares this cell of this server (or of Millstream) with another. A baseline bounds every cell."""
    peers = {bound.peer for bound in RATIOS if bound.cell == cell}
    return baseline or bool(peers) if server in ("millstream", BASELINE) else server in peers


def against_baseline(cell: str, *, is_latency: bool) -> RatioBound:
    """No slower than the baseline, but for what repetitions differ by."""
    limit = round(1 / BASELINE_SHARE, 2) if is_latency else BASELINE_SHARE
    return RatioBound(cell, BASELINE, limit, at_least=not is_latency)


ABSOLUTES: tuple[AbsoluteBound, ...] = (
    AbsoluteBound(CREATES_TITLE, "creates", 10_000, at_least=True, unit="/s"),
    AbsoluteBound("memory with 100,000 streams", "creates_rss", 200, at_least=False, unit="MB"),
    AbsoluteBound("restart after kill -9", "creates_restart", 5, at_least=False, unit="s"),
    AbsoluteBound("1,000 idle SSE subscribers", "idle", 30, at_least=False, unit="MB"),
)

Records = Sequence[dict[str, Any]]


def _by_repetition(records: Records, cell: str, server: str) -> dict[int, dict[str, Any]]:
    return {
        record["repetition"]: record
        for record in records
        if record["cell"] == cell and record["server"] == server
    }


def judge_ratio(bound: RatioBound, records: Records, title: str) -> Verdict:
    own = _by_repetition(records, bound.cell, "millstream")
    peer = _by_repetition(records, bound.cell, bound.peer)
    both = sorted(own.keys() & peer.keys())
    ratios, notes = [], []
    for repetition in both:
        mine, theirs = own[repetition], peer[repetition]
        if mine.get("figure") and theirs.get("figure"):
            ratios.append(mine["figure"] / theirs["figure"])
        if not theirs["ok"]:
            notes.append(repetition)
    failed = [repetition for repetition in both if not own[repetition]["ok"]]
    note = f"{bound.peer} failed its verification in {len(notes)} of {len(both)}" if notes else ""
    if failed:
        note = f"Millstream failed in {len(failed)} of {len(both)}" + (f"; {note}" if note else "")
    sign = "≥" if bound.at_least else "≤"
    passed: bool | None = None
    if both:
        passed = bool(ratios) and not failed and _holds(median(ratios), bound.limit, bound.at_least)
    text = f"{title}, against {bound.peer}"
    return Verdict(text, f"{sign} {bound.limit:g}x", tuple(ratios), passed, note)


def _holds(value: float, limit: float, at_least: bool) -> bool:
    return value >= limit if at_least else value <= limit


def _absolute_values(bound: AbsoluteBound, records: Records) -> tuple[list[float], bool]:
    """The measured values of a bound, and whether every run behind them was right."""
    cell = "idle" if bound.cell == "idle" else "creates"
    runs = list(_by_repetition(records, cell, "millstream").values())
    right = all(run["ok"] for run in runs)
    values = []
    for run in runs:
        if bound.cell == "idle" and "extra_rss_bytes" in run:
            values.append(run["extra_rss_bytes"] / MEGABYTE)
        elif bound.cell == "creates" and "result" in run:
            values.append(run["result"]["per_second"])
        elif bound.cell == "creates_restart" and "restart_seconds" in run:
            values.append(run["restart_seconds"])
        elif bound.cell == "creates_rss" and "rss_bytes" in run:
            moments = ("rss_bytes", "rss_restarted_bytes", "rss_read_bytes")
            values.append(max(run.get(moment, 0) for moment in moments) / MEGABYTE)
    return values, right and bool(runs)


def judge_absolute(bound: AbsoluteBound, records: Records) -> Verdict:
    values, right = _absolute_values(bound, records)
    sign = "≥" if bound.at_least else "<"
    cell = "idle" if bound.cell == "idle" else "creates"
    measured = bool(_by_repetition(records, cell, "millstream"))
    passed: bool | None = None
    if measured:
        middle = median(values) if values else None
        met = middle is not None and (
            middle >= bound.limit if bound.at_least else middle < bound.limit
        )
        passed = right and met
    note = "" if right or not measured else "a run failed its verification"
    return Verdict(bound.name, f"{sign} {bound.limit:,g} {bound.unit}", tuple(values), passed, note)


def judge(records: Records, cells: Sequence[Cell]) -> list[Verdict]:
    titles = {cell.name: cell.title for cell in cells} | {"creates": CREATES_TITLE}
    latencies = {cell.name for cell in cells if cell.is_latency}
    measured = {record["cell"] for record in records if record["server"] == BASELINE}
    ratios = RATIOS + tuple(
        against_baseline(name, is_latency=name in latencies) for name in titles if name in measured
    )
    return [judge_ratio(bound, records, titles[bound.cell]) for bound in ratios] + [
        judge_absolute(bound, records) for bound in ABSOLUTES
    ]


def is_final(repetitions: int, seconds: float) -> bool:
    return repetitions >= FINAL_REPETITIONS and seconds >= FINAL_SECONDS
