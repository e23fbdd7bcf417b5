//! Many copies by one call of the driver, in either of the two forms that drivers have.
#![expect(unsafe_code, reason = "calls the driver")]

use std::fmt;
use std::ptr::null_mut;

use crate::driver::Driver;
use crate::error::CudaError;
use crate::functions::{ACCESS_IN_STREAM_ORDER, Address, CopyAttributes, Handle, Status};
use crate::stream::Stream;

/// Copies of one call. Larger batches crashed some drivers.
pub(crate) const BATCH_MAX: usize = 4096;

/// The version of CUDA that changed the arguments.
const WITHOUT_INDEX_SINCE: i32 = 13_000;

/// The form of the batched copy that a driver has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BatchForm {
    /// CUDA 12.8: with an index of the copy that failed.
    WithIndex,
    /// CUDA 13.0: without.
    WithoutIndex,
}

impl fmt::Display for BatchForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::WithIndex => "cuMemcpyBatchAsync",
            Self::WithoutIndex => "cuMemcpyBatchAsync_v2",
        })
    }
}

impl BatchForm {
    /// The form that a driver has. Its version decides, and not which name it exports.
    pub fn of(driver: &Driver) -> Option<Self> {
        let functions = &driver.functions;
        if driver.version().0 >= WITHOUT_INDEX_SINCE && functions.memcpy_batch.pointer.is_some() {
            return Some(Self::WithoutIndex);
        }
        functions.memcpy_batch_with_index.pointer.map(|_| Self::WithIndex)
    }
}

/// Addresses of copies, each in its own registration.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) targets: Vec<Address>,
    pub(crate) sources: Vec<Address>,
    pub(crate) lengths: Vec<usize>,
}

impl Batch {
    pub(crate) fn push(&mut self, target: Address, source: Address, bytes: usize) {
        self.targets.push(target);
        self.sources.push(source);
        self.lengths.push(bytes);
    }

    /// Starts at most [`BATCH_MAX`] copies, from the one at `first`. Returns how many.
    ///
    /// # Safety
    /// As `Stream::copy_to_device` and `Stream::copy_to_host`, for each copy.
    pub(crate) unsafe fn start(
        &mut self,
        form: BatchForm,
        stream: &Stream,
        first: usize,
    ) -> Result<usize, CudaError> {
        let last = self.lengths.len().min(first + BATCH_MAX);
        let count = last - first;
        let targets = self.targets[first..last].as_mut_ptr();
        let sources = self.sources[first..last].as_mut_ptr();
        let lengths = self.lengths[first..last].as_mut_ptr();
        let mut attributes = CopyAttributes {
            source_access_order: ACCESS_IN_STREAM_ORDER,
            ..CopyAttributes::default()
        };
        let attributes = &raw mut attributes;
        // The attributes hold from the first copy on.
        let mut holds_from = 0;
        let holds_from = &raw mut holds_from;
        let (context, stream) = (stream.context(), stream.handle());
        match form {
            BatchForm::WithIndex => {
                type Call = unsafe extern "C" fn(
                    *mut Address,
                    *mut Address,
                    *mut usize,
                    usize,
                    *mut CopyAttributes,
                    *mut usize,
                    usize,
                    *mut usize,
                    Handle,
                ) -> Status;
                let call = |copy: Call| {
                    let index = null_mut();
                    // SAFETY: three arrays of `count`, one attribute; the copies by the caller's
                    // promise. The index of a failed copy may be null.
                    unsafe {
                        copy(
                            targets, sources, lengths, count, attributes, holds_from, 1, index,
                            stream,
                        )
                    }
                };
                context.call(|functions| &functions.memcpy_batch_with_index, call)
            }
            BatchForm::WithoutIndex => {
                type Call = unsafe extern "C" fn(
                    *mut Address,
                    *mut Address,
                    *mut usize,
                    usize,
                    *mut CopyAttributes,
                    *mut usize,
                    usize,
                    Handle,
                ) -> Status;
                let call = |copy: Call| {
                    // SAFETY: three arrays of `count`, one attribute; the copies by the caller's
                    // promise.
                    unsafe {
                        copy(targets, sources, lengths, count, attributes, holds_from, 1, stream)
                    }
                };
                context.call(|functions| &functions.memcpy_batch, call)
            }
        }?;
        Ok(count)
    }
}
