"""A stream as the protocol describes it, small enough to be right by reading.

The oracle of the property tests: every answer of the server is compared with what this says. It knows
nothing of offsets but their order, nothing of disks, and nothing of time. What a restart may cost a
class is in `lose`: it leaves the model with what the server says it still has, if that is allowed.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Append:
    """An append as a client asks for it."""

    body: bytes = b""
    content_type: str | None = "text/plain"
    producer: tuple[str, int, int] | None = None
    stream_seq: str | None = None
    close: bool = False


@dataclass
class ModelStream:
    """One stream: its appends, and what the protocol remembers beside them."""

    content_type: str = "text/plain"
    appends: list[bytes] = field(default_factory=list)
    offsets: list[str] = field(default_factory=list)
    closed: bool = False
    closed_by: tuple[str, int, int] | None = None
    producers: dict[str, tuple[int, int]] = field(default_factory=dict)
    stream_seq: str | None = None
    durability: str = "fsync"
    safe: int = 0
    """How many appends have been promised to survive kill -9."""
    lossy: bool = False
    """A tail may have been lost once: from then on producers and `Stream-Seq` are not foretold."""
    lost_offsets: list[tuple[str, int]] = field(default_factory=list)
    """Offsets whose append was lost, with the number of appends that were kept instead."""

    @property
    def content(self) -> bytes:
        return b"".join(self.appends)

    def content_after(self, index: int) -> bytes:
        """What stands behind the offset that the append with this index was answered with."""
        return b"".join(self.appends[index:])

    @property
    def is_weak(self) -> bool:
        return self.durability in ("ephemeral", "memory")

    def set_durability(self, durability: str) -> None:
        """What is there already is as safe as the stronger of the two classes makes it."""
        was_weak, self.durability = self.is_weak, durability
        if not (was_weak and self.is_weak):
            self.safe = len(self.appends)

    def loses(self, *, kill: bool) -> bool:
        """Whether a restart may cost the tail; where it may not, all that is there is safe then."""
        may = self.durability == "ephemeral" or (kill and self.durability == "memory")
        if not may:
            self.safe = len(self.appends)
        return may

    def lose(self, content: bytes) -> None:
        """Take what is left after a possible loss: a prefix, and at least what was promised."""
        kept = self.safe
        while b"".join(self.appends[:kept]) != content:
            kept += 1
            assert kept <= len(self.appends), (content, self.appends, self.safe)
        self.lost_offsets += [(offset, kept) for offset in self.offsets[kept:]]
        del self.appends[kept:], self.offsets[kept:]
        self.safe, self.lossy = kept, True

    def apply(self, request: Append) -> tuple[int, str | None]:
        """Status and, for a refusal, its code. Changes the stream exactly when the append is taken."""
        verdict = self._decide(request)
        if verdict[0] in (200, 204) and verdict[1] is None:
            self._take(request)
        return verdict[0], None if verdict[1] == "nothing" else verdict[1]

    def _decide(self, request: Append) -> tuple[int, str | None]:
        if not request.body and not request.close:
            return 400, "body_empty"
        if request.body and request.content_type is None:
            return 400, "content_type_missing"
        if self.closed:
            if request.producer is not None and request.producer == self.closed_by:
                return 204, "nothing"
            if request.producer is None and not request.body:
                return 204, "nothing"
            return 409, "stream_closed"
        if request.body and request.content_type != self.content_type:
            return 409, "content_type_mismatch"
        if request.producer is not None:
            refused = self._decide_producer(*request.producer)
            if refused is not None:
                return refused
        if (
            request.stream_seq is not None
            and self.stream_seq is not None
            and request.stream_seq.encode() <= self.stream_seq.encode()
        ):
            return 409, "sequence_conflict"
        return (200 if request.producer is not None and request.body else 204), None

    def _decide_producer(self, name: str, epoch: int, seq: int) -> tuple[int, str | None] | None:
        if name not in self.producers:
            return None if seq == 0 else (409, "producer_gap")
        known_epoch, last_seq = self.producers[name]
        if epoch < known_epoch:
            return 403, "producer_fenced"
        if epoch > known_epoch:
            return None if seq == 0 else (400, "producer_epoch_invalid")
        if seq <= last_seq:
            return 204, "nothing"
        return None if seq == last_seq + 1 else (409, "producer_gap")

    def _take(self, request: Append) -> None:
        if request.body:
            self.appends.append(request.body)
        if request.producer is not None:
            name, epoch, seq = request.producer
            self.producers[name] = (epoch, seq)
        if request.stream_seq is not None:
            self.stream_seq = request.stream_seq
        if request.close:
            self.closed, self.closed_by = True, request.producer
        if not self.is_weak:
            self.safe = len(self.appends)
