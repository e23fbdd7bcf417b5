//! The GPU whose memory holds the blocks of a node.

use std::sync::Arc;
use std::time::Duration;

use cascade_block::ByteSize;
use cascade_device::{
    CudaError, CudaMemory, CudaMemoryConfig, DeviceFacts, Driver, DriverReport, Unavailable,
};
use cascade_runtime::SystemClock;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio::sync::Notify;

/// How often the free memory of the GPU is compared with the reserve.
const INTERVAL: Duration = Duration::from_millis(500);

/// Why the memory of a GPU cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum GpuError {
    /// There is no driver, or no GPU.
    #[error("this host has no GPU for the setting gpu")]
    Unavailable(#[from] Unavailable),
    /// No GPU has the UUID of the configuration.
    #[error("there is no GPU {wanted:?}; set gpu to one of: {found}")]
    Unknown {
        /// The UUID in the configuration.
        wanted: String,
        /// The UUIDs of the GPUs that there are.
        found: String,
    },
    /// The driver refuses the memory.
    #[error("cannot take {} of GPU {uuid}", ByteSize(*bytes).rounded())]
    Memory {
        /// The GPU.
        uuid: String,
        /// What was to be taken.
        bytes: u64,
        /// The cause.
        #[source]
        source: CudaError,
    },
    /// The GPU was lost while the node ran.
    #[error("GPU {uuid} is lost, with all blocks of this node; start the node again")]
    Lost {
        /// The GPU.
        uuid: String,
        /// The cause.
        #[source]
        source: CudaError,
    },
    /// Others would have too little.
    #[error(
        "GPU {uuid} would have {} free, less than hbm_reserve ({}); lower one of hbm and \
         hbm_reserve",
        ByteSize(*free_bytes).rounded(),
        ByteSize(*reserve_bytes).rounded()
    )]
    Reserve {
        /// The GPU.
        uuid: String,
        /// What would be left.
        free_bytes: u64,
        /// What has to be left.
        reserve_bytes: u64,
    },
}

/// The GPU of a node and its free memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuStatus {
    /// Its UUID.
    pub uuid: String,
    /// Its name.
    pub name: String,
    /// Whether it is a stand-in for tests.
    pub is_fake: bool,
    /// The memory that the node has taken.
    pub bytes: u64,
    /// The memory that is free for others; none if the GPU is lost.
    pub free_bytes: Option<u64>,
}

/// The memory of a GPU.
#[derive(Debug, Clone)]
pub(crate) struct NodeGpu {
    pub(crate) memory: Arc<CudaMemory>,
    facts: DeviceFacts,
    bytes: u64,
    reserve_bytes: u64,
}

impl NodeGpu {
    /// Takes memory that processes of this host can map. `reserve_bytes` have to stay free.
    pub(crate) fn open(wanted: &str, bytes: u64, reserve_bytes: u64) -> Result<Self, GpuError> {
        let driver = Driver::load()?;
        let devices = DriverReport::of(&driver)?.devices;
        let is_wanted = |it: &DeviceFacts| it.uuid.eq_ignore_ascii_case(wanted);
        let Some(device) = devices.iter().position(is_wanted) else {
            let found: Vec<_> = devices.iter().map(|it| &*it.uuid).collect();
            return Err(GpuError::Unknown { wanted: wanted.to_owned(), found: found.join(", ") });
        };
        let facts = devices[device].clone();
        let uuid = || facts.uuid.clone();
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        let config = CudaMemoryConfig { device, shareable: true, ..CudaMemoryConfig::new(length) };
        let taken = || {
            let memory = CudaMemory::new(&driver, &config, Arc::new(SystemClock))?;
            let free_bytes = memory.context().free_bytes()?;
            Ok((memory, free_bytes))
        };
        let taken = taken().map_err(|source| GpuError::Memory { uuid: uuid(), bytes, source });
        let (memory, free_bytes) = taken?;
        if free_bytes < reserve_bytes {
            return Err(GpuError::Reserve { uuid: uuid(), free_bytes, reserve_bytes });
        }
        if facts.is_fake() {
            tracing::warn!("the driver of this GPU is a FAKE, for tests only");
        }
        Ok(Self { memory, facts, bytes, reserve_bytes })
    }

    /// Whether the GPU still works.
    pub(crate) fn check(&self) -> Result<(), GpuError> {
        let lost = |source| GpuError::Lost { uuid: self.facts.uuid.clone(), source };
        self.memory.context().free_bytes().map(drop).map_err(lost)
    }

    pub(crate) fn status(&self) -> GpuStatus {
        GpuStatus {
            uuid: self.facts.uuid.clone(),
            name: self.facts.name.clone(),
            is_fake: self.facts.is_fake(),
            bytes: self.bytes,
            free_bytes: self.memory.context().free_bytes().ok(),
        }
    }

    /// Starts a thread that stops the node when its memory is needed, or when the GPU is lost. It
    /// ends with the process.
    pub(crate) fn watch(self, stop: Arc<Notify>) -> std::io::Result<()> {
        let watch = move || {
            while self.may_go_on() {
                std::thread::park_timeout(INTERVAL);
            }
            stop.notify_one();
        };
        std::thread::Builder::new().name("cascade-gpu".to_owned()).spawn(watch).map(drop)
    }

    fn may_go_on(&self) -> bool {
        let gpu = &*self.facts.uuid;
        match self.memory.context().free_bytes() {
            Ok(free_bytes) if free_bytes < self.reserve_bytes => {
                let reserve_bytes = self.reserve_bytes;
                tracing::warn!(
                    gpu,
                    free_bytes,
                    reserve_bytes,
                    "the memory of the GPU is needed: the node gives its part back and stops"
                );
                false
            }
            Ok(_) => true,
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                tracing::error!(gpu, error, "the GPU is lost, with all its blocks: the node stops");
                false
            }
        }
    }
}
