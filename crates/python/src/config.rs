//! A `cascadekv.StoreConfig` as the store's own configuration.

use std::path::PathBuf;
use std::time::Duration;

use cascade_block::{ByteSize, DigestAlgorithm, DigestMode};
use cascade_store::{FileLayout, FilesConfig, IoEngine, PolicyKind, StoreConfig, WritePolicy};
use pyo3::prelude::*;

use crate::errors::{self, ConfigError};

/// The fields of the Python dataclass, sizes already in bytes.
#[derive(FromPyObject)]
#[expect(clippy::struct_excessive_bools, reason = "settings that are yes or no")]
struct Settings {
    pipeline: String,
    dram: u64,
    dram_blocks: Option<u64>,
    huge_pages: bool,
    files: Option<PathBuf>,
    files_capacity: u64,
    files_layout: String,
    segment_size: u64,
    direct: bool,
    engine: String,
    durable: bool,
    policy: String,
    digest: String,
    write: String,
    dirty_bytes_max: Option<u64>,
    mover_bytes_per_second: Option<u64>,
    protected_percent: u8,
    admit_partial: bool,
    changes_max: usize,
    timeout: f64,
}

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
const LAYOUTS: [(&str, FileLayout); 2] =
    [("segments", FileLayout::Segments), ("file-per-block", FileLayout::FilePerBlock)];
const ENGINES: [(&str, IoEngine); 3] =
    [("auto", IoEngine::Auto), ("uring", IoEngine::Uring), ("psync", IoEngine::Psync)];

/// A size such as `"512MiB"` in bytes; raises `ConfigError` for what is no size.
#[pyfunction]
#[pyo3(signature = (text, /))]
pub(crate) fn parse_size(text: &str) -> PyResult<u64> {
    let size = text.parse::<ByteSize>();
    size.map(|size| size.0).map_err(|error| ConfigError::new_err(error.to_string()))
}

/// Raises `ConfigError` when a setting makes no sense, by its name.
#[pyfunction]
#[pyo3(signature = (config, /))]
pub(crate) fn check_config(config: &Bound<'_, PyAny>) -> PyResult<()> {
    store_config(config).map(drop)
}

/// The store's configuration, checked.
pub(crate) fn store_config(config: &Bound<'_, PyAny>) -> PyResult<StoreConfig> {
    let settings: Settings = config
        .extract()
        .map_err(|error: PyErr| ConfigError::new_err(error.value(config.py()).to_string()))?;
    let store = settings.into_store_config()?;
    store.check().map_err(|error| errors::to_python(&error))?;
    Ok(store)
}

impl Settings {
    fn into_store_config(self) -> PyResult<StoreConfig> {
        let layout = named("files_layout", &self.files_layout, &LAYOUTS)?;
        let engine = named("engine", &self.engine, &ENGINES)?;
        let files = self.files.map(|directory| FilesConfig {
            capacity_bytes: self.files_capacity,
            layout,
            segment_bytes: self.segment_size,
            direct: self.direct,
            engine,
            durable: self.durable,
            ..FilesConfig::new(directory)
        });
        Ok(StoreConfig {
            pipeline: self.pipeline,
            dram_bytes: self.dram,
            dram_blocks: self.dram_blocks,
            huge_pages: self.huge_pages,
            files,
            policy: named("policy", &self.policy, &POLICIES)?,
            digest: named("digest", &self.digest, &DIGESTS)?,
            write: named("write", &self.write, &WRITES)?,
            dirty_bytes_max: self.dirty_bytes_max,
            mover_bytes_per_second: self.mover_bytes_per_second,
            protected_percent: self.protected_percent,
            admit_partial: self.admit_partial,
            changes_max: self.changes_max,
            timeout: seconds("timeout", self.timeout)?,
            ..StoreConfig::default()
        })
    }
}

/// The value that a name stands for.
pub(crate) fn named<T: Copy>(setting: &str, name: &str, known: &[(&str, T)]) -> PyResult<T> {
    known.iter().find(|(known, _)| *known == name).map(|(_, value)| *value).ok_or_else(|| {
        let known: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        ConfigError::new_err(format!("{setting}: {name:?} is none of {}", known.join(", ")))
    })
}

/// A duration from seconds; `setting` names it when it is none.
pub(crate) fn seconds(setting: &str, seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|_| {
        ConfigError::new_err(format!("{setting}: {seconds} is not a number of seconds from 0 on"))
    })
}
