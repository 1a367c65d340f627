"""Every exception that Millstream raises, as one tree. Each carries the server's stable code.

    MillstreamError
    ├── ConnectionFailed          the server was not reached, or the connection broke
    │   └── RequestTimeout        it was reached, but did not answer in time
    ├── OutcomeUnknown            an append may or may not have happened
    ├── GapError                  records are missing between two offsets
    ├── InvalidArgument           this call cannot work (also a ValueError); nothing was sent
    ├── ProtocolError             the server sent something that is not the protocol
    ├── NotSupported              the server does not offer this feature
    ├── ClientClosed              the client was closed before this call
    ├── ProducerClosed            the producer was closed or failed before
    ├── SettingsError             a setting is wrong
    ├── OptionInvalid             an option of the Spark connector is unknown or wrong
    ├── SchemaMismatch            a schema given to the Spark connector does not fit
    ├── DataLoss                  records that a Spark query still had to read are gone
    ├── RecordMalformed           a record is not the JSON that FAILFAST demands
    ├── SetupError                something that this feature needs is missing or too old
    ├── PipelineError             a job of the data pipeline cannot go on
    │   └── CheckpointBusy        another run uses this checkpoint
    └── ServerError               the server refused; `.code` and `.status` say why
        ├── BadRequest            malformed request
        │   ├── OffsetInvalid     the offset is malformed or beyond the tail
        │   └── JsonInvalid       the body of a JSON stream is not JSON, or is empty
        ├── StreamNotFound        no stream at this path
        ├── StreamGone            the stream was deleted, or the offset is no longer kept
        ├── Conflict              the request contradicts the state of the stream
        │   ├── StreamClosed      the stream takes no more records
        │   ├── StreamRecreated   the stream was deleted and created anew
        │   ├── StreamConflict    the stream exists with a different configuration
        │   ├── ContentTypeMismatch
        │   ├── SequenceConflict  `seq` is not greater than the last one
        │   ├── ProducerGap       a producer sequence number was skipped
        │   ├── ProducerFenced    another producer with this id took over
        │   ├── PreconditionFailed  `if_match` is not the tail; `.tail` is
        │   └── StageConflict     the stage id is taken, its bytes differ, or it was committed
        ├── StageGone             no such stage: given up, or expired
        ├── PayloadTooLarge
        ├── RateLimited           too many requests; retried for you where that is safe
        ├── Unavailable           busy or shutting down; retried for you where that is safe
        │   └── InsufficientStorage   the server's disk is full
        ├── DurabilityUnavailable the class is unknown to, or not offered by, this server
        ├── Unauthorized          a proxy or gateway wants other credentials
        └── Forbidden             the origin or host of the request is refused

Where it sits: at the bottom; imported by everything, imports nothing.
Invariant I-ERR-1: `CODES` is the closed table of codes; each maps to exactly one class.
"""

# ruff: noqa: N818 - an error is named by what happened; each is below `MillstreamError`
from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from millstream.types import Gap


class MillstreamError(Exception):
    """Base of all errors. `str(error)` is one sentence; `.hint` says what to do about it."""

    code: str = "internal"
    retryable: bool = False

    def __init__(self, message: str, *, hint: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if code is not None:
            self.code = code

    def reworded(self, *, message: str | None = None, hint: str | None = None) -> Self:
        """The same error, in words that fit where it is shown."""
        self.message = message or self.message
        self.hint = hint or self.hint
        self.args = (self.message,)
        return self


class ConnectionFailed(MillstreamError):
    """The server was not reached, or the connection broke before the answer."""

    code = "unreachable"
    retryable = True


class RequestTimeout(ConnectionFailed):
    """The server did not answer in time."""

    code = "timeout"


class OutcomeUnknown(MillstreamError):
    """An append was sent and no answer came: it may or may not be in the stream.

    Use a producer (`stream.producer(...)`) when this must not happen: it may retry safely.
    """

    code = "outcome_unknown"


class GapError(MillstreamError):
    """Records between `.gap.from_offset` and `.gap.to_offset` cannot be read.

    Read on with `offset=error.gap.to_offset`, or pass `gaps="record"` or a callback.
    """

    code = "gap"

    def __init__(self, message: str, *, gap: Gap, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.gap = gap


class InvalidArgument(MillstreamError, ValueError):
    """The call cannot work as given; nothing was sent."""

    code = "invalid_argument"


class ProtocolError(MillstreamError):
    """The server's answer is not the Durable Streams protocol (a proxy or another server?)."""

    code = "protocol_error"


class NotSupported(MillstreamError):
    """The server does not offer what was asked for."""

    code = "not_supported"


class ClientClosed(MillstreamError):
    """The client was closed before this call."""

    code = "client_closed"


class ProducerClosed(MillstreamError):
    """The producer was closed, or failed before; its first error is the `__cause__`."""

    code = "producer_closed"


class SettingsError(MillstreamError):
    """A flag, environment variable or line of the settings file is wrong."""

    code = "settings_invalid"


class OptionInvalid(MillstreamError, ValueError):
    """An option of the Spark connector is unknown, or its value is wrong."""

    code = "option_invalid"


class SchemaMismatch(MillstreamError):
    """A schema given to the Spark connector does not fit its columns."""

    code = "schema_mismatch"


class DataLoss(MillstreamError):
    """Records that a Spark query still had to read are gone."""

    code = "data_loss"


class RecordMalformed(MillstreamError):
    """A record does not fit `valueSchema`, and `mode` is FAILFAST."""

    code = "record_malformed"


class SetupError(MillstreamError):
    """Something that this feature needs (Java, pyspark, ...) is missing or too old on this machine."""

    code = "setup_incomplete"


class PipelineError(MillstreamError):
    """A job of the data pipeline cannot go on; nothing that was published is touched."""

    code = "pipeline_failed"


class CheckpointBusy(PipelineError):
    """Another run of a job uses this checkpoint."""

    code = "checkpoint_busy"


class ServerError(MillstreamError):
    """The server refused the request."""

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int = 0,
        title: str | None = None,
        detail: str | None = None,
        hint: str | None = None,
        retry_after_seconds: float | None = None,
        tail: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint, code=code)
        self.status = status
        self.title = title
        self.detail = detail
        self.retry_after_seconds = retry_after_seconds
        self.tail = tail
        """`Stream-Next-Offset` of the answer, where the server sent one."""


class BadRequest(ServerError):
    """The server could not make sense of the request."""

    code = "bad_request"


class OffsetInvalid(BadRequest):
    """The offset is malformed, not at a record boundary, or beyond the tail."""

    code = "offset_invalid"


class JsonInvalid(BadRequest):
    """The body of a JSON stream is not valid JSON, or holds no record."""

    code = "json_invalid"


class StreamNotFound(ServerError):
    """There is no stream at this path (or it has expired)."""

    code = "stream_not_found"


class StreamGone(ServerError):
    """The stream was deleted but is kept for its forks, or the offset is no longer kept."""

    code = "stream_gone"


class Conflict(ServerError):
    """The request contradicts the state of the stream."""

    code = "stream_conflict"


class StreamClosed(Conflict):
    """The stream is closed: it can be read, but takes no more records."""

    code = "stream_closed"


class StreamRecreated(Conflict):
    """The stream was deleted and created anew: offsets of the old one mean nothing in it."""

    code = "stream_recreated"


class StreamConflict(Conflict):
    """The stream exists with a different configuration."""

    code = "stream_conflict"


class ContentTypeMismatch(Conflict):
    """The records are of another type than the stream."""

    code = "content_type_mismatch"


class SequenceConflict(Conflict):
    """`seq` is not greater than the last accepted one."""

    code = "sequence_conflict"


class ProducerGap(Conflict):
    """The server expects an earlier sequence number of this producer."""

    code = "producer_gap"
    expected_seq: int | None = None


class ProducerFenced(Conflict):
    """Another producer with the same id has claimed a newer epoch; this one must stop."""

    code = "producer_fenced"
    current_epoch: int | None = None


class PreconditionFailed(Conflict):
    """`if_match` is not the tail any more; `.tail` is the tail now."""

    code = "precondition_failed"


class StageConflict(Conflict):
    """The stage id holds other bytes, its checksum differs, or a commit has taken it."""

    code = "stage_exists"


class StageGone(ServerError):
    """There is no such stage: it was given up, or nobody committed it in time."""

    code = "stage_gone"


class PayloadTooLarge(ServerError):
    """The body, head or URL of the request is larger than the server allows."""

    code = "payload_too_large"


class RateLimited(ServerError):
    """Too many requests; `.retry_after_seconds` says when to come back."""

    code = "rate_limited"
    retryable = True


class Unavailable(ServerError):
    """The server is busy, starting or shutting down."""

    code = "server_busy"
    retryable = True


class InsufficientStorage(Unavailable):
    """The server's disk is full; it takes appends again when there is space."""

    code = "storage_full"


class DurabilityUnavailable(ServerError):
    """The durability class is unknown to this server or not offered by it."""

    code = "durability_unavailable"


class Forbidden(ServerError):
    """The server refuses requests from this origin or for this host."""

    code = "origin_refused"


class Unauthorized(ServerError):
    """The server, or a proxy in front of it, wants other credentials."""

    code = "unauthorized"


CODES: Final[dict[str, type[MillstreamError]]] = {
    "bad_request": BadRequest,
    "offset_invalid": OffsetInvalid,
    "offset_beyond_tail": OffsetInvalid,
    "content_type_missing": BadRequest,
    "content_type_mismatch": ContentTypeMismatch,
    "body_empty": BadRequest,
    "json_invalid": JsonInvalid,
    "json_empty": JsonInvalid,
    "producer_invalid": BadRequest,
    "producer_fenced": ProducerFenced,
    "producer_gap": ProducerGap,
    "producer_epoch_invalid": BadRequest,
    "sequence_conflict": SequenceConflict,
    "stream_not_found": StreamNotFound,
    "stream_gone": StreamGone,
    "stream_recreated": StreamRecreated,
    "too_many_streams": BadRequest,
    "pattern_invalid": BadRequest,
    "stream_closed": StreamClosed,
    "stream_conflict": StreamConflict,
    "fork_source_missing": StreamNotFound,
    "fork_source_gone": StreamConflict,
    "fork_offset_invalid": OffsetInvalid,
    "precondition_failed": PreconditionFailed,
    "payload_too_large": PayloadTooLarge,
    "head_too_large": PayloadTooLarge,
    "uri_too_long": PayloadTooLarge,
    "request_timeout": Unavailable,
    "method_not_allowed": BadRequest,
    "not_found": ServerError,
    "too_many_connections": Unavailable,
    "rate_limited": RateLimited,
    "server_busy": Unavailable,
    "shutting_down": Unavailable,
    "outcome_unknown": OutcomeUnknown,
    "storage_full": InsufficientStorage,
    "arrow_invalid": BadRequest,
    "checksum_mismatch": BadRequest,
    "stage_full": InsufficientStorage,
    "stage_exists": StageConflict,
    "stage_committed": StageConflict,
    "stage_mismatch": StageConflict,
    "stage_gone": StageGone,
    "durability_unavailable": DurabilityUnavailable,
    "durability_unknown": DurabilityUnavailable,
    "unauthorized": Unauthorized,
    "forbidden": Forbidden,
    "origin_refused": Forbidden,
    "host_refused": Forbidden,
    "backup_running": ServerError,
    "backup_exists": ServerError,
    "backup_refused": Forbidden,
    "backup_not_found": ServerError,
    "verify_running": ServerError,
    "control_unavailable": Unavailable,
    "control_timeout": Unavailable,
    "version_not_supported": ServerError,
    "not_implemented": NotSupported,
    "expectation_failed": BadRequest,
    "internal": ServerError,
}

REFUSED_UNAPPLIED_CODES: Final = frozenset(
    {
        "too_many_connections",
        "rate_limited",
        "server_busy",
        "shutting_down",
        "storage_full",
        "request_timeout",
    }
)
"""Codes by which the server promises that nothing of the request was applied."""
