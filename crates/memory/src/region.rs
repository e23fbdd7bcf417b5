//! A region: the memory that a pool divides into slabs, of the host or of a device.

use std::fmt;
use std::sync::Arc;

use crate::{DeviceMemory, HostRegion, MemoryError};

/// Where the memory of a region is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RegionKind {
    /// Memory that the processors of this host read and write.
    Host,
    /// Memory of a device, such as a GPU. No instruction of a processor may access its addresses;
    /// only [`DeviceMemory`] copies from and to it.
    Device,
}

impl fmt::Display for RegionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "host",
            Self::Device => "device",
        })
    }
}

/// Memory of the host or of a device.
#[derive(Debug)]
pub struct Region {
    memory: Memory,
    bytes: usize,
}

#[derive(Debug)]
enum Memory {
    Host(HostRegion),
    Device(Arc<dyn DeviceMemory>),
}

impl Region {
    pub(crate) fn of_host(host: HostRegion) -> Self {
        Self { bytes: host.bytes(), memory: Memory::Host(host) }
    }

    pub(crate) fn of_device(device: Arc<dyn DeviceMemory>) -> Result<Self, MemoryError> {
        let bytes = device.bytes();
        if bytes == 0 {
            return Err(MemoryError::Empty);
        }
        Ok(Self { bytes, memory: Memory::Device(device) })
    }

    /// Where the memory is.
    pub fn kind(&self) -> RegionKind {
        match self.memory {
            Memory::Host(_) => RegionKind::Host,
            Memory::Device(_) => RegionKind::Device,
        }
    }

    /// Its length.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The mapping, if it is host memory.
    pub fn host(&self) -> Option<&HostRegion> {
        match &self.memory {
            Memory::Host(host) => Some(host),
            Memory::Device(_) => None,
        }
    }

    /// The device's memory, if it is that of a device.
    pub fn device(&self) -> Option<&Arc<dyn DeviceMemory>> {
        match &self.memory {
            Memory::Host(_) => None,
            Memory::Device(device) => Some(device),
        }
    }
}
