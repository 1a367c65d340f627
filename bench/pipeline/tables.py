"""The tables of the Spark benchmark, made from its document alone."""

from __future__ import annotations

from statistics import median
from typing import Any

from durability.session import verdict

Record = dict[str, Any]
ARROW_LEAST, PARQUET_LEAST = 0.75, 0.5
ROWS_PER_SECOND_LEAST = 500_000
ABOVE_RATE_MOST_MS = 100
JSON_LEAST = {
    "clean": 1.2,
    "decimals": 0.7,
    "1 % bad": 0.7,
    "1 % bad, nested": 0.7,
    "1 % bad, out of range": 0.7,
}
JOBS_LEAST = {"decode": 0.55, "deduplicate": 0.75, "materialise": 0.6}
BAD_LEAST = 0.8
READ_ARROW_LEAST = 3.0
CLIENT_TITLES = {
    "read": "`read`",
    "read_arrow": "`read_arrow`",
    "numbered": "`read(numbered=True)`",
    "async_read": "`read`, async",
    "async_read_arrow": "`read_arrow`, async",
}
Part = tuple[list[str], list[tuple[str, str, str, bool | None]]]
"""Lines of a table, and bounds: name, what is wanted, what was measured, whether it holds."""
TITLES = {
    "single": "Millstream, one record per append",
    "hundred": "Millstream, 100 records per POST",
    "arrow": "local Arrow files, the same API",
    "parquet": "`spark.read.parquet`, snappy",
}


def report(document: Record) -> tuple[list[str], bool]:
    records = document["records"]
    final = not document["quick"] and document["complete"]
    lines: list[str] = []
    bounds: list[tuple[str, str, str, bool | None]] = []
    for part in (_read, _json, _jobs, _write, _floor, _client):
        own_lines, own_bounds = part(records)
        lines += own_lines
        bounds += own_bounds
    lines += ["| bound | wanted | measured | verdict |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {wanted} | {measured} | {'' if passed is None else verdict(passed, final=final)} |"
        for name, wanted, measured, passed in bounds
    ]
    return lines, all(passed is not False for *_, passed in bounds)


def _read(records: list[Record]) -> Part:
    own = [one for one in records if one["cell"] == "read"]
    if not own:
        return [], []
    best = {
        name: min((one["seconds"] for one in own if one["source"] == name), default=None)
        for name in TITLES
    }
    size = own[0]["bytes"]
    head = f"| batch read of {own[0]['rows']:,} records, best | s | MB/s | million rows/s |"
    lines = [head, "|---|---|---|---|"]
    lines += [
        f"| {TITLES[name]} | {seconds:.2f} | {size / seconds / 1e6:.0f} | {own[0]['rows'] / seconds / 1e6:.2f} |"
        for name, seconds in best.items()
        if seconds is not None
    ]
    bounds: list[tuple[str, str, str, bool | None]] = []
    for name, judged in (("single", True), ("hundred", False)):
        for peer, least in (("arrow", ARROW_LEAST), ("parquet", PARQUET_LEAST)):
            ours, theirs = best[name], best[peer]
            if ours is None or theirs is None:
                continue
            wanted = least if judged else None
            bounds.append(_bound(f"read, {name}, times {peer}", wanted, theirs / ours))
    return [*lines, ""], bounds


def _json(records: list[Record]) -> Part:
    own = [one for one in records if one["cell"] == "json"]
    if not own:
        return [], []
    head = f"| {own[0]['rows']:,} JSON records, best | `valueFormat=json`, s | `from_json`, s |"
    lines = [head, "|---|---|---|"]
    bounds: list[tuple[str, str, str, bool | None]] = []
    for name in dict.fromkeys(one["records"] for one in own):
        ours, theirs = (
            min(one["seconds"] for one in own if (one["records"], one["by"]) == (name, by))
            for by in ("valueFormat", "from_json")
        )
        lines.append(f"| {name} | {ours:.2f} | {theirs:.2f} |")
        bounds.append(
            _bound(f"JSON, {name}, times `from_json`", JSON_LEAST.get(name), theirs / ours)
        )
    return [*lines, ""], bounds


def _jobs(records: list[Record]) -> Part:
    own = [one for one in records if one["cell"] == "jobs"]
    if not own:
        return [], []
    runs: dict[tuple[str, str], list[Record]] = {}
    for one in own:
        runs.setdefault((one["work"], one["source"]), []).append(one)
    seconds = {key: min(one["seconds"] for one in found) for key, found in runs.items()}
    # Not the least: what a worker has used that ended meanwhile is not seen.
    processor = {key: median(one["processor"] for one in found) for key, found in runs.items()}
    lines = [
        f"| job of {own[0]['rows']:,} records, best | from streams, s (processor, median) | from Parquet, s (processor, median) | from streams, million rows/s |",
        "|---|---|---|---|",
    ]
    bounds: list[tuple[str, str, str, bool | None]] = []
    for name in dict.fromkeys(one["work"] for one in own):
        ours, theirs = (name, "streams"), (name, "parquet")
        if ours not in seconds or theirs not in seconds:
            continue
        shown = [f"{seconds[one]:.2f} ({processor[one]:.2f})" for one in (ours, theirs)]
        rate = own[0]["rows"] / seconds[ours] / 1e6
        lines.append(f"| {name} | {' | '.join(shown)} | {rate:.2f} |")
        ratio = seconds[theirs] / seconds[ours]
        bounds.append(_bound(f"{name}, times Parquet", JOBS_LEAST.get(name), ratio))
    clean, bad = ("decode", "streams"), ("decode, 1 % bad", "streams")
    if clean in seconds and bad in seconds:
        ratio = seconds[clean] / seconds[bad]
        bounds.append(_bound("decode, 1 % bad, times without", BAD_LEAST, ratio))
    return [*lines, ""], bounds


def _bound(name: str, least: float | None, ratio: float) -> tuple[str, str, str, bool | None]:
    if least is None:
        return name, "shown", f"{ratio:.2f}", None
    return name, f"≥ {least:g}", f"{ratio:.2f}", ratio >= least


def _client(records: list[Record]) -> Part:
    rates: dict[str, float] = {}
    for one in records:
        if one["cell"] == "client":
            rates[one["way"]] = max(one["rows"] / one["seconds"], rates.get(one["way"], 0))
    if not rates:
        return [], []
    lines = ["| Python client, 200-byte records, best | records/s |", "|---|---|"]
    lines += [f"| {title} | {rates[name]:,.0f} |" for name, title in CLIENT_TITLES.items() if name in rates]  # fmt: skip
    pairs = (("read_arrow", "read"), ("async_read_arrow", "async_read"))
    bounds = [
        _bound(f"{own}, times {peer}", READ_ARROW_LEAST, rates[own] / rates[peer])
        for own, peer in pairs
        if own in rates and peer in rates
    ]
    return [*lines, ""], bounds


def _write(records: list[Record]) -> Part:
    rates = [one["rows"] / one["seconds"] for one in records if one["cell"] == "write"]
    if not rates:
        return [], []
    shown = f"{median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"
    passed = median(rates) >= ROWS_PER_SECOND_LEAST
    return [], [("streaming write, rows/s", f"≥ {ROWS_PER_SECOND_LEAST:,}", shown, passed)]


def _floor(records: list[Record]) -> Part:
    own = [one for one in records if one["cell"] == "floor"]
    medians = {
        name: [one["median_ms"] for one in own if one["source"] == name]
        for name in ("millstream", "rate-micro-batch")
    }
    if not all(medians.values()):
        return [], []
    ours, rate = (median(medians[name]) for name in ("millstream", "rate-micro-batch"))
    shown = f"{ours - rate:.0f} ms ({ours:.0f} against {rate:.0f})"
    bound = ("10-row micro-batch above `rate-micro-batch`", f"≤ {ABOVE_RATE_MOST_MS} ms", shown)
    return [], [(*bound, ours - rate <= ABOVE_RATE_MOST_MS)]
