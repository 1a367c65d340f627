//! Tools on a data directory for Python: verification and repair. Paths and a callback in, a dictionary out.

use std::path::PathBuf;

use millstream_core::error::EngineError as CoreError;
use millstream_core::shard::engine::Engine as CoreEngine;
use millstream_core::verify::{
    Finding, Outcome, Repaired, Report, repair_directory, verify_directory, verify_running,
};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::from_core;

/// Calls Python with bytes done and bytes in all; what it raised ends the work and is raised again.
struct Listening {
    progress: Option<Py<PyAny>>,
    raised: Option<PyErr>,
}

impl Listening {
    fn new(progress: Option<Py<PyAny>>) -> Listening {
        Listening {
            progress,
            raised: None,
        }
    }

    fn hear(&mut self, done: u64, total: u64) -> bool {
        let answer = Python::attach(|py| {
            // A signal handler of Python runs only when somebody looks.
            py.check_signals()?;
            match &self.progress {
                Some(progress) => progress.call1(py, (done, total))?.extract::<bool>(py),
                None => Ok(true),
            }
        });
        answer.unwrap_or_else(|error| {
            self.raised = Some(error);
            false
        })
    }

    fn finish<T>(self, py: Python<'_>, result: Result<T, CoreError>) -> PyResult<T> {
        match self.raised {
            Some(error) => Err(error),
            None => result.map_err(|error| from_core(py, &error)),
        }
    }
}

/// Verifies the directory of a stopped server, and repairs it if that is asked for and needed. `progress` returns
/// false to stop; a repair that is stopped has changed nothing that counts.
#[pyfunction]
#[pyo3(signature = (data_dir, repair = false, progress = None))]
pub fn verify<'py>(
    py: Python<'py>,
    data_dir: PathBuf,
    repair: bool,
    progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let mut listening = Listening::new(progress);
    let result = py.detach(|| {
        let mut hear = |done, total| listening.hear(done, total);
        if repair {
            return repair_directory(&data_dir, &mut hear);
        }
        verify_directory(&data_dir, &mut hear).map(|before| Outcome {
            before,
            repaired: None,
            after: None,
        })
    });
    let outcome = listening.finish(py, result)?;
    let answer = describe(py, &outcome.before)?;
    let repaired = match (&outcome.repaired, &outcome.after) {
        (Some(repaired), Some(after)) => Some(describe_repair(py, repaired, after)?),
        _ => None,
    };
    answer.set_item("repair", repaired)?;
    Ok(answer)
}

/// Verifies the directory under a running engine.
pub fn verify_live<'py>(
    py: Python<'py>,
    engine: &CoreEngine,
    progress: Option<Py<PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let mut listening = Listening::new(progress);
    let result =
        py.detach(|| verify_running(engine, &mut |done, total| listening.hear(done, total)));
    let answer = describe(py, &listening.finish(py, result)?)?;
    answer.set_item("repair", py.None())?;
    Ok(answer)
}

fn describe<'py>(py: Python<'py>, report: &Report) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("errors", report.errors)?;
    dict.set_item("notes", report.notes)?;
    dict.set_item("beyond_repair", report.beyond_repair)?;
    dict.set_item("streams", report.streams)?;
    dict.set_item("stream_bytes", report.stream_bytes)?;
    dict.set_item("appends", report.appends)?;
    dict.set_item("log_files", report.log_files)?;
    dict.set_item("frames", report.frames)?;
    dict.set_item("packs", report.packs)?;
    let findings: PyResult<Vec<_>> = report
        .findings
        .iter()
        .map(|finding| describe_finding(py, finding))
        .collect();
    dict.set_item("findings", PyList::new(py, findings?)?)?;
    Ok(dict)
}

fn describe_finding<'py>(py: Python<'py>, finding: &Finding) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("severity", finding.severity.name())?;
    dict.set_item("file", &finding.file)?;
    dict.set_item("byte", finding.byte)?;
    dict.set_item("stream", &finding.stream)?;
    dict.set_item("what", &finding.what)?;
    Ok(dict)
}

fn describe_repair<'py>(
    py: Python<'py>,
    repaired: &Repaired,
    after: &Report,
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("kept_in", &repaired.kept_in)?;
    dict.set_item("done", &repaired.done)?;
    let given_up: PyResult<Vec<_>> = repaired
        .given_up
        .iter()
        .map(|given| {
            let dict = PyDict::new(py);
            dict.set_item("stream", &given.stream)?;
            dict.set_item("what", &given.what)?;
            Ok(dict)
        })
        .collect();
    dict.set_item("given_up", PyList::new(py, given_up?)?)?;
    dict.set_item("given_up_count", repaired.given_up_count)?;
    dict.set_item("after", describe(py, after)?)?;
    Ok(dict)
}
