//! A put in two phases: `prepare` reserves memory for the blocks that the store needs; the caller
//! gathers their bytes, page by page and layer by layer, and seals all of them at once.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_block::{BlockKey, NamespaceId};
use cascade_memory::SlabMut;
use cascade_runtime::{Deadline, SystemClock};
use cascade_store::{PrepareOutcome, Put, PutOutcome, PutSlab};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use super::{PyStore, options};
use crate::arguments::of;
use crate::buffers::in_device_memory;
use crate::gpu::{PutSave, PyGpuEvent, PyGpuMemory, PyGpuSave, SavedBlocks, gpu_memory};
use crate::page_table::PageTable;
use crate::paged::{PyPagedMemory, memory};
use crate::process_bound::ProcessBound;
use crate::results::PyPutResult;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyPreparedPut>()
}

/// Reserved memory for blocks, from `Store.prepare`: gather their bytes, then seal.
///
/// Memory that is not sealed returns to the pool with `release`, or when this object is dropped.
/// A context manager. Calls from several threads run one after the other.
#[pyclass(name = "PreparedPut", module = "cascadekv", frozen)]
pub(crate) struct PyPreparedPut {
    store: Py<PyStore>,
    needed: Vec<usize>,
    block_count: usize,
    block_bytes: usize,
    /// None after it was sealed or released.
    unsealed: ProcessBound<Mutex<Option<Unsealed>>>,
}

/// The blocks before they are sealed.
struct Unsealed {
    blocks: Vec<PreparedBlock>,
    gathered: ByteRanges,
    /// The copies that a GPU makes now. They have the slabs.
    gpu_save: Option<PutSave>,
}

enum PreparedBlock {
    Needed(NeededBlock),
    Settled(PutOutcome),
}

/// A block whose bytes the store needs.
struct NeededBlock {
    key: BlockKey,
    parent: Option<BlockKey>,
    namespace: NamespaceId,
    is_prefix: bool,
    is_partial: bool,
    ttl_ms: Option<u64>,
    /// None while a GPU writes it, and after a failure of that.
    slab: Option<SlabMut>,
}

impl NeededBlock {
    /// The block to seal; none without its slab.
    fn sealable(self) -> Option<PutSlab> {
        let Self { key, parent, namespace, is_prefix, is_partial, ttl_ms, slab } = self;
        Some(PutSlab { key, slab: slab?, parent, namespace, is_prefix, is_partial, ttl_ms })
    }
}

/// Starts to copy pages of a GPU's memory into the blocks of several puts, in one submission. If
/// the arguments are wrong, nothing changes; if the copies do not start, all puts are released.
pub(crate) fn start_gather(
    py: Python<'_>,
    memory: &PyGpuMemory,
    puts: &[(&PyPreparedPut, Vec<usize>)],
    after: &PyGpuEvent,
) -> PyResult<PyGpuSave> {
    let mut puts: Vec<(&PyPreparedPut, &[usize])> =
        puts.iter().map(|(put, pages)| (*put, pages.as_slice())).collect();
    // All are locked at once, in one order: two calls with the same puts do not wait for each other
    // in a circle.
    puts.sort_by_key(|(put, _)| std::ptr::from_ref(*put).addr());
    if puts.windows(2).any(|pair| std::ptr::eq(pair[0].0, pair[1].0)) {
        return Err(PyValueError::new_err("puts: one occurs twice; a put is gathered once"));
    }
    let mutexes = puts.iter().map(|(put, _)| put.unsealed()).collect::<PyResult<Vec<_>>>()?;
    py.detach(|| {
        let mut locked: Vec<_> = mutexes.into_iter().map(lock).collect();
        for unsealed in &locked {
            unsealed.as_ref().ok_or_else(used_up)?.check_slabs()?;
        }
        // Taken out: an error below releases them.
        let mut taken: Vec<_> = locked.iter_mut().filter_map(|unsealed| unsealed.take()).collect();
        let to_save =
            taken.iter_mut().zip(&puts).map(|(current, (_, pages))| current.take_slabs(pages));
        let to_save = to_save.collect::<PyResult<Vec<_>>>()?;
        let (save, parts) = memory.start_save(to_save, after)?;
        for ((unsealed, mut current), part) in locked.iter_mut().zip(taken).zip(parts) {
            current.gpu_save = part;
            **unsealed = Some(current);
        }
        Ok(save)
    })
}

/// The gathered bytes of each needed block: ranges in order that neither overlap nor touch.
#[derive(Default)]
struct ByteRanges(Vec<Range<usize>>);

impl ByteRanges {
    /// Adds a range, merged with all ranges that it overlaps or touches.
    fn add(&mut self, mut added: Range<usize>) {
        self.0.retain(|range| {
            let touches = range.start <= added.end && added.start <= range.end;
            if touches {
                added = range.start.min(added.start)..range.end.max(added.end);
            }
            !touches
        });
        let at = self.0.partition_point(|range| range.start < added.start);
        self.0.insert(at, added);
    }

    /// The first byte below `bytes` that is in no range.
    fn first_gap(&self, bytes: usize) -> Option<usize> {
        let end = self.0.first().filter(|range| range.start == 0).map_or(0, |range| range.end);
        (end < bytes).then_some(end)
    }
}

impl PyPreparedPut {
    /// The answer of the store to the preparation of `puts` of `block_bytes` bytes each.
    pub(crate) fn new(
        store: Py<PyStore>,
        puts: &[Put<'_>],
        block_bytes: usize,
        prepared: Vec<PrepareOutcome>,
    ) -> Self {
        let mut needed = Vec::new();
        let mut blocks = Vec::with_capacity(puts.len());
        for (at, (put, prepared)) in puts.iter().zip(prepared).enumerate() {
            blocks.push(match prepared {
                PrepareOutcome::Slab(slab) => {
                    needed.push(at);
                    PreparedBlock::Needed(NeededBlock {
                        key: put.key,
                        slab: Some(slab),
                        parent: put.parent,
                        namespace: put.namespace,
                        is_prefix: put.is_prefix,
                        is_partial: put.is_partial,
                        ttl_ms: put.ttl_ms,
                    })
                }
                PrepareOutcome::Settled(outcome) => PreparedBlock::Settled(outcome),
                PrepareOutcome::Compare | PrepareOutcome::Deferred => {
                    unreachable!("a whole batch is decided")
                }
            });
        }
        let block_count = blocks.len();
        let gathered = ByteRanges::default();
        let unsealed = Unsealed { blocks, gathered, gpu_save: None };
        let unsealed = ProcessBound::new(Mutex::new(Some(unsealed)));
        Self { store, needed, block_count, block_bytes, unsealed }
    }

    /// The page of each block, checked for a copy of a GPU.
    pub(crate) fn pages_of(
        &self,
        table: &PageTable,
        pages: &Bound<'_, PyAny>,
    ) -> PyResult<Vec<usize>> {
        table.check_block_bytes(self.block_bytes)?;
        table.page_numbers(pages, self.block_count)
    }

    /// The mutex of the blocks. Lock it only while detached from the interpreter: its holder may be
    /// copying blocks, and other Python threads must run meanwhile.
    fn unsealed(&self) -> PyResult<&Mutex<Option<Unsealed>>> {
        self.unsealed.get("prepared put")
    }
}

fn lock(unsealed: &Mutex<Option<Unsealed>>) -> MutexGuard<'_, Option<Unsealed>> {
    unsealed.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Unsealed {
    fn check_slabs(&self) -> PyResult<()> {
        let is_in_flight = |block: &PreparedBlock| match block {
            PreparedBlock::Needed(block) => block.slab.is_none(),
            PreparedBlock::Settled(_) => false,
        };
        if self.blocks.iter().any(is_in_flight) { Err(in_flight()) } else { Ok(()) }
    }

    /// Takes the slabs of the needed blocks, with the page for each.
    fn take_slabs(&mut self, pages: &[usize]) -> PyResult<SavedBlocks> {
        let mut slabs = Vec::new();
        for (block, page) in self.blocks.iter_mut().zip(pages) {
            if let PreparedBlock::Needed(block) = block {
                let slab = block.slab.take().ok_or_else(in_flight)?;
                slabs.push((slab, *page));
            }
        }
        Ok(slabs)
    }

    /// Waits for the copies of a GPU, and takes their slabs back.
    fn finish_gpu_save(&mut self, timeout: Option<Duration>, block_bytes: usize) -> PyResult<()> {
        let Some(save) = &self.gpu_save else { return Ok(()) };
        let mut slabs = save.wait(timeout)?.into_iter();
        self.gpu_save = None;
        for block in &mut self.blocks {
            if let PreparedBlock::Needed(block) = block {
                block.slab = slabs.next();
            }
        }
        self.gathered.add(0..block_bytes);
        Ok(())
    }
}

fn in_flight() -> PyErr {
    PyValueError::new_err("a GPU is copying these blocks already; seal or release this put")
}

fn used_up() -> PyErr {
    PyValueError::new_err("this put was sealed or released already; prepare another")
}

#[pymethods]
impl PyPreparedPut {
    /// Positions of the keys whose bytes the store needs.
    #[getter]
    fn needed(&self) -> Vec<usize> {
        self.needed.clone()
    }

    /// Copies `count` regions from `first` on, all by default, of page `pages[i]` into block i, for
    /// every needed block. `pages` has a page number for each key.
    #[pyo3(signature = (memory, pages, *, first = 0, count = None))]
    fn gather(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = memory)] memory: Bound<'_, PyPagedMemory>,
        pages: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = of::first)] first: usize,
        #[pyo3(from_py_with = of::count)] count: Option<usize>,
    ) -> PyResult<()> {
        let memory = memory.get();
        let pages = memory.table().page_numbers(pages, self.block_count)?;
        let regions = memory.table().region_range(first, count)?;
        memory.table().check_block_bytes(self.block_bytes)?;
        let unsealed = self.unsealed()?;
        py.detach(|| {
            let mut unsealed = lock(unsealed);
            let Unsealed { blocks, gathered, .. } = unsealed.as_mut().ok_or_else(used_up)?;
            for (block, page) in blocks.iter_mut().zip(pages) {
                if let PreparedBlock::Needed(block) = block {
                    let slab = block.slab.as_mut().ok_or_else(in_flight)?;
                    let bytes = slab.host_mut().ok_or_else(in_device_memory)?;
                    memory.gather(bytes, page, regions.clone());
                }
            }
            gathered.add(memory.table().in_block(&regions));
            Ok(())
        })
    }

    /// Starts to copy page `pages[i]` of an engine's memory on a GPU into block i, for every needed
    /// block, after the work of a stream before `after`. `seal` waits for the copies.
    ///
    /// The pages may be written again once the copies are over: see `hold_back`. If the copies do
    /// not start, the put is released.
    #[pyo3(signature = (memory, pages, *, after))]
    fn start_gather(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = gpu_memory)] memory: Bound<'_, PyGpuMemory>,
        pages: &Bound<'_, PyAny>,
        after: &Bound<'_, PyGpuEvent>,
    ) -> PyResult<()> {
        let memory = memory.get();
        let pages = self.pages_of(memory.table(), pages)?;
        start_gather(py, memory, &[(self, pages)], after.get()).map(drop)
    }

    /// Makes all later work of a stream wait for the copies of `start_gather`, so that it may write
    /// the pages again. If this fails, the put is released, and the copies are over.
    #[pyo3(signature = (stream, /))]
    fn hold_back(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = of::stream)] stream: usize,
    ) -> PyResult<()> {
        let unsealed = self.unsealed()?;
        py.detach(|| {
            let mut unsealed = lock(unsealed);
            let current = unsealed.as_ref().ok_or_else(used_up)?;
            let held = current.gpu_save.as_ref().map_or(Ok(()), |save| save.hold_back(stream));
            held.inspect_err(|_| drop(unsealed.take()))
        })
    }

    /// Stores the blocks. Returns a `PutResult` for each key, needed or not.
    ///
    /// Waits for the copies of `start_gather`; after `DeadlineError` it may be called again. Raises
    /// `ValueError` if bytes of the needed blocks are not gathered; then nothing changes.
    #[pyo3(signature = (*, timeout = None))]
    fn seal(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = of::timeout)] timeout: Option<Duration>,
    ) -> PyResult<Vec<Py<PyPutResult>>> {
        let store = self.store.get().store()?;
        let unsealed = self.unsealed()?;
        let outcomes = py.detach(|| {
            let deadline = timeout.map(|time| Deadline::after(&SystemClock, time));
            let mut unsealed = lock(unsealed);
            let current = unsealed.as_mut().ok_or_else(used_up)?;
            current.finish_gpu_save(timeout, self.block_bytes)?;
            if !self.needed.is_empty()
                && let Some(gap) = current.gathered.first_gap(self.block_bytes)
            {
                let bytes = self.block_bytes;
                let message = format!(
                    "byte {gap} of {bytes} of each needed block was not gathered; gather all \
                     regions before seal"
                );
                return Err(PyValueError::new_err(message));
            }
            let Unsealed { blocks, .. } = unsealed.take().ok_or_else(used_up)?;
            drop(unsealed);
            let mut needed = Vec::with_capacity(self.needed.len());
            // In the order of the keys. None for a needed block: the put below has its outcome.
            let mut settled = Vec::with_capacity(blocks.len());
            for block in blocks {
                settled.push(match block {
                    PreparedBlock::Needed(block) => {
                        needed.push(block.sealable().ok_or_else(in_flight)?);
                        None
                    }
                    PreparedBlock::Settled(outcome) => Some(outcome),
                });
            }
            // What is left of the time.
            let options = options(deadline.map(|deadline| deadline.remaining(&SystemClock)));
            let mut sealed = store.put_slabs(needed, options).into_iter();
            let outcome = |settled: Option<PutOutcome>| {
                settled.or_else(|| sealed.next()).expect("every sealed block has an outcome")
            };
            Ok(settled.into_iter().map(outcome).collect::<Vec<_>>())
        })?;
        PyPutResult::all(py, outcomes)
    }

    /// Releases the memory that was not sealed. Further calls do nothing.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let unsealed = self.unsealed()?;
        py.detach(|| drop(lock(unsealed).take()));
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, py: Python<'_>, _error: &Bound<'_, PyAny>) -> PyResult<()> {
        self.release(py)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a PreparedPut cannot be pickled; seal it in this process"))
    }

    fn __repr__(&self) -> String {
        let (blocks, needed) = (self.block_count, self.needed.len());
        format!("<PreparedPut of {blocks} blocks, {needed} needed>")
    }
}
