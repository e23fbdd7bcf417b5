//! Many copies by one call of the driver, in either of the two forms that drivers have.
#![expect(unsafe_code, reason = "calls the driver")]

use std::fmt;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::copy_counts::Submission;
use crate::driver::Driver;
use crate::error::{CudaError, NOT_SUPPORTED};
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

/// The memory that a copy reads and writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sides {
    ToDevice,
    ToHost,
    Within,
}

/// Addresses of copies, each in its own registration. Those of host memory are exposed.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    sides: Vec<Sides>,
    targets: Vec<Address>,
    sources: Vec<Address>,
    lengths: Vec<usize>,
}

/// Starts batches: by the batched copy, or by a call for each copy where the driver has none or
/// refuses it.
#[derive(Debug)]
pub(crate) struct Batcher {
    form: Option<BatchForm>,
    /// Whether the driver has a batched copy and refused it.
    is_refused: AtomicBool,
}

impl Batcher {
    pub(crate) fn new(driver: &Driver) -> Self {
        Self { form: BatchForm::of(driver), is_refused: AtomicBool::new(false) }
    }

    /// The form in use; none if each copy is one call.
    pub(crate) fn form(&self) -> Option<BatchForm> {
        // Relaxed: a thread that reads the old value is refused again.
        self.form.filter(|_| !self.is_refused.load(Ordering::Relaxed))
    }

    /// The copies that one call makes.
    pub(crate) fn copies_per_call(&self) -> usize {
        if self.form().is_some() { BATCH_MAX } else { 1 }
    }

    /// Starts all copies of a batch.
    ///
    /// # Safety
    /// As `Stream::copy_to_device` and `Stream::copy_to_host`, for each copy.
    pub(crate) unsafe fn start(&self, stream: &Stream, batch: &mut Batch) -> Result<(), CudaError> {
        let mut first = 0;
        while let Some(form) = self.form().filter(|_| first + 1 < batch.lengths.len()) {
            // SAFETY: the caller's promise.
            match unsafe { batch.start(form, stream, first) } {
                Ok(count) => first += count,
                Err(CudaError::Call(error)) if error.code == NOT_SUPPORTED => {
                    self.is_refused.store(true, Ordering::Relaxed);
                }
                Err(error) => return Err(error),
            }
        }
        for at in first..batch.lengths.len() {
            // SAFETY: the caller's promise.
            unsafe { batch.start_one(stream, at) }?;
        }
        Ok(())
    }
}

/// The pointer of an exposed host address.
pub(crate) fn host_pointer(address: Address) -> Result<NonNull<u8>, CudaError> {
    let address = usize::try_from(address).unwrap_or_default();
    let pointer = std::ptr::with_exposed_provenance_mut::<u8>(address);
    NonNull::new(pointer).ok_or(CudaError::OtherPool)
}

impl Batch {
    /// Adds its copies to those of a submission.
    pub(crate) fn count(&self, submission: &mut Submission) {
        for (sides, bytes) in self.sides.iter().zip(&self.lengths) {
            match sides {
                Sides::ToDevice => submission.to_device.add(*bytes),
                Sides::ToHost => submission.to_host.add(*bytes),
                Sides::Within => submission.within.add(*bytes),
            }
        }
    }

    pub(crate) fn push(&mut self, sides: Sides, target: Address, source: Address, bytes: usize) {
        self.sides.push(sides);
        self.targets.push(target);
        self.sources.push(source);
        self.lengths.push(bytes);
    }

    /// Starts one copy.
    ///
    /// # Safety
    /// As `Batcher::start`.
    unsafe fn start_one(&self, stream: &Stream, at: usize) -> Result<(), CudaError> {
        let (target, source, bytes) = (self.targets[at], self.sources[at], self.lengths[at]);
        match self.sides[at] {
            Sides::ToDevice => {
                let source = host_pointer(source)?;
                // SAFETY: the caller's promise.
                unsafe { stream.copy_to_device(target, source, bytes) }
            }
            Sides::ToHost => {
                let target = host_pointer(target)?;
                // SAFETY: the caller's promise.
                unsafe { stream.copy_to_host(target, source, bytes) }
            }
            // SAFETY: the caller's promise.
            Sides::Within => unsafe { stream.copy_within(target, source, bytes) },
        }
    }

    /// Starts at most [`BATCH_MAX`] copies, from the one at `first`. Returns how many.
    ///
    /// # Safety
    /// As `Batcher::start`.
    unsafe fn start(
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
