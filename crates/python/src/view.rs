//! The views of one batch: a sequence that creates each `View` only when it is accessed.

use cascade_store::ViewOutcome;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyIterator, PyList, PySlice};

use crate::arguments::{of, position, selected_by};
use crate::buffers::{PyView, in_device_memory};
use crate::errors;
use crate::gpu::{LoadedBlocks, PyGpuEvent, PyGpuLoad, PyGpuMemory, gpu_memory};
use crate::page_table::PageTable;
use crate::paged::{PyPagedMemory, memory};
use crate::process_bound::ProcessBound;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyViews>()
}

/// The views of one batch, in the order of its keys: a sequence of `View` or `None`.
///
/// All blocks stay in the pool until this object is dropped or `release` is called. A `View` from
/// it keeps its block as long as the `View` lives.
#[pyclass(name = "Views", module = "cascadekv", sequence)]
#[derive(Debug)]
pub(crate) struct PyViews(ProcessBound<Vec<ViewOutcome>>);

impl PyViews {
    pub(crate) fn new(outcomes: Vec<ViewOutcome>) -> Self {
        Self(ProcessBound::new(outcomes))
    }

    fn outcomes(&self) -> PyResult<&[ViewOutcome]> {
        Ok(self.0.get("batch of views")?)
    }

    /// Adds the blocks that a GPU is to copy to pages. Misses, and blocks of another length than
    /// the table's, are not copied.
    pub(crate) fn add_to_load(
        &self,
        table: &PageTable,
        pages: &Bound<'_, PyAny>,
        load: &mut LoadedBlocks,
    ) -> PyResult<()> {
        let outcomes = self.outcomes()?;
        let pages = table.target_pages(pages, outcomes.len())?;
        for (outcome, page) in outcomes.iter().zip(pages) {
            let block = match outcome {
                ViewOutcome::Hit { slab, .. } if slab.len() == table.block_bytes() => Some(slab),
                ViewOutcome::Hit { .. } | ViewOutcome::Miss | ViewOutcome::Failed(_) => None,
            };
            load.copied.push(block.is_some());
            if let Some(slab) = block {
                load.blocks.push((slab.clone(), page));
            }
        }
        Ok(())
    }

    fn view(&self, at: usize) -> PyResult<Option<PyView>> {
        Ok(match &self.outcomes()?[at] {
            ViewOutcome::Hit { slab, tier } => Some(PyView::new(slab.clone(), tier)),
            ViewOutcome::Miss | ViewOutcome::Failed(_) => None,
        })
    }
}

#[pymethods]
impl PyViews {
    fn __len__(&self) -> PyResult<usize> {
        Ok(self.outcomes()?.len())
    }

    fn __getitem__<'py>(&self, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let count = self.outcomes()?.len();
        if let Ok(slice) = index.cast::<PySlice>() {
            let views = selected_by(slice, count)?.map(|at| self.view(at));
            let views = views.collect::<PyResult<Vec<_>>>()?;
            return Ok(PyList::new(index.py(), views)?.into_any());
        }
        let view = self.view(position(index, count)?)?;
        Ok(view.into_pyobject(index.py())?.into_any())
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        let views = (0..self.outcomes()?.len()).map(|at| self.view(at));
        PyList::new(py, views.collect::<PyResult<Vec<_>>>()?)?.try_iter()
    }

    /// Number of blocks that were hits.
    #[getter]
    fn hits(&self) -> PyResult<usize> {
        let is_hit = |outcome: &&ViewOutcome| matches!(outcome, ViewOutcome::Hit { .. });
        Ok(self.outcomes()?.iter().filter(is_hit).count())
    }

    /// The exception of the failed block at this position; `None` for a hit or a miss.
    #[pyo3(signature = (index, /))]
    fn error(&self, py: Python<'_>, index: &Bound<'_, PyAny>) -> PyResult<Option<Py<PyAny>>> {
        let outcomes = self.outcomes()?;
        Ok(match &outcomes[position(index, outcomes.len())?] {
            ViewOutcome::Failed(error) => Some(errors::to_python(error).into_value(py).into_any()),
            ViewOutcome::Hit { .. } | ViewOutcome::Miss => None,
        })
    }

    /// Copies view i to page `pages[i]` of an engine's memory: `count` regions from `first` on, all
    /// by default. Returns whether each block was copied.
    ///
    /// Nothing is copied for a miss, or for a block of another size than the memory's blocks.
    /// Several threads may scatter to different pages at once. A page may occur once in `pages`.
    #[pyo3(signature = (memory, pages, *, first = 0, count = None))]
    fn scatter(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = memory)] memory: Bound<'_, PyPagedMemory>,
        pages: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = of::first)] first: usize,
        #[pyo3(from_py_with = of::count)] count: Option<usize>,
    ) -> PyResult<Vec<bool>> {
        let outcomes = self.outcomes()?;
        let memory = memory.get();
        let pages = memory.table().target_pages(pages, outcomes.len())?;
        let regions = memory.table().region_range(first, count)?;
        py.detach(|| {
            let blocks = outcomes.iter().map(|outcome| block_of(outcome, memory.block_bytes()));
            let blocks = blocks.collect::<PyResult<Vec<_>>>()?;
            let batch_bytes =
                blocks.iter().flatten().count() * memory.table().in_block(&regions).len();
            let copy = |(block, page): (Option<&[u8]>, usize)| {
                block.map(|block| memory.scatter(block, page, regions.clone(), batch_bytes))
            };
            Ok(blocks.into_iter().zip(pages).map(|one| copy(one).is_some()).collect())
        })
    }

    /// Starts to copy view i to page `pages[i]` of an engine's memory on a GPU, after the work of a
    /// stream before `after`: `count` regions from `first` on, all by default. Returns the load in
    /// flight; the blocks may be released at once.
    ///
    /// Nothing is copied for a miss, or for a block of another size than the memory's blocks.
    #[pyo3(signature = (memory, pages, *, after, first = 0, count = None))]
    #[expect(clippy::too_many_arguments, reason = "keywords of a Python call")]
    fn start_scatter(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = gpu_memory)] memory: Bound<'_, PyGpuMemory>,
        pages: &Bound<'_, PyAny>,
        after: &Bound<'_, PyGpuEvent>,
        #[pyo3(from_py_with = of::first)] first: usize,
        #[pyo3(from_py_with = of::count)] count: Option<usize>,
    ) -> PyResult<PyGpuLoad> {
        let memory = memory.get();
        let regions = memory.table().region_range(first, count)?;
        let mut loaded = LoadedBlocks::default();
        self.add_to_load(memory.table(), pages, &mut loaded)?;
        memory.start_load(py, loaded, regions, after)
    }

    /// Releases all blocks. The sequence is empty afterwards.
    fn release(&mut self) -> PyResult<()> {
        self.0.get_mut("batch of views")?.clear();
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&mut self, _error: &Bound<'_, PyAny>) -> PyResult<()> {
        self.release()
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("views cannot be pickled; copy each with bytes(view)"))
    }

    fn __repr__(&self) -> PyResult<String> {
        Ok(format!("<Views of {} blocks, {} hits>", self.__len__()?, self.hits()?))
    }
}

/// The block of a view, if its size is `bytes`.
fn block_of(outcome: &ViewOutcome, bytes: usize) -> PyResult<Option<&[u8]>> {
    match outcome {
        ViewOutcome::Hit { slab, .. } if slab.len() == bytes => {
            slab.host().map(Some).ok_or_else(in_device_memory)
        }
        ViewOutcome::Hit { .. } | ViewOutcome::Miss | ViewOutcome::Failed(_) => Ok(None),
    }
}
