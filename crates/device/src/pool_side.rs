//! The pool whose slabs a copier reads and writes: in host memory, or on a device.

use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use crate::batch::Sides;
use crate::context::Context;
use crate::copy_plan::Plan;
use crate::cuda_memory::CudaMemory;
use crate::error::CudaError;
use crate::functions::Address;
use crate::kernel::WARPS_ON_DEVICE;
use crate::plan::{Borders, Call, Direction, Limits, PlannedCopy, plan};
use crate::registered::RegisteredPool;
use crate::ways::{Addresses, Launch, sides};

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
    /// A pool on a device, for copies of a context that it is mapped for.
    pub(crate) fn of_device(context: &Context, pool: &Arc<CudaMemory>) -> Result<Self, CudaError> {
        if pool.context().device() == context.device() {
            Ok(Self::Device(Arc::downgrade(pool)))
        } else {
            Err(CudaError::OtherPool)
        }
    }

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

/// Plans copies between a pool on a device and other memory of a device: all by the driver, or all
/// by the kernel.
pub(crate) fn plan_on_device(
    pool: &Weak<CudaMemory>,
    direction: Direction,
    copies: &[PlannedCopy],
    limits: &Limits,
    by_kernel: bool,
) -> Result<Plan, CudaError> {
    let pool = pool.upgrade().ok_or(CudaError::OtherPool)?;
    let bytes = pool.memory().bytes();
    let borders = Borders { piece_bytes: bytes, registered_bytes: bytes };
    let mut all = Plan::default();
    let mut addresses = Vec::with_capacity(copies.len());
    for call in plan(direction, copies, &borders, limits, None)?.calls {
        // Without a table of costs, nothing but direct copies is planned.
        let Call::Direct(copies) = call else { return Err(CudaError::OtherPool) };
        addresses.extend(copies.iter().map(|copy| {
            let near = pool.memory().base() + copy.offset as Address;
            sides(direction, near, copy)
        }));
    }
    if by_kernel {
        all.kernels = launches(&addresses, limits.fragments_per_launch);
    } else {
        for (target, source, bytes) in addresses {
            all.batch.push(Sides::Within, target, source, bytes);
        }
    }
    Ok(all)
}

/// The least bytes of a piece, but for the last one of a copy: two rounds of a warp.
const PIECE_MIN: usize = 4 << 10;

/// Divides copies into pieces, so that all warps have as much to do: a warp copies one fragment
/// after the other, and a block of 2 MiB would take it hundreds of microseconds.
fn launches(copies: &[Addresses], pieces_max: usize) -> Vec<Launch> {
    let total = copies.iter().fold(0_usize, |total, (.., bytes)| total.saturating_add(*bytes));
    let piece_bytes = (total / WARPS_ON_DEVICE).max(1).next_multiple_of(PIECE_MIN);
    let mut launches = Vec::new();
    let (mut pieces, mut begun) = (Vec::new(), 0);
    for (target, source, bytes) in copies {
        for start in (0..*bytes).step_by(piece_bytes) {
            if pieces.len() == pieces_max {
                let pieces = std::mem::take(&mut pieces);
                launches.push(Launch::Within { pieces, copies: std::mem::take(&mut begun) });
            }
            begun += u64::from(start == 0);
            let offset = start as Address;
            pieces.push((target + offset, source + offset, piece_bytes.min(bytes - start)));
        }
    }
    if !pieces.is_empty() {
        launches.push(Launch::Within { pieces, copies: begun });
    }
    launches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_each_byte_once_and_keep_all_warps_busy() {
        let block = |at: usize, bytes| ((at << 32) as Address, (at << 24) as Address + 5, bytes);
        let cases = [
            vec![block(1, 2 << 20)],
            vec![block(1, 1), block(2, 4096), block(3, 4097)],
            (1..129).map(|at| block(at, 2 << 20)).collect(),
            (1..9000).map(|at| block(at, 4096)).collect(),
        ];
        for copies in cases {
            let (mut ends, mut begun) = (Vec::<Addresses>::new(), 0);
            for launch in launches(&copies, 4096) {
                let Launch::Within { pieces, copies } = launch else { panic!("{launch:?}") };
                assert!((1..=4096).contains(&pieces.len()));
                begun += copies;
                for (target, source, bytes) in pieces {
                    match ends.last_mut() {
                        Some(last) if last.0 + last.2 as Address == target => {
                            assert_eq!(last.1 + last.2 as Address, source);
                            last.2 += bytes;
                        }
                        _ => ends.push((target, source, bytes)),
                    }
                }
            }
            assert_eq!(begun, copies.len() as u64);
            assert_eq!(ends, copies);
        }
        let count = |copies: &[Addresses]| match &launches(copies, 4096)[..] {
            [Launch::Within { pieces, .. }] => pieces.len(),
            other => panic!("{other:?}"),
        };
        assert_eq!(count(&[block(1, 2 << 20)]), 512);
        let many: Vec<Addresses> = (1..129).map(|at| block(at, 2 << 20)).collect();
        assert_eq!(count(&many), WARPS_ON_DEVICE);
        assert!(launches(&[], 4096).is_empty());
    }
}
