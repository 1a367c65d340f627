# The native engine as Python sees it: one handle per data directory.
# Every method that waits does so with the interpreter lock released, and is safe to call from any thread.

from collections.abc import Callable
from typing import Literal, TypeAlias, TypedDict

class EngineError(Exception):
    # Raised by every method; args = (code, detail).
    code: str
    detail: str

class StreamEntry(TypedDict):
    path: str
    content_type: str
    tail: str
    closed: bool
    durability: str
    incarnation: str
    records: int
    bytes: int
    created_at: int
    ttl_seconds: int | None
    expires_at: int | None
    forked_from: str | None

class BackupSummary(TypedDict):
    commit_number: int
    checkpoint: int
    taken_at: int
    streams: int
    files: int
    bytes: int
    damaged: int
    damage: list[str]

# Phase, bytes done, bytes in all (0 = not known yet); False cancels.
Progress: TypeAlias = Callable[[str, int, int], bool]

class Finding(TypedDict):
    severity: Literal["error", "note"]
    file: str
    byte: int | None
    stream: str | None
    what: str

class GivenUp(TypedDict):
    stream: str | None
    what: str

class VerifyCounts(TypedDict):
    errors: int
    notes: int
    beyond_repair: bool
    streams: int
    stream_bytes: int
    appends: int
    log_files: int
    frames: int
    packs: int
    # At most 1000 of each severity.
    findings: list[Finding]

class Repair(TypedDict):
    # Below the data directory: the originals.
    kept_in: str
    done: list[str]
    given_up: list[GivenUp]
    given_up_count: int
    after: VerifyCounts

class VerifyReport(VerifyCounts):
    repair: Repair | None

# Bytes done, bytes in all; False stops.
VerifyProgress: TypeAlias = Callable[[int, int], bool]

# Streams, and behind which name to go on: a page may be short, or empty, and still be followed by others.
Listed: TypeAlias = tuple[list[StreamEntry], str | None]
Paths: TypeAlias = list[str]
Dirty: TypeAlias = list[tuple[str, Paths]]
Globs: TypeAlias = list[Paths | None]
# From, to, reason, and whether bytes are missing for certain.
GapEntry: TypeAlias = tuple[str, str, str, bool]

class Engine:
    def __init__(
        self,
        settings: dict[str, str | int | bool],
        progress: Callable[[str], None] | None = None,
    ) -> None: ...
    def start(self, control_socket: str | None = None) -> None: ...
    @property
    def port(self) -> int: ...
    def stop(self, deadline_ms: int = 1500) -> bool: ...
    # What a stop waits for, streams left for a checkpoint, commits.
    def announce_stop(self) -> None: ...
    def stop_progress(self) -> tuple[str, int, int]: ...
    def status(self) -> dict[str, object]: ...
    # Moves one of the control plane's own numbers among the metrics.
    def count(self, name: str, change: int) -> None: ...
    def create(
        self,
        path: str,
        content_type: str = "application/octet-stream",
        durability: str | None = None,
    ) -> bool: ...
    def append(self, path: str, data: bytes) -> str: ...
    def read(
        self, path: str, offset: str = "-1", max_bytes: int = 4194304
    ) -> tuple[bytes, str, bool, bool, GapEntry | None]: ...
    def tail(self, path: str) -> str | None: ...
    def damaged(self, path: str) -> bool: ...
    def set_durability(self, path: str, durability: str) -> str: ...
    def delete(self, path: str) -> bool: ...
    def list(self, prefix: str = "", after: str = "", limit: int = 1000) -> Listed: ...
    def list_one(self, path: str) -> StreamEntry | None: ...
    def backup(
        self,
        to: str,
        progress: Progress | None = None,
        rate_bytes_per_second: int = 0,
        allow_damage: bool = False,
    ) -> BackupSummary: ...
    def verify(self, progress: VerifyProgress | None = None) -> VerifyReport: ...
    # Streams by name, and all that globs match; what is handed in comes on top of what is watched.
    def watch(self, names: Paths, globs: Paths) -> None: ...
    def unwatch(self, names: Paths, globs: Paths) -> None: ...
    # Changed streams with the watched globs that match them, and whether some were dropped.
    def take_dirty(self, timeout_ms: int) -> tuple[Dirty, bool]: ...
    # For each name the watched globs that match it; None: it is not watched.
    def globs_of(self, paths: Paths) -> Globs: ...

# The names that a glob matches.
def matching(glob: str, paths: Paths) -> Paths: ...

# The checksum of bytes that follow others; 0 for the first.
def crc32c(data: bytes, before: int = 0) -> int: ...

# The directory of a stopped server; with `repair` it is repaired if it has to be, and verified again.
def verify(
    data_dir: str, repair: bool = False, progress: VerifyProgress | None = None
) -> VerifyReport: ...
