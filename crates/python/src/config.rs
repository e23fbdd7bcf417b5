//! Conversion of a `cascadekv.StoreConfig` to the configuration of the store.

use cascade_block::{DigestAlgorithm, DigestMode};
use cascade_store::{FilesConfig, IoEngine, PolicyKind, StoreConfig, WritePolicy};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{count, duration, flag, path, percent, rate, size, text};
use crate::errors::{self, ConfigError};

const POLICIES: [(&str, PolicyKind); 5] = [
    ("prefix-cost", PolicyKind::PrefixCost),
    ("lru", PolicyKind::Lru),
    ("s3fifo", PolicyKind::S3Fifo),
    ("arc", PolicyKind::Arc),
    ("waterfall", PolicyKind::Waterfall),
];
const DIGESTS: [(&str, DigestMode); 3] = [
    ("off", DigestMode::Off),
    ("blake3", DigestMode::On(DigestAlgorithm::Blake3)),
    ("sha256", DigestMode::On(DigestAlgorithm::Sha256)),
];
const WRITES: [(&str, WritePolicy); 2] =
    [("back", WritePolicy::Back), ("through", WritePolicy::Through)];
const ENGINES: [(&str, IoEngine); 3] =
    [("auto", IoEngine::Auto), ("uring", IoEngine::Uring), ("psync", IoEngine::Psync)];

/// Checks a `StoreConfig`. Returns its sizes, durations, shares and paths in one form: bytes,
/// seconds, percent and paths.
///
/// Raises `ConfigError` with the name of a setting that is not valid.
#[pyfunction]
#[pyo3(signature = (config, /))]
pub(crate) fn check_config<'py>(config: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
    let store = store_config(config)?;
    let plain = PyDict::new(config.py());
    plain.set_item("dram", store.dram_bytes)?;
    plain.set_item("dirty_max", store.dirty_bytes_max)?;
    plain.set_item("mover_rate", store.mover_bytes_per_second)?;
    plain.set_item("protected_share", store.protected_percent)?;
    plain.set_item("timeout", store.timeout.as_secs_f64())?;
    for name in ["files_capacity", "segment_size"] {
        plain.set_item(name, config_error(size(name, &config.getattr(name)?))?)?;
    }
    if let Some(files) = &store.files {
        plain.set_item("files", files.directory.as_os_str())?;
    }
    Ok(plain)
}

/// The checked configuration of the store.
pub(crate) fn store_config(config: &Bound<'_, PyAny>) -> PyResult<StoreConfig> {
    let store = config_error(read(config))?;
    store.check().map_err(|error| errors::to_python(&error))?;
    Ok(store)
}

/// Converts any error in a setting to a `ConfigError`.
fn config_error<T>(read: PyResult<T>) -> PyResult<T> {
    read.map_err(|error| {
        Python::attach(|py| {
            if error.is_instance_of::<ConfigError>(py) {
                error
            } else {
                ConfigError::new_err(error.value(py).to_string())
            }
        })
    })
}

fn read(config: &Bound<'_, PyAny>) -> PyResult<StoreConfig> {
    let get = |name: &str| config.getattr(name);
    let given = |name: &str| get(name).map(|value| Some(value).filter(|value| !value.is_none()));
    let directory = given("files")?.map(|files| path("files", &files)).transpose()?;
    // Also read without a file tier, so that a wrong value is an error at once.
    let mut files = FilesConfig {
        capacity_bytes: size("files_capacity", &get("files_capacity")?)?,
        segment_bytes: size("segment_size", &get("segment_size")?)?,
        direct: flag("direct_io", &get("direct_io")?)?,
        engine: chosen("io_engine", &get("io_engine")?, &ENGINES)?,
        durable: flag("durable", &get("durable")?)?,
        ..FilesConfig::new("")
    };
    let files = directory.map(|directory| {
        files.directory = directory;
        files
    });
    let dram_blocks = given("dram_blocks")?.map(|blocks| count("dram_blocks", &blocks));
    Ok(StoreConfig {
        pipeline: text("pipeline", &get("pipeline")?)?,
        dram_bytes: size("dram", &get("dram")?)?,
        dram_blocks: dram_blocks.transpose()?.map(|blocks| blocks as u64),
        huge_pages: flag("huge_pages", &get("huge_pages")?)?,
        files,
        policy: chosen("policy", &get("policy")?, &POLICIES)?,
        digest: chosen("digest", &get("digest")?, &DIGESTS)?,
        write: chosen("write", &get("write")?, &WRITES)?,
        dirty_bytes_max: given("dirty_max")?.map(|dirty| size("dirty_max", &dirty)).transpose()?,
        mover_bytes_per_second: given("mover_rate")?
            .map(|bytes| rate("mover_rate", &bytes))
            .transpose()?,
        protected_percent: percent("protected_share", &get("protected_share")?)?,
        admit_partial: flag("admit_partial", &get("admit_partial")?)?,
        changes_max: count("changes_max", &get("changes_max")?)?,
        timeout: duration("timeout", &get("timeout")?)?,
        ..StoreConfig::default()
    })
}

/// The value that a name stands for.
fn chosen<T: Copy>(setting: &str, given: &Bound<'_, PyAny>, known: &[(&str, T)]) -> PyResult<T> {
    named(setting, &text(setting, given)?, known)
}

/// The value that a name stands for.
pub(crate) fn named<T: Copy>(setting: &str, name: &str, known: &[(&str, T)]) -> PyResult<T> {
    known.iter().find(|(known, _)| *known == name).map(|(_, value)| *value).ok_or_else(|| {
        let known: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        let name: String = name.chars().take(60).collect();
        ConfigError::new_err(format!("{setting}: {name:?} is not one of {}", known.join(", ")))
    })
}
