//! Backup for Python: paths, numbers and callbacks in, a dictionary out; and the checksum that restore compares.

use std::path::PathBuf;

use millstream_core::shard::backup::{BackupError, BackupOptions, BackupSummary};
use millstream_core::shard::engine::Engine as CoreEngine;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::engine_error;

/// Calls Python with phase, bytes done and bytes in all; what it raised ends the work and is raised again.
struct Teller {
    progress: Option<Py<PyAny>>,
    raised: Option<PyErr>,
}

impl Teller {
    fn tell(&mut self, phase: &str, done: u64, total: u64) -> bool {
        let Some(progress) = &self.progress else {
            return true;
        };
        let answer = Python::attach(|py| {
            // A signal handler of Python runs only when somebody looks.
            py.check_signals()?;
            progress
                .call1(py, (phase, done, total))?
                .extract::<bool>(py)
        });
        match answer {
            Ok(go_on) => go_on,
            Err(error) => {
                self.raised = Some(error);
                false
            }
        }
    }

    fn finish<T>(self, py: Python<'_>, result: Result<T, BackupError>) -> PyResult<T> {
        match self.raised {
            Some(error) => Err(error),
            None => result.map_err(|error| engine_error(py, error.code, &error.detail)),
        }
    }
}

pub fn backup<'py>(
    py: Python<'py>,
    engine: &CoreEngine,
    to: PathBuf,
    progress: Option<Py<PyAny>>,
    options: BackupOptions,
) -> PyResult<Bound<'py, PyDict>> {
    let mut teller = Teller {
        progress,
        raised: None,
    };
    let result = py.detach(|| {
        engine.backup_to(&to, &options, &mut |now| {
            teller.tell(now.phase, now.bytes_done, now.bytes_total)
        })
    });
    describe(py, &teller.finish(py, result)?)
}

fn describe<'py>(py: Python<'py>, summary: &BackupSummary) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("commit_number", summary.commit_number)?;
    dict.set_item("checkpoint", summary.checkpoint)?;
    dict.set_item("taken_at", summary.taken_at_ms)?;
    dict.set_item("streams", summary.streams)?;
    dict.set_item("files", summary.files)?;
    dict.set_item("bytes", summary.bytes)?;
    dict.set_item("damaged", summary.damaged)?;
    dict.set_item("damage", &summary.damage)?;
    Ok(dict)
}

/// The checksum of bytes that follow others with `before`; 0 for the first.
#[pyfunction]
#[pyo3(signature = (data, before = 0))]
pub fn crc32c(py: Python<'_>, data: &[u8], before: u32) -> u32 {
    py.detach(|| ::crc32c::crc32c_append(before, data))
}
