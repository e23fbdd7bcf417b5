//! A put in two phases: the store says which blocks it wants, the caller fills them in, page by
//! page and layer by layer, and seals all at once.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cascade_store::{Prepared, Put, PutOutcome, PutSlab};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::arguments::{self, of};
use crate::owned::Owned;
use crate::paged::PyPagedMemory;
use crate::results::PyPutResult;
use crate::store::{PyStore, options};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyPreparedPut>()
}

/// Blocks that the store has memory for, from `Store.prepare`: gather their bytes, then seal.
///
/// What is not sealed goes back to the store with `release`, or with this object. A context
/// manager. Calls from several threads take turns.
#[pyclass(name = "PreparedPut", module = "cascadekv", frozen)]
pub(crate) struct PyPreparedPut {
    store: Py<PyStore>,
    needed: Vec<usize>,
    block_count: usize,
    block_bytes: usize,
    /// Nothing once it was sealed or released.
    open: Owned<Mutex<Option<Open>>>,
}

struct Open {
    blocks: Vec<Block>,
    gathered: Pieces,
}

enum Block {
    Needed(PutSlab),
    Settled(PutOutcome),
}

/// Which bytes of each needed block were gathered: pieces in order that do not touch.
#[derive(Default)]
struct Pieces(Vec<Range<usize>>);

impl Pieces {
    fn add(&mut self, mut piece: Range<usize>) {
        self.0.retain(|known| {
            let touches = known.start <= piece.end && piece.start <= known.end;
            if touches {
                piece = known.start.min(piece.start)..known.end.max(piece.end);
            }
            !touches
        });
        let at = self.0.partition_point(|known| known.start < piece.start);
        self.0.insert(at, piece);
    }

    /// The first byte of so many that is in no piece.
    fn first_gap(&self, bytes: usize) -> Option<usize> {
        let reached = self.0.first().filter(|piece| piece.start == 0).map_or(0, |piece| piece.end);
        (reached < bytes).then_some(reached)
    }
}

impl PyPreparedPut {
    /// What the store said to `puts` of `block_bytes` bytes each.
    pub(crate) fn new(
        store: Py<PyStore>,
        puts: &[Put<'_>],
        block_bytes: usize,
        prepared: Vec<Prepared>,
    ) -> Self {
        let mut needed = Vec::new();
        let mut blocks = Vec::with_capacity(puts.len());
        for (at, (put, prepared)) in puts.iter().zip(prepared).enumerate() {
            blocks.push(match prepared {
                Prepared::Slab(slab) => {
                    needed.push(at);
                    Block::Needed(PutSlab {
                        key: put.key,
                        slab,
                        parent: put.parent,
                        namespace: put.namespace,
                        is_prefix: put.is_prefix,
                        is_partial: put.is_partial,
                        ttl_ms: put.ttl_ms,
                    })
                }
                Prepared::Settled(outcome) => Block::Settled(outcome),
                Prepared::Compare | Prepared::Later => unreachable!("a whole batch is decided"),
            });
        }
        let block_count = blocks.len();
        let open = Open { blocks, gathered: Pieces::default() };
        let open = Owned::new(Mutex::new(Some(open)));
        Self { store, needed, block_count, block_bytes, open }
    }

    /// To be locked with the interpreter free: who has it may be copying.
    fn open(&self) -> PyResult<&Mutex<Option<Open>>> {
        self.open.get("prepared put")
    }
}

fn lock(open: &Mutex<Option<Open>>) -> MutexGuard<'_, Option<Open>> {
    open.lock().unwrap_or_else(PoisonError::into_inner)
}

fn used_up() -> PyErr {
    PyValueError::new_err("this put was sealed or released already; prepare another")
}

#[pymethods]
impl PyPreparedPut {
    /// Positions of the keys whose bytes the store wants.
    #[getter]
    fn needed(&self) -> Vec<usize> {
        self.needed.clone()
    }

    /// Copies `count` regions from `first` on, all by default, of page `pages[i]` into block i, for
    /// every block that is needed. `pages` names a page for each key.
    #[pyo3(signature = (memory, pages, *, first = 0, count = None))]
    fn gather(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::memory)] memory: Bound<'_, PyPagedMemory>,
        pages: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = of::first)] first: usize,
        #[pyo3(from_py_with = of::count)] count: Option<usize>,
    ) -> PyResult<()> {
        let memory = memory.get();
        let pages = memory.page_numbers(pages, self.block_count)?;
        let regions = memory.some_regions(first, count)?;
        if memory.block_bytes() != self.block_bytes {
            return Err(PyValueError::new_err(format!(
                "memory: its blocks have {1} bytes, but blocks of {0} bytes were prepared",
                self.block_bytes,
                memory.block_bytes()
            )));
        }
        let open = self.open()?;
        py.detach(|| {
            let mut open = lock(open);
            let Open { blocks, gathered } = open.as_mut().ok_or_else(used_up)?;
            for (block, page) in blocks.iter_mut().zip(pages) {
                if let Block::Needed(put) = block {
                    memory.gather(&mut put.slab, page, regions.clone());
                }
            }
            gathered.add(memory.in_block(&regions));
            Ok(())
        })
    }

    /// Stores the blocks. Returns a `PutResult` for each key, needed or not.
    ///
    /// Raises `ValueError`, and changes nothing, while bytes of the needed blocks are missing.
    #[pyo3(signature = (*, timeout = None))]
    fn seal(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = of::timeout)] timeout: Option<Duration>,
    ) -> PyResult<Vec<PyPutResult>> {
        let options = options(timeout);
        let store = self.store.get().store()?;
        let open = self.open()?;
        let outcomes = py.detach(|| {
            let mut open = lock(open);
            let known = open.as_ref().ok_or_else(used_up)?;
            if !self.needed.is_empty()
                && let Some(gap) = known.gathered.first_gap(self.block_bytes)
            {
                let bytes = self.block_bytes;
                let told = format!("byte {gap} of {bytes} of each needed block was not gathered");
                return Err(PyValueError::new_err(told));
            }
            let Open { blocks, .. } = open.take().ok_or_else(used_up)?;
            drop(open);
            let mut sealed = Vec::with_capacity(self.needed.len());
            let mut known = Vec::with_capacity(blocks.len());
            for block in blocks {
                known.push(match block {
                    Block::Needed(put) => {
                        sealed.push(put);
                        None
                    }
                    Block::Settled(outcome) => Some(outcome),
                });
            }
            let mut sealed = store.put_slabs(sealed, options).into_iter();
            let outcome = |known: Option<PutOutcome>| {
                known.or_else(|| sealed.next()).expect("every sealed block has an outcome")
            };
            Ok(known.into_iter().map(outcome).collect::<Vec<_>>())
        })?;
        Ok(outcomes.into_iter().map(PyPutResult::from).collect())
    }

    /// Gives everything back that was not sealed. May be repeated.
    fn release(&self, py: Python<'_>) -> PyResult<()> {
        let open = self.open()?;
        py.detach(|| drop(lock(open).take()));
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
        Err(PyTypeError::new_err("a PreparedPut cannot be pickled"))
    }

    fn __repr__(&self) -> String {
        let (blocks, needed) = (self.block_count, self.needed.len());
        format!("<PreparedPut of {blocks} blocks, {needed} needed>")
    }
}
