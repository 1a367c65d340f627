//! Settings from Python's table to the engine's configuration. A key the engine does not know is an error:
//! a misspelt bound must not be silently absent.

use millstream_core::config::{Config, LogFault};
use millstream_core::model::Class;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

pub fn config_from(settings: &Bound<'_, PyDict>) -> PyResult<Config> {
    let mut config = Config::default();
    for (key, value) in settings.iter() {
        let key: String = key.extract()?;
        set(&mut config, &key, &value)
            .map_err(|error| PyValueError::new_err(format!("setting {key}: {error}")))?;
    }
    // Doors for tests that need a slow or failing disk; never set in production. A misspelt one must
    // not let a test pass on a healthy disk.
    if let Ok(text) = std::env::var("MILLSTREAM_FAULT_SYNC_DELAY_MS") {
        config.fault_sync_delay_ms = text.parse().map_err(|_| bad_fault(&text))?;
    }
    if let Ok(text) = std::env::var("MILLSTREAM_FAULT_READ_DELAY_MS") {
        config.fault_read_delay_ms = text.parse().map_err(|_| bad_fault(&text))?;
    }
    if let Ok(text) = std::env::var("MILLSTREAM_FAULT_FAIL") {
        config.fault_fail = Some(LogFault::parse(&text).ok_or_else(|| bad_fault(&text))?);
    }
    Ok(config)
}

fn bad_fault(text: &str) -> PyErr {
    PyValueError::new_err(format!("{text:?} is not a test fault"))
}

fn set(config: &mut Config, key: &str, value: &Bound<'_, PyAny>) -> PyResult<()> {
    match key {
        "data_dir" => config.data_dir = value.extract()?,
        "host" => config.host = value.extract()?,
        "port" => config.port = value.extract()?,
        "listen" => config.listen = value.extract()?,
        "restored" => config.restored = value.extract()?,
        "durability" => {
            let name: String = value.extract()?;
            let class = Class::parse(&name).filter(|class| class.available());
            config.durability =
                class.ok_or_else(|| PyValueError::new_err(format!("{name:?} is not available")))?;
        }
        "disk_sync_ms" => config.disk_sync_ms = value.extract()?,
        "ephemeral_bytes_max" => config.ephemeral_bytes_max = value.extract()?,
        "long_poll_timeout_ms" => config.long_poll_timeout_ms = value.extract()?,
        "reactors" => config.reactors = value.extract()?,
        "read_window_bytes" => config.read_window_bytes = value.extract()?,
        "append_max_bytes" => config.append_max_bytes = value.extract()?,
        "connections_max" => config.connections_max = value.extract()?,
        "inflight_bytes_max" => config.inflight_bytes_max = value.extract()?,
        "client_bytes_max" => config.client_bytes_max = value.extract()?,
        "header_timeout_ms" => config.header_timeout_ms = value.extract()?,
        "body_timeout_ms" => config.body_timeout_ms = value.extract()?,
        "idle_timeout_ms" => config.idle_timeout_ms = value.extract()?,
        "send_timeout_ms" => config.send_timeout_ms = value.extract()?,
        "sse_lifetime_ms" => config.sse_lifetime_ms = value.extract()?,
        "sse_keepalive_ms" => config.sse_keepalive_ms = value.extract()?,
        "wal_file_bytes" => config.wal_file_bytes = value.extract()?,
        "checkpoint_bytes" => config.checkpoint_bytes = value.extract()?,
        "streams_cached_max" => config.streams_cached_max = value.extract()?,
        "sweep_interval_ms" => config.sweep_interval_ms = value.extract()?,
        "scrub_bytes_per_second" => config.scrub_bytes_per_second = value.extract()?,
        "scrub_interval_s" => config.scrub_interval_s = value.extract()?,
        "stage_bytes_max" => config.stage_bytes_max = value.extract()?,
        "stage_ttl_s" => config.stage_ttl_s = value.extract()?,
        "insecure" => config.insecure = value.extract()?,
        "public_url" => {
            let url: Option<String> = value.extract()?;
            config.public_url = url.filter(|text| !text.is_empty());
        }
        "subscription_origins" => {
            let listed: String = value.extract()?;
            let origins = listed.split(',').filter(|origin| !origin.is_empty());
            config.subscription_origins = origins.map(str::to_owned).collect();
        }
        _ => return Err(PyValueError::new_err("the engine does not know it")),
    }
    Ok(())
}
