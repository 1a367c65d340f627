//! What an operator may set. The table with defaults and help lives in Python (`millstream.settings`), which
//! passes every value; the defaults here serve tests and embedding.

use crate::model::Class;

/// Which call of the log fails, counted from 1 since the start of the process; for tests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogFault {
    Sync(u64),
    Write(u64),
    /// Half of the batch is written, then the call fails.
    Short(u64),
}

impl LogFault {
    /// `sync:N`, `write:N` or `short:N`.
    pub fn parse(text: &str) -> Option<LogFault> {
        let (call, number) = text.split_once(':')?;
        let number = number.parse().ok().filter(|number| *number > 0)?;
        match call {
            "sync" => Some(LogFault::Sync(number)),
            "write" => Some(LogFault::Write(number)),
            "short" => Some(LogFault::Short(number)),
            _ => None,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Config {
    pub data_dir: String,
    pub host: String,
    pub port: u16,
    /// Whether to open a socket at all; an embedded engine does not.
    pub listen: bool,
    pub durability: Class,
    /// How long an acknowledged `disk` append may stay unsynced.
    pub disk_sync_ms: u64,
    /// Memory of `ephemeral` streams; what they hold beyond it goes to files that every start discards.
    pub ephemeral_bytes_max: u64,
    /// The directory comes from a backup: every stream begins a new epoch.
    pub restored: bool,
    pub long_poll_timeout_ms: u64,
    /// 0 = max(1, cores - 1).
    pub reactors: usize,
    pub read_window_bytes: u64,
    pub append_max_bytes: usize,
    pub connections_max: usize,
    pub inflight_bytes_max: u64,
    /// Bytes held for clients that do not take their answers; reads may use half of it.
    pub client_bytes_max: u64,
    pub header_timeout_ms: u64,
    pub body_timeout_ms: u64,
    pub idle_timeout_ms: u64,
    pub send_timeout_ms: u64,
    pub sse_lifetime_ms: u64,
    pub sse_keepalive_ms: u64,
    pub wal_file_bytes: u64,
    pub checkpoint_bytes: u64,
    pub streams_cached_max: usize,
    pub sweep_interval_ms: u64,
    /// How fast bytes at rest are checked; 0 = only what is suspect.
    pub scrub_bytes_per_second: u64,
    /// Least time from the beginning of one pass to the beginning of the next.
    pub scrub_interval_s: u64,
    /// Bytes of files that wait for a commit.
    pub stage_bytes_max: u64,
    /// How long a stage waits for its commit.
    pub stage_ttl_s: u64,
    pub insecure: bool,
    /// Scheme and authority of `Location` headers when a proxy stands in front.
    pub public_url: Option<String>,
    /// Origins of pages, besides the server's own, that may use subscriptions.
    pub subscription_origins: Vec<String>,
    /// Test door: every log sync takes at least this long.
    pub fault_sync_delay_ms: u64,
    /// ... and how long reads of files take that are not in the page cache.
    pub fault_read_delay_ms: u64,
    /// Test door: one call of the log fails.
    pub fault_fail: Option<LogFault>,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            data_dir: "./millstream-data".into(),
            host: "127.0.0.1".into(),
            port: 4437,
            listen: true,
            durability: Class::Fsync,
            disk_sync_ms: 20,
            ephemeral_bytes_max: 256 << 20,
            restored: false,
            long_poll_timeout_ms: 30_000,
            reactors: 0,
            read_window_bytes: 4 << 20,
            append_max_bytes: 16 << 20,
            connections_max: 10_000,
            inflight_bytes_max: 256 << 20,
            client_bytes_max: 64 << 20,
            header_timeout_ms: 10_000,
            body_timeout_ms: 30_000,
            idle_timeout_ms: 60_000,
            send_timeout_ms: 30_000,
            sse_lifetime_ms: 60_000,
            sse_keepalive_ms: 15_000,
            wal_file_bytes: 64 << 20,
            checkpoint_bytes: 64 << 20,
            streams_cached_max: 20_000,
            sweep_interval_ms: 1_000,
            scrub_bytes_per_second: 8 << 20,
            scrub_interval_s: 24 * 3600,
            stage_bytes_max: 4 << 30,
            stage_ttl_s: 3600,
            insecure: false,
            public_url: None,
            subscription_origins: Vec::new(),
            fault_sync_delay_ms: 0,
            fault_read_delay_ms: 0,
            fault_fail: None,
        }
    }
}

impl Config {
    pub fn reactor_count(&self) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, |count| count.get());
        let count = if self.reactors == 0 {
            cores.saturating_sub(1).max(1)
        } else {
            self.reactors
        };
        count.min(crate::limits::REACTORS_MAX)
    }

    /// A WAL file must hold the largest frame beside a full batch.
    pub fn wal_file_bytes_effective(&self) -> u64 {
        let need = (crate::limits::BATCH_MAX_BYTES + self.append_max_bytes + (1 << 20)) as u64;
        self.wal_file_bytes.max(need)
    }
}
