"""Checks of the machine: memory, loopback, the data directory.

Where it sits: one theme of `millstream doctor`. Reads /proc and the control group where they are there.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millstream.doctor.finding import Finding, fail, ok, warn
from millstream.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOPBACK: Final = "127.0.0.1"
ANSWER_DEADLINE_S: Final = 5.0
MEMORY_ENOUGH: Final = 2 << 30
MEMORY_LEAST: Final = 768 << 20
"""A driver's JVM takes about 0.5 GiB at rest and a Python worker 0.1 GiB (measured)."""
SPACE_ENOUGH: Final = 2 << 30
SPACE_LEAST: Final = 200 << 20


def memory() -> Iterator[Finding]:
    """Memory that a server and a local Spark session could still take."""
    free = available_memory()
    if free is None:
        yield warn(
            "memory", "cannot be read on this system", "make sure that 2 GiB are free for Spark"
        )
        return
    text = f"{size(free)} available"
    if free < MEMORY_LEAST:
        yield fail("memory", text, "free memory: a local Spark session needs at least 1 GiB")
    elif free < MEMORY_ENOUGH:
        yield warn(
            "memory",
            f"{text}, little for Spark",
            "free memory, or give jobs `--conf spark.driver.memory=512m`",
        )
    else:
        yield ok("memory", text)


def available_memory() -> int | None:
    """Bytes: what the kernel calls available, or less where a control group is stricter."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    if found is None:
        return None
    free = int(found[1]) * 1024
    limit = _number(Path("/sys/fs/cgroup/memory.max"))
    used = _number(Path("/sys/fs/cgroup/memory.current"))
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def loopback() -> Iterator[Finding]:
    """127.0.0.1 can be bound and reached, and the host's own name means an address."""
    try:
        _talk_to_myself()
    except OSError as error:
        yield fail(
            "loopback",
            f"{LOOPBACK} cannot be bound and reached: {error.strerror or error}",
            "bring the loopback interface up (`ip link set lo up`) and let local firewalls pass it",
        )
    else:
        yield ok("loopback", f"{LOOPBACK} can be bound and reached")
    name = socket.gethostname()
    try:
        addresses = sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None)})
    except OSError:
        yield warn(
            "host name",
            f"`{name}` has no address: Spark would stop at it, except in sessions of Millstream",
            f"add `127.0.0.1 {name}` to /etc/hosts, or set SPARK_LOCAL_IP=127.0.0.1",
        )
    else:
        yield ok("host name", f"{name} is {', '.join(addresses)}")


def _talk_to_myself() -> None:
    with socket.create_server((LOOPBACK, 0)) as listener:
        listener.settimeout(ANSWER_DEADLINE_S)
        with socket.create_connection(listener.getsockname(), ANSWER_DEADLINE_S) as near:
            far, _ = listener.accept()
            with far:
                far.settimeout(ANSWER_DEADLINE_S)
                near.sendall(b"?")
                if far.recv(1) != b"?":
                    raise OSError(errno.EIO, "bytes do not arrive")


def settings() -> Iterator[Finding]:
    """Environment and settings file can be read; a wrong line is raised and becomes the finding."""
    from millstream.settings import load_settings

    load_settings({})
    yield ok("settings", "environment and settings file are in order")


def data_directory(named: str | None) -> Iterator[Finding]:
    """The directory that a server here would use: it, or where it would be made, can be written."""
    from millstream.settings import load_settings

    if named is None:
        try:
            named = load_settings({}).data_dir
        except SettingsError:
            return  # said by `settings`
    directory = Path(named).absolute()
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    what = str(directory) if place == directory else f"{directory} (not there yet)"
    remedy = "give another directory with `--data-dir`, or change its owner or mode"
    if not place.is_dir():
        yield fail("data directory", f"`{place}` is not a directory", remedy)
        return
    try:
        with tempfile.NamedTemporaryFile(prefix=".doctor-", dir=place) as file:
            file.write(b"?")
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(place).free
    except OSError as error:
        yield fail("data directory", f"`{place}`: {error.strerror or error}", remedy)
        return
    text = f"{what}: {size(free)} free"
    if free < SPACE_LEAST:
        yield fail("data directory", text, "free space: a full disk refuses appends (507)")
    elif free < SPACE_ENOUGH:
        yield warn("data directory", text, "free space before streams grow")
    else:
        yield ok("data directory", text)


def size(value: int) -> str:
    return f"{value / (1 << 30):.1f} GiB" if value >= 1 << 30 else f"{value / (1 << 20):.0f} MiB"
