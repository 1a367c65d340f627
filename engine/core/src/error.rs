//! Errors: one stable code per cause, one table that maps it to HTTP.
//!
//! The same codes appear in problem documents, Python exceptions and on the command line.

macro_rules! error_codes {
    ($( $name:ident $code:literal $status:literal $title:literal $hint:literal; )*) => {
        /// The stable code of an error.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum ErrorCode { $( $name, )* }

        impl ErrorCode {
            pub const ALL: &'static [ErrorCode] = &[ $( ErrorCode::$name, )* ];
            pub fn code(self) -> &'static str { match self { $( ErrorCode::$name => $code, )* } }
            pub fn status(self) -> u16 { match self { $( ErrorCode::$name => $status, )* } }
            pub fn title(self) -> &'static str { match self { $( ErrorCode::$name => $title, )* } }
            pub fn hint(self) -> &'static str { match self { $( ErrorCode::$name => $hint, )* } }
        }
    };
}

error_codes! {
    BadRequest "bad_request" 400 "Bad request" "";
    OffsetInvalid "offset_invalid" 400 "Invalid offset" "Use -1, now, or an offset that the server returned.";
    OffsetBeyondTail "offset_beyond_tail" 400 "Offset beyond the tail" "The offset was not issued by this stream; read from -1 or now.";
    ContentTypeMissing "content_type_missing" 400 "Content-Type missing" "Send the stream's Content-Type with the body.";
    ContentTypeMismatch "content_type_mismatch" 409 "Content-Type mismatch" "Append with the content type the stream was created with.";
    BodyEmpty "body_empty" 400 "Empty body" "Send a body, or Stream-Closed: true to close the stream.";
    JsonInvalid "json_invalid" 400 "Invalid JSON" "The body must be one valid JSON value.";
    JsonEmpty "json_empty" 400 "Empty JSON array" "An append needs at least one message.";
    ProducerInvalid "producer_invalid" 400 "Invalid producer headers" "Send Producer-Id, Producer-Epoch and Producer-Seq together; epoch and seq are decimal integers below 2^53.";
    ProducerFenced "producer_fenced" 403 "Producer fenced" "Another producer with the same id has a higher epoch.";
    ProducerGap "producer_gap" 409 "Producer sequence gap" "Send the missing sequence numbers first; Producer-Expected-Seq says which is next.";
    ProducerEpochInvalid "producer_epoch_invalid" 400 "Producer epoch must begin at sequence 0" "The first append of a new epoch has Producer-Seq: 0.";
    SequenceConflict "sequence_conflict" 409 "Stream-Seq not increasing" "Stream-Seq must be greater, byte by byte, than the last accepted one.";
    StreamNotFound "stream_not_found" 404 "Stream not found" "Create it with PUT first.";
    StreamRecreated "stream_recreated" 409 "Stream re-created" "The stream was deleted and created again; its records are different ones.";
    TooManyStreams "too_many_streams" 400 "Too many streams" "Narrow the pattern, or ask for the streams in parts.";
    PatternInvalid "pattern_invalid" 400 "Invalid pattern" "A pattern is a regular expression without look-around and back references.";
    StreamGone "stream_gone" 410 "Stream deleted" "The stream was deleted; only its forks still use its data.";
    StreamClosed "stream_closed" 409 "Stream closed" "A closed stream takes no more appends.";
    StreamConflict "stream_conflict" 409 "Stream exists with a different configuration" "Delete it first, or create it with the same configuration.";
    ForkSourceMissing "fork_source_missing" 404 "Fork source not found" "Stream-Forked-From must name an existing stream.";
    ForkSourceGone "fork_source_gone" 409 "Fork source deleted" "A deleted stream cannot be forked.";
    ForkOffsetInvalid "fork_offset_invalid" 400 "Invalid fork offset" "Use an offset that the source returned.";
    PreconditionFailed "precondition_failed" 412 "Precondition failed" "The stream has moved on; Stream-Next-Offset is its tail.";
    PayloadTooLarge "payload_too_large" 413 "Payload too large" "Send less at once; of an append, append_max_bytes says how much.";
    HeadTooLarge "head_too_large" 431 "Request head too large" "";
    UriTooLong "uri_too_long" 414 "URI too long" "";
    RequestTimeout "request_timeout" 408 "Request timeout" "The request did not arrive in time.";
    MethodNotAllowed "method_not_allowed" 405 "Method not allowed" "";
    NotFound "not_found" 404 "Not found" "Streams live below /v1/stream/.";
    TooManyConnections "too_many_connections" 503 "Too many connections" "Try again shortly, or raise connections_max.";
    ServerBusy "server_busy" 503 "Server busy" "Try again shortly.";
    ShuttingDown "shutting_down" 503 "Shutting down" "Try again when the server is back.";
    OutcomeUnknown "outcome_unknown" 503 "Outcome unknown" "The log failed, or the server stopped, while the request was in progress; it may or may not have been done. Retry an append with a producer.";
    StorageFull "storage_full" 507 "Storage full" "Free disk space; writes resume by themselves.";
    ArrowInvalid "arrow_invalid" 400 "Invalid Arrow stream" "Send an uncompressed Arrow IPC stream with a column value (binary or utf8) and a column stream (utf8) or ?stream=NAME.";
    ChecksumMismatch "checksum_mismatch" 400 "Body does not match its checksum" "The body was corrupted in transit; send it again.";
    StageExists "stage_exists" 409 "Stage exists with different bytes" "Use a new id for each attempt.";
    StageGone "stage_gone" 404 "Stage not found" "The stage was dropped, or not committed within stage_ttl_s; stage the rows again.";
    StageCommitted "stage_committed" 409 "Stage committed" "A commit has already used this stage; nothing was changed.";
    StageMismatch "stage_mismatch" 409 "Stage has a different checksum" "Commit with the checksum that PUT returned.";
    StageFull "stage_full" 507 "Too many bytes staged" "Commit or delete stages, or raise stage_bytes_max.";
    DurabilityUnavailable "durability_unavailable" 501 "Durability class unavailable" "This server offers ephemeral, memory, disk and fsync.";
    DurabilityUnknown "durability_unknown" 400 "Unknown durability class" "One of ephemeral, memory, disk, fsync, quorum, object.";
    OriginRefused "origin_refused" 403 "Origin refused" "Only pages from the server's own origin may call this; subscription_origins allows other origins for subscriptions.";
    HostRefused "host_refused" 403 "Host refused" "A server on loopback accepts loopback host names here, and the host of public_url.";
    BackupRunning "backup_running" 409 "Backup running" "Wait for it, or cancel it.";
    BackupExists "backup_exists" 409 "Backup destination exists" "A backup creates its directory itself; choose another name.";
    BackupRefused "backup_refused" 403 "Backup refused" "Choose a destination below backup_dir and outside the data directory.";
    BackupNotFound "backup_not_found" 404 "Backup not found" "Only the most recent backups are remembered, and only until the server stops.";
    VerifyRunning "verify_running" 409 "Verification running" "Wait for it; GET /-/api/verify reports its progress.";
    ControlUnavailable "control_unavailable" 503 "Control plane unavailable" "Try again shortly.";
    ControlTimeout "control_timeout" 504 "Control plane timeout" "Try again shortly.";
    VersionNotSupported "version_not_supported" 505 "HTTP version not supported" "Use HTTP/1.1.";
    NotImplemented "not_implemented" 501 "Not implemented" "";
    ExpectationFailed "expectation_failed" 417 "Expectation failed" "Only 100-continue is supported.";
    Internal "internal" 500 "Internal error" "See the server's log.";
}

impl ErrorCode {
    /// Whether it is a statement about an offset, and not about the moment at which it was asked for.
    pub fn is_about_offset(self) -> bool {
        matches!(
            self,
            ErrorCode::BadRequest | ErrorCode::OffsetInvalid | ErrorCode::OffsetBeyondTail
        )
    }
}

/// Why the engine could not open, start or go on. Carries what an operator needs to read.
#[derive(Debug)]
pub struct EngineError {
    pub code: &'static str,
    pub detail: String,
}

impl EngineError {
    pub fn new(code: &'static str, detail: impl Into<String>) -> EngineError {
        EngineError {
            code,
            detail: detail.into(),
        }
    }

    pub fn io(what: &str, error: std::io::Error) -> EngineError {
        EngineError::new("io_error", format!("{what}: {error}"))
    }
}

impl std::fmt::Display for EngineError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.detail, self.code)
    }
}

impl std::error::Error for EngineError {}
