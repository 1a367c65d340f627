"""Checkpoints during a cell: how many, and what they did to the latency.

A thread samples Millstream's own counters while the load runs. Between two samples the counters
say that a checkpoint ended and how long it took, so it lies within [earlier sample - its time,
later sample]. Latency slices of the load generator that touch such an interval count as "during".
Histograms are merged, percentiles never averaged.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from comparison.servers import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from comparison.servers import Server

COMPLETED = "millstream_checkpoints_total"
MICROSECONDS = "millstream_checkpoint_microseconds_total"
SAMPLE_SECONDS = 0.2
SLICE_MS = 100
MOST_SLOWDOWN = 3.0
"""p99 during a checkpoint may be this many times the p99 outside."""
FEWEST = 2
"""A durable write cell should span at least this many checkpoints."""

Span = tuple[float, float]
"""From and to, in unix milliseconds."""


@dataclass(frozen=True)
class Sample:
    at_ms: float
    completed: float
    microseconds: float


class Sampler(threading.Thread):
    """Samples the counters from `start` until `finish`; a failure to do so is reported there."""

    def __init__(self, server: Server) -> None:
        super().__init__(name="checkpoint-sampler", daemon=True)
        self._server = server
        self._over = threading.Event()
        self._failure: Exception | None = None
        self._samples: list[Sample] = [self._sample()]

    def _sample(self) -> Sample:
        found = self._server.metrics((COMPLETED, MICROSECONDS))
        missing = [name for name, value in found.items() if value is None]
        if missing:
            raise BenchError(f"the server exports no {', '.join(missing)}")
        return Sample(time.time() * 1000, found[COMPLETED] or 0.0, found[MICROSECONDS] or 0.0)

    def run(self) -> None:
        try:
            while not self._over.wait(SAMPLE_SECONDS):
                self._samples.append(self._sample())
        except (OSError, BenchError) as error:
            self._failure = error

    def finish(self) -> list[Sample]:
        self._over.set()
        self.join()
        if self._failure is not None:
            raise BenchError(f"sampling the checkpoints: {self._failure}")
        return [*self._samples, self._sample()]


def intervals(samples: Sequence[Sample]) -> list[Span]:
    """When checkpoints ran."""
    found = []
    for earlier, later in itertools.pairwise(samples):
        if later.completed > earlier.completed:
            took_ms = (later.microseconds - earlier.microseconds) / 1000
            found.append((earlier.at_ms - took_ms, later.at_ms))
    return found


def quantile(buckets: Iterable[tuple[float, int]], part: float) -> float | None:
    """The upper edge of the bucket that holds the given part of all values."""
    ordered = sorted(buckets)
    total = sum(count for _, count in ordered)
    seen = 0
    for edge, count in ordered:
        seen += count
        if seen >= part * total:
            return edge
    return None


def effect(runs: Sequence[tuple[dict[str, Any], Sequence[Span]]]) -> dict[str, Any]:
    """p99 in milliseconds of the answers during checkpoints and outside of them, over one or more runs."""
    inside: list[tuple[float, int]] = []
    outside: list[tuple[float, int]] = []
    for slices, during in runs:
        for index, buckets in enumerate(slices["slices"]):
            start = slices["started_unix_ms"] + index * slices["width_ms"]
            end = start + slices["width_ms"]
            touches = any(start <= last and first <= end for first, last in during)
            (inside if touches else outside).extend((edge, count) for edge, count in buckets)
    p99_during, p99_outside = quantile(inside, 0.99), quantile(outside, 0.99)
    ratio = p99_during / p99_outside if p99_during and p99_outside else None
    return {
        "p99_during_ms": None if p99_during is None else p99_during / 1000,
        "p99_outside_ms": None if p99_outside is None else p99_outside / 1000,
        "ratio": ratio,
    }


def summary(runs: Sequence[tuple[Sequence[Sample], dict[str, Any]]]) -> dict[str, Any]:
    """What a durable write cell states about its checkpoints."""
    completed = sum(samples[-1].completed - samples[0].completed for samples, _ in runs)
    took = sum(samples[-1].microseconds - samples[0].microseconds for samples, _ in runs) / 1e6
    base = {"completed": completed, "seconds": round(took, 3)}
    return base | effect([(slices, intervals(samples)) for samples, slices in runs])
