//! `millstream._engine`: the engine's handle for Python. Converts values and releases the interpreter lock;
//! decides nothing.

mod backup;
mod settings;
mod tools;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use millstream_core::error::EngineError as CoreError;
use millstream_core::model::Class;
use millstream_core::refusal::Refusal;
use millstream_core::serve::server::Server;
use millstream_core::shard::backup::BackupOptions;
use millstream_core::shard::feed::Feed;
use millstream_core::shard::globs::{Globs, PARTS_MAX};
use millstream_core::shard::list::StreamInfo;
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

create_exception!(
    _engine,
    EngineError,
    PyException,
    "An engine error: code and detail."
);

fn engine_error(py: Python<'_>, code: &str, detail: &str) -> PyErr {
    let error = EngineError::new_err((code.to_owned(), detail.to_owned()));
    let value = error.value(py);
    match value
        .setattr("code", code)
        .and_then(|()| value.setattr("detail", detail))
    {
        Ok(()) => error,
        Err(failed) => failed,
    }
}

fn from_core(py: Python<'_>, error: &CoreError) -> PyErr {
    engine_error(py, error.code, &error.detail)
}

fn from_refusal(py: Python<'_>, refusal: &Refusal) -> PyErr {
    engine_error(py, refusal.code.code(), refusal.sentence())
}

/// From, to, reason, and whether bytes are missing for certain.
type GapTuple = (String, String, &'static str, bool);
/// Body, next offset, up to date, closed, and the gap before the body.
type ReadTuple<'py> = (Bound<'py, PyBytes>, String, bool, bool, Option<GapTuple>);

/// One open data directory.
#[pyclass(module = "millstream._engine", frozen)]
struct Engine {
    server: Server,
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (settings, progress = None))]
    fn new(
        py: Python<'_>,
        settings: &Bound<'_, PyDict>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Engine> {
        let config = settings::config_from(settings)?;
        let mut failed: Option<PyErr> = None;
        let opened = py.detach(|| {
            Server::open(config, &mut |line| {
                if let Some(progress) = &progress {
                    let result = Python::attach(|py| progress.call1(py, (line,)).map(|_| ()));
                    failed = result.err().or(failed.take());
                }
            })
        });
        if let Some(error) = failed {
            return Err(error);
        }
        match opened {
            Ok(server) => Ok(Engine { server }),
            Err(error) => Err(from_core(py, &error)),
        }
    }

    #[pyo3(signature = (control_socket = None))]
    fn start(&self, py: Python<'_>, control_socket: Option<&str>) -> PyResult<()> {
        self.server
            .start(control_socket)
            .map_err(|error| from_core(py, &error))
    }

    #[getter]
    fn port(&self) -> u16 {
        self.server
            .listener
            .as_ref()
            .map_or(0, |listener| listener.address.port())
    }

    #[pyo3(signature = (deadline_ms = 1500))]
    fn stop(&self, py: Python<'_>, deadline_ms: u64) -> bool {
        py.detach(|| self.server.stop(Duration::from_millis(deadline_ms)))
    }

    /// Before a stop: calls that wait for what may take long are refused from here on.
    fn announce_stop(&self) {
        self.server.engine.ending.store(true, Ordering::Release);
    }

    /// Changes while a stop gets on; the first part says what it waits for.
    fn stop_progress(&self) -> (&'static str, usize, u64) {
        self.server.stop_progress()
    }

    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let metrics = &self.server.engine.metrics;
        let status = PyDict::new(py);
        status.set_item("status", self.server.engine.condition().name())?;
        status.set_item("trouble", self.server.engine.shard.trouble())?;
        status.set_item("damaged_ranges", metrics.damaged_ranges.get())?;
        status.set_item("connections", metrics.connections.get())?;
        status.set_item("streams_cached", metrics.streams_cached.get())?;
        status.set_item("hot_bytes", metrics.hot_bytes.get())?;
        status.set_item("wal_retained_bytes", metrics.wal_retained_bytes.get())?;
        status.set_item("checkpoints", metrics.checkpoints.get())?;
        Ok(status)
    }

    /// Moves one of the control plane's own numbers among the metrics.
    fn count(&self, name: &str, change: i64) -> PyResult<()> {
        let metrics = &self.server.engine.metrics;
        let number = match name {
            "control_calls" => &metrics.control_calls,
            "control_waiting" => &metrics.control_waiting,
            "control_crowded" => &metrics.control_crowded,
            "subscription_links" => &metrics.subscription_links,
            "subscription_link_bytes" => &metrics.subscription_link_bytes,
            "subscription_offsets" => &metrics.subscription_offsets,
            "webhooks_waiting" => &metrics.webhooks_waiting,
            "webhook_lookups" => &metrics.webhook_lookups,
            "webhooks" => &metrics.webhooks,
            "webhook_failures" => &metrics.webhook_failures,
            _ => return Err(PyValueError::new_err(format!("{name:?} is not counted"))),
        };
        if change < 0 {
            number.sub(change.unsigned_abs());
        } else {
            number.add(change.unsigned_abs());
        }
        Ok(())
    }

    #[pyo3(signature = (path, content_type = "application/octet-stream", durability = None))]
    fn create(
        &self,
        py: Python<'_>,
        path: &str,
        content_type: &str,
        durability: Option<&str>,
    ) -> PyResult<bool> {
        let class = match durability {
            None => None,
            Some(name) => Some(
                Class::parse(name).ok_or_else(|| engine_error(py, "durability_unknown", name))?,
            ),
        };
        let result = py.detach(|| self.server.engine.local_create(path, content_type, class));
        result.map_err(|refusal| from_refusal(py, &refusal))
    }

    fn append(&self, py: Python<'_>, path: &str, data: &[u8]) -> PyResult<String> {
        let result = py.detach(|| self.server.engine.local_append(path, data));
        result
            .map(|offset| offset.to_string())
            .map_err(|refusal| from_refusal(py, &refusal))
    }

    #[pyo3(signature = (path, offset = "-1", max_bytes = 4 << 20))]
    fn read<'py>(
        &self,
        py: Python<'py>,
        path: &str,
        offset: &str,
        max_bytes: u64,
    ) -> PyResult<ReadTuple<'py>> {
        let result = py.detach(|| self.server.engine.local_read(path, offset, max_bytes));
        let read = result.map_err(|refusal| from_refusal(py, &refusal))?;
        Ok((
            PyBytes::new(py, &read.body),
            read.next.to_string(),
            read.up_to_date,
            read.closed,
            read.gap.map(|gap| {
                let (from, to) = (gap.from.to_string(), gap.to.to_string());
                (from, to, gap.reason.name(), gap.certain)
            }),
        ))
    }

    fn tail(&self, py: Python<'_>, path: &str) -> PyResult<Option<String>> {
        let result = py.detach(|| self.server.engine.local_tail(path));
        result
            .map(|tail| tail.map(|offset| offset.to_string()))
            .map_err(|refusal| from_refusal(py, &refusal))
    }

    fn damaged(&self, py: Python<'_>, path: &str) -> PyResult<bool> {
        let result = py.detach(|| self.server.engine.local_damaged(path));
        result.map_err(|refusal| from_refusal(py, &refusal))
    }

    /// Changes a stream's class; returns when the change is durable.
    fn set_durability(&self, py: Python<'_>, path: &str, durability: &str) -> PyResult<String> {
        let class = Class::parse(durability)
            .ok_or_else(|| engine_error(py, "durability_unknown", durability))?;
        let result = py.detach(|| self.server.engine.local_set_class(path, class));
        result
            .map(|class| class.name().to_owned())
            .map_err(|refusal| from_refusal(py, &refusal))
    }

    fn delete(&self, py: Python<'_>, path: &str) -> PyResult<bool> {
        let result = py.detach(|| self.server.engine.local_delete(path));
        result.map_err(|refusal| from_refusal(py, &refusal))
    }

    #[pyo3(signature = (prefix = "", after = "", limit = 1000))]
    fn list<'py>(
        &self,
        py: Python<'py>,
        prefix: &str,
        after: &str,
        limit: usize,
    ) -> PyResult<(Vec<Bound<'py, PyDict>>, Option<String>)> {
        let result = py.detach(|| self.server.engine.list(prefix, after, limit));
        let listed = result.map_err(|refusal| from_refusal(py, &refusal))?;
        let entries = listed.streams.iter().map(|entry| describe(py, entry));
        Ok((entries.collect::<PyResult<_>>()?, listed.next))
    }

    /// One stream as a listing shows it.
    fn list_one<'py>(&self, py: Python<'py>, path: &str) -> PyResult<Option<Bound<'py, PyDict>>> {
        let result = py.detach(|| self.server.engine.list_one(path));
        let found = result.map_err(|refusal| from_refusal(py, &refusal))?;
        found.map(|entry| describe(py, &entry)).transpose()
    }

    /// Makes the directory `to` and a backup in it, while everything goes on. `progress` returns false to cancel.
    #[pyo3(signature = (to, progress = None, rate_bytes_per_second = 0, allow_damage = false))]
    fn backup<'py>(
        &self,
        py: Python<'py>,
        to: PathBuf,
        progress: Option<Py<PyAny>>,
        rate_bytes_per_second: u64,
        allow_damage: bool,
    ) -> PyResult<Bound<'py, PyDict>> {
        let options = BackupOptions {
            rate_bytes_per_second,
            allow_damage,
        };
        backup::backup(py, &self.server.engine, to, progress, options)
    }

    /// Verifies the data directory, while everything goes on. `progress` returns false to stop.
    #[pyo3(signature = (progress = None))]
    fn verify<'py>(
        &self,
        py: Python<'py>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        tools::verify_live(py, &self.server.engine, progress)
    }

    /// Watches these, too: streams by name, and all that globs match.
    fn watch(&self, py: Python<'_>, names: Vec<String>, globs: Vec<String>) -> PyResult<()> {
        if py.detach(|| self.feed().watch(&names, &globs)) {
            Ok(())
        } else {
            Err(too_many_parts())
        }
    }

    fn unwatch(&self, py: Python<'_>, names: Vec<String>, globs: Vec<String>) {
        py.detach(|| self.feed().unwatch(&names, &globs));
    }

    /// The watched streams that changed, each with the watched globs that match it, and whether some were dropped.
    fn take_dirty(&self, py: Python<'_>, timeout_ms: u64) -> (Vec<(String, Vec<String>)>, bool) {
        py.detach(|| {
            let (dirty, overflow) = self.feed().take(Duration::from_millis(timeout_ms));
            let dirty = dirty
                .into_iter()
                .map(|(path, globs)| (String::from(path), texts(&globs)));
            (dirty.collect(), overflow)
        })
    }

    /// For each name the watched globs that match it; `None` = it is not watched.
    fn globs_of(&self, py: Python<'_>, paths: Vec<String>) -> Vec<Option<Vec<String>>> {
        py.detach(|| {
            let found = paths.iter().map(|path| self.feed().globs_of(path));
            found
                .map(|globs| globs.map(|globs| texts(&globs)))
                .collect()
        })
    }
}

impl Engine {
    fn feed(&self) -> &Feed {
        &self.server.engine.shard.feed
    }
}

/// The names that a glob matches.
#[pyfunction]
fn matching(py: Python<'_>, glob: &str, paths: Vec<String>) -> PyResult<Vec<String>> {
    py.detach(|| {
        let mut globs = Globs::default();
        if !globs.add(glob) {
            return Err(too_many_parts());
        }
        let matches = |path: &String| !globs.find(path).is_empty();
        Ok(paths.into_iter().filter(matches).collect())
    })
}

fn texts(globs: &[Arc<str>]) -> Vec<String> {
    globs.iter().map(|glob| String::from(&**glob)).collect()
}

fn too_many_parts() -> PyErr {
    PyValueError::new_err(format!("a glob has at most {PARTS_MAX} parts"))
}

fn describe<'py>(py: Python<'py>, entry: &StreamInfo) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("path", &entry.path)?;
    dict.set_item("content_type", &entry.content_type)?;
    dict.set_item("tail", entry.tail.to_string())?;
    dict.set_item("closed", entry.closed)?;
    dict.set_item("durability", entry.class.name())?;
    dict.set_item("incarnation", entry.incarnation.0.to_string())?;
    dict.set_item("records", entry.records)?;
    dict.set_item("bytes", entry.bytes)?;
    dict.set_item("created_at", entry.created_ms)?;
    dict.set_item("ttl_seconds", entry.ttl_seconds)?;
    dict.set_item("expires_at", entry.expires_at_ms)?;
    dict.set_item("forked_from", &entry.forked_from)?;
    Ok(dict)
}

#[pymodule]
fn _engine(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Engine>()?;
    module.add_function(wrap_pyfunction!(backup::crc32c, module)?)?;
    module.add_function(wrap_pyfunction!(matching, module)?)?;
    module.add_function(wrap_pyfunction!(tools::verify, module)?)?;
    module.add("EngineError", module.py().get_type::<EngineError>())
}
