"""What fault tests do to a data directory: read its log, damage it, put it on a small file system.

The layout of the log that is read here (64-byte file header, then batches with a 64-byte header) is the
one drawn in engine/core/src/codec.rs. Invariants: nothing here writes to a directory a server is
using; a file system that was mounted is unmounted; every refusal is a process that ended by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from support.server import binary

FILE_HEADER_BYTES = BATCH_HEADER_BYTES = 64
BATCH_MAGIC = b"MSB1"
REFUSAL_DEADLINE_S = 60.0
PR_CAPBSET_DROP = 24
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2


@dataclass(frozen=True)
class Batch:
    """Where one group commit lies, and which frames it holds."""

    file: Path
    position: int
    synced_up_to: int
    first_sequence: int
    frame_bytes: int
    frames: int

    @property
    def end(self) -> int:
        return self.position + BATCH_HEADER_BYTES + self.frame_bytes


def log_files(data_dir: Path) -> list[Path]:
    """The log's files, oldest first."""
    return sorted((data_dir / "wal").glob("*.wal"))


def batches_of(file: Path) -> list[Batch]:
    """The batches of one file up to where they end; a file that was only prepared has none."""
    data, found, position = file.read_bytes(), [], FILE_HEADER_BYTES
    generation = int(file.stem, 16)
    while True:
        head = data[position : position + BATCH_HEADER_BYTES]
        if len(head) < BATCH_HEADER_BYTES or head[:4] != BATCH_MAGIC:
            return found
        if number(head, 8) != generation:
            return found
        batch = Batch(
            file, position, number(head, 32), number(head, 40), number(head, 48, 4),
            number(head, 52, 4),
        )  # fmt: skip
        found.append(batch)
        position = batch.end


def number(data: bytes, at: int, size: int = 8) -> int:
    return int.from_bytes(data[at : at + size], "little")


def log_batches(data_dir: Path) -> list[Batch]:
    return [batch for file in log_files(data_dir) for batch in batches_of(file)]


def flip(file: Path, position: int, mask: int = 0x10) -> None:
    """One changed byte."""
    with file.open("r+b") as handle:
        handle.seek(position)
        old = handle.read(1)
        assert old, f"{file} ends before {position}"
        handle.seek(position)
        handle.write(bytes([old[0] ^ mask]))


def snapshot(data_dir: Path) -> dict[str, bytes]:
    """Every file with its bytes; a refused start must leave all of it as it was.

    Without the lock, and without the catalog, whose store marks its own file as opened and closed.
    """
    return {
        str(file.relative_to(data_dir)): file.read_bytes()
        for file in sorted(data_dir.rglob("*"))
        if file.is_file() and file.name not in ("lock", "catalog.redb")
    }


def without_root_override() -> None:
    """In a new process, before exec: root obeys file modes from here on, like everybody else."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
            if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
                raise OSError(ctypes.get_errno(), "cannot give up a capability")


def refusal(
    data_dir: Path, environment: Mapping[str, str] | None = None, *, obey_modes: bool = False
) -> str:
    """Starts a server that must refuse: ends with 1, says why, and says it without a stack trace."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MILLSTREAM_")}
    process = subprocess.Popen(
        [binary(), "serve", "--port", "0", "--data-dir", data_dir],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**clean, **(environment or {})},
        preexec_fn=without_root_override if obey_modes else None,
    )
    deadline = threading.Timer(REFUSAL_DEADLINE_S, process.kill)
    deadline.start()
    said = ""
    try:
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                said += line
                if "listening on" in line:
                    process.kill()
    finally:
        process.kill()
        deadline.cancel()
    assert "listening on" not in said, f"it started\n{said}"
    assert process.returncode == 1, (process.returncode, said)
    for ugly in ("Traceback", "panicked"):
        assert ugly not in said, said
    assert "error" in said, said
    return said


@contextlib.contextmanager
def mounted(at: Path, size_bytes: int, kind: str = "ext4") -> Iterator[Path]:
    """A real file system of its own. Where the machine does not let us mount, a full disk is not proven: that fails."""
    assert os.geteuid() == 0, (
        "mounting a small file system needs root: run the tests as root, or in a container"
    )
    at.mkdir()
    image = at.with_suffix(".img")
    if kind == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(at)]
    else:
        with image.open("wb") as handle:
            handle.truncate(size_bytes)
        made = subprocess.run(
            ["mkfs.ext4", "-q", "-m", "0", image], capture_output=True, check=False
        )
        assert made.returncode == 0, f"mkfs.ext4: {made.stderr.decode()[:200]}"
        mount = ["mount", "-o", "loop", str(image), str(at)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"mounting is not allowed here: {done.stderr[:200]}"
    try:
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True, capture_output=True)
        image.unlink(missing_ok=True)


def free_bytes(directory: Path) -> int:
    state = os.statvfs(directory)
    return state.f_bavail * state.f_frsize


def fill(directory: Path, *, leave_bytes: int) -> Path:
    """A file that takes the space others would need; removing it gives the space back."""
    filler = directory / "filler"
    with filler.open("wb") as handle:
        # At once as far as it goes: somebody may be writing at the same time.
        with contextlib.suppress(OSError):
            os.posix_fallocate(handle.fileno(), 0, max(free_bytes(directory) - leave_bytes, 1))
        handle.seek(0, os.SEEK_END)
        while (left := free_bytes(directory) - leave_bytes) > 0:
            try:
                written = handle.write(b"\xff" * min(left, 1 << 20))
                handle.flush()
            except OSError:
                break
            if written == 0:
                break
        os.fsync(handle.fileno())
    return filler
