//! The scrub: everything at rest is read back at a set rate and compared with its checksums, so that damage is known
//! before a reader meets it, and large bodies, which the kernel moves unread, are covered at all.
//!
//! One thread of its own. It walks the catalog a page at a time without loading streams into memory; whoever met
//! damage elsewhere (reads, checkpoints) names the stream, and it is looked at out of turn.
//!
//! Invariants
//! - `I-SCRUB-1` What the catalog's page said may be old: a fault counts only if the stream, as it is now, has it.
//! - `I-SCRUB-2` Between two waits a bounded number of bytes is read, and every wait ends at a stop.

use crate::report;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::error::EngineError;
use crate::log::catalog::CatalogError;
use crate::log::checkpoint::META_DAMAGED;
use crate::log::cold::Fault;
use crate::model::{Extent, StreamId};
use crate::shard::engine::Engine;
use crate::stream::handle::Stream;
use crate::stream::snapshot;

/// Streams taken from the catalog at once.
const PAGE_STREAMS: usize = 256;
/// Entries looked at per step while known damage is counted.
const COUNT_PAGE_STREAMS: usize = 2_000;
/// Bytes between two looks at the clock (a single larger append is still read whole).
const PIECE_BYTES: u64 = 256 * 1024;
/// Shorter waits than this are put together.
const PAUSE_MIN_US: u64 = 20_000;
/// How fast a suspect is looked at where nothing else is.
const SUSPECT_BYTES_PER_SECOND: u64 = 8 << 20;
/// Longest sleep, and least time between two wishes for a checkpoint that saves what was found.
const TURN: Duration = Duration::from_secs(1);

/// It is time to stop.
struct Stopped;

/// How far the scrub is.
#[derive(Default)]
struct Progress {
    /// Last path of the pass under way; `None` between two passes.
    after: Option<Vec<u8>>,
    /// When the last pass began.
    began_us: Option<u64>,
    saved_us: u64,
    owed_us: u64,
}

impl Engine {
    /// Takes over what the last run knew, so that readiness is right from the first answer on.
    pub fn recall_damage(&self) -> Result<(), EngineError> {
        let meta = self.directory.catalog().meta(META_DAMAGED);
        let meta = meta.map_err(|error| EngineError::new("catalog_damaged", error.to_string()))?;
        if let Some(count) = meta.and_then(|bytes| bytes.try_into().ok()) {
            self.directory.damaged.tell(u64::from_le_bytes(count));
        }
        Ok(())
    }

    /// The scrub thread's loop.
    pub fn run_scrub(&self) {
        let mut progress = Progress::default();
        if self.count_damage().is_err() {
            return;
        }
        while self.scrub_turn(&mut progress).is_ok() {}
    }

    fn scrub_turn(&self, progress: &mut Progress) -> Result<(), Stopped> {
        while let Some(id) = self.directory.damaged.next_suspect() {
            self.scrub_suspect(id, progress)?;
        }
        let now_us = self.doors.clock.monotonic_us();
        if now_us.saturating_sub(progress.saved_us) >= TURN.as_micros() as u64
            && self.directory.damaged.take_unsaved()
        {
            progress.saved_us = now_us;
            self.maintenance.request_checkpoint();
        }
        if !self.pass_is_under_way(progress, now_us) {
            let goes_on = self.directory.damaged.wait_for_suspect(TURN);
            return goes_on.then_some(()).ok_or(Stopped);
        }
        let after = progress.after.take().unwrap_or_default();
        progress.after = self.scrub_page(after, progress)?;
        if progress.after.is_none() {
            self.metrics.scrub_passes.add(1);
        }
        Ok(())
    }

    fn pass_is_under_way(&self, progress: &mut Progress, now_us: u64) -> bool {
        if progress.after.is_some() {
            return true;
        }
        let interval_us = self.config.scrub_interval_s.saturating_mul(1_000_000);
        let due = progress
            .began_us
            .is_none_or(|began| now_us.saturating_sub(began) >= interval_us);
        if self.config.scrub_bytes_per_second == 0 || !due {
            return false;
        }
        progress.began_us = Some(now_us);
        progress.after = Some(Vec::new());
        true
    }

    /// Walks the catalog for streams whose damage is known, so that the sum is exact from then on.
    fn count_damage(&self) -> Result<(), Stopped> {
        let mut after = Vec::new();
        loop {
            let mut damaged = Vec::new();
            let (mut seen, mut last) = (0, Vec::new());
            let scanned = self.directory.catalog().scan(
                b"",
                &after,
                COUNT_PAGE_STREAMS,
                &mut |path, value| {
                    (seen, last) = (seen + 1, path.to_vec());
                    if snapshot::has_damage(value) {
                        damaged.push(path.to_vec());
                    }
                    !self.stopping.load(Ordering::Acquire)
                },
            );
            if let Err(error) = scanned {
                report!("the catalog could not be searched for damaged streams: {error}");
                return Ok(());
            }
            if self.stopping.load(Ordering::Acquire) {
                return Err(Stopped);
            }
            // Loading a stream notes its damage.
            for path in damaged
                .iter()
                .filter_map(|path| std::str::from_utf8(path).ok())
            {
                if let Err(error) = self.directory.get(path) {
                    report!("a damaged stream could not be loaded: {error}");
                }
            }
            if seen < COUNT_PAGE_STREAMS {
                self.directory.damaged.counted();
                return Ok(());
            }
            after = last;
            if !self.directory.damaged.pause(Duration::ZERO) {
                return Err(Stopped);
            }
        }
    }

    /// Checks the streams of one page; returns where the next one begins, `None` at the end.
    fn scrub_page(
        &self,
        after: Vec<u8>,
        progress: &mut Progress,
    ) -> Result<Option<Vec<u8>>, Stopped> {
        let mut page = Vec::new();
        let scanned =
            self.directory
                .catalog()
                .scan(b"", &after, PAGE_STREAMS, &mut |path, value| {
                    page.push((path.to_vec(), value.to_vec()));
                    !self.stopping.load(Ordering::Acquire)
                });
        if let Err(error) = scanned {
            self.metrics.read_errors.add(1);
            report!("scrub: the catalog could not be read: {error}");
            return Ok(None);
        }
        let more = page.len() == PAGE_STREAMS;
        let last = page.last().map(|(path, _)| path.clone());
        for (path, value) in page {
            match self.at_rest(&path, &value) {
                Ok(stream) => {
                    let extents = stream.lock().readable_extents();
                    self.scrub_extents(stream.id, &extents, progress)?;
                }
                Err(error) => {
                    self.metrics.read_errors.add(1);
                    report!("scrub: {error}");
                }
            }
        }
        Ok(last.filter(|_| more))
    }

    /// A stream as its catalog entry has it, outside of the directory.
    fn at_rest(&self, path: &[u8], value: &[u8]) -> Result<Stream, CatalogError> {
        snapshot::unseal(value)
            .and_then(|bytes| snapshot::decode(bytes, &|text| self.directory.intern(text)))
            .ok_or_else(|| {
                let path = String::from_utf8_lossy(path);
                CatalogError::Corrupt(format!("entry of stream {path:?} does not decode"))
            })
    }

    fn scrub_suspect(&self, id: StreamId, progress: &mut Progress) -> Result<(), Stopped> {
        match self.directory.get_by_id(id) {
            Ok(Some(stream)) => {
                let extents = stream.lock().readable_extents();
                self.scrub_extents(id, &extents, progress)
            }
            Ok(None) => Ok(()),
            Err(error) => {
                report!("scrub: {error}");
                Ok(())
            }
        }
    }

    fn scrub_extents(
        &self,
        id: StreamId,
        extents: &[Extent],
        progress: &mut Progress,
    ) -> Result<(), Stopped> {
        let mut checker = self.cold.checker();
        for extent in extents {
            let mut next = 0;
            while next < extent.index_count {
                match checker.check(extent, next, u64::MAX, PIECE_BYTES) {
                    Ok(checked) => {
                        next = checked.next;
                        self.metrics.scrubbed_bytes.add(checked.bytes);
                        self.confirm(id, &checked.faults);
                        self.keep_to_rate(progress, checked.bytes)?;
                    }
                    Err(error) => {
                        if error.kind() == std::io::ErrorKind::NotFound {
                            self.confirm(id, &[Fault::missing(extent, &error)]);
                        } else {
                            self.metrics.read_errors.add(1);
                            report!("scrub: {error}");
                        }
                        break;
                    }
                }
            }
        }
        Ok(())
    }

    /// Looks at faults again, in the stream as it is now.
    fn confirm(&self, id: StreamId, faults: &[Fault]) {
        if faults.is_empty() {
            return;
        }
        self.metrics.read_errors.add(1);
        let stream: Arc<Stream> = match self.directory.get_by_id(id) {
            Ok(Some(stream)) => stream,
            Ok(None) => return,
            Err(error) => return report!("scrub: {error}"),
        };
        let extents = stream.lock().readable_extents();
        for extent in extents.iter() {
            let touched = faults
                .iter()
                .filter(|fault| fault.start < extent.end() && extent.start < fault.end);
            let bounds = touched.fold(None, |bounds: Option<(u64, u64)>, fault| {
                let (start, end) = bounds.unwrap_or((fault.start, fault.end));
                Some((start.min(fault.start), end.max(fault.end)))
            });
            let Some((start, end)) = bounds else { continue };
            match self.look_between(&stream, extent, start, end) {
                Ok(faults) => self.record(&stream, &faults),
                Err(error) => report!("scrub: {error}"),
            }
        }
    }

    /// Waits as long as the bytes just read should have taken.
    fn keep_to_rate(&self, progress: &mut Progress, bytes: u64) -> Result<(), Stopped> {
        let rate = match self.config.scrub_bytes_per_second {
            0 => SUSPECT_BYTES_PER_SECOND,
            rate => rate,
        };
        progress.owed_us += bytes.saturating_mul(1_000_000) / rate;
        let pause = if progress.owed_us < PAUSE_MIN_US {
            Duration::ZERO
        } else {
            Duration::from_micros(std::mem::take(&mut progress.owed_us))
        };
        let goes_on = self.directory.damaged.pause(pause);
        goes_on.then_some(()).ok_or(Stopped)
    }
}
