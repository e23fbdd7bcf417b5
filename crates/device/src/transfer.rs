//! Many small copies in one direction: between slabs and the pages of another library's memory.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use cascade_memory::{HostSlab, HostSlabMut, Slab, SlabMut};

use crate::error::CudaError;
use crate::foreign::ForeignMemory;
use crate::plan::{Direction, PlannedCopy};
use crate::pool_side::PoolSide;

/// Copies between slabs of one pool and memory of the device, all in one direction.
#[derive(Debug)]
pub struct Transfer {
    /// The slabs.
    pub slabs: Slabs,
    /// The memory of the device.
    pub memory: Vec<Arc<ForeignMemory>>,
    /// What is copied. The fragments of a transfer are copied in any order. If two of them write
    /// the same byte, the transfer is refused.
    pub fragments: Vec<Fragment>,
}

/// The slabs of a transfer, by its direction.
#[derive(Debug)]
pub enum Slabs {
    /// The device's memory is written.
    ToDevice(Vec<HostSlab>),
    /// The slabs are written.
    ToHost(Vec<HostSlabMut>),
    /// The slabs are in a pool on a device, and are read.
    FromDevicePool(Vec<Slab>),
    /// The slabs are in a pool on a device, and are written.
    ToDevicePool(Vec<SlabMut>),
}

/// Consecutive bytes of a slab, and where they are in the device's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fragment {
    /// Index of the slab.
    pub slab: usize,
    /// Where they start in the slab.
    pub slab_offset: usize,
    /// Index of the memory.
    pub memory: usize,
    /// Where they start in that memory.
    pub memory_offset: usize,
    /// Their length.
    pub bytes: usize,
}

impl Transfer {
    /// Its copies, by offsets in the pool.
    pub(crate) fn copies(
        &mut self,
        pool: &PoolSide,
    ) -> Result<(Direction, Vec<PlannedCopy>), CudaError> {
        let (direction, slabs) = match &mut self.slabs {
            Slabs::ToDevice(slabs) => {
                let slabs = slabs.iter().map(|slab| pool.place(NonNull::from(&**slab)));
                (Direction::ToDevice, slabs.collect::<Result<Vec<_>, CudaError>>()?)
            }
            Slabs::ToHost(slabs) => {
                let slabs = slabs.iter_mut().map(|slab| pool.place(NonNull::from(&mut **slab)));
                (Direction::ToHost, slabs.collect::<Result<Vec<_>, CudaError>>()?)
            }
            Slabs::FromDevicePool(slabs) => {
                let place = |slab: &Slab| pool.place_on_device(slab.device_address(), slab.len());
                let slabs = slabs.iter().map(place);
                (Direction::ToDevice, slabs.collect::<Result<Vec<_>, CudaError>>()?)
            }
            Slabs::ToDevicePool(slabs) => {
                let place =
                    |slab: &SlabMut| pool.place_on_device(slab.device_address(), slab.len());
                let slabs = slabs.iter().map(place);
                (Direction::ToHost, slabs.collect::<Result<Vec<_>, CudaError>>()?)
            }
        };
        let copy = |fragment: &Fragment| {
            let slab = slabs.get(fragment.slab).ok_or_else(|| fragment.no_slab(slabs.len()))?;
            let (first, length) = *slab;
            let offset = first + fragment.in_slab(length)?.start;
            let address = fragment.address(&self.memory)?;
            let (memory, bytes) = (fragment.memory, fragment.bytes);
            Ok(PlannedCopy { offset, address, memory, bytes })
        };
        let copies = self.fragments.iter().map(copy).collect::<Result<Vec<_>, CudaError>>()?;
        Ok((direction, copies))
    }
}

impl Fragment {
    fn in_slab(&self, length: usize) -> Result<Range<usize>, CudaError> {
        let (offset, bytes) = (self.slab_offset, self.bytes);
        match offset.checked_add(bytes) {
            Some(end) if end <= length => Ok(offset..end),
            _ => Err(CudaError::Outside { offset, bytes, length }),
        }
    }

    fn address(&self, memory: &[Arc<ForeignMemory>]) -> Result<u64, CudaError> {
        let unnamed =
            || CudaError::Unnamed { what: "memory", index: self.memory, count: memory.len() };
        memory.get(self.memory).ok_or_else(unnamed)?.address(self.memory_offset, self.bytes)
    }

    fn no_slab(&self, count: usize) -> CudaError {
        CudaError::Unnamed { what: "slab", index: self.slab, count }
    }
}
