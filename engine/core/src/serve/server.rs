//! The whole server: lock, bind, recover, then listen; and the way down again.

use crate::report;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::config::Config;
use crate::error::EngineError;
use crate::io::slow::SlowDisk;
use crate::io::{Doors, wanted};
use crate::limits::{LOAD_THREADS, OPEN_FILES_MAX};
use crate::log::lock::DirectoryLock;
use crate::serve::listener::Listener;
use crate::serve::pipeline::pool::Pipeline;
use crate::serve::pipeline::waits::Pace;
use crate::serve::reactor::Reactor;
use crate::shard::engine::Engine;

/// Below this much unsaved data a checkpoint at shutdown is worth its time.
const STOP_CHECKPOINT_BYTES: u64 = 16 << 20;

/// Without the mark the next start tells of losses that did not happen, so a slow disk is waited for.
const MARK_PATIENCE: Duration = Duration::from_secs(60);

/// Log files, catalog, epoll, control plane, Python's own.
const OTHER_DESCRIPTORS: usize = 128;

pub struct Server {
    pub engine: Arc<Engine>,
    pub listener: Option<Arc<Listener>>,
    threads: Mutex<Threads>,
    /// What a stop waits for now.
    awaited: Mutex<&'static str>,
    lock: Mutex<Option<DirectoryLock>>,
}

#[derive(Default)]
struct Threads {
    reactors: Vec<JoinHandle<()>>,
    pipeline: Option<Arc<Pipeline>>,
    workers: Vec<JoinHandle<()>>,
    log: Vec<JoinHandle<()>>,
    maintenance: Option<JoinHandle<()>>,
    scrub: Option<JoinHandle<()>>,
    loads: Vec<JoinHandle<()>>,
}

impl Server {
    /// Locks, binds and recovers. Commit and maintenance run from here on; nobody is listened to yet.
    pub fn open(mut config: Config, progress: &mut dyn FnMut(&str)) -> Result<Server, EngineError> {
        let lock = DirectoryLock::acquire(Path::new(&config.data_dir))?;
        config.connections_max = config.connections_max.min(connections_possible());
        let listener = if config.listen {
            Some(Arc::new(Listener::bind(&config.host, config.port)?))
        } else {
            None
        };
        let mut doors = Doors::real(&config.data_dir)
            .map_err(|error| EngineError::io(&config.data_dir, error))?;
        if config.fault_read_delay_ms > 0 {
            doors.disk = Arc::new(SlowDisk::new(doors.disk, config.fault_read_delay_ms));
        }
        let engine = Engine::open(config, doors, progress)?.engine;
        let mut threads = Threads::default();
        let committing = Arc::clone(&engine);
        threads.log.push(spawn("commit", move || {
            committing.shard.run_commit_thread()
        })?);
        let writing = Arc::clone(&engine);
        threads
            .log
            .push(spawn("write", move || writing.shard.run_write_thread())?);
        let maintaining = Arc::clone(&engine);
        let memory = engine.memory_without_clients();
        threads.maintenance = Some(spawn("maintain", move || {
            crate::serve::sys::give_way();
            maintaining.run_maintenance(memory)
        })?);
        let scrubbing = Arc::clone(&engine);
        threads.scrub = Some(spawn("scrub", move || {
            crate::serve::sys::give_way();
            scrubbing.run_scrub()
        })?);
        Ok(Server {
            engine,
            listener,
            threads: Mutex::new(threads),
            awaited: Mutex::default(),
            lock: Mutex::new(Some(lock)),
        })
    }

    /// Starts the reactors and listens.
    pub fn start(&self, control_socket: Option<&str>) -> Result<(), EngineError> {
        let Some(listener) = &self.listener else {
            return Ok(());
        };
        let failed = |error| EngineError::io("reactor", error);
        let mut threads = self.threads.lock();
        let pipeline = Arc::new(Pipeline::new(Arc::clone(&self.engine)));
        for (number, lane) in Pipeline::lanes().enumerate() {
            let working = Arc::clone(&pipeline);
            let worker = spawn(&format!("pipe-{number}"), move || working.work(lane))?;
            threads.workers.push(worker);
        }
        for (name, pace) in [("tails", Pace::Quick), ("tails-slow", Pace::Slow)] {
            let watching = Arc::clone(&pipeline);
            threads
                .workers
                .push(spawn(name, move || watching.watch(pace))?);
        }
        let waiting = Arc::clone(&pipeline);
        threads
            .workers
            .push(spawn("reads-aside", move || waiting.bring_back())?);
        threads.pipeline = Some(Arc::clone(&pipeline));
        for number in 0..LOAD_THREADS {
            let loading = Arc::clone(&self.engine);
            self.engine.count_load_thread();
            let thread = spawn(&format!("load-{number}"), move || loading.run_loads())?;
            threads.loads.push(thread);
        }
        for number in 0..self.engine.shard.mailboxes.len() {
            let socket = control_socket.map(str::to_owned);
            let mut reactor = Reactor::new(
                number,
                Arc::clone(&self.engine),
                Arc::clone(listener),
                Arc::clone(&pipeline),
                socket,
            )
            .map_err(failed)?;
            threads.reactors.push(spawn("reactor", move || {
                wanted::never_wait();
                if let Err(error) = reactor.run() {
                    report!("a reactor ended: {error}");
                }
            })?);
        }
        listener
            .listen()
            .map_err(|error| EngineError::io("listen", error))
    }

    /// What a stop waits for, and numbers that change while it gets on: streams left for a checkpoint; commits, and pieces
    /// of a checkpoint.
    pub fn stop_progress(&self) -> (&'static str, usize, u64) {
        let engine = &self.engine;
        let done = engine.metrics.batches.get() + engine.maintenance.pieces_done();
        (*self.awaited.lock(), engine.directory.dirty_count(), done)
    }

    /// Drains, syncs, writes the clean mark, releases the directory. Clients, and reads for them, are waited for until
    /// the deadline; what makes the data whole takes its time. Returns whether a checkpoint was written too.
    pub fn stop(&self, deadline: Duration) -> bool {
        let ends = Instant::now() + deadline;
        if self.engine.stopping.swap(true, Ordering::AcqRel) {
            return false;
        }
        self.engine.shard.feed.stop();
        self.engine.shard.ring_all();
        let mut threads = self.threads.lock();
        let waits_for = |what| *self.awaited.lock() = what;
        waits_for("connections");
        for reactor in threads.reactors.drain(..) {
            join(reactor, "reactor");
        }
        if let Some(pipeline) = threads.pipeline.take() {
            pipeline.stop();
        }
        waits_for("pipeline requests");
        for worker in threads.workers.drain(..) {
            join(worker, "pipeline");
        }
        // A disk that does not answer must not keep the server from ending.
        waits_for("reads of the disk");
        let loads_ended = self.engine.loads.stop(ends);
        if loads_ended {
            for thread in threads.loads.drain(..) {
                join(thread, "load");
            }
        }
        self.engine.maintenance.stop();
        self.engine.directory.damaged.stop();
        waits_for("the scrub");
        if let Some(thread) = threads.scrub.take() {
            join(thread, "scrub");
        }
        waits_for("maintenance");
        if let Some(thread) = threads.maintenance.take() {
            join(thread, "maintenance");
        }
        waits_for("a checkpoint");
        self.engine.purge_requested();
        let small = self.engine.metrics.hot_bytes.get() <= STOP_CHECKPOINT_BYTES
            && self.engine.directory.dirty_count() <= 20_000;
        let checkpointed = small
            && Instant::now() + Duration::from_millis(500) < ends
            && self.engine.checkpoint().is_ok();
        waits_for("the log");
        if !self.engine.write_clean_mark(MARK_PATIENCE) {
            report!(
                "the clean-shutdown mark could not be written; the next start will recover as after a crash"
            );
        }
        self.engine.shard.stop_threads();
        for thread in threads.log.drain(..) {
            join(thread, "log");
        }
        let lock = self.lock.lock().take();
        if !loads_ended {
            report!(
                "a thread still waits for the disk; the directory stays locked until the process ends"
            );
            std::mem::forget(lock);
        }
        checkpointed
    }
}

/// How many connections fit beside the files the engine needs. Raises the soft limit as far as it may.
fn connections_possible() -> usize {
    let limit = crate::serve::sys::raise_descriptor_limit();
    let reserve = (OPEN_FILES_MAX + OTHER_DESCRIPTORS).min(limit / 2);
    limit - reserve
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, EngineError> {
    std::thread::Builder::new()
        .name(format!("millstream-{name}"))
        .spawn(move || {
            // A server without one of its threads would listen and not answer: better to end and recover.
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).is_err() {
                report!("a thread has panicked; the process ends so that a restart recovers");
                std::process::abort();
            }
        })
        .map_err(|error| EngineError::io("thread", error))
}

/// Threads must not outlive the lock on the directory.
impl Drop for Server {
    fn drop(&mut self) {
        self.stop(Duration::from_millis(1500));
    }
}

fn join(thread: JoinHandle<()>, name: &str) {
    if thread.join().is_err() {
        report!("the {name} thread panicked");
    }
}

#[cfg(test)]
#[path = "server_tests.rs"]
mod tests;
