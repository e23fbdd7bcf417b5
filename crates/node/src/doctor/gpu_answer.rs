//! What the CUDA driver of this host says about its GPUs, in a form that a process can print.

use cascade_block::with_causes;
use cascade_device::{DeviceFacts, DriverReport, LIBRARY, Unavailable};
use serde::{Deserialize, Serialize};

/// The answer of the driver, or why there is none.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GpuAnswer {
    /// The driver works and has devices.
    Found(GpuReport),
    /// There is no driver or no device. An ordinary state of a host.
    Unavailable {
        /// What is missing.
        reason: String,
        /// What to do for a GPU.
        remedy: String,
        /// Whether a variable names the library: then somebody expects a GPU.
        is_named: bool,
    },
    /// The driver did not answer: it hung, crashed, or its process could not be started.
    Failed(String),
    /// The driver was not asked.
    NotAsked,
}

/// The driver and its devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuReport {
    /// Whether it is the fake driver, which is for tests.
    pub is_fake: bool,
    /// The library that was loaded.
    pub library: String,
    /// The version of CUDA that the driver has, such as `12.8`.
    pub cuda_version: String,
    /// The function that starts many copies at once; none before CUDA 12.8.
    pub batched_copy: Option<String>,
    /// Functions that a driver of this version should have and this one has not.
    pub missing_functions: Vec<String>,
    /// The devices, by their index.
    pub devices: Vec<GpuDevice>,
}

/// A device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuDevice {
    /// Its name, such as `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Its UUID, as `nvidia-smi -L` prints it; empty if the driver does not say.
    pub uuid: String,
    /// Its address on the PCI bus; empty if the driver does not say.
    pub pci_address: String,
    /// All of its memory; 0 if the driver does not say. How much is free is not asked: that needs a
    /// context, which itself takes hundreds of MiB of the device.
    pub memory_bytes: u64,
    /// Its compute capability, such as `9.0`; `0.0` if the driver does not say.
    pub compute_capability: String,
}

impl GpuAnswer {
    /// Loads the driver into this process, which it never leaves again, and asks it. It may take
    /// seconds, hang or crash.
    pub fn of_this_process() -> Self {
        match DriverReport::examine() {
            Ok(report) => Self::Found(GpuReport::from(report)),
            Err(absence) => Self::unavailable(&absence),
        }
    }

    fn unavailable(absence: &Unavailable) -> Self {
        let text = with_causes(absence);
        // Each of these messages ends with what to do.
        let (reason, remedy) = text.rsplit_once("; ").unwrap_or((&text, ""));
        Self::Unavailable {
            reason: reason.to_owned(),
            remedy: remedy.to_owned(),
            is_named: library_of(absence).is_some_and(|library| library != LIBRARY),
        }
    }
}

fn library_of(absence: &Unavailable) -> Option<&str> {
    match absence {
        Unavailable::NoLibrary { library, .. }
        | Unavailable::TooOld { library, .. }
        | Unavailable::NoDevice { library }
        | Unavailable::MissingFunction { library, .. }
        | Unavailable::Refused { library, .. } => Some(library),
        _ => None,
    }
}

impl From<DriverReport> for GpuReport {
    fn from(report: DriverReport) -> Self {
        Self {
            is_fake: report.is_fake(),
            cuda_version: report.version.to_string(),
            batched_copy: report.batch.map(|form| form.to_string()),
            missing_functions: report.missing_functions.into_iter().map(str::to_owned).collect(),
            devices: report.devices.into_iter().map(GpuDevice::from).collect(),
            library: report.library,
        }
    }
}

impl From<DeviceFacts> for GpuDevice {
    fn from(facts: DeviceFacts) -> Self {
        let [major, minor] = facts.capability;
        Self {
            name: facts.name,
            uuid: facts.uuid,
            pci_address: facts.pci_address,
            memory_bytes: facts.memory_bytes,
            compute_capability: format!("{major}.{minor}"),
        }
    }
}
