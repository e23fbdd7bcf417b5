//! The views of one batch: a sequence that makes a `View` only of what is looked at.

use cascade_memory::Slab;
use cascade_store::ViewOutcome;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyIterator, PyList, PySlice};

use crate::arguments::{self, of, picked_by, position};
use crate::buffers::PyView;
use crate::errors;
use crate::owned::Owned;
use crate::paged::PyPagedMemory;

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyViews>()
}

/// The views of one batch, in the order of its keys: a sequence of `View` or `None`.
///
/// All blocks stay in the pool until this object goes or `release` is called; a `View` taken from
/// it keeps its own block for as long as it lives.
#[pyclass(name = "Views", module = "cascadekv", sequence)]
#[derive(Debug)]
pub(crate) struct PyViews(Owned<Vec<ViewOutcome>>);

impl PyViews {
    pub(crate) fn new(outcomes: Vec<ViewOutcome>) -> Self {
        Self(Owned::new(outcomes))
    }

    fn outcomes(&self) -> PyResult<&[ViewOutcome]> {
        Ok(self.0.get("batch of views")?)
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
            let views = picked_by(slice, count)?.map(|at| self.view(at));
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

    /// Blocks that were found.
    #[getter]
    fn hits(&self) -> PyResult<usize> {
        let is_hit = |outcome: &&ViewOutcome| matches!(outcome, ViewOutcome::Hit { .. });
        Ok(self.outcomes()?.iter().filter(is_hit).count())
    }

    /// Why the block at this position failed; `None` for a hit and for a plain miss.
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
    /// It is not, in no byte, where the view is a miss or the block has another length than the
    /// memory's blocks. Threads may scatter at once to different pages; a page twice in one call is
    /// refused.
    #[pyo3(signature = (memory, pages, *, first = 0, count = None))]
    fn scatter(
        &self,
        py: Python<'_>,
        #[pyo3(from_py_with = arguments::memory)] memory: Bound<'_, PyPagedMemory>,
        pages: &Bound<'_, PyAny>,
        #[pyo3(from_py_with = of::first)] first: usize,
        #[pyo3(from_py_with = of::count)] count: Option<usize>,
    ) -> PyResult<Vec<bool>> {
        let outcomes = self.outcomes()?;
        let memory = memory.get();
        let pages = memory.page_numbers(pages, outcomes.len())?;
        let regions = memory.some_regions(first, count)?;
        let mut sorted = pages.clone();
        sorted.sort_unstable();
        if let Some([twice, ..]) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            let told = format!("pages: {twice} is there twice; a page holds one block");
            return Err(PyValueError::new_err(told));
        }
        Ok(py.detach(|| {
            let blocks: Vec<_> =
                outcomes.iter().map(|outcome| block_of(outcome, memory.block_bytes())).collect();
            let batch_bytes = blocks.iter().flatten().count() * memory.in_block(&regions).len();
            let copy = |(block, page): (Option<&Slab>, usize)| {
                block.map(|block| memory.scatter(block, page, regions.clone(), batch_bytes))
            };
            blocks.into_iter().zip(pages).map(|one| copy(one).is_some()).collect()
        }))
    }

    /// Lets go of every block now; the sequence is empty afterwards.
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

/// The block of a view, if it has that many bytes.
fn block_of(outcome: &ViewOutcome, bytes: usize) -> Option<&Slab> {
    match outcome {
        ViewOutcome::Hit { slab, .. } => Some(slab).filter(|slab| slab.len() == bytes),
        ViewOutcome::Miss | ViewOutcome::Failed(_) => None,
    }
}
