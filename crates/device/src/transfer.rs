//! Many small copies in one direction: between slabs and the pages of another library's memory.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use cascade_memory::{HostSlab, HostSlabMut};

use crate::copier::Plan;
use crate::error::CudaError;
use crate::foreign::ForeignMemory;
use crate::registered::RegisteredPool;

/// Copies between slabs of one pool and memory of the device, all in one direction.
#[derive(Debug)]
pub struct Transfer {
    /// The slabs.
    pub slabs: Slabs,
    /// The memory of the device.
    pub memory: Vec<Arc<ForeignMemory>>,
    /// What is copied. Fragments of one transfer have no order: no two may write one byte.
    pub fragments: Vec<Fragment>,
}

/// The slabs of a transfer, by its direction.
#[derive(Debug)]
pub enum Slabs {
    /// The device's memory is written.
    ToDevice(Vec<HostSlab>),
    /// The slabs are written.
    ToHost(Vec<HostSlabMut>),
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
    /// Adds its copies to a plan.
    pub(crate) fn plan(&mut self, pool: &RegisteredPool, plan: &mut Plan) -> Result<(), CudaError> {
        match &mut self.slabs {
            Slabs::ToDevice(slabs) => {
                let count = slabs.len();
                for fragment in &self.fragments {
                    let slab = slabs.get(fragment.slab).ok_or_else(|| fragment.no_slab(count))?;
                    let bytes = &slab[fragment.in_slab(slab.len())?];
                    let target = fragment.address(&self.memory)?;
                    let start = NonNull::from(bytes).cast::<u8>();
                    for (part, is_registered) in pool.parts(bytes)? {
                        plan.add_to_device(target, start, part, is_registered);
                    }
                }
            }
            Slabs::ToHost(slabs) => {
                let count = slabs.len();
                for fragment in &self.fragments {
                    let slab = slabs.get_mut(fragment.slab);
                    let slab = slab.ok_or_else(|| fragment.no_slab(count))?;
                    let part = fragment.in_slab(slab.len())?;
                    let bytes = &mut slab[part];
                    let source = fragment.address(&self.memory)?;
                    let parts = pool.parts(bytes)?;
                    let start = NonNull::from(bytes).cast::<u8>();
                    for (part, is_registered) in parts {
                        plan.add_to_host(source, start, part, is_registered);
                    }
                }
            }
        }
        Ok(())
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
