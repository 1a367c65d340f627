"""The tables of the Spark benchmark, made from its document alone."""

from __future__ import annotations

from statistics import median
from typing import Any

from durability.session import verdict

Record = dict[str, Any]
ARROW_LEAST, PARQUET_LEAST = 0.7, 0.5
ROWS_PER_SECOND_LEAST = 500_000
ABOVE_RATE_MOST_MS = 100
JSON_LEAST = {"clean": 1.2, "decimals": 0.7, "1 % bad": 0.7}
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
    for part in (_read, _json, _write, _floor):
        own_lines, own_bounds = part(records)
        lines += own_lines
        bounds += own_bounds
    lines += ["| bound | wanted | measured | verdict |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {wanted} | {measured} | {verdict(passed, final=final)} |"
        for name, wanted, measured, passed in bounds
    ]
    return lines, all(passed is not False for *_, passed in bounds)


def _read(records: list[Record]) -> tuple[list[str], list[tuple[str, str, str, bool | None]]]:
    own = [one for one in records if one["cell"] == "read"]
    if not own:
        return [], []
    best = {
        name: min((one["seconds"] for one in own if one["source"] == name), default=None)
        for name in TITLES
    }
    size = own[0]["bytes"]
    lines = ["| batch read, best | s | MB/s | million rows/s |", "|---|---|---|---|"]
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
            ratio = theirs / ours
            wanted = f"≥ {least}" if judged else "shown"
            passed = ratio >= least if judged else None
            bounds.append((f"read, {name}, times {peer}", wanted, f"{ratio:.2f}", passed))
    return [*lines, ""], bounds


def _json(records: list[Record]) -> tuple[list[str], list[tuple[str, str, str, bool | None]]]:
    own = [one for one in records if one["cell"] == "json"]
    if not own:
        return [], []
    lines = ["| JSON records, best | `valueFormat=json`, s | `from_json`, s |", "|---|---|---|"]
    bounds: list[tuple[str, str, str, bool | None]] = []
    for name in dict.fromkeys(one["records"] for one in own):
        ours, theirs = (
            min(one["seconds"] for one in own if (one["records"], one["by"]) == (name, by))
            for by in ("valueFormat", "from_json")
        )
        lines.append(f"| {name} | {ours:.2f} | {theirs:.2f} |")
        least, ratio = JSON_LEAST.get(name), theirs / ours
        wanted, passed = (f"≥ {least}", ratio >= least) if least else ("shown", None)
        bounds.append((f"JSON, {name}, times `from_json`", wanted, f"{ratio:.2f}", passed))
    return [*lines, ""], bounds


def _write(records: list[Record]) -> tuple[list[str], list[tuple[str, str, str, bool | None]]]:
    rates = [one["rows"] / one["seconds"] for one in records if one["cell"] == "write"]
    if not rates:
        return [], []
    shown = f"{median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"
    passed = median(rates) >= ROWS_PER_SECOND_LEAST
    return [], [("streaming write, rows/s", f"≥ {ROWS_PER_SECOND_LEAST:,}", shown, passed)]


def _floor(records: list[Record]) -> tuple[list[str], list[tuple[str, str, str, bool | None]]]:
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
