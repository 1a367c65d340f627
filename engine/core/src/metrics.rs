//! Metrics: one declarative table of counters and gauges, rendered as Prometheus text.
//!
//! Beside them one histogram per class: how long appends waited for their acknowledgement.
//! Counters are relaxed atomics: they are read by people, not by decisions.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::model::Class;

macro_rules! metrics {
    ($( $field:ident $kind:literal $name:literal $help:literal; )*) => {
        /// All metrics of one engine.
        #[derive(Default)]
        pub struct Metrics {
            $( pub $field: Counter, )*
            pub append_seconds: ClassHistogram,
        }

        impl Metrics {
            pub fn render(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(concat!(
                    "# HELP millstream_build_info Version of the running engine.\n# TYPE millstream_build_info gauge\n",
                    "millstream_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1\n",
                ).as_bytes());
                $(
                    out.extend_from_slice(concat!("# HELP ", $name, " ", $help, "\n# TYPE ", $name, " ", $kind, "\n", $name, " ").as_bytes());
                    out.extend_from_slice(self.$field.get().to_string().as_bytes());
                    out.push(b'\n');
                )*
                self.append_seconds.render(out);
            }

            /// Name, kind and help of every metric, for the generated documentation.
            pub const TABLE: &'static [(&'static str, &'static str, &'static str)] = &[ $( ($name, $kind, $help), )* ];
        }
    };
}

metrics! {
    appends "counter" "millstream_appends_total" "Appends accepted (creates with content included).";
    append_bytes "counter" "millstream_append_bytes_total" "Bytes of accepted appends as stored.";
    append_duplicates "counter" "millstream_append_duplicates_total" "Appends answered as a producer's duplicate.";
    creates "counter" "millstream_streams_created_total" "Streams created.";
    deletes "counter" "millstream_streams_deleted_total" "Streams deleted or expired.";
    reads "counter" "millstream_reads_total" "Catch-up, long-poll and SSE reads started.";
    read_bytes "counter" "millstream_read_bytes_total" "Body bytes handed to readers.";
    fork_lookups "counter" "millstream_fork_lookups_total" "Ancestors looked up by reads of forks.";
    list_looks "counter" "millstream_list_looks_total" "Streams examined by listings.";
    searched_bytes "counter" "millstream_message_search_bytes_total" "Bytes searched by requests for the start of a message.";
    requests "counter" "millstream_requests_total" "HTTP requests parsed.";
    refusals "counter" "millstream_refusals_total" "Requests answered with an error.";
    connections "gauge" "millstream_connections" "Open connections.";
    connections_refused "counter" "millstream_connections_refused_total" "Connections refused at the limit.";
    timeouts "counter" "millstream_connection_timeouts_total" "Connections ended because a client was too slow.";
    inflight_bytes "gauge" "millstream_inflight_bytes" "Request bytes buffered for bodies that are still arriving.";
    client_bytes "gauge" "millstream_client_bytes" "Bytes held for clients: answers that they have not taken, requests that wait.";
    client_bytes_full "counter" "millstream_client_bytes_full_total" "Times client_bytes_max prevented something from being buffered.";
    sse_subscribers "gauge" "millstream_sse_subscribers" "Open SSE readers.";
    long_polls "gauge" "millstream_long_polls" "Waiting long-poll readers.";
    streams_cached "gauge" "millstream_streams_cached" "Streams held in memory.";
    hot_bytes "gauge" "millstream_hot_bytes" "Memory of bytes not yet checkpointed, with their index.";
    ephemeral_bytes "gauge" "millstream_ephemeral_bytes" "Memory of bytes of ephemeral streams, with their index.";
    ephemeral_kept_bytes "gauge" "millstream_ephemeral_kept_bytes" "Memory of ephemeral streams that have bytes, beside those: it cannot go to files.";
    spilled_bytes "counter" "millstream_ephemeral_spilled_bytes_total" "Bytes of ephemeral streams written to files for lack of memory.";
    batches "counter" "millstream_wal_batches_total" "Group commits written.";
    batch_bytes "counter" "millstream_wal_bytes_total" "Bytes written to the log.";
    batches_inline "counter" "millstream_wal_batches_inline_total" "Group commits made by a reactor itself.";
    sync_us "counter" "millstream_wal_sync_microseconds_total" "Time spent in log syncs.";
    wal_failed "gauge" "millstream_wal_failed" "1 when a log write or sync has failed and writes are refused.";
    producer_bytes "gauge" "millstream_producer_bytes" "Memory of the producers that streams in memory remember.";
    dirty_producer_bytes "gauge" "millstream_dirty_producer_bytes" "Catalog space that the next checkpoint needs for producers of changed streams.";
    wal_full "gauge" "millstream_storage_full" "1 while appends are refused for lack of disk space.";
    wal_retained_bytes "gauge" "millstream_wal_retained_bytes" "Log bytes not yet covered by a checkpoint.";
    checkpoints "counter" "millstream_checkpoints_total" "Checkpoints completed.";
    checkpoint_failures "counter" "millstream_checkpoint_failures_total" "Checkpoints that failed and will be retried.";
    checkpoint_us "counter" "millstream_checkpoint_microseconds_total" "Time spent in checkpoints.";
    loads "counter" "millstream_cold_loads_total" "Times that something was fetched from the disk for requests that waited for it.";
    loads_waiting "gauge" "millstream_cold_loads_waiting" "Things that requests wait for to be fetched from the disk.";
    loads_refused "counter" "millstream_cold_loads_refused_total" "Requests refused because too much was to be fetched from the disk.";
    read_errors "counter" "millstream_read_errors_total" "Reads that failed on disk or checksum.";
    damaged_ranges "gauge" "millstream_damaged_ranges" "Ranges of streams that cannot be read back: their readers get a gap.";
    scrubbed_bytes "counter" "millstream_scrubbed_bytes_total" "Bytes at rest that the scrub has checked.";
    scrub_passes "counter" "millstream_scrub_passes_total" "Completed passes of the scrub over all data.";
    pipeline_requests "counter" "millstream_pipeline_requests_total" "Requests to the pipeline paths.";
    pipeline_queue "gauge" "millstream_pipeline_queue" "Pipeline requests and large writes that wait for a worker.";
    pipeline_waiting "gauge" "millstream_pipeline_waiting" "Requests to /v1/tails that wait for a change, for slow patterns to be compared, or for streams that are not final yet.";
    pipeline_waiting_bytes "gauge" "millstream_pipeline_waiting_bytes" "Memory of requests to /v1/tails that wait or are being processed.";
    pipeline_answer_bytes "gauge" "millstream_pipeline_answer_bytes" "Bytes of pipeline answers that clients have not taken yet, and room for those that are being made.";
    pipeline_read_rows "counter" "millstream_pipeline_read_rows_total" "Rows returned by /v1/read.";
    pipeline_read_bytes "counter" "millstream_pipeline_read_bytes_total" "Bytes of Arrow returned by /v1/read.";
    stages_waiting "gauge" "millstream_stages_waiting" "Stages that wait for a commit.";
    stages_waiting_bytes "gauge" "millstream_stages_waiting_bytes" "Bytes of files of stages that wait for a commit.";
    staging_bytes "gauge" "millstream_staging_bytes" "Memory that stages being written and commits being made take in addition to the bodies of their requests.";
    stages_expired "counter" "millstream_stages_expired_total" "Stages that nobody committed in time.";
    commits "counter" "millstream_commits_total" "Commits of staged records.";
    commit_duplicates "counter" "millstream_commit_duplicates_total" "Commits answered as a repetition.";
    committed_rows "counter" "millstream_committed_rows_total" "Records appended by commits.";
    committed_bytes "counter" "millstream_committed_bytes_total" "Bytes appended by commits, as stored.";
    control_requests "counter" "millstream_control_requests_total" "Requests forwarded to the control plane.";
    control_calls "gauge" "millstream_control_calls" "Requests that the control plane works on, those included whose clients have left.";
    control_waiting "gauge" "millstream_control_waiting" "Requests to the control plane that wait for slow work; each kind has its own bound.";
    control_crowded "counter" "millstream_control_crowded_total" "Requests refused because too many of their kind were waiting.";
    subscription_links "gauge" "millstream_subscription_links" "Streams that subscriptions follow, counted once for each subscription.";
    subscription_link_bytes "gauge" "millstream_subscription_link_bytes" "Memory that is counted for the streams that subscriptions follow.";
    subscription_offsets "gauge" "millstream_subscription_offsets" "Those of them that take memory of their own: the subscription has not acknowledged everything.";
    webhooks_waiting "gauge" "millstream_webhooks_waiting" "Webhook requests that wait for their turn.";
    webhook_lookups "gauge" "millstream_webhook_lookups" "Names of webhook receivers that are being looked up.";
    webhooks "counter" "millstream_webhooks_total" "Webhook requests that the receiver accepted.";
    webhook_failures "counter" "millstream_webhook_failures_total" "Webhook requests that were not delivered, or not allowed; each is retried.";
}

/// A relaxed atomic number.
#[derive(Default)]
pub struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self, value: u64) {
        self.0.fetch_add(value, Relaxed);
    }

    /// Adds; returns what it was before.
    pub fn raise(&self, value: u64) -> u64 {
        self.0.fetch_add(value, Relaxed)
    }

    pub fn sub(&self, value: u64) {
        self.0.fetch_sub(value, Relaxed);
    }

    pub fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Upper bounds of the buckets in microseconds; what is longer is only in the total.
const BUCKETS_US: [u64; 15] = [
    50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000,
    1_000_000, 5_000_000,
];
pub const APPEND_SECONDS: (&str, &str, &str) = (
    "millstream_append_seconds",
    "histogram",
    "Time from a whole append request to its acknowledgement, by class.",
);

/// Time to acknowledgement, for each class apart.
#[derive(Default)]
pub struct ClassHistogram {
    classes: [Histogram; Class::ALL.len()],
}

#[derive(Default)]
struct Histogram {
    /// The last one is for what no bucket holds.
    buckets: [Counter; BUCKETS_US.len() + 1],
    sum_us: Counter,
}

impl ClassHistogram {
    pub fn observe(&self, class: Class, took_us: u64) {
        let histogram = &self.classes[class as usize];
        let bucket = BUCKETS_US.partition_point(|bound| *bound < took_us);
        histogram.buckets[bucket].add(1);
        histogram.sum_us.add(took_us);
    }

    fn render(&self, out: &mut Vec<u8>) {
        let (name, kind, help) = APPEND_SECONDS;
        let mut text = format!("# HELP {name} {help}\n# TYPE {name} {kind}\n");
        for class in Class::ALL.into_iter().filter(|class| class.available()) {
            let histogram = &self.classes[class as usize];
            let class = class.name();
            let mut count = 0;
            for (number, bucket) in histogram.buckets.iter().enumerate() {
                count += bucket.get();
                let bound = BUCKETS_US
                    .get(number)
                    .map_or("+Inf".into(), |bound| seconds(*bound));
                text += &format!("{name}_bucket{{class=\"{class}\",le=\"{bound}\"}} {count}\n");
            }
            let sum = seconds(histogram.sum_us.get());
            text += &format!("{name}_sum{{class=\"{class}\"}} {sum}\n");
            text += &format!("{name}_count{{class=\"{class}\"}} {count}\n");
        }
        out.extend_from_slice(text.as_bytes());
    }
}

fn seconds(value_us: u64) -> String {
    format!("{}", value_us as f64 / 1e6)
}
