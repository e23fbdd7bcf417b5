//! Copies between blocks of the store and an engine's KV cache in the memory of a GPU.
#![expect(unsafe_code, reason = "takes streams and addresses of other libraries as numbers")]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use cascade_block::with_causes;
use cascade_device::{
    Context, Copier, CudaError, DeviceFacts, Driver, DriverReport, Event, ForeignMemory, Fragment,
    Pending, RegisteredPool, RegistrationReport, Slabs, Stream, Transfer,
};
use cascade_memory::{BackingMemory, HostSlab, HostSlabMut};
use cascade_runtime::{Deadline, SystemClock};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::{of, type_error};
use crate::errors::{DeadlineError, GpuError};
use crate::gpu_report::add_counts;
use crate::page_table::{PageTable, RegionSpan};

/// The longest that work of ours on a GPU may take before the GPU counts as lost.
const WAIT_MAX: Duration = Duration::from_secs(30);
/// Pools are registered in pieces of this length: a tenth of a second each, by others' figures.
const PIECE_BYTES: usize = 1 << 30;
const ARRAY: &str = "an object with __cuda_array_interface__";

/// The GPUs in use, by index. A pool can be registered once in a process, so all users of a GPU
/// share its copiers.
static IN_USE: Mutex<BTreeMap<usize, Weak<Device>>> = Mutex::new(BTreeMap::new());

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyGpu>()?;
    module.add_class::<PyGpuEvent>()?;
    module.add_class::<PyGpuMemory>()?;
    module.add_class::<PyGpuLoad>()
}

/// A GPU that copies between its memory and the pool of a store.
///
/// Loads the driver at run time. All objects for one index share the pool's registration, which
/// starts with the first copy and goes on in a thread; until then copies go through small buffers.
#[pyclass(name = "Gpu", module = "cascadekv", frozen)]
pub(crate) struct PyGpu(Arc<Device>);

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
    flight: Option<Mutex<Flight>>,
}

/// Blocks on their way from the memory of a GPU.
pub(crate) struct GpuSave(Flight);

/// Copies that were started, and what stops them from being missed.
struct Flight {
    pending: Pending<Transfer>,
    copies: Arc<PoolCopies>,
    context: Arc<Context>,
}

/// A GPU that this process uses.
#[derive(Debug)]
struct Device {
    context: Arc<Context>,
    facts: Option<DeviceFacts>,
    /// Of the last pool that was used.
    copies: Mutex<Option<Arc<PoolCopies>>>,
}

/// The copiers of a pool: one for each direction, since GPUs copy both ways at once.
#[derive(Debug)]
struct PoolCopies {
    backing: BackingMemory,
    registered: Arc<RegisteredPool>,
    loads: Copier,
    saves: Copier,
}

impl Device {
    fn open(index: usize) -> Result<Arc<Self>, CudaError> {
        let mut in_use = IN_USE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = in_use.get(&index).and_then(Weak::upgrade) {
            return Ok(device);
        }
        let driver = Driver::load()?;
        let context = Context::retain(&driver, index, Arc::new(SystemClock), WAIT_MAX)?;
        let facts = DriverReport::of(&driver)?.devices.into_iter().nth(index);
        let device = Arc::new(Self { context, facts, copies: Mutex::default() });
        in_use.insert(index, Arc::downgrade(&device));
        Ok(device)
    }

    /// The copiers of a pool. Those of another pool end with their last copy.
    fn copies(&self, backing: &BackingMemory) -> Result<Arc<PoolCopies>, CudaError> {
        let mut current = self.lock();
        if let Some(copies) = current.as_ref().filter(|copies| copies.backing.is_same(backing)) {
            return Ok(Arc::clone(copies));
        }
        let memory = Arc::new(backing.clone());
        let registered = RegisteredPool::begin(&self.context, memory, PIECE_BYTES)?;
        let copier = || Copier::new(&self.context, Arc::clone(&registered));
        let (loads, saves) = (copier()?, copier()?);
        let backing = backing.clone();
        let copies = Arc::new(PoolCopies { backing, registered, loads, saves });
        *current = Some(Arc::clone(&copies));
        Ok(copies)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<PoolCopies>>> {
        self.copies.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn registration(&self) -> Option<RegistrationReport> {
        self.lock().as_ref().map(|copies| copies.registered.report())
    }
}

/// A stream of another library.
fn stream_of(context: &Arc<Context>, number: usize) -> Stream {
    // SAFETY: the classes require that the number is a stream of this GPU that exists during the
    // call. The value ends with the call.
    unsafe { Stream::foreign(context, number) }
}

#[pymethods]
impl PyGpu {
    #[new]
    fn new(py: Python<'_>, #[pyo3(from_py_with = of::device)] device: usize) -> PyResult<Self> {
        py.detach(|| Device::open(device)).map(Self).map_err(|error| to_python(&error))
    }

    /// The work of a stream so far. `stream` is the number of a stream of this GPU, such as
    /// `torch.cuda.current_stream().cuda_stream`; 0 is the default stream.
    #[pyo3(signature = (stream, /))]
    fn mark(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = of::stream)] stream: usize,
    ) -> PyResult<PyGpuEvent> {
        let context = &self.0.context;
        let marked = py.detach(|| stream_of(context, stream).record());
        marked.map(PyGpuEvent).map_err(|error| to_python(&error))
    }

    /// The driver, how much of the pool is registered, what was copied, and why the GPU is lost, as
    /// a dict.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let driver = self.0.context.driver();
        let report = PyDict::new(py);
        report.set_item("library", driver.library())?;
        report.set_item("version", driver.version().to_string())?;
        let facts = self.0.facts.as_ref();
        report.set_item("device", facts.map(|facts| &facts.name))?;
        report.set_item("is_fake", facts.is_some_and(DeviceFacts::is_fake))?;
        let registration = self.0.registration();
        let registration = registration.as_ref();
        report.set_item("registered_bytes", registration.map_or(0, |it| it.registered_bytes))?;
        report.set_item("staged_bytes", registration.map_or(0, |it| it.staged_bytes))?;
        let seconds = registration.map_or(0.0, |it| it.took.as_secs_f64());
        report.set_item("registration_seconds", seconds)?;
        report.set_item("is_complete", registration.is_some_and(|it| it.is_complete))?;
        let refusal = registration.and_then(|it| it.refusal.as_ref());
        report.set_item("refusal", refusal.map(|error| with_causes(error)))?;
        report.set_item("uuid", facts.map(|facts| &facts.uuid))?;
        add_counts(&report, &self.0.context)?;
        Ok(report)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a Gpu cannot be pickled; make one in each process"))
    }
}

#[pymethods]
impl PyGpuEvent {
    /// Whether the work is over.
    fn is_over(&self, py: Python<'_>) -> PyResult<bool> {
        py.detach(|| self.0.is_over()).map_err(|error| to_python(&error))
    }
}

#[pymethods]
impl PyGpuMemory {
    #[new]
    fn new(
        py: Python<'_>,
        gpu: &Bound<'_, PyGpu>,
        regions: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = of::pages)] pages: usize,
    ) -> PyResult<Self> {
        let device = Arc::clone(&gpu.get().0);
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
        Ok(Self { device, table, arrays, places })
    }

    /// Bytes of a block: the sum of one page of each region.
    #[getter]
    fn block_bytes(&self) -> usize {
        self.table.block_bytes()
    }

    /// Number of pages of each region.
    #[getter]
    fn pages(&self) -> usize {
        self.table.pages()
    }

    /// Number of regions.
    #[getter]
    fn regions(&self) -> usize {
        self.table.region_count()
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a GpuMemory cannot be pickled; make one in each process"))
    }

    fn __repr__(&self) -> String {
        let (regions, pages, bytes) = (self.regions(), self.pages(), self.block_bytes());
        format!("<GpuMemory of {pages} pages in {regions} regions, {bytes} bytes per block>")
    }
}

impl PyGpuMemory {
    /// The pages as a table.
    pub(crate) fn table(&self) -> &PageTable {
        &self.table
    }

    /// Starts to copy a range of regions of blocks to their pages.
    pub(crate) fn start_load(
        &self,
        py: Python<'_>,
        blocks: Vec<(HostSlab, usize)>,
        regions: Range<usize>,
        after: &PyGpuEvent,
        copied: Vec<bool>,
    ) -> PyResult<PyGpuLoad> {
        let Some((first, _)) = blocks.first() else {
            return Ok(PyGpuLoad { copied, flight: None });
        };
        let backing = first.backing();
        let flight = py.detach(|| {
            let copies = self.device.copies(&backing)?;
            let (slabs, pages): (Vec<_>, Vec<_>) = blocks.into_iter().unzip();
            let transfer = self.transfer(Slabs::ToDevice(slabs), &pages, regions);
            let started = copies.loads.submit_transfer(transfer, Some(&after.0));
            // Some may have started. The caller will compute the pages instead, so none may still
            // be written when it learns of the error.
            let pending = started.inspect_err(|_| copies.loads.drain())?;
            let context = Arc::clone(&self.device.context);
            Ok(Flight { pending, copies, context })
        });
        let flight = flight.map_err(|error: CudaError| to_python(&error))?;
        Ok(PyGpuLoad { copied, flight: Some(Mutex::new(flight)) })
    }

    /// Starts to copy pages to slabs. The slabs are freed if it fails.
    pub(crate) fn start_save(
        &self,
        blocks: Vec<(HostSlabMut, usize)>,
        after: &PyGpuEvent,
    ) -> PyResult<Option<GpuSave>> {
        let Some(backing) = blocks.first().map(|(slab, _)| slab.backing()) else {
            return Ok(None);
        };
        let started = || {
            let copies = self.device.copies(&backing)?;
            let (slabs, pages): (Vec<_>, Vec<_>) = blocks.into_iter().unzip();
            let transfer = self.transfer(Slabs::ToHost(slabs), &pages, 0..self.places.len());
            let pending = copies.saves.submit_transfer(transfer, Some(&after.0))?;
            let context = Arc::clone(&self.device.context);
            Ok(Some(GpuSave(Flight { pending, copies, context })))
        };
        started().map_err(|error: CudaError| to_python(&error))
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

    /// Makes all later work of a stream wait for the copies.
    #[pyo3(signature = (stream, /))]
    fn hold_back(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = of::stream)] stream: usize,
    ) -> PyResult<()> {
        let Some(flight) = &self.flight else { return Ok(()) };
        py.detach(|| lock(flight).hold_back(stream)).map_err(|error| to_python(&error))
    }

    /// Whether the copies are over.
    fn is_over(&self, py: Python<'_>) -> PyResult<bool> {
        let Some(flight) = &self.flight else { return Ok(true) };
        py.detach(|| lock(flight).pending.is_over()).map_err(|error| to_python(&error))
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
        let waited = py.detach(|| lock(flight).pending.wait(deadline).map(drop));
        waited.map_err(|error| to_python(&error))
    }
}

impl Flight {
    /// Makes a stream wait. If that fails, waits here: then nothing is in flight any more.
    fn hold_back(&mut self, stream: usize) -> Result<(), CudaError> {
        let held = self.pending.hold_back(&stream_of(&self.context, stream));
        held.inspect_err(|_| {
            self.copies.loads.drain();
            self.copies.saves.drain();
        })
    }
}

impl GpuSave {
    /// Makes all later work of a stream wait for the copies.
    pub(crate) fn hold_back(&mut self, stream: usize) -> PyResult<()> {
        self.0.hold_back(stream).map_err(|error| to_python(&error))
    }

    /// Waits for the copies and gives back the slabs, in the order in which they were given. None
    /// if that was done before.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>) -> PyResult<Vec<HostSlabMut>> {
        let transfer = self.0.pending.wait(deadline(timeout)).map_err(|error| to_python(&error))?;
        Ok(match transfer.map(|transfer| transfer.slabs) {
            Some(Slabs::ToHost(slabs)) => slabs,
            Some(Slabs::ToDevice(_)) | None => Vec::new(),
        })
    }
}

fn lock(flight: &Mutex<Flight>) -> MutexGuard<'_, Flight> {
    flight.lock().unwrap_or_else(PoisonError::into_inner)
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
    let message = with_causes(error);
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
