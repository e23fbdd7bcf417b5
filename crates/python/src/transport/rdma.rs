//! Settings of RDMA as Python gives them, and the device that they stand for.

use std::path::Path;
use std::sync::Arc;

use cascade_block::with_causes;
use cascade_transport::verbs::{Device, Flush, SYSFS, Target, Verbs, VerbsError, VerbsSettings};
use pyo3::prelude::*;

use crate::errors::ConfigError;

/// How an endpoint that has an RDMA device connects over TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RdmaUse {
    /// By RDMA, or not at all.
    Require,
    /// By RDMA, or by TCP if the peer or this process cannot use RDMA.
    Prefer,
}

/// The attributes of `cascadekv.transfer.Rdma`.
#[derive(Debug, FromPyObject)]
pub(super) struct RdmaSettings {
    r#use: String,
    devices: Vec<String>,
    near_gpu: Option<String>,
    gid_index: Option<u8>,
    queue_pairs: usize,
    timeout: u8,
    traffic_class: u8,
    flush: String,
    relaxed_ordering: bool,
}

impl RdmaSettings {
    pub(super) fn how(&self) -> PyResult<RdmaUse> {
        match &*self.r#use {
            "require" => Ok(RdmaUse::Require),
            "prefer" => Ok(RdmaUse::Prefer),
            other => Err(refused(format!("use: {other:?} is not \"require\" or \"prefer\""))),
        }
    }

    /// Opens the device that is nearest to the GPU, or the first one.
    pub(super) fn open(&self) -> PyResult<Arc<Device>> {
        let settings = VerbsSettings {
            devices: self.devices.clone(),
            gid_index: self.gid_index,
            queue_pairs: self.queue_pairs,
            timeout: self.timeout,
            traffic_class: self.traffic_class,
            flush: flush_of(&self.flush)?,
            relaxed_ordering: self.relaxed_ordering,
            ..VerbsSettings::default()
        };
        let sysfs = Path::new(SYSFS);
        let near = self.near_gpu.as_deref();
        let target = near.map_or_else(Target::default, |gpu| Target::gpu(sysfs, gpu));
        let opened = Verbs::open()
            .map_err(VerbsError::from)
            .and_then(|verbs| Device::open_nearest(&Arc::new(verbs), sysfs, &target, &settings));
        opened.map_err(|error| refused(with_causes(&error)))
    }
}

fn flush_of(name: &str) -> PyResult<Flush> {
    match name {
        "gpu" => Ok(Flush::GpuMemory),
        "always" => Ok(Flush::Always),
        "never" => Ok(Flush::Never),
        other => Err(refused(format!("flush: {other:?} is not \"gpu\", \"always\" or \"never\""))),
    }
}

fn refused(text: impl std::fmt::Display) -> PyErr {
    ConfigError::new_err(format!("rdma: {text}"))
}
