//! The views of one batch: a sequence that makes a `View` only of what is looked at.

use cascade_store::ViewOutcome;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyIterator, PyList, PySlice};

use crate::buffers::PyView;
use crate::errors;
use crate::keys::{picked_by, position};
use crate::owned::Owned;

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
        let view = self.view(position(index.extract()?, count)?)?;
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
    fn error(&self, py: Python<'_>, index: isize) -> PyResult<Option<Py<PyAny>>> {
        let outcomes = self.outcomes()?;
        Ok(match &outcomes[position(index, outcomes.len())?] {
            ViewOutcome::Failed(error) => Some(errors::to_python(error).into_value(py).into_any()),
            ViewOutcome::Hit { .. } | ViewOutcome::Miss => None,
        })
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
