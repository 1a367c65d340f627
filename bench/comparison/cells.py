"""The cells of the comparison: one load, one server, one fresh data directory, one result.

Two builds of one server differ by less than the machine does from one ten seconds to the next, so they are measured in
short turns, both running, until each has had its whole time. Their figures are of the same minute, and so is their ratio.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from comparison import checkpoints, machine
from comparison.servers import BENCH, BenchError, Kind, Server, fresh_directory, run_checked

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

LOADGEN = BENCH / "loadgen" / "target" / "release" / "loadgen"
TURNS = 6
"""Even, so that each of two comes first as often as the other."""
QUANTILES = {"p50": 0.5, "p99": 0.99, "p99_9": 0.999, "max": 1.0}
CREATE_COUNT = 100_000
CREATE_DESCRIPTORS = 4096
IDLE_SUBSCRIBERS = 1000
# The npm server keeps 100 stream files open and answers 404 to appends once more streams than that
# are written at a time, so all append cells use 64 streams; above 64 connections some share one.
APPEND = ("append", "--body", "256", "--streams", "64")


@dataclass(frozen=True)
class Cell:
    name: str
    group: str
    title: str
    arguments: tuple[str, ...]
    metric: tuple[str, ...]
    """Where the compared figure is in the result of the load generator."""
    unit: str
    scale: float
    """Divisor from the result's unit to the printed one."""
    is_durable_write: bool = False

    @property
    def is_latency(self) -> bool:
        """Lower is better."""
        return self.metric[0] == "latency_us"

    @property
    def fits_in_turns(self) -> bool:
        """Whether the results of several turns make one: rates do, percentiles only with their histograms."""
        return self.is_durable_write or not self.is_latency

    def figure(self, result: dict[str, Any]) -> float:
        value: Any = result
        for key in self.metric:
            value = value[key]
        return float(value)


def _append(name: str, title: str, *arguments: str) -> Cell:
    return Cell(
        name=name,
        group="append",
        title=title,
        arguments=(*APPEND, *arguments),
        metric=("per_second",),
        unit="k/s",
        scale=1e3,
        is_durable_write=True,
    )


def _catchup(
    name: str, title: str, *, streams: int, append_bytes: int, stream_bytes: int = 2_000_000
) -> Cell:
    # How a stream was written matters, most of all to the npm server, which reads append by append
    # (about 0.2 GB/s with 256 B, 0.6 with 4 KiB, 0.8 with 64 KiB). The bound is on streams of the
    # records that all other cells write; the report shows three ways.
    written = ("--streams", str(streams), "--body", str(append_bytes))
    size = ("--stream-bytes", str(stream_bytes))
    return Cell(
        name=name,
        group="catchup",
        title=title,
        arguments=("catchup", "--connections", "64", *size, *written),
        metric=("bytes_per_second",),
        unit="GB/s",
        scale=1e9,
    )


CELLS: tuple[Cell, ...] = (
    _append("append_c1", "appends, 1 connection", "--connections", "1"),
    _append("append_c64", "appends, 64 connections", "--connections", "64"),
    _append("append_c256", "appends, 256 connections", "--connections", "256"),
    _append(
        "append_p16",
        "appends, 64 connections, pipelined 16",
        "--connections",
        "64",
        "--pipeline",
        "16",
    ),
    Cell(
        name="append_open_loop",
        group="append",
        title="append p99 at 1,000/s (open loop, 64 connections)",
        arguments=(*APPEND, "--connections", "64", "--rate", "1000"),
        metric=("latency_us", "p99"),
        unit="ms",
        scale=1e3,
        is_durable_write=True,
    ),
    _catchup("catchup", "catch-up of 2 MB streams, 64 connections", streams=8, append_bytes=256),
    _catchup("catchup_4k", "same, written in 4 KiB appends", streams=8, append_bytes=4096),
    _catchup(
        "catchup_large",
        "same, 64 streams written in 64 KiB appends",
        streams=64,
        append_bytes=65536,
    ),
    _catchup(
        "catchup_1k",
        "catch-up of 1 KiB streams, 64 connections",
        streams=64,
        append_bytes=256,
        stream_bytes=1024,
    ),
    _catchup(
        "catchup_16k",
        "catch-up of 16 KiB streams, 64 connections",
        streams=64,
        append_bytes=256,
        stream_bytes=16 * 1024,
    ),
    Cell(
        name="sse",
        group="sse",
        title="SSE delivery p99, 1,000 subscribers, 50/s",
        arguments=("sse", "--subscribers", "1000", "--rate", "50", "--body", "256"),
        metric=("latency_us", "p99"),
        unit="ms",
        scale=1e3,
    ),
)
GROUPS = ("append", "catchup", "sse", "creates")


def build_load_generator() -> None:
    manifest = BENCH / "loadgen" / "Cargo.toml"
    command = ["cargo", "build", "--release", "--locked", "--manifest-path", str(manifest)]
    run_checked(command, "building the load generator", BENCH)


def load(url: str, arguments: tuple[str, ...], timeout_seconds: float) -> dict[str, Any]:
    """Runs the load generator once. A run that could not measure is an error, not a result."""
    command = [str(LOADGEN), arguments[0], "--url", url, *arguments[1:]]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"load generator still running after {timeout_seconds:.0f} s") from error
    if done.returncode not in (0, 1):
        raise BenchError(done.stderr.strip() or f"load generator ended with {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@contextmanager
def running(
    kind: Kind, root: Path, name: str, descriptor_limit: int | None = None
) -> Iterator[Server]:
    """A server on a fresh data directory that is removed afterwards."""
    data = fresh_directory(root, name)
    try:
        with Server(kind, data, descriptor_limit=descriptor_limit) as server:
            yield server
    finally:
        shutil.rmtree(data)
        data.with_name(data.name + ".log").unlink(missing_ok=True)


@dataclass(frozen=True)
class Turn:
    """What one run of the load generator gave."""

    result: dict[str, Any]
    before: machine.Usage
    after: machine.Usage
    samples: list[checkpoints.Sample]
    slices: dict[str, Any] | None
    rss_bytes: int


def run_cell(
    cell: Cell,
    kinds: Sequence[Kind],
    root: Path,
    seconds: float,
    warmup: float,
    quiet: float,
) -> list[dict[str, Any]]:
    """Measures one cell on one server, or in turns on several; a record for each. An error becomes part of the records."""
    number = TURNS if len(kinds) > 1 else 1
    timing = ("--seconds", f"{seconds / number:g}", "--warmup", f"{warmup / number:g}")
    turns: list[list[Turn]] = [[] for _ in kinds]
    record: dict[str, Any] = {}
    try:
        with ExitStack() as stack:
            servers = [
                stack.enter_context(running(kind, root, f"{cell.name}-{kind.name}"))
                for kind in kinds
            ]
            machine.wait_until_quiet(quiet)
            for turn in range(number):
                pairs = list(zip(servers, turns, strict=True))
                for server, done in pairs if turn % 2 == 0 else reversed(pairs):
                    prefix = ("--prefix", f"bench/{turn}")
                    done.append(_measure(cell, server, (*timing, *prefix), 120 + 3 * seconds))
    except (BenchError, OSError, subprocess.SubprocessError) as error:
        record = {"ok": False, "error": str(error)}
    return [
        {"cell": cell.name, "server": kind.name} | (record or _record(cell, done))
        for kind, done in zip(kinds, turns, strict=True)
    ]


def _measure(cell: Cell, server: Server, timing: tuple[str, ...], timeout_seconds: float) -> Turn:
    arguments = (*cell.arguments, *timing)
    if cell.is_durable_write:
        arguments = (*arguments, "--slice-ms", str(checkpoints.SLICE_MS))
    samples_checkpoints = server.kind.tells_checkpoints and cell.is_durable_write
    sampler = checkpoints.Sampler(server) if samples_checkpoints else None
    before = machine.usage(server.group)
    if sampler is not None:
        sampler.start()
    try:
        result = load(server.url, arguments, timeout_seconds)
    finally:
        samples = sampler.finish() if sampler is not None else []
    after = machine.usage(server.group)
    # The slices are large and have served their purpose once the checkpoints are placed.
    slices = result.pop("latency_slices", None)
    return Turn(result, before, after, samples, slices, machine.group_rss_bytes(server.group))


def _record(cell: Cell, turns: Sequence[Turn]) -> dict[str, Any]:
    result = _merged([turn.result for turn in turns], [turn.slices for turn in turns])
    record: dict[str, Any] = {
        "result": result,
        "figure": cell.figure(result),
        "ok": result["ok"],
        "machine": machine.cores_over([(turn.before, turn.after) for turn in turns]),
        "rss_bytes": max(turn.rss_bytes for turn in turns),
    }
    if len(turns) > 1:
        record["turns"] = [cell.figure(turn.result) for turn in turns]
    sampled = [(turn.samples, turn.slices) for turn in turns if turn.samples and turn.slices]
    if sampled:
        record["checkpoints"] = checkpoints.summary(sampled)
    return record


def _merged(
    results: Sequence[dict[str, Any]], slices: Sequence[dict[str, Any] | None]
) -> dict[str, Any]:
    """Several results of the same length as one: rates are averaged, percentiles taken from all answers together."""
    if len(results) == 1:
        return results[0]
    rates = ("per_second", "bytes_per_second")
    merged: dict[str, Any] = {
        name: sum(result[name] for result in results) / len(results)
        for name in rates
        if name in results[0]
    }
    buckets = [
        (edge, count)
        for part in slices
        if part is not None
        for one in part["slices"]
        for edge, count in one
    ]
    if buckets:
        merged["latency_us"] = {
            name: checkpoints.quantile(buckets, part) for name, part in QUANTILES.items()
        }
    merged["ok"] = all(result["ok"] for result in results)
    merged["complaints"] = [text for result in results for text in result.get("complaints", [])]
    return merged


def run_creates(kind: Kind, root: Path, quiet: float) -> dict[str, Any]:
    """100,000 streams over one connection, memory, kill -9, restart, and reading all back."""
    record: dict[str, Any] = {"cell": "creates", "server": kind.name}
    data = fresh_directory(root, f"creates-{kind.name}")
    count = ("--count", str(CREATE_COUNT))
    try:
        with Server(kind, data, descriptor_limit=CREATE_DESCRIPTORS) as server:
            machine.wait_until_quiet(quiet)
            record["rss_empty_bytes"] = machine.group_rss_bytes(server.group)
            before = machine.usage(server.group)
            record["result"] = load(server.url, ("create", *count), 400)
            record["figure"] = record["result"]["per_second"]
            record["machine"] = machine.between(before, machine.usage(server.group))
            record["rss_bytes"] = machine.group_rss_bytes(server.group)
            server.kill()
        with Server(kind, data, descriptor_limit=CREATE_DESCRIPTORS) as server:
            record["restart_seconds"] = round(server.ready_seconds, 3)
            record["rss_restarted_bytes"] = machine.group_rss_bytes(server.group)
            record["verify"] = load(server.url, ("create-verify", *count), 400)
            record["rss_read_bytes"] = machine.group_rss_bytes(server.group)
        record["ok"] = record["result"]["ok"] and record["verify"]["ok"]
    except (BenchError, OSError, subprocess.SubprocessError) as error:
        record["ok"] = False
        record["error"] = str(error)
    finally:
        shutil.rmtree(data)
        data.with_name(data.name + ".log").unlink(missing_ok=True)
    return record


def run_idle(kind: Kind, root: Path) -> dict[str, Any]:
    """What 1,000 waiting SSE subscribers add to the memory of a server."""
    record: dict[str, Any] = {"cell": "idle", "server": kind.name}
    try:
        with running(kind, root, f"idle-{kind.name}", CREATE_DESCRIPTORS) as server:
            # One subscriber first: what the first use of the path loads is not a cost per subscriber.
            load(server.url, ("sse", "--subscribers", "1", "--seconds", "0.5", "--warmup", "0"), 60)
            before = machine.group_rss_bytes(server.group)
            command = [
                str(LOADGEN),
                "idle",
                "--url",
                server.url,
                "--subscribers",
                str(IDLE_SUBSCRIBERS),
            ]
            with subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as waiting:
                assert waiting.stdin is not None
                assert waiting.stdout is not None
                if not waiting.stdout.readline().startswith('{"ready"'):
                    raise BenchError("the subscribers did not become ready")
                record["extra_rss_bytes"] = machine.group_rss_bytes(server.group) - before
                waiting.stdin.close()
                record["result"] = json.loads(waiting.stdout.readline())
            record["ok"] = record["result"]["ok"]
    except (BenchError, OSError, subprocess.SubprocessError) as error:
        record["ok"] = False
        record["error"] = str(error)
    return record
