//! The pool whose slabs a copier reads and writes: in host memory, or on a device.

use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use crate::batch::Sides;
use crate::copy_plan::Plan;
use crate::cuda_memory::CudaMemory;
use crate::error::CudaError;
use crate::functions::Address;
use crate::plan::{Borders, Call, Direction, Limits, PlannedCopy, plan};
use crate::registered::RegisteredPool;
use crate::ways::sides;

/// A pool.
#[derive(Debug, Clone)]
pub(crate) enum PoolSide {
    /// In host memory that is registered with the driver.
    Host(Arc<RegisteredPool>),
    /// In memory of a device that the copier's context can access. The slabs of a transfer keep it:
    /// the copier does not, so that it can be given back while the copier exists.
    Device(Weak<CudaMemory>),
}

impl PoolSide {
    /// The pool in host memory.
    pub(crate) fn host(&self) -> Result<&Arc<RegisteredPool>, CudaError> {
        match self {
            Self::Host(pool) => Ok(pool),
            Self::Device(_) => Err(CudaError::OtherPool),
        }
    }

    /// Where a slab in host memory is in the pool, and its length.
    pub(crate) fn place(&self, slab: NonNull<[u8]>) -> Result<(usize, usize), CudaError> {
        Ok((self.host()?.expose(slab)?, slab.len()))
    }

    /// Where a slab on a device is in the pool, and its length.
    pub(crate) fn place_on_device(
        &self,
        address: Option<Address>,
        bytes: usize,
    ) -> Result<(usize, usize), CudaError> {
        let (Self::Device(pool), Some(address)) = (self, address) else {
            return Err(CudaError::OtherPool);
        };
        let pool = pool.upgrade().ok_or(CudaError::OtherPool)?;
        let offset = address.checked_sub(pool.memory().base()).ok_or(CudaError::OtherPool)?;
        let offset = usize::try_from(offset).map_err(|_| CudaError::OtherPool)?;
        match pool.memory().check(offset, bytes) {
            Ok(_) => Ok((offset, bytes)),
            Err(_) => Err(CudaError::OtherPool),
        }
    }
}

/// Plans copies between a pool on a device and other memory of a device: all by the driver.
pub(crate) fn plan_on_device(
    pool: &Weak<CudaMemory>,
    direction: Direction,
    copies: &[PlannedCopy],
    limits: &Limits,
) -> Result<Plan, CudaError> {
    let pool = pool.upgrade().ok_or(CudaError::OtherPool)?;
    let bytes = pool.memory().bytes();
    let borders = Borders { piece_bytes: bytes, registered_bytes: bytes };
    let mut all = Plan::default();
    for call in plan(direction, copies, &borders, limits, None)?.calls {
        // Without a table of costs, nothing but direct copies is planned.
        let Call::Direct(copies) = call else { return Err(CudaError::OtherPool) };
        for copy in copies {
            let near = pool.memory().base() + copy.offset as Address;
            let (target, source, bytes) = sides(direction, near, &copy);
            all.batch.push(Sides::Within, target, source, bytes);
        }
    }
    Ok(all)
}
