//! Copies between blocks of the store and an engine's KV cache in the memory of a GPU.
#![expect(unsafe_code, reason = "takes streams and addresses of other libraries as numbers")]

mod device;
mod saves;

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_block::with_causes;
use cascade_device::{
    Context, CudaError, DeviceFacts, Event, ForeignMemory, Fragment, Pending, Slabs, Stream,
    Transfer,
};
use cascade_memory::{DeviceImporter, DmaBuf, Slab};
use cascade_runtime::{Deadline, SystemClock};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{of, type_error};
use crate::errors::{DeadlineError, GpuError};
use crate::gpu_report::add_counts;
use crate::page_table::{PageTable, RegionSpan};

use device::{Copiers, Device, PoolImporter, WAIT_MAX, Ways};
pub(crate) use saves::{PutSave, PyGpuSave, SavedBlocks};

const ARRAY: &str = "an object with __cuda_array_interface__";

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyGpu>()?;
    module.add_class::<PyGpuEvent>()?;
    module.add_class::<PyGpuMemory>()?;
    module.add_class::<PyGpuSave>()?;
    module.add_class::<PyGpuLoad>()
}

/// A GPU that copies between its memory and the pool of a store.
///
/// Loads the driver at run time. All objects for one index share the pool's registration, which
/// starts with the first copy and goes on in a thread; until then copies go through small buffers.
#[pyclass(name = "Gpu", module = "cascadekv", frozen)]
pub(crate) struct PyGpu {
    device: Arc<Device>,
    ways: Ways,
}

/// The work of a stream up to a point.
#[pyclass(name = "GpuEvent", module = "cascadekv", frozen)]
pub(crate) struct PyGpuEvent(Event);

/// The paged KV cache of an engine in the memory of a GPU: `regions` with the same number of
/// `pages` each.
///
/// A region is a tuple `(array, offset, stride, page_bytes)` as in `PagedMemory`; `array` has
/// `__cuda_array_interface__`, as CUDA tensors have, and is kept alive by this object.
#[pyclass(name = "GpuMemory", module = "cascadekv", frozen)]
pub(crate) struct PyGpuMemory {
    device: Arc<Device>,
    ways: Ways,
    table: PageTable,
    /// The memory of each array.
    arrays: Vec<Arc<ForeignMemory>>,
    /// The array of each region, and where the region's first page is in it.
    places: Vec<(usize, usize)>,
}

/// Blocks on their way to the memory of a GPU.
///
/// If this object is dropped, the blocks stay in the pool until the copies are over.
#[pyclass(name = "GpuLoad", module = "cascadekv", frozen)]
pub(crate) struct PyGpuLoad {
    copied: Vec<bool>,
    /// None if nothing is copied.
    flight: Option<Flight>,
}

/// The blocks of a load with their pages, and for each view whether it is one of them.
#[derive(Default)]
pub(crate) struct LoadedBlocks {
    pub(crate) blocks: Vec<(Slab, usize)>,
    pub(crate) copied: Vec<bool>,
}

/// Copies that were started, and what stops them from being missed.
struct Flight {
    /// Locked only for moments: threads that wait for the copies wait for their end.
    pending: Mutex<Pending<Transfer>>,
    end: Arc<Event>,
    copies: Arc<Copiers>,
    context: Arc<Context>,
}

/// A stream of another library.
fn stream_of(context: &Arc<Context>, number: usize) -> Stream {
    // SAFETY: the classes require that the number is a stream of this GPU that exists during the
    // call. The value ends with the call.
    unsafe { Stream::foreign(context, number) }
}

/// Memory of a GPU that another library allocated, described to RDMA devices.
pub(crate) fn dmabuf_of(
    device: u8,
    address: u64,
    bytes: usize,
    owner: Py<PyAny>,
) -> PyResult<(DmaBuf, Arc<ForeignMemory>)> {
    let described = || {
        let device = Device::open(device.into())?;
        // SAFETY: the Python caller vouches for the memory, as the method's documentation says.
        let memory =
            unsafe { ForeignMemory::new(&device.context, address, bytes, Box::new(owner)) };
        Ok((memory.dmabuf()?, memory))
    };
    described().map_err(|error: CudaError| to_python(&error))
}

#[pymethods]
impl PyGpu {
    #[new]
    #[pyo3(signature = (device, *, ways = String::from("direct")))]
    #[pyo3(text_signature = "(device, *, ways='direct')")]
    fn new(
        py: Python<'_>,
        #[pyo3(from_py_with = of::device)] device: usize,
        #[pyo3(from_py_with = of::ways)] ways: String,
    ) -> PyResult<Self> {
        let ways = Ways::of(&ways)?;
        let device = py.detach(|| Device::open(device)).map_err(|error| to_python(&error))?;
        Ok(Self { device, ways })
    }

    /// The work of a stream so far. `stream` is the number of a stream of this GPU, such as
    /// `torch.cuda.current_stream().cuda_stream`; 0 is the default stream. With `timed` the event
    /// knows when it was reached.
    #[pyo3(signature = (stream, /, *, timed = false))]
    fn mark(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = of::stream)] stream: usize,
        timed: bool,
    ) -> PyResult<PyGpuEvent> {
        let marked = py.detach(|| {
            let stream = stream_of(&self.device.context, stream);
            if timed { stream.record_timed() } else { stream.record() }
        });
        marked.map(PyGpuEvent).map_err(|error| to_python(&error))
    }

    /// The driver, how much of the pool is registered, what was copied, and why the GPU is lost, as
    /// a dict.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let driver = self.device.context.driver();
        let report = PyDict::new(py);
        report.set_item("library", driver.library())?;
        report.set_item("version", driver.version().to_string())?;
        let facts = self.device.facts.as_ref();
        report.set_item("device", facts.map(|facts| &facts.name))?;
        report.set_item("is_fake", facts.is_some_and(DeviceFacts::is_fake))?;
        let registration = self.device.registration();
        let registration = registration.as_ref();
        report.set_item("registered_bytes", registration.map_or(0, |it| it.registered_bytes))?;
        report.set_item("staged_bytes", registration.map_or(0, |it| it.staged_bytes))?;
        let seconds = registration.map_or(0.0, |it| it.took.as_secs_f64());
        report.set_item("registration_seconds", seconds)?;
        report.set_item("is_complete", registration.is_some_and(|it| it.is_complete))?;
        let refusal = registration.and_then(|it| it.refusal.as_ref());
        report.set_item("refusal", refusal.map(|error| with_causes(error)))?;
        report.set_item("uuid", facts.map(|facts| &facts.uuid))?;
        add_counts(&report, &self.device.context)?;
        Ok(report)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a Gpu cannot be pickled; make one in each process"))
    }
}

impl PyGpu {
    /// Maps pools of nodes for this GPU.
    pub(crate) fn importer(&self) -> Arc<dyn DeviceImporter> {
        Arc::new(PoolImporter(Arc::clone(&self.device)))
    }
}

#[pymethods]
impl PyGpuEvent {
    /// Whether the work is over.
    fn is_over(&self, py: Python<'_>) -> PyResult<bool> {
        py.detach(|| self.0.is_over()).map_err(|error| to_python(&error))
    }

    /// Seconds on the GPU from an earlier event to this one. Both are over and were marked with
    /// `timed`; None if one was not, or the driver cannot tell.
    #[pyo3(signature = (earlier, /))]
    fn seconds_since(
        &self,
        py: Python<'_>,
        earlier: &Bound<'_, PyGpuEvent>,
    ) -> PyResult<Option<f64>> {
        let earlier = &earlier.get().0;
        let time = py.detach(|| self.0.time_since(earlier)).map_err(|error| to_python(&error))?;
        Ok(time.map(|time| time.as_secs_f64()))
    }
}

impl PyGpuMemory {
    /// The memory of arrays on a GPU.
    pub(crate) fn open(
        py: Python<'_>,
        gpu: &Bound<'_, PyGpu>,
        regions: &Bound<'_, PyAny>,
        pages: usize,
    ) -> PyResult<Self> {
        let (device, ways) = (Arc::clone(&gpu.get().device), gpu.get().ways);
        let mut spans: Vec<RegionSpan> = Vec::new();
        let mut arrays = Vec::new();
        let mut places = Vec::new();
        let mut span_of = |at: usize, object: &Bound<'_, PyAny>| {
            let span = array_span(at, object)?;
            let known = spans.iter().position(|it| *it == span);
            places.push(known.unwrap_or(spans.len()));
            if known.is_none() {
                let owner = Box::new(object.clone().unbind());
                // SAFETY: the array says that it has this memory, and is kept. The class requires
                // that other work on the pages is ordered with these copies by their events.
                let memory = unsafe {
                    ForeignMemory::new(&device.context, span.address as u64, span.bytes, owner)
                };
                arrays.push(memory);
                spans.push(span);
            }
            Ok(span)
        };
        let table = PageTable::new(py, regions, pages, "array", &mut span_of)?;
        let place =
            |(region, array): (usize, usize)| (array, table.start(region) - spans[array].address);
        let places = places.into_iter().enumerate().map(place).collect();
        Ok(Self { device, ways, table, arrays, places })
    }

    /// The pages as a table.
    pub(crate) fn table(&self) -> &PageTable {
        &self.table
    }

    /// Starts to copy a range of regions of blocks to their pages.
    pub(crate) fn start_load(
        &self,
        py: Python<'_>,
        loaded: LoadedBlocks,
        regions: Range<usize>,
        after: &Bound<'_, PyGpuEvent>,
    ) -> PyResult<PyGpuLoad> {
        let (LoadedBlocks { blocks, copied }, after) = (loaded, after.get());
        if blocks.is_empty() {
            return Ok(PyGpuLoad { copied, flight: None });
        }
        let flight = py.detach(|| {
            let (slabs, pages): (Vec<_>, Vec<_>) = blocks.into_iter().unzip();
            let (copies, slabs) = self.device.slabs_to_load(slabs, self.ways)?;
            let transfer = self.transfer(slabs, &pages, regions);
            let started = copies.loads.submit_timed(transfer, Some(&after.0));
            // Some may have started. The caller will compute the pages instead, so none may still
            // be written when it learns of the error.
            let pending = started.inspect_err(|_| copies.loads.drain())?;
            Ok(Flight::new(pending, copies, &self.device.context))
        });
        let flight = flight.map_err(|error: CudaError| to_python(&error))?;
        Ok(PyGpuLoad { copied, flight: Some(flight) })
    }

    /// The copies of blocks: slab i and page `pages[i]` of each of these regions.
    fn transfer(&self, slabs: Slabs, pages: &[usize], regions: Range<usize>) -> Transfer {
        let mut fragments = Vec::with_capacity(pages.len() * regions.len());
        for (slab, page) in pages.iter().enumerate() {
            for region in regions.clone() {
                let (memory, start) = &self.places[region];
                let place = self.table.page_in_block(region);
                fragments.push(Fragment {
                    slab,
                    slab_offset: place.start,
                    memory: *memory,
                    memory_offset: start + self.table.page_offset(region, *page),
                    bytes: place.len(),
                });
            }
        }
        Transfer { slabs, memory: self.arrays.clone(), fragments }
    }
}

#[pymethods]
impl PyGpuLoad {
    /// Whether each block is copied, in the order of the views.
    #[getter]
    fn copied(&self) -> Vec<bool> {
        self.copied.clone()
    }

    /// Seconds for which the GPU made the copies; None before they are over, without copies, and if
    /// the driver cannot tell.
    #[getter]
    fn seconds(&self, py: Python<'_>) -> PyResult<Option<f64>> {
        let Some(flight) = &self.flight else { return Ok(None) };
        let time = py
            .detach(|| if flight.end.is_over()? { flight.pending().copy_time() } else { Ok(None) });
        Ok(time.map_err(|error| to_python(&error))?.map(|time| time.as_secs_f64()))
    }

    /// Makes all later work of a stream wait for the copies.
    #[pyo3(signature = (stream, /))]
    fn hold_back(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = of::stream)] stream: usize,
    ) -> PyResult<()> {
        let Some(flight) = &self.flight else { return Ok(()) };
        py.detach(|| flight.hold_back(stream)).map_err(|error| to_python(&error))
    }

    /// Whether the copies are over.
    fn is_over(&self, py: Python<'_>) -> PyResult<bool> {
        let Some(flight) = &self.flight else { return Ok(true) };
        py.detach(|| flight.end.is_over()).map_err(|error| to_python(&error))
    }

    /// Waits until the copies are over. `timeout` is a duration; by default 30 seconds.
    #[pyo3(signature = (*, timeout = None))]
    fn wait(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = of::timeout)] timeout: Option<Duration>,
    ) -> PyResult<()> {
        let Some(flight) = &self.flight else { return Ok(()) };
        let deadline = deadline(timeout);
        py.detach(|| flight.wait(deadline).map(drop)).map_err(|error| to_python(&error))
    }
}

impl Flight {
    fn new(pending: Pending<Transfer>, copies: Arc<Copiers>, context: &Arc<Context>) -> Self {
        let end = pending.end().expect("copies that were submitted have an end");
        Self { pending: Mutex::new(pending), end, copies, context: Arc::clone(context) }
    }

    fn pending(&self) -> MutexGuard<'_, Pending<Transfer>> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the copies and gives back what they used; the second call gives back nothing.
    fn wait(&self, deadline: Deadline) -> Result<Option<Transfer>, CudaError> {
        self.end.wait(deadline)?;
        self.pending().wait(deadline)
    }

    /// Makes a stream wait. If that fails, waits here: then nothing is in flight any more.
    fn hold_back(&self, stream: usize) -> Result<(), CudaError> {
        let held = stream_of(&self.context, stream).wait_for(&self.end);
        held.inspect_err(|_| {
            self.copies.loads.drain();
            self.copies.saves.drain();
        })
    }
}

fn deadline(timeout: Option<Duration>) -> Deadline {
    Deadline::after(&SystemClock, timeout.unwrap_or(WAIT_MAX))
}

/// The memory of an array, by the protocol of CUDA arrays (version 2 or later).
fn array_span(at: usize, object: &Bound<'_, PyAny>) -> PyResult<RegionSpan> {
    let wrong = || type_error(format_args!("regions[{at}][0]"), object, ARRAY);
    let interface = object.getattr("__cuda_array_interface__").map_err(|_| wrong())?;
    let (address, is_read_only): (usize, bool) =
        interface.get_item("data").and_then(|data| data.extract()).map_err(|_| wrong())?;
    let shape: Vec<usize> =
        interface.get_item("shape").and_then(|shape| shape.extract()).map_err(|_| wrong())?;
    let kind: String =
        interface.get_item("typestr").and_then(|kind| kind.extract()).map_err(|_| wrong())?;
    let item: usize = kind.get(2..).and_then(|bytes| bytes.parse().ok()).ok_or_else(wrong)?;
    if is_read_only {
        let message = format!("regions[{at}] is read-only; give a writable array");
        return Err(PyValueError::new_err(message));
    }
    let bytes = shape.iter().try_fold(item, |bytes, count| bytes.checked_mul(*count));
    let bytes = bytes.ok_or_else(wrong)?;
    let strides = interface.get_item("strides").ok().filter(|strides| !strides.is_none());
    let strides: Option<Vec<usize>> =
        strides.map(|strides| strides.extract()).transpose().map_err(|_| wrong())?;
    if strides.is_some_and(|strides| strides != contiguous(&shape, item)) {
        let message = format!("regions[{at}] is not C-contiguous; give its whole storage");
        return Err(PyValueError::new_err(message));
    }
    Ok(RegionSpan { address, bytes })
}

/// The strides of a C-contiguous array.
fn contiguous(shape: &[usize], item: usize) -> Vec<usize> {
    let mut strides = vec![item; shape.len()];
    for at in (1..shape.len()).rev() {
        strides[at - 1] = strides[at].saturating_mul(shape[at]);
    }
    strides
}

/// The exception for an error. Its message includes those of the causes.
fn to_python(error: &CudaError) -> PyErr {
    exception(error, with_causes(error))
}

fn exception(error: &CudaError, message: String) -> PyErr {
    match error {
        CudaError::TimedOut { .. } => DeadlineError::new_err(message),
        _ => GpuError::new_err(message),
    }
}

/// An engine's memory on a GPU.
pub(crate) fn gpu_memory<'py>(given: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyGpuMemory>> {
    let memory = given.cast::<PyGpuMemory>();
    memory.cloned().map_err(|_| type_error("memory", given, "a GpuMemory"))
}
