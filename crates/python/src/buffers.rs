//! Memory that Python and the store share. Only this file and `paged.rs` of the binding are unsafe.
//!
//! From Python: any object with a C-contiguous buffer (`bytes`, `bytearray`, `memoryview`, NumPy, a
//! CPU tensor's `numpy()`), read or filled in place. To Python: a slab as a buffer and as DLPack.
#![expect(unsafe_code, reason = "turns pointers from Python into slices, and slabs into pointers")]

use std::ffi::{CStr, c_int, c_void};
use std::fmt::Display;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;

use cascade_device::ForeignMemory;
use cascade_memory::{DmaBuf, Slab, SlabMut};
use cascade_store::TierName;
use cascade_transport::{Access, Region, TransportError};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyString};

use crate::arguments::type_error;
use crate::errors::ConfigError;
use crate::process_bound::ProcessBound;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyView>()?;
    module.add_class::<PyReservation>()
}

/// Description of a valid buffer in errors.
const BUFFER: &str = "a buffer: bytes, bytearray, memoryview or a NumPy array";

/// A range of bytes of a buffer. Its owner keeps the buffer exported.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    start: NonNull<u8>,
    bytes: usize,
}

/// The buffers of one call, and the span of each block in them.
struct Spans {
    /// Keeps the memory in place: Python refuses to resize or free an exported buffer.
    held: Vec<PyUntypedBuffer>,
    spans: Vec<Span>,
}

/// The bytes of the blocks of a put, one span for each key.
pub(crate) struct Sources(Spans);

/// The memory for the blocks of a get, one span for each key.
pub(crate) struct Targets(Spans);

/// A region of a transport in the memory of a buffer, which stays exported while the region lives.
///
/// The Python caller must not use its bytes while a batch moves them.
pub(crate) fn region_of(memory: &Bound<'_, PyAny>, access: Access) -> PyResult<Region> {
    let targets = Targets::new(memory, 1)?;
    let Some(span) = targets.0.spans.first().copied() else {
        return Err(type_error("memory", memory, BUFFER));
    };
    // SAFETY: the span is in a writable C-contiguous buffer that `targets`, the owner, keeps
    // exported. The Python caller keeps others from using it during a batch.
    Ok(unsafe { Region::of_memory(span.start, span.bytes, access, targets) })
}

/// A region of a transport at an address that the Python caller vouches for, as for memory of
/// other libraries: it stays mapped readable and writable while `owner` lives.
pub(crate) fn region_at(
    address: usize,
    bytes: usize,
    access: Access,
    owner: Py<PyAny>,
) -> PyResult<Region> {
    let Some(start) = NonNull::new(std::ptr::with_exposed_provenance_mut(address)) else {
        return Err(ConfigError::new_err("address: 0 is no address of memory"));
    };
    // SAFETY: the Python caller vouches for the memory, as the documentation of the method says.
    Ok(unsafe { Region::of_memory(start, bytes, access, owner) })
}

/// A region of a transport in memory of GPU number `gpu`, which `memory` keeps.
pub(crate) fn region_on_gpu(
    (range, memory): (DmaBuf, Arc<ForeignMemory>),
    gpu: u8,
    access: Access,
) -> Result<Region, TransportError> {
    // SAFETY: the Python caller vouches that its memory stays allocated as long as its owner, which
    // `memory` keeps, and that no other work of the GPU accesses what a batch moves.
    unsafe { Region::of_dmabuf(range, gpu, access, memory) }
}

// SAFETY: the pointers point into buffers that `held` keeps exported, which is memory without
// thread affinity. Only the release of `held` calls Python, and it attaches the thread itself.
unsafe impl Send for Spans {}
// SAFETY: as above; through a shared reference the memory is only read.
unsafe impl Sync for Spans {}

impl Sources {
    /// One buffer for each of `count` blocks, or one buffer with all blocks in equal pieces.
    ///
    /// The Python caller must not change their contents until the call ends.
    pub(crate) fn new(blocks: &Bound<'_, PyAny>, count: usize) -> PyResult<Self> {
        Spans::new(blocks, count, "blocks").map(Self)
    }

    /// The whole of one buffer.
    pub(crate) fn whole(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(object).map_err(|_| type_error(name, object, BUFFER))?;
        let whole = Span::of(&buffer, name)?;
        Ok(Self(Spans { held: vec![buffer], spans: vec![whole] }))
    }

    pub(crate) fn slices(&self) -> Vec<&[u8]> {
        // SAFETY: each span is in a C-contiguous buffer that `self` keeps exported, so it is mapped
        // and initialised while the slice, which borrows `self`, lives. The Python caller must not
        // change it until then, as `new` requires.
        let slice = |span: &Span| unsafe { slice::from_raw_parts(span.start.as_ptr(), span.bytes) };
        self.0.spans.iter().map(slice).collect()
    }
}

impl Targets {
    /// Like `Sources::new`, but writable and without overlap.
    pub(crate) fn new(buffers: &Bound<'_, PyAny>, count: usize) -> PyResult<Self> {
        let spans = Spans::new(buffers, count, "buffers")?;
        if let Some(at) = spans.held.iter().position(PyUntypedBuffer::readonly) {
            let message =
                format!("buffers[{at}] is read-only; give a writable buffer, such as bytearray");
            return Err(PyBufferError::new_err(message));
        }
        spans.check_disjoint()?;
        Ok(Self(spans))
    }

    pub(crate) fn slices(&mut self) -> Vec<&mut [u8]> {
        // SAFETY: as in `Sources::slices`. The buffers are writable and the spans disjoint (both
        // checked in `new`), and `&mut self` excludes other slices of them.
        let slice =
            |span: &Span| unsafe { slice::from_raw_parts_mut(span.start.as_ptr(), span.bytes) };
        self.0.spans.iter().map(slice).collect()
    }
}

impl Spans {
    fn new(object: &Bound<'_, PyAny>, count: usize, name: &str) -> PyResult<Self> {
        if let Ok(buffer) = PyUntypedBuffer::get(object) {
            return Self::split(buffer, count, name);
        }
        if object.is_instance_of::<PyString>() {
            return Err(type_error(name, object, "bytes; encode text with its method .encode()"));
        }
        let what = "one buffer of all blocks, or an iterable with one for each key";
        let items = object.try_iter().map_err(|_| type_error(name, object, what))?;
        let mut held = Vec::with_capacity(count);
        for (at, item) in items.enumerate() {
            if at == count {
                let message = format!("{name}: {count} keys but more than {count} {name}");
                return Err(PyValueError::new_err(message));
            }
            let item = item?;
            let buffer = PyUntypedBuffer::get(&item);
            held.push(buffer.map_err(|_| type_error(format_args!("{name}[{at}]"), &item, BUFFER))?);
        }
        if held.len() != count {
            let got = held.len();
            return Err(PyValueError::new_err(format!("{name}: {count} keys but {got} {name}")));
        }
        let spans = held
            .iter()
            .enumerate()
            .map(|(at, buffer)| Span::of(buffer, format_args!("{name}[{at}]")));
        let spans = spans.collect::<PyResult<_>>()?;
        Ok(Self { held, spans })
    }

    fn split(buffer: PyUntypedBuffer, count: usize, name: &str) -> PyResult<Self> {
        let whole = Span::of(&buffer, name)?;
        if count == 0 || whole.bytes % count != 0 {
            return Err(PyValueError::new_err(format!(
                "{name}: one buffer of {} bytes, which {count} keys do not divide; for blocks of \
                 different sizes, pass a list of buffers",
                whole.bytes
            )));
        }
        let bytes = whole.bytes / count;
        // SAFETY: `at * bytes` stays within the buffer, whose length is `count * bytes`.
        let start = |at: usize| unsafe { whole.start.add(at * bytes) };
        let spans = (0..count).map(|at| Span { start: start(at), bytes }).collect();
        Ok(Self { held: vec![buffer], spans })
    }

    fn check_disjoint(&self) -> PyResult<()> {
        let mut spans: Vec<Span> =
            self.spans.iter().filter(|span| span.bytes > 0).copied().collect();
        spans.sort_unstable_by_key(|span| span.start);
        for pair in spans.windows(2) {
            if pair[0].start.addr().get() + pair[0].bytes > pair[1].start.addr().get() {
                return Err(PyValueError::new_err("buffers: two buffers share memory"));
            }
        }
        Ok(())
    }
}

impl Span {
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The span of a whole contiguous buffer; `name` is its name in errors.
    pub(crate) fn of(buffer: &PyUntypedBuffer, name: impl Display) -> PyResult<Self> {
        if !buffer.is_c_contiguous() {
            return Err(PyBufferError::new_err(format!(
                "{name} is not contiguous in memory; pass a contiguous copy"
            )));
        }
        // The address of an empty buffer may be null.
        let start = NonNull::new(buffer.buf_ptr().cast()).unwrap_or(NonNull::dangling());
        Ok(Self { start, bytes: buffer.len_bytes() })
    }
}

/// A read-only view of a block in the pool. The block stays in memory as long as the view lives.
///
/// Supports the buffer protocol (`memoryview(view)`, `numpy.frombuffer(view, dtype)`) and DLPack.
#[pyclass(name = "View", module = "cascadekv", frozen)]
pub(crate) struct PyView {
    slab: ProcessBound<Slab>,
    tier: TierName,
}

impl PyView {
    pub(crate) fn new(slab: Slab, tier: TierName) -> Self {
        Self { slab: ProcessBound::new(slab), tier }
    }
}

#[pymethods]
impl PyView {
    /// The tier that the block was read from.
    #[getter]
    fn tier(&self) -> &str {
        self.tier
    }

    /// The address of the block in this process.
    #[getter]
    fn address(&self) -> PyResult<usize> {
        Ok(host_bytes(self.slab.get("view")?)?.as_ptr().addr())
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.slab.get("view")?.len())
    }

    fn __repr__(&self) -> PyResult<String> {
        Ok(format!("<View of {} bytes from {}>", self.__len__()?, self.tier))
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a View cannot be pickled; copy it with bytes(view)"))
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        DLPACK_DEVICE
    }

    /// A versioned DLPack capsule of a read-only byte array, for `numpy.from_dlpack` and others.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        slf: Bound<'py, Self>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        if stream.is_some() {
            return Err(PyBufferError::new_err("a view is on the CPU; pass stream=None"));
        }
        if max_version.is_none_or(|(major, _)| major < DLPACK_MAJOR) {
            return Err(PyBufferError::new_err(
                "a view is read-only, which requires DLPack 1.0; the consumer must pass \
                 max_version=(1, 0) or later",
            ));
        }
        if dl_device.is_some_and(|device| device != DLPACK_DEVICE) {
            return Err(PyBufferError::new_err("a view is on the CPU; pass dl_device=(1, 0)"));
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err("a view makes no copies; copy it with bytes(view)"));
        }
        let slab = slf.get().slab.get("view")?;
        let bytes = host_bytes(slab)?;
        let (start, bytes) = (NonNull::from(bytes).cast(), bytes.len());
        // SAFETY: a sealed slab stays mapped and unchanged while the view, its owner, lives.
        unsafe { dlpack(slf.into_any(), start, bytes) }
    }

    /// # Safety
    /// Only Python may call this, with its own request.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let bytes = host_bytes(slf.get().slab.get("view")?)?;
        let memory = (NonNull::from(bytes).cast(), bytes.len());
        // SAFETY: Python's request; a sealed slab stays mapped and unchanged while its view lives.
        unsafe { export(slf.as_any(), view, flags, memory, BufferAccess::Read) }
    }
}

/// Writable memory of the pool for a block, as a buffer. `Store.put_reserved` stores it.
///
/// A reservation that is not put returns its memory to the pool when it is released or dropped.
#[pyclass(name = "Reservation", module = "cascadekv")]
pub(crate) struct PyReservation {
    slab: Option<ProcessBound<SlabMut>>,
    exports: usize,
}

impl PyReservation {
    pub(crate) fn new(slab: SlabMut) -> Self {
        Self { slab: Some(ProcessBound::new(slab)), exports: 0 }
    }

    /// Checks that the slab can be taken: it exists, belongs to this process, and is not exported.
    pub(crate) fn check(&self) -> PyResult<()> {
        self.slab()?;
        if self.exports > 0 {
            return Err(PyBufferError::new_err(format!(
                "{} buffers of this reservation are still in use; release its arrays and \
                 memoryviews first, because a stored block must not change",
                self.exports
            )));
        }
        Ok(())
    }

    /// Takes the slab out, after the same checks.
    pub(crate) fn take(&mut self) -> PyResult<SlabMut> {
        self.check()?;
        self.slab.take().ok_or_else(used_up)?.into_inner("reservation")
    }

    fn slab(&self) -> PyResult<&SlabMut> {
        self.slab.as_ref().ok_or_else(used_up)?.get("reservation")
    }

    fn slab_mut(&mut self) -> PyResult<&mut SlabMut> {
        self.slab.as_mut().ok_or_else(used_up)?.get_mut("reservation")
    }
}

/// The bytes of a block in host memory, to share with Python.
fn host_bytes(slab: &Slab) -> PyResult<&[u8]> {
    slab.host().ok_or_else(in_device_memory)
}

/// A buffer and a DLPack tensor on the CPU are addresses of host memory.
pub(crate) fn in_device_memory() -> PyErr {
    PyBufferError::new_err("the block is in device memory; copy it with get, or put it with put")
}

fn used_up() -> PyErr {
    PyValueError::new_err("this reservation was put or released already; reserve another")
}

#[pymethods]
impl PyReservation {
    fn __len__(&self) -> PyResult<usize> {
        Ok(self.slab()?.len())
    }

    /// Returns the memory to the pool.
    fn release(&mut self) -> PyResult<()> {
        self.take().map(drop)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a Reservation cannot be pickled"))
    }

    /// # Safety
    /// Only Python may call this, with its own request.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let mut this = slf.try_borrow_mut()?;
        let bytes = this.slab_mut()?.host_mut().ok_or_else(in_device_memory)?;
        let memory = (NonNull::from(&mut *bytes).cast(), bytes.len());
        // SAFETY: Python's request; the slab stays mapped and belongs to this object while buffers
        // are exported: `take` refuses until `__releasebuffer__` was called for every export.
        unsafe { export(slf.as_any(), view, flags, memory, BufferAccess::Write) }?;
        this.exports += 1;
        Ok(())
    }

    /// # Safety
    /// Only Python may call this, once for each successful `__getbuffer__`.
    unsafe fn __releasebuffer__(&mut self, _view: *mut ffi::Py_buffer) {
        self.exports -= 1;
    }
}

/// The access through an exported buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BufferAccess {
    /// Read-only, because a sealed block never changes.
    Read,
    /// Read and write, for a reservation.
    Write,
}

/// Answers a buffer request of Python with the memory at `start`.
///
/// # Safety
/// `view` is the request that Python passed to `__getbuffer__`. `start` points to `bytes` bytes
/// that stay mapped, and for `BufferAccess::Read` unchanged, as long as `owner` lives.
unsafe fn export(
    owner: &Bound<'_, PyAny>,
    view: *mut ffi::Py_buffer,
    flags: c_int,
    (start, bytes): (NonNull<u8>, usize),
    access: BufferAccess,
) -> PyResult<()> {
    let length = isize::try_from(bytes).expect("a slab is smaller than the address space");
    let readonly = c_int::from(access == BufferAccess::Read);
    let start = start.as_ptr().cast::<c_void>();
    // SAFETY: the caller passes Python's own request. The call takes a reference to `owner`, which
    // keeps the memory until the buffer is released, and refuses write access if `readonly` is set.
    let status =
        unsafe { ffi::PyBuffer_FillInfo(view, owner.as_ptr(), start, length, readonly, flags) };
    if status == 0 { Ok(()) } else { Err(PyErr::fetch(owner.py())) }
}

const DLPACK_NAME: &CStr = c"dltensor_versioned";
const DLPACK_MAJOR: u32 = 1;
const DLPACK_READ_ONLY: u64 = 1;
/// `kDLCPU`, device 0.
const DLPACK_DEVICE: (i32, i32) = (1, 0);

/// `DLManagedTensorVersioned` of DLPack 1.0 with one dimension, followed by the data it points to.
#[repr(C)]
struct ManagedTensor {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedTensor)>,
    flags: u64,
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    dimensions: i32,
    type_code: u8,
    type_bits: u8,
    type_lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
    // After the fields that DLPack defines: the targets of the pointers above.
    extent: i64,
    stride: i64,
    owner: Option<Py<PyAny>>,
}

/// A capsule with a read-only byte array. It keeps `owner` until the consumer deletes the tensor.
///
/// # Safety
/// `start` points to `bytes` bytes that stay mapped and unchanged as long as `owner` lives.
unsafe fn dlpack(
    owner: Bound<'_, PyAny>,
    start: NonNull<u8>,
    bytes: usize,
) -> PyResult<Bound<'_, PyCapsule>> {
    let py = owner.py();
    let tensor = Box::into_raw(Box::new(ManagedTensor {
        major: DLPACK_MAJOR,
        minor: 0,
        context: ptr::null_mut(),
        deleter: Some(delete_tensor),
        flags: DLPACK_READ_ONLY,
        data: start.as_ptr().cast(),
        device_type: DLPACK_DEVICE.0,
        device_id: DLPACK_DEVICE.1,
        dimensions: 1,
        type_code: 1, // kDLUInt
        type_bits: 8,
        type_lanes: 1,
        shape: ptr::null_mut(),
        strides: ptr::null_mut(),
        byte_offset: 0,
        extent: i64::try_from(bytes).expect("a slab is smaller than the address space"),
        stride: 1,
        owner: Some(owner.unbind()),
    }));
    // SAFETY: `tensor` was just allocated by Box and has no other user.
    let shape = unsafe { &raw mut (*tensor).extent };
    // SAFETY: as above.
    let strides = unsafe { &raw mut (*tensor).stride };
    // SAFETY: as above; the box does not move until `delete_tensor`, so the pointers stay valid.
    unsafe { (*tensor).shape = shape };
    // SAFETY: as above.
    unsafe { (*tensor).strides = strides };
    let pointer = NonNull::new(tensor.cast()).expect("Box never returns null");
    // SAFETY: the pointer is to a live `ManagedTensor`. The capsule's destructor frees it unless a
    // consumer took ownership by renaming the capsule.
    let capsule = unsafe {
        PyCapsule::new_with_pointer_and_destructor(py, pointer, DLPACK_NAME, Some(drop_capsule))
    };
    if capsule.is_err() {
        // SAFETY: there is no capsule, so this function still owns the tensor.
        unsafe { delete_tensor(tensor) };
    }
    capsule
}

/// Frees a tensor. Its owner calls this once, from any thread.
unsafe extern "C" fn delete_tensor(tensor: *mut ManagedTensor) {
    // SAFETY: the pointer is from `Box::into_raw` in `dlpack`; DLPack calls the deleter only once.
    let mut tensor = unsafe { Box::from_raw(tensor) };
    // The caller may not be attached to the interpreter. After the interpreter's end, the owner
    // cannot be released and is leaked.
    let _released = Python::try_attach(|_| tensor.owner.take());
}

/// Frees the tensor of a capsule that has no consumer.
unsafe extern "C" fn drop_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: Python passes the capsule that it is about to free; the call only compares its name.
    if unsafe { ffi::PyCapsule_IsValid(capsule, DLPACK_NAME.as_ptr()) } == 0 {
        return; // A consumer renamed it and owns the tensor.
    }
    // SAFETY: the capsule has this name, so its pointer is the tensor of `dlpack`.
    let tensor = unsafe { ffi::PyCapsule_GetPointer(capsule, DLPACK_NAME.as_ptr()) };
    // SAFETY: the tensor has no consumer, so this is its only deletion.
    unsafe { delete_tensor(tensor.cast()) };
}
