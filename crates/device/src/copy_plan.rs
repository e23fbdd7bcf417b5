//! What a submission hands to the driver: batches, kernels, and parts that are not registered.
#![expect(unsafe_code, reason = "counts addresses within slabs")]

use std::ops::Range;
use std::ptr::NonNull;

use crate::batch::{Batch, Sides, host_pointer};
use crate::copy_counts::Submission;
use crate::error::CudaError;
use crate::functions::Address;
use crate::plan::{Direction, PlannedCopy};
use crate::registered::RegisteredPool;
use crate::ways::{Launch, sides};

/// What the copies of a submission become.
#[derive(Default)]
pub(crate) struct Plan {
    pub(crate) batch: Batch,
    pub(crate) kernels: Vec<Launch>,
    pub(crate) staged: Vec<Staged>,
}

/// A part of a slab that is not registered.
pub(crate) enum Staged {
    ToDevice { target: Address, source: NonNull<u8>, bytes: usize },
    ToHost { source: Address, target: NonNull<u8>, bytes: usize },
}

impl Plan {
    /// Its copies, for the counts.
    pub(crate) fn submission(&self) -> Submission {
        let mut submission = Submission::default();
        self.batch.count(&mut submission);
        for launch in &self.kernels {
            launch.count(&mut submission);
        }
        for staged in &self.staged {
            let (count, bytes) = match staged {
                Staged::ToDevice { bytes, .. } => (&mut submission.to_device, *bytes),
                Staged::ToHost { bytes, .. } => (&mut submission.to_host, *bytes),
            };
            count.add(bytes);
            submission.unregistered_bytes += bytes;
        }
        submission
    }

    /// Adds copies of registered memory.
    pub(crate) fn add(
        &mut self,
        pool: &RegisteredPool,
        direction: Direction,
        copies: &[PlannedCopy],
    ) {
        let kind = match direction {
            Direction::ToDevice => Sides::ToDevice,
            Direction::ToHost => Sides::ToHost,
        };
        for copy in copies {
            let (target, source, bytes) = sides(direction, pool.host_address(copy.offset), copy);
            self.batch.push(kind, target, source, bytes);
        }
    }

    /// Adds copies of memory that is not registered.
    pub(crate) fn add_staged(
        &mut self,
        pool: &RegisteredPool,
        direction: Direction,
        copies: &[PlannedCopy],
    ) -> Result<(), CudaError> {
        for copy in copies {
            let (host, bytes) = (host_pointer(pool.host_address(copy.offset))?, copy.bytes);
            self.staged.push(match direction {
                Direction::ToDevice => {
                    Staged::ToDevice { target: copy.address, source: host, bytes }
                }
                Direction::ToHost => Staged::ToHost { source: copy.address, target: host, bytes },
            });
        }
        Ok(())
    }

    pub(crate) fn add_to_device(
        &mut self,
        to: Address,
        from: NonNull<u8>,
        part: Range<usize>,
        direct: bool,
    ) {
        let (target, bytes) = (to + part.start as Address, part.len());
        let source = offset(from, part.start);
        if direct {
            let source = source.as_ptr().expose_provenance() as Address;
            self.batch.push(Sides::ToDevice, target, source, bytes);
        } else {
            self.staged.push(Staged::ToDevice { target, source, bytes });
        }
    }

    pub(crate) fn add_to_host(
        &mut self,
        from: Address,
        to: NonNull<u8>,
        part: Range<usize>,
        direct: bool,
    ) {
        let (source, bytes) = (from + part.start as Address, part.len());
        let target = offset(to, part.start);
        if direct {
            let target = target.as_ptr().expose_provenance() as Address;
            self.batch.push(Sides::ToHost, target, source, bytes);
        } else {
            self.staged.push(Staged::ToHost { source, target, bytes });
        }
    }
}

/// A place in a slab.
fn offset(start: NonNull<u8>, offset: usize) -> NonNull<u8> {
    // SAFETY: parts of a slab lie in it.
    unsafe { start.add(offset) }
}
