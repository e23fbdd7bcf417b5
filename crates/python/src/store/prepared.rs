//! A put in two phases: `prepare` reserves memory for the blocks that the store needs; the caller
//! gathers their bytes, page by page and layer by layer, and seals all of them at once.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_store::{PrepareOutcome, Put, PutOutcome, PutSlab};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use super::{PyStore, options};
use crate::arguments::of;
use crate::buffers::in_device_memory;
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
}

enum PreparedBlock {
    Needed(PutSlab),
    Settled(PutOutcome),
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
                    PreparedBlock::Needed(PutSlab {
                        key: put.key,
                        slab,
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
        let unsealed = Unsealed { blocks, gathered: ByteRanges::default() };
        let unsealed = ProcessBound::new(Mutex::new(Some(unsealed)));
        Self { store, needed, block_count, block_bytes, unsealed }
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
        let pages = memory.page_numbers(pages, self.block_count)?;
        let regions = memory.region_range(first, count)?;
        if memory.block_bytes() != self.block_bytes {
            return Err(PyValueError::new_err(format!(
                "memory: its blocks have {1} bytes, but the prepared blocks have {0}",
                self.block_bytes,
                memory.block_bytes()
            )));
        }
        let unsealed = self.unsealed()?;
        py.detach(|| {
            let mut unsealed = lock(unsealed);
            let Unsealed { blocks, gathered } = unsealed.as_mut().ok_or_else(used_up)?;
            for (block, page) in blocks.iter_mut().zip(pages) {
                if let PreparedBlock::Needed(put) = block {
                    let block = put.slab.host_mut().ok_or_else(in_device_memory)?;
                    memory.gather(block, page, regions.clone());
                }
            }
            gathered.add(memory.in_block(&regions));
            Ok(())
        })
    }

    /// Stores the blocks. Returns a `PutResult` for each key, needed or not.
    ///
    /// Raises `ValueError` if bytes of the needed blocks are not gathered; then nothing changes.
    #[pyo3(signature = (*, timeout = None))]
    fn seal(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = of::timeout)] timeout: Option<Duration>,
    ) -> PyResult<Vec<PyPutResult>> {
        let options = options(timeout);
        let store = self.store.get().store()?;
        let unsealed = self.unsealed()?;
        let outcomes = py.detach(|| {
            let mut unsealed = lock(unsealed);
            let current = unsealed.as_ref().ok_or_else(used_up)?;
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
                    PreparedBlock::Needed(put) => {
                        needed.push(put);
                        None
                    }
                    PreparedBlock::Settled(outcome) => Some(outcome),
                });
            }
            let mut sealed = store.put_slabs(needed, options).into_iter();
            let outcome = |settled: Option<PutOutcome>| {
                settled.or_else(|| sealed.next()).expect("every sealed block has an outcome")
            };
            Ok(settled.into_iter().map(outcome).collect::<Vec<_>>())
        })?;
        Ok(outcomes.into_iter().map(PyPutResult::from).collect())
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
