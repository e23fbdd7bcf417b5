//! Memory that crosses between Python and the store. Unsafe in the binding is here and in
//! `paged.rs` only.
//!
//! Inwards: any object with a C-contiguous buffer (`bytes`, `bytearray`, `memoryview`, NumPy, a
//! CPU tensor's `numpy()`), read or filled in place. Outwards: a slab as a buffer and as DLPack.
#![expect(unsafe_code, reason = "turns pointers from Python into slices, and slabs into pointers")]

use std::ffi::{CStr, c_int, c_void};
use std::fmt::Display;
use std::ptr::{self, NonNull};
use std::slice;

use cascade_memory::{Slab, SlabMut};
use cascade_store::TierName;
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::arguments::wrong;
use crate::owned::Owned;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyView>()?;
    module.add_class::<PyReservation>()
}

/// What has bytes to read or fill.
const BUFFER: &str = "a buffer: bytes, bytearray, memoryview or a NumPy array";

/// Some bytes of a buffer that is held elsewhere.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    start: NonNull<u8>,
    bytes: usize,
}

/// The buffers of one call and the piece of them that belongs to each block.
struct Spans {
    /// Keeps the memory where it is: Python refuses to resize or free an exported buffer.
    held: Vec<PyUntypedBuffer>,
    spans: Vec<Span>,
}

/// Blocks to read, one for each key.
pub(crate) struct Sources(Spans);

/// Memory to fill, one piece for each key.
pub(crate) struct Targets(Spans);

// SAFETY: the pointers lead into buffers that `held` keeps exported, which is memory without
// thread affinity; nothing here calls Python but the release of `held`, which attaches itself.
unsafe impl Send for Spans {}
// SAFETY: as above; through a shared reference the memory is only read.
unsafe impl Sync for Spans {}

impl Sources {
    /// One buffer for each of `count` blocks, or one buffer that holds them all in equal pieces.
    ///
    /// The caller must not change their contents until the call ends, as with any writer.
    pub(crate) fn new(blocks: &Bound<'_, PyAny>, count: usize) -> PyResult<Self> {
        Spans::new(blocks, count, "blocks").map(Self)
    }

    /// The whole of one buffer.
    pub(crate) fn whole(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(object).map_err(|_| wrong(name, object, BUFFER))?;
        let whole = Span::of(&buffer, name)?;
        Ok(Self(Spans { held: vec![buffer], spans: vec![whole] }))
    }

    pub(crate) fn slices(&self) -> Vec<&[u8]> {
        // SAFETY: each span lies in a C-contiguous buffer that `self` keeps exported, so it is
        // mapped and initialised while the slice, which borrows `self`, lives. The caller of the
        // Python function keeps it unchanged until then, as `new` says.
        let slice = |span: &Span| unsafe { slice::from_raw_parts(span.start.as_ptr(), span.bytes) };
        self.0.spans.iter().map(slice).collect()
    }
}

impl Targets {
    /// Like `Sources::new`, but writable and without overlap.
    pub(crate) fn new(buffers: &Bound<'_, PyAny>, count: usize) -> PyResult<Self> {
        let spans = Spans::new(buffers, count, "buffers")?;
        if let Some(at) = spans.held.iter().position(PyUntypedBuffer::readonly) {
            let told = format!("buffers[{at}] is read-only; give a writable one (bytearray)");
            return Err(PyBufferError::new_err(told));
        }
        spans.check_disjoint()?;
        Ok(Self(spans))
    }

    pub(crate) fn slices(&mut self) -> Vec<&mut [u8]> {
        // SAFETY: as in `Sources::slices`; the buffers are writable and the spans disjoint (both
        // checked in `new`), and `&mut self` excludes other slices, so each is the only one.
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
        let what = "one buffer of all blocks, or an iterable with one for each key";
        let items = object.try_iter().map_err(|_| wrong(name, object, what))?;
        let mut held = Vec::with_capacity(count);
        for (at, item) in items.enumerate() {
            if at == count {
                let told = format!("{name}: {count} keys but more than {count} {name}");
                return Err(PyValueError::new_err(told));
            }
            let item = item?;
            let buffer = PyUntypedBuffer::get(&item);
            held.push(buffer.map_err(|_| wrong(format_args!("{name}[{at}]"), &item, BUFFER))?);
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
                "{name}: one buffer of {} bytes, which {count} keys do not divide; pass a list of \
                 buffers for blocks of different sizes",
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
                return Err(PyValueError::new_err("buffers: two of them share memory"));
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

    /// The whole of a buffer, if it is contiguous; an error calls it `name`.
    pub(crate) fn of(buffer: &PyUntypedBuffer, name: impl Display) -> PyResult<Self> {
        if !buffer.is_c_contiguous() {
            return Err(PyBufferError::new_err(format!(
                "{name} is not contiguous in memory; pass a contiguous copy"
            )));
        }
        // An empty buffer may have no address.
        let start = NonNull::new(buffer.buf_ptr().cast()).unwrap_or(NonNull::dangling());
        Ok(Self { start, bytes: buffer.len_bytes() })
    }
}

/// A block in the pool, read in place; the block stays until the last user drops this.
///
/// A read-only buffer (`memoryview(view)`, `numpy.frombuffer(view, dtype)`) and a DLPack exporter.
#[pyclass(name = "View", module = "cascadekv", frozen)]
pub(crate) struct PyView {
    slab: Owned<Slab>,
    tier: TierName,
}

impl PyView {
    pub(crate) fn new(slab: Slab, tier: TierName) -> Self {
        Self { slab: Owned::new(slab), tier }
    }
}

#[pymethods]
impl PyView {
    /// The tier where the block was found.
    #[getter]
    fn tier(&self) -> &str {
        self.tier
    }

    /// Where the block starts in this process's memory.
    #[getter]
    fn address(&self) -> PyResult<usize> {
        Ok(self.slab.get("view")?.pointer().addr().get())
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

    /// A versioned capsule of a read-only array of bytes, for `numpy.from_dlpack` and others.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        slf: Bound<'py, Self>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        if stream.is_some() {
            return Err(PyBufferError::new_err("a view is on the CPU, where streams mean nothing"));
        }
        if max_version.is_none_or(|(major, _)| major < DLPACK_MAJOR) {
            return Err(PyBufferError::new_err(
                "a view is read-only, which only DLPack 1.0 and later can say; the consumer must \
                 pass max_version=(1, 0) or later",
            ));
        }
        if dl_device.is_some_and(|device| device != DLPACK_DEVICE) {
            return Err(PyBufferError::new_err("a view is on the CPU, device (1, 0)"));
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err("a view makes no copies; use bytes(view)"));
        }
        let slab = slf.get().slab.get("view")?;
        let (start, bytes) = (slab.pointer(), slab.len());
        // SAFETY: a sealed slab stays mapped and unchanged while the view, its owner, holds it.
        unsafe { dlpack(slf.into_any(), start, bytes) }
    }

    /// # Safety
    /// Python alone calls this, with its own request.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let slab = slf.get().slab.get("view")?;
        let memory = (slab.pointer(), slab.len());
        // SAFETY: Python's request; a sealed slab stays mapped and unchanged while its view lives.
        unsafe { export(slf.as_any(), view, flags, memory, Access::Read) }
    }
}

/// Memory of the pool to write a block into, before it has a key: a writable buffer.
///
/// Goes back to the pool unless `Store.put_reserved` takes it.
#[pyclass(name = "Reservation", module = "cascadekv")]
pub(crate) struct PyReservation {
    slab: Option<Owned<SlabMut>>,
    exports: usize,
}

impl PyReservation {
    pub(crate) fn new(slab: SlabMut) -> Self {
        Self { slab: Some(Owned::new(slab)), exports: 0 }
    }

    /// Whether the slab could be taken now: it is there, of this process, and nobody can write it.
    pub(crate) fn check(&self) -> PyResult<()> {
        self.slab()?;
        if self.exports > 0 {
            return Err(PyBufferError::new_err(format!(
                "{} buffers of this reservation are still in use; release the arrays and \
                 memoryviews first, so that nobody writes a sealed block",
                self.exports
            )));
        }
        Ok(())
    }

    /// Takes the slab, after `check`.
    pub(crate) fn take(&mut self) -> PyResult<SlabMut> {
        self.check()?;
        self.slab.take().ok_or_else(used_up)?.into_inner("reservation")
    }

    fn slab(&self) -> PyResult<&SlabMut> {
        self.slab.as_ref().ok_or_else(used_up)?.get("reservation")
    }
}

fn used_up() -> PyErr {
    PyValueError::new_err("this reservation was put or released already; reserve another")
}

#[pymethods]
impl PyReservation {
    fn __len__(&self) -> PyResult<usize> {
        Ok(self.slab()?.len())
    }

    /// Gives the memory back to the pool unused.
    fn release(&mut self) -> PyResult<()> {
        self.take().map(drop)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a Reservation cannot be pickled"))
    }

    /// # Safety
    /// Python alone calls this, with its own request.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let mut this = slf.try_borrow_mut()?;
        let slab = this.slab()?;
        let memory = (slab.pointer(), slab.len());
        // SAFETY: Python's request; the slab stays mapped, and this object's alone, while buffers
        // are out: `take` refuses until `__releasebuffer__` has balanced every export.
        unsafe { export(slf.as_any(), view, flags, memory, Access::Write) }?;
        this.exports += 1;
        Ok(())
    }

    /// # Safety
    /// Python alone calls this, once for each successful `__getbuffer__`.
    unsafe fn __releasebuffer__(&mut self, _view: *mut ffi::Py_buffer) {
        self.exports -= 1;
    }
}

/// Who may write through an exported buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    /// Nobody: a sealed block never changes.
    Read,
    /// The holder of a reservation.
    Write,
}

/// Answers a request for a buffer with the memory at `start`.
///
/// # Safety
/// `view` is the request that Python passed to `__getbuffer__`; `start` leads to `bytes` bytes
/// that stay mapped, and for `Access::Read` unchanged, as long as `owner` lives.
unsafe fn export(
    owner: &Bound<'_, PyAny>,
    view: *mut ffi::Py_buffer,
    flags: c_int,
    (start, bytes): (NonNull<u8>, usize),
    access: Access,
) -> PyResult<()> {
    let length = isize::try_from(bytes).expect("a slab is smaller than the address space");
    let readonly = c_int::from(access == Access::Read);
    let start = start.as_ptr().cast::<c_void>();
    // SAFETY: the caller passes Python's own request; the call takes a reference to `owner`, which
    // keeps the memory until the buffer is released. It refuses writers of read-only memory.
    let status =
        unsafe { ffi::PyBuffer_FillInfo(view, owner.as_ptr(), start, length, readonly, flags) };
    if status == 0 { Ok(()) } else { Err(PyErr::fetch(owner.py())) }
}

const DLPACK_NAME: &CStr = c"dltensor_versioned";
const DLPACK_MAJOR: u32 = 1;
const DLPACK_READ_ONLY: u64 = 1;
/// `kDLCPU`, device 0.
const DLPACK_DEVICE: (i32, i32) = (1, 0);

/// `DLManagedTensorVersioned` of DLPack 1.0 with one dimension, and what it points to.
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
    // Behind the part that DLPack defines: what the pointers above lead to.
    extent: i64,
    stride: i64,
    owner: Option<Py<PyAny>>,
}

/// A capsule with a read-only array of bytes, which keeps `owner` until its consumer is done.
///
/// # Safety
/// `start` leads to `bytes` bytes that stay mapped and unchanged as long as `owner` lives.
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
    // SAFETY: `tensor` was just made by Box and nobody else has it.
    let shape = unsafe { &raw mut (*tensor).extent };
    // SAFETY: as above.
    let strides = unsafe { &raw mut (*tensor).stride };
    // SAFETY: as above; the box does not move until `delete_tensor`, so the pointers stay right.
    unsafe { (*tensor).shape = shape };
    // SAFETY: as above.
    unsafe { (*tensor).strides = strides };
    let pointer = NonNull::new(tensor.cast()).expect("Box never gives null");
    // SAFETY: the pointer is to a live `ManagedTensor`, which the capsule's destructor frees unless
    // a consumer took it over by renaming the capsule.
    let made = unsafe {
        PyCapsule::new_with_pointer_and_destructor(py, pointer, DLPACK_NAME, Some(drop_capsule))
    };
    if made.is_err() {
        // SAFETY: no capsule was made, so the tensor is still ours alone.
        unsafe { delete_tensor(tensor) };
    }
    made
}

/// Frees a tensor; its consumer calls it once, from any thread.
unsafe extern "C" fn delete_tensor(tensor: *mut ManagedTensor) {
    // SAFETY: the pointer came from `Box::into_raw` in `dlpack`; DLPack lets it be deleted once.
    let mut tensor = unsafe { Box::from_raw(tensor) };
    // A consumer may call this without the interpreter; at its end there is nothing left to free.
    let _gone = Python::try_attach(|_| tensor.owner.take());
}

/// Frees the tensor of a capsule that nobody consumed.
unsafe extern "C" fn drop_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: Python passes the capsule that it is about to free; asking for a name is harmless.
    if unsafe { ffi::PyCapsule_IsValid(capsule, DLPACK_NAME.as_ptr()) } == 0 {
        return; // A consumer renamed it and owns the tensor now.
    }
    // SAFETY: the capsule has this name, so its pointer is the tensor of `dlpack`.
    let tensor = unsafe { ffi::PyCapsule_GetPointer(capsule, DLPACK_NAME.as_ptr()) };
    // SAFETY: nobody consumed the tensor, so this is its only deletion.
    unsafe { delete_tensor(tensor.cast()) };
}
