//! Every bound of the engine in one place.
//!
//! Bounds that an operator may move are fields of [`crate::config::Config`]; what stands here is fixed by the
//! formats or protects the process itself. Compile-time assertions below keep their relations true.

use std::time::Duration;

/// Longest stream path below `/v1/stream/`, in bytes after percent-decoding.
pub const PATH_MAX_BYTES: usize = 1024;
/// Longest request head (request line and headers).
pub const HEAD_MAX_BYTES: usize = 16 * 1024;
/// Longest `Content-Type`, `Producer-Id`, `Stream-Seq`: they are stored, so they are bounded.
pub const CONTENT_TYPE_MAX_BYTES: usize = 256;
pub const PRODUCER_ID_MAX_BYTES: usize = 256;
pub const STREAM_SEQ_MAX_BYTES: usize = 256;
/// Producer ids remembered per stream; the one that was silent longest leaves first.
pub const PRODUCERS_PER_STREAM_MAX: usize = 10_000;
/// What a stream in memory may take for its producers before it counts as more than one of `streams_cached_max`.
pub const PRODUCER_BYTES_PER_CACHED_STREAM: u64 = 32 * 1024;
/// Producers may take twice that of all streams, and this much in any case, before nobody new is remembered.
pub const PRODUCER_BYTES_MIN: u64 = 64 << 20;
/// Largest integer a JavaScript client can carry exactly; producer epochs and sequences stay below.
pub const SAFE_INTEGER_MAX: u64 = (1 << 53) - 1;
/// Offsets are two decimals of 16 digits.
pub const OFFSET_PART_MAX: u64 = 9_999_999_999_999_999;
/// Epochs that one data directory may use: from a multiple of this up to the next. A restore begins the next range, which
/// nothing that the backed-up server does can reach. 16 digits hold a thousand ranges.
pub const EPOCHS_PER_DIRECTORY: u64 = 10_000_000_000_000;
/// Wall clocks count for epochs up to here (the year 2128): what is left of a range is for counting on.
pub const EPOCH_CLOCK_MAX_MS: u64 = 5_000_000_000_000;
/// TTLs above a hundred years are refused instead of overflowing date arithmetic.
pub const TTL_MAX_SECONDS: u64 = 100 * 366 * 24 * 3600;

/// Bytes one group commit may hold before further appends wait for the next.
pub const BATCH_MAX_BYTES: usize = 8 * 1024 * 1024;
/// WAL room that only delete, close, trim and checkpoint marks may use.
pub const WAL_RESERVE_BYTES: u64 = 256 * 1024;
/// First WAL file of a start: small, so that starting is fast.
pub const WAL_FIRST_FILE_BYTES: u64 = 4 * 1024 * 1024;
/// Prewritten WAL files kept ready behind the current one.
pub const WAL_SPARE_FILES: usize = 1;
/// A staged section of at least this many bytes stays where it was staged; smaller ones are copied by the checkpoint.
pub const ADOPT_MIN_BYTES: u64 = 4 * 1024 * 1024;
/// A commit of at most this many bytes goes into the log itself.
pub const COMMIT_COPY_MAX_BYTES: u64 = 256 * 1024;
/// What a commit may take in the log; it is one batch.
pub const COMMIT_FRAMES_MAX_BYTES: usize = BATCH_MAX_BYTES;
/// Staged records of JSON streams share an index entry up to this many bytes: windows of readers end at entries.
pub const STAGE_ENTRY_BYTES: u64 = 256 * 1024;
/// What a refusal says about the request.
pub const REFUSAL_DETAIL_MAX_BYTES: usize = 1024;
/// Rows of one stage: each may take an entry of the index.
pub const STAGE_ROWS_MAX: u64 = 1_000_000;
/// Memory that stages and commits under way may take together, beside the bodies of requests; one alone may take more.
pub const STAGING_MAX_BYTES: u64 = 256 * 1024 * 1024;
/// Streams of one stage or commit, and stages of one commit.
pub const STAGE_STREAMS_MAX: usize = 20_000;
pub const COMMIT_STAGES_MAX: usize = 20_000;
/// Producers of commits remembered per stream; the one that was silent longest leaves first.
pub const COMMITTERS_PER_STREAM_MAX: usize = 4_096;
/// Ids of committed stages remembered, so that their removal is refused.
pub const COMMITTED_STAGES_MAX: usize = 200_000;
/// Streams remembered of each of them: all streams of a commit know its producer, so that a part tells a repetition.
pub const COMMITTED_STREAMS_MAX: usize = 32;
/// Streams written per catalog transaction of a checkpoint.
pub const CHECKPOINT_CHUNK_STREAMS: usize = 20_000;
/// Hot bytes may grow to this multiple of `checkpoint_bytes` before appends wait.
pub const HOT_BYTES_FACTOR: u64 = 4;
/// ... but to this much in any case: a restart may find a little more than the bound in the log.
pub const HOT_BYTES_MIN: u64 = 16 << 20;
/// Possible losses remembered, one per start; an offset of an older, empty epoch is then refused.
pub const LOSSES_MAX: usize = 4096;
/// Damaged ranges remembered per stream; more melt into fewer, larger ones.
pub const DAMAGED_RANGES_MAX: usize = 4096;
/// Streams that wait for the scrub out of turn.
pub const SUSPECTS_MAX: usize = 65_536;
/// Epochs that a fork knows besides its first: it forgets the oldest, whose offsets then read it from the start.
pub const FORK_EPOCHS_MAX: usize = 32;
/// Inherited pieces of a fork, each of another ancestor, that one request reads: its window ends behind them.
pub const FORK_PIECES_MAX: usize = 64;
/// Staged packs that one window reads from: it ends behind them. A reactor's look needs all their files open together, as
/// those of others do.
pub const STAGED_PIECES_MAX: usize = 16;
/// Streams of a chain that a request purges itself; the rest of the chain is left to maintenance.
pub const PURGES_PER_REQUEST_MAX: usize = 16;
/// Threads that wait for the disk in place of reactors, and things they are asked for at once; more requests are refused.
pub const LOAD_THREADS: usize = 4;
pub const LOADS_MAX: usize = 1024;
/// Bytes of a large body that are brought into the page cache at once.
pub const LOAD_AHEAD_BYTES: usize = 1024 * 1024;
/// Appends of more than this many bytes are searched for their messages by a thread, and how many of them are remembered
/// with points in steps of so many bytes.
pub const MARKED_APPEND_MIN_BYTES: u64 = 256 * 1024;
pub const MARKED_APPENDS_MAX: usize = 1024;
pub const MARK_STEP_BYTES: u32 = 64 * 1024;
/// Bodies of at least this many bytes are looked through only where nothing else keeps them from being stored, and when it
/// is their turn: an array takes a reactor milliseconds.
pub const COSTLY_BODY_BYTES: usize = 16 * 1024;
/// Bodies of at least this many bytes are looked through and stored by a worker: a reactor would stand still for it.
pub const LARGE_WRITE_BYTES: usize = 1024 * 1024;
/// Batches above this many bytes are written by the commit thread, never by a reactor.
pub const INLINE_COMMIT_MAX_BYTES: usize = 1024 * 1024;
/// Files kept open by the cold store.
pub const OPEN_FILES_MAX: usize = 256;

/// How long anything waits for the log: then it is refused, and a stop goes on without it.
pub const LOG_PATIENCE_MS: u64 = 30_000;
pub const LOG_PATIENCE: Duration = Duration::from_millis(LOG_PATIENCE_MS);

/// One read from a socket.
pub const RECEIVE_BYTES: usize = 256 * 1024;
/// One piece of a body on its way to a socket.
pub const SEND_PIECE_BYTES: usize = 256 * 1024;
/// A connection with this much unsent output is not read from.
pub const OUTPUT_PAUSE_BYTES: usize = 1024 * 1024;
/// A read behind this much unsent output waits until it has left.
pub const READ_AHEAD_BYTES: usize = 64 * 1024;
/// What a connection may buffer without being counted against `client_bytes_max`.
pub const CONNECTION_FREE_BYTES: usize = 16 * 1024;
/// When that is used up: unsent output behind which nothing more is answered, and one read from a socket.
pub const TIGHT_OUTPUT_BYTES: usize = 4 * 1024;
pub const TIGHT_RECEIVE_BYTES: usize = 2 * 1024;
/// Memory goes back to the system when the process takes so much more than is held, for so long; again after a pause that grows.
/// Where it is so much more, no pause is made.
pub const EBB_MIN_BYTES: u64 = 64 * 1024 * 1024;
pub const EBB_MUCH_BYTES: u64 = 256 * 1024 * 1024;
pub const EBB_US: u64 = 2_000_000;
pub const EBB_PAUSE_US: u64 = 10_000_000;
pub const EBB_PAUSE_MAX_US: u64 = 320_000_000;
/// Pipelined requests whose replies wait for the log, per connection.
pub const PIPELINE_MAX: usize = 4096;
/// Bytes of one SSE data event rendered from a backlog (a single larger record still is one event).
pub const SSE_WINDOW_BYTES: u64 = 128 * 1024;
/// Stored bytes of an event that are rendered at once, and when `client_bytes_max` is used up. Whole base64 groups. Of text
/// whose lines are short it is the rendered bytes that count.
pub const SSE_PIECE_BYTES: u64 = 192 * 1024;
pub const TIGHT_SSE_PIECE_BYTES: u64 = 24 * 1024;
/// Rendered pieces that a reactor keeps for the next readers.
pub const SSE_PIECES_KEPT: usize = 8;
/// Bodies and answers that pass through the control plane.
pub const PROXY_REQUEST_MAX_BYTES: usize = 1024 * 1024;
pub const PROXY_RESPONSE_MAX_BYTES: usize = 8 * 1024 * 1024;
pub const PROXY_TIMEOUT_MS: u64 = 30_000;
/// Requests under way to the control plane at once.
pub const PROXY_CONCURRENT_MAX: usize = 256;
/// Those of them with bodies above so many bytes, which take the control plane longer than all others.
pub const PROXY_LARGE_MAX: usize = PROXY_CONCURRENT_MAX / 4;
pub const PROXY_LARGE_BYTES: usize = 64 * 1024;
/// Bodies of the pipeline paths: questions and commits, and staged rows.
pub const PIPELINE_REQUEST_MAX_BYTES: usize = 8 * 1024 * 1024;
pub const STAGE_REQUEST_MAX_BYTES: usize = 64 * 1024 * 1024;
/// Pipeline requests that wait for a worker, and large writes that do; more are refused.
pub const PIPELINE_QUEUE_MAX: usize = 256;
/// Questions of at most so many bytes that name their streams have a thread of their own.
pub const SMALL_QUESTION_BYTES: usize = 4 * 1024;
/// The same for reads of at most so many bytes of streams.
pub const SMALL_READ_BYTES: u64 = 256 * 1024;
/// Stages and commits never wait behind reads, and those of at most so many bytes not behind larger ones.
pub const SMALL_STAGE_BYTES: usize = 256 * 1024;
pub const STAGE_WORKERS: usize = 2;
/// Threads for large writes, which never wait behind questions and reads of the pipeline.
pub const WRITE_WORKERS: usize = 2;
/// How long names are compared for one question: at first, how many times longer after each turn that did not do,
/// and at most.
pub const PATTERN_TURN: Duration = Duration::from_millis(5);
pub const PATTERN_TURN_GROWTH: u32 = 8;
pub const PATTERN_SEARCH_MAX: Duration = Duration::from_secs(1);
/// How long a question may wait for a turn that does.
pub const PATTERN_PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of finished pipeline answers that clients have not taken yet; above this new ones are refused.
pub const PIPELINE_ANSWERS_MAX_BYTES: u64 = 512 * 1024 * 1024;
/// The same for answers that are small: those who take large ones slowly must not shut everybody out.
pub const PIPELINE_SMALL_ANSWER_BYTES: usize = 256 * 1024;
pub const PIPELINE_SMALL_ANSWERS_MAX_BYTES: u64 = PIPELINE_ANSWERS_MAX_BYTES + 64 * 1024 * 1024;
/// Streams that one question to `/v1/tails` may be about, and places that it may ask for.
pub const TAILS_STREAMS_MAX: usize = 20_000;
pub const TAILS_PLACES_MAX: usize = 100_000;
/// How long such a question may wait for an answer, and how many may wait at once.
pub const TAILS_WAIT_MAX_MS: u64 = 60_000;
pub const TAILS_WAITING_MAX: usize = 1024;
/// Memory of questions that wait: their names, and their patterns as programs. Above this more are refused.
pub const TAILS_WAITING_MAX_BYTES: u64 = 64 * 1024 * 1024;
/// Removed streams remembered for those who ask what has changed.
pub const REMOVED_STREAMS_MAX: usize = 4096;
/// Removed streams whose end is remembered: how many, how much memory they take, and how long.
pub const ENDINGS_MAX: usize = 65_536;
pub const ENDINGS_MAX_BYTES: usize = 24 * 1024 * 1024;
pub const ENDINGS_MAX_AGE_MS: u64 = 7 * 24 * 3600 * 1000;
/// Longest pattern of stream names, and how large a program it may become.
pub const PATTERN_MAX_BYTES: usize = 4096;
pub const PATTERN_PROGRAM_MAX_BYTES: usize = 1 << 20;
/// Letters whose case a pattern may look up while it is compiled, 5 to 7 ns each: 40 to 57 ms. A class of all
/// letters has 1.1 million. The most
/// that was measured of anything else is 60 ms, on a busy machine.
pub const PATTERN_FOLDED_MAX: u64 = 8_000_000;
/// One window of `/v1/read`: its bytes, its ranges, and gaps that fit into a header.
pub const READ_MAX_BYTES: u64 = 64 * 1024 * 1024;
pub const READ_MAX_BYTES_DEFAULT: u64 = 8 * 1024 * 1024;
pub const READ_RANGES_MAX: usize = 20_000;
/// Bytes of appends that one window looks through for its records, about: others wait for the worker, and a stop does.
/// Of a small read it is `SMALL_READ_BYTES`.
pub const READ_LOOKED_THROUGH_MAX: u64 = 4 * READ_MAX_BYTES;
pub const READ_GAPS_MAX: usize = 200;
/// Dirty stream paths kept for the control plane before it is told to rescan.
pub const DIRTY_PATHS_MAX: usize = 65_536;
/// How long changed names are compared with what is watched before those are told of that are.
pub const FEED_TURN: Duration = Duration::from_millis(20);
/// Entries of one listing page.
pub const LIST_MAX: usize = 10_000;
/// Streams that a page may look at beyond those on it: deleted ones that are kept for forks, and expired ones.
pub const LIST_LOOKS_SPARE: usize = 4_000;
/// `?tail=N` looks back at most this many records.
pub const TAIL_RECORDS_MAX: u64 = 1_000_000;
/// Events taken from epoll at once.
pub const EVENTS_MAX: usize = 1024;
/// Reactor threads: a stream's watchers are a bit mask.
pub const REACTORS_MAX: usize = 64;

const _: () = assert!(EPOCH_CLOCK_MAX_MS < EPOCHS_PER_DIRECTORY);
const _: () = assert!((OFFSET_PART_MAX + 1).is_multiple_of(EPOCHS_PER_DIRECTORY));
const _: () = assert!(WAL_RESERVE_BYTES < WAL_FIRST_FILE_BYTES);
const _: () = assert!(HEAD_MAX_BYTES < RECEIVE_BYTES);
const _: () = assert!(COMMIT_STAGES_MAX <= STAGE_STREAMS_MAX);
const _: () = assert!(PATH_MAX_BYTES < HEAD_MAX_BYTES);
const _: () = assert!(TIGHT_OUTPUT_BYTES + TIGHT_RECEIVE_BYTES <= CONNECTION_FREE_BYTES);
const _: () = assert!(SSE_WINDOW_BYTES <= SSE_PIECE_BYTES);
const _: () = assert!(SSE_PIECE_BYTES.is_multiple_of(3) && TIGHT_SSE_PIECE_BYTES.is_multiple_of(3));
