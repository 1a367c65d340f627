"""What the machine did while a cell ran: processor time by owner, memory of a process group.

Linux only, read from `/proc`. "Foreign" processor time is what neither the server nor the load
generator used; a cell with much of it is marked in the report, never dropped silently.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
QUIET_CORES = 0.15
"""Foreign load up to this many cores counts as quiet."""


@dataclass(frozen=True)
class Usage:
    """Processor seconds used since boot: by all processes, stolen by the host, by one server."""

    at: float
    busy: float
    steal: float
    server: float
    children: float


def group_processes(group: int) -> list[int]:
    """Process ids of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        fields = _stat_fields(int(entry.name))
        if fields is not None and int(fields[2]) == group:
            found.append(int(entry.name))
    return found


def _stat_fields(process: int) -> list[str] | None:
    """Fields of `/proc/PID/stat` from the state on; None if the process is gone."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()


def group_cpu_seconds(group: int) -> float:
    total = 0
    for process in group_processes(group):
        fields = _stat_fields(process)
        if fields is not None:
            total += int(fields[11]) + int(fields[12])
    return total / CLOCK_TICKS


def own_cpu_seconds() -> float:
    """Of this process and all below it, those that have ended and were waited for included."""
    fields = {
        int(entry.name): found
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and (found := _stat_fields(int(entry.name))) is not None
    }
    below: dict[int, list[int]] = {}
    for process, found in fields.items():
        below.setdefault(int(found[1]), []).append(process)
    total, left = 0, [os.getpid()]
    while left:
        process = left.pop()
        total += sum(map(int, fields[process][11:15]))
        left += below.get(process, [])
    return total / CLOCK_TICKS


def group_rss_bytes(group: int) -> int:
    """Sum of VmRSS over the process group."""
    total = 0
    for process in group_processes(group):
        try:
            lines = Path(f"/proc/{process}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
    return total


def usage(group: int | None) -> Usage:
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    ticks = [int(field) for field in fields]
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Usage(
        at=time.monotonic(),
        busy=sum(ticks[:3]) / CLOCK_TICKS,
        steal=ticks[7] / CLOCK_TICKS,
        server=group_cpu_seconds(group) if group is not None else 0.0,
        children=children.ru_utime + children.ru_stime,
    )


def between(before: Usage, after: Usage) -> dict[str, float]:
    return cores_over([(before, after)])


def cores_over(spans: Sequence[tuple[Usage, Usage]]) -> dict[str, float]:
    """Average cores over one or more intervals. Interrupt time has no owner and is left out of foreign."""
    seconds = max(sum(after.at - before.at for before, after in spans), 1e-9)

    def cores(of: Callable[[Usage], float]) -> float:
        return sum(of(after) - of(before) for before, after in spans) / seconds

    server, load = cores(lambda usage: usage.server), cores(lambda usage: usage.children)
    busy = cores(lambda usage: usage.busy)
    return {
        "seconds": round(seconds, 3),
        "server_cores": round(server, 3),
        "load_cores": round(load, 3),
        "foreign_cores": round(max(0.0, busy - server - load), 3),
        "steal_cores": round(cores(lambda usage: usage.steal), 3),
    }


def wait_until_quiet(limit_seconds: float) -> float:
    """Waits until the machine is quiet, at most `limit_seconds`; returns the last foreign load."""
    deadline = time.monotonic() + limit_seconds
    while True:
        before = usage(None)
        time.sleep(0.5)
        foreign = between(before, usage(None))["foreign_cores"]
        if foreign <= QUIET_CORES or time.monotonic() >= deadline:
            return foreign


def describe(data_root: Path) -> dict[str, str]:
    """The machine in words, without names or addresses."""
    cpu = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory = int(Path("/proc/meminfo").read_text().split()[1]) / 1024 / 1024
    return {
        "processor": cpu[0] if cpu else "unknown",
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory:.0f} GiB",
        "kernel": os.uname().release,
        "data directories": _filesystem_of(data_root),
    }


def _filesystem_of(path: Path) -> str:
    """Type and options of the file system that holds `path`."""
    best, described = -1, "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, kind, options = line.split()[:4]
        if path.resolve().is_relative_to(mount) and len(mount) > best:
            best, described = len(mount), f"{kind} ({options})"
    return described
